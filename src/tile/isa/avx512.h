// isa: name=avx512 rank=2 flags=-O3,-mavx512f,-mavx512bw,-mavx512dq,-mavx512vl,-mavx512cd,-mavx512bf16,-mavx512vnni,-mavx512vbmi,-mavx2,-mfma,-mf16c needs=avx512
//
// One register is one V; bf16 pairs multiply with vdpbf16ps. Zen 4, Zen 5, Sapphire Rapids and later.

#define WEFT_BF16_PRODUCT 1
#define WEFT_INT8_PRODUCT 1
struct bf16 {
  uint16_t bits;
};
using op_t = bf16;
static constexpr bool kBf16Operands = true;
// 16 accumulators: 12 x 2, 16 x 1 and more rows lost 5-15 % on Zen 4.
static constexpr int kBlockRows = 8, kBlockPanels = 2, kSlimRows = 4, kSlimPanels = 4;
static constexpr int kRowsPanels = 1;  // of codes beside 8 rows

using V = __m512;
struct M {
  __mmask16 m;
};

static inline V zero() { return _mm512_setzero_ps(); }
static inline V set1(float x) { return _mm512_set1_ps(x); }
static inline V load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, V x) { _mm512_storeu_ps(p, x); }
static inline M first_n(int n) {
  return {static_cast<__mmask16>(n >= 16 ? 0xffff : n <= 0 ? 0 : (1u << n) - 1)};
}
static inline M from_bits(uint32_t b) { return {static_cast<__mmask16>(b)}; }
static inline V load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_n(n).m, p); }
static inline void store_n(float* p, V x, int n) { _mm512_mask_storeu_ps(p, first_n(n).m, x); }
// Past the caches, a whole line at a time: p 64-byte aligned. Another thread may read it after stores_done().
static inline void store_past(float* p, V x) { _mm512_stream_ps(p, x); }
static inline void stores_done() { _mm_sfence(); }
static inline V fma(V x, V y, V z) { return _mm512_fmadd_ps(x, y, z); }
static inline V max(V x, V y) { return _mm512_max_ps(x, y); }
static inline V min(V x, V y) { return _mm512_min_ps(x, y); }
static inline V round(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline M less(V x, V y) { return {_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ)}; }
static inline V select(M m, V x, V y) { return _mm512_mask_blend_ps(m.m, y, x); }
static inline uint32_t bits(M m) { return m.m; }
static inline V scale2(V p, V n) { return _mm512_scalef_ps(p, n); }
static inline float hsum(V x) {
  const __m256 s = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float hmax(V x) { return _mm512_reduce_max_ps(x); }
// 1 / x within 1.5 ulp for normal x: the divider takes 16 cycles, this 3 instructions.
static inline V reciprocal(V x) {
  const V r = _mm512_rcp14_ps(x);
  return fma(r, fma(x, zero() - r, set1(1.f)), r);
}
// 1 / sqrt(x) within 2 ulp for normal x
static inline V rsqrt(V x) {
  const V r = _mm512_rsqrt14_ps(x);
  return fma(r * set1(0.5f), fma(x * r, zero() - r, set1(1.f)), r);
}
// For what is rounded to bf16 next. N values at once, step by step: one chain alone waits for itself.
// 1 / (1 + 2^x) within 2^-12 of itself: the sigmoid of -x ln 2. scalef takes the floor of the exponent and saturates, so
// nothing needs clamping.
template <int N>
WEFT_INLINE void sigmoid_base2(V (&x)[N]) {
  V r[N], p[N];
  for (int i = 0; i < N; ++i) r[i] = _mm512_reduce_ps(x[i], _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  for (int i = 0; i < N; ++i) p[i] = fma(set1(0.0780245215f), r[i], set1(0.226067185f));
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], set1(0.695833504f));
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], r[i], set1(0.999925196f));
  for (int i = 0; i < N; ++i) p[i] = set1(1.f) + scale2(p[i], x[i]);
  for (int i = 0; i < N; ++i) x[i] = _mm512_rcp14_ps(p[i]);
}
// 2^x for |x| < 2^22. Its distance from 1 is right within 2^-15.8 of itself for |x| <= 1/2: products of
// thousands of slow decays stay what they should be.
template <int N>
WEFT_INLINE void exp2_near_1(V (&x)[N]) {
  const V magic = set1(0x1.8p23f);
  V n[N], p[N];
  for (int i = 0; i < N; ++i) n[i] = (x[i] + magic) - magic;
  for (int i = 0; i < N; ++i) x[i] = x[i] - n[i];
  for (int i = 0; i < N; ++i) p[i] = fma(set1(0.00965671029f), x[i], set1(0.0558382829f));
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], set1(0.240225301f));
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], set1(0.693136734f));
  for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], set1(1.f));
  for (int i = 0; i < N; ++i) x[i] = scale2(p[i], n[i]);
}
// Within 2^-11.8, in 8 instructions for 13: three look-ups for a polynomial, a power of two and a reciprocal.
template <int N>
WEFT_INLINE void sigmoid_lookup(V (&x)[N]) {
  constexpr float kPieces = 1 / static_cast<float>(LogisticTable::kWidth), kEdge = 15.5f / kPieces;
  const V magic = set1(0x1.8p23f);  // adding it leaves the nearest integer in the low bits
  const auto piece = [](const float* c, V k) {
    return _mm512_permutex2var_ps(load(c), _mm512_castps_si512(k), load(c + 16));
  };
  V k[N], p[N];
  for (int i = 0; i < N; ++i) x[i] = min(set1(kEdge - 0.001f), max(set1(0.001f - kEdge), x[i]));
  for (int i = 0; i < N; ++i) k[i] = fma(x[i], set1(kPieces), magic);
  for (int i = 0; i < N; ++i) p[i] = fma(piece(kLogistic.c[2], k[i]), x[i], piece(kLogistic.c[1], k[i]));
  for (int i = 0; i < N; ++i) x[i] = fma(p[i], x[i], piece(kLogistic.c[0], k[i]));
}

