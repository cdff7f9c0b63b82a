// Counting by likelihood against sorting.
#include "engine/census.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <vector>

namespace weft {
namespace {

std::vector<float> normal_row(size_t n, float scale, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal(0, scale);
  std::vector<float> row(n);
  for (float& x : row) x = normal(random);
  std::sort(row.begin(), row.end(), std::greater<>());
  return row;
}

class Censuses : public ::testing::TestWithParam<std::pair<float, double>> {
};  // scale of the row, temperature

TEST_P(Censuses, AgreeWithTheSortedRow) {
  const auto [scale, temperature] = GetParam();
  const std::vector<float> row = normal_row(10007, scale, 3);
  const Likelihood likelihood(row[0], temperature);
  std::vector<int32_t> bucket(row.size());
  likelihood.buckets(row.data(), static_cast<int>(row.size()), bucket.data());
  EXPECT_TRUE(std::is_sorted(bucket.begin(), bucket.end()));
  std::vector<double> mass(Likelihood::kBuckets, 0);
  std::vector<int> count(Likelihood::kBuckets, 0);
  for (size_t i = 0; i < row.size(); ++i) {
    const double weight = likelihood.weight(row[i]);
    EXPECT_LE(weight, Likelihood::most()[bucket[i]]);
    if (bucket[i] < Likelihood::kLast) {
      EXPECT_GE(weight, 0.999 * Likelihood::most()[bucket[i] + 1]);
      mass[bucket[i]] += weight;
      ++count[bucket[i]];
    }
  }
  Census whole, parts;
  whole.clear();
  whole.add(likelihood, row, true);
  parts.clear();
  for (size_t i = 0; i < row.size(); i += 1001) {
    Census part;
    part.clear();
    part.add(likelihood, std::span(row).subspan(i, std::min<size_t>(1001, row.size() - i)), true);
    parts.add(part);
  }
  // Each weight to 6e-14, the series' first missing term; sums of 10^4 add about as much.
  const double slack = 3e-13;
  for (int b = 0; b < Likelihood::kLast; ++b) {
    ASSERT_EQ(whole.count[b], count[b]) << b;
    ASSERT_NEAR(whole.mass[b], mass[b], slack * mass[b]) << b;
    ASSERT_EQ(parts.count[b], count[b]) << b;
    ASSERT_NEAR(parts.mass[b], mass[b], slack * mass[b]) << b;
  }
  for (const size_t k : {1, 2, 50, 3000, 10007}) EXPECT_EQ(whole.reaches_count(k), bucket[k - 1]) << k;
  for (const double p : {0.01, 0.5, 0.9, 0.99, 1.0}) {
    double sum = 0;
    size_t last = 0;
    for (; last + 1 < row.size() && sum + likelihood.weight(row[last]) < p * whole.total() * (1 - 1e-12);
         ++last)
      sum += likelihood.weight(row[last]);
    const BucketRange range = whole.reaches_mass(p * whole.total());
    EXPECT_LE(range.first, bucket[last]) << p;
    EXPECT_GE(range.last, bucket[last]) << p;
    if (p <= 0.99) {
      EXPECT_LE(range.last - range.first, 1) << p;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(Rows, Censuses,
                         ::testing::Values(std::pair{2.5f, 1.0}, std::pair{2.5f, 0.3}, std::pair{100.f, 1.0},
                                           std::pair{1e-3f, 1.0}, std::pair{3.f, 0.01}, std::pair{0.f, 2.0}));

// exp(0) is 1 and not nearly: k equal tokens reach p = 1/k of the mass with the first.
TEST(Census, WeighsTheLikeliestExactly) {
  const std::vector<float> row(4096, 1.7f);
  Census census;
  census.clear();
  census.add(Likelihood(1.7f, 0.6), row, true);
  EXPECT_EQ(census.mass[0], 4096);
}

TEST(Census, PutsWhatIsImpossibleLast) {
  const float row[] = {2, -std::numeric_limits<float>::infinity(), -3e38f, 2};
  for (const double temperature : {1e-5, 1.0, 1e30, 1e300}) {
    int32_t bucket[4];
    Likelihood(2, temperature).buckets(row, 4, bucket);
    EXPECT_EQ(bucket[0], 0);
    EXPECT_EQ(bucket[1], Likelihood::kLast) << temperature;
    EXPECT_EQ(bucket[3], 0);
  }
}

}  // namespace
}  // namespace weft
