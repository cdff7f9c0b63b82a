// A call carries arrays of V through memory: such words must be inlined, however often they are used.
#define WEFT_INLINE static inline __attribute__((always_inline))

// Code tables of the narrow formats, as bf16 bits (dsa.md 2.5, kimi.md 7).

// e4m3: e > 0 is (1 + m/8) 2^(e-7); e = 0 is m 2^-9, normal in bf16; 0x7f is NaN.
struct E4m3Bf16 {
  uint16_t bits[256];
};
static constexpr E4m3Bf16 e4m3_bf16() {
  E4m3Bf16 t{};
  for (int code = 0; code < 256; ++code) {
    const int e = code >> 3 & 15, m = code & 7;
    int b = 0;
    if (e == 15 && m == 7) b = 0x7fc0;
    else if (e > 0) b = (e + 120) << 7 | m << 4;
    else if (m >= 4) b = 120 << 7 | (m - 4) << 5;
    else if (m >= 2) b = 119 << 7 | (m - 2) << 6;
    else if (m == 1) b = 118 << 7;
    t.bits[code] = static_cast<uint16_t>(b | (code & 128) << 8);
  }
  return t;
}
static constexpr E4m3Bf16 kE4m3Bf16 = e4m3_bf16();

// Positive byte codes as two byte tables, for look-ups of 128 entries; bit 7 of a code is the sign.
struct ByteTable {
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
};
// MX formats look up values times 2^64: their scale is then one saturating subtraction of (191 - e) from the exponent,
// which leaves zero at zero and needs no test. Negative zeros are not allowed in the codes: they would become huge.
static constexpr int kScaledUp = 64 << 7;
static constexpr ByteTable e4m3_bytes(int add) {
  ByteTable t{};
  for (int code = 0; code < 128; ++code) {
    const int b = code ? kE4m3Bf16.bits[code] + add : 0;
    t.high[code] = static_cast<uint8_t>(b >> 8);
    t.low[code] = static_cast<uint8_t>(b);
  }
  return t;
}
static constexpr ByteTable int8_bytes() {  // sign and magnitude: all of 0..127 are exact in bf16
  ByteTable t{};
  for (int code = 1; code < 128; ++code) {
    int top = 0;
    while (code >> (top + 1)) ++top;
    const int b = (127 + top) << 7 | ((code << 7 >> top) & 127);
    t.high[code] = static_cast<uint8_t>(b >> 8);
    t.low[code] = static_cast<uint8_t>(b);
  }
  return t;
}
static constexpr ByteTable kE4m3Bytes = e4m3_bytes(0), kMxfp8Bytes = e4m3_bytes(kScaledUp), kInt8Bytes = int8_bytes();

// e2m1 times 2^64: 0 .5 1 1.5 2 3 4 6, then the negatives
alignas(32) static constexpr uint16_t kE2m1Bf16[16] = {0x0000, 0x5f00, 0x5f80, 0x5fc0, 0x6000, 0x6040, 0x6080, 0x60c0,
                                                       0x8000, 0xdf00, 0xdf80, 0xdfc0, 0xe000, 0xe040, 0xe080, 0xe0c0};
// e2m1 itself
alignas(64) static constexpr float kE2m1[16] = {0, .5f, 1, 1.5f, 2, 3, 4, 6, -0.f, -.5f, -1, -1.5f, -2, -3, -4, -6};

// The logistic function on 32 pieces of 0.75 around multiples of 0.75, each a parabola through its Chebyshev points:
// c[0] + x (c[1] + x c[2]). Piece k lies at k mod 32. Off by 2^-11.8 at most, by 2^-8.4 of itself where it decays.
struct LogisticTable {
  static constexpr double kWidth = 0.75;
  alignas(64) float c[3][32];
};
static constexpr double logistic(double x) {
  double power = 1, sum = 1;  // e^-|x| as (e^(-|x| / 256))^256
  const double small = (x < 0 ? x : -x) / 256;
  for (int i = 1; i < 8; ++i) sum += power *= small / i;
  for (int i = 0; i < 8; ++i) sum *= sum;
  return x < 0 ? sum / (1 + sum) : 1 / (1 + sum);
}
static constexpr LogisticTable logistic_table() {
  LogisticTable t{};
  for (int k = -16; k < 16; ++k) {
    const double at = k * t.kWidth, h = t.kWidth / 2 * 0.86602540378;
    const double f = logistic(at), up = logistic(at + h), down = logistic(at - h);
    const double slope = (up - down) / (2 * h), bend = (up + down - 2 * f) / (2 * h * h);
    t.c[0][k & 31] = static_cast<float>(f - at * (slope - at * bend));
    t.c[1][k & 31] = static_cast<float>(slope - 2 * at * bend);
    t.c[2][k & 31] = static_cast<float>(bend);
  }
  return t;
}
static constexpr LogisticTable kLogistic = logistic_table();
