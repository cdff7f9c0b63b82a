// The tokens of a row by likelihood, without sorting them.
//
// A token's weight is its probability relative to the likeliest token's, exp((logit - largest) /
// temperature). Bucket b has the weights from 2^-(b / 16) down to 2^-((b + 1) / 16); the last one has all
// that are lighter, less than 2^-63 each. Buckets are in the order of logits, so whoever looks for the k-th
// likeliest token, or for the set that holds a given probability, finds the few buckets in question by adding
// up, and sorts only what is in them.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>
#include <span>

namespace weft {

class Likelihood {
 public:
  static constexpr int kBuckets = 1024, kLast = kBuckets - 1, kPerOctave = 16;

  Likelihood() = default;
  Likelihood(float largest, double temperature)
      : largest_(largest),
        temperature_(temperature),
        per_logit_(kPerOctave / std::numbers::ln2 / temperature) {}

  double weight(float logit) const {
    return std::exp((static_cast<double>(logit) - largest_) / temperature_);
  }

  // In f32: what counts is that the larger logit never has the larger bucket. A -inf is in the last one.
  void buckets(const float* logits, int n, int32_t* out) const {
    const float scale = static_cast<float>(per_logit_);
    for (int i = 0; i < n; ++i) {
      const float y = (largest_ - logits[i]) * scale;
      out[i] = static_cast<int32_t>(y < kLast ? y : kLast);  // a NaN, from inf * 0, is last too
    }
  }
  // [kBuckets]: no weight in a bucket is above it; with room for the rounding of buckets().
  static const double* most();

 private:
  friend struct Census;
  float largest_ = 0;
  double temperature_ = 1, per_logit_ = 0;
};

// Buckets from `first` to `last`.
struct BucketRange {
  int first = 0, last = -1;
};

struct Census {
  std::array<int32_t, Likelihood::kBuckets> count;
  // Sums of weights, to about 1e-13. None in the last bucket: what a whole vocabulary could have there is
  // less.
  std::array<double, Likelihood::kBuckets> mass;

  void clear();
  // Without `masses` only the counts.
  void add(const Likelihood& likelihood, std::span<const float> logits, bool masses);
  void add(const Census& other);
  double total() const;
  // Where the likeliest tokens begin to be k, or to have `mass` together. A range for the mass: sums of other
  // orders may end a bucket earlier or later.
  int reaches_count(int64_t k) const;
  BucketRange reaches_mass(double mass) const;
  double mass_before(int bucket) const;
};

}  // namespace weft
