// weft synth: released names, shapes and values; same bytes for the same seed.
#include <cmath>
#include <regex>
#include <set>

#include "app/synth_fill.h"
#include "base/quantize.h"
#include "engine/batch.h"
#include "kernels/dispatch.h"
#include "model/model.h"
#include "tools_support.h"

namespace weft {
namespace {

using namespace test;

// shape and dtype of every tensor, whatever its layer
std::set<std::string> kinds(const std::string& name, const char* dtype, const std::vector<int64_t>& shape) {
  return {std::regex_replace(name, std::regex("(layers|experts)\\.[0-9]+"), "$1.N") + " " + dtype + " " +
          shape_text(shape)};
}

std::set<std::string> kinds_of(const Checkpoint& checkpoint) {
  std::set<std::string> out;
  for (const TensorInfo& t : checkpoint.tensors()) out.merge(kinds(t.name, stored_name(t.dtype), t.shape));
  return out;
}
std::set<std::string> kinds_of(const SynthSpec& spec) {
  std::set<std::string> out;
  for (const SynthTensor& t : synth_tensors(spec)) out.merge(kinds(t.name, stored_name(t.dtype), t.shape));
  return out;
}

// The spec that has the sizes of a golden folder made by independent code.
SynthSpec golden_spec(const std::string& name) {
  SynthSpec s = synth_defaults(name.substr(0, name.find('-')));
  if (name == "kimi_linear-tiny") {
    s.vocab = 131, s.hidden = 56, s.layers = 5, s.full_every = 3, s.heads = 5, s.kda_heads = 3,
    s.kda_head_dim = 20;
    s.kv_lora = 24, s.nope = 12, s.rope = 8, s.v = 10, s.intermediate = 88, s.experts = 7, s.top_k = 3;
    s.expert_width = 28;
  } else if (s.k3()) {
    s.vocab = 256, s.hidden = 64, s.layers = 9, s.heads = 6, s.kda_head_dim = 16, s.q_lora = s.kv_lora = 32;
    s.nope = 16, s.rope = 8, s.v = 12, s.intermediate = 160, s.experts = 8, s.top_k = 3, s.expert_width = 32;
    s.shared_experts = 2, s.latent = 96;
    if (s.index_heads) s.index_heads = 8, s.index_dim = 32, s.index_topk = 16;
    if (name.ends_with("mxfp4")) s.format = SynthFormat::mxfp4;
  } else if (name == "glm5_next-tiny") {
    s.vocab = 139, s.hidden = 44, s.layers = 6, s.full_every = 3, s.heads = 5, s.kda_heads = 3,
    s.kda_head_dim = 16;
    s.q_lora = 30, s.kv_lora = 26, s.nope = 22, s.v = 18, s.index_heads = 6, s.index_dim = 32,
    s.index_topk = 16;
    s.dense_layers = 2, s.intermediate = 72, s.experts = 9, s.top_k = 4, s.expert_width = 20;
  } else if (name == "glm_moe_dsa-tiny") {
    s.vocab = 137, s.hidden = 52, s.layers = 6, s.heads = 5, s.q_lora = 34, s.kv_lora = 26, s.nope = 18,
    s.rope = 6;
    s.v = 22, s.index_heads = 5, s.index_dim = 24, s.index_topk = 16, s.index_every = 3, s.dense_layers = 2;
    s.intermediate = 76, s.experts = 10, s.top_k = 3, s.expert_width = 24;
  } else {
    s.vocab = 127, s.hidden = 60, s.layers = 4, s.heads = 3, s.q_lora = 36, s.kv_lora = 28, s.nope = 14,
    s.rope = 8;
    s.v = 10, s.index_heads = 5, s.index_dim = 32, s.index_topk = 16, s.intermediate = 80, s.experts = 12;
    s.top_k = 3, s.groups = 4, s.top_groups = 2, s.expert_width = 20;
  }
  return s;
}

void erase_matching(std::set<std::string>& set, const std::string& part) {
  std::erase_if(set, [&part](const std::string& s) { return s.find(part) != s.npos; });
}

class AgainstGolden : public ::testing::TestWithParam<const char*> {};

TEST_P(AgainstGolden, TensorsAndConfigKeysAreTheReleased) {
  const std::string name = GetParam();
  const SynthSpec spec = golden_spec(name);
  const Checkpoint golden(golden_folder(name));
  std::set<std::string> expected = kinds_of(golden), made = kinds_of(spec);
  for (const char* part : {"vision_tower", "mm_projector"}) erase_matching(expected, part);
  if (spec.k3())  // the golden pads A_log to 8, the release to 128
    for (auto* set : {&expected, &made}) erase_matching(*set, "A_log");
  EXPECT_EQ(made, expected);

  const Json config = synth_config(spec), released = parse_json_file(golden.config_path());
  const auto text = [](const Json& json) -> const Json& {
    return json.contains("text_config") ? json["text_config"] : json;
  };
  for (const auto& [key, value] : text(released).items()) {
    if (key == "head_dim" && spec.kimi()) continue;  // unused there, and no size of ours
    ASSERT_TRUE(text(config).contains(key)) << key;
    const bool ids = key.ends_with("token_id"),
               of_the_test = key == "max_position_embeddings" || key == "routed_scaling_factor" ||
                             key == "layer_types" || key == "linear_attn_config" || key == "swiglu_limit" ||
                             key == "rope_scaling" || key == "dsa_config" || key == "vocab_size";
    if (!ids && !of_the_test) {
      EXPECT_EQ(text(config)[key], value) << key;
    }
  }
  EXPECT_EQ(config["architectures"], released["architectures"]);
  EXPECT_EQ(config["model_type"], released["model_type"]);
}

INSTANTIATE_TEST_SUITE_P(All, AgainstGolden,
                         ::testing::Values("kimi_linear-tiny", "kimi_k3-tiny", "kimi_k31-tiny",
                                           "kimi_k3-tiny-mxfp4", "kimi_k31-tiny-mxfp4", "glm5_next-tiny",
                                           "glm_moe_dsa-tiny", "deepseek_v32-tiny"));

// The figures of the shapes that were run on another engine.
TEST(SynthPresets, HaveThePublishedNumberOfParameters) {
  const std::pair<const char*, double> kMillions[] = {{"bench-kimi-linear", 474.7},
                                                      {"bench-glm5-next", 477.8},
                                                      {"bench-kimi-k3", 312.2},
                                                      {"bench-glm-dsa", 479.3},
                                                      {"bench-glm-dsa-l2", 136.5}};
  for (const auto& [name, millions] : kMillions)
    EXPECT_NEAR(synth_parameters(synth_tensors(synth_preset(name))) / 1e6, millions, 0.051) << name;
  for (const std::string& name : synth_presets()) EXPECT_NO_THROW(check_synth(synth_preset(name))) << name;
}

// Reads like the loader; root mean square and mean of a whole tensor.
struct Moments {
  double mean = 0, rms = 0;
};
Moments moments(const std::vector<float>& values) {
  Moments m;
  for (const float v : values) m.mean += v, m.rms += static_cast<double>(v) * v;
  m.mean /= static_cast<double>(values.size());
  m.rms = std::sqrt(m.rms / static_cast<double>(values.size()));
  return m;
}

std::vector<float> decoded(const Checkpoint& c, const std::string& name, int64_t rows, int64_t columns) {
  std::vector<float> out(rows * columns);
  if (const TensorInfo* packed = c.find(name + ".weight_packed")) {
    const TensorInfo* scale = c.find(name + ".weight_scale");
    mxfp4_weight_dequantize(reinterpret_cast<const uint8_t*>(packed->data),
                            reinterpret_cast<const uint8_t*>(scale->data), rows, columns, out.data());
    return out;
  }
  const TensorInfo* weight = c.find(name + ".weight");
  if (const TensorInfo* scale = c.find(name + ".weight_scale_inv")) {
    std::vector<float> scales(scale->elements());
    read_elements(*scale, 0, scales.size(), scales.data());
    fp8_block_dequantize(reinterpret_cast<const uint8_t*>(weight->data), scales.data(), rows, columns,
                         out.data());
    return out;
  }
  read_f32(*weight, 0, out.size(), out.data());
  return out;
}

TEST(SynthValues, HaveTheSpreadOfOneOverRootFanIn) {
  struct Case {
    const char* family;
    SynthFormat format;
    const char* name;
  };
  const Case kCases[] = {
      {"kimi_k3", SynthFormat::bf16, "language_model.model.layers.0.mlp.up_proj"},
      {"kimi_k3", SynthFormat::mxfp4, "language_model.model.layers.1.block_sparse_moe.experts.0.w1"},
      {"glm5_next", SynthFormat::fp8, "model.language_model.layers.0.mlp.up_proj"},
      {"deepseek_v32", SynthFormat::fp8, "model.layers.0.mlp.up_proj"}};
  for (const Case& c : kCases) {
    for (const int width : {256, 384, 4096}) {  // different places between two powers of two
      Scratch scratch;
      SynthSpec spec = tiny_spec(c.family);
      spec.format = c.format;
      spec.hidden = width, spec.intermediate = 300;
      if (spec.latent) spec.latent = width;
      spec.expert_width = 320, spec.experts = 3, spec.top_k = spec.groups > 1 ? 2 : 3, spec.layers = 2;
      if (spec.groups > 1) spec.groups = spec.top_groups = 1;
      synthesize(spec, scratch / "m");
      const Checkpoint made(scratch / "m");
      const std::vector<float> values =
          decoded(made, c.name, c.format == SynthFormat::mxfp4 ? 320 : 300, width);
      const Moments m = moments(values);
      const double spread = 1 / std::sqrt(width);
      // Rounding to few codes moves the spread; a wrong exponent would halve or double it.
      EXPECT_NEAR(m.rms / spread, 1, c.format == SynthFormat::bf16 ? 0.01 : 0.03) << c.family << " " << width;
      EXPECT_NEAR(m.mean / spread, 0, 0.02) << c.family << " " << width;
    }
  }
}

TEST(SynthValues, AreIndependentDraws) {
  SynthTables tables;
  const SynthTensor a{"a", "a", StoredDtype::f32, {1 << 18}, SynthFill::values, 0, 1, false};
  SynthTensor b = a;
  b.draw = "b";
  const size_t n = 1 << 18;
  std::vector<float> x(n), y(n), z(n);
  const auto fill = [&](const SynthTensor& t, uint64_t seed, std::vector<float>& out) {
    SynthFiller(t, seed, tables).fill(0, n * sizeof(float), reinterpret_cast<std::byte*>(out.data()));
  };
  fill(a, 1, x);
  fill(b, 1, y);
  fill(a, 2, z);
  const auto correlation = [n](const std::vector<float>& p, const std::vector<float>& q, size_t lag) {
    double sum = 0;
    for (size_t i = 0; i + lag < n; ++i) sum += static_cast<double>(p[i]) * q[i + lag];
    return sum / static_cast<double>(n);
  };
  const double bound = 4.5 / std::sqrt(static_cast<double>(n));
  for (const size_t lag : {1, 2, 3, 4, 8, 64, 1024})
    EXPECT_LT(std::fabs(correlation(x, x, lag)), bound) << lag;
  EXPECT_LT(std::fabs(correlation(x, y, 0)), bound);
  EXPECT_LT(std::fabs(correlation(x, z, 0)), bound);
  double fourth = 0;  // a normal's is 3; of sums of few uniforms it is below 2.8
  for (const float v : x) fourth += std::pow(v, 4) / static_cast<double>(n);
  EXPECT_NEAR(fourth, 3, 0.06);
}

TEST(Synth, BytesDependOnTheSeedAlone) {
  Scratch scratch;
  SynthSpec spec = tiny_spec("kimi_k31");
  spec.format = SynthFormat::mxfp4;
  spec.hidden = 544;  // a matrix of several pieces
  const SynthReport report = synthesize(spec, scratch / "one", "", 1);
  synthesize(spec, scratch / "three", "", 3);
  const std::string one = file_bytes(scratch / "one/model.safetensors");
  EXPECT_TRUE(one == file_bytes(scratch / "three/model.safetensors"));
  EXPECT_GT(one.size(), report.bytes);
  spec.seed = 1;
  synthesize(spec, scratch / "other", "", 1);
  EXPECT_FALSE(one == file_bytes(scratch / "other/model.safetensors"));

  // The cut into files changes no tensor.
  spec.seed = 0;
  spec.shard_bytes = report.bytes / 3;
  const SynthReport cut = synthesize(spec, scratch / "cut", "", 2);
  EXPECT_GE(cut.files, 3);
  const Checkpoint whole(scratch / "one"), parts(scratch / "cut");
  ASSERT_EQ(whole.tensors().size(), parts.tensors().size());
  for (const TensorInfo& t : whole.tensors()) {
    const TensorInfo* other = parts.find(t.name);
    ASSERT_TRUE(other) << t.name;
    EXPECT_EQ(std::memcmp(t.data, other->data, t.bytes), 0) << t.name;
  }
}

// Steps of 5 and 3 tokens.
void run_two_steps(const std::string& folder, const KernelTable& kernels) {
  Team team(2, false, kernels.thread_init);
  BuildOptions build;
  build.max_tokens = 16;
  Model model(folder, kernels, build);
  EXPECT_EQ(model.checkpoint().unused_summary(), "");
  const CacheLimits limits{1, 1, 0, 64};
  Caches caches(model.cache_shape(), limits);
  model.load(team, {});
  model.bind(caches, team);
  Batch batch(16, 16, 1, 64);
  Sequence sequence = caches.create();
  for (const std::vector<int32_t>& ids :
       {std::vector<int32_t>{1, 17, 42, 99, 3}, std::vector<int32_t>{7, 0, 159}}) {
    sequence.extend(static_cast<int>(ids.size()));
    batch.clear();
    batch.add(sequence, ids, WantLogits::all);
    model.run(batch.header());
    sequence.commit(static_cast<int>(ids.size()));
    for (size_t row = 0; row < ids.size(); ++row) {
      const std::vector<float> logits(model.logits(row), model.logits(row) + model.config().vocab);
      const Moments m = moments(logits);
      // Normed states times rows of norm 1: logits of about N(0, 1).
      EXPECT_NEAR(m.rms, 1, 0.35) << folder << " " << kernels.isa << " row " << row;
    }
  }
}

class Families : public ::testing::TestWithParam<std::pair<const char*, SynthFormat>> {};

TEST_P(Families, LoadAndRunOnEveryIsa) {
  Scratch scratch;
  SynthSpec spec = tiny_spec(GetParam().first);
  spec.format = GetParam().second;
  synthesize(spec, scratch / "m");
  for (const IsaChoice& isa : isa_choices(cpu_features()))
    if (isa.missing.empty()) run_two_steps(scratch / "m", *isa.table);
}

INSTANTIATE_TEST_SUITE_P(
    All, Families,
    ::testing::Values(std::pair{"kimi_linear", SynthFormat::bf16}, std::pair{"kimi_k3", SynthFormat::bf16},
                      std::pair{"kimi_k3", SynthFormat::mxfp4}, std::pair{"kimi_k31", SynthFormat::bf16},
                      std::pair{"kimi_k31", SynthFormat::mxfp4}, std::pair{"glm5_next", SynthFormat::bf16},
                      std::pair{"glm5_next", SynthFormat::fp8}, std::pair{"glm_moe_dsa", SynthFormat::bf16},
                      std::pair{"glm_moe_dsa", SynthFormat::fp8},
                      std::pair{"deepseek_v32", SynthFormat::bf16},
                      std::pair{"deepseek_v32", SynthFormat::fp8}));

// The presets' own layers, narrow.
TEST(SynthPresets, LoadAndRun) {
  for (const std::string& name : synth_presets()) {
    Scratch scratch;
    SynthSpec spec = synth_preset(name), tiny = tiny_spec(spec.family);
    tiny.layers = spec.layers, tiny.dense_layers = spec.dense_layers, tiny.format = spec.format;
    tiny.attn_res_block = spec.attn_res_block, tiny.full_every = spec.full_every,
    tiny.index_every = spec.index_every;
    tiny.shared_experts = spec.shared_experts;
    synthesize(tiny, scratch / "m");
    run_two_steps(scratch / "m", choose_kernels("", cpu_features()));
  }
}

TEST(SynthCommand, WritesAModelThatInspectReads) {
  Scratch scratch;
  const std::string folder = scratch / "m";
  const Ran made = weft_command({"synth",
                                 "kimi_linear",
                                 "-o",
                                 folder,
                                 "--hidden",
                                 "64",
                                 "--layers",
                                 "4",
                                 "--heads",
                                 "2",
                                 "--kda-head-dim",
                                 "16",
                                 "--vocab",
                                 "8200",
                                 "--intermediate",
                                 "96",
                                 "--experts",
                                 "8",
                                 "--expert-width",
                                 "32",
                                 "--seed",
                                 "7",
                                 "--tokenizer",
                                 golden_folder("tokenizers/kimi_small")});
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_TRUE(fs::exists(folder + "/tiktoken.model"));
  const Json seen = weft_command({"inspect", folder, "--json"}).json();
  EXPECT_EQ(seen["family"], "kimi_linear");
  EXPECT_EQ(seen["layers"], 4);
  EXPECT_EQ(seen["config"]["vocab"], 8200);
  EXPECT_EQ(seen["config"]["moe"]["experts"], 8);
}

TEST(SynthCommand, RefusesWhatCannotBe) {
  Scratch scratch;
  const std::string folder = scratch / "m";
  const auto refused = [&](std::vector<std::string> words, const char* says, int code = 2) {
    words.insert(words.begin(), "synth");
    words.insert(words.end(), {"-o", folder});
    const Ran ran = weft_command(words);
    EXPECT_EQ(ran.code, code) << says;
    EXPECT_NE(ran.err.find(says), ran.err.npos) << ran.err;
    EXPECT_FALSE(fs::exists(folder + "/config.json"));
  };
  refused({}, "either a family or --preset");
  refused({"kimi_k3", "--preset", "bench-kimi-k3"}, "either a family or --preset");
  refused({"llama"}, "families: kimi_linear, kimi_k3");
  refused({"--preset", "nothing"}, "bench-kimi-linear");
  refused({"kimi_linear", "--dtype", "fp8"}, "not released");
  refused({"glm5_next", "--dtype", "mxfp4"}, "not released");
  refused({"kimi_k3", "--dtype", "int4"}, "expected bf16, fp8 or mxfp4");
  refused({"kimi_k3", "--dtype", "mxfp4", "--expert-width", "40"}, "multiples of 32");
  refused({"kimi_linear", "--index-heads", "8"}, "has no such thing");
  refused({"kimi_k3", "--top-k", "64"}, "num_experts_per_token");
  refused({"kimi_k3", "--layers", "0"}, "--dense-layers 1");
  refused({"kimi_k3", "--full-every", "0"}, "--full-every 0");
  refused({"kimi_k3", "--layers", "-1"}, "--layers");
  refused({"deepseek_v32", "--groups", "5"}, "n_group");
  refused({"kimi_linear", "--tokenizer", golden_folder("tokenizers/kimi_small"), "--vocab", "64"},
          "--vocab is 64");
  refused({"kimi_linear", "--tokenizer", scratch / "none"}, "none", 1);

  ASSERT_EQ(weft_command(
                {"synth", "glm_moe_dsa", "--hidden", "64", "--vocab", "100", "--layers", "2", "-o", folder})
                .code,
            0);
  const Ran again = weft_command({"synth", "glm_moe_dsa", "--hidden", "64", "-o", folder});
  EXPECT_EQ(again.code, 2);
  EXPECT_NE(again.err.find("already holds"), again.err.npos) << again.err;
}

}  // namespace
}  // namespace weft
