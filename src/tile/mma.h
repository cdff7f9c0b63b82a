// mma: C [m, 16 np] = (or +=) A [m, k] B. The one matrix product of every kernel.
//
// Each output element is one chain of additions in ascending k, whatever m, np and the register block are: a
// row's result does not depend on its company. Contracts: rows of A are zero (or B is) up to k rounded up to
// 2 for bf16 lines and to 32 on tiles; on tiles, A has its rows readable and C its rows writable up to m
// rounded up to 16.

// A source of weights: `Weights` for one k step of one panel, applied to `kStep` elements of a row of A.
struct F32Lines {  // element (k, column) at b[k * ldb + panel * p + column]
  using A = float;
  using Weights = V;
  static constexpr int kK = 1;
  const float* b;
  size_t panel;
  int ldb;
  Weights get(int k, int p) const { return load(b + static_cast<size_t>(k) * ldb + panel * p); }
  static V apply(V acc, const float* a, Weights w) { return fma(set1(a[0]), w, acc); }
};
struct Bf16Lines {  // packed.h lines, f32 activations
  using A = float;
  struct Weights {
    V even, odd;
  };
  static constexpr int kK = 2;
  const bf16* b;
  size_t panel;
  Weights get(int k, int p) const {
    const bf16* line = b + static_cast<size_t>(k) * kPanel + panel * p;
    return {even(line), odd(line)};
  }
  static V apply(V acc, const float* a, Weights w) {
    return fma(set1(a[1]), w.odd, fma(set1(a[0]), w.even, acc));
  }
};

template <int MR, int NP, class Source>
static inline void mma_block(float* c, int ldc, const typename Source::A* a, int lda, const Source& source,
                             int p0, int k, bool accumulate) {
  V acc[MR][NP];
  for (int i = 0; i < MR; ++i)
    for (int p = 0; p < NP; ++p) acc[i][p] = accumulate ? load(c + i * ldc + kPanel * (p0 + p)) : zero();
  for (int kk = 0; kk < k; kk += Source::kK) {
    typename Source::Weights w[NP];
    for (int p = 0; p < NP; ++p) w[p] = source.get(kk, p0 + p);
    for (int i = 0; i < MR; ++i)
      for (int p = 0; p < NP; ++p)
        acc[i][p] = Source::apply(acc[i][p], a + static_cast<size_t>(i) * lda + kk, w[p]);
  }
  for (int i = 0; i < MR; ++i)
    for (int p = 0; p < NP; ++p) store(c + i * ldc + kPanel * (p0 + p), acc[i][p]);
}

template <int MR, int NP, class Source>
static inline void mma_rows(float* c, int ldc, const typename Source::A* a, int lda, const Source& source,
                            int p0, int m, int k, bool accumulate) {
  int i = 0;
  const auto blocks_of = [&]<int kRows>() {
    for (; i + kRows <= m; i += kRows)
      mma_block<kRows, NP>(c + i * ldc, ldc, a + static_cast<size_t>(i) * lda, lda, source, p0, k, accumulate);
  };
  blocks_of.template operator()<MR>();
  if constexpr (MR > 4) blocks_of.template operator()<4>();
  blocks_of.template operator()<1>();
}

template <class Source>
static inline void mma_panels(float* c, int ldc, const typename Source::A* a, int lda, const Source& source,
                              int m, int np, int k, bool accumulate) {
  int p = 0;
  if (m <= kSlimRows)  // another register block: as many chains as the latency of a multiplication wants
    for (; p + kSlimPanels <= np; p += kSlimPanels)
      mma_rows<kSlimRows, kSlimPanels>(c, ldc, a, lda, source, p, m, k, accumulate);
  for (; p + kBlockPanels <= np; p += kBlockPanels)
    mma_rows<kBlockRows, kBlockPanels>(c, ldc, a, lda, source, p, m, k, accumulate);
  for (; p < np; ++p) mma_rows<kBlockRows, 1>(c, ldc, a, lda, source, p, m, k, accumulate);
}

static inline void mma(float* c, int ldc, const float* a, int lda, const float* b, size_t panel, int ldb,
                       int m, int np, int k, bool accumulate) {
  mma_panels(c, ldc, a, lda, F32Lines{b, panel, ldb}, m, np, k, accumulate);
}
static inline void mma(float* c, int ldc, const float* a, int lda, const bf16* b, size_t panel, int m, int np,
                       int k, bool accumulate) {
  mma_panels(c, ldc, a, lda, Bf16Lines{b, panel}, m, np, k, accumulate);
}

