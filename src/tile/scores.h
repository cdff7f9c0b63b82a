// score[s] = sum_h w_h max(0, q_h . k_s): products of many heads with panels of 16 keys, which never leave
// the nearest cache. A score has one order of additions whatever the number of queries and panels.

static constexpr int kScorePanels = 4;  // of one call: 64 keys

// q [tokens][padded_heads][width], weight [tokens][padded_heads], both of a multiple of kScoreHeads rows:
// padding is zero.
template <class Q>
struct ScoreQueries {
  const Q* q;
  const float* weight;
  int tokens, heads, width;
  const int32_t* bias;  // int8 without tiles: [tokens][heads], -128 sum_k q
  float* product;       // [heads][16] for ISAs that have no registers for it
};

// Panels of one call, and those of the next one, to be fetched meanwhile when few queries make the keys a
// stream from memory (fetch).
template <class K>
struct ScoreKeys {
  const K* panel[kScorePanels];
  const K* next[kScorePanels];
  int panels;
  bool fetch;
};

#ifdef WEFT_BF16_PRODUCT
using Int8Query = int8_t;
using Int8Panel = int8_t;
static inline void store_int8_query(int8_t* row, V x) {
  store_int8(row, x);
}
static inline const int8_t* int8_panel(int8_t*, const std::byte* p, int) {
  return reinterpret_cast<const int8_t*>(p);
}
#else
// Integers up to 127 are exact in bf16, and their sums here in f32.
using Int8Query = float;
using Int8Panel = bf16;
static inline void store_int8_query(float* row, V x) {
  store(row, x);
}
static inline const bf16* int8_panel(bf16* room, const std::byte* p, int width) {
  const auto* lines = reinterpret_cast<const int8_t*>(p);
  for (int k = 0; k < width; ++k)
    for (int c = 0; c < kPanel; ++c)
      room[k / 2 * 2 * kPanel + 2 * c + k % 2].bits =
          float_to_bf16(lines[k / 4 * 4 * kPanel + 4 * c + k % 4]);
  return room;
}
#endif

#ifdef WEFT_TILES

static constexpr int kScoreHeads = 32;  // rows of one product: two tiles

// Tokens of few heads share a product.
static inline int padded_heads(int heads) {
  return heads <= 8 ? 8 : heads <= 16 ? 16 : round_up(heads, kScoreHeads);
}

template <int C, int A, int B>
static inline void tile_product(bf16) {
  tile_dot<C, A, B>();
}
template <int C, int A, int B>
static inline void tile_product(int8_t) {
  tile_dot_int8<C, A, B>();
}
static inline V tile_value(const float* c, bf16) {
  return load(c);
}
static inline V tile_value(const float* c, int8_t) {
  return load_int(c);
}

// Products of two head tiles and two panels wait in L1 while the next ones are made: tile and vector units
// work side by side.
template <class Q>
struct WaitingScores {
  const float* c = nullptr;  // [2 head tiles][2 panels][16][16]
  const float* weight;
  float* out;
  int heads, tokens;
  int each;          // quarters of a token: 1, 2 or 4
  bool first, last;  // of a token's heads
  V sum[4];          // (head tile, panel)

  // Eight heads of both panels, s = 0..3.
  void quarter(int s) {
    if (!c) return;
    V* own = sum + s / 2 * 2;
    if (first && s % each == 0) own[0] = own[1] = zero();
    if (first && s == 0) sum[2] = sum[3] = zero();
    if (heads >= each * 8)
      rows<true>(s, 8);
    else
      rows<false>(s, heads - 8 * (s % each));
    if (!last || s % each != each - 1 || s / each >= tokens) return;
    float* to = out + s / each * kScorePanels * kPanel;
    store(to, each == 4 ? sum[0] + sum[2] : own[0]);
    store(to + kPanel, each == 4 ? sum[1] + sum[3] : own[1]);
  }
  template <bool kAll>
  void rows(int s, int n) {
    const float *c0 = c + 512 * (s / 2) + 128 * (s % 2), *w = weight + 8 * s;
    V s0 = sum[s / 2 * 2], s1 = sum[s / 2 * 2 + 1];
    for (int r = 0; r < 8; ++r) {
      if (!kAll && r >= n) break;
      const V x = set1(w[r]);
      s0 = fma(x, max(zero(), tile_value(c0 + kPanel * r, Q{})), s0);
      s1 = fma(x, max(zero(), tile_value(c0 + 256 + kPanel * r, Q{})), s1);
    }
    sum[s / 2 * 2] = s0;
    sum[s / 2 * 2 + 1] = s1;
  }
};

