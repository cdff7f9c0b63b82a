// Odd but legal checkpoints, and broken ones: golden folders rewritten. What verifies must give the golden
// logits; what is refused is refused by name, and the unchanged copy beside it loads.
#include <gtest/gtest.h>

#include "engine/model_rig.h"
#include "engine/verify.h"
#include "rewrite.h"

namespace weft {
namespace {

using test::Ids;
using test::Logits;
using test::Rig;
using test::tiny_folder;
using weft::testing::Rewrite;
using weft::testing::Stored;

void expect_verifies(const Rewrite& copy, const std::string& what, const std::string& isa = "portable") {
  TemporaryFolder folder;
  copy.write(folder.path());
  VerifyOptions options;
  options.isa = isa;
  options.threads = 2;
  try {
    for (const VerifyRow& row : verify(folder.path(), options).rows)
      EXPECT_TRUE(row.pass) << what << ", " << isa << ": " << row.name << " error " << row.error << " bound "
                            << row.bound;
  } catch (const Error& error) {
    ADD_FAILURE() << what << ", " << isa << ": " << error.what();
  }
}

// What the model says when it is loaded, "" when it loads.
std::string refusal(const Rewrite& copy) {
  TemporaryFolder folder;
  copy.write(folder.path());
  return error_of([&] { Rig rig(folder.path(), choose_kernels("portable", cpu_features())); });
}

struct Loaded {
  Logits logits;
  std::vector<std::string> warnings;
};
Loaded load(const Rewrite& copy, const Ids& ids) {
  TemporaryFolder folder;
  copy.write(folder.path());
  Rig rig(folder.path(), choose_kernels("portable", cpu_features()));
  return {rig.solo(ids), rig.model().config().warnings};
}

Rewrite linear() {
  return Rewrite(tiny_folder("kimi_linear-tiny"));
}
Rewrite glm() {
  return Rewrite(tiny_folder("glm5_next-tiny"));
}
Ids ids_of(const std::string& folder) {
  return test::golden_ids(tiny_folder(folder), "len130.ids");
}

// R03
TEST(Rewritten, DataAtOddOffsets) {
  const size_t header = linear().header_bytes();
  for (const size_t rest : {0, 1, 2, 3, 7}) {
    Rewrite copy = linear();
    copy.header_spaces = static_cast<int>((8 + rest - header % 8) % 8);
    expect_verifies(copy, "header length " + std::to_string(rest) + " mod 8");
  }
  for (const KernelTable* kernels : test::usable_tables(false)) {
    Rewrite copy = linear();
    copy.first = "x";
    expect_verifies(copy, "one byte in front", kernels->isa);
  }
  Rewrite mx(tiny_folder("kimi_k3-tiny-mxfp4"));
  mx.first = "x";
  expect_verifies(mx, "MXFP4, one byte in front");
}

// R02
TEST(Rewritten, NumbersWithAPoint) {
  Rewrite copy = linear();
  copy.config["hidden_size"] = 56.0;
  copy.config["num_experts_per_token"] = 3.0;
  copy.config["rope_theta"] = 10000;
  copy.config["routed_scaling_factor"] = 2446e-3;
  expect_verifies(copy, "whole numbers written as floats");
  for (const char* key : {"hidden_size", "num_hidden_layers"})
    for (const nlohmann::json& value :
         std::vector<nlohmann::json>{56.5, "56", true, -56, 4294967352, 0, nullptr}) {
      Rewrite wrong = linear();
      wrong.config[key] = value;
      EXPECT_SAYS(refusal(wrong), key);
    }
}

// R18
TEST(Rewritten, TiedHeads) {
  const Ids ids = ids_of("kimi_linear-tiny");
  Rewrite tied = linear();
  tied.config["tie_word_embeddings"] = true;
  const Loaded other_head = load(tied, ids);  // the stored head is another matrix
  tied.tensors["lm_head.weight"] = tied.tensor("embed_tokens.weight");
  const Loaded same_head = load(tied, ids);
  tied.tensors.erase("lm_head.weight");
  const Loaded no_head = load(tied, ids);
  EXPECT_EQ(no_head.logits, same_head.logits);
  EXPECT_EQ(no_head.logits, other_head.logits);
  EXPECT_TRUE(no_head.warnings.empty());
  EXPECT_TRUE(same_head.warnings.empty());
  ASSERT_EQ(other_head.warnings.size(), 1u);
  EXPECT_SAYS(other_head.warnings[0], "lm_head.weight differs from the embedding");
  EXPECT_NE(no_head.logits, load(linear(), ids).logits);

  Rewrite headless = linear();
  headless.tensors.erase("lm_head.weight");
  EXPECT_SAYS(refusal(headless), "lm_head");
  Rewrite both = glm();
  both.text()["tie_word_embeddings"] = true;
  both.config["tie_word_embeddings"] = false;
  both.tensors.erase("lm_head.weight");
  const std::string said = refusal(both);
  EXPECT_SAYS(said, "tie_word_embeddings");
  EXPECT_SAYS(said, "text_config");
  Rewrite silent = glm();
  silent.config.erase("tie_word_embeddings");
  silent.text().erase("tie_word_embeddings");
  expect_verifies(silent, "no word about tying");
}

// R21
TEST(Rewritten, WordsForDtypes) {
  for (const bool nested : {false, true})
    for (const nlohmann::json& word :
         std::vector<nlohmann::json>{"bfloat16", "torch.bfloat16", "float16", nullptr, "int5"}) {
      Rewrite copy = nested ? glm() : linear();
      copy.config.erase("dtype");
      copy.text().erase("dtype");
      if (!word.is_null()) copy.config["torch_dtype"] = word;
      if (nested) copy.text()["dtype"] = "float32";
      expect_verifies(copy, "dtype word " + word.dump());
    }
}

TEST(Rewritten, OtherStoredTypes) {
  for (const std::string dtype : {"F32", "F16"}) {
    for (const char* name : {"layers.0.self_attn.q_proj.weight", "layers.2.self_attn.kv_b_proj.weight",
                             "lm_head.weight", "embed_tokens.weight", "layers.1.block_sparse_moe.gate.weight",
                             "layers.3.self_attn.f_a_proj.weight"}) {
      Rewrite copy = linear();
      Stored& t = copy.tensor(name);
      Rewrite::set_values(t, Rewrite::values(t), dtype);
      expect_verifies(copy, std::string(name) + " as " + dtype);
    }
  }
  Rewrite norms = linear(), all = linear();
  for (auto& [name, t] : norms.tensors)
    if (name.find("norm") != std::string::npos) Rewrite::set_values(t, Rewrite::values(t), "F32");
  expect_verifies(norms, "norms as F32");
  for (auto& [name, t] : all.tensors) Rewrite::set_values(t, Rewrite::values(t), "F32");
  for (const KernelTable* kernels : test::usable_tables(false))
    expect_verifies(all, "everything as F32", kernels->isa);
}

// A tiny V3.2 with its projections in FP8, and the same values in BF16.
struct Fp8 {
  Fp8() : quantised(tiny_folder("deepseek_v32-tiny")), exact(quantised) {
    std::vector<std::string> names;
    for (const auto& [name, t] : quantised.tensors)
      if (t.shape.size() == 2 && t.dtype == "BF16" && name.find("layers.") != std::string::npos &&
          name.find("gate.weight") == std::string::npos && name.find("weights_proj") == std::string::npos)
        names.push_back(name);
    for (const std::string& name : names)
      Rewrite::set_values(exact.tensors.at(name), quantised.quantise_fp8(name), "BF16");
    quantised.config["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  }
  Rewrite quantised, exact;
};

// R22
TEST(Rewritten, Fp8BesideBf16) {
  const Ids ids = ids_of("deepseek_v32-tiny");
  const Fp8 made;
  const Loaded exact = load(made.exact, ids), all = load(made.quantised, ids);
  EXPECT_LE(test::largest_difference(all.logits, exact.logits), 3e-4);
  EXPECT_TRUE(all.warnings.empty());
  EXPECT_GT(
      test::largest_difference(exact.logits, load(Rewrite(tiny_folder("deepseek_v32-tiny")), ids).logits),
      1e-2);
  for (const char* tail : {"layers.1.self_attn.o_proj.weight", "layers.0.self_attn.q_b_proj.weight",
                           "layers.0.self_attn.kv_b_proj.weight", "layers.1.self_attn.indexer.wk.weight"}) {
    const std::string name = made.quantised.name(tail), module = name.substr(0, name.size() - 7);
    for (const char* key : {"modules_to_not_convert", "ignored_layers", "ignore"})
      for (const std::string& entry :
           {module, "model.language_model." + module.substr(6), std::string("o_proj_fused"),
            std::string("re:.*nothing"), std::string()}) {
        Rewrite mixed = made.quantised;
        mixed.tensors.at(name) = made.exact.tensors.at(name);
        mixed.tensors.erase(name + "_scale_inv");
        if (!entry.empty()) mixed.config["quantization_config"][key] = {entry};
        const Loaded got = load(mixed, ids);
        EXPECT_LE(test::largest_difference(got.logits, exact.logits), 3e-4)
            << name << " " << key << " " << entry;
        EXPECT_TRUE(got.warnings.empty());
      }
    Rewrite contradicted = made.quantised;
    contradicted.config["quantization_config"]["modules_to_not_convert"] = {module, "lm_head"};
    const Loaded got = load(contradicted, ids);
    EXPECT_EQ(got.logits, all.logits);
    ASSERT_EQ(got.warnings.size(), 1u) << name;
    EXPECT_SAYS(got.warnings[0], name);
    Rewrite unscaled = made.quantised;
    unscaled.tensors.erase(name + "_scale_inv");
    unscaled.config["quantization_config"]["modules_to_not_convert"] = {module};
    const std::string said = refusal(unscaled);
    EXPECT_SAYS(said, name);
    EXPECT_SAYS(said, "weight_scale_inv is missing");
  }
}

TEST(Rewritten, BrokenScales) {
  const float nan = std::numeric_limits<float>::quiet_NaN(), inf = std::numeric_limits<float>::infinity();
  for (const float bad : {nan, inf})
    for (const char* tail :
         {"layers.1.self_attn.o_proj.weight_scale_inv", "layers.0.self_attn.kv_b_proj.weight_scale_inv",
          "layers.2.mlp.experts.1.down_proj.weight_scale_inv"}) {
      Fp8 made;
      Stored& scale = made.quantised.tensor(tail);
      Rewrite::set_values(scale, {bad}, "F32");
      const std::string said = refusal(made.quantised);
      EXPECT_SAYS(said, tail);
      EXPECT_SAYS(said, "not finite");
    }
  Fp8 shaped;
  shaped.quantised.tensor("layers.1.self_attn.o_proj.weight_scale_inv").shape = {1};
  EXPECT_SAYS(refusal(shaped.quantised),
              "layers.1.self_attn.o_proj.weight_scale_inv: shape [1], expected [1, 1]");
  Rewrite mx(tiny_folder("kimi_k3-tiny-mxfp4"));
  EXPECT_EQ(refusal(mx), "");
  mx.tensor("layers.2.block_sparse_moe.experts.1.w2.weight_scale").bytes[5] = static_cast<char>(255);
  const std::string said = refusal(mx);
  EXPECT_SAYS(said, "layers.2.block_sparse_moe.experts.1.w2.weight_scale");
  EXPECT_SAYS(said, "NaN");
}

// R23
TEST(Rewritten, EmptyTensorsAndLargeMetadata) {
  Rewrite copy = linear();
  copy.tensors["a.marker"] = {"F32", {0}, ""};
  copy.tensors["model.layers.1.m2"] = {"BF16", {2, 0}, ""};
  copy.tensors["zz.last"] = {"BF16", {0, 3}, ""};
  copy.tensors["model.layers.2.scalar"] = {"I64", {}, std::string(8, '\1')};
  for (int i = 0; i < 1000; ++i) copy.metadata["key " + std::to_string(i)] = "Грüße 世界 🙂";
  expect_verifies(copy, "empty tensors, a scalar and a thousand words");
  Rewrite needed = linear();
  needed.tensor("layers.1.self_attn.o_proj.weight") = {"BF16", {0, 56}, ""};
  const std::string said = refusal(needed);
  EXPECT_SAYS(said, "layers.1.self_attn.o_proj.weight");
  EXPECT_SAYS(said, "[0, 56]");
  EXPECT_SAYS(said, "[56, 60]");
}

TEST(Rewritten, MissingMisshapenMistyped) {
  EXPECT_EQ(refusal(linear()), "");
  for (const char* tail :
       {"layers.3.self_attn.o_proj.weight", "layers.0.self_attn.A_log",
        "layers.2.self_attn.kv_a_layernorm.weight", "layers.4.block_sparse_moe.experts.6.w3.weight",
        "layers.1.block_sparse_moe.gate.e_score_correction_bias", "model.norm.weight", "embed_tokens.weight",
        "lm_head.weight"}) {
    Rewrite missing = linear(), misshapen = linear(), mistyped = linear();
    missing.tensors.erase(missing.name(tail));
    EXPECT_SAYS(refusal(missing), tail);
    Stored& t = misshapen.tensor(tail);
    const size_t element = t.dtype == "F32" ? 4 : 2;
    if (std::string(tail).ends_with("A_log")) {  // [1, 1, 3, 1]; longer is legal
      t.shape = {2};
      t.bytes.resize(2 * element);
    } else if (t.shape.size() == 1) {
      t.shape[0] -= 1;
      t.bytes.resize(t.bytes.size() - element);
    } else {
      t.shape.back() += 1;
      t.bytes.resize(t.bytes.size() + static_cast<size_t>(t.shape[0]) * element);
    }
    const std::string said = refusal(misshapen);
    EXPECT_SAYS(said, tail);
    if (std::string(tail).ends_with("A_log"))
      EXPECT_SAYS(said, "2 values for 3 heads");
    else
      EXPECT_SAYS(said, "shape");
    Stored& typed = mistyped.tensor(tail);
    typed.dtype = typed.dtype == "F32" ? "I32" : "I16";
    EXPECT_SAYS(refusal(mistyped), tail);
  }
}

}  // namespace
}  // namespace weft
