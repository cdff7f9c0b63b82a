// Rope, latent rows and absorbed attention over shuffled, poisoned pages.
#include "kernels/attention_plan.h"
#include "kernels/cases.h"
#include "reference.h"
#include "slabs.h"

namespace weft::test {
namespace {

using cases::AttentionCase;
using namespace reference;

class Rope : public KernelTest {};

TEST_P(Rope, TableUpToAMillionTokens) {
  for (const int position : {0, 1, 63, 4095, 131071, 1048575}) {
    const TestStep step({{position, 2, 0}}, position + 2, 1);
    const RopeSetup rope(table(), machine(), step.header, 64, 1.5f);
    Vec actual;
    BoundedVec expected;
    for (int t = 0; t < 2; ++t)
      for (int j = 0; j < 32; ++j)
        for (const bool sine : {false, true}) {
          const double angle = (position + t) * rope.freq[j],
                       value = 1.5 * (sine ? std::sin(angle) : std::cos(angle));
          actual.push_back(rope.values[t * 64 + 32 * sine + j]);
          expected.push(
              {value, 3 * kU * std::abs(value) + 1e-9});  // 1e-9: double's own error of a million radians
        }
    EXPECT_CLOSE(actual, expected.value, expected.error) << "position " << position;
  }
}

// In place on the leading dims of each head, and into another row; the other dims stay.
TEST_P(Rope, HeadsInPlaceAndApart) {
  for (const RopeMode mode : {RopeMode::interleaved, RopeMode::half_split, RopeMode::none})
    for (const auto& [dims, head] : {std::pair{4, 8}, {64, 128}, {40, 41}, {2, 2}})
      for (const bool apart : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << cases::name(mode) << " dims " << dims << " head " << head << " apart " << apart);
        const TestStep step({{1000, 5, 0}, {3, 2, 1}}, 1010, 2);
        const RopeSetup rope(table(), machine(), step.header, dims);
        Random random(dims);
        const int heads = 3, out_head = apart ? head + 9 : head;
        OpRows x(table(), 7, heads * head + 3), out(table(), 7, heads * out_head + 3);
        std::vector<BoundedVec> expected;
        for (int t = 0; t < 7; ++t)
          for (int h = 0; h < heads; ++h) {
            const std::vector<float> values = random.normals(head);
            x.fill(t, h * head, values.data(), head);
            BoundedVec e = exact(x.read(t, h * head, head));
            rotate(e, 0, dims, step.header.position[t], rope.freq, 1, mode);
            expected.push_back(e);
          }
        const OpRows before = x;
        RopeArgs a{};
        a.x = x.data(), a.ld_x = x.ld(), a.x_head = head, a.out = apart ? out.data() : x.data();
        a.ld_out = apart ? out.ld() : x.ld(), a.out_head = out_head, a.heads = heads, a.dims = dims,
        a.mode = mode;
        a.table = rope.values.data();
        machine().run(table().rope, a, step.header);
        const OpRows& result = apart ? out : x;
        for (int t = 0; t < 7; ++t)
          for (int h = 0; h < heads; ++h) {
            BoundedVec e = expected[t * heads + h];
            e.value.resize(dims), e.error.resize(dims);
            for (int d = 0; d < dims; ++d) e.put(d, stored(e[d], narrow() && mode != RopeMode::none));
            EXPECT_CLOSE(result.read(t, h * out_head, dims), e.value, e.error);
            for (int d = dims; d < head; ++d)
              EXPECT_TRUE(apart ? out.untouched(t, h * out_head + d)
                                : x.get(t, h * head + d) == before.get(t, h * head + d));
          }
      }
}

class Latent : public KernelTest {};

TEST_P(Latent, RowsLandAtTheirPositions) {
  for (const RopeMode mode : {RopeMode::interleaved, RopeMode::half_split, RopeMode::none})
    for (const auto& [width, dims] : {std::pair{20, 4}, {512, 64}, {512, 0}, {37, 10}}) {
      SCOPED_TRACE(::testing::Message() << cases::name(mode) << " latent " << width << " rope " << dims);
      const TestStep step({{61, 70, 1}, {0, 3, 0}, {127, 2, 2}}, 256, 3, 9);
      const RopeSetup rope(table(), machine(), step.header, std::max(dims, 2));
      Random random(width);
      F32Rows kv(table(), 75, width + dims + 5);
      for (int t = 0; t < 75; ++t) kv.fill(t, 0, random.normals(width + dims, 3).data(), width + dims);
      const std::vector<float> norm = random.normals(width);
      LatentSlab slab(table(), step.pages(), width + dims);
      LatentArgs a{};
      a.kv = kv.data(), a.ld_kv = kv.ld(), a.norm = norm.data(), a.eps = 1e-5f, a.latent = width,
      a.rope = dims;
      a.mode = mode, a.table = rope.values.data(), a.slab = slab.data(), a.page_bytes = slab.page_bytes;
      machine().run(table().latent, a, step.header);
      std::vector<bool> written(static_cast<size_t>(step.pages()) * kPageTokens);
      for (int t = 0; t < 75; ++t) {
        const int row = LatentSlab::row(step, step.header.span_of[t], step.header.position[t]);
        written[row] = true;
        BoundedVec c = rms_norm(exact(kv.read(t, 0, width)), Vec(norm.begin(), norm.end()), 1e-5);
        BoundedVec pe = exact(kv.read(t, width, dims));
        if (dims) rotate(pe, 0, dims, step.header.position[t], rope.freq, 1, mode);
        for (int d = 0; d < dims; ++d) c.push(pe[d]);
        for (size_t i = 0; i < c.size(); ++i) c.put(i, stored(c[i], narrow()));
        EXPECT_CLOSE(slab.rows.read(row, 0, width + dims), c.value, c.error) << "token " << t;
        for (int i = width + dims; i < slab.row_elements; ++i)
          ASSERT_EQ(slab.rows.get(row, i), 0.f) << "padding";
      }
      for (size_t row = 0; row < written.size(); ++row)
        ASSERT_TRUE(written[row] || slab.rows.untouched(static_cast<int>(row), 0))
            << "row " << row << " of another token written";
    }
}

// ---- attention ----

struct World {
  World(const KernelTable& table, const AttentionCase& c, uint64_t seed)
      : table(table),
        c(c),
        step(spans(c), c.context + 64, 2, seed),
        q_head(round_up(c.latent + c.rope, kStep)),
        out_head(round_up(c.latent, kStep)),
        slab(table, step.pages(), c.latent + c.rope),
        q(table, step.header.tokens, c.heads * q_head),
        random(seed) {
    const int width = c.latent + c.rope;
    for (int span = 0; span < step.header.spans; ++span)
      for (int p = 0; p < step.header.span[span].position + step.header.span[span].length; ++p)
        slab.rows.fill(LatentSlab::row(step, span, p), 0, random.normals(width).data(), width,
                       slab.row_elements);
    for (int t = 0; t < step.header.tokens; ++t)
      for (int h = 0; h < c.heads; ++h) q.fill(t, h * q_head, random.normals(width, 2).data(), width);
    // like a model's: scores of a few units, so that weights differ and the online softmax has work to do
    scale = 1 / std::sqrt(static_cast<float>(width));
  }
  static std::vector<TestSpan> spans(const AttentionCase& c) {
    return {{0, 5, 1}, {c.context - c.tokens, c.tokens, 0}};
  }
  int visible(int t) const { return step.header.position[t] + 1; }

