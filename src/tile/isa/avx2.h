// isa: name=avx2 rank=1 flags=-O3,-mavx2,-mfma,-mf16c needs=avx2
//
// Two 8-lane registers make one V. No bf16 product: weights are widened and multiplied in f32.

struct bf16 {
  uint16_t bits;
};
using op_t = float;
static constexpr bool kBf16Operands = false;
// 12 accumulators and 2 weights of 16 registers: with 2 rows of 2 panels weights were widened for every two rows.
static constexpr int kBlockRows = 6, kBlockPanels = 1, kSlimRows = 1, kSlimPanels = 4;

struct V {
  __m256 a, b;
};
struct M {
  __m256 a, b;
};

static inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline V set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, V x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
static inline M first_n(int n) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {_mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)),
          _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane))};
}
static inline __m256 from_bits8(uint32_t b) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(b)), lane), lane));
}
static inline M from_bits(uint32_t b) { return {from_bits8(b), from_bits8(b >> 8)}; }
static inline V load_n(const float* p, int n) {
  const M m = first_n(n);
  return {_mm256_maskload_ps(p, _mm256_castps_si256(m.a)),
          n > 8 ? _mm256_maskload_ps(p + 8, _mm256_castps_si256(m.b)) : _mm256_setzero_ps()};
}
static inline void store_n(float* p, V x, int n) {
  const M m = first_n(n);
  _mm256_maskstore_ps(p, _mm256_castps_si256(m.a), x.a);
  if (n > 8) _mm256_maskstore_ps(p + 8, _mm256_castps_si256(m.b), x.b);
}
static inline V operator+(V x, V y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline V operator-(V x, V y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline V operator*(V x, V y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline V operator/(V x, V y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline V reciprocal(V x) { return set1(1.f) / x; }
// Past the caches, a whole line at a time: p 64-byte aligned. Another thread may read it after stores_done().
static inline void store_past(float* p, V x) {
  _mm256_stream_ps(p, x.a);
  _mm256_stream_ps(p + 8, x.b);
}
static inline void stores_done() { _mm_sfence(); }
static inline V fma(V x, V y, V z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
static inline V max(V x, V y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline V min(V x, V y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline V round(V x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline M less(V x, V y) {
  return {_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
static inline V select(M m, V x, V y) { return {_mm256_blendv_ps(y.a, x.a, m.a), _mm256_blendv_ps(y.b, x.b, m.b)}; }
static inline uint32_t bits(M m) {
  return static_cast<uint32_t>(_mm256_movemask_ps(m.a) | _mm256_movemask_ps(m.b) << 8);
}
static inline __m256 exponent(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
static inline V scale2(V p, V n) {
  const V half = round(n * set1(0.5f));
  const V rest = n - half;
  return p * V{exponent(half.a), exponent(half.b)} * V{exponent(rest.a), exponent(rest.b)};
}
static inline float hsum(V x) {
  const __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 t = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_add_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_add_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float hmax(V x) {
  const __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 t = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  t = _mm_max_ps(t, _mm_movehl_ps(t, t));
  return _mm_cvtss_f32(_mm_max_ss(t, _mm_shuffle_ps(t, t, 1)));
}
static inline float widen(bf16 x) {
  const uint32_t b = static_cast<uint32_t>(x.bits) << 16;
  float f;
  __builtin_memcpy(&f, &b, 4);
  return f;
}
static inline __m256 widen8(const bf16* p) {
  return _mm256_castsi256_ps(
      _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), 16));
}
static inline V load(const bf16* p) { return {widen8(p), widen8(p + 8)}; }
static inline V load_n(const bf16* p, int n) {
  alignas(32) bf16 lane[16] = {};
  for (int i = 0; i < 16 && i < n; ++i) lane[i] = p[i];
  return load(lane);
}
static inline __m256 low8(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), 16));
}
static inline __m256 high8(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
                                              _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
static inline V even(const bf16* line) { return {low8(line), low8(line + 16)}; }
static inline V odd(const bf16* line) { return {high8(line), high8(line + 16)}; }

static inline void copy_line(void* to, const void* from) { __builtin_memcpy(to, from, 64); }
// The bf16 values of 32 codes, as their high and their low bytes: a shuffle for each sixteenth of a table.
struct ByteLookup {
  __m256i high[8], low[8];
  explicit ByteLookup(const ByteTable& t) {
    for (int i = 0; i < 8; ++i) {
      high[i] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(t.high + 16 * i)));
      low[i] = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(t.low + 16 * i)));
    }
  }
  void bytes(const uint8_t* codes, __m256i& h, __m256i& l) const {
    const __m256i code = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)), sign = _mm256_set1_epi8(-128);
    const __m256i at = _mm256_andnot_si256(sign, code);
    h = _mm256_and_si256(sign, code);
    l = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {  // bit 7 set, for which a shuffle gives 0, unless the code lies in this sixteenth
      const __m256i place = _mm256_add_epi8(_mm256_xor_si256(at, _mm256_set1_epi8(static_cast<char>(16 * i))), _mm256_set1_epi8(0x70));
      h = _mm256_or_si256(h, _mm256_shuffle_epi8(high[i], place));
      l = _mm256_or_si256(l, _mm256_shuffle_epi8(low[i], place));
    }
  }
};
static inline void expand_e4m3_row(float* dst, const uint8_t* codes, int exponent) {
  const ByteLookup look(kE4m3Bytes);
  const __m256 scale = _mm256_set1_ps(pow2(exponent));
  const auto put = [&](float* to, __m128i words) {
    _mm256_storeu_ps(to, _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16)), scale));
  };
  for (int i = 0; i < 64; i += 32) {
    __m256i h, l;
    look.bytes(codes + i, h, l);
    const __m256i first = _mm256_unpacklo_epi8(l, h), second = _mm256_unpackhi_epi8(l, h);  // of each 128 bits
    put(dst + i, _mm256_castsi256_si128(first)), put(dst + i + 8, _mm256_castsi256_si128(second));
    put(dst + i + 16, _mm256_extracti128_si256(first, 1)), put(dst + i + 24, _mm256_extracti128_si256(second, 1));
  }
}
// Weights of two keys as the product reads them: side by side where operands are bf16, one line after the other here.
static inline void store_pairs(float* line, V x, V y) { store(line, x), store(line + 16, y); }
static inline int compress(float* dst, V x, M m) {
  float lane[16];
  store(lane, x);
  int n = 0;
  for (uint32_t left = bits(m); left; left &= left - 1) dst[n++] = lane[__builtin_ctz(left)];
  return n;
}
static inline int compress(int32_t* dst, const int32_t* src, M m) {
  int n = 0;
  for (uint32_t left = bits(m); left; left &= left - 1) dst[n++] = src[__builtin_ctz(left)];
  return n;
}
static inline int compress_range(int32_t* dst, int first, M m) {
  int n = 0;
  for (uint32_t left = bits(m); left; left &= left - 1) dst[n++] = first + __builtin_ctz(left);
  return n;
}

