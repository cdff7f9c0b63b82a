#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "base/check.h"

namespace weft {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> random_row(int vocab, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> row(vocab);
  for (float& x : row) x = std::round(normal(random) * 8) / 8;  // coarse, so that there are ties
  return row;
}

std::vector<int32_t> history_of(size_t n) {
  return std::vector<int32_t>(n, 0);
}

// A sampler for one row at a time. Error: the row's.
class OneRow {
 public:
  explicit OneRow(int vocab, int known = INT32_MAX) : sampler_(team_, vocab, known) {}
  Sample sample(const SamplingParams& params, std::span<const float> logits, const History& history) {
    SampleRow row{&params, logits, history};
    sampler_.sample({&row, 1});
    if (!row.error.empty()) fail("{}", row.error);
    return row.sample;
  }

 private:
  Team team_{1};
  Sampler sampler_;
};

// Tokens over `n` positions of a request that always sees the same row.
std::vector<int32_t> draws(const SamplingParams& params, const std::vector<float>& row, int n) {
  OneRow sampler(static_cast<int>(row.size()));
  const auto tokens = history_of(n);
  std::vector<int32_t> result;
  for (int i = 0; i < n; ++i)
    result.push_back(sampler.sample(params, row, {std::span(tokens).first(i), static_cast<size_t>(i)}).token);
  return result;
}

// The documented distribution in its plainest form: sort everything, cut, normalise.
std::vector<double> reference(const SamplingParams& params, const std::vector<float>& row) {
  const int vocab = static_cast<int>(row.size());
  std::vector<int> order(vocab);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return row[a] > row[b]; });
  std::vector<double> p(vocab, 0);
  const auto normalise = [&] {
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& x : p) x /= sum;
  };
  const int k = params.top_k > 0 ? static_cast<int>(std::min<int64_t>(params.top_k, vocab)) : vocab;
  for (int i = 0; i < k; ++i) p[order[i]] = std::exp((row[order[i]] - row[order[0]]) / params.temperature);
  normalise();
  double sum = 0;
  for (int i = 0; i < vocab; ++i) {
    if (params.top_p < 1 && sum >= params.top_p - 1e-12 && i > 0) p[order[i]] = 0;
    sum += p[order[i]];
  }
  for (int i = 1; i < vocab; ++i)
    if (p[order[i]] < params.min_p * p[order[0]]) p[order[i]] = 0;
  normalise();
  return p;
}

// Chi-square of n draws against p; impossible tokens must not occur. 5 sigma above the mean of k - 1.
void expect_distribution(const std::vector<int32_t>& tokens, const std::vector<double>& p) {
  std::vector<int> counts(p.size(), 0);
  for (int32_t token : tokens) ++counts[token];
  double chi = 0, rest = 0;
  int rest_count = 0, cells = 0;
  for (size_t i = 0; i < p.size(); ++i) {
    if (p[i] == 0) {
      ASSERT_EQ(counts[i], 0) << "token " << i << " is filtered out";
      continue;
    }
    const double expected = p[i] * tokens.size();
    if (expected < 5) {  // too rare for a cell of its own
      rest += expected;
      rest_count += counts[i];
      continue;
    }
    chi += (counts[i] - expected) * (counts[i] - expected) / expected;
    ++cells;
  }
  if (rest >= 5) {
    chi += (rest_count - rest) * (rest_count - rest) / rest;
    ++cells;
  }
  EXPECT_LT(chi, cells - 1 + 5 * std::sqrt(2.0 * cells)) << cells << " cells";
}

TEST(Sampler, FollowsTheDistribution) {
  std::vector<SamplingParams> cases(8);
  cases[1].temperature = 0.5;
  cases[2].temperature = 3;
  cases[3].top_k = 5;
  cases[4].top_p = 0.8;
  cases[5].min_p = 0.1;
  cases[6] = {.temperature = 2, .top_k = 30, .top_p = 0.9, .min_p = 0.02};
  cases[7].logit_bias = {};
  for (size_t i = 0; i < cases.size(); ++i) {
    SCOPED_TRACE("case " + std::to_string(i));
    const auto row = random_row(40, static_cast<uint32_t>(i));
    cases[i].seed = 1000 + i;
    expect_distribution(draws(cases[i], row, 40000), reference(cases[i], row));
  }
}

