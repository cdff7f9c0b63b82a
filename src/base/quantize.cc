#include "base/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/dtype.h"

namespace weft {
namespace {

// Magnitudes are compared as integers: IEEE order, Inf and NaN on top, and DAZ cannot hide a subnormal.
uint32_t amax_bits(const float* x, int64_t n) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < n; ++i) largest = std::max(largest, float_bits(x[i]) & 0x7FFFFFFFu);
  return largest;
}

struct Element {          // what the scale rule has to know of an MX element type
  int emax;               // exponent of its largest value
  uint32_t max_fraction;  // fraction bits of its largest value, as in fp32
};
constexpr Element kE4m3{8, 0x600000};
constexpr Element kE2m1{2, 0x400000};

uint8_t mx_scale(uint32_t amax, MxScale rule, Element element) {
  if (amax >= 0x7F800000u) return amax > 0x7F800000u ? 255 : 254;
  uint32_t fraction = amax & 0x7FFFFFu;
  int code =
      static_cast<int>(amax >> 23) - element.emax;  // subnormal maxima clamp to 0 for both element types
  if (rule == MxScale::rceil) code += fraction > element.max_fraction;
  if (rule == MxScale::even) code += fraction >= 0x600000u;
  return static_cast<uint8_t>(std::clamp(code, 0, 254));
}

template <class Encode>  // encode(index, x, exponent, is_nan)
void mx_quantize(const float* x, int64_t n, MxScale rule, Element element, uint8_t* scales, Encode encode) {
  for (int64_t begin = 0; begin < n; begin += kMxGroup) {
    int64_t end = std::min<int64_t>(n, begin + kMxGroup);
    uint8_t scale = mx_scale(amax_bits(x + begin, end - begin), rule, element);
    scales[begin / kMxGroup] = scale;
    for (int64_t i = begin; i < end; ++i) encode(i, x[i], scale - 127, scale == 255);
  }
}

float mx_value(float element, uint8_t scale) {
  return scale == 255 ? e8m0_to_float(255) : scale_pow2(element, scale - 127);
}

void store_floats(uint8_t* to, const float* from, int n) {
  std::memcpy(to, from, sizeof(float) * n);
}

void widen(const uint16_t* x, int n, float* y) {
  for (int i = 0; i < n; ++i) y[i] = bf16_to_float(x[i]);
}

void narrow(const float* x, int n, uint16_t* y) {
  for (int i = 0; i < n; ++i) y[i] = float_to_bf16(x[i]);
}

}  // namespace

void mxfp8_quantize(const float* x, int64_t n, MxScale rule, uint8_t* codes, uint8_t* scales) {
  mx_quantize(x, n, rule, kE4m3, scales, [&](int64_t i, float value, int exponent, bool nan) {
    codes[i] = nan ? 0x7F : float_to_e4m3_scaled(value, exponent);
  });
}

void mxfp4_quantize(const float* x, int64_t n, MxScale rule, uint8_t* codes, uint8_t* scales) {
  mx_quantize(x, n, rule, kE2m1, scales, [&](int64_t i, float value, int exponent, bool nan) {
    uint8_t code = nan ? 0 : float_to_e2m1_scaled(value, exponent);
    codes[i / 2] = i % 2 ? static_cast<uint8_t>(codes[i / 2] | code << 4) : code;
  });
}

void mxfp8_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = mx_value(e4m3_to_float(codes[i]), scales[i / kMxGroup]);
}

void mxfp4_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) {
    uint8_t code = (codes[i / 2] >> (i % 2 * 4)) & 15;
    y[i] = mx_value(e2m1_to_float(code), scales[i / kMxGroup]);
  }
}

void mxfp4_weight_dequantize(const uint8_t* packed, const uint8_t* scales, int64_t rows, int64_t cols,
                             float* y) {
  int64_t groups = (cols + kMxGroup - 1) / kMxGroup;
  for (int64_t r = 0; r < rows; ++r)
    mxfp4_dequantize(packed + r * cols / 2, scales + r * groups, cols, y + r * cols);
}

