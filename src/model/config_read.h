// The parts of a config.json that several families share, each read and checked by one function.
//
// Every function throws Error with one line "FILE: KEY is FOUND, expected EXPECTED". A key that changes the
// numbers and that weft does not compute is refused, never skipped: a model that runs with the wrong formula
// answers fluently and wrongly. Keys that cannot change the numbers (initialiser, dropout, dtype words) are
// not read.
#pragma once

#include <string>
#include <vector>

#include "base/json.h"
#include "model/config.h"

namespace weft {

// Upper bounds: far above any real model, low enough that products of two sizes fit into an int.
inline constexpr int64_t kMaxLayers = 10'000;
inline constexpr int64_t kMaxWidth = 1 << 20;
inline constexpr int64_t kMaxHeads = 1 << 14;
inline constexpr int64_t kMaxHeadWidth = 1 << 14;
inline constexpr int64_t kMaxVocab = 1 << 24;

// `text` is text_config where there is one, else the same object as `top`.
struct ConfigJson {
  Fields top, text;
  bool nested = false;
};
ConfigJson open_config(const Json& json, const std::string& where);

// For Arch::matches. An absent name counts as "yes" only if the other one is there and fits.
bool names_family(const Json& json, const std::vector<std::string>& architectures,
                  const std::vector<std::string>& model_types);

[[noreturn]] void refuse(const Fields& fields, const char* key, const std::string& expected);
// The key's word if it is one of `allowed`; error otherwise. `absent` empty: the key is required.
std::string read_word(const Fields& fields, const char* key, const std::vector<std::string>& allowed,
                      const std::string& absent = "");
// The key may be absent, null, false or 0; anything else is a feature this family does not have.
void expect_off(const Fields& fields, const char* key, const char* why);
// One value for the first of `keys` that is there; two of them that differ are an error. -1: none is there.
int64_t read_alias(const Fields& fields, const std::vector<const char*>& keys, int64_t low, int64_t high);

// Sizes, norm eps, number of layers (all LayerSpec default), special tokens, tying, generation_config.json
// beside `where`, quantization lists, dtype words.
void read_common(const ConfigJson& config, const std::string& where, ModelConfig& out);

// linear_attn_config: sizes, gate form, and the two layer lists, whose ids start at `first` (Kimi 1, GLM 0).
// The lists decide LayerSpec::mixer; they must name every layer once. `bounded`: gate_lower_bound is
// required.
void read_kda(const Fields& text, int first, bool bounded, ModelConfig& out);

enum class QueryRank : uint8_t { optional, required };  // q_lora_rank may be null, or may not (indexer input)
// Heads, ranks, head dims and softmax scale (nope + rope)^-0.5 (dsa.md 1).
void read_mla(const Fields& text, QueryRank query, ModelConfig& out);
// mla_use_nope must be true: the rope dims are content. rope_theta and rope_scaling are checked for type
// only.
void read_nope(const Fields& text);
// rope_theta, rope_scaling / rope_parameters (default or yarn) and pairing; multiplies YaRN's factor into the
// softmax scale (dsa.md 1.1). The indexer must have been read.
void read_rope(const Fields& text, RopePairs indexer_pairs, ModelConfig& out);

// How a family spells its expert keys.
struct MoeKeys {
  const char *experts, *top_k, *shared, *scoring, *renormalize, *groups;
};
inline constexpr MoeKeys kKimiMoe = {"num_experts",        "num_experts_per_token",
                                     "num_shared_experts", "moe_router_activation_func",
                                     "moe_renormalize",    "num_expert_group"};
inline constexpr MoeKeys kDeepseekMoe = {"n_routed_experts", "num_experts_per_tok", "n_shared_experts",
                                         "scoring_func",     "norm_topk_prob",      "n_group"};
// Router, experts, and LayerSpec::moe from first_k_dense_replace, moe_layer_freq, mlp_layer_types.
void read_moe(const Fields& text, const MoeKeys& keys, ModelConfig& out);

// index_n_heads, index_head_dim, index_topk.
void read_indexer(const Fields& text, ModelConfig& out);
// LayerSpec::own_indexer / shared_index of the MLA layers from indexer_types, index_topk_pattern,
// index_topk_freq with index_skip_topk_offset (dsa.md 3.8); all of those that are present must agree, none
// means no sharing.
void read_index_sharing(const Fields& text, ModelConfig& out);

}  // namespace weft
