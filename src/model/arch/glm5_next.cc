// GLM-5.3-Flash (glm5_next.md 1): KDA with the bounded gate, NoPE DSA with pooled index keys,
// hyper-connections.
#include "base/check.h"
#include "model/arch.h"
#include "model/config_read.h"
#include "model/layers.h"

namespace weft {
namespace {

bool matches(const Json& json, const Checkpoint*) {
  return names_family(json, {"Glm5NextForConditionalGeneration"}, {"glm5_next"});
}

void expect_on(const Fields& text, const char* key) {
  if (!text.boolean(key)) refuse(text, key, "true: the other form is not supported");
}

void read_pool(const Fields& text, ModelConfig& out) {
  out.indexer.pool = static_cast<int>(text.integer("index_kpool", 1, 64));
  if (out.indexer.topk % out.indexer.pool != 0) {
    refuse(text, "index_topk", fmt::format("a multiple of index_kpool, {}", out.indexer.pool));
  }
  expect_on(text, "index_kpool_compress");
  expect_on(text, "index_kpool_always_select_tail");
}

ModelConfig read(const Json& json, const std::string& where, const Checkpoint*) {
  const ConfigJson config = open_config(json, where);
  const Fields& text = config.text;
  ModelConfig out;
  out.family = "glm5_next";
  read_common(config, where, out);
  read_word(text, "hidden_act", {"silu"});
  out.activation = Activation::swiglu_clamped;
  out.swiglu_limit = static_cast<float>(text.number("swiglu_limit", 1e-3, 1e6));
  expect_on(text, "mhc");
  out.residual = Residual::hyper;
  out.hc_streams = static_cast<int>(text.integer("hc_mult", 2, 16));
  out.hc_sinkhorn_iters = static_cast<int>(text.integer("hc_sinkhorn_iters", 1, 1000));
  out.hc_eps = static_cast<float>(text.number("hc_eps", 0, 0.1));
  read_kda(text, 0, true, out);
  read_nope(text);
  read_mla(text, QueryRank::required, out);
  out.mla.latent_norm_eps = out.norm_eps;
  read_indexer(text, out);
  read_pool(text, out);
  read_index_sharing(text, out);
  read_moe(text, kDeepseekMoe, out);
  return out;
}

void build(Builder& builder, const ModelConfig& config) {
  build_stack(builder, config);
}

const Arch kGlm5Next = {"glm5_next", matches, read, build, "glm5"};
const ArchRegistration kRegistered(kGlm5Next);

}  // namespace
}  // namespace weft

WEFT_ARCH_FILE(glm5_next)