// Draws at one position over seeds, and pairs of neighbouring positions, are independent too.
TEST(Sampler, SeedsAndPositionsAreIndependent) {
  const std::vector<float> row(4, 0.f);
  OneRow sampler(4);
  const auto tokens = history_of(2);
  std::vector<int32_t> first, pairs;
  for (uint64_t seed = 0; seed < 20000; ++seed) {
    const SamplingParams params{.seed = seed};
    const int32_t a = sampler.sample(params, row, {std::span(tokens).first(1), 1}).token;
    const int32_t b = sampler.sample(params, row, {std::span(tokens).first(2), 2}).token;
    first.push_back(a);
    pairs.push_back(4 * a + b);
  }
  expect_distribution(first, std::vector<double>(4, 0.25));
  expect_distribution(pairs, std::vector<double>(16, 1.0 / 16));
}

// The filters keep exactly the reference's set: with many draws at a high temperature every kept token
// occurs.
TEST(Sampler, FiltersKeepExactlyTheirSet) {
  std::mt19937 random(5);
  for (int round = 0; round < 60; ++round) {
    const int vocab = 3 + random() % 10;
    const auto row = random_row(vocab, random());
    SamplingParams params{.temperature = 8, .seed = random()};
    switch (round % 3) {
      case 0:
        params.top_k = 2 + random() % vocab;
        break;
      case 1:
        params.top_p = 0.05 + 0.9 * (random() % 1000) / 1000;
        break;
      case 2:
        params.min_p = 0.01 + 0.9 * (random() % 1000) / 1000;
        break;
    }
    const auto p = reference(params, row);
    const auto tokens = draws(params, row, 4000);
    const std::set<int32_t> seen(tokens.begin(), tokens.end());
    for (int i = 0; i < vocab; ++i)
      EXPECT_EQ(seen.contains(i), p[i] > 0) << "round " << round << " token " << i << " p " << p[i];
  }
}

// Longer than the first sorted piece of top_p.
TEST(Sampler, TopPOverALargeFlatVocabulary) {
  const int vocab = 1200;
  std::vector<float> row(vocab);
  for (int i = 0; i < vocab; ++i) row[i] = static_cast<float>((i * 2654435761u) % 1000) * 1e-3f;
  for (double p : {0.01, 0.4, 0.97}) {
    const SamplingParams params{.top_p = p, .seed = 3};
    expect_distribution(draws(params, row, 20000), reference(params, row));
  }
}

TEST(Sampler, WhatMeansGreedyIsGreedy) {
  const auto row = random_row(50, 21);
  const auto best = static_cast<int32_t>(std::ranges::max_element(row) - row.begin());  // the first of equals
  ASSERT_GT(std::ranges::count(row, row[best]), 0);
  std::vector<float> tied = row;
  tied[49] = tied[best];  // a later equal must never win
  const SamplingParams cases[] = {{.temperature = 0}, {.temperature = 1e-9}, {.temperature = 1e-45},
                                  {.top_k = 1},       {.top_p = 0},          {.top_p = 1e-12},
                                  {.min_p = 1}};
  for (SamplingParams params : cases) {
    params.seed = 7;
    params.validate(50);
    for (const auto& r : {row, tied})
      EXPECT_EQ(draws(params, r, 100), std::vector<int32_t>(100, best))
          << params.temperature << ' ' << params.top_k << ' ' << params.top_p << ' ' << params.min_p;
  }
}

TEST(Sampler, WhatMeansAllTokensIsAllTokens) {
  const auto row = random_row(50, 22);
  std::vector<std::vector<int32_t>> results;
  for (int64_t k : {int64_t{0}, int64_t{-1}, int64_t{50}, int64_t{1000000000}}) {
    const SamplingParams params{.top_k = k, .seed = 7};
    params.validate(50);
    results.push_back(draws(params, row, 300));
    EXPECT_EQ(results.back(), results.front()) << k;
  }
  EXPECT_GT(std::set(results[0].begin(), results[0].end()).size(), 3u);
}

TEST(Sampler, TiesAtTheEdgeOfTopKGoToTheLowerIds) {
  const std::vector<float> row = {1, 2, 2, 2, 2, 0};
  const auto tokens = draws({.top_k = 2, .seed = 1}, row, 500);
  EXPECT_EQ(std::set(tokens.begin(), tokens.end()), (std::set<int32_t>{1, 2}));
}