// Memory that a product fetches into L2 while it runs: `rows` pieces of `lines` cache lines, `stride` bytes
// apart.
struct Ahead {
  const std::byte* at;
  size_t stride;
  int lines, rows;
  int per_step;  // lines fetched per 32 k of a register block
  int line = 0;
  void step() {
    for (int i = 0; i < per_step && rows > 0; ++i) {
      __builtin_prefetch(at + 64 * line, 0, 2);
      if (++line == lines) line = 0, at += stride, --rows;
    }
  }
};

#ifdef WEFT_TILES

// C in tiles 0-3, A in 4-5, B in 6-7: 2 x 2 tiles keep both load ports below the multiplier.
template <int MT, int NT, class Side>
static inline void mma_tiles(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int k,
                             bool accumulate, const Side& side) {
  const long c_stride = ldc * 4L, a_stride = lda * 2L;
  float* c1 = c + 16L * ldc;
  const bf16 *a1 = a + 16L * lda, *b1 = b + panel;
  if (accumulate) {
    tile_load<0>(c, c_stride);
    if constexpr (NT > 1) tile_load<1>(c + 16, c_stride);
    if constexpr (MT > 1) tile_load<2>(c1, c_stride);
    if constexpr (MT > 1 && NT > 1) tile_load<3>(c1 + 16, c_stride);
  } else {
    tile_zero<0>();
    if constexpr (NT > 1) tile_zero<1>();
    if constexpr (MT > 1) tile_zero<2>();
    if constexpr (MT > 1 && NT > 1) tile_zero<3>();
  }
  for (int kk = 0; kk < k; kk += kStep) {
    tile_load<6>(b + kk * kPanel, 64);
    tile_load<4>(a + kk, a_stride);
    if constexpr (NT > 1) tile_load<7>(b1 + kk * kPanel, 64);
    tile_dot<0, 4, 6>();
    if constexpr (MT > 1) tile_load<5>(a1 + kk, a_stride);
    side();
    if constexpr (NT > 1) tile_dot<1, 4, 7>();
    if constexpr (MT > 1) tile_dot<2, 5, 6>();
    if constexpr (MT > 1 && NT > 1) tile_dot<3, 5, 7>();
  }
  tile_store<0>(c, c_stride);
  if constexpr (NT > 1) tile_store<1>(c + 16, c_stride);
  if constexpr (MT > 1) tile_store<2>(c1, c_stride);
  if constexpr (MT > 1 && NT > 1) tile_store<3>(c1 + 16, c_stride);
}

