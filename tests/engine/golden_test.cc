// Whole models against recorded logits, sets, experts and greedy tokens of independent implementations.
//
// Combinations are chosen for the time they take: everything of `verify` in all chunkings on one thread, and
// on two threads only the whole prompt and chunks of 7 (all kernels that split their work do so in both). The
// software model of the tile unit is slow, and differs from amx in the tile instructions alone: one thread,
// whole prompt and chunks of 7.
#include <gtest/gtest.h>

#include "engine/model_rig.h"
#include "engine/verify.h"

namespace weft {
namespace {

using test::Ids;
using test::Logits;
using test::Rig;
using test::RigOptions;

const std::vector<std::string> kTiny = {
    "deepseek_v32-tiny",       "glm5_next-tiny",    "glm5_next-tiny-vision",
    "glm_moe_dsa-tiny",        "kimi_k3-tiny",      "kimi_k3-tiny-mxfp4",
    "kimi_k31-tiny",           "kimi_k31-tiny-alt", "kimi_k31-tiny-mxfp4",
    "kimi_k31-tiny-smallwk",   "kimi_linear-tiny",  "kimi_linear-tiny-eps",
    "kimi_linear-tiny-sharded"};
const std::vector<std::string> kKernel = {
    "deepseek_v32-kernel", "deepseek_v32-kernel-fp8", "glm5_next-kernel", "glm5_next-kernel-fp8",
    "glm_moe_dsa-kernel",  "kimi_k3-kernel",          "kimi_k31-kernel",  "kimi_linear-kernel"};

std::string word(std::string name) {
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
}

void expect_verified(const std::string& folder, const KernelTable& kernels, int threads,
                     std::vector<int> chunks) {
  VerifyOptions options;
  options.threads = threads;
  options.chunks = std::move(chunks);
  options.kernels = &kernels;
  const VerifyReport report = verify(folder, options);
  EXPECT_FALSE(report.rows.empty());
  for (const VerifyRow& r : report.rows)
    EXPECT_TRUE(r.pass) << fmt::format(
        "{} {} {} threads: {} ({} tokens), chunk {}, {}: error {:.3g} (nine in ten rows {:.3g}, mean {:.3g}, "
        "bound {:.3g}), "
        "wrong: sets {}, experts {}, greedy {}",
        folder, test::table_name(&kernels), threads, r.name, r.tokens, r.chunk, r.mode, r.error,
        r.row_quantile, r.mean_error, r.bound, r.sets_wrong, r.experts_wrong, r.greedy_wrong);
}

using Where = std::tuple<std::string, const KernelTable*>;
std::string where_name(const ::testing::TestParamInfo<Where>& info) {
  return word(std::get<0>(info.param)) + "_" + test::table_name(std::get<1>(info.param));
}

class Tiny : public ::testing::TestWithParam<Where> {};
TEST_P(Tiny, Verifies) {
  const auto& [name, kernels] = GetParam();
  if (kernels == &kernel_table_amxmodel) {
    expect_verified(test::tiny_folder(name), *kernels, 1, {0, 7});
    return;
  }
  expect_verified(test::tiny_folder(name), *kernels, 1, {0, 1, 7, 64});
  expect_verified(test::tiny_folder(name), *kernels, 2, {0, 7});
}
INSTANTIATE_TEST_SUITE_P(Folders, Tiny,
                         ::testing::Combine(::testing::ValuesIn(kTiny),
                                            ::testing::ValuesIn(test::usable_tables(true))),
                         where_name);

// The trained model against its PyTorch trainer's logits, in double from the stored weights: real
// activations, with the outliers that random weights lack, and one prompt longer than the top-k.
class Trained : public ::testing::TestWithParam<const KernelTable*> {};
TEST_P(Trained, Verifies) {
  expect_verified(test::tiny_folder("weft-small"), *GetParam(), 1, {0, 7});
  expect_verified(test::tiny_folder("weft-small"), *GetParam(), 2, {0});
}
INSTANTIATE_TEST_SUITE_P(WeftSmall, Trained, ::testing::ValuesIn(test::usable_tables(false)),
                         [](const auto& info) { return test::table_name(info.param); });

class Kernel : public ::testing::TestWithParam<Where> {};
TEST_P(Kernel, Verifies) {
  const auto& [name, kernels] = GetParam();
  const std::string folder = test::kernel_folder(name);
  if (folder.empty()) GTEST_SKIP() << name << " is not beside the sources (../shared/golden)";
  expect_verified(folder, *kernels, 2, {0, 64});
}
INSTANTIATE_TEST_SUITE_P(Folders, Kernel,
                         ::testing::Combine(::testing::ValuesIn(kKernel),
                                            ::testing::ValuesIn(test::usable_tables(false))),
                         where_name);

// Up to top-k visible tokens the indexer selects everything, so K3.1 is K3 with the same weights
// (kimi_k31.md 15.4, 1).
class Pair : public ::testing::TestWithParam<std::tuple<std::string, const KernelTable*>> {};
TEST_P(Pair, EqualUpToTopk) {
  const auto& [size, kernels] = GetParam();
  const bool tiny = size.starts_with("tiny");
  const std::string dense =
      tiny ? test::tiny_folder("kimi_k3-" + size) : test::kernel_folder("kimi_k3-" + size);
  const std::string sparse =
      tiny ? test::tiny_folder("kimi_k31-" + size) : test::kernel_folder("kimi_k31-" + size);
  if (dense.empty() || sparse.empty())
    GTEST_SKIP() << "kimi_k3-" << size << " is not beside the sources (../shared/golden)";
  Rig a(dense, *kernels), b(sparse, *kernels);
  const size_t topk = static_cast<size_t>(b.model().config().indexer.topk), vocab = a.vocab();
  int cases = 0;
  const Json json = parse_json_file(sparse + "/golden.json");
  for (const Json& c : json["cases"]) {
    const Ids ids = test::golden_ids(sparse, c["ids"].get<std::string>());
    ASSERT_EQ(ids, test::golden_ids(dense, c["ids"].get<std::string>()));
    const Logits k3 = a.solo(ids), k31 = b.solo(ids);
    const size_t equal = std::min(ids.size(), topk);
    EXPECT_TRUE(test::same_bits(test::rows(k3, vocab, 0, equal), test::rows(k31, vocab, 0, equal), vocab))
        << c["name"];
    if (ids.size() > topk) {  // and behind it the selection does something
      EXPECT_FALSE(test::same_bits(test::rows(k3, vocab, equal, ids.size()),
                                   test::rows(k31, vocab, equal, ids.size()), vocab));
    }
    ++cases;
  }
  EXPECT_GE(cases, 3);
}
INSTANTIATE_TEST_SUITE_P(Sizes, Pair,
                         ::testing::Combine(::testing::Values("tiny", "tiny-mxfp4", "kernel"),
                                            ::testing::ValuesIn(test::usable_tables(false))),
                         where_name);

// Values inside the stack, in f32, where a wrong layer shows at its own place.
class Layers : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    folder_ = test::tiny_folder(GetParam());
    RigOptions options;
    options.trace = true;
    rig_ = std::make_unique<Rig>(folder_, choose_kernels("portable", cpu_features()), options);
    file_ = std::make_unique<weft::testing::LiteSafetensors>(folder_ + "/golden.safetensors");
  }
  // Rows `row` of a trace of the last step against rows 0.. of a recorded tensor [rows, width], or [rows,
  // layers, width]. Bound: f32 over a few hundred additions; the recorded f32 layers are off their own
  // doubles by as much.
  void compare(const std::string& trace, const std::string& tensor, const std::vector<int>& row,
               size_t layer = 0) {
    const std::vector<float> recorded = file_->get<float>(tensor);
    const size_t width = static_cast<size_t>(rig_->model().trace_width(trace)),
                 stride = recorded.size() / row.size();
    ASSERT_EQ(stride * row.size(), recorded.size());
    ASSERT_LE((layer + 1) * width, stride);
    double worst = 0, scale = 1;
    for (size_t r = 0; r < row.size(); ++r)
      for (size_t i = 0; i < width; ++i) {
        const double want = recorded[r * stride + layer * width + i];
        const double d =
            std::fabs(rig_->model().trace(trace)[static_cast<size_t>(row[r]) * width + i] - want);
        worst = std::isfinite(d) ? std::max(worst, d) : INFINITY;
        scale = std::max(scale, std::fabs(want));
      }
    EXPECT_LE(worst, 1e-4 * scale) << GetParam() << " " << trace << " against " << tensor;
    ++compared_;
  }

