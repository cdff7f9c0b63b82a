// Kimi-Linear-48B-A3B (kimi.md 2.1): KDA with the softplus gate, dense NoPE MLA, plain residuals.
#include "model/arch.h"
#include "model/config_read.h"
#include "model/layers.h"

namespace weft {
namespace {

bool matches(const Json& json, const Checkpoint*) {
  return names_family(json, {"KimiLinearForCausalLM"}, {"kimi_linear"});
}

ModelConfig read(const Json& json, const std::string& where, const Checkpoint*) {
  const ConfigJson config = open_config(json, where);
  const Fields& text = config.text;
  ModelConfig out;
  out.family = "kimi_linear";
  // K3's text part bears the same names; exported alone it must not be taken for this model.
  for (const char* key : {"attn_res_block_size", "mla_use_output_gate", "routed_expert_hidden_size"}) {
    expect_off(text, key, "this is a key of Kimi-K3, whose architecture is KimiK3ForConditionalGeneration");
  }
  read_common(config, where, out);
  read_word(text, "hidden_act", {"silu"});
  read_kda(text, 1, false, out);
  read_nope(text);
  // latent_norm_eps stays 1e-6: the reference builds these two norms with its class default, not
  // rms_norm_eps.
  read_mla(text, QueryRank::optional, out);
  read_moe(text, kKimiMoe, out);
  return out;
}

void build(Builder& builder, const ModelConfig& config) {
  build_stack(builder, config, {"block_sparse_moe", "w1", "w3", "w2"});
}

const Arch kKimiLinear = {"kimi_linear", matches, read, build, "kimi_linear"};
const ArchRegistration kRegistered(kKimiLinear);

}  // namespace
}  // namespace weft

WEFT_ARCH_FILE(kimi_linear)
