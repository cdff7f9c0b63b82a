// Index keys, k-pools and the lightning indexer's exact top-k.
#include <array>

#include "kernels/cases.h"
#include "kernels/index_plan.h"
#include "reference.h"
#include "slabs.h"

namespace weft::test {
namespace {

using cases::IndexCase;
using namespace reference;

// ---- keys ----

struct KeyCase {
  int dim, rope, pool;
  RopeMode mode = RopeMode::none;
};

// The keys of one sequence of `tokens`, written in steps that end at `ends`, beside a second sequence in
// every step.
class KeyWriter {
 public:
  static constexpr int kPast = 40;  // position of the second sequence's first token
  KeyWriter(const KernelTable& table, const KeyCase& c, int tokens, uint64_t seed)
      : table(table), c(c), random(seed), key(table, tokens, c.dim + 3), gate(table, tokens, c.dim + 1) {
    for (int t = 0; t < tokens; ++t) draw(t);
    norm = random.normals(c.dim), bias = random.normals(c.dim),
    ape = random.normals(static_cast<size_t>(c.pool) * c.dim);
  }
  void draw(int t) {
    std::vector<float> x = random.normals(c.dim);
    for (float& v : x) v += 3;  // a mean that RMSNorm would keep
    key.fill(t, 0, x.data(), c.dim);
    gate.fill(t, 0, random.normals(c.dim).data(), c.dim);
  }
  size_t ring_bytes() const { return static_cast<size_t>(c.pool) * 2 * c.dim * 4; }
  void write(Machine& machine, KeySlab& slab, Buffer& ring, int first, int length, int tasks = 0) {
    TestStep step({{kPast + first, length, 1}, {first, length, 0}}, 320, 2);
    step.header.state_stride = ring_bytes();
    const RopeSetup rope(table, machine, step.header, std::max(c.rope, 2));
    F32Rows keys(table, 2 * length, key.ld()), gates(table, 2 * length, gate.ld());
    for (int r = 0; r < length; ++r)
      for (const int copy : {r, length + r}) {
        keys.fill(copy, 0, key.data() + static_cast<size_t>(first + r) * key.ld(), c.dim);
        gates.fill(copy, 0, gate.data() + static_cast<size_t>(first + r) * gate.ld(), c.dim);
      }
    IndexKeyArgs a{};
    a.key = keys.data(), a.ld_key = keys.ld(), a.pool_gate = gates.data(), a.ld_gate = gates.ld(),
    a.ape = ape.data();
    a.norm = norm.data(), a.norm_bias = bias.data(), a.eps = 1e-6f, a.dim = c.dim, a.rope = c.rope,
    a.pool = c.pool;
    a.mode = c.mode, a.table = rope.values.data(), a.slab = slab.data(), a.page_bytes = slab.page_bytes;
    a.ring = ring.as<std::byte>();
    machine.run(table.index_key, a, step.header, tasks);
  }
  Buffer fresh_ring() const {
    Buffer ring(3 * ring_bytes());
    std::memset(ring.data(), 0xFF, ring.size());
    return ring;
  }