TEST(Sampler, IsAFunctionOfSeedAndPosition) {
  const auto row = random_row(100, 9), other = random_row(100, 10);
  const SamplingParams params{.seed = 42};
  const auto expected = draws(params, row, 200);
  EXPECT_EQ(draws(params, row, 200), expected);
  EXPECT_NE(draws({.seed = 43}, row, 200), expected);
  // Another request in between, a retry, another order of positions: nothing changes.
  OneRow sampler(100);
  const auto tokens = history_of(200);
  for (int i = 199; i >= 0; --i) {
    sampler.sample({.top_k = 3, .repetition_penalty = 2, .seed = 5}, other, {tokens, 1});
    for (int retry = 0; retry < 2; ++retry)
      ASSERT_EQ(sampler.sample(params, row, {std::span(tokens).first(i), 0}).token, expected[i]);
  }
}

// Values pinned: a seed promises the same text after an upgrade.
TEST(Sampler, SeedsAreStable) {
  std::vector<float> row(1000, 0.f);
  EXPECT_EQ(draws({.seed = 7}, row, 6), (std::vector<int32_t>{140, 761, 476, 569, 247, 426}));
}

Sample greedy(SamplingParams params, const std::vector<float>& row, const std::vector<int32_t>& tokens,
              size_t prompt) {
  params.temperature = 0;
  return OneRow(static_cast<int>(row.size())).sample(params, row, {tokens, prompt});
}

// Each case sits on both sides of the change of winner, so the strength of the penalty is tested, not just
// its sign.
TEST(Sampler, PenaltiesHaveTheirStrength) {
  const std::vector<int32_t> tokens = {0, 0, 1, 1, 1, 3};  // prompt 0 0 1, output 1 1 3
  const auto winner = [&](SamplingParams params, float a, float b, float c) {
    return greedy(params, {a, b, c, -50}, tokens, 3).token;
  };
  // Repetition: prompt and output, once per token however often it occurs.
  EXPECT_EQ(winner({.repetition_penalty = 2}, 4.1f, -9, 2), 0);
  EXPECT_EQ(winner({.repetition_penalty = 2}, 3.9f, -9, 2), 2);
  EXPECT_EQ(winner({.repetition_penalty = 2}, -0.9f, -9, -2), 0);
  EXPECT_EQ(winner({.repetition_penalty = 2}, -1.1f, -9, -2), 2);
  EXPECT_EQ(winner({.repetition_penalty = 0.5}, 1.1f, -9, 2), 0);
  // Presence and frequency: the output alone, where token 1 occurs twice and token 0 not at all.
  EXPECT_EQ(winner({.presence_penalty = 1.5}, 0, 2.1f, 0.5f), 1);
  EXPECT_EQ(winner({.presence_penalty = 1.5}, 0, 1.9f, 0.5f), 2);
  EXPECT_EQ(winner({.frequency_penalty = 1.5}, 0, 3.6f, 0.5f), 1);
  EXPECT_EQ(winner({.frequency_penalty = 1.5}, 0, 3.4f, 0.5f), 2);
  EXPECT_EQ(winner({.presence_penalty = 2, .frequency_penalty = 2}, 1, -9, 0.9f), 0);
  EXPECT_EQ(winner({.frequency_penalty = -2}, 3.9f, 0, 3), 1);
  // Bias, before the penalties.
  EXPECT_EQ(winner({.logit_bias = {{2, 3.1}}}, 3, 0, 0), 2);
  EXPECT_EQ(winner({.logit_bias = {{2, 2.9}}}, 3, 0, 0), 0);
  EXPECT_EQ(winner({.repetition_penalty = 2, .logit_bias = {{0, 2}}}, 2.1f, -9, 2), 0);
  EXPECT_EQ(winner({.logit_bias = {{0, -100}, {3, 100}}}, 3, 0, 0), 3);
}

TEST(Sampler, ForgetsAHistoryWithItsCall) {
  const std::vector<float> row = {1, 1.2f, 0};
  OneRow sampler(3);
  const std::vector<int32_t> tokens = {1, 1};
  const SamplingParams params{.temperature = 0, .repetition_penalty = 3, .frequency_penalty = 1};
  EXPECT_EQ(sampler.sample(params, row, {tokens, 0}).token, 0);
  EXPECT_EQ(sampler.sample(params, row, {{}, 0}).token, 1);
  EXPECT_EQ(sampler.sample(params, row, {tokens, 0}).token, 0);
  for (int i = 0; i < 2; ++i)
    EXPECT_EQ(sampler.sample({.temperature = 0, .repetition_penalty = 3}, row, {tokens, 0}).token, 0);
}