  // Every kind of row: empty, one key, a random part, all of it.
  void make_lists() {
    width = c.context + 3;
    for (int t = 0; t < step.header.tokens; ++t) {
      std::vector<int> row;
      const int kind = t % 5, every = 1 + random.below(4);
      for (int p = 0; p < visible(t); ++p)
        if (kind == 2 || kind == 4 || (kind == 0 && random.below(every + 1) == 0)) row.push_back(p);
      if (kind == 3) row.push_back(random.below(visible(t)));
      rows.push_back(row);
      count.push_back(static_cast<int>(row.size()));
      row.resize(width, -1);
      list.insert(list.end(), row.begin(), row.end());
    }
  }
  std::vector<int> keys(int t) const {
    if (!rows.empty()) return rows[t];
    std::vector<int> all(visible(t));
    for (int p = 0; p < visible(t); ++p) all[p] = p;
    return all;
  }
  // Room for the segments of rows that are cut. Without it no row is.
  struct Parts {
    explicit Parts(const AttentionCase& c)
        : out(static_cast<size_t>(kAttentionParts) * c.heads * round_up(c.latent, kPanel), NAN),
          top(kAttentionParts * c.heads, NAN),
          sum(kAttentionParts * c.heads, NAN) {}
    std::vector<float> out, top, sum;
  };
  AttentionArgs args(void* out, int ld_out, int first = 0, Parts* parts = nullptr) const {
    AttentionArgs a{};
    a.q = q.at(first * q.ld()), a.ld_q = q.ld(), a.q_head = q_head, a.heads = c.heads, a.latent = c.latent,
    a.rope = c.rope;
    a.scale = scale, a.slab = slab.data(), a.page_bytes = slab.page_bytes;
    if (!rows.empty())
      a.list = list.data() + static_cast<size_t>(first) * width, a.count = count.data() + first,
      a.width = width;
    a.out = out, a.ld_out = ld_out, a.out_head = out_head;
    if (parts) a.part_out = parts->out.data(), a.part_top = parts->top.data(), a.part_sum = parts->sum.data();
    return a;
  }