static inline V round_e4m3(V x) {
  float lane[16];
  store(lane, x);
  for (float& v : lane) v = e4m3_to_float(float_to_e4m3(v));
  return load(lane);
}
static inline void prefetch(const void* p) { __builtin_prefetch(p); }
static inline void expand_bytes(bf16* dst, const uint8_t* line, int lines, const ByteTable& table) {
  const ByteLookup look(table);
  const __m256i upper = _mm256_set1_epi16(static_cast<short>(0xff00));
  for (int i = 0; i < 2 * lines; ++i, line += 32) {
    __m256i h, l;
    look.bytes(line, h, l);
    auto* to = reinterpret_cast<__m256i*>(dst + i / 2 * 64 + i % 2 * 16);
    _mm256_storeu_si256(to, _mm256_or_si256(_mm256_slli_epi16(h, 8), _mm256_andnot_si256(upper, l)));
    _mm256_storeu_si256(to + 2, _mm256_or_si256(_mm256_and_si256(upper, h), _mm256_srli_epi16(l, 8)));
  }
}
// (191 - e) in the exponent of both lanes of columns 8 half .. 8 half + 7
static inline __m256i scale_steps(const uint8_t* e8m0, int half) {
  const __m256i d = _mm256_slli_epi32(
      _mm256_sub_epi32(_mm256_set1_epi32(191),
                       _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(e8m0 + 8 * half)))),
      7);
  return _mm256_or_si256(d, _mm256_slli_epi32(d, 16));
}
static inline void expand_mxfp8(bf16* dst, const uint8_t* line, const uint8_t* e8m0, int groups) {
  for (int g = 0; g < groups; ++g, dst += 512, line += 512, e8m0 += 16) {
    expand_bytes(dst, line, 8, kMxfp8Bytes);
    for (int half = 0; half < 2; ++half) {
      const __m256i steps = scale_steps(e8m0, half);
      for (int i = 0; i < 16; ++i) {
        __m256i* at = reinterpret_cast<__m256i*>(dst + 32 * i + 16 * half);
        _mm256_storeu_si256(at, _mm256_subs_epu16(_mm256_loadu_si256(at), steps));
      }
    }
  }
}
static inline void expand_mxfp4(bf16* dst, const uint8_t* line, const uint8_t* e8m0, int groups) {
  // byte shuffles look up the high and low byte of the bf16 value of 16 nibbles at once
  alignas(16) uint8_t low[16], high[16];
  for (int i = 0; i < 16; ++i) {
    low[i] = static_cast<uint8_t>(kE2m1Bf16[i]);
    high[i] = static_cast<uint8_t>(kE2m1Bf16[i] >> 8);
  }
  const __m256i table_low = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(low)));
  const __m256i table_high = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(high)));
  for (int g = 0; g < groups; ++g, dst += 512, line += 256, e8m0 += 16)
    for (int half = 0; half < 2; ++half) {  // columns 0-7, 8-15
      const __m256i steps = scale_steps(e8m0, half);
      for (int l = 0; l < 4; ++l) {
        const __m256i codes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(line + 64 * l + 32 * half));
        for (int i = 0; i < 4; ++i) {
          __m256i nibble = _mm256_and_si256(_mm256_srli_epi16(codes, 4 * i), _mm256_set1_epi16(15));
          nibble = _mm256_or_si256(nibble, _mm256_slli_epi16(nibble, 8));
          const __m256i v = _mm256_or_si256(
              _mm256_and_si256(_mm256_shuffle_epi8(table_low, nibble), _mm256_set1_epi16(0xff)),
              _mm256_slli_epi16(_mm256_shuffle_epi8(table_high, nibble), 8));
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + 128 * l + 32 * i + 16 * half),
                              _mm256_subs_epu16(v, steps));
        }
      }
    }
}
static inline void transpose16(uint32_t* dst, const uint32_t* const* row, int ld = 16) {
  for (int c = 0; c < 16; ++c)
    for (int r = 0; r < 16; ++r) dst[c * ld + r] = row[r][c];
}
