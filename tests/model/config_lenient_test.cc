// What real config.json files write in several ways, Kimi-K3.1 by its tensors, and generation_config.json.
#include <gtest/gtest.h>
#include <unistd.h>

#include <fstream>
#include <map>
#include <tuple>

#include "model/checkpoint.h"
#include "model/config_support.h"

namespace weft {
namespace {

TEST(LenientConfig, WholeFloatsAreIntegersAndIntegersAreFloats) {  // R02
  const Json base = golden("kimi_linear-tiny");
  EXPECT_EQ(read(changed(base, "/hidden_size", "56.0")).hidden, 56);
  EXPECT_EQ(read(changed(base, "/num_experts_per_token", "3.0")).moe.top_k, 3);
  EXPECT_FLOAT_EQ(read(changed(base, "/routed_scaling_factor", "2446e-3")).moe.scale, 2.446f);
  EXPECT_FLOAT_EQ(read(changed(base, "/routed_scaling_factor", "3")).moe.scale, 3);
  EXPECT_EQ(read(changed(base, "/rope_theta", "10000")).hidden, 56);
  EXPECT_EQ(read(changed(base, "/num_hidden_layers", "5.0")).num_layers(), 5);
}

TEST(LenientConfig, Tying) {  // R18
  const Json kl = golden("kimi_linear-tiny"), glm = golden("glm5_next-tiny");
  EXPECT_TRUE(read(changed(kl, "/tie_word_embeddings", "true")).tie_embeddings);
  EXPECT_FALSE(read(changed(kl, "/tie_word_embeddings", "")).tie_embeddings);
  EXPECT_FALSE(read(changed(kl, "/tie_word_embeddings", "null")).tie_embeddings);
  EXPECT_TRUE(read(changed(glm, "/tie_word_embeddings", "true")).tie_embeddings);
  const Json inner = changed(glm, "/text_config/tie_word_embeddings", "true");
  EXPECT_TRUE(read(changed(inner, "/tie_word_embeddings", "true")).tie_embeddings);
  EXPECT_TRUE(read(changed(inner, "/tie_word_embeddings", "")).tie_embeddings);
}

TEST(LenientConfig, DtypeWords) {  // R21
  for (const char* folder : {"kimi_linear-tiny", "glm5_next-tiny"}) {
    const Json none = changed(golden(folder), "/dtype", "");
    EXPECT_TRUE(read(none).warnings.empty());
    for (const char* word : {"\"bfloat16\"", "\"torch.bfloat16\"", "\"float16\"", "\"float32\"", "null"}) {
      EXPECT_TRUE(read(changed(none, "/torch_dtype", word)).warnings.empty()) << word;
      EXPECT_TRUE(read(changed(none, "/dtype", word)).warnings.empty()) << word;
    }
    for (const char* word : {"\"bf17\"", "16", "[]"}) {
      const auto warnings = read(changed(none, "/dtype", word)).warnings;
      ASSERT_EQ(warnings.size(), 1u) << word;
      EXPECT_NE(warnings[0].find("config.json: dtype is "), std::string::npos) << warnings[0];
    }
  }
  const Json mixed = changed(golden("glm5_next-tiny"), "/dtype", "\"float32\"");
  EXPECT_TRUE(read(mixed).warnings.empty());
}

TEST(LenientConfig, QuantizationListsAreKept) {  // R22
  const Json base = golden("deepseek_v32-kernel-fp8");
  for (const char* key : {"modules_to_not_convert", "ignored_layers", "ignore"}) {
    const Json json = changed(base, std::string("/quantization_config/") + key, R"(["lm_head", "re:.*x"])");
    EXPECT_EQ(read(json).unquantized_modules, (std::vector<std::string>{"lm_head", "re:.*x"})) << key;
  }
  const auto warnings = read(changed(base, "/quantization_config/quant_method", "\"awq\"")).warnings;
  ASSERT_EQ(warnings.size(), 1u);
  EXPECT_NE(warnings[0].find("quant_method is \"awq\""), std::string::npos);
}

TEST(LenientConfig, EitherNameOfTheFamilySuffices) {
  for (const char* folder : {"kimi_linear-tiny", "kimi_k3-tiny", "kimi_k31-tiny", "glm5_next-tiny",
                             "glm_moe_dsa-tiny", "deepseek_v32-tiny"}) {
    const std::string family = read_golden(folder).family;
    EXPECT_EQ(read(changed(golden(folder), "/architectures", "")).family, family);
    EXPECT_EQ(read(changed(golden(folder), "/model_type", "")).family, family);
  }
}

TEST(LenientConfig, TextPartAtTopLevel) {
  for (const char* folder : {"kimi_k3-tiny", "kimi_k31-tiny", "glm5_next-tiny"}) {
    const Json json = golden(folder);
    Json flat = json.at("text_config");
    flat["architectures"] = json.at("architectures");
    flat["model_type"] = json.at("model_type");
    EXPECT_EQ(read(flat).family, read(json).family);
    EXPECT_EQ(read(flat).hidden, read(json).hidden);
  }
}

TEST(LenientConfig, MlpLayerTypesAlone) {
  const Json json = changed(golden("glm5_next-tiny"), "/text_config/first_k_dense_replace", "");
  EXPECT_EQ(layers_where(read(json), is_moe), (std::vector<int>{2, 3, 4, 5}));
  Json every = golden("deepseek_v32-tiny");
  every["moe_layer_freq"] = 2;
  EXPECT_EQ(layers_where(read(every), is_moe), (std::vector<int>{2}));
}

TEST(LenientConfig, WordsForMtpLayersToo) {
  Json json = golden("glm5_next-tiny-vision");  // 6 layers and one MTP layer
  Json& text = json["text_config"];
  text["layer_types"].push_back("deepseek_sparse_attention");
  text["mlp_layer_types"].push_back("sparse");
  text["indexer_types"].push_back("full");
  EXPECT_EQ(read(json).num_layers(), 6);
  text["indexer_types"].push_back("full");
  expect_error(json, "indexer_types has 8 entries, expected one for each of the 6 layers");
}

TEST(LenientConfig, RopeSpellings) {
  Json json = golden("deepseek_v32-tiny");
  const float scale = read(json).mla.softmax_scale;
  json["rope_parameters"] = json["rope_scaling"];
  json["rope_parameters"]["rope_theta"] = json["rope_theta"];
  json["rope_parameters"]["rope_type"] = "yarn";
  json.erase("rope_theta");
  json.erase("rope_scaling");
  EXPECT_FLOAT_EQ(read(json).mla.softmax_scale, scale);
  json["rope_interleave"] = false;
  json["indexer_rope_interleave"] = true;
  EXPECT_EQ(read(json).mla.rope_pairs, RopePairs::half_split);
  EXPECT_EQ(read(json).indexer.rope_pairs, RopePairs::interleaved);
  json["rope_parameters"] = {{"rope_theta", 10000}};
  EXPECT_FALSE(read(json).rope.yarn);
}

TEST(KimiK31, RuleByConfigOnly) {
  // Any class name, dsa_config in either place.
  for (const char* name : {"KimiK3ForConditionalGeneration", "KimiK31ForConditionalGeneration"}) {
    for (const char* type : {"kimi_k3", "kimi_k31", "kimi_linear"}) {
      Json json = golden("kimi_k31-tiny-alt");
      json["architectures"] = {name};
      json["model_type"] = type;
      EXPECT_EQ(read(json).family, "kimi_k31");
      json.erase("dsa_config");
      const ModelConfig plain = read(json);
      EXPECT_EQ(plain.family, "kimi_k3");
      EXPECT_EQ(plain.warnings.empty(), std::string(name) == "KimiK3ForConditionalGeneration");
    }
  }
  Json json = golden("kimi_k31-tiny-alt");
  json["dsa_config"].erase("layers");  // full_attn_layers is the list anyway
  EXPECT_EQ(layers_where(read(json), owns_index), (std::vector<int>{3, 7, 8}));
}

// ---- K3.1 by its tensors (kimi_k31.md 2.3)
// ------------------------------------------------------------------------

using Shapes = std::map<std::string, std::vector<int64_t>>;

class KimiK31Tensors : public ::testing::Test {
 protected:
  KimiK31Tensors() {
    folder_ = fs::path(testing::TempDir()) / fmt::format("weft_k31_{}", ::getpid());
    fs::create_directories(folder_);
    json_ = golden("kimi_k3-tiny");
    for (int layer : {3, 7, 8}) add_indexer(layer, "language_model.model.");
  }
  ~KimiK31Tensors() override { fs::remove_all(folder_); }

