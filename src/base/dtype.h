// Element types and their exact scalar codecs: bf16, f16, E4M3, E8M0, E2M1.
//
// Every codec works on the bits, so a result never depends on MXCSR (worker threads run with FTZ and DAZ) nor
// on the instructions the including unit is compiled for. ISA units include this header too: everything is
// static inline and uses compiler builtins instead of library templates, because the linker would keep one
// copy of a shared inline function, perhaps the one compiled for AVX-512.
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

// u8 also carries packed E2M1 pairs (low nibble = even element).
enum class DType : uint8_t { f32, bf16, f16, e4m3, e8m0, i32, i8, u8 };

static inline constexpr size_t dtype_size(DType type) {
  switch (type) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
      return 2;
    default:
      return 1;
  }
}

static inline constexpr const char* dtype_name(DType type) {
  switch (type) {
    case DType::f32:
      return "f32";
    case DType::bf16:
      return "bf16";
    case DType::f16:
      return "f16";
    case DType::e4m3:
      return "e4m3";
    case DType::e8m0:
      return "e8m0";
    case DType::i32:
      return "i32";
    case DType::i8:
      return "i8";
    case DType::u8:
      return "u8";
  }
  return "?";
}

static inline constexpr uint32_t float_bits(float x) {
  return __builtin_bit_cast(uint32_t, x);
}
static inline constexpr float bits_float(uint32_t bits) {
  return __builtin_bit_cast(float, bits);
}
static inline constexpr bool bits_nan(uint32_t bits) {
  return (bits & 0x7FFFFFFFu) > 0x7F800000u;
}
static inline constexpr bool bits_inf(uint32_t bits) {
  return (bits & 0x7FFFFFFFu) == 0x7F800000u;
}

// 2^exponent for normal results, exponent -126..127.
static inline constexpr float pow2(int exponent) {
  return bits_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// x * 2^exponent with one rounding, exponent -127..128, for |x| that is 0 or 2^-60..2^60. Two factors: 2^-127
// itself is a subnormal that DAZ would read as zero.
static inline constexpr float scale_pow2(float x, int exponent) {
  int half = exponent / 2;
  return x * pow2(half) * pow2(exponent - half);
}

// value >> shift, to nearest, ties to even. shift 1..31.
static inline constexpr uint32_t shift_rne(uint32_t value, int shift) {
  return (value + ((1u << (shift - 1)) - 1) + ((value >> shift) & 1)) >> shift;
}

// |x| * 2^-shift rounded (RNE) to a format with `mantissa` stored bits and smallest normal exponent
// `min_exponent`: the code without sign. Not clamped: a code above the format's largest means overflow. x
// finite.
static inline constexpr uint32_t round_magnitude(uint32_t x_bits, int shift, int mantissa, int min_exponent) {
  uint32_t fraction = x_bits & 0x7FFFFFu;
  int exponent = static_cast<int>((x_bits >> 23) & 0xFF) - 127;
  if (exponent == -127) {
    if (fraction == 0) return 0;
    int zeros = __builtin_clz(fraction) - 8;
    fraction <<= zeros;
    exponent = -126 - zeros;
  } else {
    fraction |= 0x800000u;
  }
  exponent -= shift;
  int drop = 23 - mantissa;
  if (exponent >= min_exponent) {  // a carry of the rounding walks into the exponent field, as it should
    return (static_cast<uint32_t>(exponent - min_exponent) << mantissa) + shift_rne(fraction, drop);
  }
  drop += min_exponent - exponent;
  return drop > 24 ? 0 : shift_rne(fraction, drop);  // below half of the smallest subnormal
}

// ---- bf16
// ----------------------------------------------------------------------------------------------------------

static inline constexpr float bf16_to_float(uint16_t code) {
  return bits_float(static_cast<uint32_t>(code) << 16);
}

// RNE; overflow to Inf; NaN quieted, sign and upper payload kept.
static inline constexpr uint16_t float_to_bf16(float x) {
  uint32_t bits = float_bits(x);
  if (bits_nan(bits)) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1)) >> 16);
}

// As VCVTNEPS2BF16 does it: subnormal inputs become signed zero, whatever MXCSR says.
static inline constexpr uint16_t float_to_bf16_daz(float x) {
  uint32_t bits = float_bits(x);
  if ((bits & 0x7F800000u) == 0) return static_cast<uint16_t>((bits >> 16) & 0x8000u);
  return float_to_bf16(x);
}

// ---- f16
// -----------------------------------------------------------------------------------------------------------

static inline constexpr float half_to_float(uint16_t code) {
  uint32_t sign = static_cast<uint32_t>(code & 0x8000u) << 16;
  uint32_t magnitude = code & 0x7FFFu;
  if (magnitude < 0x400u) {  // subnormal: an integer times 2^-24
    return bits_float(sign | float_bits(static_cast<float>(magnitude) * pow2(-24)));
  }
  if (magnitude >= 0x7C00u) {
    uint32_t quiet = magnitude > 0x7C00u ? 0x400000u : 0u;
    return bits_float(sign | 0x7F800000u | ((magnitude & 0x3FFu) << 13) | quiet);
  }
  return bits_float(sign | ((magnitude << 13) + (112u << 23)));
}

