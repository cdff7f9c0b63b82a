// Kimi-K3 (kimi.md 2.2) and Kimi-K3.1-Pro (kimi_k31.md): gated NoPE MLA, Attention Residuals, latent MoE;
// K3.1 adds a lightning indexer to every MLA layer.
//
// No K3.1 config.json has been published under spellings that could be checked, so nothing here depends on
// them: an indexer's tensors or a dsa_config make a K3 a K3.1, and tensor shapes give the sizes
// (kimi_k31.md 2.3).
#include <array>
#include <optional>

#include "base/check.h"
#include "model/arch.h"
#include "model/checkpoint.h"
#include "model/config_read.h"
#include "model/layers.h"

namespace weft {
namespace {

constexpr int64_t kDefaultTopk = 2048;

// The indexer tensor `name` of a layer under any prefix and with or without ".weight", null when there is
// none.
const TensorInfo* find_indexer(const Checkpoint& checkpoint, int64_t layer, const char* name) {
  constexpr std::array kPrefixes = {"language_model.model.", "model.", "language_model.",
                                    "model.language_model.", ""};
  for (const char* prefix : kPrefixes) {
    for (const char* suffix : {".weight", ""}) {
      const auto full = fmt::format("{}layers.{}.self_attn.indexer.{}{}", prefix, layer, name, suffix);
      if (const TensorInfo* tensor = checkpoint.find(full)) return tensor;
    }
  }
  return nullptr;
}

bool has_object(const Json& json, const char* key) {
  return json.is_object() && json.contains(key) && !json.at(key).is_null();
}

bool has_indexer(const Json& json, const Checkpoint* checkpoint) {
  const Json& text = has_object(json, "text_config") ? json.at("text_config") : json;
  if (has_object(text, "dsa_config") || has_object(json, "dsa_config")) return true;
  if (checkpoint == nullptr || !has_object(text, "num_hidden_layers")) return false;
  // `matches` must not throw on a bad count; `read` will name it.
  const Json& count = text.at("num_hidden_layers");
  const double layers = count.is_number() ? count.get<double>() : 0;
  for (int64_t i = 0; i < kMaxLayers && static_cast<double>(i) < layers; ++i) {
    if (find_indexer(*checkpoint, i, "wq_b") != nullptr) return true;
  }
  return false;
}

bool is_kimi(const Json& json) {
  // The text part's own model_type, kimi_linear, is accepted only with the class name beside it: alone it
  // means Kimi-Linear.
  if (has_object(json, "architectures")) {
    return names_family(json, {"KimiK3ForConditionalGeneration", "KimiK31ForConditionalGeneration"},
                        {"kimi_k3", "kimi_k31", "kimi_linear"});
  }
  return names_family(json, {}, {"kimi_k3", "kimi_k31"});
}

bool is_k3(const Json& json, const Checkpoint* checkpoint) {
  return is_kimi(json) && !has_indexer(json, checkpoint);
}

bool is_k31(const Json& json, const Checkpoint* checkpoint) {
  return is_kimi(json) && has_indexer(json, checkpoint);
}

ModelConfig read_both(const char* family, QueryRank query, const ConfigJson& config,
                      const std::string& where) {
  const Fields& text = config.text;
  ModelConfig out;
  out.family = family;
  read_common(config, where, out);
  if (read_word(text, "hidden_act", {"situ", "silu"}) == "situ") {
    out.activation = Activation::situ;
    out.situ_beta = static_cast<float>(text.number("activation_situ_beta", 1e-3, 1e6));
    out.situ_linear_beta = static_cast<float>(text.number("activation_situ_linear_beta", -1, 1e6));
  }
  out.residual = Residual::attn_res;
  out.attn_res_block = static_cast<int>(text.integer("attn_res_block_size", 1, kMaxLayers));
  read_kda(text, 1, true, out);
  text.object("linear_attn_config")
      .boolean("use_full_rank_gate");  // required here: both forms fit other tensors
  read_nope(text);
  // latent_norm_eps stays 1e-6, see kimi_linear.cc.
  read_mla(text, query, out);
  out.mla.output_gate = text.boolean("mla_use_output_gate");
  read_moe(text, kKimiMoe, out);
  out.moe.latent = static_cast<int>(text.integer("routed_expert_hidden_size", 1, kMaxWidth));
  out.moe.latent_norm = text.boolean("latent_moe_use_norm");
  return out;
}

// One indexer's sizes by its tensors.
struct IndexerShape {
  int64_t heads, dim;
};

void expect_shape(const TensorInfo& tensor, int64_t rows, int64_t columns, const char* why) {
  const auto& shape = tensor.shape;
  if (shape.size() == 2 && shape[0] == rows && shape[1] == columns) return;
  fail("tensor {} has shape {}, expected [{}, {}]: {}", printable(tensor.name, 200), shape_text(shape), rows,
       columns, why);
}

IndexerShape indexer_shape(const Checkpoint& checkpoint, int layer, const std::string& where,
                           const ModelConfig& config) {
  auto need = [&](const char* name) -> const TensorInfo& {
    if (const TensorInfo* tensor = find_indexer(checkpoint, layer, name)) return *tensor;
    fail("{}: layer {} has self_attn.indexer.wq_b but no self_attn.indexer.{}, expected all four", where,
         layer, name);
  };
  const TensorInfo& heads = need("weights_proj");
  const TensorInfo& keys = need("wk");
  need("k_norm");
  if (heads.shape.empty() || keys.shape.empty()) {
    expect_shape(heads.shape.empty() ? heads : keys, 0, config.hidden, "rows by hidden_size");
  }
  const IndexerShape shape = {heads.shape[0], keys.shape[0]};
  expect_shape(heads, shape.heads, config.hidden, "indexer heads by hidden_size");
  expect_shape(keys, shape.dim, config.hidden, "index key by hidden_size");
  if (shape.heads < 1 || shape.heads > kMaxHeads || shape.dim < 1 || shape.dim > kMaxHeadWidth) {
    fail("{}: layer {} has an indexer of {} heads x {}, expected sizes of at least 1", where, layer,
         shape.heads, shape.dim);
  }
  expect_shape(need("wq_b"), shape.heads * shape.dim, config.mla.q_lora, "heads x index key by q_lora_rank");
  return shape;
}

// Which layers own an indexer, from the tensors, and its sizes; every owner must have the same.
void read_tensors(const Checkpoint& checkpoint, const std::string& where, ModelConfig& out) {
  for (int i = 0; i < out.num_layers(); ++i) {
    const bool owns = find_indexer(checkpoint, i, "wq_b") != nullptr;
    const bool full = out.layers[i].mixer == Mixer::mla;
    if (owns != full) {
      fail(
          "{}: layer {} (from 0) {} self_attn.indexer.wq_b, expected it in exactly the layers of "
          "linear_attn_config.full_attn_layers",
          where, i, owns ? "is no full-attention layer but has" : "is a full-attention layer without");
    }
    if (!owns) continue;
    const IndexerShape shape = indexer_shape(checkpoint, i, where, out);
    if (out.indexer.heads == 0) {
      out.indexer.heads = static_cast<int>(shape.heads);
      out.indexer.dim = static_cast<int>(shape.dim);
    }
    if (shape.heads != out.indexer.heads || shape.dim != out.indexer.dim) {
      fail("{}: layer {} has an indexer of {} heads x {}, expected {} x {} as in the layers before", where, i,
           shape.heads, shape.dim, out.indexer.heads, out.indexer.dim);
    }
  }
}

// A size that tensors have already given is only compared; without a checkpoint it must be there.
void take_size(const Fields& dsa, const std::vector<const char*>& keys, int64_t high, const char* what,
               int& size) {
  const int64_t value = read_alias(dsa, keys, 1, high);
  if (value < 0 && size == 0) fail("{} is missing, expected the indexer's {}", dsa.path(keys.front()), what);
  if (value >= 0 && size != 0 && value != size) {
    fail("{}: the indexer's {} is {}, expected {} as in its tensors", dsa.where(), what, value, size);
  }
  if (size == 0) size = static_cast<int>(value);
}

void check_layer_list(const Fields& dsa, const ModelConfig& config) {
  for (const char* key : {"dsa_layers", "layers", "index_layers", "full_attn_layers"}) {
    if (!dsa.has(key)) continue;
    std::vector<bool> named(config.layers.size());
    for (int64_t id : dsa.integers(key, 1, config.num_layers())) named[static_cast<size_t>(id - 1)] = true;
    for (size_t i = 0; i < named.size(); ++i) {
      if (named[i] == (config.layers[i].mixer == Mixer::mla)) continue;
      fail("{} {} layer {} (numbers start at 1), expected exactly linear_attn_config.full_attn_layers",
           dsa.path(key), named[i] ? "names" : "leaves out", i + 1);
    }
  }
}

std::optional<Fields> dsa_object(const ConfigJson& config) {
  if (auto inner = config.text.optional_object("dsa_config")) return inner;
  return config.top.optional_object("dsa_config");
}

ModelConfig read_k3(const Json& json, const std::string& where, const Checkpoint*) {
  const ConfigJson config = open_config(json, where);
  ModelConfig out = read_both("kimi_k3", QueryRank::optional, config, where);
  if (names_family(json, {"KimiK31ForConditionalGeneration"}, {"kimi_k3", "kimi_k31", "kimi_linear"})) {
    out.warnings.push_back(
        fmt::format("{}: the class is Kimi-K3.1's, but there is neither a dsa_config nor an indexer "
                    "tensor: read as Kimi-K3, with dense attention",
                    where));
  }
  return out;
}

ModelConfig read_k31(const Json& json, const std::string& where, const Checkpoint* checkpoint) {
  const ConfigJson config = open_config(json, where);
  ModelConfig out = read_both("kimi_k31", QueryRank::required, config, where);
  if (checkpoint != nullptr) read_tensors(*checkpoint, where, out);
  int64_t topk = -1;
  if (const auto dsa = dsa_object(config)) {
    take_size(*dsa, {"index_n_heads", "indexer_num_heads", "n_heads", "num_heads"}, kMaxHeads,
              "number of heads", out.indexer.heads);
    take_size(*dsa, {"index_head_dim", "indexer_head_dim", "head_dim"}, kMaxHeadWidth, "key size",
              out.indexer.dim);
    topk = read_alias(*dsa, {"index_topk", "indexer_topk", "topk", "top_k"}, 1, 1 << 24);
    check_layer_list(*dsa, out);
  }
  if (topk < 0) {
    topk = kDefaultTopk;
    out.warnings.push_back(
        fmt::format("{}: no index_topk in dsa_config: {} is taken, as in the release", where, topk));
  }
  out.indexer.topk = static_cast<int>(topk);
  out.indexer.norm_eps = out.norm_eps;  // dsa_config has no eps of its own
  out.indexer.norm_bias_optional = true;
  for (LayerSpec& layer : out.layers) layer.own_indexer = layer.mixer == Mixer::mla;
  return out;
}

void build(Builder& builder, const ModelConfig& config) {
  build_stack(builder, config, {"block_sparse_moe", "w1", "w3", "w2"});
}

const Arch kKimiK3 = {"kimi_k3", is_k3, read_k3, build, "kimi_k3"};
const Arch kKimiK31 = {"kimi_k31", is_k31, read_k31, build, "kimi_k3"};
const ArchRegistration kRegisteredK3(kKimiK3);
const ArchRegistration kRegisteredK31(kKimiK31);

}  // namespace
}  // namespace weft

WEFT_ARCH_FILE(kimi_k3)