// score [tokens][kScorePanels][16]
template <class Q>
static inline void score_panels(float* score, const ScoreQueries<Q>& s, const ScoreKeys<Q>& keys) {
  constexpr int kTileK = 64 / static_cast<int>(sizeof(Q));
  alignas(64) float c[2][1024];
  WaitingScores<Q> waiting;
  const int padded = padded_heads(s.heads), together = max_int(1, kScoreHeads / padded);
  const int steps = s.width / kTileK;
  const long ld = s.width * static_cast<long>(sizeof(Q));
  int parity = 0;
  for (int t = 0; t < s.tokens; t += together)
    for (int p = 0; p < keys.panels; p += 2) {
      const Q *b0 = keys.panel[p], *b1 = p + 1 < keys.panels ? keys.panel[p + 1] : b0;
      const Q* const* ahead = p + 2 < keys.panels ? keys.panel + p + 2 : keys.next;
      for (int h = 0; h < s.heads; h += kScoreHeads) {
        const Q* a0 = s.q + (static_cast<size_t>(t) * padded + h) * s.width;
        const Q* a1 = a0 + 16 * s.width;
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int i = 0, done = 0; i < steps; ++i) {
          const int k = i * kTileK;
          tile_load<4>(a0 + k, ld);
          tile_load<6>(b0 + k * kPanel, 64);
          tile_load<7>(b1 + k * kPanel, 64);
          tile_load<5>(a1 + k, ld);
          tile_product<0, 4, 6>(Q{}), tile_product<1, 4, 7>(Q{}), tile_product<2, 5, 6>(Q{}),
              tile_product<3, 5, 7>(Q{});
          if (keys.fetch && h == 0)
            for (int line = 0; line < 16; ++line) {
              __builtin_prefetch(ahead[0] + (k + line * kTileK / kPanel) * kPanel, 0, 2);
              __builtin_prefetch(ahead[1] + (k + line * kTileK / kPanel) * kPanel, 0, 2);
            }
          for (const int end = 4 * (i + 1) / steps; done < end; ++done) waiting.quarter(done);
        }
        float* to = c[parity];
        parity ^= 1;
        tile_store<0>(to, 64), tile_store<1>(to + 256, 64), tile_store<2>(to + 512, 64),
            tile_store<3>(to + 768, 64);
        waiting.c = to;
        waiting.weight = s.weight + t * padded + h;
        waiting.out = score + (t * kScorePanels + p) * kPanel;
        waiting.heads = s.heads - h, waiting.tokens = min_int(together, s.tokens - t);
        waiting.each = 4 / together;
        waiting.first = h == 0, waiting.last = h + kScoreHeads >= s.heads;
      }
    }
  for (int i = 0; i < 4; ++i) waiting.quarter(i);
}

#else

static constexpr int kScoreHeads = 1;
static inline int padded_heads(int heads) {
  return heads;
}

#ifdef WEFT_BF16_PRODUCT

// Sixteen heads of one panel: 16 accumulators, and each line of the panel is loaded once. Two panels side by
// side lost 10-15 % on Zen 4 from memory.
struct HeadSums {
  V sum = zero();
  template <int H>
  void add(const bf16* q, const float* weight, const int32_t*, int width, const bf16* panel,
           const bf16* ahead) {
    V acc[H];
    for (int h = 0; h < H; ++h) acc[h] = zero();
    for (int k = 0; k < width; k += 2) {
      const Line line = load_line(panel + k * kPanel);
      if (ahead) __builtin_prefetch(ahead + k * kPanel, 0, 3);
      for (int h = 0; h < H; ++h) acc[h] = dot_pair(acc[h], q + h * width + k, line);
    }
    for (int h = 0; h < H; ++h) sum = fma(set1(weight[h]), max(zero(), acc[h]), sum);
  }
  template <int H>
  void add(const int8_t* q, const float* weight, const int32_t* bias, int width, const int8_t* panel,
           const int8_t* ahead) {
    Line acc[H];
    for (int h = 0; h < H; ++h) acc[h] = ints(bias[h]);
    for (int k = 0; k < width; k += 4) {
      const Line line = biased_line(panel + k * kPanel);
      if (ahead) __builtin_prefetch(ahead + k * kPanel, 0, 3);
      for (int h = 0; h < H; ++h) dot_quad(acc[h], line, q + h * width + k);
    }
    for (int h = 0; h < H; ++h) sum = fma(set1(weight[h]), max(zero(), to_float(acc[h])), sum);
  }
};

// score [tokens][kScorePanels][16]
template <class Q>
static inline void score_panels(float* score, const ScoreQueries<Q>& s, const ScoreKeys<Q>& keys) {
  for (int t = 0; t < s.tokens; ++t)
    for (int p = 0; p < keys.panels; ++p) {
      HeadSums sums;
      const Q* ahead = keys.fetch ? (p + 1 < keys.panels ? keys.panel[p + 1] : keys.next[0]) : nullptr;
      int h = 0;
      const auto add = [&]<int H>() {
        const int row = t * s.heads + h;
        sums.add<H>(s.q + static_cast<size_t>(row) * s.width, s.weight + row, s.bias + row, s.width,
                    keys.panel[p], h == 0 ? ahead : nullptr);
        h += H;
      };
      while (h + 16 <= s.heads) add.template operator()<16>();
      while (h + 4 <= s.heads) add.template operator()<4>();
      while (h < s.heads) add.template operator()<1>();
      store(score + (t * kScorePanels + p) * kPanel, sums.sum);
    }
}

#endif
#endif

#ifndef WEFT_BF16_PRODUCT

// f32 queries; panels of f32 lines, or of bf16 pairs where a narrow format was expanded.
static inline void score_product(float* c, const float* q, const float* panel, int heads, int width) {
  mma(c, kPanel, q, width, panel, 0, kPanel, heads, 1, width, false);
}
static inline void score_product(float* c, const float* q, const bf16* panel, int heads, int width) {
  mma(c, kPanel, q, width, panel, 0, heads, 1, width, false);
}
template <class K>
static inline void score_panels(float* score, const ScoreQueries<float>& s, const ScoreKeys<K>& keys) {
  for (int t = 0; t < s.tokens; ++t)
    for (int p = 0; p < keys.panels; ++p) {
      score_product(s.product, s.q + static_cast<size_t>(t) * s.heads * s.width, keys.panel[p], s.heads,
                    s.width);
      V sum = zero();
      for (int h = 0; h < s.heads; ++h)
        sum = fma(set1(s.weight[t * s.heads + h]), max(zero(), load(s.product + h * kPanel)), sum);
      store(score + (t * kScorePanels + p) * kPanel, sum);
    }
}

#endif
