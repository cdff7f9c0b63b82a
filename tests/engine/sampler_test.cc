#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
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

// Tokens over `n` positions of a request that always sees the same row.
std::vector<int32_t> draws(const SamplingParams& params, const std::vector<float>& row, int n) {
  Sampler sampler(static_cast<int>(row.size()));
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
  Sampler sampler(4);
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
  Sampler sampler(100);
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
  return Sampler(static_cast<int>(row.size())).sample(params, row, {tokens, prompt});
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
  Sampler sampler(3);
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

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

// Wherever it lies: the first and last of a register, of a block and of the row, alone and before an equal one.
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
  Sampler sampler(8, 5);
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