// A register and a full store: the masked store of the compressed form is microcode on Zen 4.
static inline int compress(float* dst, V x, M m) {
  _mm512_storeu_ps(dst, _mm512_maskz_compress_ps(m.m, x));
  return __builtin_popcount(m.m);
}
static inline int compress(int32_t* dst, const int32_t* src, M m) {
  _mm512_storeu_si512(dst, _mm512_maskz_compress_epi32(m.m, _mm512_loadu_si512(src)));
  return __builtin_popcount(m.m);
}
static inline int compress_range(int32_t* dst, int first, M m) {
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_si512(dst, _mm512_maskz_compress_epi32(m.m, _mm512_add_epi32(lane, _mm512_set1_epi32(first))));
  return __builtin_popcount(m.m);
}

static inline float widen(bf16 x) {
  const uint32_t b = static_cast<uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &b, 4);
  return f;
}
static inline __m512i raw(const void* p) { return _mm512_loadu_si512(p); }
static inline V load(const bf16* p) {
  return _mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))), 16));
}
static inline V load_n(const bf16* p, int n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_n(n).m, p)), 16));
}
static inline void store(bf16* p, V x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
static inline void store_n(bf16* p, V x, int n) {
  _mm256_mask_storeu_epi16(p, first_n(n).m, reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
}
static inline V even(const bf16* line) { return _mm512_castsi512_ps(_mm512_slli_epi32(raw(line), 16)); }
static inline V odd(const bf16* line) {
  return _mm512_castsi512_ps(_mm512_and_si512(raw(line), _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// the same of 32 f32 values
static inline V even(const float* p) {
  const __m512i at = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  return _mm512_permutex2var_ps(load(p), at, load(p + 16));
}
static inline V odd(const float* p) {
  const __m512i at = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  return _mm512_permutex2var_ps(load(p), at, load(p + 16));
}
// acc[c] += a[0] line[c][0] + a[1] line[c][1]
using Line = __m512i;
static inline Line load_line(const bf16* p) { return raw(p); }
static inline V dot_pair(V acc, const bf16* a, Line line) {
  int pair;
  __builtin_memcpy(&pair, a, 4);
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(_mm512_set1_epi32(pair)), reinterpret_cast<__m512bh>(line));
}
// acc[c] += a[0] line[c][0] + a[1] line[c][1], with b in the upper half
static inline V dot_pairs(V acc, const bf16* a, const bf16* b, Line line) {
  int low, high;
  __builtin_memcpy(&low, a, 4), __builtin_memcpy(&high, b, 4);
  const __m512i pair = _mm512_mask_set1_epi32(_mm512_set1_epi32(low), 0xff00, high);
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(pair), reinterpret_cast<__m512bh>(line));
}
static inline void store_halves(float* low, float* high, V x) {
  _mm256_storeu_ps(low, _mm512_castps512_ps256(x)), _mm256_storeu_ps(high, _mm512_extractf32x8_ps(x, 1));
}
// acc[c] += four unsigned bytes of a times four signed ones of b, in int32. As assembly: GCC 12 spills accumulators that
// start from one value (2.6 times slower). On a copy: an operand that is an array's element keeps the array in memory.
static inline void dot_quads(Line& acc, Line a, Line b) {
  Line sum = acc;
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
  acc = sum;
}
static inline void store(bf16* p, V x, V y) {  // 32 values
  _mm512_storeu_si512(p, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
}
// The same with signed lines: 128 is added to them here and taken off in the first value of acc.
static inline Line ints(int32_t x) { return _mm512_set1_epi32(x); }
static inline Line biased_line(const int8_t* p) { return _mm512_xor_si512(raw(p), _mm512_set1_epi8(-128)); }
static inline Line dot_quad(Line acc, Line biased, const int8_t* a) {
  int quad;
  __builtin_memcpy(&quad, a, 4);
  dot_quads(acc, biased, _mm512_set1_epi32(quad));
  return acc;
}
static inline V to_float(Line x) { return _mm512_cvtepi32_ps(x); }
static inline V load_int(const float* p) { return _mm512_cvtepi32_ps(raw(p)); }
// line[2 i] = x[i], line[2 i + 1] = y[i]
static inline void store_pairs(bf16* line, V x, V y) {
  const __m512i low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
  const __m512i high = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(y)));
  _mm512_storeu_si512(line, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
}
static inline Line pair_rounded(V x, V y) {  // the same line
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i turn = _mm512_or_si512(lane, _mm512_slli_epi32(_mm512_add_epi32(lane, _mm512_set1_epi32(16)), 16));
  return _mm512_permutexvar_epi16(turn, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(y, x)));
}
// 16 columns of two rows side by side: one line of a panel whose k runs along rows
static inline void interleave(bf16* line, const bf16* row0, const bf16* row1) {
  const __m512i x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row0)));
  const __m512i y = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row1)));
  _mm512_storeu_si512(line, _mm512_or_si512(x, _mm512_slli_epi32(y, 16)));
}
#ifndef WEFT_TILES
// Two lines of 32 columns, a look-up in both rows for each. On Intel that is three turns of the one shuffle port.
static inline void pair_lines(Line& line0, Line& line1, const bf16* row0, const bf16* row1) {
  const __m512i low = _mm512_cvtepu16_epi32(_mm256_setr_epi16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
  const __m512i at = _mm512_or_si512(low, _mm512_slli_epi32(_mm512_add_epi32(low, _mm512_set1_epi32(32)), 16));
  const __m512i x = raw(row0), y = raw(row1);
  line0 = _mm512_permutex2var_epi16(x, at, y);
  line1 = _mm512_permutex2var_epi16(x, _mm512_add_epi16(at, _mm512_set1_epi16(16)), y);
}
#endif

// The same from f32. In integers: cvtne2ps and a permute would take three turns of the one shuffle port. Ties away
// from zero.
static inline void pair_line(bf16* line, V row0, V row1) {
  const __m512i half = _mm512_set1_epi32(0x8000);
  const __m512i x = _mm512_srli_epi32(_mm512_add_epi32(_mm512_castps_si512(row0), half), 16);
  const __m512i y = _mm512_add_epi32(_mm512_castps_si512(row1), half);
  const __m512i high = _mm512_set1_epi32(static_cast<int>(0xffff0000));
  _mm512_storeu_si512(line, _mm512_ternarylogic_epi32(x, y, high, 0xf8));  // x | (y & high)
}
// out[i] = sum of the lanes of row i of 16
static inline void sums16(float* out, const float* rows) {
  __m512 a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i) {
    const __m512 x = load(rows + 32 * i), y = load(rows + 32 * i + 16);
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
  for (int i = 0; i < 4; ++i) {
    const __m512d x = _mm512_castps_pd(a[2 * i]), y = _mm512_castps_pd(a[2 * i + 1]);
    b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
  }
  for (int i = 0; i < 2; ++i)
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
  store(out, _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88), _mm512_shuffle_f32x4(c[0], c[1], 0xdd)));
}

