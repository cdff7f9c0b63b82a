// Expanded MLA over shuffled, poisoned pages: dense and masked by a selection, against double precision; which rows it
// takes, and that a taken row's bits do not depend on how its prompt was cut.
#include "kernels/cases.h"
#include "reference.h"
#include "slabs.h"

namespace weft::test {
namespace {

using namespace reference;

struct Shape {
  int heads, latent, nope, rope, v;
  WeightFormat format;
  bool gate, sparse;
};
std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << "heads " << s.heads << " latent " << s.latent << " nope " << s.nope << " rope " << s.rope << " v " << s.v
             << ' ' << format_name(s.format) << (s.gate ? " gated" : "") << (s.sparse ? " sparse" : "");
}
const std::vector<Shape> kShapes = {
    {3, 20, 10, 4, 6, WeightFormat::bf16, false, false}, {3, 20, 10, 4, 6, WeightFormat::bf16, true, true},
    {2, 26, 22, 0, 18, WeightFormat::f32, false, true},  {2, 512, 128, 64, 128, WeightFormat::bf16, true, false},
    {1, 512, 256, 0, 256, WeightFormat::bf16, false, true},
};

// Queries, weights and the cache of a prompt of `context` tokens in slot 0, beside a stranger in slot 1.
struct Prompt {
  Prompt(const KernelTable& table, const Shape& s, int context)
      : table(table), s(s), context(context), all({{0, context, 0}}, context, 2, kSeed), random(5),
        q_head(s.nope + s.rope), pe_head(s.rope + 3), slab(table, all.pages(), s.latent + s.rope),
        q(table, context, s.heads * q_head), pe(table, context, s.heads * pe_head + 8), gate(table, context, s.heads * s.v),
        key(random_weight(random, s.format, s.heads, s.nope, s.latent)),
        value(random_weight(random, s.format, s.heads, s.v, s.latent)) {
    for (int t = 0; t < context; ++t) {
      slab.rows.fill(LatentSlab::row(all, 0, t), 0, random.normals(s.latent + s.rope).data(), s.latent + s.rope,
                     slab.row_elements);
      q.fill(t, 0, random.normals(s.heads * q_head).data(), s.heads * q_head);
      pe.fill(t, 0, random.normals(s.heads * pe_head).data(), s.heads * pe_head);
      gate.fill(t, 0, random.normals(s.heads * s.v).data(), s.heads * s.v);
      std::vector<int> row;
      for (int p = 0; p <= t; ++p)
        if (!s.sparse || t < 20 || p == t || (random.below(3) == 0 && (t < 300 || t % 2 == 0 || p >= 256)))
          row.push_back(p);
      keys.push_back(row);
      count.push_back(static_cast<int>(row.size()));
      row.resize(context, -1);
      list.insert(list.end(), row.begin(), row.end());
    }
    scale = 1 / std::sqrt(static_cast<float>(s.latent * q_head));  // weights are N(0, 1): scores of a few units
  }
  // The rows of a step that begins at `first`.
  ExpandedArgs args(const OpRows& out, int first, int below) const {
    ExpandedArgs a{};
    a.q = q.at(first * q.ld()), a.ld_q = q.ld(), a.q_head = q_head;
    a.q_pe = pe.at(first * pe.ld()), a.ld_pe = pe.ld(), a.pe_head = pe_head;
    a.key = key.packed, a.value = value.packed, a.heads = s.heads, a.latent = s.latent, a.nope = s.nope;
    a.rope = s.rope, a.v = s.v, a.scale = scale, a.slab = slab.data(), a.page_bytes = slab.page_bytes;
    a.expand_below = below, a.out = out.data<void>(), a.ld_out = out.ld();
    if (s.sparse) a.list = list.data() + static_cast<size_t>(first) * context, a.count = count.data() + first, a.width = context;
    if (s.gate) a.gate = gate.data() + static_cast<size_t>(first) * gate.ld(), a.ld_gate = gate.ld();
    return a;
  }
  // One latent row through a head's weights, as the kernel stores it.
  Bounded through(const TestWeight& w, int head, int row, int position) const {
    const int at = LatentSlab::row(all, 0, position);
    // under a bf16 product f32 weights are rounded too
    const bool rounds = table.bf16_operands && s.format == WeightFormat::f32;
    Bounded x = dot([&](int i) { return w.at(head, row, i); }, [&](int i) { return slab.rows.get(at, i); }, s.latent);
    if (rounds)
      for (int i = 0; i < s.latent; ++i) x.error += kBf16 * std::abs(w.at(head, row, i) * slab.rows.get(at, i));
    return stored(x, table.bf16_operands);
  }
  BoundedVec expected(int t, int h) const {
    BoundedVec score;
    for (const int p : keys[t]) {
      Bounded sum;
      double size = 0;
      for (int d = 0; d < s.nope; ++d) {
        const Bounded k = through(key, h, d, p);
        const double x = q.get(t, h * q_head + d);
        sum.value += x * k.value, sum.error += std::abs(x) * k.error, size += std::abs(x * k.value);
      }
      for (int d = 0; d < s.rope; ++d) {
        const double x = pe.get(t, h * pe_head + d) * slab.rows.get(LatentSlab::row(all, 0, p), s.latent + d);
        sum.value += x, size += std::abs(x);
      }
      sum.error += (s.nope + s.rope + 2) * kU * size;
      score.push({sum.value * scale, sum.error * scale + 2 * kU * std::abs(sum.value * scale)});
    }
    const BoundedVec p = softmax(score);
    BoundedVec out;
    for (int d = 0; d < s.v; ++d) {
      std::vector<Bounded> rows;
      for (const int position : keys[t]) rows.push_back(through(value, h, d, position));
      Bounded y = weighted(p, [&](size_t j) { return rows[j].value; });
      double size = 0;
      for (size_t j = 0; j < rows.size(); ++j) size += p.value[j] * std::abs(rows[j].value), y.error += p.value[j] * rows[j].error;
      // under a bf16 product shares are rounded, and their exp2 is right within 2^-15.8
      y.error += size * ((table.bf16_operands ? kBf16 + std::exp2(-15.8) : 0) +
                         (context / 64.0 + 2) * (kElementary + 2 * kU));
      if (s.gate) {
        const double g = sigmoid(gate.get(t, h * s.v + d));
        y = {y.value * g, y.error * g + 2 * kElementary * std::abs(y.value * g)};
      }
      out.push(stored(y, table.bf16_operands));
    }
    return out;
  }