  void add_indexer(int layer, const std::string& prefix, const std::string& suffix = ".weight") {
    const std::string at = fmt::format("{}layers.{}.self_attn.indexer.", prefix, layer);
    shapes_[at + "wq_b" + suffix] = {256, 32};
    shapes_[at + "wk" + suffix] = {32, 64};
    shapes_[at + "weights_proj" + suffix] = {8, 64};
    shapes_[at + "k_norm" + suffix] = {32};
  }
  // The folder with json_ and tensors of the given shapes, all of type U8.
  Checkpoint open() {
    std::ofstream(folder_ / "config.json") << json_.dump();
    Json header = Json::object();
    int64_t end = 0;
    for (const auto& [name, shape] : shapes_) {
      int64_t bytes = 1;
      for (int64_t dim : shape) bytes *= dim;
      header[name] = {{"dtype", "U8"}, {"shape", shape}, {"data_offsets", {end, end + bytes}}};
      end += bytes;
    }
    const std::string text = header.dump();
    const uint64_t length = text.size();
    std::ofstream file(folder_ / "model.safetensors", std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof length);
    file << text << std::string(static_cast<size_t>(end), '\0');
    file.close();
    return Checkpoint(folder_.string());
  }
  ModelConfig read_all() {
    const Checkpoint checkpoint = open();
    const std::string where = checkpoint.config_path();
    return find_arch(json_, where, &checkpoint).read(json_, where, &checkpoint);
  }
  void expect_refused(const std::string& fragment) {
    std::string message = "accepted";
    try {
      read_all();
    } catch (const Error& error) {
      message = error.what();
    }
    EXPECT_NE(message.find(fragment), message.npos) << "message:  " << message << "\nexpected: " << fragment;
  }

