// What must not change a token's numbers: company, pages, threads, chunks, history of slots, forks and
// rollbacks.
//
// Everything runs with NaN in whatever nobody wrote: free cache pages, free state slots, values of the step.
// Equal means bit for bit. Cuts that are no multiples of 64 tokens change orders of addition (a KDA chunk
// ends there, a block of keys is expanded per head or not), so they are held to a tolerance, on f32 operands,
// where no near call flips.
#include <gtest/gtest.h>

#include "engine/model_rig.h"

namespace weft {
namespace {

using test::Ids;
using test::Logits;
using test::Rig;
using test::RigOptions;
using test::rows;
using test::same_bits;

const std::vector<std::string> kFolders = {"kimi_linear-tiny", "kimi_k3-tiny-mxfp4", "kimi_k31-tiny",
                                           "glm5_next-tiny",   "deepseek_v32-tiny",  "glm_moe_dsa-tiny"};
// What two f32 implementations of these checkpoints are allowed to differ by (tests/golden), at logits of
// N(0, 1).
constexpr double kOtherOrder = 3e-4;

using Where = std::tuple<std::string, const KernelTable*>;

class Invariance : public ::testing::TestWithParam<Where> {
 protected:
  void SetUp() override {
    std::tie(name_, kernels_) = GetParam();
    folder_ = test::tiny_folder(name_);
    const char* longest = name_.starts_with("kimi_k3") ? "n200.ids" : "len200.ids";
    ids_ = test::golden_ids(folder_, longest);
  }
  std::unique_ptr<Rig> rig(const RigOptions& options = {}) {
    return std::make_unique<Rig>(folder_, *kernels_, options);
  }
  // Other prompts from the same ids: rotated, so that no two sequences agree in any position.
  Ids prompt(int from, int count) const {
    Ids out;
    for (int i = 0; i < count; ++i) out.push_back(ids_[static_cast<size_t>(from + i) % ids_.size()]);
    return out;
  }

