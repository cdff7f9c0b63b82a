// KDA recurrence in f32, up to 16 tokens at once: every ISA's form for short pieces, and the only one without tiles.
// The chunk's triangular system is solved by forward substitution.

struct KdaExactRoom {
  static constexpr int kC = kKdaChunk;
  KdaRows rows;              // [16]
  float* in;                 // [32][ld] keys, then queries, decayed from the chunk's start, inclusive
  float* k_out;              // [K][16] decayed to the chunk's end, transposed
  float *u, *o;              // [16][ld] corrections e, outputs; u and o consecutive
  float *attend, *lower;     // [16][16] A_qk and -L
  float* pairs;              // [16][16][16] sums of both, in parts
  float* last;               // [K] decay of the whole chunk
  KdaExactRoom(Scratch& s, const KdaArgs& a) : rows(s, a, kC) {
    const size_t size = static_cast<size_t>(kC) * rows.ld;
    in = s.take<float>(2 * size);
    k_out = s.take<float>(size);
    u = s.take<float>(2 * size);
    o = u + size;
    attend = s.take<float>(kC * kC);
    lower = s.take<float>(kC * kC);
    pairs = s.take<float>(kC * kC * 16);
    last = s.take<float>(rows.ld);
  }
};

// A_qk and L of kN columns: keys j .. j + kN - 1 against the rows behind them. Parts of A_qk[i][j] go to pairs [i][j],
// of L[i][j] to [j][i].
template <int kN>
static inline void kda_columns(const KdaExactRoom& w, int K, int j, int n) {
  constexpr int kC = KdaExactRoom::kC, kBlocks = kMaxHeadDim / 16;
  const KdaRows r = w.rows;
  float* pairs = w.pairs;
  const int blocks = (K + 15) / 16;
  V decayed[kN][kBlocks];  // k_j decayed to row i
  const auto row = [&](auto columns, int i, bool own) {  // `own`: the last of the columns is the row's own key
    constexpr int kM = decltype(columns)::value;
    const float *q = r.q + i * r.ld, *k = r.k + i * r.ld, *alpha = r.alpha + i * r.ld;
    V attend[kM], lower[kM];
    for (int c = 0; c < kM; ++c) attend[c] = lower[c] = zero();
    for (int b = 0; b < blocks; ++b) {
      const V query = load(q + 16 * b), key = load(k + 16 * b), decay = load(alpha + 16 * b);
      for (int c = 0; c < kM; ++c) {
        const V x = decayed[c][b] = own && c == kM - 1 ? key : decayed[c][b] * decay;
        attend[c] = fma(query, x, attend[c]);
        lower[c] = fma(key, x, lower[c]);
      }
    }
    for (int c = 0; c < kM; ++c) {
      if (!own || c < kM - 1) store(pairs + ((j + c) * kC + i) * 16, lower[c]);
      store(pairs + (i * kC + j + c) * 16, attend[c]);
    }
  };
  row(Count<1>{}, j, true);
  if constexpr (kN > 1) row(Count<2>{}, j + 1, true);
  for (int i = j + kN; i < n; ++i) row(Count<kN>{}, i, false);
}
static inline void kda_pairs(const KdaExactRoom& w, int K, int n) {
  constexpr int kC = KdaExactRoom::kC;
  alignas(64) float sum[kC][16];
  int j = 0;
  for (; j + 2 <= n; j += 2) kda_columns<2>(w, K, j, n);
  if (j < n) kda_columns<1>(w, K, j, n);
  for (int i = 0; i < n; ++i) {
    for (j = n; j < kC; ++j) store(w.pairs + (i * kC + j) * 16, zero());
    sums16(sum[i], w.pairs + i * kC * 16);
  }
  for (int i = n; i < kC; ++i) store(sum[i], zero());
  const uint32_t* row[kC];
  for (int i = 0; i < kC; ++i) row[i] = reinterpret_cast<const uint32_t*>(sum[i]);
  transpose16(reinterpret_cast<uint32_t*>(w.lower), row);
  for (int i = 0; i < n; ++i) {
    store(w.attend + i * kC, load(sum[i]));
    store(w.lower + i * kC, set1(-w.rows.beta[i]) * load(w.lower + i * kC));
  }
}