TEST(Sampler, LogprobsAreTheModelsOwn) {
  const std::vector<float> row = {1, 3, 2, 3};
  const double z = std::log(std::exp(1.0) + 2 * std::exp(3.0) + std::exp(2.0));
  const auto sample = greedy({.logit_bias = {{0, 50}}, .logprobs = 3}, row, {}, 0);
  EXPECT_EQ(sample.token, 0);
  EXPECT_NEAR(sample.logprob, 1 - z, 1e-6);
  ASSERT_EQ(sample.alternatives.size(), 3u);
  EXPECT_EQ(sample.alternatives[0].token, 1);
  EXPECT_EQ(sample.alternatives[1].token, 3);
  EXPECT_EQ(sample.alternatives[2].token, 2);
  EXPECT_NEAR(sample.alternatives[2].logprob, 2 - z, 1e-6);
  EXPECT_TRUE(greedy({}, row, {}, 0).alternatives.empty());
  EXPECT_EQ(greedy({.logprobs = 4}, row, {}, 0).alternatives.size(), 4u);
}

TEST(Sampler, MaskedTokensNeverComeOut) {
  std::vector<float> row(20, -kInf);
  row[7] = -1e30f;
  EXPECT_EQ(draws({.seed = 1}, row, 50), std::vector<int32_t>(50, 7));
  EXPECT_EQ(draws({.temperature = 1e30, .seed = 1}, row, 50), std::vector<int32_t>(50, 7));
  row[9] = -1e30f;
  const auto tokens = draws({.seed = 1}, row, 200);
  EXPECT_EQ(std::set(tokens.begin(), tokens.end()), (std::set<int32_t>{7, 9}));
  EXPECT_EQ(draws({}, {0.5f}, 3), std::vector<int32_t>(3, 0));  // a vocabulary of one
}

