// What is refused in a config.json, with the words a user will see.
#include <gtest/gtest.h>

#include "model/config_support.h"

namespace weft {
namespace {

struct Broken {
  const char* base;
  const char* pointer;
  const char* value;  // JSON text, "" removes
  const char* expect;
};

const Broken kBroken[] = {
    // sizes
    {"kimi_linear-tiny", "/hidden_size", "", "config.json: hidden_size is missing, expected an integer"},
    {"kimi_linear-tiny", "/hidden_size", "56.5", "hidden_size is 56.5, expected an integer from 1"},
    {"kimi_linear-tiny", "/hidden_size", "\"56\"", "hidden_size is the string \"56\", expected an integer"},
    {"kimi_linear-tiny", "/hidden_size", "true", "hidden_size is true, expected an integer"},
    {"kimi_linear-tiny", "/hidden_size", "-56", "hidden_size is -56, expected an integer from 1"},
    {"kimi_linear-tiny", "/hidden_size", "4294967352", "hidden_size is 4294967352, expected an integer"},
    {"kimi_linear-tiny", "/hidden_size", "0", "hidden_size is 0, expected"},
    {"kimi_linear-tiny", "/hidden_size", "null", "hidden_size is null, expected"},
    {"kimi_linear-tiny", "/hidden_size", "1048577", "hidden_size is 1048577, expected"},
    {"kimi_linear-tiny", "/num_hidden_layers", "5.5", "num_hidden_layers is 5.5, expected"},
    {"kimi_linear-tiny", "/num_hidden_layers", "\"5\"", "num_hidden_layers is the string"},
    {"kimi_linear-tiny", "/num_hidden_layers", "true", "num_hidden_layers is true"},
    {"kimi_linear-tiny", "/num_hidden_layers", "4294967301", "num_hidden_layers is 4294967301"},
    {"kimi_linear-tiny", "/num_hidden_layers", "0", "num_hidden_layers is 0"},
    {"kimi_linear-tiny", "/num_hidden_layers", "null", "num_hidden_layers is null"},
    {"kimi_linear-tiny", "/num_hidden_layers", "10001",
     "num_hidden_layers is 10001, expected an integer from 1 to 10000"},
    {"kimi_linear-tiny", "/vocab_size", "", "vocab_size is missing"},
    {"kimi_linear-tiny", "/intermediate_size", "0", "intermediate_size is 0"},
    {"kimi_linear-tiny", "/rms_norm_eps", "0", "rms_norm_eps is 0, expected a number"},
    {"kimi_linear-tiny", "/rms_norm_eps", "\"1e-5\"", "rms_norm_eps is the string"},
    {"kimi_linear-tiny", "/model_max_length", "", "max_position_embeddings is missing"},
    {"kimi_linear-tiny", "/model_max_length", "1.5", "model_max_length is 1.5"},
    {"glm5_next-tiny", "/text_config/hidden_size", "", "config.json: text_config.hidden_size is missing"},
    {"glm5_next-tiny", "/text_config", "[]", "text_config is an array of 0, expected an object"},
    {"deepseek_v32-tiny", "/num_nextn_predict_layers", "-1", "num_nextn_predict_layers is -1"},
    // attention
    {"kimi_linear-tiny", "/num_key_value_heads", "1",
     "num_key_value_heads is 1, expected num_attention_heads, 5"},
    {"deepseek_v32-tiny", "/attention_bias", "true", "attention_bias is true, expected it off"},
    {"deepseek_v32-tiny", "/attention_bias", "\"no\"", "attention_bias is \"no\", expected it off"},
    {"kimi_linear-tiny", "/kv_lora_rank", "null", "kv_lora_rank is null, expected an integer"},
    {"kimi_linear-tiny", "/q_lora_rank", "\"none\"", "q_lora_rank is the string"},
    {"kimi_linear-tiny", "/mla_use_nope", "false", "mla_use_nope is false, expected true"},
    {"kimi_linear-tiny", "/mla_use_nope", "", "mla_use_nope is missing"},
    {"kimi_linear-tiny", "/rope_theta", "\"x\"", "rope_theta is the string"},
    {"kimi_linear-tiny", "/rope_scaling", "3", "rope_scaling is 3, expected an object"},
    {"glm5_next-tiny", "/text_config/qk_head_dim", "24",
     "text_config.qk_head_dim is 24, expected qk_nope_head_dim + "},
    {"glm5_next-tiny", "/text_config/q_lora_rank", "null",
     "text_config.q_lora_rank is null, expected an integer"},
    {"deepseek_v32-tiny", "/q_lora_rank", "", "q_lora_rank is missing"},
    {"kimi_k31-tiny", "/text_config/q_lora_rank", "null", "text_config.q_lora_rank is null"},
    {"deepseek_v32-tiny", "/mla_use_nope", "true", "mla_use_nope is true, expected it off"},
    // activation, residual, foreign features
    {"kimi_linear-tiny", "/hidden_act", "\"gelu\"", "hidden_act is \"gelu\", expected silu"},
    {"kimi_linear-tiny", "/hidden_act", "\"situ\"", "hidden_act is \"situ\", expected silu"},
    {"kimi_k3-tiny", "/text_config/hidden_act", "\"relu\"",
     "text_config.hidden_act is \"relu\", expected situ or silu"},
    {"kimi_k3-tiny", "/text_config/activation_situ_beta", "", "activation_situ_beta is missing"},
    {"kimi_k3-tiny", "/text_config/activation_situ_beta", "0", "activation_situ_beta is 0"},
    {"kimi_k3-tiny", "/text_config/attn_res_block_size", "0", "attn_res_block_size is 0"},
    {"kimi_k3-tiny", "/text_config/attn_res_block_size", "", "attn_res_block_size is missing"},
    {"kimi_k3-tiny", "/text_config/mla_use_output_gate", "", "mla_use_output_gate is missing"},
    {"kimi_k3-tiny", "/text_config/routed_expert_hidden_size", "", "routed_expert_hidden_size is missing"},
    {"kimi_linear-tiny", "/attn_res_block_size", "12",
     "attn_res_block_size is 12, expected it off or absent"},
    {"kimi_linear-tiny", "/mla_use_output_gate", "true", "mla_use_output_gate is true, expected it off"},
    {"glm5_next-tiny", "/text_config/swiglu_limit", "", "text_config.swiglu_limit is missing"},
    {"glm5_next-tiny", "/text_config/swiglu_limit", "0", "text_config.swiglu_limit is 0"},
    {"glm5_next-tiny", "/text_config/mhc", "false", "text_config.mhc is false, expected true"},
    {"glm5_next-tiny", "/text_config/hc_mult", "0", "text_config.hc_mult is 0"},
    {"glm5_next-tiny", "/text_config/hc_sinkhorn_iters", "0", "text_config.hc_sinkhorn_iters is 0"},
    {"glm_moe_dsa-tiny", "/swiglu_limit", "10.0", "swiglu_limit is 10.0, expected it off"},
    // KDA
    {"kimi_linear-tiny", "/linear_attn_config", "", "linear_attn_config is missing, expected an object"},
    {"kimi_linear-tiny", "/linear_attn_config/num_heads", "0", "linear_attn_config.num_heads is 0"},
    {"kimi_linear-tiny", "/linear_attn_config/head_dim", "20000", "linear_attn_config.head_dim is 20000"},
    {"kimi_linear-tiny", "/linear_attn_config/short_conv_kernel_size", "1", "short_conv_kernel_size is 1"},
    {"kimi_linear-tiny", "/linear_attn_config/gate_lower_bound", "-6", "gate_lower_bound is -6"},
    {"kimi_linear-tiny", "/linear_attn_config/gate_lower_bound", "0", "gate_lower_bound is 0"},
    {"kimi_linear-tiny", "/linear_attn_config/safe_gate", "true",
     "linear_attn_config.safe_gate is true, expected the gate form given by gate_lower_bound"},
    {"glm5_next-tiny", "/text_config/linear_attn_config/lower_bound", "-5",
     "linear_attn_config.lower_bound is -5"},
    {"glm5_next-tiny", "/text_config/linear_attn_config/gate_lower_bound", "", "gate_lower_bound is missing"},
    {"kimi_k3-tiny", "/text_config/linear_attn_config/gate_lower_bound", "", "gate_lower_bound is missing"},
    {"kimi_k3-tiny", "/text_config/linear_attn_config/use_full_rank_gate", "",
     "use_full_rank_gate is missing"},
    {"kimi_k3-tiny", "/text_config/linear_attn_config/use_full_rank_gate", "1",
     "use_full_rank_gate is 1, expected true"},
    // layer lists
    {"kimi_linear-tiny", "/linear_attn_config/kda_layers", "",
     "kda_layers is missing, expected an array of layer"},
    {"kimi_linear-tiny", "/linear_attn_config/kda_layers", "3",
     "kda_layers is 3, expected an array of layer numbers"},
    {"kimi_linear-tiny", "/linear_attn_config/kda_layers", "[1,2]",
     "linear_attn_config.kda_layers and full_attn_layers leave out layer 4 (numbers start at 1)"},
    {"kimi_linear-tiny", "/linear_attn_config/kda_layers", "[1,2,4,5]",
     "linear_attn_config.full_attn_layers names layer 5 (numbers start at 1), which config.json: "
     "linear_attn_config.kda_layers already names"},
    {"kimi_linear-tiny", "/linear_attn_config/kda_layers", "[1,2,4,4]", "kda_layers names layer 4"},
    {"kimi_linear-tiny", "/linear_attn_config/kda_layers", "[0,1,3]",
     "kda_layers[0] is 0, expected an integer from 1 to 5"},
    {"kimi_linear-tiny", "/linear_attn_config/full_attn_layers", "[3,6]", "full_attn_layers[1] is 6"},
    {"kimi_linear-tiny", "/linear_attn_config/full_attn_layers", "[3,\"5\"]",
     "full_attn_layers[1] is the string"},
    {"glm5_next-tiny", "/text_config/linear_attn_config/kda_layers", "[1,2,4,6]", "kda_layers[3] is 6"},
    {"glm5_next-tiny", "/text_config/layer_types/0", "\"deepseek_sparse_attention\"",
     "layer_types[0] is deepseek_sparse_attention, expected what linear_attn_config.kda_layers says of layer "
     "0"},
    {"glm5_next-tiny", "/text_config/layer_types/0", "\"sliding_attention\"",
     "layer_types[0] is sliding_attention"},
    {"glm5_next-tiny", "/text_config/layer_types", "[\"linear_attention\"]",
     "layer_types has 1 entries, expected one"},
    // MoE
    {"kimi_linear-tiny", "/num_experts", "", "num_experts is missing"},
    {"kimi_linear-tiny", "/num_experts_per_token", "8",
     "num_experts_per_token is 8, expected at most num_experts 7"},
    {"kimi_linear-tiny", "/moe_router_activation_func", "\"softmax\"",
     "moe_router_activation_func is \"softmax\", expected sigmoid"},
    {"deepseek_v32-tiny", "/scoring_func", "\"softmax\"", "scoring_func is \"softmax\", expected sigmoid"},
    {"deepseek_v32-tiny", "/scoring_func", "", "scoring_func is missing"},
    {"deepseek_v32-tiny", "/topk_method", "\"greedy\"", "topk_method is \"greedy\", expected noaux_tc"},
    {"deepseek_v32-tiny", "/n_group", "5", "n_group is 5, expected a divisor of n_routed_experts 12"},
    {"deepseek_v32-tiny", "/n_group", "12", "n_group is 12, expected at least 2 experts in each group"},
    {"deepseek_v32-tiny", "/topk_group", "5", "topk_group is 5, expected at most n_group 4"},
    {"deepseek_v32-tiny", "/num_experts_per_tok", "7",
     "num_experts_per_tok is 7, expected at most the 6 experts"},
    {"deepseek_v32-tiny", "/norm_topk_prob", "", "norm_topk_prob is missing"},
    {"deepseek_v32-tiny", "/routed_scaling_factor", "true",
     "routed_scaling_factor is true, expected a number"},
    {"deepseek_v32-tiny", "/routed_scaling_factor", "0", "routed_scaling_factor is 0"},
    {"deepseek_v32-tiny", "/first_k_dense_replace", "", "first_k_dense_replace is missing"},
    {"deepseek_v32-tiny", "/first_k_dense_replace", "5",
     "first_k_dense_replace is 5, expected an integer from 0 to 4"},
    {"deepseek_v32-tiny", "/moe_layer_freq", "0", "moe_layer_freq is 0"},
    {"kimi_k3-tiny", "/text_config/use_grouped_topk", "\"yes\"", "use_grouped_topk is the string"},
    {"glm5_next-tiny", "/text_config/mlp_layer_types/0", "\"sparse\"",
     "mlp_layer_types[0] is sparse, expected what first_k_dense_replace and moe_layer_freq say of layer 0"},
    {"glm5_next-tiny", "/text_config/mlp_layer_types/0", "\"wide\"",
     "mlp_layer_types[0] is wide, expected dense or sparse"},
    {"glm5_next-tiny", "/text_config/mlp_layer_types/0", "7", "mlp_layer_types[0] is 7, expected a string"},
    // indexer
    {"deepseek_v32-tiny", "/index_topk", "", "index_topk is missing"},
    {"deepseek_v32-tiny", "/index_n_heads", "0", "index_n_heads is 0"},
    {"deepseek_v32-tiny", "/index_head_dim", "4",
     "index_head_dim is 4, expected at least qk_rope_head_dim, 8"},
    {"deepseek_v32-tiny", "/index_kpool", "4", "index_kpool is 4, expected 1"},
    {"glm5_next-tiny", "/text_config/index_topk", "18",
     "text_config.index_topk is 18, expected a multiple of index_kpool, 4"},
    {"glm5_next-tiny", "/text_config/index_kpool", "", "text_config.index_kpool is missing"},
    {"glm5_next-tiny", "/text_config/index_kpool_compress", "false",
     "index_kpool_compress is false, expected true"},
    {"glm5_next-tiny", "/text_config/index_kpool_always_select_tail", "false",
     "always_select_tail is false, expected true"},
    {"glm5_next-tiny", "/text_config/indexer_types/2", "\"shared\"",
     "text_config.indexer_types makes layer 2 share an index, but no layer before it has an indexer"},
    {"glm5_next-tiny", "/text_config/indexer_types/2", "\"half\"",
     "indexer_types[2] is half, expected full or shared"},
    {"glm_moe_dsa-tiny", "/index_topk_freq", "0", "index_topk_freq is 0"},
    {"glm_moe_dsa-tiny", "/index_topk_pattern", "\"FFSSF\"",
     "index_topk_pattern is \"FFSSF\", expected one letter F or S"},
    {"glm_moe_dsa-tiny", "/index_topk_pattern", "\"FFSSFf\"",
     "index_topk_pattern is \"FFSSFf\", expected one letter"},
    {"glm_moe_dsa-tiny", "/index_topk_pattern", "\"FFSFSS\"",
     "index_topk_pattern and config.json: index_topk_freq disagree on whether layer 3 has its own indexer"},
    {"deepseek_v32-tiny", "/index_topk_pattern", "\"SFSS\"",
     "index_topk_pattern makes layer 0 share an index"},
    // rope
    {"deepseek_v32-tiny", "/rope_theta", "", "rope_theta is missing"},
    {"deepseek_v32-tiny", "/qk_rope_head_dim", "7", "qk_rope_head_dim is 7, expected a positive even number"},
    {"deepseek_v32-tiny", "/qk_rope_head_dim", "0", "qk_rope_head_dim is 0, expected a positive even number"},
    {"deepseek_v32-tiny", "/rope_scaling/factor", "", "rope_scaling.factor is missing"},
    {"deepseek_v32-tiny", "/rope_scaling/factor", "0.5", "rope_scaling.factor is 0.5"},
    {"deepseek_v32-tiny", "/rope_scaling/beta_fast", "", "rope_scaling.beta_fast is missing"},
    {"deepseek_v32-tiny", "/rope_scaling/beta_slow", "64",
     "rope_scaling.beta_slow is 64, expected at most beta_fast 32"},
    {"deepseek_v32-tiny", "/rope_scaling/original_max_position_embeddings", "",
     "rope_scaling.original_max_position_embeddings is missing"},
    {"deepseek_v32-tiny", "/rope_scaling/type", "\"linear\"",
     "rope_scaling.type is \"linear\", expected default or yarn"},
    {"deepseek_v32-tiny", "/rope_scaling/attention_factor", "1.2", "rope_scaling.attention_factor is 1.2"},
    {"deepseek_v32-tiny", "/rope_parameters", R"({"rope_type": "default"})", "rope_scaling is {"},
    {"glm_moe_dsa-tiny", "/rope_theta", "10000",
     "rope_theta is 10000, expected 1000000 as in config.json: rope_parameters"},
    {"glm_moe_dsa-tiny", "/rope_parameters/rope_type", "\"llama3\"",
     "rope_parameters.rope_type is \"llama3\""},
    {"glm_moe_dsa-tiny", "/rope_interleave", "\"yes\"", "rope_interleave is the string"},
    // tokens, tying, quantization
    {"kimi_linear-tiny", "/eos_token_id", "131", "eos_token_id is 131, expected an integer from 0 to 130"},
    {"kimi_linear-tiny", "/eos_token_id", "[2, 131]", "eos_token_id[1] is 131"},
    {"kimi_linear-tiny", "/eos_token_id", "\"2\"", "eos_token_id is the string"},
    {"kimi_linear-tiny", "/eos_token_id", "-1", "eos_token_id is -1"},
    {"kimi_linear-tiny", "/bos_token_id", "131", "bos_token_id is 131"},
    {"kimi_linear-tiny", "/tie_word_embeddings", "\"false\"", "tie_word_embeddings is the string"},
    {"glm5_next-tiny", "/text_config/tie_word_embeddings", "true",
     "tie_word_embeddings is false but config.json: text_config.tie_word_embeddings is true"},
    {"deepseek_v32-kernel-fp8", "/quantization_config/weight_block_size", "[64, 128]",
     "quantization_config.weight_block_size is [64,128], expected [128, 128]"},
    {"deepseek_v32-kernel-fp8", "/quantization_config/ignore", "7",
     "quantization_config.ignore is 7, expected an array"},
    {"deepseek_v32-kernel-fp8", "/quantization_config", "\"fp8\"", "quantization_config is the string"},
    // K3.1 without a checkpoint: everything must be in dsa_config
    {"kimi_k31-tiny", "/text_config/dsa_config", "8", "text_config.dsa_config is 8, expected an object"},
    {"kimi_k31-tiny", "/text_config/dsa_config/index_n_heads", "", "dsa_config.index_n_heads is missing"},
    {"kimi_k31-tiny", "/text_config/dsa_config/index_head_dim", "", "dsa_config.index_head_dim is missing"},
    {"kimi_k31-tiny", "/text_config/dsa_config/index_topk", "0", "dsa_config.index_topk is 0"},
    {"kimi_k31-tiny", "/text_config/dsa_config/top_k", "32",
     "dsa_config.top_k is 32, expected 16 as in config.json: text_config.dsa_config.index_topk"},
    {"kimi_k31-tiny", "/text_config/dsa_config/dsa_layers", "[4,8]",
     "dsa_layers leaves out layer 9 (numbers start at 1), expected exactly "
     "linear_attn_config.full_attn_layers"},
    {"kimi_k31-tiny", "/text_config/dsa_config/dsa_layers", "[3,7,8]", "dsa_layers names layer 3"},
    {"kimi_k31-tiny-alt", "/dsa_config/layers", "[4,8,9,10]", "dsa_config.layers[3] is 10"},
    // the family
    {"kimi_linear-tiny", "/architectures/0", "\"LlamaForCausalLM\"",
     "architectures is [\"LlamaForCausalLM\"] and model_type is \"kimi_linear\", expected one of the "
     "families "
     "deepseek_v32, glm5_next, glm_moe_dsa, kimi_k3, kimi_k31, kimi_linear"},
    {"kimi_linear-tiny", "/architectures", "\"KimiLinearForCausalLM\"", "expected one of the families"},
    {"kimi_linear-tiny", "/architectures", "[]", "expected one of the families"},
    {"kimi_linear-tiny", "/model_type", "\"llama\"", "model_type is \"llama\", expected one of the families"},
    {"kimi_linear-tiny", "/model_type", "7", "model_type is 7, expected one of the families"},
    {"kimi_k3-tiny-dspark", "/vocab_size", "256", "architectures is [\"K3DSparkModel\"]"},
};

TEST(BrokenConfig, EachIsRefusedInOneLineNamingTheKey) {
  static_assert(std::size(kBroken) >= 60);
  for (const Broken& broken : kBroken) {
    SCOPED_TRACE(fmt::format("{} {} = {}", broken.base, broken.pointer, broken.value));
    expect_error(changed(golden(broken.base), broken.pointer, broken.value), broken.expect);
  }
}

// Whatever stands at whatever key: read, or one Error; nothing else gets out.
TEST(BrokenConfig, AnyValueAtAnyKey) {
  const Json values = Json::parse(R"([null, true, "", "x", -1, 0, 0.5, 1e300, 9223372036854775807,
                                      18446744073709551615, [], [[]], [1e300], ["x"], {}, {"a": []}])");
  int refused = 0, tried = 0;
  for (const char* folder : {"kimi_linear-tiny", "kimi_k3-kernel", "kimi_k31-tiny-alt", "glm5_next-tiny",
                             "glm_moe_dsa-tiny", "deepseek_v32-kernel-fp8"}) {
    const Json base = golden(folder), flat = base.flatten();
    std::vector<Json::json_pointer> places;
    for (const auto& item : flat.items()) {
      for (Json::json_pointer at(item.key()); !at.empty(); at = at.parent_pointer()) places.push_back(at);
    }
    for (const auto& place : places) {
      for (const Json& value : values) {
        Json json = base;
        json[place] = value;
        ++tried;
        refused += error_of(json) != "accepted";
      }
    }
  }
  EXPECT_GT(tried, 5000);
  EXPECT_GT(refused, tried / 4);
}

TEST(BrokenConfig, NotAnObjectOrWithoutNames) {
  expect_error(Json::parse("[]"), "architectures is missing and model_type is missing");
  expect_error(Json::parse("{}"), "architectures is missing and model_type is missing");
}

}  // namespace
}  // namespace weft
