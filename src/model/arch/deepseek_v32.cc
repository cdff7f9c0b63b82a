// DeepSeek V3.2 and GLM-5.x (glm5_next.md 6 and 7): rotary MLA with a lightning indexer in every layer, no
// KDA.
#include "model/arch.h"
#include "model/config_read.h"
#include "model/layers.h"

namespace weft {
namespace {

bool is_deepseek(const Json& json, const Checkpoint*) {
  return names_family(json, {"DeepseekV32ForCausalLM"}, {"deepseek_v32"});
}

bool is_glm(const Json& json, const Checkpoint*) {
  return names_family(json, {"GlmMoeDsaForCausalLM"}, {"glm_moe_dsa"});
}

ModelConfig read(const char* family, RopePairs indexer_pairs, const Json& json, const std::string& where) {
  const ConfigJson config = open_config(json, where);
  const Fields& text = config.text;
  ModelConfig out;
  out.family = family;
  read_common(config, where, out);
  read_word(text, "hidden_act", {"silu"});
  for (const char* key : {"swiglu_limit", "linear_attn_config", "mhc", "mla_use_nope"}) {
    expect_off(text, key, "this family does not have it");
  }
  if (text.integer("index_kpool", 1, 64, 1) != 1)
    refuse(text, "index_kpool", "1: this family has a key per token");
  for (LayerSpec& layer : out.layers) layer.mixer = Mixer::mla;
  read_mla(text, QueryRank::required, out);
  out.mla.latent_norm_eps = out.norm_eps;
  read_indexer(text, out);
  read_rope(text, indexer_pairs, out);
  read_index_sharing(text, out);
  read_moe(text, kDeepseekMoe, out);
  return out;
}

// V3.2's indexer was trained with half-split pairs although its MLA interleaves (dsa.md 2.2).
ModelConfig read_deepseek(const Json& json, const std::string& where, const Checkpoint*) {
  return read("deepseek_v32", RopePairs::half_split, json, where);
}

ModelConfig read_glm(const Json& json, const std::string& where, const Checkpoint*) {
  return read("glm_moe_dsa", RopePairs::interleaved, json, where);
}

void build(Builder& builder, const ModelConfig& config) {
  build_stack(builder, config);
}

const Arch kDeepseekV32 = {"deepseek_v32", is_deepseek, read_deepseek, build, "deepseek_v32"};
const Arch kGlmMoeDsa = {"glm_moe_dsa", is_glm, read_glm, build, "glm5"};
const ArchRegistration kRegisteredDeepseek(kDeepseekV32);
const ArchRegistration kRegisteredGlm(kGlmMoeDsa);

}  // namespace
}  // namespace weft

WEFT_ARCH_FILE(deepseek_v32)