  BoundedVec expected(int t, int h) const {
    const std::vector<int> seen = keys(t);
    const int dims = c.latent + c.rope;
    BoundedVec score;
    std::vector<int> row;
    for (const int p : seen) row.push_back(LatentSlab::row(step, step.header.span_of[t], p));
    for (const int r : row) {
      Bounded s = dot([&](int d) { return q.get(t, h * q_head + d); },
                      [&](int d) { return slab.rows.get(r, d); }, dims);
      s.value *= scale, s.error = s.error * scale + 2 * kU * std::abs(s.value);
      score.push(s);
    }
    const BoundedVec p = softmax(score);
    BoundedVec out;
    for (int d = 0; d < c.latent; ++d) {
      Bounded y = weighted(p, [&](size_t j) { return slab.rows.get(row[j], d); });
      double size = 0;
      for (size_t j = 0; j < row.size(); ++j) size += p.value[j] * std::abs(slab.rows.get(row[j], d));
      // weights go through bf16; blocks of 64 are rescaled one after the other
      y.error += size * ((table.bf16_operands ? kBf16 : 0) +
                         (static_cast<double>(row.size()) / kKeyBlock + 2) * (kElementary + 2 * kU));
      out.push(stored(y, table.bf16_operands));
    }
    return out;
  }

