// Families and presets of `weft synth`.
#include <fmt/ranges.h>

#include <functional>
#include <utility>

#include "app/synth.h"
#include "base/check.h"
#include "model/arch.h"

namespace weft {
namespace {

using Change = void (*)(SynthSpec&);

void kda(SynthSpec& s) {
  s.kda_head_dim = 128, s.full_every = 4;
}

void indexer(SynthSpec& s) {
  s.index_heads = 16, s.index_dim = 128, s.index_topk = 512;
}

void kimi_linear(SynthSpec& s) {
  kda(s);
}

void kimi_k3(SynthSpec& s) {
  kda(s);
  s.q_lora = 512, s.latent = 512, s.attn_res_block = 4;
}

void kimi_k31(SynthSpec& s) {
  kimi_k3(s);
  indexer(s);
}

void glm5_next(SynthSpec& s) {
  kda(s);
  indexer(s);
  s.q_lora = 512, s.rope = 0, s.hc_streams = 4, s.index_pool = 4;
}

void glm_moe_dsa(SynthSpec& s) {
  indexer(s);
  s.q_lora = 512, s.full_every = 1, s.index_every = 1, s.max_positions = 202752;
}

void deepseek_v32(SynthSpec& s) {
  indexer(s);
  s.q_lora = 512, s.full_every = 1, s.max_positions = 163840, s.groups = 8, s.top_groups = 4;
}

const std::vector<std::pair<std::string, Change>>& families() {
  static const std::vector<std::pair<std::string, Change>> kFamilies = {
      {"kimi_linear", kimi_linear}, {"kimi_k3", kimi_k3},         {"kimi_k31", kimi_k31},
      {"glm5_next", glm5_next},     {"glm_moe_dsa", glm_moe_dsa}, {"deepseek_v32", deepseek_v32}};
  return kFamilies;
}

// The released sizes with few layers and few of the experts.
void real_kimi_k31(SynthSpec& s) {
  s.format = SynthFormat::mxfp4, s.routed_scale = 1;
  s.vocab = 163840, s.hidden = 7168, s.layers = 4, s.heads = 96, s.q_lora = 1536, s.attn_res_block = 12;
  s.index_heads = 32, s.index_topk = 2048, s.intermediate = 33792;
  s.experts = 16, s.expert_width = 3072, s.shared_experts = 2, s.latent = 3584;
}

void real_glm5_next(SynthSpec& s) {
  s.format = SynthFormat::fp8;
  s.vocab = 154880, s.hidden = 4096, s.layers = 4, s.heads = 64, s.q_lora = 1536, s.nope = s.v = 256;
  s.index_heads = 32, s.index_topk = 2048, s.intermediate = 12288, s.experts = 16, s.expert_width = 2048;
}

struct Preset {
  std::string name, family;
  Change change;
};

const std::vector<Preset>& presets() {
  static const Change kNone = [](SynthSpec&) {};
  static const std::vector<Preset> kPresets = {
      {"bench-kimi-linear", "kimi_linear", kNone},
      {"bench-glm5-next", "glm5_next", kNone},
      {"bench-kimi-k3", "kimi_k3", kNone},
      {"bench-kimi-k31", "kimi_k31", kNone},
      {"bench-glm-dsa", "glm_moe_dsa", kNone},
      {"bench-glm-dsa-l2", "glm_moe_dsa", [](SynthSpec& s) { s.layers = 2; }},
      {"real-kimi-k31", "kimi_k31", real_kimi_k31},
      {"real-glm5-next", "glm5_next", real_glm5_next}};
  return kPresets;
}

void check_format(const SynthSpec& s) {
  if (s.format == SynthFormat::mxfp4 && !s.k3())
    usage("--dtype mxfp4: {} is not released in it, only kimi_k3 and kimi_k31 are", s.family);
  if (s.format == SynthFormat::fp8 && s.kimi())
    usage("--dtype fp8: {} is not released in it, only glm5_next, glm_moe_dsa and deepseek_v32 are",
          s.family);
  if (s.format == SynthFormat::mxfp4 && (s.expert_width % 32 || s.latent % 32))
    usage("--dtype mxfp4: --expert-width {} and --latent {} must be multiples of 32", s.expert_width,
          s.latent);
}

}  // namespace

bool SynthSpec::full(int layer) const {
  if (kimi() && layer == layers - 1 && layers > 1) return true;
  return layer % full_every == full_every - 1;
}

bool SynthSpec::owns_indexer(int layer) const {
  if (index_heads == 0 || !full(layer)) return false;
  return index_every <= 1 || std::max(layer - 1, 0) % index_every == 0;  // index_skip_topk_offset 2
}

std::vector<std::string> synth_families() {
  std::vector<std::string> names;
  for (const auto& [name, change] : families()) names.push_back(name);
  return names;
}

std::vector<std::string> synth_presets() {
  std::vector<std::string> names;
  for (const Preset& preset : presets()) names.push_back(preset.name);
  return names;
}

SynthSpec synth_defaults(const std::string& family) {
  for (const auto& [name, change] : families())
    if (name == family) {
      SynthSpec spec;
      spec.family = name;
      change(spec);
      return spec;
    }
  usage("no family \"{}\"; families: {}", family, fmt::join(synth_families(), ", "));
}

SynthSpec synth_preset(const std::string& name) {
  for (const Preset& preset : presets())
    if (preset.name == name) {
      SynthSpec spec = synth_defaults(preset.family);
      preset.change(spec);
      return spec;
    }
  usage("--preset \"{}\": no such preset; presets: {}", name, fmt::join(synth_presets(), ", "));
}

SynthFormat synth_format(const std::string& name) {
  if (name == "bf16") return SynthFormat::bf16;
  if (name == "fp8") return SynthFormat::fp8;
  if (name == "mxfp4") return SynthFormat::mxfp4;
  usage("--dtype \"{}\": expected bf16, fp8 or mxfp4", name);
}

void check_synth(const SynthSpec& spec) {
  check_format(spec);
  if (spec.full_every < 1) usage("--full-every {}: expected 1 or more", spec.full_every);
  if (spec.dense_layers > spec.layers)
    usage("--dense-layers {}: more than --layers {}", spec.dense_layers, spec.layers);
  const Json config = synth_config(spec);
  try {
    find_arch(config, "config.json", nullptr).read(config, "config.json", nullptr);
  } catch (const UsageError&) {
    throw;
  } catch (const Error& error) {
    usage("no model of this kind can have these sizes: {}", error.what());
  }
}

}  // namespace weft