// They count as zero, the lowest id of them wins, and it is found.
TEST(Sampler, SubnormalsAreZeros) {
  std::vector<float> row(9000, -1);
  row[8999] = 1e-40f;
  row[8500] = 1e-41f;
  row[8600] = 0;
  EXPECT_EQ(draws({.temperature = 0}, row, 1).front(), 8500);
  for (const int32_t token : draws({.top_p = 1e-4, .seed = 5}, row, 20)) EXPECT_EQ(token, 8500);
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Wherever it lies: the first and last of a register, of a block and of the row, alone and before an equal
// one.
TEST(Sampler, FindsTheLargestAndTheUnusableAnywhere) {
  const SamplingParams greedy{.temperature = 0};
  const auto row = random_row(10007, 3);
  for (int at : {0, 1, 15, 16, 4095, 4096, 4097, 8191, 8192, 9999, 10000, 10006}) {
    auto peak = row;
    peak[at] = 100;
    EXPECT_EQ(draws(greedy, peak, 1).front(), at);
    for (int later : {at + 1, at + 15, 10006})
      if (later > at && later <= 10006) peak[later] = 100;
    EXPECT_EQ(draws(greedy, peak, 1).front(), at);
    for (float bad : {kNan, kInf}) {
      auto broken = row;
      broken[at] = bad;
      EXPECT_EQ(error_of([&] { draws(greedy, broken, 1); }),
                fmt::format("the logit of token {} is {}", at, bad == kInf ? "+inf" : "NaN"));
    }
  }
}

TEST(Sampler, RefusesRowsThatAreNoDistribution) {
  for (double temperature : {0.0, 1.0}) {
    const SamplingParams params{.temperature = temperature};
    EXPECT_EQ(error_of([&] { draws(params, {1, kNan, 2}, 1); }), "the logit of token 1 is NaN");
    EXPECT_EQ(error_of([&] { draws(params, {kNan, 1, 2}, 1); }), "the logit of token 0 is NaN");
    EXPECT_EQ(error_of([&] { draws(params, {1, 2, kInf}, 1); }), "the logit of token 2 is +inf");
    EXPECT_EQ(error_of([&] {
                draws(params, {-kInf, -kInf}, 1);
              }),
              "all 2 logits are -inf: no token is possible");
  }
}

// sampler.h word for word: adjust, sort everything, cut, race.
Sample plain(const SampleRow& in, size_t known) {
  const SamplingParams& params = *in.params;
  std::vector<float> row(in.logits.begin(), in.logits.end());
  for (const auto& [token, bias] : params.logit_bias) row[token] += static_cast<float>(bias);
  const std::set<int32_t> seen(in.history.tokens.begin(), in.history.tokens.end());
  for (const int32_t token : seen)
    row[token] *=
        static_cast<float>(row[token] > 0 ? 1 / params.repetition_penalty : params.repetition_penalty);
  std::map<int32_t, int> out;
  for (const int32_t token : in.history.tokens.subspan(in.history.prompt)) ++out[token];
  for (const auto& [token, times] : out)
    row[token] -= static_cast<float>(params.presence_penalty + params.frequency_penalty * times);

  const auto sorted = [&](std::span<const float> x) {
    std::vector<int32_t> order(known);
    std::iota(order.begin(), order.end(), 0);
    std::erase_if(order, [&](int32_t t) { return x[t] == -kInf; });
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return x[a] > x[b]; });
    return order;
  };
  std::vector<int32_t> order = sorted(row);
  Sample result;
  result.token = order[0];
  if (!params.greedy()) {
    if (params.top_k > 0) order.resize(std::min(order.size(), static_cast<size_t>(params.top_k)));
    std::vector<double> weight;
    for (const int32_t t : order)
      weight.push_back(std::exp((static_cast<double>(row[t]) - row[order[0]]) / params.temperature));
    const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
    size_t kept = 0;
    for (double sum = 0; kept < order.size() && (params.top_p == 1 || sum < params.top_p * total);)
      sum += weight[kept++];
    const auto scramble = [](uint64_t x) {
      x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
      x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
      return x ^ (x >> 31);
    };
    constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
    const uint64_t key = scramble(scramble(params.seed + kGolden) + kGolden * (in.history.tokens.size() + 1));
    double best = std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < kept; ++i) {
      if (weight[i] == 0 || weight[i] < params.min_p) continue;
      const double u = (static_cast<double>(scramble(key + kGolden * (order[i] + 1)) >> 12) + 0.5) * 0x1p-52;
      const double finish = -std::log1p(-u) / weight[i];
      if (finish < best || (finish == best && order[i] < result.token))
        best = finish, result.token = order[i];
    }
  }
  if (params.logprobs >= 0) {
    std::vector<int32_t> own = sorted(in.logits);
    double sum = 0;
    for (const int32_t t : own) sum += std::exp(static_cast<double>(in.logits[t]) - in.logits[own[0]]);
    const double normalizer = in.logits[own[0]] + std::log(sum);
    result.logprob = static_cast<float>(in.logits[result.token] - normalizer);
    own.resize(std::min(own.size(), static_cast<size_t>(params.logprobs)));
    for (const int32_t t : own)
      result.alternatives.push_back({t, static_cast<float>(in.logits[t] - normalizer)});
  }
  return result;
}

// Rows of every shape: `kind` chooses among ties, none, masks, one value, and spans from less than a bucket
// to far more than all of them.
std::vector<float> shaped_row(int vocab, int kind, std::mt19937& random) {
  const float scale[] = {3, 3, 3, 0, 1e-3f, 100, 2.5f, 20};
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> row(vocab);
  for (float& x : row) {
    x = normal(random) * scale[kind];
    if (kind == 0) x = std::round(x * 8) / 8;
    if (kind == 2 && random() % 3) x = -kInf;
  }
  if (kind == 6)
    for (int i = 0; i < 20; ++i) row[random() % vocab] += 12;
  row[random() % vocab] = scale[kind];  // not everything is masked
  return row;
}