  // Key (or pool) number i of the first sequence
  BoundedVec expected(int i) const {
    const Vec w(norm.begin(), norm.end()), b(bias.begin(), bias.end());
    BoundedVec out(c.dim);
    if (c.pool == 1) {
      out = layer_norm(key.read(i, 0, c.dim), w, b, 1e-6);
      Vec freq;
      for (int j = 0; j < c.rope / 2; ++j) freq.push_back(std::pow(1e4, -2.0 * j / c.rope));
      if (c.rope) rotate(out, 0, c.rope, i, freq, 1, c.mode);
    } else {
      std::vector<BoundedVec> k;
      for (int s = 0; s < c.pool; ++s)
        k.push_back(layer_norm(key.read(i * c.pool + s, 0, c.dim), w, b, 1e-6));
      for (int d = 0; d < c.dim; ++d) {
        BoundedVec score;
        for (int s = 0; s < c.pool; ++s) {
          const double x =
              static_cast<double>(gate.get(i * c.pool + s, d)) + ape[static_cast<size_t>(s) * c.dim + d];
          score.push({x, kU * std::abs(x)});
        }
        const BoundedVec p = softmax(score);
        Bounded y = weighted(p, [&](size_t s) { return k[s].value[d]; });
        for (int s = 0; s < c.pool; ++s) y.error += p.value[s] * k[s].error[d];
        out.put(d, y);
      }
    }
    for (int d = 0; d < c.dim; ++d) out.put(d, stored(out[d], table.bf16_operands));
    return out;
  }
  void expect_keys(const KeySlab& slab, int keys, int past_keys) {
    const TestStep step({{0, 1, 0}, {0, 1, 1}}, 320, 2);
    for (int i = 0; i < keys; ++i) {
      const BoundedVec e = expected(i);
      Vec actual;
      for (int d = 0; d < c.dim; ++d) actual.push_back(slab.get(step, 0, i, d));
      ASSERT_TRUE(close(actual, e.value, e.error)) << "key " << i;
      for (int d = c.dim; d < slab.width; ++d)
        ASSERT_EQ(slab.get(step, 0, i, d), 0.f) << "padding of key " << i;
    }
    EXPECT_TRUE(slab.untouched(step, 0, keys, 0)) << "a key that does not exist yet was written";
    for (int i = 0; i < kPast / c.pool; ++i)
      ASSERT_TRUE(slab.untouched(step, 1, i, 0)) << "key " << i << " of the other's past";
    EXPECT_EQ(past_keys == 0, slab.untouched(step, 1, kPast / c.pool, 0));
  }