  fs::path folder_;
  Json json_;
  Shapes shapes_ = {{"language_model.model.norm.weight", {64}}};
  const std::string at_ = "language_model.model.layers.7.self_attn.indexer.";
};

TEST_F(KimiK31Tensors, TensorsAloneDecide) {
  const ModelConfig c = read_all();
  EXPECT_EQ(c.family, "kimi_k31");
  EXPECT_EQ(c.indexer.heads, 8);
  EXPECT_EQ(c.indexer.dim, 32);
  EXPECT_EQ(c.indexer.topk, 2048);
  ASSERT_EQ(c.warnings.size(), 1u);
  EXPECT_NE(c.warnings[0].find("2048"), std::string::npos);
  EXPECT_EQ(layers_where(c, owns_index), (std::vector<int>{3, 7, 8}));
}

TEST_F(KimiK31Tensors, AnyPrefixAndSuffix) {
  for (const char* prefix : {"model.", "language_model.", "model.language_model.", ""}) {
    for (const char* suffix : {".weight", ""}) {
      shapes_ = {{"norm", {64}}};
      for (int layer : {3, 7, 8}) add_indexer(layer, prefix, suffix);
      EXPECT_EQ(read_all().family, "kimi_k31") << prefix << suffix;
    }
  }
  shapes_ = {{"norm", {64}}};
  EXPECT_EQ(read_all().family, "kimi_k3");
}

TEST_F(KimiK31Tensors, ConfigIsComparedWithShapes) {
  json_["dsa_config"] = {{"n_heads", 8}, {"indexer_head_dim", 32}, {"top_k", 16}};
  EXPECT_EQ(read_all().indexer.topk, 16);
  EXPECT_TRUE(read_all().warnings.empty());
  json_["dsa_config"]["n_heads"] = 4;
  expect_refused("dsa_config: the indexer's number of heads is 4, expected 8 as in its tensors");
  json_["dsa_config"] = {{"head_dim", 128}};
  expect_refused("dsa_config: the indexer's key size is 128, expected 32 as in its tensors");
}

TEST_F(KimiK31Tensors, OwnersAreTheFullAttentionLayers) {
  const Shapes good = shapes_;
  for (const char* name : {"wq_b", "wk", "weights_proj", "k_norm"}) shapes_.erase(at_ + name + ".weight");
  expect_refused("layer 7 (from 0) is a full-attention layer without self_attn.indexer.wq_b");
  shapes_ = good;
  add_indexer(2, "language_model.model.");
  expect_refused("layer 2 (from 0) is no full-attention layer but has self_attn.indexer.wq_b");
  shapes_ = {{"norm", {64}}};
  json_["dsa_config"] = {{"num_heads", 8}, {"head_dim", 32}, {"topk", 16}};
  expect_refused("layer 3 (from 0) is a full-attention layer without self_attn.indexer.wq_b");
}

TEST_F(KimiK31Tensors, Shapes) {
  const Shapes good = shapes_;
  const std::tuple<const char*, std::vector<int64_t>, const char*> cases[] = {
      {"wq_b",
       {256, 33},
       "indexer.wq_b.weight has shape [256, 33], expected [256, 32]: heads x index key by q_lora_rank"},
      {"wq_b", {255, 32}, "has shape [255, 32], expected [256, 32]"},
      {"wk", {32, 63}, "indexer.wk.weight has shape [32, 63], expected [32, 64]: index key by hidden_size"},
      {"wk", {}, "indexer.wk.weight has shape []"},
      {"wk", {16, 64}, "expected [128, 32]: heads x index key"},
      {"weights_proj", {8, 60}, "expected [8, 64]: indexer heads by hidden_size"},
      {"weights_proj", {512}, "expected [512, 64]"},
      {"weights_proj", {0, 64}, "layer 7 has an indexer of 0 heads x 32"},
  };
  for (const auto& [name, shape, expect] : cases) {
    shapes_ = good;
    shapes_[at_ + name + ".weight"] = shape;
    expect_refused(expect);
  }
  for (const char* name : {"wk", "weights_proj", "k_norm"}) {
    shapes_ = good;
    shapes_.erase(at_ + name + ".weight");
    expect_refused(fmt::format("layer 7 has self_attn.indexer.wq_b but no self_attn.indexer.{}", name));
  }
  shapes_ = good;
  shapes_[at_ + "wk.weight"] = {16, 64};
  shapes_[at_ + "wq_b.weight"] = {128, 32};
  expect_refused("layer 7 has an indexer of 8 heads x 16, expected 8 x 32 as in the layers before");
}

TEST_F(KimiK31Tensors, ABadLayerCountIsNamedByRead) {
  json_["text_config"]["num_hidden_layers"] = "9";
  expect_refused("text_config.num_hidden_layers is the string");
}

// ---- generation_config.json
// ---------------------------------------------------------------------------------------

class GenerationConfig : public ::testing::Test {
 protected:
  GenerationConfig() {
    folder_ = fs::path(testing::TempDir()) / fmt::format("weft_config_{}", ::getpid());
    fs::create_directories(folder_);
  }
  ~GenerationConfig() override { fs::remove_all(folder_); }
  std::string where() const { return (folder_ / "config.json").string(); }
  void write(const std::string& text) { std::ofstream(folder_ / "generation_config.json") << text; }