// Up to 16 rows by up to four panels. kStream: B comes from memory, four streams side by side, each asked for
// kAskAhead bytes ahead, a panel's asks right before its tile: all 64 in one go fill the line buffers that
// the tiles behind them need (8 rows, two threads, of the time a plain read takes: 1.20; so 1.05; 1 KB
// ahead 1.09, two streams 1.12, one 1.2; Emerald Rapids). Behind a panel's end the panels after these are
// asked for: of short panels they are most (k = 128: 1.46, so 1.06).
constexpr int kAskAhead = 2048;
template <int NT, bool kStream>
static inline void mma_few(float* c, int ldc, const bf16* a, long a_stride, const bf16* b, size_t panel,
                           int k, bool accumulate) {
  const long c_stride = ldc * 4L;
  if (accumulate) {
    tile_load<0>(c, c_stride);
    if constexpr (NT > 1) tile_load<1>(c + 16, c_stride);
    if constexpr (NT > 2) tile_load<2>(c + 32, c_stride);
    if constexpr (NT > 3) tile_load<3>(c + 48, c_stride);
  } else {
    tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  }
  const int edge = k - kAskAhead / (2 * kPanel);
  for (int kk = 0; kk < k; kk += kStep) {
    const bf16* line = b + static_cast<size_t>(kk) * kPanel;
    const bf16* ahead = line + kAskAhead / 2 + (kk < edge ? 0 : (NT - 1) * panel);
    const auto ask = [&](int p) {
      if constexpr (kStream)
        for (int i = 0; i < 16; ++i) __builtin_prefetch(ahead + panel * p + 32 * i);
    };
    tile_load<4>(a + kk, a_stride);
    ask(0), tile_load<5>(line, 64), tile_dot<0, 4, 5>();
    if constexpr (NT > 1) ask(1), tile_load<6>(line + panel, 64), tile_dot<1, 4, 6>();
    if constexpr (NT > 2) ask(2), tile_load<7>(line + 2 * panel, 64), tile_dot<2, 4, 7>();
    if constexpr (NT > 3) ask(3), tile_load<5>(line + 3 * panel, 64), tile_dot<3, 4, 5>();
  }
  tile_store<0>(c, c_stride);
  if constexpr (NT > 1) tile_store<1>(c + 16, c_stride);
  if constexpr (NT > 2) tile_store<2>(c + 32, c_stride);
  if constexpr (NT > 3) tile_store<3>(c + 48, c_stride);
}
template <bool kStream>
static inline void mma_few(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int m,
                           int np, int k, bool accumulate) {
  const long a_stride = m == 1 ? 0 : lda * 2L;  // one row sixteen times: nobody looks at the others
  for (int p = 0; p < np; p += 4) {
    float* ct = c + kPanel * p;
    const bf16* bt = b + panel * p;
    const int left = np - p;
    if (left > 3)
      mma_few<4, kStream>(ct, ldc, a, a_stride, bt, panel, k, accumulate);
    else if (left == 3)
      mma_few<3, kStream>(ct, ldc, a, a_stride, bt, panel, k, accumulate);
    else if (left == 2)
      mma_few<2, kStream>(ct, ldc, a, a_stride, bt, panel, k, accumulate);
    else
      mma_few<1, kStream>(ct, ldc, a, a_stride, bt, panel, k, accumulate);
  }
}
template <class Side>
static inline void mma_many(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int m,
                            int np, int k, bool accumulate, const Side& side) {
  for (int p = 0; p < np; p += 2)
    for (int i = 0; i < m; i += 32) {
      float* ct = c + static_cast<size_t>(i) * ldc + kPanel * p;
      const bf16 *at = a + static_cast<size_t>(i) * lda, *bt = b + panel * p;
      const bool rows = m - i > 16, columns = np - p > 1;
      if (rows && columns)
        mma_tiles<2, 2>(ct, ldc, at, lda, bt, panel, k, accumulate, side);
      else if (rows)
        mma_tiles<2, 1>(ct, ldc, at, lda, bt, panel, k, accumulate, side);
      else if (columns)
        mma_tiles<1, 2>(ct, ldc, at, lda, bt, panel, k, accumulate, side);
      else
        mma_tiles<1, 1>(ct, ldc, at, lda, bt, panel, k, accumulate, side);
    }
}
static inline void mma(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int m, int np,
                       int k, bool accumulate) {
  if (m <= 16)
    mma_few<false>(c, ldc, a, lda, b, panel, m, np, k, accumulate);
  else
    mma_many(c, ldc, a, lda, b, panel, m, np, k, accumulate, [] {});
}
// B from memory; both `ahead` are fetched meanwhile (many rows only: few rows stream).
static inline void mma_ahead(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int m,
                             int np, int k, bool accumulate, Ahead& rows, Ahead& weights) {
  if (m <= 16)
    mma_few<true>(c, ldc, a, lda, b, panel, m, np, k, accumulate);
  else
    mma_many(c, ldc, a, lda, b, panel, m, np, k, accumulate, [&] { rows.step(), weights.step(); });
}

#elif defined(WEFT_BF16_PRODUCT)

struct PairLines {  // packed.h lines, bf16 activations
  using A = bf16;
  using Weights = Line;
  static constexpr int kK = 2;
  const bf16* b;
  size_t panel;
  Weights get(int k, int p) const { return load_line(b + static_cast<size_t>(k) * kPanel + panel * p); }
  static V apply(V acc, const bf16* a, Weights w) { return dot_pair(acc, a, w); }
};
static inline void mma(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int m, int np,
                       int k, bool accumulate) {
  mma_panels(c, ldc, a, lda, PairLines{b, panel}, m, np, k, accumulate);
}

#endif

#ifndef WEFT_TILES  // register blocks walk B line by line: the hardware's own prefetch keeps up
template <class A>
static inline void mma_ahead(float* c, int ldc, const A* a, int lda, const bf16* b, size_t panel, int m,
                             int np, int k, bool accumulate, Ahead&, Ahead&) {
  mma(c, ldc, a, lda, b, panel, m, np, k, accumulate);
}
#else
static inline void mma_ahead(float* c, int ldc, const float* a, int lda, const bf16* b, size_t panel, int m,
                             int np, int k, bool accumulate, Ahead&, Ahead&) {
  mma(c, ldc, a, lda, b, panel, m, np, k, accumulate);
}
#endif
