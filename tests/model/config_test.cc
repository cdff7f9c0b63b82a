// config.json of every family, the golden ones and the released sizes, field by field.
#include <gtest/gtest.h>

#include <cmath>

#include "model/config_support.h"

namespace weft {
namespace {

// ---- the golden folders
// -------------------------------------------------------------------------------------------

TEST(GoldenConfig, KimiLinear) {
  const ModelConfig c = read_golden("kimi_linear-tiny");
  EXPECT_EQ(c.family, "kimi_linear");
  EXPECT_EQ(c.model_type, "kimi_linear");
  EXPECT_EQ(c.vocab, 131);
  EXPECT_EQ(c.hidden, 56);
  EXPECT_EQ(c.max_positions, 1048576);
  EXPECT_FLOAT_EQ(c.norm_eps, 1e-5f);
  EXPECT_FALSE(c.tie_embeddings);
  EXPECT_EQ(c.dense_intermediate, 88);
  EXPECT_EQ(c.activation, Activation::swiglu);
  EXPECT_EQ(c.residual, Residual::plain);
  EXPECT_EQ(c.kda.heads, 3);
  EXPECT_EQ(c.kda.head_dim, 20);
  EXPECT_EQ(c.kda.conv_width, 4);
  EXPECT_FALSE(c.kda.bounded_gate);
  EXPECT_FALSE(c.kda.full_rank_gate);
  EXPECT_EQ(c.mla.heads, 5);
  EXPECT_EQ(c.mla.q_lora, 0);
  EXPECT_EQ(c.mla.kv_lora, 24);
  EXPECT_EQ(c.mla.nope, 12);
  EXPECT_EQ(c.mla.rope, 8);
  EXPECT_EQ(c.mla.v, 10);
  EXPECT_EQ(c.mla.rope_pairs, RopePairs::none);
  EXPECT_FALSE(c.mla.output_gate);
  EXPECT_FLOAT_EQ(c.mla.latent_norm_eps, 1e-6f);
  EXPECT_FLOAT_EQ(c.mla.softmax_scale, 1 / std::sqrt(20.f));
  EXPECT_EQ(c.indexer.heads, 0);
  EXPECT_EQ(c.moe.experts, 7);
  EXPECT_EQ(c.moe.top_k, 3);
  EXPECT_EQ(c.moe.groups, 1);
  EXPECT_EQ(c.moe.intermediate, 28);
  EXPECT_EQ(c.moe.shared_intermediate, 28);
  EXPECT_EQ(c.moe.latent, 0);
  EXPECT_TRUE(c.moe.renormalize);
  EXPECT_FLOAT_EQ(c.moe.scale, 2.446f);
  EXPECT_EQ(layers_where(c, is_mla), (std::vector<int>{2, 4}));
  EXPECT_EQ(layers_where(c, is_moe), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_TRUE(layers_where(c, owns_index).empty());
  EXPECT_EQ(c.eos, (std::vector<int>{2}));
  EXPECT_EQ(c.stop, (std::vector<int>{2}));
  EXPECT_EQ(c.bos, 1);
  EXPECT_EQ(c.pad, 0);
  EXPECT_TRUE(c.warnings.empty());
  for (const char* folder : {"kimi_linear-tiny-eps", "kimi_linear-tiny-sharded"}) {
    EXPECT_EQ(read_golden(folder).mla.kv_lora, 24) << folder;
  }
  const ModelConfig kernel = read_golden("kimi_linear-kernel");
  EXPECT_EQ(kernel.mla.kv_lora, 512);
  EXPECT_EQ(kernel.kda.head_dim, 128);
  EXPECT_EQ(layers_where(kernel, is_mla), (std::vector<int>{2}));
}

TEST(GoldenConfig, KimiK3) {
  const ModelConfig c = read_golden("kimi_k3-tiny");
  EXPECT_EQ(c.family, "kimi_k3");
  EXPECT_EQ(c.model_type, "kimi_k3");
  EXPECT_EQ(c.hidden, 64);
  EXPECT_EQ(c.max_positions, 4096);
  EXPECT_EQ(c.activation, Activation::situ);
  EXPECT_FLOAT_EQ(c.situ_beta, 4);
  EXPECT_FLOAT_EQ(c.situ_linear_beta, 25);
  EXPECT_EQ(c.residual, Residual::attn_res);
  EXPECT_EQ(c.attn_res_block, 4);
  EXPECT_TRUE(c.kda.bounded_gate);
  EXPECT_FLOAT_EQ(c.kda.lower_bound, -5);
  EXPECT_TRUE(c.kda.full_rank_gate);
  EXPECT_EQ(c.mla.q_lora, 32);
  EXPECT_TRUE(c.mla.output_gate);
  EXPECT_FLOAT_EQ(c.mla.latent_norm_eps, 1e-6f);
  EXPECT_EQ(c.moe.experts, 8);
  EXPECT_EQ(c.moe.top_k, 3);
  EXPECT_EQ(c.moe.intermediate, 32);
  EXPECT_EQ(c.moe.shared_intermediate, 64);
  EXPECT_EQ(c.moe.latent, 96);
  EXPECT_TRUE(c.moe.latent_norm);
  EXPECT_EQ(layers_where(c, is_mla), (std::vector<int>{3, 7, 8}));
  EXPECT_EQ(layers_where(c, is_moe), (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}));
  EXPECT_EQ(c.indexer.heads, 0);
  EXPECT_EQ(c.eos, (std::vector<int>{254}));
  EXPECT_EQ(c.mtp_layers, 0);
  EXPECT_TRUE(c.warnings.empty());
  EXPECT_EQ(read_golden("kimi_k3-tiny-mtp").mtp_layers, 1);
  const ModelConfig kernel = read_golden("kimi_k3-kernel");
  EXPECT_EQ(kernel.kda.heads, 2);
  EXPECT_EQ(kernel.mla.heads, 4);
  EXPECT_EQ(kernel.unquantized_modules.size(), 6u);
  EXPECT_EQ(kernel.unquantized_modules[0], "re:.*self_attn.*");
  EXPECT_EQ(read_golden("kimi_k3-tiny-mxfp4").unquantized_modules.size(), 6u);
}

TEST(GoldenConfig, KimiK31) {
  for (const char* folder :
       {"kimi_k31-tiny", "kimi_k31-tiny-alt", "kimi_k31-tiny-smallwk", "kimi_k31-tiny-mxfp4"}) {
    const ModelConfig c = read_golden(folder);
    EXPECT_EQ(c.family, "kimi_k31") << folder;
    EXPECT_EQ(c.indexer.heads, 8) << folder;
    EXPECT_EQ(c.indexer.dim, 32) << folder;
    EXPECT_EQ(c.indexer.topk, 16) << folder;
    EXPECT_EQ(c.indexer.pool, 1) << folder;
    EXPECT_EQ(c.indexer.rope, 0) << folder;
    EXPECT_EQ(c.indexer.rope_pairs, RopePairs::none) << folder;
    EXPECT_FLOAT_EQ(c.indexer.norm_eps, 1e-5f) << folder;
    EXPECT_TRUE(c.indexer.norm_bias_optional) << folder;
    EXPECT_FLOAT_EQ(c.mla.latent_norm_eps, 1e-6f) << folder;
    EXPECT_EQ(layers_where(c, owns_index), (std::vector<int>{3, 7, 8})) << folder;
    EXPECT_EQ(c.residual, Residual::attn_res) << folder;
    EXPECT_TRUE(c.warnings.empty()) << folder;
  }
  const ModelConfig kernel = read_golden("kimi_k31-kernel");
  EXPECT_EQ(kernel.indexer.heads, 32);
  EXPECT_EQ(kernel.indexer.dim, 128);
  EXPECT_EQ(kernel.indexer.topk, 64);
}

TEST(GoldenConfig, Glm5Next) {
  const ModelConfig c = read_golden("glm5_next-tiny");
  EXPECT_EQ(c.family, "glm5_next");
  EXPECT_EQ(c.vocab, 139);
  EXPECT_EQ(c.hidden, 44);
  EXPECT_EQ(c.activation, Activation::swiglu_clamped);
  EXPECT_FLOAT_EQ(c.swiglu_limit, 2);
  EXPECT_EQ(c.residual, Residual::hyper);
  EXPECT_EQ(c.hc_streams, 4);
  EXPECT_EQ(c.hc_sinkhorn_iters, 20);
  EXPECT_FLOAT_EQ(c.hc_eps, 1e-6f);
  EXPECT_TRUE(c.kda.bounded_gate);
  EXPECT_FALSE(c.kda.full_rank_gate);
  EXPECT_EQ(c.mla.nope, 22);
  EXPECT_EQ(c.mla.rope, 0);
  EXPECT_EQ(c.mla.v, 18);
  EXPECT_EQ(c.mla.q_lora, 30);
  EXPECT_FLOAT_EQ(c.mla.latent_norm_eps, 1e-5f);
  EXPECT_FLOAT_EQ(c.mla.softmax_scale, 1 / std::sqrt(22.f));
  EXPECT_EQ(c.indexer.heads, 6);
  EXPECT_EQ(c.indexer.dim, 32);
  EXPECT_EQ(c.indexer.topk, 16);
  EXPECT_EQ(c.indexer.pool, 4);
  EXPECT_FLOAT_EQ(c.indexer.norm_eps, 1e-6f);
  EXPECT_FALSE(c.indexer.norm_bias_optional);
  EXPECT_EQ(c.indexer.rope_pairs, RopePairs::none);  // indexer_rope_interleave is inert here
  EXPECT_EQ(layers_where(c, is_mla), (std::vector<int>{2, 4}));
  EXPECT_EQ(layers_where(c, owns_index), (std::vector<int>{2, 4}));
  EXPECT_EQ(layers_where(c, is_moe), (std::vector<int>{2, 3, 4, 5}));
  EXPECT_EQ(c.eos, (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(c.bos, -1);
  EXPECT_EQ(c.pad, 0);
  EXPECT_EQ(read_golden("glm5_next-tiny-vision").mtp_layers, 1);
  EXPECT_EQ(read_golden("glm5_next-kernel").indexer.heads, 32);
  const ModelConfig fp8 = read_golden("glm5_next-kernel-fp8");
  EXPECT_EQ(fp8.unquantized_modules[0], "lm_head");
  EXPECT_TRUE(fp8.warnings.empty());
}

TEST(GoldenConfig, DeepseekV32) {
  const ModelConfig c = read_golden("deepseek_v32-tiny");
  EXPECT_EQ(c.family, "deepseek_v32");
  EXPECT_FLOAT_EQ(c.norm_eps, 1e-6f);
  EXPECT_FLOAT_EQ(c.mla.latent_norm_eps, 1e-6f);
  EXPECT_EQ(c.mla.rope_pairs, RopePairs::interleaved);
  EXPECT_EQ(c.indexer.rope_pairs, RopePairs::half_split);
  EXPECT_EQ(c.indexer.rope, 8);
  EXPECT_TRUE(c.rope.yarn);
  EXPECT_FLOAT_EQ(c.rope.factor, 8);
  EXPECT_EQ(c.rope.original_positions, 32);
  EXPECT_FLOAT_EQ(c.rope.beta_fast, 32);
  EXPECT_FLOAT_EQ(c.rope.beta_slow, 1);
  EXPECT_FLOAT_EQ(c.rope.mscale, 1);
  EXPECT_FLOAT_EQ(c.rope.mscale_all_dim, 1);
  const float m = 0.1f * std::log(8.f) + 1;
  EXPECT_FLOAT_EQ(c.mla.softmax_scale, m * m / std::sqrt(22.f));
  EXPECT_EQ(c.moe.groups, 4);
  EXPECT_EQ(c.moe.top_groups, 2);
  EXPECT_EQ(layers_where(c, owns_index), (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(layers_where(c, is_moe), (std::vector<int>{1, 2, 3}));
  EXPECT_EQ(read_golden("deepseek_v32-kernel").mla.kv_lora, 512);
  EXPECT_TRUE(read_golden("deepseek_v32-kernel-fp8").warnings.empty());
}

TEST(GoldenConfig, GlmMoeDsa) {
  const ModelConfig c = read_golden("glm_moe_dsa-tiny");
  EXPECT_EQ(c.family, "glm_moe_dsa");
  EXPECT_FLOAT_EQ(c.mla.latent_norm_eps, 1e-5f);
  EXPECT_FLOAT_EQ(c.indexer.norm_eps, 1e-6f);
  EXPECT_FLOAT_EQ(c.rope.theta, 1e6f);
  EXPECT_FALSE(c.rope.yarn);
  EXPECT_EQ(c.mla.rope_pairs, RopePairs::interleaved);
  EXPECT_EQ(c.indexer.rope_pairs, RopePairs::interleaved);
  EXPECT_EQ(c.indexer.rope, 6);
  EXPECT_FLOAT_EQ(c.mla.softmax_scale, 1 / std::sqrt(24.f));
  EXPECT_EQ(layers_where(c, owns_index), (std::vector<int>{0, 1, 4}));
  EXPECT_EQ(layers_where(c, shares_index), (std::vector<int>{2, 3, 5}));
  EXPECT_EQ(layers_where(c, is_moe), (std::vector<int>{2, 3, 4, 5}));
  EXPECT_EQ(c.eos, (std::vector<int>{1, 2}));
  EXPECT_EQ(read_golden("glm_moe_dsa-kernel").family, "glm_moe_dsa");
}

// ---- the released sizes
// -------------------------------------------------------------------------------------------

Json range(int first, int last, bool (*keep)(int)) {
  Json list = Json::array();
  for (int i = first; i <= last; ++i) {
    if (keep(i)) list.push_back(i);
  }
  return list;
}

Json released_k3() {
  Json json = Json::parse(R"({
    "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "ignore_index": -100,
    "image_placeholder": "<|kimi_image_placeholder|>", "media_placeholder_token_id": 163605,
    "tie_word_embeddings": false, "vision_config": {"hidden_size": 1024},
    "text_config": {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840,
      "hidden_size": 7168, "num_hidden_layers": 93, "num_attention_heads": 96, "num_key_value_heads": 96,
      "intermediate_size": 33792, "hidden_act": "situ", "activation_situ_beta": 4.0,
      "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-05, "max_position_embeddings": 1048576,
      "attn_res_block_size": 12, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
      "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": true, "mla_use_output_gate": true,
      "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2, "moe_intermediate_size": 3072,
      "routed_expert_hidden_size": 3584, "latent_moe_use_norm": true, "first_k_dense_replace": 1,
      "moe_layer_freq": 1, "moe_renormalize": true, "moe_router_activation_func": "sigmoid",
      "routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "use_grouped_topk": true, "num_expert_group": 1,
      "topk_group": 1, "num_nextn_predict_layers": 0, "bos_token_id": 163584, "eos_token_id": 163586,
      "pad_token_id": 163839, "tie_word_embeddings": false, "temperature": 1.0, "top_k": 50,
      "linear_attn_config": {"num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0, "use_full_rank_gate": true}}})");
  Json& lin = json["text_config"]["linear_attn_config"];
  lin["full_attn_layers"] = range(1, 93, [](int i) { return i % 4 == 0 || i == 93; });
  lin["kda_layers"] = range(1, 93, [](int i) { return i % 4 != 0 && i != 93; });
  return json;
}

TEST(ReleasedConfig, KimiLinear48B) {
  Json json = golden("kimi_linear-tiny");
  json.update(Json::parse(R"({"vocab_size": 163840, "hidden_size": 2304, "num_hidden_layers": 27,
    "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 72, "intermediate_size": 9216,
    "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_experts": 256,
    "num_experts_per_token": 8, "moe_intermediate_size": 1024, "linear_attn_config": {"num_heads": 32,
      "head_dim": 128, "short_conv_kernel_size": 4,
      "kda_layers": [1,2,3,5,6,7,9,10,11,13,14,15,17,18,19,21,22,23,25,26],
      "full_attn_layers": [4,8,12,16,20,24,27]}})"));
  const ModelConfig c = read(json);
  EXPECT_EQ(layers_where(c, is_mla), (std::vector<int>{3, 7, 11, 15, 19, 23, 26}));
  EXPECT_EQ(c.hidden, 2304);
  EXPECT_EQ(c.moe.shared_intermediate, 1024);
  EXPECT_NEAR(c.mla.softmax_scale, 0.0721688, 1e-7);
  EXPECT_EQ(layers_where(c, is_moe).size(), 26u);
}

TEST(ReleasedConfig, KimiK3) {
  const ModelConfig c = read(released_k3());
  EXPECT_EQ(c.num_layers(), 93);
  const auto mla = layers_where(c, is_mla);
  EXPECT_EQ(mla.size(), 24u);
  EXPECT_EQ(mla.front(), 3);
  EXPECT_EQ(mla[22], 91);
  EXPECT_EQ(mla[23], 92);
  EXPECT_EQ(layers_where(c, is_moe).size(), 92u);
  EXPECT_EQ(c.attn_res_block, 12);
  EXPECT_EQ(c.moe.shared_intermediate, 6144);
  EXPECT_EQ(c.moe.latent, 3584);
  EXPECT_EQ(c.mla.q_lora, 1536);
  EXPECT_EQ(c.eos, (std::vector<int>{163586}));
  // Generation boilerplate inside config.json is not a sampling default.
  EXPECT_FALSE(c.default_temperature.has_value());
  EXPECT_FALSE(c.default_top_k.has_value());
}

TEST(ReleasedConfig, KimiK31) {
  Json json = released_k3();
  json["architectures"] = {"KimiK31ForConditionalGeneration"};
  json["text_config"]["dsa_config"] = {{"index_n_heads", 32}, {"index_head_dim", 128}};
  const ModelConfig c = read(json);
  EXPECT_EQ(c.family, "kimi_k31");
  EXPECT_EQ(c.indexer.heads, 32);
  EXPECT_EQ(c.indexer.topk, 2048);
  ASSERT_EQ(c.warnings.size(), 1u);
  EXPECT_NE(c.warnings[0].find("index_topk"), std::string::npos);
  EXPECT_EQ(layers_where(c, owns_index).size(), 24u);
}

Json released_flash() {
  Json json = golden("glm5_next-tiny");
  Json& text = json["text_config"];
  text.update(Json::parse(R"({"hidden_size": 4096, "num_hidden_layers": 45, "vocab_size": 154880,
    "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_head_dim": 256, "qk_nope_head_dim": 256, "qk_rope_head_dim": 0, "v_head_dim": 256, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "swiglu_limit": 10.0, "intermediate_size": 12288,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_routed_experts": 288, "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1, "eos_token_id": [154820, 154827, 154829], "pad_token_id": 154820})"));
  Json mlp = Json::array(), types = Json::array(), indexers = Json::array();
  for (int i = 0; i < 45; ++i) {
    mlp.push_back(i < 3 ? "dense" : "sparse");
    types.push_back(i % 4 == 3 ? "deepseek_sparse_attention" : "linear_attention");
    indexers.push_back("full");
  }
  text["mlp_layer_types"] = mlp;
  text["layer_types"] = types;
  text["indexer_types"] = indexers;
  Json& lin = text["linear_attn_config"];
  lin["num_heads"] = 64;
  lin["head_dim"] = 128;
  lin["kda_layers"] = range(0, 44, [](int i) { return i % 4 != 3; });
  lin["full_attn_layers"] = range(0, 44, [](int i) { return i % 4 == 3; });
  return json;
}

TEST(ReleasedConfig, Glm53Flash) {
  const ModelConfig c = read(released_flash());
  EXPECT_EQ(layers_where(c, is_mla), (std::vector<int>{3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43}));
  EXPECT_EQ(layers_where(c, is_moe).size(), 42u);
  EXPECT_FLOAT_EQ(c.mla.softmax_scale, 0.0625f);
  EXPECT_FLOAT_EQ(c.swiglu_limit, 10);
  EXPECT_EQ(c.mtp_layers, 1);
  EXPECT_EQ(c.eos, (std::vector<int>{154820, 154827, 154829}));
  EXPECT_EQ(c.moe.experts, 288);
}

Json released_glm53() {
  Json json = golden("glm_moe_dsa-tiny");
  json.update(Json::parse(R"({"vocab_size": 154880, "hidden_size": 6144, "num_hidden_layers": 78,
    "num_attention_heads": 64, "num_key_value_heads": 64, "head_dim": 192, "q_lora_rank": 2048, "kv_lora_rank": 512,
    "qk_head_dim": 256, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "index_n_heads": 32,
    "index_head_dim": 128, "index_topk": 2048, "intermediate_size": 12288, "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3, "n_routed_experts": 256, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
    "index_topk_freq": 4, "index_skip_topk_offset": 3, "rope_parameters": {"rope_theta": 8000000,
    "rope_type": "default"}})"));
  return json;
}

TEST(ReleasedConfig, Glm53) {
  Json json = released_glm53();
  const ModelConfig c = read(json);
  const auto owners = layers_where(c, owns_index);
  EXPECT_EQ(owners.size(), 21u);
  EXPECT_EQ((std::vector<int>(owners.begin(), owners.begin() + 5)), (std::vector<int>{0, 1, 2, 6, 10}));
  EXPECT_EQ(owners.back(), 74);
  EXPECT_EQ(layers_where(c, shares_index).size(), 57u);
  EXPECT_FLOAT_EQ(c.rope.theta, 8e6f);
  EXPECT_FLOAT_EQ(c.mla.softmax_scale, 0.0625f);
  EXPECT_EQ(c.indexer.rope, 64);

  // The same sharing written as a pattern, as words, and as all three.
  std::string pattern;
  Json words = Json::array();
  for (const LayerSpec& layer : c.layers) {
    pattern += layer.own_indexer ? 'F' : 'S';
    words.push_back(layer.own_indexer ? "full" : "shared");
  }
  json["index_topk_pattern"] = pattern;
  json["indexer_types"] = words;
  EXPECT_EQ(layers_where(read(json), owns_index), owners);
  json.erase("index_topk_freq");
  json.erase("index_skip_topk_offset");
  json["indexer_types"] = nullptr;
  json["index_topk_pattern"] = pattern + "F";  // one letter for the MTP layer
  EXPECT_EQ(layers_where(read(json), owns_index), owners);
  // GLM-5 and 5.1: nothing is shared.
  json.erase("index_topk_pattern");
  EXPECT_EQ(layers_where(read(json), owns_index).size(), 78u);
}

TEST(ReleasedConfig, DeepseekV32) {
  Json json = golden("deepseek_v32-tiny");
  json.update(Json::parse(R"({"vocab_size": 129280, "hidden_size": 7168, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "index_n_heads": 64, "index_head_dim": 128,
    "index_topk": 2048, "intermediate_size": 18432, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840, "rope_scaling": {"type": "yarn", "factor": 40, "beta_fast": 32,
    "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096}})"));
  const ModelConfig c = read(json);
  EXPECT_NEAR(c.mla.softmax_scale, 0.135234, 1e-6);
  EXPECT_EQ(c.rope.original_positions, 4096);
  EXPECT_EQ(c.moe.groups, 8);
  EXPECT_EQ(layers_where(c, owns_index).size(), 61u);
  EXPECT_EQ(layers_where(c, is_moe).front(), 3);
  // mscale is not the factor of the softmax scale.
  EXPECT_NEAR(read(changed(json, "/rope_scaling/mscale", "0.5")).mla.softmax_scale, 0.135234, 1e-6);
  EXPECT_NEAR(read(changed(json, "/rope_scaling/mscale_all_dim", "")).mla.softmax_scale, 0.0721688, 1e-6);
}

}  // namespace
}  // namespace weft