void fp8_block_dequantize(const uint8_t* w, const float* scale, int64_t rows, int64_t cols, float* y) {
  int64_t blocks = (cols + kFp8Block - 1) / kFp8Block;
  for (int64_t r = 0; r < rows; ++r) {
    fp8_tile_dequantize(w + r * cols, scale + r / kFp8Block * blocks, cols, y + r * cols);
  }
}

float fp8_tile_scale(float amax, TileScale rule) {
  constexpr float kFloor = 1e-4f;
  float quotient = rule == TileScale::pow2_scale_floor ? std::max(amax / kE4m3Max, kFloor)
                                                       : std::max(amax, kFloor) / kE4m3Max;
  // The exponent is taken from the bits: a float log2 misses maxima one ulp above a power of two.
  return rule == TileScale::fp32 ? quotient : e8m0_to_float(e8m0_ceil(quotient));
}

void fp8_tile_quantize(const float* x, int64_t n, TileScale rule, uint8_t* codes, float* scales) {
  for (int64_t begin = 0; begin < n; begin += kFp8Block) {
    int64_t end = std::min<int64_t>(n, begin + kFp8Block);
    float scale = fp8_tile_scale(bits_float(amax_bits(x + begin, end - begin)), rule);
    scales[begin / kFp8Block] = scale;
    // A division: a rounded reciprocal changes codes under the fp32 rule.
    for (int64_t i = begin; i < end; ++i) codes[i] = float_to_e4m3(x[i] / scale);
  }
}

void fp8_tile_dequantize(const uint8_t* codes, const float* scales, int64_t n, float* y) {
  for (int64_t i = 0; i < n; ++i) y[i] = e4m3_to_float(codes[i]) * scales[i / kFp8Block];
}

void latent528_quantize(const uint16_t* latent, TileScale rule, uint8_t* row) {
  float x[kLatentWidth], scales[kLatentWidth / kFp8Block];
  widen(latent, kLatentWidth, x);
  fp8_tile_quantize(x, kLatentWidth, rule, row, scales);
  store_floats(row + kLatentWidth, scales, kLatentWidth / kFp8Block);
}

void latent528_dequantize(const uint8_t* row, uint16_t* latent) {
  float y[kLatentWidth], scales[kLatentWidth / kFp8Block];
  std::memcpy(scales, row + kLatentWidth, sizeof scales);
  fp8_tile_dequantize(row, scales, kLatentWidth, y);
  narrow(y, kLatentWidth, latent);
}

void latent656_quantize(const uint16_t* latent, const uint16_t* rope, TileScale rule, uint8_t* row) {
  latent528_quantize(latent, rule, row);
  std::memcpy(row + kLatentRow528, rope, sizeof(uint16_t) * kRopeWidth);
}

void latent656_dequantize(const uint8_t* row, uint16_t* latent, uint16_t* rope) {
  latent528_dequantize(row, latent);
  std::memcpy(rope, row + kLatentRow528, sizeof(uint16_t) * kRopeWidth);
}

void latent528_mx_quantize(const uint16_t* latent, uint8_t* row) {
  float x[kLatentWidth];
  widen(latent, kLatentWidth, x);
  mxfp8_quantize(x, kLatentWidth, MxScale::rceil, row, row + kLatentWidth);
}

void latent528_mx_dequantize(const uint8_t* row, uint16_t* latent) {
  float y[kLatentWidth];
  mxfp8_dequantize(row, row + kLatentWidth, kLatentWidth, y);
  narrow(y, kLatentWidth, latent);
}

float int8_quantize(const float* x, int64_t n, int8_t* q) {
  float amax = bits_float(amax_bits(x, n));
  for (int64_t i = 0; i < n; ++i) {
    // In double, so that the product is exact and only the quotient rounds before RNE does.
    q[i] = amax == 0 ? 0 : static_cast<int8_t>(std::nearbyint(x[i] * 127.0 / amax));
  }
  return amax / 127.0f;
}

void hadamard128(float* x) {
  for (int half = 1; half < 128; half *= 2) {
    for (int i = 0; i < 128; ++i) {
      if (i & half) continue;
      float a = x[i], b = x[i + half];
      x[i] = a + b;
      x[i + half] = a - b;
    }
  }
  constexpr float kNorm = 0.08838834764831845f;  // 1 / sqrt(128)
  for (int i = 0; i < 128; ++i) x[i] *= kNorm;
}

}  // namespace weft