  const KernelTable& table;
  KeyCase c;
  Random random;
  F32Rows key, gate;
  std::vector<float> norm, bias, ape;
};

class IndexKey : public KernelTest {};

TEST_P(IndexKey, NormRopeAndPlace) {
  for (const KeyCase& c : {KeyCase{8, 4, 1, RopeMode::interleaved},
                           {8, 4, 1, RopeMode::half_split},
                           {40, 0, 1},
                           {128, 64, 1, RopeMode::half_split},
                           {128, 64, 1, RopeMode::interleaved},
                           {33, 16, 1, RopeMode::half_split}}) {
    SCOPED_TRACE(::testing::Message() << "dim " << c.dim << " rope " << c.rope << ' ' << cases::name(c.mode));
    KeyWriter w(table(), c, 131, 3);
    KeySlab slab(table(), 10, c.dim, 1);
    Buffer ring;
    w.write(machine(), slab, ring, 0, 100);
    w.write(machine(), slab, ring, 100, 31, 1);
    w.expect_keys(slab, 131, 131);
  }
}

// Pools of 4 in cuts of 1, 3 and 64: each has its own slot, whatever the cut; the ring belongs to its
// sequence.
TEST_P(IndexKey, PoolsInAnyCut) {
  for (const int dim : {8, 128, 40}) {
    KeyWriter w(table(), {dim, 0, 4}, 203, 7);
    std::vector<KeySlab> slabs;
    for (const int cut : {203, 64, 3, 1}) {
      SCOPED_TRACE(::testing::Message() << "dim " << dim << " cut " << cut);
      slabs.emplace_back(table(), 10, dim, 4);
      Buffer ring = w.fresh_ring();
      for (int t = 0; t < 203; t += cut) w.write(machine(), slabs.back(), ring, t, std::min(cut, 203 - t));
      w.expect_keys(slabs.back(), 50, 50);
      EXPECT_TRUE(slabs.back().elements.same_bytes(slabs[0].elements));
      for (size_t i = 2 * w.ring_bytes(); i < ring.size(); ++i)
        ASSERT_EQ(ring.data()[i], 0xFF) << "a third sequence's ring";
    }
  }
}

// Taking tokens of the open pool back and writing others gives the pools of a fresh run. (Further back the
// ring no longer holds what is needed: the state pool restores it.)
TEST_P(IndexKey, RollBackWithinTheOpenPool) {
  for (const int kept : {202, 201, 200}) {
    SCOPED_TRACE(kept);
    KeyWriter w(table(), {8, 0, 4}, 210, 7);
    KeySlab slab(table(), 10, 8, 4), fresh(table(), 10, 8, 4);
    Buffer ring = w.fresh_ring(), fresh_ring = w.fresh_ring();
    w.write(machine(), slab, ring, 0, 203);
    for (int t = kept; t < 210; ++t) w.draw(t);
    w.write(machine(), slab, ring, kept, 210 - kept);
    w.write(machine(), fresh, fresh_ring, 0, 210);
    EXPECT_TRUE(slab.elements.same_bytes(fresh.elements));
    w.expect_keys(slab, 52, 52);
  }
}

// The example of dsa.md 3.2: two channels, to the six digits it gives (half a unit of the last), with keys
// that pass LayerNorm unchanged but for a factor the norm's weight undoes.
TEST_P(IndexKey, PoolWeightsOfTheWorkedExample) {
  const float gates[4][2] = {{0, 1}, {.5f, 0}, {1, -1}, {-.5f, 2}},
              ape[4][2] = {{.1f, 0}, {0, .2f}, {-.1f, 0}, {.3f, -.3f}};
  const double weight[2][4] = {{.183211, .273319, .407744, .135726}, {.277900, .124869, .037610, .559622}};
  for (int hot = 0; hot < 4; ++hot) {  // one key at 1, the others at 0: reads one weight
    KeyWriter w(table(), {2, 0, 4}, 4, 1);
    w.norm = {1, 1}, w.bias = {0, 0}, w.ape.clear();
    for (int s = 0; s < 4; ++s) {
      w.ape.insert(w.ape.end(), ape[s], ape[s] + 2);
      w.gate.fill(s, 0, gates[s], 2);
      // LayerNorm of (x, -x) is (1, -1) up to eps / x^2, of (x, x) zero
      w.key.set(s, 0, s == hot ? 1e4f : 1), w.key.set(s, 1, s == hot ? -1e4f : 1);
    }
    KeySlab slab(table(), 10, 2, 4);
    Buffer ring = w.fresh_ring();
    w.write(machine(), slab, ring, 0, 4);
    const TestStep step({{0, 1, 0}, {0, 1, 1}}, 320, 2);
    for (int d = 0; d < 2; ++d) {
      const double a = weight[d][hot];
      EXPECT_NEAR(slab.get(step, 0, 0, d), d == 0 ? a : -a, 5e-7 + a * (20 * kU + (narrow() ? kBf16 : 0)));
    }
  }
}

// ---- selection ----

// Sequences with keys in place and queries that see them. integers: every score is exact in f32 whatever the
// order of additions, so that the selection has one right answer, with many ties.
struct World {
  World(const KernelTable& table, const IndexCase& c, const std::vector<TestSpan>& spans, bool integers,
        uint64_t seed)
      : table(table),
        c(c),
        integers(integers),
        step(spans, 64 * ((c.context + 63) / 64) + 64, 2, seed),
        slab(table, step.pages(), c.dim, c.pool),
        q(table, step.header.tokens, c.heads * c.dim + 5),
        weight(table, step.header.tokens, c.heads + 3),
        width(c.topk + c.pool - 1) {
    Random random(seed);
    scale = integers ? 0.25f : 1 / std::sqrt(static_cast<float>(c.heads * c.dim));
    const auto value = [&](int range) {
      return integers ? static_cast<float>(random.below(2 * range + 1) - range) : random.normal();
    };
    for (int span = 0; span < step.header.spans; ++span) {
      const int keys = (step.header.span[span].position + step.header.span[span].length) / c.pool;
      for (int i = 0; i < keys; ++i) {
        std::vector<float> x(c.dim);
        for (float& v : x) v = value(1);
        slab.put(step, span, i, x.data(), c.dim);
      }
    }
    for (int t = 0; t < step.header.tokens; ++t) {
      for (int i = 0; i < c.heads * c.dim; ++i) q.set(t, i, value(2));
      for (int h = 0; h < c.heads; ++h) weight.set(t, h, integers ? value(2) / 2 : value(1));
    }
  }
  int visible(int t) const { return step.header.position[t] + 1; }
  BoundedVec scores(int t) const {
    BoundedVec out;
    for (int i = 0; i < visible(t) / c.pool; ++i) {
      double sum = 0, size = 0, error = 0;
      for (int h = 0; h < c.heads; ++h) {
        const Bounded s = dot([&](int d) { return q.get(t, h * c.dim + d); },
                              [&](int d) { return slab.get(step, step.header.span_of[t], i, d); }, c.dim);
        const double w = static_cast<double>(weight.get(t, h)) * scale;
        sum += w * std::max(0.0, s.value) + (std::isnan(s.value) ? NAN : 0);
        size += std::abs(w) * std::abs(s.value), error += std::abs(w) * s.error;
      }
      out.push({sum, error + (c.heads + 4) * kU * size});
    }
    return out;
  }
  std::vector<int> expected(int t) const {
    return expand(best(scores(t).value, c.topk / c.pool), c.pool, visible(t));
  }