// RNE; overflow to Inf; NaN quieted, sign and upper payload kept.
static inline constexpr uint16_t float_to_half(float x) {
  uint32_t bits = float_bits(x);
  uint32_t sign = (bits >> 16) & 0x8000u;
  if (bits_nan(bits)) return static_cast<uint16_t>(sign | 0x7E00u | ((bits >> 13) & 0x3FFu));
  uint32_t code = bits_inf(bits) ? 0x7C00u : round_magnitude(bits, 0, 10, -14);
  return static_cast<uint16_t>(sign | (code < 0x7C00u ? code : 0x7C00u));
}

// ---- E4M3 (the "fn" form: no Inf, NaN = 7F / FF, largest 448)
// ------------------------------------------------------

constexpr float kE4m3Max = 448.0f;

static inline constexpr float e4m3_to_float(uint8_t code) {
  uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  uint32_t magnitude = code & 0x7Fu;
  if (magnitude == 0x7Fu) return bits_float(sign | 0x7FC00000u);
  if (magnitude < 8) return bits_float(sign | float_bits(static_cast<float>(magnitude) * pow2(-9)));
  return bits_float(sign | ((magnitude << 20) + (120u << 23)));
}

// E4M3 of x * 2^-shift with a single rounding (RNE). Overflow and Inf saturate to +-448; NaN to 7F / FF by
// sign.
static inline constexpr uint8_t float_to_e4m3_scaled(float x, int shift) {
  uint32_t bits = float_bits(x);
  uint32_t sign = (bits >> 24) & 0x80u;
  if (bits_nan(bits)) return static_cast<uint8_t>(sign | 0x7Fu);
  uint32_t code = bits_inf(bits) ? 0x7Eu : round_magnitude(bits, shift, 3, -6);
  return static_cast<uint8_t>(sign | (code < 0x7Eu ? code : 0x7Eu));
}

static inline constexpr uint8_t float_to_e4m3(float x) {
  return float_to_e4m3_scaled(x, 0);
}

// The non-saturating cast: what would round above 448 (|x| > 464, Inf) becomes NaN.
static inline constexpr uint8_t float_to_e4m3_nan(float x) {
  uint32_t bits = float_bits(x);
  uint32_t sign = (bits >> 24) & 0x80u;
  uint32_t code = (bits_nan(bits) || bits_inf(bits)) ? 0x7Fu : round_magnitude(bits, 0, 3, -6);
  return static_cast<uint8_t>(sign | (code < 0x7Fu ? code : 0x7Fu));
}

// ---- E8M0 (2^(code - 127); no zero, no Inf, 255 = NaN)
// -------------------------------------------------------------

static inline constexpr float e8m0_to_float(uint8_t code) {
  if (code == 0) return bits_float(0x00400000u);  // 2^-127 is a subnormal
  if (code == 255) return bits_float(0x7FC00000u);
  return bits_float(static_cast<uint32_t>(code) << 23);
}

// Largest power of two <= x (floor) or smallest >= x (ceil), clamped to 0..254. x finite, >= 0 (the sign is
// ignored).
static inline constexpr uint8_t e8m0_floor(float x) {
  uint32_t code = (float_bits(x) >> 23) & 0xFFu;
  return static_cast<uint8_t>(code < 254u ? code : 254u);
}

static inline constexpr uint8_t e8m0_ceil(float x) {
  uint32_t bits = float_bits(x) & 0x7FFFFFFFu;
  if (bits < 0x00800000u) return bits > 0x00400000u;
  uint32_t code = (bits + 0x7FFFFFu) >> 23;
  return static_cast<uint8_t>(code < 254u ? code : 254u);
}

// ---- E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives)
// ---------------------------------------------------------

constexpr float kE2m1Max = 6.0f;

static inline constexpr float e2m1_to_float(uint8_t code) {
  uint32_t sign = static_cast<uint32_t>(code & 8u) << 28;
  uint32_t magnitude = code & 7u;
  if (magnitude < 2) return bits_float(sign | (magnitude ? 0x3F000000u : 0u));
  return bits_float(sign | ((magnitude << 22) + (126u << 23)));
}

// E2M1 of x * 2^-shift (RNE). Overflow and Inf saturate to +-6, the sign of zero is kept; NaN has no code and
// gives 0.
static inline constexpr uint8_t float_to_e2m1_scaled(float x, int shift) {
  uint32_t bits = float_bits(x);
  if (bits_nan(bits)) return 0;
  uint32_t code = bits_inf(bits) ? 7u : round_magnitude(bits, shift, 1, 0);
  return static_cast<uint8_t>(((bits >> 28) & 8u) | (code < 7u ? code : 7u));
}

static inline constexpr uint8_t float_to_e2m1(float x) {
  return float_to_e2m1_scaled(x, 0);
}

}  // namespace weft
