// What a checkpoint's config.json says, as data. Read by arch/<family>.cc, used by the builder.
//
// Dimension letters: D hidden, H heads, K/V key/value head dims, R kv_lora_rank, E experts.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weft {

enum class Mixer : uint8_t { kda, mla };
enum class Residual : uint8_t { plain, attn_res, hyper };
enum class Activation : uint8_t {
  swiglu,          // silu(g) * u
  swiglu_clamped,  // silu(min(g, limit)) * clamp(u, -limit, limit)
  situ,            // beta tanh(g/beta) sigmoid(g) * linear_beta tanh(u/linear_beta)
};

// kda.md 1. K = V = head_dim in every released model; the kernels do not assume it.
struct KdaSpec {
  int heads = 0;
  int head_dim = 0;
  int conv_width = 4;
  bool bounded_gate = false;  // lower_bound * sigmoid(exp(A) (f + dt_bias)), else -exp(A) softplus(f + dt_bias)
  float lower_bound = 0;      // nats per step, in [-5, 0)
  bool full_rank_gate = false;  // output gate g_proj, else g_b_proj(g_a_proj x)
};

enum class RopePairs : uint8_t { none, interleaved, half_split };

struct RopeSpec {
  float theta = 10000.f;
  bool yarn = false;
  float factor = 1, beta_fast = 32, beta_slow = 1;
  int original_positions = 0;
  float mscale = 1, mscale_all_dim = 0;  // as written in rope_scaling; 0 = absent
};

// dsa.md 1.
struct MlaSpec {
  int heads = 0;
  int q_lora = 0;  // 0: q_proj instead of q_a_proj, q_a_layernorm, q_b_proj
  int kv_lora = 0;
  int nope = 0, rope = 0, v = 0;
  RopePairs rope_pairs = RopePairs::none;  // none: the rope dims are ordinary content dims (NoPE)
  bool output_gate = false;                // g_proj: after W_UV, before o_proj
  float latent_norm_eps = 1e-6f;
  float softmax_scale = 0;  // (nope + rope)^-0.5, times mscale^2 under YaRN
};

// dsa.md 2 and 3. heads == 0: no indexer, attention is dense.
struct IndexerSpec {
  int heads = 0;
  int dim = 0;
  int topk = 0;   // tokens
  int pool = 1;   // tokens per index key
  int rope = 0;   // leading dims that rotate
  RopePairs rope_pairs = RopePairs::none;
  float norm_eps = 1e-6f;
  bool norm_bias_optional = false;
};

struct MoeSpec {
  int experts = 0, top_k = 0, groups = 1, top_groups = 1;
  int intermediate = 0;         // per routed expert
  int shared_intermediate = 0;  // of the fused shared expert, 0 = none
  int latent = 0;               // 0: experts work on the full hidden width (kimi.md 5.4 otherwise)
  bool latent_norm = false;
  bool renormalize = true;
  float scale = 1.f;
};

struct LayerSpec {
  Mixer mixer = Mixer::kda;
  bool own_indexer = false;     // this layer selects with its own indexer
  bool shared_index = false;    // reuses the selection of the nearest own_indexer layer before it
  bool moe = false;
};

struct ModelConfig {
  std::string family;      // kimi_linear, kimi_k3, kimi_k31, glm5_next, deepseek_v32, glm_moe_dsa
  std::string model_type;  // as written in config.json
  int vocab = 0, hidden = 0, max_positions = 0;
  float norm_eps = 1e-5f;
  bool tie_embeddings = false;
  int dense_intermediate = 0;
  Activation activation = Activation::swiglu;
  float swiglu_limit = 0, situ_beta = 0, situ_linear_beta = 0;  // situ_linear_beta <= 0: u unchanged
  Residual residual = Residual::plain;
  int attn_res_block = 0;                      // decoder layers per AttnRes block
  int hc_streams = 0, hc_sinkhorn_iters = 0;   // hyper-connections
  float hc_eps = 1e-6f;
  KdaSpec kda;
  MlaSpec mla;
  IndexerSpec indexer;
  MoeSpec moe;
  RopeSpec rope;
  std::vector<LayerSpec> layers;
  int mtp_layers = 0;          // num_nextn_predict_layers: their tensors are skipped and counted
  std::vector<int> eos, stop;  // eos: every id of eos_token_id in config.json; stop: eos + generation_config.json
  int bos = -1, pad = -1;
  // generation_config.json's sampling defaults, as written there.
  std::optional<float> default_temperature, default_top_p;
  std::optional<int> default_top_k;
  // quantization_config's modules_to_not_convert / ignored_layers / ignore: only compared, tensors decide.
  std::vector<std::string> unquantized_modules;
  std::vector<std::string> warnings;  // odd but harmless things met while reading, shown once

  int num_layers() const { return static_cast<int>(layers.size()); }
};

}  // namespace weft