  std::string name_, folder_;
  const KernelTable* kernels_ = nullptr;
  Ids ids_;
};

class OtherCuts : public Invariance {};    // f32 operands only: a near call flips in bf16
class IndexedCuts : public Invariance {};  // and models with an indexer

TEST_P(Invariance, BatchCompany) {
  const auto r = rig();
  const size_t vocab = r->vocab();
  const std::vector<Ids> prompts = {prompt(0, 130), prompt(31, 65), prompt(77, 17), prompt(5, 1),
                                    prompt(111, 96)};
  std::vector<Logits> alone;
  for (const Ids& p : prompts) alone.push_back(r->solo(p));
  for (const std::vector<size_t>& order : {std::vector<size_t>{0, 1, 2, 3, 4}, {3, 4, 2, 1, 0}, {2, 0, 3}}) {
    std::vector<Sequence> sequences;
    std::vector<Logits> got(order.size());
    std::vector<Rig::Piece> pieces;
    for (size_t i = 0; i < order.size(); ++i) sequences.push_back(r->create());
    for (size_t i = 0; i < order.size(); ++i) pieces.push_back({&sequences[i], prompts[order[i]], &got[i]});
    r->step(pieces);
    for (size_t i = 0; i < order.size(); ++i)
      EXPECT_TRUE(same_bits(got[i], alone[order[i]], vocab)) << "prompt " << order[i];
  }
}

// Decode rows beside a prefill, and two decodes of which one sees fewer and one more tokens than top-k.
TEST_P(Invariance, DecodeInCompany) {
  const auto r = rig();
  const size_t vocab = r->vocab();
  const Ids a = prompt(0, 10), b = prompt(40, 40), c = prompt(90, 66), next_a = prompt(10, 8),
            next_b = prompt(80, 8);
  const auto decode = [&](bool together) {
    std::vector<Logits> out(3);
    Sequence sa = r->create(), sb = r->create(), sc = r->create();
    r->feed(sa, a);
    r->feed(sb, b);
    for (size_t i = 0; i < next_a.size(); ++i) {
      const Rig::Piece pa{&sa, std::span(next_a).subspan(i, 1), &out[0]},
          pb{&sb, std::span(next_b).subspan(i, 1), &out[1]};
      std::vector<Rig::Piece> step = {pa, pb};
      if (i == 3) step.insert(step.begin() + 1, {&sc, c, &out[2]});
      if (together) {
        r->step(step);
        continue;
      }
      for (const Rig::Piece& p : step) r->step({p});
    }
    return out;
  };
  const auto together = decode(true), apart = decode(false);
  for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(same_bits(together[i], apart[i], vocab)) << "sequence " << i;
}

// Narrow caches change the numbers, and then neither cuts nor threads do.
TEST_P(Invariance, NarrowCaches) {
  const Logits wide = rig()->solo(ids_);
  for (const IndexFormat format : {IndexFormat::mxfp8, IndexFormat::int8}) {
    RigOptions options;
    options.index_cache = format, options.latent_cache = LatentFormat::fp8;
    const auto r = rig(options);
    const Logits narrow = r->solo(ids_);
    EXPECT_FALSE(same_bits(narrow, wide, r->vocab()));
    for (const float x : narrow) ASSERT_TRUE(std::isfinite(x));
    EXPECT_TRUE(same_bits(r->solo(ids_, 64), narrow, r->vocab()));
    options.threads = 2;
    EXPECT_TRUE(same_bits(rig(options)->solo(ids_), narrow, r->vocab()));
  }
}

TEST_P(Invariance, PagePlacement) {
  const auto r = rig();
  RigOptions clean;
  clean.poison = Poison::none;
  const Logits plain = rig(clean)->solo(ids_, 64);
  EXPECT_TRUE(same_bits(r->solo(ids_, 64), plain, r->vocab())) << "NaN in unused rows";
  for (const std::vector<size_t>& release : {std::vector<size_t>{0, 2, 4, 1, 3}, {3, 1, 4, 0, 2}}) {
    std::vector<Sequence> others(5);
    for (Sequence& s : others) s = r->create();
    for (int round = 0; round < 3; ++round)  // pages taken in turn, so that a run of free ones is nobody's
      for (Sequence& s : others) r->feed(s, prompt(round, 64));
    for (const size_t i : release) others[i].release();
    Sequence mixed = r->create();
    EXPECT_TRUE(same_bits(r->feed(mixed, ids_, 64), plain, r->vocab()));
    const std::span<const int32_t> table = mixed.block_table();
    bool scattered = false;
    for (size_t i = 1; i < table.size(); ++i) scattered |= table[i] != table[i - 1] + 1;
    EXPECT_TRUE(scattered);
  }
}

TEST_P(Invariance, Threads) {
  const Logits one = rig()->solo(ids_, 64);
  for (const int threads : {2, 3}) {
    RigOptions options;
    options.threads = threads;
    const auto r = rig(options);
    EXPECT_TRUE(same_bits(r->solo(ids_, 64), one, r->vocab())) << threads << " threads, chunks of 64";
    EXPECT_TRUE(same_bits(r->solo(ids_), one, r->vocab())) << threads << " threads, whole";
  }
}

TEST_P(Invariance, ExecModes) {
  const Logits alone = rig()->solo(ids_);
  for (const ExecMode exec : {ExecMode::ops, ExecMode::streams, ExecMode::super}) {
    RigOptions options;
    options.threads = 2;
    options.exec = exec;
    const auto r = rig(options);
    EXPECT_TRUE(same_bits(r->solo(ids_), alone, r->vocab())) << exec_name(exec);
    EXPECT_TRUE(same_bits(r->solo(ids_), alone, r->vocab())) << exec_name(exec) << ", replayed";
  }
}

// Attention Residuals over finished blocks at every sub-layer, and once for several of them.
TEST_P(Invariance, MixesInTwoStages) {
  const auto staged = rig();
  const auto banks = [](Rig& r) {
    const auto& nodes = r.model().parts().graph.nodes();
    return std::count_if(nodes.begin(), nodes.end(),
                         [](const Node& n) { return std::string(n.op) == "mix_bank"; });
  };
  RigOptions options;
  options.mix = MixForm::one_stage;
  const auto whole = rig(options);
  EXPECT_EQ(banks(*staged) > 0, staged->model().config().residual == Residual::attn_res);
  EXPECT_EQ(banks(*whole), 0);
  EXPECT_TRUE(same_bits(staged->solo(ids_), whole->solo(ids_), staged->vocab()));
}

TEST_P(Invariance, ChunksOfWholePages) {
  const auto r = rig();
  const Logits whole = r->solo(ids_);
  for (const int chunk : {64, 128})
    EXPECT_TRUE(same_bits(r->solo(ids_, chunk), whole, r->vocab())) << "chunk " << chunk;
}

// A conversation goes on in the middle of a page: cuts count from position 0, not from where the step begins.
TEST_P(Invariance, ChunksBehindAnOddPosition) {
  const auto r = rig();
  for (const int held : {5, 70}) {
    const auto go_on = [&](bool cut) {
      Sequence s = r->create();
      r->feed(s, prompt(0, held));
      const Ids rest = prompt(held, 180);
      if (!cut) return r->feed(s, rest);
      const auto first = static_cast<size_t>(64 - held % 64);
      Logits out = r->feed(s, std::span(rest).first(first));
      const Logits more = r->feed(s, std::span(rest).subspan(first), 64);
      out.insert(out.end(), more.begin(), more.end());
      return out;
    };
    EXPECT_TRUE(same_bits(go_on(true), go_on(false), r->vocab())) << held << " tokens held";
  }
}

TEST_P(OtherCuts, Chunks) {
  const auto r = rig();
  const Logits whole = r->solo(ids_);
  const size_t vocab = r->vocab();
  for (const int chunk : {1, 7, 16, 50}) {
    const Logits cut = r->solo(ids_, chunk);
    EXPECT_LE(test::largest_difference(cut, whole), kOtherOrder) << "chunk " << chunk;
    for (size_t i = 0; i < ids_.size(); ++i)
      EXPECT_EQ(test::best(cut.data() + i * vocab, vocab), test::best(whole.data() + i * vocab, vocab))
          << "chunk " << chunk << " row " << i;
  }
}

// Around top-k, K + 1, K + 2 and 3K + 5 tokens, cut in two everywhere: the index keys of the first part are
// first used in the second (kimi_k31.md 15.4, 2 and 6).
TEST_P(IndexedCuts, FirstUseOfIndexKeys) {
  const auto r = rig();
  const int topk = r->model().config().indexer.topk;
  for (const int length : {topk, topk + 1, topk + 2, 3 * topk + 5}) {
    const Ids ids = prompt(0, length);
    const Logits whole = r->solo(ids);
    for (int cut = 1; cut < length; ++cut) {
      Sequence s = r->create();
      Logits got = r->feed(s, std::span(ids).first(static_cast<size_t>(cut)));
      const Logits rest = r->feed(s, std::span(ids).subspan(static_cast<size_t>(cut)));
      got.insert(got.end(), rest.begin(), rest.end());
      EXPECT_LE(test::largest_difference(got, whole), kOtherOrder) << length << " cut at " << cut;
    }
  }
}

TEST_P(Invariance, DirtySlots) {
  const auto r = rig();
  const Logits fresh = rig()->solo(ids_, 64);
  for (int i = 0; i < 7; ++i) r->solo(prompt(13 * i, 90 + i), 64);  // every slot has been somebody's
  EXPECT_TRUE(same_bits(r->solo(ids_, 64), fresh, r->vocab()));
  Sequence s = r->create();  // and the same slot again after a cut to nothing
  r->feed(s, prompt(50, 77));
  s.truncate(0);
  EXPECT_TRUE(same_bits(r->feed(s, ids_, 64), fresh, r->vocab()));
}

TEST_P(Invariance, Forks) {
  const auto r = rig(), other = rig();
  const size_t vocab = r->vocab();
  for (const int at : {1, 15, 16, 17, 62, 63, 64, 65, 100}) {
    const Ids head = prompt(0, at), left = prompt(100, 70), right = prompt(150, 3), next = prompt(20, 5);
    const auto fresh = [&](const Ids& tail) {
      Sequence s = other->create();
      other->feed(s, head);
      Logits out = other->feed(s, tail);
      for (const int32_t& id : next) {
        const Logits more = other->feed(s, {&id, 1});
        out.insert(out.end(), more.begin(), more.end());
      }
      return out;
    };
    Sequence a = r->create();
    r->feed(a, head);
    Sequence b = a.fork();
    std::vector<Logits> got(2);
    r->step({{&b, right, &got[1]}, {&a, left, &got[0]}});
    for (const int32_t& id : next) r->step({{&a, {&id, 1}, &got[0]}, {&b, {&id, 1}, &got[1]}});
    EXPECT_TRUE(same_bits(got[0], fresh(left), vocab)) << "parent of a fork at " << at;
    EXPECT_TRUE(same_bits(got[1], fresh(right), vocab)) << "child of a fork at " << at;
  }
}

// Back to a saved state across a page edge, across top-k = 16, and from far (kimi_k31.md 15.4, 7 and 8).
TEST_P(Invariance, Rollback) {
  const auto r = rig(), other = rig();
  const size_t vocab = r->vocab();
  for (const auto& [at, beyond] :
       std::vector<std::pair<int, int>>{{14, 1}, {14, 7}, {16, 2}, {60, 7}, {63, 1}, {64, 3}, {70, 120}}) {
    const Ids head = prompt(0, at), dropped = prompt(120, beyond), tail = prompt(33, 68);
    Sequence fresh = other->create();
    other->feed(fresh, head);
    const Logits want = other->feed(fresh, tail);
    Sequence s = r->create();
    r->feed(s, head);
    ASSERT_TRUE(s.checkpoint());
    for (int round = 0; round < 2; ++round) {
      r->feed(s, dropped);
      s.truncate(at);
      EXPECT_TRUE(same_bits(r->feed(s, tail), want, vocab))
          << beyond << " tokens beyond " << at << ", round " << round;
      s.truncate(at);
    }
  }
}

std::vector<const KernelTable*> f32_tables() {
  std::vector<const KernelTable*> tables = test::usable_tables(false);
  std::erase_if(tables, [](const KernelTable* t) { return t->bf16_operands; });
  return tables;
}
std::string where_name(const ::testing::TestParamInfo<Where>& info) {
  std::string name = std::get<0>(info.param);
  std::replace(name.begin(), name.end(), '-', '_');
  return name + "_" + test::table_name(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(Folders, Invariance,
                         ::testing::Combine(::testing::ValuesIn(kFolders),
                                            ::testing::ValuesIn(test::usable_tables(false))),
                         where_name);
INSTANTIATE_TEST_SUITE_P(Folders, OtherCuts,
                         ::testing::Combine(::testing::ValuesIn(kFolders), ::testing::ValuesIn(f32_tables())),
                         where_name);
INSTANTIATE_TEST_SUITE_P(Folders, IndexedCuts,
                         ::testing::Combine(::testing::Values("kimi_k31-tiny", "glm5_next-tiny",
                                                              "deepseek_v32-tiny", "glm_moe_dsa-tiny"),
                                            ::testing::ValuesIn(f32_tables())),
                         where_name);

}  // namespace
}  // namespace weft
