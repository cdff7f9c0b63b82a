// isa: name=portable rank=0 flags=-O3 needs=
//
// The vocabulary of an ISA, in plain C++: this file is also the specification of the others. V is always 16 f32 lanes,
// so that tiles, panels and reduction trees have one shape everywhere.
// max(a, b) and min(a, b) return b when either is NaN: put the value that may be NaN second.

struct bf16 {
  uint16_t bits;
};
using op_t = float;  // operand type of the matrix product
static constexpr bool kBf16Operands = false;
static constexpr int kBlockRows = 2, kBlockPanels = 1, kSlimRows = 1, kSlimPanels = 2;  // register block of mma: 2 x 16 lanes = 8 SSE registers

struct V {
  float v[16];
};
struct M {
  uint16_t bits;
};

#define EACH for (int i = 0; i < 16; ++i)
static inline V zero() { return V{}; }
static inline V set1(float x) { V r; EACH r.v[i] = x; return r; }
static inline V load(const float* p) { V r; __builtin_memcpy(&r, p, 64); return r; }
static inline void store(float* p, V a) { __builtin_memcpy(p, &a, 64); }
static inline V load_n(const float* p, int n) { V r; EACH r.v[i] = i < n ? p[i] : 0.f; return r; }
static inline void store_n(float* p, V a, int n) { for (int i = 0; i < 16 && i < n; ++i) p[i] = a.v[i]; }
static inline V operator+(V a, V b) { EACH a.v[i] += b.v[i]; return a; }
static inline V operator-(V a, V b) { EACH a.v[i] -= b.v[i]; return a; }
static inline V operator*(V a, V b) { EACH a.v[i] *= b.v[i]; return a; }
static inline V operator/(V a, V b) { EACH a.v[i] /= b.v[i]; return a; }
static inline V reciprocal(V a) { return set1(1.f) / a; }  // within 1.5 ulp, for normal a
// Stores that other ISAs send past the caches: p 64-byte aligned, to be read after stores_done().
static inline void store_past(float* p, V x) { store(p, x); }
static inline void stores_done() {}
static inline V fma(V a, V b, V c) { EACH c.v[i] += a.v[i] * b.v[i]; return c; }
static inline V max(V a, V b) { EACH b.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return b; }
static inline V min(V a, V b) { EACH b.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return b; }
static inline V round(V a) {  // to nearest even, |a| < 2^22
  EACH a.v[i] = (a.v[i] + 12582912.f) - 12582912.f;
  return a;
}
static inline M less(V a, V b) { M m{0}; EACH m.bits |= static_cast<uint16_t>((a.v[i] < b.v[i]) << i); return m; }
static inline M first_n(int n) { return M{static_cast<uint16_t>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1 << n) - 1)}; }
static inline M from_bits(uint32_t b) { return M{static_cast<uint16_t>(b)}; }
static inline V select(M m, V a, V b) { EACH b.v[i] = (m.bits >> i & 1) ? a.v[i] : b.v[i]; return b; }
static inline uint32_t bits(M m) { return m.bits; }
static inline V exponent(V n) {  // 2^n for integral n in [-126, 127]
  V r;
  EACH {
    const int32_t b = (static_cast<int32_t>(n.v[i]) + 127) << 23;
    __builtin_memcpy(&r.v[i], &b, 4);
  }
  return r;
}
static inline V scale2(V p, V n) {  // p 2^n, n in [-252, 254]: two factors, so that no exponent field overflows
  const V half = round(n * set1(0.5f));
  return p * exponent(half) * exponent(n - half);
}
// The same tree on every ISA: lanes i and i+8, then 4, 2, 1.
static inline float hsum(V a) {
  for (int w = 8; w > 0; w /= 2)
    for (int i = 0; i < w; ++i) a.v[i] += a.v[i + w];
  return a.v[0];
}
static inline float hmax(V a) {
  for (int w = 8; w > 0; w /= 2)
    for (int i = 0; i < w; ++i) a.v[i] = a.v[i] > a.v[i + w] ? a.v[i] : a.v[i + w];
  return a.v[0];
}
static inline float widen(bf16 x) {
  const uint32_t b = static_cast<uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &b, 4);
  return f;
}
static inline V load(const bf16* p) { V r; EACH r.v[i] = widen(p[i]); return r; }
static inline V load_n(const bf16* p, int n) { V r; EACH r.v[i] = i < n ? widen(p[i]) : 0.f; return r; }
static inline V even(const bf16* line) { V r; EACH r.v[i] = widen(line[2 * i]); return r; }
static inline V odd(const bf16* line) { V r; EACH r.v[i] = widen(line[2 * i + 1]); return r; }