// In batches of all kinds on teams of all sizes, every row gets what the plain form gives it.
TEST(Sampler, EqualsThePlainForm) {
  std::mt19937 random(11);
  const auto one_of = [&]<class T>(std::initializer_list<T> list) {
    return list.begin()[random() % list.size()];
  };
  int differ_from_best = 0;
  for (const auto& [vocab, known, rounds] : std::vector<std::array<int, 3>>{{1, 1, 4},
                                                                            {2, 2, 8},
                                                                            {7, 6, 40},
                                                                            {300, 300, 60},
                                                                            {8192, 8191, 12},
                                                                            {8193, 8193, 12},
                                                                            {20000, 19990, 10},
                                                                            {163840, 163584, 3}}) {
    for (int round = 0; round < rounds; ++round) {
      Team team(1 + round % 4);
      Sampler sampler(team, vocab, known);
      constexpr int kRows = 8;
      std::vector<std::vector<float>> logits;
      std::vector<SamplingParams> params(kRows);
      std::vector<std::vector<int32_t>> tokens(kRows);
      std::vector<SampleRow> rows;
      for (int i = 0; i < kRows; ++i) {
        logits.push_back(shaped_row(vocab, i, random));
        logits.back()[0] = std::max(logits.back()[0], -5.f);  // a known one that is possible
        SamplingParams& p = params[i];
        p.temperature = one_of({0.0, 0.02, 0.3, 1.0, 1.0, 1.7, 60.0});
        p.top_k = one_of({0, 0, 0, 2, 40, 300, vocab / 2, vocab});
        p.top_p = one_of({1.0, 1.0, 0.1, 0.5, 0.95, 0.9, 0.999, 0.999999999});
        p.min_p = one_of({0.0, 0.0, 0.01, 0.2, 1e-30});
        p.seed = random();
        p.logprobs = std::min(vocab, one_of({-1, 0, 1, 5, 200}));
        for (int n = random() % 60; n > 0; --n) tokens[i].push_back(random() % vocab);
        if (random() % 2) {
          p.repetition_penalty = one_of({1.0, 1.3, 0.8});
          p.presence_penalty = one_of({0.0, 0.5});
          p.frequency_penalty = one_of({0.0, 0.7, -0.3});
          p.logit_bias[random() % vocab] = one_of({-100.0, 3.0, 8.0});
        }
      }
      for (int i = 0; i < kRows; ++i)
        rows.push_back({&params[i], logits[i], {tokens[i], tokens[i].size() / 2}});
      sampler.sample(rows);
      for (int i = 0; i < kRows; ++i) {
        const SamplingParams& p = params[i];
        SCOPED_TRACE(fmt::format("vocabulary {} round {} row {}: T {} top_k {} top_p {} min_p {} logprobs {}",
                                 vocab, round, i, p.temperature, p.top_k, p.top_p, p.min_p, p.logprobs));
        const Sample want = plain(rows[i], known);
        const Sample& got = rows[i].sample;
        ASSERT_EQ(rows[i].error, "");
        ASSERT_EQ(got.token, want.token);
        ASSERT_FLOAT_EQ(got.logprob, want.logprob);
        ASSERT_EQ(got.alternatives.size(), want.alternatives.size());
        for (size_t j = 0; j < want.alternatives.size(); ++j) {
          ASSERT_EQ(got.alternatives[j].token, want.alternatives[j].token) << "alternative " << j;
          ASSERT_FLOAT_EQ(got.alternatives[j].logprob, want.alternatives[j].logprob);
        }
        SamplingParams likeliest = p;
        likeliest.temperature = 0;
        SampleRow top = rows[i];
        top.params = &likeliest;
        differ_from_best += plain(top, known).token != got.token;
      }
    }
  }
  EXPECT_GT(differ_from_best, 300);  // the draws are no formality
}

// What is kept, and not only what happens to win, is right: at each seed another token of the set comes.
TEST(Sampler, CutsALargeVocabularyExactly) {
  std::mt19937 random(12);
  Team team(2);
  const int vocab = 30000;
  Sampler sampler(team, vocab);
  for (int kind = 0; kind < 8; ++kind) {
    const std::vector<float> row = shaped_row(vocab, kind, random);
    for (const SamplingParams& base :
         {SamplingParams{.top_p = 0.9}, SamplingParams{.temperature = 0.7, .top_k = 50},
          SamplingParams{.temperature = 2, .top_k = 1000, .top_p = 0.5}}) {
      std::vector<SamplingParams> params(200, base);
      std::vector<SampleRow> rows;
      for (SamplingParams& p : params) {
        p.seed = random();
        rows.push_back({&p, row, {}});
      }
      sampler.sample(rows);
      for (int i = 0; i < 200; i += kind == 0 ? 1 : 10)
        ASSERT_EQ(rows[i].sample.token, plain(rows[i], vocab).token);
    }
  }
}

