// The exponential race that draws a token: token x finishes at E_x / p_x, with E_x ~ Exp(1) a function of
// (seed, position, x) alone, and the first wins. Probabilities need no common factor: weights do.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

namespace weft {

class Race {
 public:
  Race() = default;
  // Tokens of less weight than min_weight do not run.
  Race(uint64_t seed, uint64_t position, double min_weight)
      : key_(scramble(scramble(seed + kGolden) + kGolden * (position + 1))), min_weight_(min_weight) {}

  // weight(): called only for a token that may win with a weight of `most`, which bounds it. Nearly all
  // tokens lose so, -log(1 - u) >= u, without an exponential or a logarithm.
  template <class Weight>
  void enter(int32_t token, double most, const Weight& weight) {
    const double u = uniform(token);
    if (u > best_ * most) return;
    const double w = weight();
    if (w == 0 || w < min_weight_) return;
    finish(token, -std::log1p(-u) / w);
  }
  void merge(const Race& other) { finish(other.winner_, other.best_); }
  int32_t winner() const { return winner_; }  // INT32_MAX: nobody ran

 private:
  static constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;
  // The finaliser of SplitMix64: every input bit reaches every output bit.
  static uint64_t scramble(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
  // In (0, 1), both ends excluded; 52 bits, so that adding one half stays exact.
  double uniform(int32_t token) const {
    const uint64_t bits = scramble(key_ + kGolden * (static_cast<uint64_t>(token) + 1));
    return (static_cast<double>(static_cast<int64_t>(bits >> 12)) + 0.5) * 0x1p-52;
  }
  void finish(int32_t token, double at) {
    if (at < best_ || (at == best_ && token < winner_)) best_ = at, winner_ = token;
  }

  uint64_t key_ = 0;
  double min_weight_ = 0;
  double best_ = std::numeric_limits<double>::infinity();  // the first finish
  int32_t winner_ = INT32_MAX;
};

}  // namespace weft