  const KernelTable& table;
  IndexCase c;
  bool integers;
  TestStep step;
  KeySlab slab;
  OpRows q;
  F32Rows weight;
  int width;
  float scale;
};

using Lists = std::vector<std::vector<int>>;

class Index : public KernelTest {
 protected:
  // Checks the form of every row: count, ascending, -1 behind, nothing beyond.
  Lists run(const World& w, int tasks = 0, int threads = 2) {
    const int tokens = w.step.header.tokens;
    std::vector<int32_t> out(static_cast<size_t>(tokens + 1) * w.width, -77), count(tokens + 1, -77);
    IndexArgs a{};
    a.q = w.q.data(), a.ld_q = w.q.ld(), a.weight = w.weight.data(), a.ld_weight = w.weight.ld(),
    a.scale = w.scale;
    a.heads = w.c.heads, a.dim = w.c.dim, a.topk = w.c.topk, a.pool = w.c.pool, a.slab = w.slab.data();
    a.page_bytes = w.slab.page_bytes, a.layer = 1, a.out = out.data(), a.count = count.data(),
    a.width = w.width;
    std::vector<float> part_score(static_cast<size_t>(kIndexLists) * w.c.topk);
    std::vector<int32_t> part_index(part_score.size()), part_count(kIndexLists);
    a.part_score = part_score.data(), a.part_index = part_index.data(), a.part_count = part_count.data();
    machine().run(table().index, a, w.step.header, tasks, threads);
    machine().run(table().index_merge, IndexMergeArgs{a}, w.step.header, tasks, threads);
    Lists lists;
    for (int t = 0; t < tokens; ++t) {
      const int32_t* row = &out[static_cast<size_t>(t) * w.width];
      EXPECT_TRUE(0 <= count[t] && count[t] <= w.width) << "token " << t;
      lists.emplace_back(row, row + std::clamp(count[t], 0, w.width));
      for (int i = count[t]; i < w.width; ++i) EXPECT_EQ(row[i], -1) << "token " << t << " column " << i;
    }
    EXPECT_EQ(out[static_cast<size_t>(tokens) * w.width], -77);
    EXPECT_EQ(count[tokens], -77);
    return lists;
  }
  void expect_exact(const World& w) {
    const Lists lists = run(w);
    for (int t = 0; t < w.step.header.tokens; ++t) ASSERT_EQ(lists[t], w.expected(t)) << "token " << t;
    EXPECT_EQ(lists, run(w, 1, 1));
    EXPECT_EQ(lists, run(w, 3, 2));
  }
};

std::vector<TestSpan> spans_of(const IndexCase& c) {
  return {{0, 3, 1}, {c.context - c.tokens, c.tokens, 0}};
}

TEST_P(Index, ExactSelectionWithTies) {
  uint64_t seed = 40;
  for (const IndexCase& c : cases::index_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    expect_exact(World(table(), c, spans_of(c), true, ++seed));
  }
}

// Few tokens over many keys: parts of the keys are searched apart and merged, by the same order.
TEST_P(Index, PartsAreMergedExactly) {
  for (const IndexCase& c :
       {IndexCase{2, 8, 300, 1, 40000, 2}, {2, 8, 2048, 1, 20001, 1}, {2, 8, 256, 4, 80003, 3}}) {
    SCOPED_TRACE(::testing::Message() << c);
    const World w(table(), c, {{c.context - c.tokens, c.tokens, 0}, {c.topk - 1, 1, 1}}, true, 31);
    expect_exact(w);
  }
}

// Real-valued scores: nobody chosen scores below somebody left out by more than rounding can explain.
TEST_P(Index, RealScores) {
  uint64_t seed = 80;
  for (const IndexCase& c : cases::index_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const World w(table(), c, spans_of(c), false, ++seed);
    const Lists lists = run(w);
    for (int t = 0; t < w.step.header.tokens; ++t) {
      const BoundedVec score = w.scores(t);
      std::vector<bool> chosen(score.size());
      for (const int token : lists[t])
        if (token / c.pool < static_cast<int>(score.size())) chosen[token / c.pool] = true;
      double lowest = INFINITY, highest = -INFINITY;
      int keys = 0;
      for (size_t i = 0; i < score.size(); ++i) {
        if (chosen[i])
          lowest = std::min(lowest, score.value[i] + score.error[i]), ++keys;
        else
          highest = std::max(highest, score.value[i] - score.error[i]);
      }
      ASSERT_EQ(keys, std::min<int>(c.topk / c.pool, static_cast<int>(score.size()))) << "token " << t;
      ASSERT_EQ(lists[t].size(), static_cast<size_t>(keys * c.pool + w.visible(t) % c.pool)) << "token " << t;
      ASSERT_TRUE(std::is_sorted(lists[t].begin(), lists[t].end())) << "token " << t;
      ASSERT_GE(lowest, highest) << "token " << t;
    }
  }
}

// One query row over keys (a, b, c, 0..) with q = (1024, 2^-7, 2^-13): scores exact to the last of 24 bits.
class TopK : public Index {
 protected:
  using Keys = std::vector<std::array<float, 3>>;
  void expect_row(const Keys& keys, int topk, float w = 1, const char* what = "") {
    SCOPED_TRACE(what);
    const int n = static_cast<int>(keys.size());
    World world(table(), {1, 8, topk, 1, n, 1}, {{n - 1, 1, 0}}, true, 3);
    world.scale = 1;
    const std::vector<float> q = {1024, 0x1p-7f, 0x1p-13f, 0, 0, 0, 0, 0};
    world.q.fill(0, 0, q.data(), 8);
    world.weight.set(0, 0, w);
    for (int i = 0; i < n; ++i) {
      const std::vector<float> x = {keys[i][0], keys[i][1], keys[i][2], 0, 0, 0, 0, 0};
      world.slab.put(world.step, 0, i, x.data(), 8);
    }
    expect_exact(world);
  }
};

TEST_P(TopK, Rows) {
  Random random(6);
  Keys zeros(8320, {0, 0, 0});
  for (int i = 0; i < 100; ++i) zeros[random.below(8320)] = {1, static_cast<float>(i), 0};
  expect_row(zeros, 2048, 1, "100 winners, 8220 zeros");
  Keys fine(5000);
  const std::vector<int> order = random.shuffled(5000);
  for (int i = 0; i < 5000; ++i)  // distinct in f32, one value in fp16
    fine[i] = {1, static_cast<float>(order[i] / 64), static_cast<float>(order[i] % 64)};
  expect_row(fine, 2048, 1, "equal in fp16, distinct in f32");
  Keys ascending(3000), descending(3000);
  for (int i = 0; i < 3000; ++i) {
    ascending[i] = {1, static_cast<float>(i / 64), static_cast<float>(i % 64)};
    descending[2999 - i] = ascending[i];
  }
  expect_row(ascending, 100, 1, "ascending");
  expect_row(descending, 100, 1, "descending");
  expect_row(ascending, 100, -1, "ascending, negative weight");
  // Ascending from window to window, shuffled inside: whatever a cut samples, it must leave room for a next
  // block that is better in every key, or that runs over into the indices.
  for (const int window : {100, 200, 384}) {
    Keys rising(12000);
    for (int i = 0; i < 12000; i += window) {
      const std::vector<int> inside = random.shuffled(window);
      for (int j = 0; j < window && i + j < 12000; ++j)
        rising[i + j] = {1, static_cast<float>((i + inside[j]) / 64),
                         static_cast<float>((i + inside[j]) % 64)};
    }
    for (int i = 0; i < 60; ++i)
      rising[i] = {2, static_cast<float>(i), 0};  // stay in front, where a run over would hit
    for (const int k : {72, 100, 128, 200}) expect_row(rising, k, 1, "rising windows");
  }
  Keys finite(51, {NAN, 0, 0});
  finite[7] = {1, 0, 0}, finite[20] = {0, 0, 0}, finite[50] = {2, 0, 0};
  expect_row(finite, 16, 1, "51 wide, 3 finite");
  expect_row(Keys(4000, {1, 0, 0}), 4, -1e5f / 1024, "all -1e5");
  expect_row(Keys(8320, {1, 0, 0}), 2048, 1, "all equal");
  expect_row(Keys(300, {NAN, 0, 0}), 64, 1, "all NaN");
  Keys signs(400);
  for (int i = 0; i < 400; ++i) signs[i] = {i % 3 ? -1.f : 0.f, 0, 0};
  expect_row(signs, 64, -1, "+0 and -0 are one score");
  Keys negative(700);
  for (int i = 0; i < 700; ++i) negative[i] = {1, static_cast<float>(order[i] % 700), 0};
  expect_row(negative, 33, -3, "all negative, distinct");
  for (const int n : {63, 64, 65, 66}) expect_row(Keys(fine.begin(), fine.begin() + n), 65, 1, "around k");
  expect_row(Keys(5, {NAN, 0, 0}), 9, 1, "fewer than k: no score is read");
}

// The unfused form that benchmarks compare with selects the same.
TEST_P(Index, PassesSelectTheSame) {
  const IndexCase c{3, 40, 16, 1, 200, 37};
  const World w(table(), c, {{c.context - c.tokens, c.tokens, 0}}, true, 5);
  const int tokens = w.step.header.tokens, ld = 256;
  std::vector<int32_t> out(static_cast<size_t>(tokens) * w.width), count(tokens);
  std::vector<float> product(2 * 16 * ld), score(2 * ld);
  IndexPassesArgs a{};
  a.index.q = w.q.data(), a.index.ld_q = w.q.ld(), a.index.weight = w.weight.data();
  a.index.ld_weight = w.weight.ld(), a.index.scale = w.scale, a.index.heads = c.heads, a.index.dim = c.dim;
  a.index.topk = c.topk, a.index.pool = 1, a.index.slab = w.slab.data(),
  a.index.page_bytes = w.slab.page_bytes;
  a.index.out = out.data(), a.index.count = count.data(), a.index.width = w.width;
  a.product = product.data(), a.score = score.data(), a.ld = ld;
  machine().run(table().index_passes, a, w.step.header, 2);
  const Lists lists = run(w);
  for (int t = 0; t < tokens; ++t)
    for (int i = 0; i < count[t]; ++i)
      ASSERT_EQ(out[static_cast<size_t>(t) * w.width + i], lists[t][i]) << "token " << t;
}

// Forced selections replace the kernel's own for the attention behind it; seen ones show what it would have
// chosen.
TEST_P(Index, ForcedAndSeen) {
  const IndexCase c{2, 8, 6, 1, 40, 5};
  World w(table(), c, spans_of(c), true, 17);
  const Lists own = run(w);
  std::vector<int32_t> forced(static_cast<size_t>(8) * w.width, -1), seen(forced.size(), -77);
  for (int t = 0; t < 8; ++t)
    for (int i = 0; i < t % 4; ++i) forced[static_cast<size_t>(t) * w.width + i] = i;
  const int32_t* force_layers[] = {nullptr, forced.data()};
  int32_t* see_layers[] = {nullptr, seen.data()};
  w.step.header.forced_selection = force_layers, w.step.header.seen_selection = see_layers;
  const Lists got = run(w);
  for (int t = 0; t < 8; ++t) {
    std::vector<int> expected;
    for (int i = 0; i < t % 4; ++i) expected.push_back(i);
    EXPECT_EQ(got[t], expected);
    for (int i = 0; i < w.width; ++i)
      EXPECT_EQ(seen[static_cast<size_t>(t) * w.width + i],
                i < static_cast<int>(own[t].size()) ? own[t][i] : -1);
  }
  force_layers[1] = nullptr;
  EXPECT_EQ(run(w), own) << "a null layer means not forced";
}

// Norm, rope, ReLU and head weights together: 12 tokens, two heads of which one counts negatively, keys whose
// mean is far from zero.
struct SmallIndexer {
  SmallIndexer(const KernelTable& table, RopeMode mode, uint64_t seed)
      : w(table, {2, 8, 3, 1, 12, 12}, {{0, 12, 0}}, false, seed), mode(mode), key(table, 12, 8), raw(w.q) {
    Random random(seed);
    for (int t = 0; t < 12; ++t)
      for (int d = 0; d < 8; ++d) key.set(t, d, 3 + random.normal() * 2);
    for (int d = 0; d < 8; ++d)
      norm.push_back(random.uniform(0.5f, 1.5f)), bias.push_back(random.normal() * 0.3f);
    for (int t = 0; t < 12; ++t) w.weight.set(t, 0, 1), w.weight.set(t, 1, -0.8f);
  }
  // The selection by the definition, or with one of the known mistakes. apart: whether no rounding could
  // change it.
  Lists expected(RopeMode pairs, bool relu, bool layer_normed, bool* apart = nullptr) const {
    const Vec freq = {1, 1e-2}, one(norm.begin(), norm.end()), zero(bias.begin(), bias.end());
    std::vector<BoundedVec> keys;
    for (int t = 0; t < 12; ++t) {
      const Vec x = key.read(t, 0, 8);
      keys.push_back(layer_normed ? layer_norm(x, one, zero, 1e-6) : rms_norm(exact(x), one, 1e-6));
      rotate(keys[t], 0, 4, t, freq, 1, pairs);
    }
    const double rounding = (w.table.bf16_operands ? 2.01 * kBf16 : 0) + 20 * kU;  // of q times k
    Lists lists;
    for (int t = 0; t < 12; ++t) {
      BoundedVec score(t + 1);
      for (int h = 0; h < 2; ++h) {
        BoundedVec q = exact(raw.read(t, h * 8, 8));
        rotate(q, 0, 4, t, freq, 1, pairs);
        for (int s = 0; s <= t; ++s) {
          double dot = 0, error = 0;
          for (int d = 0; d < 8; ++d) {
            dot += q.value[d] * keys[s].value[d];
            error += std::abs(q.value[d]) * (rounding * std::abs(keys[s].value[d]) + keys[s].error[d]);
          }
          const double weight = static_cast<double>(w.weight.get(t, h)) * w.scale;
          score.value[s] += weight * (relu ? std::max(dot, 0.0) : dot);
          score.error[s] += std::abs(weight) * error;
        }
      }
      lists.push_back(best(score.value, 3));
      for (int in : lists[t])
        for (int out = 0; out <= t && apart; ++out)
          if (std::find(lists[t].begin(), lists[t].end(), out) == lists[t].end())
            *apart = *apart && score.value[in] - score.error[in] > score.value[out] + score.error[out];
    }
    return lists;
  }