static inline void store_line(bf16* p, Line x) { _mm512_storeu_si512(p, x); }
static inline void prefetch(const void* p) { __builtin_prefetch(p); }
// A line of codes takes several to ten times as long to expand as to arrive, so the hardware's own prefetch runs too
// close behind: 1 KB ahead (T0) is worth a fifth of bandwidth.
static constexpr int kCodesAhead = 1024;
struct ByteLookup {
  __m512i h0, h1, l0, l1;
  explicit ByteLookup(const ByteTable& t) : h0(raw(t.high)), h1(raw(t.high + 64)), l0(raw(t.low)), l1(raw(t.low + 64)) {}
  // The bytes of 64 values of bf16; look-ups ignore bit 7. On Intel the look-up in two registers takes three turns, two
  // of them on the one shuffle port; on AMD it is one instruction like the other.
  void halves(__m512i code, __m512i& high, __m512i& low) const {
#ifdef WEFT_TILES
    const __mmask64 upper = _mm512_test_epi8_mask(code, _mm512_set1_epi8(64));
    high = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(code, h0), upper, code, h1);
    low = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(code, l0), upper, code, l1);
#else
    high = _mm512_permutex2var_epi8(h0, code, h1), low = _mm512_permutex2var_epi8(l0, code, l1);
#endif
    high = _mm512_ternarylogic_epi64(high, code, _mm512_set1_epi8(-128), 0xf8);  // x | (code & sign)
  }
  // the lines of the codes in the low and in the high bytes of each lane
  void expand(__m512i code, __m512i& first, __m512i& second) const {
    const __m512i byte = _mm512_set1_epi16(0x00ff);
    __m512i high, low;
    halves(code, high, low);
    first = _mm512_ternarylogic_epi64(_mm512_slli_epi16(high, 8), low, byte, 0xf8);    // x | (low & byte)
    second = _mm512_ternarylogic_epi64(_mm512_srli_epi16(low, 8), high, byte, 0xf4);   // x | (high & ~byte)
  }
  // Both lines as f32 with k and k + 1 of a column in neighbouring lanes: columns 0 1 4 5 8 9 12 13 of the first and the
  // second line, then the other columns'.
  void widen(__m512i code, V& a0, V& a1, V& b0, V& b1) const {
    const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
    __m512i high, low;
    halves(code, high, low);
    const __m512i a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
    a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), a1 = _mm512_castsi512_ps(_mm512_and_si512(a, upper));
    b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), b1 = _mm512_castsi512_ps(_mm512_and_si512(b, upper));
  }
};
static inline V repeat_pair(const float* x) {  // x[0], x[1], x[0], ...
  double pair;
  __builtin_memcpy(&pair, x, 8);
  return _mm512_castpd_ps(_mm512_set1_pd(pair));
}
// Of ByteLookup::widen's lanes: each column's two, in the order of columns
static inline V add_pairs(V a, V b) { return _mm512_shuffle_ps(a, b, 0x88) + _mm512_shuffle_ps(a, b, 0xdd); }
// Nibble I of each 32-bit lane, looked up: the index ignores what lies above it.
template <int I>
static inline V nibble(__m512i code, V table) {
  return _mm512_permutexvar_ps(I ? _mm512_srli_epi32(code, 4 * I) : code, table);
}
static inline V powers(const uint8_t* e8m0) {  // 2^(e - 127) of 16 exponents
  const __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(e8m0)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(e, 23));
}
static inline void expand_bytes(bf16* dst, const uint8_t* line, int lines, const ByteTable& table) {
  const ByteLookup look(table);
  for (int i = 0; i < lines; ++i) {
    prefetch(line + 64 * i + kCodesAhead);
    __m512i a, b;
    look.expand(raw(line + 64 * i), a, b);
    _mm512_storeu_si512(dst + 64 * i, a);
    _mm512_storeu_si512(dst + 64 * i + 32, b);
  }
}
static inline V round_e4m3(V x) {
  const __m512i b = _mm512_castps_si512(x), body = _mm512_set1_epi32(0x7fffffff), i = _mm512_and_si512(b, body);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(i, 20), _mm512_set1_epi32(1));
  const __m512i three = _mm512_andnot_si512(_mm512_set1_epi32(0xfffff), _mm512_add_epi32(_mm512_add_epi32(i, odd), _mm512_set1_epi32(0x7ffff)));
  const V size = _mm512_castsi512_ps(i), unit = set1(24576.f);  // below 2^-6: multiples of 2^-9
  const V y = select(less(size, set1(0x1p-6f)), (size + unit) - unit, _mm512_castsi512_ps(three));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(y), _mm512_andnot_si512(body, b)));
}
static inline void store_int8(int8_t* p, V x) {  // integers in -127..127
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)));
}
static inline void copy_line(void* to, const void* from) { _mm512_storeu_si512(to, raw(from)); }
// 64 codes in order, times 2^exponent. A NaN code must come with an exponent of 0.
static inline void expand_e4m3_row(bf16* dst, const uint8_t* codes, int exponent) {
  const ByteLookup look(kE4m3Bytes);
  // unpacking interleaves inside 128-bit lanes: quadwords go where they come out in order
  const __m512i code = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), raw(codes));
  const __m512i high = _mm512_permutex2var_epi8(look.h0, code, look.h1), low = _mm512_permutex2var_epi8(look.l0, code, look.l1);
  const __m512i add = _mm512_set1_epi16(static_cast<short>(exponent * 128)), none = _mm512_setzero_si512();
  const __m512i sign = _mm512_set1_epi16(-0x8000);
  const __m512i part[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  const __m512i signs[2] = {_mm512_unpacklo_epi8(none, code), _mm512_unpackhi_epi8(none, code)};
  for (int i = 0; i < 2; ++i) {
    const __m512i x = _mm512_mask_add_epi16(part[i], _mm512_test_epi16_mask(part[i], part[i]), part[i], add);
    _mm512_storeu_si512(dst + 32 * i, _mm512_ternarylogic_epi64(x, signs[i], sign, 0xf8));  // x | (signs & sign)
  }
}
// (191 - e) in the exponent of both lanes of a column
static inline __m512i scale_steps(const uint8_t* e8m0) {
  const __m512i d = _mm512_slli_epi32(
      _mm512_sub_epi32(_mm512_set1_epi32(191),
                       _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(e8m0)))),
      7);
  return _mm512_or_si512(d, _mm512_slli_epi32(d, 16));
}
static inline Line scale_down(Line line, Line steps) { return _mm512_subs_epu16(line, steps); }
static inline void expand_mxfp8(bf16* dst, const uint8_t* line, const uint8_t* e8m0, int groups) {
  const ByteLookup look(kMxfp8Bytes);
  for (int g = 0; g < groups; ++g, e8m0 += 16) {
    const __m512i steps = scale_steps(e8m0);
    for (int i = 0; i < 8; ++i, line += 64, dst += 64) {
      prefetch(line + kCodesAhead);
      __m512i a, b;
      look.expand(raw(line), a, b);
      _mm512_storeu_si512(dst, scale_down(a, steps));
      _mm512_storeu_si512(dst + 32, scale_down(b, steps));
    }
  }
}
static inline __m512i e2m1_table() {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(kE2m1Bf16));
  return _mm512_inserti64x4(_mm512_castsi256_si512(half), half, 1);  // 16 entries twice: bit 4 is free
}
template <int I>
static inline __m512i e2m1_line(__m512i code, __m512i table) {
  return _mm512_permutexvar_epi16(I ? _mm512_srli_epi16(code, 4 * I) : code, table);
}
static inline void expand_mxfp4(bf16* dst, const uint8_t* line, const uint8_t* e8m0, int groups) {
  const __m512i table = e2m1_table();
  for (int g = 0; g < groups; ++g, e8m0 += 16) {
    const __m512i steps = scale_steps(e8m0);
    for (int i = 0; i < 4; ++i, line += 64, dst += 128) {
      prefetch(line + kCodesAhead);
      const __m512i code = raw(line);
      _mm512_storeu_si512(dst, scale_down(e2m1_line<0>(code, table), steps));
      _mm512_storeu_si512(dst + 32, scale_down(e2m1_line<1>(code, table), steps));
      _mm512_storeu_si512(dst + 64, scale_down(e2m1_line<2>(code, table), steps));
      _mm512_storeu_si512(dst + 96, scale_down(e2m1_line<3>(code, table), steps));
    }
  }
}
static inline void transpose16(uint32_t* dst, const uint32_t* const* row, int ld = 16) {
  __m512i r[16], a[16], b[16];
  for (int i = 0; i < 16; ++i) r[i] = raw(row[i]);
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    a[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
    b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
    b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
    b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
  }
  // b[4 i + j], 128-bit lane l: column 4 l + j of rows 4 i .. 4 i + 3
  for (int j = 0; j < 4; ++j) {
    const __m512i c0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0x88), c1 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0x88);
    const __m512i d0 = _mm512_shuffle_i32x4(b[j], b[4 + j], 0xdd), d1 = _mm512_shuffle_i32x4(b[8 + j], b[12 + j], 0xdd);
    _mm512_storeu_si512(dst + ld * j, _mm512_shuffle_i32x4(c0, c1, 0x88));
    _mm512_storeu_si512(dst + ld * (4 + j), _mm512_shuffle_i32x4(d0, d1, 0x88));
    _mm512_storeu_si512(dst + ld * (8 + j), _mm512_shuffle_i32x4(c0, c1, 0xdd));
    _mm512_storeu_si512(dst + ld * (12 + j), _mm512_shuffle_i32x4(d0, d1, 0xdd));
  }
}
