#include "app/synth_fill.h"

#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/dtype.h"

namespace weft {
namespace {

constexpr int kDrawBits = 12;
constexpr int kDraws = 1 << kDrawBits;
constexpr int kGroup = 32;  // elements of an MX group
// A standard deviation in units of the fp8 scale: 3.67 deviations, the outermost draw, stay below 448.
constexpr float kFp8Deviation = 100;

double normal_cdf(double x) {
  return 0.5 * std::erfc(-x / std::sqrt(2.0));
}

// Midpoint quantiles of `count` equal slices, scaled to variance 1.
std::vector<double> make_quantiles(int count) {
  std::vector<double> q(count);
  double sum = 0;
  for (int i = 0; i < count; ++i) {
    const double p = (i + 0.5) / count;
    double low = -10, high = 10;
    for (int step = 0; step < 60; ++step) {
      const double middle = (low + high) / 2;
      (normal_cdf(middle) < p ? low : high) = middle;
    }
    q[i] = low;
    sum += low * low;
  }
  for (double& x : q) x /= std::sqrt(sum / count);
  return q;
}

const std::vector<double>& quantiles() {
  static const std::vector<double> kQuantiles = make_quantiles(kDraws);
  return kQuantiles;
}
const std::vector<double>& coarse_quantiles() {  // eight bits do for the fifteen values of E2M1
  static const std::vector<double> kQuantiles = make_quantiles(256);
  return kQuantiles;
}

// A counter through a finaliser of two multiplications: every output bit depends on every counter bit.
inline uint64_t draw(uint64_t key, uint64_t counter) {
  uint64_t z = key + (counter + 1) * 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

constexpr uint64_t kScaleStream = 0xA5A5A5A5A5A5A5A5u;  // apart from the codes'
inline int group_choice(uint64_t key, uint64_t group) {
  return static_cast<int>(draw(key ^ kScaleStream, group) >> 63);
}

SynthTable make_table(const SynthTensor& t) {
  SynthTable out;
  const auto encode = [&t](auto& codes, const auto& code) {
    codes.resize(kDraws);
    for (int i = 0; i < kDraws; ++i) codes[i] = code(static_cast<float>(t.mean + t.std * quantiles()[i]));
  };
  switch (t.fill) {
    case SynthFill::values:
      WEFT_CHECK(t.dtype == StoredDtype::f32 || t.dtype == StoredDtype::bf16, "{}", t.name);
      if (t.dtype == StoredDtype::f32)
        encode(out.f32, [](float x) { return x; });
      else
        encode(out.bf16, [](float x) { return float_to_bf16(x); });
      break;
    case SynthFill::fp8_codes:
    case SynthFill::fp8_scales:
      out.scale = t.std / kFp8Deviation;
      if (t.power_of_two) out.scale = std::exp2(std::ceil(std::log2(out.scale)));
      encode(out.e4m3, [&out](float x) { return float_to_e4m3(x / out.scale); });
      break;
    case SynthFill::mxfp4_codes:
    case SynthFill::mxfp4_scales:
      // Groups differ by a factor of two: a deviation is 1.4 to 2.8 units of the smaller scale, 0.7 to 1.4 of
      // the larger
      out.exponent = static_cast<int>(std::floor(std::log2(t.std / 1.4f)));
      for (int choice = 0; choice < 2; ++choice) {
        std::array<uint8_t, 256> code;
        for (int i = 0; i < 256; ++i)
          code[i] = float_to_e2m1(
              static_cast<float>(t.std * coarse_quantiles()[i] * std::exp2(-out.exponent - choice)));
        out.e2m1[choice].resize(1 << 16);
        for (int i = 0; i < 1 << 16; ++i)
          out.e2m1[choice][i] = static_cast<uint8_t>(code[i & 255] | code[i >> 8] << 4);
      }
      break;
  }
  return out;
}

}  // namespace

std::shared_ptr<const SynthTable> SynthTables::get(const SynthTensor& t) {
  auto& table = made_[{t.fill, t.dtype, t.mean, t.std, t.power_of_two}];
  if (!table) table = std::make_shared<const SynthTable>(make_table(t));
  return table;
}

SynthFiller::SynthFiller(const SynthTensor& t, uint64_t seed, SynthTables& tables)
    : fill_(t.fill),
      dtype_(t.dtype),
      power_of_two_(t.power_of_two),
      key_(XXH3_64bits_withSeed(t.draw.data(), t.draw.size(), seed)),
      table_(tables.get(t)) {}

template <class T>
void SynthFiller::draw_codes(const std::vector<T>& table, size_t first, size_t bytes, std::byte* out) const {
  size_t i = first / sizeof(T);
  const size_t end = i + bytes / sizeof(T);
  for (; i < end; i += 4) {
    const uint64_t bits = draw(key_, i / 4);
    T codes[4];
    for (int j = 0; j < 4; ++j) codes[j] = table[bits >> (16 * j) & (kDraws - 1)];
    const size_t n = std::min<size_t>(4, end - i);
    if (n == 4)
      std::memcpy(out, codes, sizeof codes);
    else
      std::memcpy(out, codes, n * sizeof(T));
    out += n * sizeof(T);
  }
}

void SynthFiller::draw_mxfp4(size_t first, size_t bytes, std::byte* out) const {
  constexpr size_t kGroupBytes = kGroup / 2;
  for (size_t at = 0; at < bytes; at += kGroupBytes) {
    const uint64_t group = (first + at) / kGroupBytes;
    const std::vector<uint8_t>& codes = table_->e2m1[group_choice(key_, group)];
    for (uint64_t i = 0; i < 4; ++i) {
      const uint64_t bits = draw(key_, group * 4 + i);
      for (int j = 0; j < 4; ++j) *out++ = std::byte{codes[bits >> (16 * j) & 0xFFFF]};
    }
  }
}

void SynthFiller::draw_mxfp4_scales(size_t first, size_t bytes, std::byte* out) const {
  for (size_t i = 0; i < bytes; ++i)
    out[i] = static_cast<std::byte>(127 + table_->exponent + group_choice(key_, first + i));
}

void SynthFiller::draw_fp8_scales(size_t first, size_t bytes, std::byte* out) const {
  for (size_t i = 0; i < bytes / sizeof(float); ++i) {
    const double u =
        static_cast<double>(draw(key_ ^ kScaleStream, first / sizeof(float) + i) >> 40) * 0x1p-24;
    const float scale = power_of_two_ ? table_->scale : static_cast<float>(table_->scale * (0.9 + 0.2 * u));
    std::memcpy(out + i * sizeof(float), &scale, sizeof scale);
  }
}

void SynthFiller::fill(size_t first, size_t bytes, std::byte* out) const {
  WEFT_CHECK(first % kPiece == 0);
  switch (fill_) {
    case SynthFill::values:
      if (dtype_ == StoredDtype::f32) return draw_codes(table_->f32, first, bytes, out);
      return draw_codes(table_->bf16, first, bytes, out);
    case SynthFill::fp8_codes:
      return draw_codes(table_->e4m3, first, bytes, out);
    case SynthFill::fp8_scales:
      return draw_fp8_scales(first, bytes, out);
    case SynthFill::mxfp4_codes:
      return draw_mxfp4(first, bytes, out);
    case SynthFill::mxfp4_scales:
      return draw_mxfp4_scales(first, bytes, out);
  }
}

}  // namespace weft
