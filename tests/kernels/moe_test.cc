// Router, expert sort and the two expert products.
#include <set>

#include "kernel_support.h"
#include "kernels/cases.h"
#include "reference.h"

namespace weft::test {
namespace {

using cases::MoeCase;
using namespace reference;

// ---- routing (kimi.md 5.2) ----

struct Routing {
  int experts, top_k, groups = 1, top_groups = 1;
  bool renormalize = true;
  float scale = 2.5f;
};
std::ostream& operator<<(std::ostream& out, const Routing& r) {
  return out << "experts " << r.experts << " top_k " << r.top_k << " groups " << r.groups << "/"
             << r.top_groups << (r.renormalize ? " renormalized" : "") << " scale " << r.scale;
}

class Route : public KernelTest {
 protected:
  struct Result {
    std::vector<std::vector<int>> expert;
    std::vector<std::vector<float>> weight;
    bool operator==(const Result&) const = default;
  };
  Result run(const Routing& r, const std::vector<std::vector<float>>& logits, const std::vector<float>& bias,
             StepHeader step = {}, int tasks = 0) {
    const int tokens = static_cast<int>(logits.size());
    F32Rows rows(table(), tokens, r.experts + 3);
    for (int t = 0; t < tokens; ++t) rows.fill(t, 0, logits[t].data(), r.experts);
    std::vector<int32_t> expert(static_cast<size_t>(tokens + 1) * r.top_k, -77);
    std::vector<float> weight(expert.size(), NAN);
    RouteArgs a{};
    a.logits = rows.data(), a.ld = rows.ld(), a.bias = bias.data(), a.experts = r.experts, a.top_k = r.top_k;
    a.groups = r.groups, a.top_groups = r.top_groups, a.renormalize = r.renormalize, a.scale = r.scale,
    a.layer = 1;
    a.expert = expert.data(), a.weight = weight.data();
    step.tokens = tokens;
    machine().run(table().route, a, step, tasks);
    Result out;
    for (int t = 0; t < tokens; ++t) {
      out.expert.emplace_back(&expert[static_cast<size_t>(t) * r.top_k],
                              &expert[static_cast<size_t>(t) * r.top_k] + r.top_k);
      out.weight.emplace_back(&weight[static_cast<size_t>(t) * r.top_k],
                              &weight[static_cast<size_t>(t) * r.top_k] + r.top_k);
    }
    EXPECT_EQ(expert[static_cast<size_t>(tokens) * r.top_k], -77);
    return out;
  }

