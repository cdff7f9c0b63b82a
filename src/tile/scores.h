// score[s] = sum_h w_h max(0, q_h . k_s): products of many heads with panels of 16 keys, which never leave
// the nearest cache. A score has one order of additions whatever the number of queries and panels.

// Panels of one call at most, and for so many rows. On tiles the vector work runs two products behind, so
// every call ends with some that has no company: with eight panels 8 % of a row's time, with sixteen 4 (int8
// keys, Emerald Rapids). The keys of many rows had better stay in L1.
#ifdef WEFT_TILES
static constexpr int kScorePanels = 16;
static inline int score_panels_of(int rows) {
  return rows <= 2 ? kScorePanels : 8;
}
#else
static constexpr int kScorePanels = 4;
static inline int score_panels_of(int) {
  return kScorePanels;
}
#endif

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
  const K* next[kScorePanels];  // behind these panels
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

// Products of two head tiles and two panels, in tiles or in L1.
struct Products2x2 {
  float* c = nullptr;   // [2 head tiles][2 panels][16][16]
  const float* weight;  // [32]
  float* out;           // [tokens][kScorePanels][16], two panels of it
  int tokens;
  bool first, last;  // of a token's heads
};

// Sums them a few heads at a time behind every tile product of a later group: tile and vector units work side
// by side only if their instructions are neighbours.
template <class Q>
struct ScoreSums {
  int each;                        // heads of a token in a group
  V sum0 = zero(), sum1 = zero();  // of both panels

  // R heads: share J of four in k step i
  template <int R, int J>
  inline __attribute__((always_inline)) void step(const Products2x2& x, int i) {
    const int head = (4 * i + J) * R;
    if (!x.c || head >= kScoreHeads) return;
    if (J * R % 8 == 0 && x.first && (head & (each - 1)) == 0) sum0 = sum1 = zero();
    const float *c = x.c + head / 16 * 512 + head % 16 * kPanel, *w = x.weight + head;
    for (int r = 0; r < R; ++r) {
      const V weight = set1(w[r]);
      sum0 = fma(weight, max(zero(), tile_value(c + kPanel * r, Q{})), sum0);
      sum1 = fma(weight, max(zero(), tile_value(c + 256 + kPanel * r, Q{})), sum1);
    }
    if ((J + 1) * R % 8 != 0 || !x.last || ((head + R) & (each - 1)) != 0) return;
    const int token = (head + R) / each - 1;
    if (token >= x.tokens) return;
    float* to = x.out + token * kScorePanels * kPanel;
    store(to, sum0), store(to + kPanel, sum1);
  }
  template <int R>
  void all(const Products2x2& x) {
    for (int i = 0; i < 8 / R; ++i) step<R, 0>(x, i), step<R, 1>(x, i), step<R, 2>(x, i), step<R, 3>(x, i);
  }
};

// A finished tile makes way for the first product of the next group.
template <int C, int A, int B, class Q>
static inline void product_of(float* finished, bool first) {
  if (first) {
    if (finished) tile_store<C>(finished + 256 * C, 64);
    tile_zero<C>();
  }
  tile_product<C, A, B>(Q{});
}

// What makes the panels of a call, a piece behind every second product: ready(p) ends when panels p and p + 1
// are made.
struct PanelsAreMade {
  void ready(int) {}
  void step(int) {}
};

// R: heads summed behind each tile product
template <int R, class Q, class Maker>
static inline void score_groups(float* score, const ScoreQueries<Q>& s, const ScoreKeys<Q>& keys,
                                Maker& maker) {
  constexpr int kTileK = 64 / static_cast<int>(sizeof(Q));
  alignas(64) float c[2][1024];
  Products2x2 made, stored;  // of the last group, in tiles, and of the one before, in L1
  const int padded = padded_heads(s.heads), together = max_int(1, kScoreHeads / padded);
  const int steps = s.width / kTileK;
  const long ld = s.width * static_cast<long>(sizeof(Q));
  ScoreSums<Q> sums{kScoreHeads / together};
  int turn = 0;
  for (int t = 0; t < s.tokens; t += together)
    for (int p = 0; p < keys.panels; p += 2) {
      const Q *b0 = keys.panel[p], *b1 = p + 1 < keys.panels ? keys.panel[p + 1] : b0;
      const Q* const* ahead = p + 2 < keys.panels ? keys.panel + p + 2 : keys.next;
      maker.ready(p);
      for (int h = 0; h < s.heads; h += kScoreHeads) {
        const Q* a0 = s.q + (static_cast<size_t>(t) * padded + h) * s.width;
        const Q* a1 = a0 + 16 * s.width;
        for (int i = 0; i < steps; ++i) {
          const int k = i * kTileK;
          tile_load<4>(a0 + k, ld);
          tile_load<6>(b0 + k * kPanel, 64);
          product_of<0, 4, 6, Q>(made.c, i == 0);
          sums.template step<R, 0>(stored, i);
          tile_load<7>(b1 + k * kPanel, 64);
          product_of<1, 4, 7, Q>(made.c, i == 0);
          sums.template step<R, 1>(stored, i);
          maker.step(p);
          tile_load<5>(a1 + k, ld);
          product_of<2, 5, 6, Q>(made.c, i == 0);
          sums.template step<R, 2>(stored, i);
          product_of<3, 5, 7, Q>(made.c, i == 0);
          sums.template step<R, 3>(stored, i);
          maker.step(p);
          if (keys.fetch && h == 0)
            for (int line = 0; line < 16; ++line) {
              __builtin_prefetch(ahead[0] + (k + line * kTileK / kPanel) * kPanel, 0, 2);
              __builtin_prefetch(ahead[1] + (k + line * kTileK / kPanel) * kPanel, 0, 2);
            }
        }
        stored = made;
        made = {c[turn],
                s.weight + t * padded + h,
                score + (t * kScorePanels + p) * kPanel,
                min_int(together, s.tokens - t),
                h == 0,
                h + kScoreHeads >= s.heads};
        turn ^= 1;
      }
    }
  sums.template all<8>(stored);
  tile_store<0>(made.c, 64), tile_store<1>(made.c + 256, 64), tile_store<2>(made.c + 512, 64),
      tile_store<3>(made.c + 768, 64);
  sums.template all<8>(made);
}

