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

struct E4m3Split {  // positive codes only: the sign is added afterwards
  alignas(64) uint8_t high[128];
  alignas(64) uint8_t low[128];
};
static constexpr E4m3Split e4m3_split() {
  E4m3Split t{};
  for (int code = 0; code < 128; ++code) {
    t.high[code] = static_cast<uint8_t>(kE4m3Bf16.bits[code] >> 8);
    t.low[code] = static_cast<uint8_t>(kE4m3Bf16.bits[code]);
  }
  return t;
}
[[maybe_unused]] static constexpr E4m3Split kE4m3Split = e4m3_split();

// e2m1: 0 .5 1 1.5 2 3 4 6, then the negatives
alignas(32) static constexpr uint16_t kE2m1Bf16[16] = {0x0000, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                       0x8000, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