  // The chosen set by biased scores, in double; apart: no rounding of a score could change it.
  static std::vector<int> choose(const Routing& r, const std::vector<float>& logits,
                                 const std::vector<float>& bias, bool* apart) {
    const int per_group = r.experts / r.groups;
    BoundedVec biased;
    for (int e = 0; e < r.experts; ++e) {
      const double s = reference::sigmoid(logits[e]), sum = s + bias[e];
      biased.push({sum, kElementary * s + kU * std::abs(sum)});
    }
    // equal inputs are one score; unequal ones must differ by more than rounding
    const auto separate = [&](const BoundedVec& score, const std::vector<int>& in, const auto& same) {
      for (size_t out = 0; out < score.size(); ++out)
        for (const int i : in)
          if (std::find(in.begin(), in.end(), static_cast<int>(out)) == in.end() &&
              !same(i, static_cast<int>(out)))
            *apart = *apart && score.value[i] - score.error[i] > score.value[out] + score.error[out];
    };
    if (r.top_groups < r.groups) {
      BoundedVec group;
      for (int g = 0; g < r.groups; ++g) {
        Vec best_two(biased.value.begin() + g * per_group, biased.value.begin() + (g + 1) * per_group);
        std::sort(best_two.rbegin(), best_two.rend());
        const double sum = per_group > 1 ? best_two[0] + best_two[1] : best_two[0];
        group.push({sum, 2 * kElementary + 4 * kU * std::abs(sum)});
      }
      const std::vector<int> kept = best(group.value, r.top_groups);
      separate(group, kept, [](int, int) { return false; });
      for (int e = 0; e < r.experts; ++e)
        if (std::find(kept.begin(), kept.end(), e / per_group) == kept.end()) biased.put(e, {-INFINITY, 0});
    }
    const std::vector<int> chosen = best(biased.value, r.top_k);
    separate(biased, chosen, [&](int a, int b) { return logits[a] == logits[b] && bias[a] == bias[b]; });
    return chosen;
  }
  void expect_routing(const Routing& r, const std::vector<std::vector<float>>& logits,
                      const std::vector<float>& bias) {
    SCOPED_TRACE(::testing::Message() << r);
    const Result got = run(r, logits, bias);
    EXPECT_TRUE(got == run(r, logits, bias, {}, 1)) << "the number of tasks changed something";
    for (size_t t = 0; t < logits.size(); ++t) {
      bool apart = true;
      const std::vector<int> chosen = choose(r, logits[t], bias, &apart);
      ASSERT_TRUE(apart) << "the case hangs on rounding, token " << t;
      ASSERT_EQ(got.expert[t], chosen) << "token " << t;
      double sum = 0;
      for (const int e : chosen) sum += reference::sigmoid(logits[t][e]);
      BoundedVec weight;
      for (const int e : chosen) {
        const double w = reference::sigmoid(logits[t][e]) * r.scale / (r.renormalize ? sum + 1e-20 : 1);
        weight.push({w, w * (2 * kElementary + (r.top_k + 4) * kU)});
      }
      EXPECT_CLOSE(Vec(got.weight[t].begin(), got.weight[t].end()), weight.value, weight.error)
          << "token " << t;
    }
  }
  // Logits whose order no rounding can change: distinct steps, shuffled.
  static std::vector<std::vector<float>> logits(Random& random, int tokens, int experts) {
    std::vector<std::vector<float>> rows;
    for (int t = 0; t < tokens; ++t) {
      rows.emplace_back();
      const std::vector<int> order = random.shuffled(experts);
      for (const int o : order)
        rows.back().push_back(-4 + 8.f * static_cast<float>(o) / static_cast<float>(experts));
    }
    return rows;
  }
};

TEST_P(Route, ChoosesByBiasWeighsWithout) {
  Random random(3);
  for (const bool renormalize : {false, true}) {
    for (const auto& [experts, top_k] : {std::pair{8, 2}, {16, 16}, {37, 5}, {288, 8}, {896, 16}}) {
      std::vector<float> bias(experts);
      for (int e = 0; e < experts; ++e) bias[e] = static_cast<float>(random.below(5)) * 0.0625f;
      // biases of equal score make near ties: keep the tokens that hang on none
      std::vector<std::vector<float>> rows;
      const Routing r{experts, top_k, 1, 1, renormalize};
      for (int tries = 0; rows.size() < 9 && tries < 500; ++tries) {
        std::vector<float> row = logits(random, 1, experts)[0];
        bool apart = true;
        choose(r, row, bias, &apart);
        if (apart) rows.push_back(row);
      }
      ASSERT_EQ(rows.size(), 9u);
      expect_routing(r, rows, bias);
    }
  }
}

TEST_P(Route, Groups) {
  Random random(4);
  for (const auto& [groups, kept] : {std::pair{4, 2}, {4, 1}, {8, 4}, {16, 4}, {1, 1}}) {
    std::vector<float> bias(32, 0.f);
    for (int e = 0; e < 32; ++e) bias[e] = static_cast<float>(random.below(64)) / 64;
    expect_routing({32, std::min(4, kept * 32 / groups), groups, kept}, logits(random, 20, 32), bias);
  }
  // one group holds the best expert, another the best two: the sum of two decides
  std::vector<float> row(16, -6);
  row[0] = 5, row[4] = 2, row[5] = 2.5f, row[8] = 1.9f, row[9] = 1.8f;
  expect_routing({16, 2, 4, 1}, {row}, std::vector<float>(16, 0));
}

// Logits near -18 under biases near 12, and biased scores all below -1.
TEST_P(Route, ExtremeLogitsAndBiases) {
  Random random(5);
  std::vector<std::vector<float>> low(6, std::vector<float>(16));
  for (auto& row : low)
    for (float& x : row) x = -18 + random.normal();
  std::vector<float> high(16), deep(16);
  const std::vector<int> order = random.shuffled(16);
  for (int e = 0; e < 16; ++e) {  // steps that grow, so that no two pairs have one sum
    const float step = 0.05f * std::exp2(0.3f * static_cast<float>(order[e]));
    high[e] = 12 + step, deep[e] = -3 - step;
  }
  for (const bool renormalize : {false, true}) {
    expect_routing({16, 4, 4, 2, renormalize}, low, high);
    expect_routing({16, 4, 1, 1, renormalize}, low, high);
    expect_routing({16, 4, 1, 1, renormalize}, low, deep);
    expect_routing({16, 4, 4, 2, renormalize}, low, deep);
  }
}

// Ties go to the lower expert, whatever the position of the better ones.
TEST_P(Route, Ties) {
  std::vector<float> equal(20, 0.5f), some = equal;
  some[13] = 2, some[19] = 3;
  expect_routing({20, 4}, {equal, some}, std::vector<float>(20, 0.25f));
  const Result got = run({20, 4}, {equal, some}, std::vector<float>(20, 0));
  EXPECT_EQ(got.expert[0], (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(got.expert[1], (std::vector<int>{0, 1, 13, 19}));
  EXPECT_EQ(run({16, 2, 4, 2}, {std::vector<float>(16, 1)}, std::vector<float>(16, 0)).expert[0],
            (std::vector<int>{0, 1}));
}

// Forced experts replace the choice, with the weights of their own scores; seen ones are written; NaN logits
// give ids that exist.
TEST_P(Route, ForcedSeenAndNaN) {
  Random random(6);
  const auto rows = logits(random, 3, 10);
  const std::vector<float> bias(16, 0);
  int32_t forced[] = {0, 9, 4, 5, 2, 3}, seen[6] = {};
  const int32_t* force_layers[] = {nullptr, forced};
  int32_t* see_layers[] = {nullptr, seen};
  StepHeader step;
  step.forced_experts = force_layers;
  const Result got = run({10, 2, 1, 1, false, 1}, rows, bias, step);
  for (int t = 0; t < 3; ++t)
    for (int j = 0; j < 2; ++j) {
      EXPECT_EQ(got.expert[t][j], forced[2 * t + j]);
      const double s = reference::sigmoid(rows[t][forced[2 * t + j]]);
      EXPECT_NEAR(got.weight[t][j], s, s * (kElementary + kU));
    }
  step.forced_experts = nullptr, step.seen_experts = see_layers;
  const Result own = run({10, 2}, rows, bias, step);
  for (int i = 0; i < 6; ++i) EXPECT_EQ(seen[i], own.expert[i / 2][i % 2]);
  const Result nan = run({10, 4}, {std::vector<float>(10, NAN)}, bias);
  for (const int e : nan.expert[0]) EXPECT_TRUE(0 <= e && e < 10);
}

// ---- expert products ----

struct World {
  World(const KernelTable& table, const MoeCase& c, uint64_t seed)
      : c(c),
        random(seed),
        up(random_weight(random, c.format, c.experts, 2 * c.intermediate, c.width)),
        down(random_weight(random, c.format, c.experts, c.width, c.intermediate)),
        x(table, c.tokens, round_up(c.width, kStep) + 32),
        expert(static_cast<size_t>(c.tokens) * c.top_k),
        active(c.experts + 1, -77),
        start(c.experts + 2, -77),
        slot_token(expert.size() + 1, -77),
        slot_of(expert.size() + 1, -77),
        progress(2 * c.experts + 2, -77),
        h(table, c.tokens * c.top_k, round_up(c.intermediate, kStep)),
        y(table, c.tokens * c.top_k, c.width + 5) {
    for (int t = 0; t < c.tokens; ++t) {
      x.fill(t, 0, random.normals(c.width).data(), c.width, round_up(c.width, kStep));
      std::set<int> chosen;
      if (c.favourite >= 0) chosen.insert(c.favourite);
      while (static_cast<int>(chosen.size()) < c.top_k) chosen.insert(random.below(c.experts));
      std::copy(chosen.begin(), chosen.end(), expert.begin() + static_cast<ptrdiff_t>(t) * c.top_k);
    }
  }
  void sort(const KernelTable& table, Machine& machine) {
    machine.run(table.expert_sort,
                {expert.data(), c.experts, c.top_k, active.data(), start.data(), slot_token.data(),
                 slot_of.data(), progress.data()},
                plain_step(c.tokens));
  }
  void run(const KernelTable& table, Machine& machine, int tasks, int threads) {
    sort(table, machine);
    h.poison(), y.poison();
    ExpertsArgs a{};
    a.x = x.data(), a.ld_x = x.ld(), a.up = up.packed, a.down = down.packed;
    a.up_codes = up.packed.code_bytes(), a.up_scales = up.packed.scale_bytes();
    a.down_codes = down.packed.code_bytes(), a.down_scales = down.packed.scale_bytes();
    a.active = active.data(), a.start = start.data(), a.slot_token = slot_token.data(),
    a.progress = progress.data();
    a.experts = c.experts, a.top_k = c.top_k, a.intermediate = c.intermediate, a.width = c.width,
    a.act = c.act;
    a.h = h.data(), a.ld_h = h.ld(), a.y = y.data(), a.ld_y = y.ld();
    machine.run(table.experts, a, plain_step(c.tokens), tasks, threads);
  }
  MoeCase c;
  Random random;
  TestWeight up, down;
  OpRows x;
  std::vector<int32_t> expert, active, start, slot_token, slot_of, progress;
  OpRows h;
  F32Rows y;
};

class Experts : public KernelTest {
 protected:
  // sum_k a_k w_k as an expert product may compute it
  Bounded product(const World& w, const TestWeight& weight, const OpRows& a, int row, int expert,
                  int column) const {
    const int k = weight.packed.k;
    double size = 0;
    for (int i = 0; i < k; ++i) size += std::abs(a.get(row, i) * weight.at(expert, column, i));
    Bounded x =
        dot([&](int i) { return a.get(row, i); }, [&](int i) { return weight.at(expert, column, i); }, k);
    x.error += (k / kScaleBlock + 2) * kU * size + kTiny;
    if (w.c.format == WeightFormat::f32 && narrow()) x.error += kBf16 * size;
    return x;
  }
};

TEST_P(Experts, SortIsAStableCount) {
  for (const MoeCase& c : cases::moe_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    World w(table(), c, 2);
    w.sort(table(), machine());
    int slot = 0, active = 0;
    for (int e = 0; e < c.experts; ++e) {
      EXPECT_EQ(w.start[e], slot);
      const int first = slot;
      for (size_t i = 0; i < w.expert.size(); ++i)
        if (w.expert[i] == e) {
          EXPECT_EQ(w.slot_of[i], slot);
          EXPECT_EQ(w.slot_token[slot], static_cast<int>(i) / c.top_k);
          ++slot;
        }
      if (slot == first) continue;
      EXPECT_EQ(w.active[++active], e);
    }
    EXPECT_EQ(w.active[0], active);
    EXPECT_EQ(w.start[c.experts], slot);
    EXPECT_EQ(w.start[c.experts + 1], -77);
    EXPECT_EQ(w.slot_token[w.expert.size()], -77);
  }
}

TEST_P(Experts, UpAndDown) {
  uint64_t seed = 30;
  for (const MoeCase& c : cases::moe_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    World w(table(), c, ++seed);
    w.run(table(), machine(), 0, 2);
    const OpRows h = w.h;
    const F32Rows y = w.y;
    for (const int tasks : {1, 3}) {
      w.run(table(), machine(), tasks, tasks == 1 ? 1 : 2);
      EXPECT_TRUE(h.same_bytes(w.h)) << "up, " << tasks << " tasks";
      EXPECT_TRUE(y.same_bytes(w.y)) << "down, " << tasks << " tasks";
    }
    EXPECT_EQ(w.progress.back(), -77);
    Vec actual_h, actual_y;
    BoundedVec expected_h, expected_y;
    for (size_t i = 0; i < w.expert.size(); ++i) {
      const int e = w.expert[i], slot = w.slot_of[i], token = static_cast<int>(i) / c.top_k;
      for (int j = 0; j < c.intermediate; ++j) {
        const int gate = j / kPanel * 2 * kPanel + j % kPanel;
        const Bounded g = product(w, w.up, w.x, token, e, gate),
                      u = product(w, w.up, w.x, token, e, gate + kPanel);
        expected_h.push(stored(reference::activate(c.act, g, u), narrow())),
            actual_h.push_back(h.get(slot, j));
      }
      for (int j = 0; j < c.width; ++j)
        expected_y.push(product(w, w.down, h, slot, e, j)), actual_y.push_back(y.get(slot, j));
      ASSERT_TRUE(y.untouched(slot, c.width));
    }
    EXPECT_CLOSE(actual_h, expected_h.value, expected_h.error) << "up";
    EXPECT_CLOSE(actual_y, expected_y.value, expected_y.error) << "down";
    EXPECT_TRUE(h.untouched(static_cast<int>(w.expert.size()), 0) &&
                y.untouched(static_cast<int>(w.expert.size()), 0));
  }
}

// A token's rows do not depend on who shares its experts.
TEST_P(Experts, AloneOrInCompany) {
  for (const WeightFormat format : cases::kFormats) {
    const MoeCase c{format, 70, 4, 2, 130, 64, {}, 1};
    World w(table(), c, 7);
    w.run(table(), machine(), 0, 2);
    for (const int t : {0, 17, 69}) {
      SCOPED_TRACE(::testing::Message() << c << " token " << t);
      MoeCase one = c;
      one.tokens = 1;
      World alone(table(), one, 7);  // the same seed: the same weights
      std::copy_n(w.expert.begin() + static_cast<ptrdiff_t>(t) * 2, 2, alone.expert.begin());
      for (int i = 0; i < round_up(c.width, kStep); ++i) alone.x.set(0, i, w.x.get(t, i));
      alone.run(table(), machine(), 1, 1);
      for (int j = 0; j < 2; ++j) {
        EXPECT_TRUE(alone.h.same_row(alone.slot_of[j], w.h, w.slot_of[2 * t + j], 0, c.intermediate));
        EXPECT_TRUE(alone.y.same_row(alone.slot_of[j], w.y, w.slot_of[2 * t + j], 0, c.width));
      }
    }
  }
}

WEFT_KERNEL_TESTS(Route);
WEFT_KERNEL_TESTS(Experts);

}  // namespace
}  // namespace weft::test
