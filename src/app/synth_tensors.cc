// The tensors of each release: names, shapes, dtypes (kimi.md 3, kimi_k31.md 4, glm5_next.md 2 and 6-7) and
// what their values are drawn from. Spreads are those under which random models behave (kimi_k31.md 15.2):
// 1/sqrt(fan_in) keeps attention away from uniform, and a residual projection of zero would hide which
// snapshot is read.
#include <cmath>

#include "app/synth.h"

namespace weft {
namespace {

constexpr StoredDtype kBf16 = StoredDtype::bf16, kF32 = StoredDtype::f32;

int64_t blocks(int64_t n) {
  return (n + 127) / 128;
}

class List {
 public:
  explicit List(const SynthSpec& spec) : s(spec) {}

  void values(const std::string& name, std::vector<int64_t> shape, float mean, float std,
              StoredDtype dtype = kBf16) {
    out.push_back({name, name, dtype, std::move(shape), SynthFill::values, mean, std, false});
  }
  void norm(const std::string& name, int64_t width, StoredDtype dtype = kBf16) {
    values(name + ".weight", {width}, 1, 0.1f, dtype);
  }
  void bare(const std::string& name, int64_t rows, int64_t columns) {
    values(name, {rows, columns}, 0, spread(columns));
  }
  void matrix(const std::string& name, int64_t rows, int64_t columns) {
    bare(name + ".weight", rows, columns);
  }

  // A matrix that an FP8 release stores in blocks.
  void fp8(const std::string& name, int64_t rows, int64_t columns) {
    if (s.format != SynthFormat::fp8) return matrix(name, rows, columns);
    const bool two = s.family == "deepseek_v32";  // scale_fmt ue8m0
    const float std = spread(columns);
    out.push_back(
        {name + ".weight", name, StoredDtype::f8_e4m3, {rows, columns}, SynthFill::fp8_codes, 0, std, two});
    out.push_back({name + ".weight_scale_inv",
                   name,
                   kF32,
                   {blocks(rows), blocks(columns)},
                   SynthFill::fp8_scales,
                   0,
                   std,
                   two});
  }
  void expert(const std::string& name, int64_t rows, int64_t columns) {
    if (s.format != SynthFormat::mxfp4) return fp8(name, rows, columns);
    const float std = spread(columns);
    out.push_back({name + ".weight_packed",
                   name,
                   StoredDtype::u8,
                   {rows, columns / 2},
                   SynthFill::mxfp4_codes,
                   0,
                   std,
                   false});
    out.push_back({name + ".weight_scale",
                   name,
                   StoredDtype::u8,
                   {rows, columns / 32},
                   SynthFill::mxfp4_scales,
                   0,
                   std,
                   false});
  }

  const SynthSpec& s;
  std::vector<SynthTensor> out;