static inline void copy_line(void* to, const void* from) { __builtin_memcpy(to, from, 64); }
// Weights of two keys as the product reads them: side by side where operands are bf16, one line after the other here.
static inline void store_pairs(float* line, V x, V y) { store(line, x), store(line + 16, y); }
// The chosen lanes packed at dst, which has room for 16; how many they are.
static inline int compress(float* dst, V a, M m) { int n = 0; EACH if (m.bits >> i & 1) dst[n++] = a.v[i]; return n; }
static inline int compress(int32_t* dst, const int32_t* src, M m) { int n = 0; EACH if (m.bits >> i & 1) dst[n++] = src[i]; return n; }
static inline int compress_range(int32_t* dst, int first, M m) {  // of first, first + 1, ...
  int n = 0;
  EACH if (m.bits >> i & 1) dst[n++] = first + i;
  return n;
}

// 64 codes in order, times 2^exponent. A NaN code must come with an exponent of 0.
static inline void expand_e4m3_row(float* dst, const uint8_t* codes, int exponent) {
  for (int i = 0; i < 64; ++i) dst[i] = widen(bf16{kE4m3Bf16.bits[codes[i]]}) * pow2(exponent);
}

static inline void prefetch(const void* p) { __builtin_prefetch(p); }
// Expand 64-byte lines of codes (packed.h) to bf16 lines: byte codes to two each, by a table.
static inline void expand_bytes(bf16* dst, const uint8_t* line, int lines, const ByteTable& table) {
  for (int i = 0; i < 32 * lines; ++i)
    for (int half = 0; half < 2; ++half) {
      const int code = line[2 * i + half], at = code & 127;
      dst[i / 32 * 64 + i % 32 + 32 * half].bits =
          static_cast<uint16_t>(table.high[at] << 8 | table.low[at] | (code & 128) << 8);
    }
}
static inline uint16_t scaled_down(uint16_t x, int by) { return static_cast<uint16_t>(x > by ? x - by : 0); }
// MX groups of 32 k: 8 lines of byte codes, or 4 lines of nibbles, and 16 scales each.
static inline void expand_mxfp8(bf16* dst, const uint8_t* line, const uint8_t* e8m0, int groups) {
  for (int g = 0; g < groups; ++g, dst += 512, line += 512, e8m0 += 16) {
    expand_bytes(dst, line, 8, kMxfp8Bytes);
    for (int i = 0; i < 512; ++i) dst[i].bits = scaled_down(dst[i].bits, (191 - e8m0[i % 32 / 2]) * 128);
  }
}
static inline void expand_mxfp4(bf16* dst, const uint8_t* line, const uint8_t* e8m0, int groups) {
  for (int g = 0; g < groups; ++g, dst += 512, line += 256, e8m0 += 16)
    for (int i = 0; i < 128; ++i) {
      const int codes = line[2 * i] | line[2 * i + 1] << 8, by = (191 - e8m0[i % 32 / 2]) * 128;
      for (int n = 0; n < 4; ++n)
        dst[i / 32 * 128 + 32 * n + i % 32].bits = scaled_down(kE2m1Bf16[codes >> (4 * n) & 15], by);
    }
}
// Nearest E4M3 value, |x| <= 448, ties to even.
static inline V round_e4m3(V x) {
  float lane[16];
  store(lane, x);
  for (float& v : lane) v = e4m3_to_float(float_to_e4m3(v));
  return load(lane);
}
// dst[c * ld + r] = row[r][c] of 16 rows of 16 dwords
static inline void transpose16(uint32_t* dst, const uint32_t* const* row, int ld = 16) {
  for (int c = 0; c < 16; ++c)
    for (int r = 0; r < 16; ++r) dst[c * ld + r] = row[r][c];
}
#undef EACH
