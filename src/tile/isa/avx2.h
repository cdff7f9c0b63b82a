// isa: name=avx2 rank=1 flags=-O3,-mavx2,-mfma,-mf16c needs=avx2
//
// Two 8-lane registers make one V. No bf16 product: weights are widened and multiplied in f32.

struct bf16 {
  uint16_t bits;
};
using op_t = float;
static constexpr bool kBf16Operands = false;
static constexpr int kBlockRows = 2, kBlockPanels = 2;  // 8 accumulators + 4 weights of 16 registers

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
static inline void expand_e4m3_row(float* dst, const uint8_t* codes, int exponent) {
  for (int i = 0; i < 64; ++i) dst[i] = widen(bf16{kE4m3Bf16.bits[codes[i]]}) * pow2(exponent);
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
  for (int i = 0; i < 32 * lines; ++i)
    for (int half = 0; half < 2; ++half) {
      const int code = line[2 * i + half], at = code & 127;
      dst[i / 32 * 64 + i % 32 + 32 * half].bits =
          static_cast<uint16_t>(table.high[at] << 8 | table.low[at] | (code & 128) << 8);
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