  const KernelTable& table;
  AttentionCase c;
  TestStep step;
  int q_head, out_head;
  LatentSlab slab;
  OpRows q;
  Random random;
  float scale;
  int width = 0;
  std::vector<std::vector<int>> rows;
  std::vector<int32_t> list, count;
};

class Attention : public KernelTest {
 protected:
  OpRows run(const World& w, int tasks, int threads) {
    OpRows out(table(), w.step.header.tokens, w.c.heads * w.out_head + 8);
    World::Parts parts(w.c);
    const AttentionArgs a = w.args(out.data(), out.ld(), 0, &parts);
    machine().run(table().attention, a, w.step.header, tasks, threads);
    machine().run(table().attention_merge, AttentionMergeArgs{a}, w.step.header, tasks, threads);
    return out;
  }
  void check(const World& w) {
    const int tokens = w.step.header.tokens, width = w.c.heads * w.out_head;
    const OpRows out = run(w, 0, 2);
    Vec actual;
    BoundedVec expected;
    // every head of the first and last rows, a few heads of the others: the reference is slow at real sizes
    for (int t = 0; t < tokens; ++t)
      for (int h = 0; h < w.c.heads; h += t < 7 || t == tokens - 1 || w.c.heads < 4 ? 1 : 31) {
        const BoundedVec e = w.expected(t, h);
        for (int d = 0; d < w.c.latent; ++d)
          actual.push_back(out.get(t, h * w.out_head + d)), expected.push(e[d]);
      }
    EXPECT_CLOSE(actual, expected.value, expected.error);
    for (int t = 0; t < tokens; ++t) {
      for (int h = 0; h < w.c.heads; ++h)
        for (int d = w.c.latent; d < w.out_head; ++d)
          ASSERT_EQ(out.get(t, h * w.out_head + d), 0.f) << "padding";
      ASSERT_TRUE(out.untouched(t, width));
    }
    EXPECT_TRUE(out.untouched(tokens, 0));
    for (const int tasks : {1, 3})
      EXPECT_TRUE(out.same_bytes(run(w, tasks, tasks == 1 ? 1 : 2))) << tasks << " tasks";
    // each token as a step of its own
    for (int t = 0; t < tokens; ++t) {
      const int span = w.step.header.span_of[t];
      const TestStep alone({{w.step.header.position[t], 1, span == 0 ? 1 : 0}}, w.c.context + 64, 2, seed);
      ASSERT_EQ(alone.page(0, 0), w.step.page(span, 0));
      OpRows one(table(), 1, width + 8);
      machine().run(table().attention, w.args(one.data(), one.ld(), t), alone.header, 1, 1);
      ASSERT_TRUE(one.same_row(0, out, t, 0, width)) << "token " << t << " differs when it is alone";
      World::Parts parts(w.c);
      const AttentionArgs cut = w.args(one.data(), one.ld(), t, &parts);
      machine().run(table().attention, cut, alone.header, 0, 2);
      machine().run(table().attention_merge, AttentionMergeArgs{cut}, alone.header, 0, 2);
      ASSERT_TRUE(one.same_row(0, out, t, 0, width))
          << "token " << t << " differs when it is cut in segments";
    }
  }
  static constexpr uint64_t seed = 21;
};

TEST_P(Attention, Dense) {
  for (const AttentionCase& c : cases::attention_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    check(World(table(), c, seed));
  }
}

TEST_P(Attention, SparseDenseAndEmptyRowsMixed) {
  for (const AttentionCase& c : cases::attention_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    World w(table(), c, seed);
    w.make_lists();
    check(w);
  }
}

TEST_P(Attention, AnEmptyRowIsZero) {
  World w(table(), {3, 20, 4, 40, 4}, seed);
  w.make_lists();
  std::fill(w.count.begin(), w.count.end(), 0);
  std::fill(w.list.begin(), w.list.end(), -1);
  const OpRows out = run(w, 0, 2);
  for (int t = 0; t < w.step.header.tokens; ++t)
    for (int i = 0; i < 3 * w.out_head; ++i) ASSERT_EQ(out.get(t, i), 0.f);
}

// The same of the expanded form, beside a row that has keys.
TEST_P(Attention, AnEmptyExpandedRowIsZero) {
  const TestStep step({{0, 64, 0}}, 64, 1);
  Random random(3);
  const int heads = 2, latent = 20, nope = 12, v = 10;
  const TestWeight key = random_weight(random, WeightFormat::bf16, heads, nope, latent);
  const TestWeight value = random_weight(random, WeightFormat::bf16, heads, v, latent);
  const LatentSlab slab = [&] {
    LatentSlab filled(table(), step.pages(), latent);
    for (int p = 0; p < 64; ++p)
      filled.rows.fill(LatentSlab::row(step, 0, p), 0, random.normals(latent).data(), latent,
                       filled.row_elements);
    return filled;
  }();
  OpRows q(table(), 64, heads * nope), out(table(), 64, heads * v);
  for (int t = 0; t < 64; ++t) q.fill(t, 0, random.normals(heads * nope).data(), heads * nope);
  std::vector<int32_t> list(64, -1), count(64, 0);
  list[5] = 2, count[5] = 1;
  ExpandedArgs a{};
  a.q = q.data(), a.ld_q = q.ld(), a.q_head = nope, a.key = key.packed, a.value = value.packed,
  a.heads = heads;
  a.latent = latent, a.nope = nope, a.v = v, a.scale = 0.3f, a.slab = slab.data(),
  a.page_bytes = slab.page_bytes;
  a.list = list.data(), a.count = count.data(), a.width = 1;
  a.expand_below = 64, a.out = out.data(), a.ld_out = out.ld();
  machine().run(table().attention_expanded, a, step.header);
  for (int t = 0; t < 64; ++t)
    for (int i = 0; i < heads * v; ++i)
      ASSERT_EQ(out.get(t, i) == 0.f, t != 5) << "row " << t << " column " << i;
}

// A list that is the whole prefix gives the bits of no list at all (top-k at or above the length).
TEST_P(Attention, AFullListIsDense) {
  World w(table(), {5, 48, 16, 130, 9}, seed);
  const OpRows dense = run(w, 0, 2);
  w.make_lists();
  for (int t = 0; t < w.step.header.tokens; ++t) {
    w.count[t] = w.visible(t);
    for (int p = 0; p < w.count[t]; ++p) w.list[static_cast<size_t>(t) * w.width + p] = p;
  }
  EXPECT_TRUE(dense.same_bytes(run(w, 0, 2)));
}

// Scores hundreds apart: the largest key in the last block, in the first one, and all far below zero.
TEST_P(Attention, ExtremeScores) {
  for (const int loud : {0, 70, 129})
    for (const float sign : {1.f, -1.f}) {
      World w(table(), {2, 32, 0, 130, 1}, seed);
      w.scale = 1;
      const int t = w.step.header.tokens - 1;
      for (int h = 0; h < 2; ++h) w.q.set(t, h * w.q_head, 40 * sign);
      for (int p = 0; p < 130; ++p) w.slab.rows.set(LatentSlab::row(w.step, 1, p), 0, p == loud ? 20 : 1);
      const OpRows out = run(w, 0, 2);
      for (int h = 0; h < 2; ++h) {
        const BoundedVec e = w.expected(t, h);
        EXPECT_CLOSE(out.read(t, h * w.out_head, 32), e.value, e.error)
            << "loud " << loud << " sign " << sign;
      }
    }
}

WEFT_KERNEL_TESTS(Rope);
WEFT_KERNEL_TESTS(Latent);
WEFT_KERNEL_TESTS(Attention);

}  // namespace
}  // namespace weft::test