// The part of a chunk that does not touch the state.
static inline void kda_exact_prepare(const KdaExactRoom& w, int K, int n) {
  constexpr int kC = KdaExactRoom::kC;
  const KdaRows r = w.rows;
  const int ld = r.ld;
  alignas(64) float kept[kC][16];
  const uint32_t* row[kC];
  for (int i = 0; i < kC; ++i) row[i] = reinterpret_cast<const uint32_t*>(kept[i]);
  for (int i = n; i < kC; ++i) store(kept[i], zero());
  for (int c = 0; c < K; c += 16) {
    V in = set1(1.f), out = set1(1.f);
    float *k_in = w.in + c, *q_in = w.in + n * ld + c;
    for (int i = 0; i < n; ++i) {
      in = in * load(r.alpha + i * ld + c);
      store(k_in + i * ld, load(r.k + i * ld + c) * in);
      store(q_in + i * ld, load(r.q + i * ld + c) * in);
    }
    store(w.last + c, in);
    for (int i = n - 1; i >= 0; --i) {
      store(kept[i], load(r.k + i * ld + c) * out);
      out = out * load(r.alpha + i * ld + c);
    }
    transpose16(reinterpret_cast<uint32_t*>(w.k_out + c * kC), row);
  }
  kda_pairs(w, K, n);
}

// Corrections and outputs of 16 kN columns by forward substitution: the chains of the panels side by side.
template <int kN>
static inline void kda_substitute(const KdaExactRoom& w, const float* v, float* u, float* o, int n) {
  constexpr int kC = KdaExactRoom::kC;
  const int ld = w.rows.ld;
  const float *beta = w.rows.beta, *lower = w.lower, *attend = w.attend;
  for (int i = 0; i < n; ++i, lower += kC, attend += kC) {
    V e[kN], y[kN];
    for (int p = 0; p < kN; ++p) {
      const int at = i * ld + kPanel * p;
      e[p] = set1(beta[i]) * (load(v + at) - load(u + at));
      y[p] = load(o + at);
    }
    for (int j = 0; j < i; ++j)
      for (int p = 0; p < kN; ++p) {
        const V before = load(u + j * ld + kPanel * p);
        e[p] = fma(set1(lower[j]), before, e[p]);
        y[p] = fma(set1(attend[j]), before, y[p]);
      }
    for (int p = 0; p < kN; ++p) {
      store(u + i * ld + kPanel * p, e[p]);
      store(o + i * ld + kPanel * p, fma(set1(attend[i]), e[p], y[p]));
    }
  }
}

// kM rows of the state decay and take up what the chunk's keys add.
template <int kM, int kN>
static inline void kda_update(float* s, int stride, const float* last, const float* k_out, const float* e, int ld, int n) {
  constexpr int kC = KdaExactRoom::kC;
  V acc[kM][kN];
  for (int i = 0; i < kM; ++i)
    for (int p = 0; p < kN; ++p) acc[i][p] = set1(last[i]) * load(s + i * stride + kPanel * p);
  for (int t = 0; t < n; ++t) {
    V x[kN];
    for (int p = 0; p < kN; ++p) x[p] = load(e + t * ld + kPanel * p);
    for (int i = 0; i < kM; ++i)
      for (int p = 0; p < kN; ++p) acc[i][p] = fma(set1(k_out[i * kC + t]), x[p], acc[i][p]);
  }
  for (int i = 0; i < kM; ++i)
    for (int p = 0; p < kN; ++p) store(s + i * stride + kPanel * p, acc[i][p]);
}

// kN panels of value columns of the state: corrections, outputs, update.
template <int kN>
static inline void kda_exact_columns(const KdaExactRoom& w, const KdaArgs& a, float* state, int n, int column) {
  constexpr int kC = KdaExactRoom::kC, kM = kBlockRows;
  const int ld = w.rows.ld, K = a.key_dim, stride = a.v_stride;
  float *u = w.u + column, *o = u + static_cast<size_t>(n) * ld, *s = state + column;
  mma(u, ld, w.in, ld, s, kPanel, stride, 2 * n, kN, K, false);
  kda_substitute<kN>(w, w.rows.v + column, u, o, n);
  int d = 0;
  for (; d + kM <= K; d += kM)
    kda_update<kM, kN>(s + static_cast<size_t>(d) * stride, stride, w.last + d, w.k_out + d * kC, u, ld, n);
  for (; d < K; ++d)
    kda_update<1, kN>(s + static_cast<size_t>(d) * stride, stride, w.last + d, w.k_out + d * kC, u, ld, n);
}

static inline void kda_exact(const KdaExactRoom& w, const KdaSource& s, float* state) {
  const KdaArgs& a = s.a;
  kda_inputs(w.rows, s);
  kda_exact_prepare(w, a.key_dim, s.n);
  int column = 0;
  for (; column + kBlockPanels * kPanel <= a.v_stride; column += kBlockPanels * kPanel)
    kda_exact_columns<kBlockPanels>(w, a, state, s.n, column);
  if constexpr (kBlockPanels > 1)
    for (; column < a.v_stride; column += kPanel) kda_exact_columns<1>(w, a, state, s.n, column);
  kda_outputs(s, w.u + static_cast<size_t>(s.n) * w.rows.ld, w.rows.ld);
}