  World w;
  RopeMode mode;
  F32Rows key;
  OpRows raw;
  std::vector<float> norm, bias;
};

// The selection is the definition's, and each known mistake would have been seen.
TEST_P(Index, KnownMistakesWouldShow) {
  for (const RopeMode mode : {RopeMode::half_split, RopeMode::interleaved}) {
    std::unique_ptr<SmallIndexer> x;
    Lists right;
    bool apart = false;
    for (uint64_t seed = 1; !apart && seed < 5000;
         ++seed) {  // the first data whose selection hangs on no rounding
      x = std::make_unique<SmallIndexer>(table(), mode, seed);
      apart = true;
      right = x->expected(mode, true, true, &apart);
    }
    ASSERT_TRUE(apart) << "no such data";
    World& w = x->w;
    const RopeSetup rope(table(), machine(), w.step.header, 4);
    IndexKeyArgs k{};
    k.key = x->key.data(), k.ld_key = 8, k.norm = x->norm.data(), k.norm_bias = x->bias.data(), k.eps = 1e-6f,
    k.dim = 8;
    k.rope = 4, k.pool = 1, k.mode = mode, k.table = rope.values.data(), k.slab = w.slab.data();
    k.page_bytes = w.slab.page_bytes;
    machine().run(table().index_key, k, w.step.header);
    const RopeArgs r{w.q.data(), w.q.ld(), 8, w.q.data(), w.q.ld(), 8, 2, 4, mode, rope.values.data()};
    machine().run(table().rope, r, w.step.header);
    const Lists got = run(w);
    EXPECT_EQ(got, right);
    const RopeMode other = mode == RopeMode::half_split ? RopeMode::interleaved : RopeMode::half_split;
    EXPECT_NE(got, x->expected(other, true, true)) << "blind to the pairing";
    EXPECT_NE(got, x->expected(mode, false, true)) << "blind to the ReLU";
    EXPECT_NE(got, x->expected(mode, true, false)) << "blind to the key's mean";
  }
}

WEFT_KERNEL_TESTS(IndexKey);
WEFT_KERNEL_TESTS(Index);
WEFT_KERNEL_TESTS(TopK);

}  // namespace
}  // namespace weft::test