  fs::path folder_;
  Json base_ = golden("deepseek_v32-tiny");
};

TEST_F(GenerationConfig, AddsItsStopIdsAndDefaults) {  // R19
  base_["eos_token_id"] = 2;
  EXPECT_EQ(read(base_, where()).stop, (std::vector<int>{2}));
  write(R"({"eos_token_id": [3, 4, 2], "temperature": 0.6, "top_p": 0.95, "top_k": 20, "do_sample": true})");
  const ModelConfig c = read(base_, where());
  EXPECT_EQ(c.eos, (std::vector<int>{2}));
  EXPECT_EQ(c.stop, (std::vector<int>{2, 3, 4}));
  EXPECT_FLOAT_EQ(c.default_temperature.value(), 0.6f);
  EXPECT_FLOAT_EQ(c.default_top_p.value(), 0.95f);
  EXPECT_EQ(c.default_top_k.value(), 20);
  EXPECT_TRUE(c.warnings.empty());
  write(R"({"eos_token_id": 5})");
  EXPECT_EQ(read(base_, where()).stop, (std::vector<int>{2, 5}));
}

TEST_F(GenerationConfig, NullAndEmptyObject) {
  for (const char* text : {R"({"eos_token_id": null, "temperature": null})", "{}"}) {
    write(text);
    const ModelConfig c = read(base_, where());
    EXPECT_EQ(c.stop, (std::vector<int>{1})) << text;
    EXPECT_FALSE(c.default_temperature.has_value()) << text;
  }
  base_.erase("eos_token_id");
  const ModelConfig c = read(base_, where());
  EXPECT_TRUE(c.stop.empty());
  ASSERT_EQ(c.warnings.size(), 1u);
  EXPECT_NE(c.warnings[0].find("no eos_token_id"), std::string::npos);
}

TEST_F(GenerationConfig, BrokenOnesAreRefused) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "generation_config.json is empty"},
      {"{\"eos_token_id\": ", "generation_config.json: not valid JSON"},
      {"[1]", "generation_config.json is an array of 1, expected a JSON object"},
      {R"({"eos_token_id": "2"})", "generation_config.json: eos_token_id is the string"},
      {R"({"eos_token_id": [1, 127]})", "generation_config.json: eos_token_id[1] is 127"},
      {R"({"temperature": "hot"})", "generation_config.json: temperature is the string"},
      {R"({"temperature": -1})", "generation_config.json: temperature is -1"},
      {R"({"top_p": 1.5})", "generation_config.json: top_p is 1.5"},
      {R"({"top_k": 2.5})", "generation_config.json: top_k is 2.5"},
  };
  for (const auto& [text, expect] : cases) {
    SCOPED_TRACE(text);
    write(text);
    expect_error(base_, expect, where());
  }
}

TEST_F(GenerationConfig, EosIdsOfBothPartsCount) {
  Json json = golden("glm5_next-tiny");
  json["eos_token_id"] = 7;
  EXPECT_EQ(read(json, where()).eos, (std::vector<int>{1, 2, 3, 7}));
}

}  // namespace
}  // namespace weft