  std::string folder_;
  std::unique_ptr<Rig> rig_;
  std::unique_ptr<weft::testing::LiteSafetensors> file_;
  int compared_ = 0;
};

TEST_P(Layers, EqualTheRecordedOnes) {
  const size_t layers = static_cast<size_t>(rig_->model().config().num_layers());
  const Json json = parse_json_file(folder_ + "/golden.json");
  for (const Json& c : json["cases"]) {
    const std::string name = c["name"];
    const bool traced = file_->has(name + ".trace.attn_in"), layered = file_->has(name + ".layer.0");
    if (!traced && !layered && !c.contains("hidden")) continue;
    const Ids ids = test::golden_ids(folder_, c["ids"].get<std::string>());
    std::vector<int> all(ids.size());
    std::iota(all.begin(), all.end(), 0);
    const std::vector<int> some = traced ? json["trace"]["rows"].get<std::vector<int>>() : all;
    rig_->solo(ids);
    for (size_t l = 0; l < layers; ++l) {
      if (traced) {
        compare(fmt::format("attn_in.{}", l), name + ".trace.attn_in", some, l);
        compare(fmt::format("mlp_in.{}", l), name + ".trace.mlp_in", some, l);
        compare(fmt::format("layer.{}", l), name + ".trace.partial", some, l);
      }
      if (layered) compare(fmt::format("layer.{}", l), fmt::format("{}.layer.{}", name, l), all);
    }
    if (traced) compare("final_mix", name + ".trace.final_mix", some);
    if (c.contains("hidden")) compare("hidden", c["hidden"], all);
  }
  EXPECT_GT(compared_, 0);
}
INSTANTIATE_TEST_SUITE_P(Folders, Layers, ::testing::ValuesIn(kTiny),
                         [](const auto& info) { return word(info.param); });

}  // namespace
}  // namespace weft