// score [tokens][kScorePanels][16]
template <class Q, class Maker>
static inline void score_panels(float* score, const ScoreQueries<Q>& s, const ScoreKeys<Q>& keys,
                                Maker&& maker) {
  switch (s.width * static_cast<int>(sizeof(Q)) / 64) {
    case 1:
      return score_groups<8>(score, s, keys, maker);
    case 2:
    case 3:
      return score_groups<4>(score, s, keys, maker);
    default:
      return score_groups<2>(score, s, keys, maker);
  }
}
template <class Q>
static inline void score_panels(float* score, const ScoreQueries<Q>& s, const ScoreKeys<Q>& keys) {
  score_panels(score, s, keys, PanelsAreMade{});
}

#else

static constexpr int kScoreHeads = 1;
static inline int padded_heads(int heads) {
  return heads;
}

#ifdef WEFT_BF16_PRODUCT

// Sixteen heads of one panel: 16 accumulators, and each line of the panel is loaded once. Two panels side by
// side lost 10-15 % on Zen 4 from memory. Even and odd heads are summed apart: one chain of 16 cost 3 %.
struct HeadSums {
  V even = zero(), odd = zero();
  void add(int h, float weight, V product) {
    V& sum = h % 2 == 0 ? even : odd;
    sum = fma(set1(weight), max(zero(), product), sum);
  }
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
    for (int h = 0; h < H; ++h) add(h, weight[h], acc[h]);
  }
  template <int H>
  void add(const int8_t* q, const float* weight, const int32_t* bias, int width, const int8_t* panel,
           const int8_t* ahead) {
    Line acc[H];
    for (int h = 0; h < H; ++h) acc[h] = ints(bias[h]);
    for (int k = 0; k < width; k += 4) {
      const Line line = biased_line(panel + k * kPanel);
      if (ahead) __builtin_prefetch(ahead + k * kPanel, 0, 3);
      for (int h = 0; h < H; ++h) acc[h] = dot_quad(acc[h], line, q + h * width + k);
    }
    for (int h = 0; h < H; ++h) add(h, weight[h], to_float(acc[h]));
  }
};

// A function of its own: inside the loops of its caller accumulators spill (int8 keys: 1.25 times slower).
template <class Q, int kWidth>
[[gnu::noinline]] static void score_panels(float* score, const ScoreQueries<Q>& s, const ScoreKeys<Q>& keys) {
  const int width = kWidth ? kWidth : s.width;
  for (int t = 0; t < s.tokens; ++t)
    for (int p = 0; p < keys.panels; ++p) {
      HeadSums sums;
      const Q* ahead = keys.fetch ? (p + 1 < keys.panels ? keys.panel[p + 1] : keys.next[0]) : nullptr;
      int h = 0;
      const auto add = [&]<int H>() {
        const int row = t * s.heads + h;
        sums.add<H>(s.q + static_cast<size_t>(row) * width, s.weight + row, s.bias + row, width,
                    keys.panel[p], h == 0 ? ahead : nullptr);
        h += H;
      };
      while (h + 16 <= s.heads) add.template operator()<16>();
      while (h + 4 <= s.heads) add.template operator()<4>();
      while (h < s.heads) add.template operator()<1>();
      store(score + (t * kScorePanels + p) * kPanel, sums.even + sums.odd);
    }
}
// score [tokens][kScorePanels][16]. A known width makes offsets of the rows: 16 addresses are more than there
// are registers.
template <class Q>
static inline void score_panels(float* score, const ScoreQueries<Q>& s, const ScoreKeys<Q>& keys) {
  s.width == 128 ? score_panels<Q, 128>(score, s, keys) : score_panels<Q, 0>(score, s, keys);
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