 private:
  static float spread(int64_t columns) { return 1 / std::sqrt(static_cast<float>(columns)); }
};

void kda(List& t, const std::string& at) {
  const SynthSpec& s = t.s;
  const int64_t D = s.hidden, H = s.linear_heads(), K = s.kda_head_dim, P = H * K;
  const StoredDtype small = s.k3() ? kF32 : kBf16;
  for (const char* name : {"q", "k", "v"}) {
    t.matrix(at + name + "_proj", P, D);
    t.values(at + name + "_conv1d.weight", {P, 1, 4}, 0.1f, 0.5f, small);
  }
  t.matrix(at + "f_a_proj", K, D);
  t.matrix(at + "f_b_proj", P, K);
  t.matrix(at + "b_proj", H, D);
  if (s.k3()) {
    t.matrix(at + "g_proj", P, D);
  } else {
    t.matrix(at + "g_a_proj", K, D);
    t.matrix(at + "g_b_proj", P, K);
  }
  // Decays from a few tokens to thousands, different per head; Kimi-Linear's gate has no floor, so its slopes
  // are steeper (kda.md 1.4). K3 pads A_log to a multiple of 128.
  if (s.family == "kimi_linear")
    t.values(at + "A_log", {1, 1, H, 1}, 2, 0.8f, kF32);
  else
    t.values(at + "A_log", {s.k3() ? blocks(H) * 128 : H}, 0.8f, 0.8f, kF32);
  t.values(at + "dt_bias", {P}, s.k3() ? -1.6f : s.kimi() ? -4.5f : -3.1f, 1.4f, kF32);
  t.norm(at + "o_norm", K, small);
  t.matrix(at + "o_proj", D, P);
}

void indexer(List& t, const std::string& at) {
  const SynthSpec& s = t.s;
  const bool v32 = s.family == "deepseek_v32";
  const StoredDtype norm = v32 ? kF32 : kBf16;
  const auto projection = [&](const char* name, int64_t rows, int64_t columns) {
    if (s.index_pool)
      t.matrix(at + name, rows, columns);  // GLM-5.3-Flash quantises none of it
    else
      t.fp8(at + name, rows, columns);
  };
  projection("wq_b", static_cast<int64_t>(s.index_heads) * s.index_dim, s.q_lora);
  projection("wk", s.index_dim, s.hidden);
  t.norm(at + "k_norm", s.index_dim, norm);
  t.values(at + "k_norm.bias", {s.index_dim}, 0, 0.1f, norm);
  t.matrix(at + "weights_proj", s.index_heads, s.hidden);
  if (!s.index_pool) return;
  t.bare(at + "index_kpool_compress_gate", s.index_dim, s.hidden);
  t.values(at + "index_kpool_compress_ape", {s.index_pool, s.index_dim}, 0, 0.7f);
}

void mla(List& t, const std::string& at, bool owns_indexer) {
  const SynthSpec& s = t.s;
  const int64_t D = s.hidden, H = s.heads, head = s.nope + s.rope;
  if (s.q_lora) {
    t.fp8(at + "q_a_proj", s.q_lora, D);
    t.norm(at + "q_a_layernorm", s.q_lora);
    t.fp8(at + "q_b_proj", H * head, s.q_lora);
  } else {
    t.matrix(at + "q_proj", H * head, D);
  }
  t.fp8(at + "kv_a_proj_with_mqa", s.kv_lora + s.rope, D);
  t.norm(at + "kv_a_layernorm", s.kv_lora);
  if (s.family == "glm5_next")
    t.matrix(at + "kv_b_proj", H * (s.nope + s.v), s.kv_lora);
  else
    t.fp8(at + "kv_b_proj", H * (s.nope + s.v), s.kv_lora);
  if (s.k3()) t.matrix(at + "g_proj", H * s.v, D);
  t.fp8(at + "o_proj", D, H * s.v);
  if (owns_indexer) indexer(t, at + "indexer.");
}

void mlp(List& t, const std::string& at, int64_t width) {
  t.fp8(at + "gate_proj", width, t.s.hidden);
  t.fp8(at + "up_proj", width, t.s.hidden);
  t.fp8(at + "down_proj", t.s.hidden, width);
}

void moe(List& t, const std::string& at) {
  const SynthSpec& s = t.s;
  const int64_t D = s.hidden, width = s.latent ? s.latent : D;
  t.matrix(at + "gate", s.experts, D);
  t.values(at + "gate.e_score_correction_bias", {s.experts}, 0, 0.2f, kF32);
  if (s.latent) {
    t.matrix(at + "routed_expert_down_proj", s.latent, D);
    t.norm(at + "routed_expert_norm", s.latent);
    t.matrix(at + "routed_expert_up_proj", D, s.latent);
  }
  if (s.shared_experts)
    mlp(t, at + "shared_experts.", static_cast<int64_t>(s.shared_experts) * s.expert_width);
  const char* const kimi[] = {"w1", "w3", "w2"};
  const char* const deepseek[] = {"gate_proj", "up_proj", "down_proj"};
  const auto& names = s.kimi() ? kimi : deepseek;
  for (int e = 0; e < s.experts; ++e) {
    const std::string expert = fmt::format("{}experts.{}.", at, e);
    t.expert(expert + names[0], s.expert_width, width);
    t.expert(expert + names[1], s.expert_width, width);
    t.expert(expert + names[2], width, s.expert_width);
  }
}

// The residual path's own weights of one layer.
void residual(List& t, const std::string& at) {
  const SynthSpec& s = t.s;
  if (s.attn_res_block) {
    for (const char* name : {"self_attention_res", "mlp_res"}) {
      t.norm(at + name + "_norm", s.hidden);
      t.matrix(at + name + "_proj", 1, s.hidden);
    }
  }
  if (s.hc_streams) {
    const int64_t n = s.hc_streams, outputs = n * (2 + n);
    for (const char* name : {"hc_attn_", "hc_ffn_"}) {
      t.bare(at + name + "fn", outputs, n * s.hidden);
      t.values(at + name + "base", {outputs}, 0, 0.7f, kF32);
      t.values(at + name + "scale", {3}, 1, 0.1f, kF32);
    }
  }
}

}  // namespace

size_t SynthTensor::bytes() const {
  size_t n = stored_size(dtype);
  for (const int64_t d : shape) n *= static_cast<size_t>(d);
  return n;
}

std::vector<SynthTensor> synth_tensors(const SynthSpec& s) {
  List t(s);
  const std::string model = s.k3()                    ? "language_model.model."
                            : s.family == "glm5_next" ? "model.language_model."
                                                      : "model.";
  t.values(model + "embed_tokens.weight", {s.vocab, s.hidden}, 0, 1);
  for (int i = 0; i < s.layers; ++i) {
    const std::string at = fmt::format("{}layers.{}.", model, i);
    t.norm(at + "input_layernorm", s.hidden);
    t.norm(at + "post_attention_layernorm", s.hidden);
    residual(t, at);
    if (s.full(i))
      mla(t, at + "self_attn.", s.owns_indexer(i));
    else
      kda(t, at + "self_attn.");
    if (i < s.dense_layers)
      mlp(t, at + "mlp.", s.intermediate);
    else
      moe(t, at + (s.kimi() ? "block_sparse_moe." : "mlp."));
  }
  if (s.attn_res_block) {
    t.norm(model + "output_attn_res_norm", s.hidden);
    t.matrix(model + "output_attn_res_proj", 1, s.hidden);
  }
  t.norm(model + "norm", s.hidden);
  t.matrix(s.k3() ? "language_model.lm_head" : "lm_head", s.vocab, s.hidden);
  return std::move(t.out);
}

size_t synth_parameters(const std::vector<SynthTensor>& tensors) {
  size_t sum = 0;
  for (const SynthTensor& t : tensors) {
    if (t.fill == SynthFill::fp8_scales || t.fill == SynthFill::mxfp4_scales) continue;
    sum += t.bytes() / stored_size(t.dtype) * (t.fill == SynthFill::mxfp4_codes ? 2 : 1);
  }
  return sum;
}

}  // namespace weft