TEST(Sampler, ABrokenRowBreaksNoOther) {
  Team team(3);
  Sampler sampler(team, 20000);
  std::vector<std::vector<float>> logits;
  for (int i = 0; i < 5; ++i) logits.push_back(random_row(20000, i));
  logits[1][15000] = kNan;
  std::fill(logits[3].begin(), logits[3].end(), -kInf);
  const SamplingParams params{.top_p = 0.9, .seed = 4, .logprobs = 2};
  std::vector<SampleRow> rows;
  for (const auto& row : logits) rows.push_back({&params, row, {}});
  sampler.sample(rows);
  EXPECT_EQ(rows[1].error, "the logit of token 15000 is NaN");
  EXPECT_EQ(rows[3].error, "all 20000 logits are -inf: no token is possible");
  for (const int i : {0, 2, 4}) {
    EXPECT_EQ(rows[i].error, "");
    EXPECT_EQ(rows[i].sample.token, plain(rows[i], 20000).token);
  }
  sampler.sample({});  // a step without logits
}

TEST(SamplingParams, RefuseByName) {
  constexpr double nan = std::numeric_limits<double>::quiet_NaN(),
                   inf = std::numeric_limits<double>::infinity();
  const std::pair<SamplingParams, const char*> cases[] = {
      {{.temperature = -1}, "temperature"},
      {{.temperature = nan}, "temperature"},
      {{.temperature = inf}, "temperature"},
      {{.top_k = -2}, "top_k"},
      {{.top_p = 1.5}, "top_p"},
      {{.top_p = -0.1}, "top_p"},
      {{.top_p = nan}, "top_p"},
      {{.min_p = 1.01}, "min_p"},
      {{.repetition_penalty = 0}, "repetition_penalty"},
      {{.repetition_penalty = -1}, "repetition_penalty"},
      {{.presence_penalty = 1e9}, "presence_penalty"},
      {{.frequency_penalty = -2.1}, "frequency_penalty"},
      {{.logit_bias = {{50, 1}}}, "logit_bias"},
      {{.logit_bias = {{-1, 1}}}, "logit_bias"},
      {{.logit_bias = {{3, 1e9}}}, "logit_bias"},
      {{.logit_bias = {{3, nan}}}, "logit_bias"},
      {{.logprobs = 51}, "logprobs"},
      {{.logprobs = -2}, "logprobs"},
  };
  for (const auto& [params, field] : cases) {
    try {
      params.validate(50);
      ADD_FAILURE() << field << " was taken";
    } catch (const UsageError& error) {
      EXPECT_TRUE(std::string(error.what()).starts_with(field)) << error.what();
    }
  }
  // The nearest neighbours that are fine.
  const SamplingParams good[] = {{},
                                 {.temperature = 1e300},
                                 {.top_k = -1},
                                 {.top_p = 1},
                                 {.min_p = 1},
                                 {.repetition_penalty = 0.01},
                                 {.presence_penalty = -2, .frequency_penalty = 2},
                                 {.logit_bias = {{0, -100}, {49, 100}}},
                                 {.logprobs = 50}};
  for (const SamplingParams& params : good) EXPECT_NO_THROW(params.validate(50));
}

// Rows that pad the vocabulary are the likeliest here, and never come.
TEST(Sampler, LeavesOutWhatNoTokenizerKnows) {
  const std::vector<float> row = {0, 1, 0.5f, 2, 1, 9, 3, 7};
  const std::vector<int32_t> history = {7, 5, 1};
  OneRow sampler(8, 5);
  SamplingParams params;
  params.temperature = 0;
  EXPECT_EQ(sampler.sample(params, row, {history, 2}).token, 3);
  params.temperature = 2;
  params.repetition_penalty = 1.5;
  params.logit_bias = {{6, 50.0}};
  params.logprobs = 8;
  for (uint64_t seed = 0; seed < 200; ++seed) {
    params.seed = seed;
    const Sample sample = sampler.sample(params, row, {history, 2});
    EXPECT_LT(sample.token, 5);
    double sum = 0;
    ASSERT_EQ(sample.alternatives.size(), 5u);
    for (const TokenLogprob& t : sample.alternatives) sum += std::exp(t.logprob);
    EXPECT_NEAR(sum, 1, 1e-5);
  }
}

}  // namespace
}  // namespace weft