  static constexpr uint64_t kSeed = 9;
  const KernelTable& table;
  Shape s;
  int context;
  TestStep all;
  Random random;
  int q_head, pe_head;
  LatentSlab slab;
  OpRows q, pe;
  F32Rows gate;
  TestWeight key, value;
  float scale;
  std::vector<std::vector<int>> keys;
  std::vector<int32_t> list, count;
};

class Expanded : public KernelTest {
 protected:
  OpRows run(const Prompt& p, int first, int length, int below, int tasks = 0, int threads = 2) {
    const TestStep step({{first, length, 0}}, p.context, 2, Prompt::kSeed);
    OpRows out(table(), length, p.s.heads * p.s.v + 8);
    machine().run(table().attention_expanded, p.args(out, first, below), step.header, tasks, threads);
    return out;
  }
};
constexpr int kAlways = 1 << 30;

TEST_P(Expanded, AgreesWithTheDefinition) {
  for (const Shape& s : kShapes) {
    SCOPED_TRACE(::testing::Message() << s);
    // The longer one has more than one pass of 512 rows, groups of 256 keys, and rows that see none of the
    // first group.
    const int context = s.latent > 100 ? 150 : 700, taken = context / 64 * 64;
    const Prompt prompt(table(), s, context);
    const OpRows out = run(prompt, 0, context, kAlways);
    Vec actual;
    BoundedVec expected;
    for (const int t : {0, 1, 19, 20, 63, 64, 65, 100, 127, 255, 256, 301, 383, 511, 512, 577, 639}) {
      if (t >= taken) break;
      for (int h = 0; h < s.heads; ++h) {
        const BoundedVec e = prompt.expected(t, h);
        for (int d = 0; d < s.v; ++d) actual.push_back(out.get(t, h * s.v + d)), expected.push(e[d]);
      }
    }
    EXPECT_CLOSE(actual, expected.value, expected.error);
    for (int t = 0; t < taken; ++t) ASSERT_TRUE(out.untouched(t, s.heads * s.v)) << "behind row " << t;
    for (int t = taken; t < context; ++t) ASSERT_TRUE(out.untouched(t, 0)) << "row " << t << " is not a whole block's";
    for (const int tasks : {1, 2}) EXPECT_TRUE(out.same_bytes(run(prompt, 0, context, kAlways, tasks, tasks)));
  }
}

// Only whole aligned blocks inside the span and below the limit.
TEST_P(Expanded, TakesWholeBlocksBelowTheLimit) {
  const Prompt prompt(table(), kShapes[1], 300);
  const auto taken = [&](int first, int length, int below) {
    const OpRows out = run(prompt, first, length, below);
    std::vector<int> rows;
    for (int t = 0; t < length; ++t)
      if (!out.untouched(t, 0)) rows.push_back(first + t);
    return rows;
  };
  const auto range = [](int from, int to) {
    std::vector<int> all;
    for (int i = from; i < to; ++i) all.push_back(i);
    return all;
  };
  EXPECT_EQ(taken(0, 63, kAlways), range(0, 0));
  EXPECT_EQ(taken(0, 64, kAlways), range(0, 64));
  EXPECT_EQ(taken(1, 126, kAlways), range(0, 0));
  EXPECT_EQ(taken(1, 127, kAlways), range(64, 128));
  EXPECT_EQ(taken(60, 230, kAlways), range(64, 256));
  EXPECT_EQ(taken(0, 300, 128), range(0, 128));
  EXPECT_EQ(taken(128, 100, 128), range(0, 0));
  EXPECT_EQ(taken(0, 300, 0), range(0, 0));
}

TEST_P(Expanded, CutsAtMultiplesOf64ChangeNoBit) {
  for (const Shape& s : kShapes) {
    SCOPED_TRACE(::testing::Message() << s);
    const Prompt prompt(table(), s, 640);
    const OpRows whole = run(prompt, 0, 640, kAlways);
    for (const auto& [first, length] : {std::pair{0, 64}, {64, 64}, {64, 192}, {192, 448}, {320, 320}}) {
      const OpRows part = run(prompt, first, length, kAlways);
      for (int t = 0; t < length; ++t) ASSERT_TRUE(part.same_row(t, whole, first + t, 0, s.heads * s.v)) << first + t;
    }
  }
}

// The absorbed kernel leaves alone exactly the rows that this one takes.
TEST_P(Expanded, TheAbsorbedKernelComputesTheOthers) {
  const Prompt prompt(table(), kShapes[0], 200);
  const TestStep step({{30, 170, 0}}, 200, 2, Prompt::kSeed);
  OpRows q(table(), 170, 3 * 32), out(table(), 170, 3 * 32);
  for (int t = 0; t < 170; ++t) q.fill(t, 0, std::vector<float>(96, 1.f).data(), 96);
  AttentionArgs a{};
  a.q = q.data(), a.ld_q = q.ld(), a.q_head = 32, a.heads = 3, a.latent = 20, a.rope = 4, a.scale = 1;
  a.slab = prompt.slab.data(), a.page_bytes = prompt.slab.page_bytes;
  a.out = out.data(), a.ld_out = out.ld(), a.out_head = 32, a.expand_below = kAlways;
  machine().run(table().attention, a, step.header);
  for (int t = 0; t < 170; ++t) {
    const int position = 30 + t;
    EXPECT_EQ(out.untouched(t, 0), position >= 64 && position < 192) << "position " << position;
  }
  // and nobody counts them as its work
  const Cost own = cost(a, step.header);
  double pairs = 0;
  for (int t = 0; t < 170; ++t)
    if (!out.untouched(t, 0)) pairs += 30 + t + 1;
  EXPECT_EQ(own.flops, 2 * pairs * 3 * (2 * 20 + 4));
  EXPECT_EQ(own.bytes, 200.0 * latent_row_bytes(a.format, 20, 4, 2));
  const TestStep blocks({{64, 128, 0}}, 200, 2, Prompt::kSeed);
  EXPECT_EQ(cost(a, blocks.header).flops, 0);
  EXPECT_EQ(cost(a, blocks.header).bytes, 0);
}

WEFT_KERNEL_TESTS(Expanded);

}  // namespace
}  // namespace weft::test
