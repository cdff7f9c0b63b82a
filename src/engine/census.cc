#include "engine/census.h"

#include <algorithm>

namespace weft {
namespace {

constexpr int kBuckets = Likelihood::kBuckets, kLast = Likelihood::kLast;
constexpr int kDegree = 6;  // (ln2 / 16)^7 / 7! is 6e-14

struct Tables {
  std::array<double, kBuckets> power;  // 2^(-b / 16)
  std::array<double, kBuckets> most;
  std::array<double, kDegree + 1> series;  // of 2^(-t / 16), t from 0 to 1
  Tables() {
    for (int b = 0; b < kBuckets; ++b) power[b] = std::exp2(-static_cast<double>(b) / Likelihood::kPerOctave);
    for (int b = 0; b < kBuckets; ++b) most[b] = 1.0001 * power[b];
    series[0] = 1;
    for (int i = 1; i <= kDegree; ++i)
      series[i] = series[i - 1] * -(std::numbers::ln2 / Likelihood::kPerOctave) / i;
  }
};
const Tables kTables;

}  // namespace

const double* Likelihood::most() {
  return kTables.most.data();
}

void Census::clear() {
  count.fill(0);
  mass.fill(0);
}

// The bucket is most of the exponential already: its table entry and a short series give the weight. The
// series is apart from the counting, so that the compiler uses registers for it; std::exp takes twice the
// time.
void Census::add(const Likelihood& likelihood, std::span<const float> logits, bool masses) {
  constexpr int kBlock = 64;
  const double largest = likelihood.largest_, scale = likelihood.per_logit_;
  const std::array<double, kDegree + 1> series = kTables.series;
  int32_t bucket[kBlock];
  double within[kBlock];
  for (size_t i = 0; i < logits.size(); i += kBlock) {
    const float* x = logits.data() + i;
    const int n = static_cast<int>(std::min<size_t>(kBlock, logits.size() - i));
    likelihood.buckets(x, n, bucket);
    if (!masses) {
      for (int j = 0; j < n; ++j) ++count[bucket[j]];
      continue;
    }
    for (int j = 0; j < n; ++j) {
      const double t = (largest - x[j]) * scale - bucket[j];
      double sum = series[kDegree];
      for (int d = kDegree - 1; d >= 0; --d) sum = sum * t + series[d];
      within[j] = sum;
    }
    for (int j = 0; j < n; ++j) {
      const int b = bucket[j];
      if (b == kLast) continue;
      ++count[b];
      mass[b] += kTables.power[b] * within[j];
    }
  }
}

void Census::add(const Census& other) {
  for (int b = 0; b < kBuckets; ++b) count[b] += other.count[b];
  for (int b = 0; b < kBuckets; ++b) mass[b] += other.mass[b];
}

double Census::total() const {
  return mass_before(kBuckets);
}

double Census::mass_before(int bucket) const {
  double sum = 0;
  for (int b = 0; b < bucket; ++b) sum += mass[b];
  return sum;
}

int Census::reaches_count(int64_t k) const {
  int b = 0;
  for (int64_t sum = count[0]; b < kLast && sum < k;) sum += count[++b];
  return b;
}

BucketRange Census::reaches_mass(double wanted) const {
  constexpr double kOpen = 1e-9;  // far above the rounding of sums, far below what a longer list would cost
  BucketRange range{-1, kLast};
  double sum = 0;
  for (int b = 0; b < kLast; ++b) {
    sum += mass[b];
    if (range.first < 0 && sum >= wanted * (1 - kOpen)) range.first = b;
    if (sum >= wanted * (1 + kOpen)) {
      range.last = b;
      break;
    }
  }
  if (range.first < 0) range.first = kLast;
  return range;
}

}  // namespace weft
