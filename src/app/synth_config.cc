// config.json with the keys of each release.
#include <array>

#include "app/synth.h"

namespace weft {
namespace {

// Ids of the released vocabulary, or the last ones of a smaller one.
struct SpecialIds {
  int bos, eos, pad;
};
SpecialIds kimi_ids(int vocab) {
  if (vocab == 163840) return {163584, 163586, 163839};
  return {vocab - 3, vocab - 2, vocab - 1};
}

Json::array_t layer_list(const SynthSpec& s, bool full, int first) {
  Json::array_t list;
  for (int i = 0; i < s.layers; ++i)
    if (s.full(i) == full) list.push_back(i + first);
  return list;
}

Json linear_attention(const SynthSpec& s, int first) {
  Json lin = {{"num_heads", s.linear_heads()},
              {"head_dim", s.kda_head_dim},
              {"short_conv_kernel_size", 4},
              {"kda_layers", layer_list(s, false, first)},
              {"full_attn_layers", layer_list(s, true, first)}};
  if (s.family != "kimi_linear") lin["gate_lower_bound"] = -5.0;
  if (s.k3()) lin["use_full_rank_gate"] = true;
  return lin;
}

void put_mla(const SynthSpec& s, Json& out) {
  out["num_attention_heads"] = out["num_key_value_heads"] = s.heads;
  out["q_lora_rank"] = s.q_lora ? Json(s.q_lora) : Json();
  out["kv_lora_rank"] = s.kv_lora;
  out["qk_nope_head_dim"] = s.nope;
  out["qk_rope_head_dim"] = s.rope;
  out["v_head_dim"] = s.v;
}

void put_sizes(const SynthSpec& s, Json& out) {
  out["dtype"] = "bfloat16";
  out["vocab_size"] = s.vocab;
  out["hidden_size"] = s.hidden;
  out["num_hidden_layers"] = s.layers;
  out["intermediate_size"] = s.intermediate;
  out["moe_intermediate_size"] = s.expert_width;
  out["first_k_dense_replace"] = s.dense_layers;
  out["routed_scaling_factor"] = s.routed_scale;
  out["topk_group"] = s.top_groups;
  out["num_nextn_predict_layers"] = 0;
  out["initializer_range"] = 0.02;
  out["tie_word_embeddings"] = false;
  out["use_cache"] = true;
}

Json kimi_text(const SynthSpec& s) {
  const SpecialIds ids = kimi_ids(s.vocab);
  Json out = {{"architectures", {"KimiLinearForCausalLM"}},
              {"model_type", "kimi_linear"},
              {"rms_norm_eps", 1e-5},
              {"bos_token_id", ids.bos},
              {"eos_token_id", ids.eos},
              {"pad_token_id", ids.pad},
              {"mla_use_nope", true},
              {"num_experts", s.experts},
              {"num_experts_per_token", s.top_k},
              {"num_shared_experts", s.shared_experts},
              {"moe_layer_freq", 1},
              {"moe_renormalize", true},
              {"moe_router_activation_func", "sigmoid"},
              {"use_grouped_topk", true},
              {"num_expert_group", s.groups},
              {"linear_attn_config", linear_attention(s, 1)}};
  put_sizes(s, out);
  put_mla(s, out);
  return out;
}

Json kimi_linear(const SynthSpec& s) {
  Json out = kimi_text(s);
  out["hidden_act"] = "silu";
  out["model_max_length"] = s.max_positions;
  out["rope_theta"] = 10000.0;
  out["rope_scaling"] = Json();
  return out;
}

Json mxfp4_quantization() {
  const Json weights = {{"num_bits", 4},
                        {"type", "float"},
                        {"symmetric", true},
                        {"strategy", "group"},
                        {"group_size", 32},
                        {"dynamic", false},
                        {"scale_dtype", "torch.uint8"},
                        {"zp_dtype", Json()}};
  return {{"quant_method", "compressed-tensors"},
          {"format", "mxfp4-pack-quantized"},
          {"quantization_status", "compressed"},
          {"kv_cache_scheme", Json()},
          {"config_groups",
           {{"group_0",
             {{"targets", {"Linear"}},
              {"input_activations", Json()},
              {"output_activations", Json()},
              {"format", "mxfp4-pack-quantized"},
              {"weights", weights}}}}},
          {"ignore",
           {"re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*", "re:.*vision_tower.*", "re:.*mm_projector.*"}}};
}

Json kimi_k3(const SynthSpec& s) {
  const SpecialIds ids = kimi_ids(s.vocab);
  Json text = kimi_text(s);
  text["hidden_act"] = "situ";
  text["activation_situ_beta"] = 4.0;
  text["activation_situ_linear_beta"] = 25.0;
  text["max_position_embeddings"] = s.max_positions;
  text["attn_res_block_size"] = s.attn_res_block;
  text["mla_use_output_gate"] = true;
  text["routed_expert_hidden_size"] = s.latent;
  text["latent_moe_use_norm"] = true;
  text["topk_method"] = "noaux_tc";
  if (s.index_heads)  // not released in a readable form: kimi_k31.md 2.3, our spelling
    text["dsa_config"] = {{"index_n_heads", s.index_heads},
                          {"index_head_dim", s.index_dim},
                          {"index_topk", s.index_topk},
                          {"dsa_layers", layer_list(s, true, 1)}};
  if (s.format == SynthFormat::mxfp4) text["quantization_config"] = mxfp4_quantization();
  const bool k31 = s.family == "kimi_k31";
  return {{"architectures", {k31 ? "KimiK31ForConditionalGeneration" : "KimiK3ForConditionalGeneration"}},
          {"model_type", s.family},
          {"dtype", "bfloat16"},
          {"bos_token_id", ids.bos},
          {"eos_token_id", ids.eos},
          {"pad_token_id", ids.pad},
          {"ignore_index", -100},
          {"tie_word_embeddings", false},
          {"text_config", text}};
}

// GLM and DeepSeek
Json deepseek_text(const SynthSpec& s) {
  Json out = {{"hidden_act", "silu"},
              {"attention_bias", false},
              {"attention_dropout", 0.0},
              {"max_position_embeddings", s.max_positions},
              {"index_n_heads", s.index_heads},
              {"index_head_dim", s.index_dim},
              {"index_topk", s.index_topk},
              {"n_routed_experts", s.experts},
              {"n_shared_experts", s.shared_experts},
              {"num_experts_per_tok", s.top_k},
              {"scoring_func", "sigmoid"},
              {"topk_method", "noaux_tc"},
              {"n_group", s.groups},
              {"norm_topk_prob", true}};
  put_sizes(s, out);
  put_mla(s, out);
  return out;
}

Json fp8_quantization() {
  return {{"quant_method", "fp8"},
          {"fmt", "e4m3"},
          {"activation_scheme", "dynamic"},
          {"weight_block_size", {128, 128}}};
}

Json glm_eos(int vocab) {
  if (vocab == 154880) return {154820, 154827, 154829};
  return {vocab - 3, vocab - 2, vocab - 1};
}

Json glm5_next(const SynthSpec& s) {
  Json text = deepseek_text(s);
  text["model_type"] = "glm5_next_text";
  text["head_dim"] = 0;
  text["qk_head_dim"] = s.nope + s.rope;
  text["mla_use_nope"] = true;
  text["index_kpool"] = s.index_pool;
  text["index_kpool_compress"] = text["index_kpool_always_select_tail"] = true;
  text["index_share_for_mtp_iteration"] = text["indexer_rope_interleave"] = true;
  text["indexer_types"] = std::vector<std::string>(s.layers, "full");
  text["rms_norm_eps"] = 1e-5;
  text["mhc"] = true;
  text["hc_mult"] = s.hc_streams;
  text["hc_sinkhorn_iters"] = 20;
  text["hc_eps"] = 1e-6;
  text["swiglu_limit"] = 10.0;
  text["moe_router_dtype"] = "float32";
  text["router_aux_loss_coef"] = 0.001;
  text["output_router_logits"] = false;
  text["eos_token_id"] = glm_eos(s.vocab);
  text["pad_token_id"] = text["eos_token_id"][0];
  text["linear_attn_config"] = linear_attention(s, 0);
  for (int i = 0; i < s.layers; ++i) {
    text["mlp_layer_types"].push_back(i < s.dense_layers ? "dense" : "sparse");
    text["layer_types"].push_back(s.full(i) ? "deepseek_sparse_attention" : "linear_attention");
  }
  Json out = {{"architectures", {"Glm5NextForConditionalGeneration"}},
              {"model_type", "glm5_next"},
              {"dtype", "bfloat16"},
              {"tie_word_embeddings", false},
              {"text_config", text}};
  if (s.format == SynthFormat::fp8) out["quantization_config"] = fp8_quantization();
  return out;
}

Json glm_moe_dsa(const SynthSpec& s) {
  Json out = deepseek_text(s);
  out["architectures"] = Json::array({"GlmMoeDsaForCausalLM"});
  out["model_type"] = "glm_moe_dsa";
  out["moe_layer_freq"] = out["ep_size"] = 1;
  out["head_dim"] = s.nope;
  out["qk_head_dim"] = s.nope + s.rope;
  out["rms_norm_eps"] = 1e-5;
  out["rope_interleave"] = out["indexer_rope_interleave"] = true;
  out["rope_parameters"] = {{"rope_theta", 1000000.0}, {"rope_type", "default"}};
  if (s.index_every > 1) {
    out["index_topk_freq"] = s.index_every;
    out["index_skip_topk_offset"] = 2;
    out["index_share_for_mtp_iteration"] = true;
  }
  out["eos_token_id"] = glm_eos(s.vocab);
  out["pad_token_id"] = out["eos_token_id"][0];
  if (s.format == SynthFormat::fp8) out["quantization_config"] = fp8_quantization();
  return out;
}

Json deepseek_v32(const SynthSpec& s) {
  Json out = deepseek_text(s);
  out["architectures"] = Json::array({"DeepseekV32ForCausalLM"});
  out["model_type"] = "deepseek_v32";
  out["moe_layer_freq"] = out["ep_size"] = 1;
  out["rms_norm_eps"] = 1e-6;
  out["bos_token_id"] = 0;
  out["eos_token_id"] = 1;
  out["rope_theta"] = 10000.0;
  out["rope_scaling"] = {{"type", "yarn"},       {"factor", 40},   {"original_max_position_embeddings", 4096},
                         {"beta_fast", 32},      {"beta_slow", 1}, {"mscale", 1.0},
                         {"mscale_all_dim", 1.0}};
  if (s.format == SynthFormat::fp8) {
    out["quantization_config"] = fp8_quantization();
    out["quantization_config"]["scale_fmt"] = "ue8m0";
  }
  return out;
}

}  // namespace

Json quantization_config(SynthFormat format) {
  return format == SynthFormat::mxfp4 ? mxfp4_quantization()
         : format == SynthFormat::fp8 ? fp8_quantization()
                                      : Json();
}

Json synth_config(const SynthSpec& s) {
  if (s.k3()) return kimi_k3(s);
  if (s.kimi()) return kimi_linear(s);
  if (s.family == "glm5_next") return glm5_next(s);
  if (s.family == "glm_moe_dsa") return glm_moe_dsa(s);
  return deepseek_v32(s);
}

}  // namespace weft
