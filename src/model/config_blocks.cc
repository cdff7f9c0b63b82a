// The readers of config_read.h for the blocks of a layer: KDA, MLA, rope, MoE, indexer.
#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "model/config_read.h"

namespace weft {
namespace {

int dim(const Fields& fields, const char* key, int64_t low, int64_t high) {
  return static_cast<int>(fields.integer(key, low, high));
}

// A list of one word per layer. The MTP layers behind the last one may have theirs too.
std::vector<std::string> words_per_layer(const Fields& text, const char* key, const ModelConfig& config) {
  std::vector<std::string> words = text.strings(key);
  const size_t layers = config.layers.size(), mtp = static_cast<size_t>(config.mtp_layers);
  if (words.size() != layers && words.size() != layers + mtp) {
    fail("{} has {} entries, expected one for each of the {} layers", text.path(key), words.size(), layers);
  }
  words.resize(layers);
  return words;
}

// Marks every layer named by lin[key]; `owner` remembers which list named it first.
void take_layer_list(const Fields& lin, const char* key, int first, Mixer mixer,
                     std::vector<const char*>& owner, ModelConfig& out) {
  const auto entry = lin.json().find(key);
  if (entry == lin.json().end() || !entry->is_array()) refuse(lin, key, "an array of layer numbers");
  const int layers = out.num_layers();
  for (int64_t id : lin.integers(key, first, first + layers - 1)) {
    const size_t layer = static_cast<size_t>(id - first);
    if (owner[layer] != nullptr) {
      fail("{} names layer {} (numbers start at {}), which {} already names, expected each layer once",
           lin.path(key), id, first, lin.path(owner[layer]));
    }
    owner[layer] = key;
    out.layers[layer].mixer = mixer;
  }
}

// GLM writes the pattern a second time as words.
void check_layer_types(const Fields& text, const ModelConfig& config) {
  if (!text.has("layer_types")) return;
  const auto words = words_per_layer(text, "layer_types", config);
  for (size_t i = 0; i < words.size(); ++i) {
    const bool kda = words[i] == "linear_attention";
    const bool mla = words[i] == "deepseek_sparse_attention" || words[i] == "indexed_attention";
    if (!kda && !mla) {
      fail("{}[{}] is {}, expected linear_attention or deepseek_sparse_attention", text.path("layer_types"),
           i, printable(words[i], 40));
    }
    if (kda != (config.layers[i].mixer == Mixer::kda)) {
      fail("{}[{}] is {}, expected what linear_attn_config.{} says of layer {}", text.path("layer_types"), i,
           words[i], kda ? "full_attn_layers" : "kda_layers", i);
    }
  }
}

void read_moe_layers(const Fields& text, ModelConfig& out) {
  const bool by_words = text.has("mlp_layer_types");
  const bool by_count = text.has("first_k_dense_replace") || !by_words;
  const int64_t every = text.integer("moe_layer_freq", 1, kMaxLayers, 1);
  if (by_count) {
    const int64_t dense = text.integer("first_k_dense_replace", 0, out.num_layers());
    for (int64_t i = 0; i < out.num_layers(); ++i) out.layers[i].moe = i >= dense && i % every == 0;
  }
  if (!by_words) return;
  const auto words = words_per_layer(text, "mlp_layer_types", out);
  for (size_t i = 0; i < words.size(); ++i) {
    if (words[i] != "dense" && words[i] != "sparse") {
      fail("{}[{}] is {}, expected dense or sparse", text.path("mlp_layer_types"), i,
           printable(words[i], 40));
    }
    const bool moe = words[i] == "sparse";
    if (by_count && moe != out.layers[i].moe) {
      fail("{}[{}] is {}, expected what first_k_dense_replace and moe_layer_freq say of layer {}",
           text.path("mlp_layer_types"), i, words[i], i);
    }
    out.layers[i].moe = moe;
  }
}

// What one key says: true = the layer owns an indexer. Keys in the order in which upstream prefers them.
std::vector<bool> index_owners(const Fields& text, const char* key, const ModelConfig& config) {
  const size_t layers = config.layers.size();
  std::vector<bool> full(layers);
  const std::string name = key;
  if (name == "indexer_types") {
    const auto words = words_per_layer(text, key, config);
    for (size_t i = 0; i < layers; ++i) {
      full[i] = words[i] == "full";
      if (!full[i] && words[i] != "shared") {
        fail("{}[{}] is {}, expected full or shared", text.path(key), i, printable(words[i], 40));
      }
    }
  } else if (name == "index_topk_pattern") {
    const std::string letters = text.string(key);
    const size_t mtp = static_cast<size_t>(config.mtp_layers);
    if ((letters.size() != layers && letters.size() != layers + mtp) ||
        letters.find_first_not_of("FS") != letters.npos) {
      refuse(text, key, fmt::format("one letter F or S for each of the {} layers", layers));
    }
    for (size_t i = 0; i < layers; ++i) full[i] = letters[i] == 'F';
  } else {
    const int64_t freq = text.integer("index_topk_freq", 1, kMaxLayers);
    const int64_t offset = text.integer("index_skip_topk_offset", 0, kMaxLayers, 2);
    for (size_t i = 0; i < layers; ++i) {
      full[i] = std::max<int64_t>(static_cast<int64_t>(i) - offset + 1, 0) % freq == 0;
    }
  }
  return full;
}

// Two places for one number: top level and inside the rope object.
double read_theta(const Fields& text, const std::optional<Fields>& rope) {
  constexpr const char* kKey = "rope_theta";
  constexpr double kMax = 1e12;
  const bool outside = text.has(kKey), inside = rope && rope->has(kKey);
  const double theta = inside ? rope->number(kKey, 1, kMax) : text.number(kKey, 1, kMax);
  if (inside && outside && text.number(kKey, 1, kMax) != theta) {
    refuse(text, kKey, fmt::format("{} as in {}", theta, rope->path(kKey)));
  }
  return theta;
}

void read_yarn(const Fields& rope, ModelConfig& out) {
  out.rope.yarn = true;
  out.rope.factor = static_cast<float>(rope.number("factor", 1, 1e6));
  out.rope.original_positions = dim(rope, "original_max_position_embeddings", 1, 1 << 30);
  out.rope.beta_fast = static_cast<float>(rope.number("beta_fast", 1e-3, 1e6));
  out.rope.beta_slow = static_cast<float>(rope.number("beta_slow", 1e-3, 1e6));
  if (out.rope.beta_slow > out.rope.beta_fast) {
    refuse(rope, "beta_slow", fmt::format("at most beta_fast {}", out.rope.beta_fast));
  }
  out.rope.mscale = static_cast<float>(rope.number("mscale", 0, 100, 0));
  out.rope.mscale_all_dim = static_cast<float>(rope.number("mscale_all_dim", 0, 100, 0));
  if (rope.has("attention_factor"))
    refuse(rope, "attention_factor", "it absent: mscale and mscale_all_dim decide");
  // mscale_all_dim, not mscale, belongs into the softmax; once per side of the dot product.
  const double m = 0.1 * out.rope.mscale_all_dim * std::log(out.rope.factor) + 1;
  out.mla.softmax_scale = static_cast<float>(out.mla.softmax_scale * m * m);
}

}  // namespace

void read_kda(const Fields& text, int first, bool bounded, ModelConfig& out) {
  const Fields lin = text.object("linear_attn_config");
  out.kda.heads = dim(lin, "num_heads", 1, kMaxHeads);
  out.kda.head_dim = dim(lin, "head_dim", 1, kMaxHeadWidth);
  out.kda.conv_width = dim(lin, "short_conv_kernel_size", 2, 4);
  // Other spellings of the bound belong to other gate formulas; the two differ by far more than rounding.
  for (const char* key : {"lower_bound", "safe_gate"}) {
    if (lin.has(key)) refuse(lin, key, "the gate form given by gate_lower_bound");
  }
  out.kda.bounded_gate = bounded || lin.has("gate_lower_bound");
  if (out.kda.bounded_gate) {
    // Below -5 the chunk kernels' decay products leave fp32 (kda.md 2.3).
    out.kda.lower_bound = static_cast<float>(lin.number("gate_lower_bound", -5, -1e-3));
  }
  out.kda.full_rank_gate = lin.boolean("use_full_rank_gate", false);

  std::vector<const char*> owner(out.layers.size(), nullptr);
  take_layer_list(lin, "kda_layers", first, Mixer::kda, owner, out);
  take_layer_list(lin, "full_attn_layers", first, Mixer::mla, owner, out);
  for (size_t i = 0; i < owner.size(); ++i) {
    if (owner[i] == nullptr) {
      fail("{} and full_attn_layers leave out layer {} (numbers start at {}), expected each layer once",
           lin.path("kda_layers"), i + static_cast<size_t>(first), first);
    }
  }
  check_layer_types(text, out);
}

void read_mla(const Fields& text, QueryRank query, ModelConfig& out) {
  MlaSpec& mla = out.mla;
  mla.heads = dim(text, "num_attention_heads", 1, kMaxHeads);
  if (text.integer("num_key_value_heads", 1, kMaxHeads, mla.heads) != mla.heads) {
    refuse(text, "num_key_value_heads", fmt::format("num_attention_heads, {}", mla.heads));
  }
  expect_off(text, "attention_bias", "projections with a bias are not supported");
  mla.kv_lora = dim(text, "kv_lora_rank", 1, kMaxWidth);
  if (query == QueryRank::required || text.has("q_lora_rank"))
    mla.q_lora = dim(text, "q_lora_rank", 1, kMaxWidth);
  mla.nope = dim(text, "qk_nope_head_dim", 1, kMaxHeadWidth);
  mla.rope = dim(text, "qk_rope_head_dim", 0, kMaxHeadWidth);
  mla.v = dim(text, "v_head_dim", 1, kMaxHeadWidth);
  if (text.integer("qk_head_dim", 1, 2 * kMaxHeadWidth, mla.nope + mla.rope) != mla.nope + mla.rope) {
    refuse(text, "qk_head_dim", fmt::format("qk_nope_head_dim + qk_rope_head_dim, {}", mla.nope + mla.rope));
  }
  mla.softmax_scale = static_cast<float>(1 / std::sqrt(static_cast<double>(mla.nope + mla.rope)));
}

void read_nope(const Fields& text) {
  if (!text.boolean("mla_use_nope"))
    refuse(text, "mla_use_nope", "true: this family has no rotary positions");
  text.number("rope_theta", 0, 1e12, 0);
  text.optional_object("rope_scaling");
}

void read_rope(const Fields& text, RopePairs indexer_pairs, ModelConfig& out) {
  const auto parameters = text.optional_object("rope_parameters");
  const auto scaling = text.optional_object("rope_scaling");
  if (parameters && scaling && parameters->json() != scaling->json()) {
    refuse(text, "rope_scaling", "the same as rope_parameters, or only one of them");
  }
  const auto& rope = parameters ? parameters : scaling;
  out.rope.theta = static_cast<float>(read_theta(text, rope));
  if (out.mla.rope == 0 || out.mla.rope % 2 != 0) refuse(text, "qk_rope_head_dim", "a positive even number");
  if (rope) {
    const char* key = rope->has("rope_type") ? "rope_type" : "type";
    if (read_word(*rope, key, {"default", "yarn"}, "default") == "yarn") read_yarn(*rope, out);
  }
  out.mla.rope_pairs = text.boolean("rope_interleave", true) ? RopePairs::interleaved : RopePairs::half_split;
  out.indexer.rope_pairs = indexer_pairs;
  if (text.has("indexer_rope_interleave")) {
    out.indexer.rope_pairs =
        text.boolean("indexer_rope_interleave") ? RopePairs::interleaved : RopePairs::half_split;
  }
  out.indexer.rope = out.mla.rope;
  if (out.indexer.rope > out.indexer.dim) {
    refuse(text, "index_head_dim", fmt::format("at least qk_rope_head_dim, {}", out.indexer.rope));
  }
}

void read_moe(const Fields& text, const MoeKeys& keys, ModelConfig& out) {
  MoeSpec& moe = out.moe;
  moe.experts = dim(text, keys.experts, 1, 1 << 16);
  moe.top_k = dim(text, keys.top_k, 1, 1 << 16);
  if (moe.top_k > moe.experts)
    refuse(text, keys.top_k, fmt::format("at most {} {}", keys.experts, moe.experts));
  moe.intermediate = dim(text, "moe_intermediate_size", 1, kMaxWidth);
  // All shared experts of a layer are stored fused, side by side.
  moe.shared_intermediate = dim(text, keys.shared, 0, 1024) * moe.intermediate;
  read_word(text, keys.scoring, {"sigmoid"});
  read_word(text, "topk_method", {"noaux_tc"}, "noaux_tc");
  moe.renormalize = text.boolean(keys.renormalize);
  moe.scale = static_cast<float>(text.number("routed_scaling_factor", 1e-6, 1e6));

  moe.groups = static_cast<int>(text.integer(keys.groups, 1, 1 << 16, 1));
  moe.top_groups = static_cast<int>(text.integer("topk_group", 1, 1 << 16, 1));
  if (moe.experts % moe.groups != 0) {
    refuse(text, keys.groups, fmt::format("a divisor of {} {}", keys.experts, moe.experts));
  }
  if (moe.top_groups > moe.groups)
    refuse(text, "topk_group", fmt::format("at most {} {}", keys.groups, moe.groups));
  const int per_group = moe.experts / moe.groups;
  // A group is scored by the sum of its two best experts.
  if (moe.groups > 1 && per_group < 2) refuse(text, keys.groups, "at least 2 experts in each group");
  if (moe.top_k > moe.top_groups * per_group) {
    refuse(text, keys.top_k,
           fmt::format("at most the {} experts of the topk_group groups", moe.top_groups * per_group));
  }
  if (!text.boolean("use_grouped_topk", true) && moe.groups > 1) {
    refuse(text, "use_grouped_topk", fmt::format("true, as {} is {}", keys.groups, moe.groups));
  }
  read_moe_layers(text, out);
}

void read_indexer(const Fields& text, ModelConfig& out) {
  out.indexer.heads = dim(text, "index_n_heads", 1, kMaxHeads);
  out.indexer.dim = dim(text, "index_head_dim", 1, kMaxHeadWidth);
  out.indexer.topk = dim(text, "index_topk", 1, 1 << 24);
}

void read_index_sharing(const Fields& text, ModelConfig& out) {
  std::vector<bool> full(out.layers.size(), true);
  const char* source = nullptr;
  for (const char* key : {"indexer_types", "index_topk_pattern", "index_topk_freq"}) {
    if (!text.has(key)) continue;
    const auto other = index_owners(text, key, out);
    for (size_t i = 0; source != nullptr && i < full.size(); ++i) {
      if (out.layers[i].mixer == Mixer::mla && other[i] != full[i]) {
        fail("{} and {} disagree on whether layer {} has its own indexer, expected the same pattern",
             text.path(source), text.path(key), i);
      }
    }
    if (source == nullptr) full = other;
    if (source == nullptr) source = key;
  }
  bool any = false;
  for (size_t i = 0; i < full.size(); ++i) {
    if (out.layers[i].mixer != Mixer::mla) continue;
    out.layers[i].own_indexer = full[i];
    out.layers[i].shared_index = !out.layers[i].own_indexer;
    if (out.layers[i].shared_index && !any) {
      fail(
          "{} makes layer {} share an index, but no layer before it has an indexer, expected the first one "
          "to have it",
          text.path(source), i);
    }
    any = true;
  }
}

}  // namespace weft
