// KDA recurrence in f32, up to 16 tokens at once: every ISA's form for short pieces, and the only one without tiles.
// The chunk's triangular system is solved by forward substitution.

struct KdaExactRoom {
  static constexpr int kC = kKdaChunk;
  KdaRows rows;              // [16]
  float* in;                 // [32][ld] keys, then queries, decayed from the chunk's start, inclusive
  float* k_out;              // [K][16] decayed to the chunk's end, transposed
  float *u, *o;              // [16][ld] corrections e, outputs; u and o consecutive
  float *attend, *lower;     // [16][16] A_qk and L
  float* last;               // [K] decay of the whole chunk
  KdaExactRoom(Scratch& s, const KdaArgs& a) : rows(s, a, kC) {
    const size_t size = static_cast<size_t>(kC) * rows.ld;
    in = s.take<float>(2 * size);
    k_out = s.take<float>(size);
    u = s.take<float>(2 * size);
    o = u + size;
    attend = s.take<float>(kC * kC);
    lower = s.take<float>(kC * kC);
    last = s.take<float>(rows.ld);
  }
};

// A_qk and L of one column: key j against the rows behind it.
static inline void kda_column(const KdaExactRoom& w, int K, int j, int n) {
  constexpr int kC = KdaExactRoom::kC, kBlocks = kMaxHeadDim / 16;
  const KdaRows& r = w.rows;
  const int blocks = (K + 15) / 16;
  V decayed[kBlocks];  // k_j decayed to row i
  for (int b = 0; b < blocks; ++b) decayed[b] = load_n(r.k + j * r.ld + 16 * b, K - 16 * b);
  for (int i = j; i < n; ++i) {
    const float *q = r.q + i * r.ld, *k = r.k + i * r.ld, *alpha = r.alpha + i * r.ld;
    V attend = zero(), lower = zero();
    for (int b = 0; b < blocks; ++b) {
      const int left = K - 16 * b;
      if (i > j) decayed[b] = decayed[b] * load_n(alpha + 16 * b, left);
      attend = fma(load_n(q + 16 * b, left), decayed[b], attend);
      lower = fma(load_n(k + 16 * b, left), decayed[b], lower);
    }
    w.attend[i * kC + j] = hsum(attend);
    w.lower[i * kC + j] = r.beta[i] * hsum(lower);
  }
}

// The part of a chunk that does not touch the state.
static inline void kda_exact_prepare(const KdaExactRoom& w, int K, int n) {
  constexpr int kC = KdaExactRoom::kC;
  const KdaRows& r = w.rows;
  const int ld = r.ld;
  alignas(64) float kept[kC][16];
  const uint32_t* row[kC];
  for (int i = 0; i < kC; ++i) row[i] = reinterpret_cast<const uint32_t*>(kept[i]);
  for (int i = n; i < kC; ++i) store(kept[i], zero());
  for (int c = 0; c < K; c += 16) {
    const int left = K - c;
    V in = set1(1.f), out = set1(1.f);
    for (int i = 0; i < n; ++i) {
      in = in * load_n(r.alpha + i * ld + c, left);
      store_n(w.in + i * ld + c, load_n(r.k + i * ld + c, left) * in, left);
      store_n(w.in + (n + i) * ld + c, load_n(r.q + i * ld + c, left) * in, left);
    }
    store_n(w.last + c, in, left);
    for (int i = n - 1; i >= 0; --i) {
      store(kept[i], load_n(r.k + i * ld + c, left) * out);
      out = out * load_n(r.alpha + i * ld + c, left);
    }
    transpose16(reinterpret_cast<uint32_t*>(w.k_out + c * kC), row);
  }
  for (int j = 0; j < n; ++j) kda_column(w, K, j, n);
}

// One block of up to 32 value columns of the state: corrections, outputs, update.
static inline void kda_exact_columns(const KdaExactRoom& w, const KdaArgs& a, float* state, int n, int column,
                                     int panels) {
  constexpr int kC = KdaExactRoom::kC;
  const KdaRows& r = w.rows;
  const int ld = r.ld;
  float *u = w.u + column, *o = u + static_cast<size_t>(n) * ld, *s = state + column;
  mma(u, ld, w.in, ld, s, kPanel, a.v_stride, 2 * n, panels, a.key_dim, false);
  for (int p = 0; p < panels; ++p) {
    const int c = kPanel * p, left = a.value_dim - column - c;
    for (int i = 0; i < n; ++i) {
      V e = set1(r.beta[i]) * (load_n(r.v + i * ld + column + c, left) - load(u + i * ld + c));
      V y = load(o + i * ld + c);
      for (int j = 0; j < i; ++j) {
        const V before = load(u + j * ld + c);
        e = e - set1(w.lower[i * kC + j]) * before;
        y = fma(set1(w.attend[i * kC + j]), before, y);
      }
      store(u + i * ld + c, e);
      store(o + i * ld + c, fma(set1(w.attend[i * kC + i]), e, y));
    }
  }
  for (int d = 0; d < a.key_dim; ++d)
    for (int p = 0; p < panels; ++p) {
      float* at = s + static_cast<size_t>(d) * a.v_stride + kPanel * p;
      store(at, load(at) * set1(w.last[d]));
    }
  mma(s, a.v_stride, w.k_out, kC, u, kPanel, ld, a.key_dim, panels, n, true);
}

static inline void kda_exact(const KdaExactRoom& w, const KdaSource& s, float* state) {
  const KdaArgs& a = s.a;
  kda_inputs(w.rows, s);
  kda_exact_prepare(w, a.key_dim, s.n);
  for (int column = 0; column < a.value_dim; column += 2 * kPanel)
    kda_exact_columns(w, a, state, s.n, column, min_int(2, (a.v_stride - column) / kPanel));
  kda_outputs(s, w.u + static_cast<size_t>(s.n) * w.rows.ld, w.rows.ld);
}
