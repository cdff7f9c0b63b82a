// Attention Residuals (kimi.md 6.2, 6.3): softmax over the finished blocks from nothing, then the partial sum
// folded in. `mix` does both from the rows. Where `mix_bank` did the first for several sub-layers at once,
// `mix` reads its sum: the same additions in the same order, so the same bits.

// w . x and x . x of N rows in one pass: the rows come from memory, each a stream of its own.
struct Scored {
  float dot, squares;
};
template <int N>
static inline void score_rows(Scored* out, const float* const* x, const float* w, int n, long ahead) {
  V d0[N], d1[N], s0[N], s1[N];
  for (int r = 0; r < N; ++r) d0[r] = d1[r] = s0[r] = s1[r] = zero();
  int i = 0;
  for (; i + 32 <= n; i += 32) {
    const V w0 = load(w + i), w1 = load(w + i + 16);
    for (int r = 0; r < N; ++r) {
      const float* at = x[r] + i;
      __builtin_prefetch(at + ahead, 0, 2);
      __builtin_prefetch(at + ahead + 16, 0, 2);
      const V a = load(at), b = load(at + 16);
      d0[r] = fma(a, w0, d0[r]);
      d1[r] = fma(b, w1, d1[r]);
      s0[r] = fma(a, a, s0[r]);
      s1[r] = fma(b, b, s1[r]);
    }
  }
  for (; i < n; i += 16)
    for (int r = 0; r < N; ++r) {
      const V a = load_n(x[r] + i, n - i);
      d0[r] = fma(a, load_n(w + i, n - i), d0[r]);
      s0[r] = fma(a, a, s0[r]);
    }
  for (int r = 0; r < N; ++r) out[r] = {hsum(d0[r] + d1[r]), hsum(s0[r] + s1[r])};
}
// All `rows`, four at a time: their scores against w.
static inline void score_all(Scored* out, const float* const* x, const float* w, int rows, int n,
                             long ahead) {
  int s = 0;
  for (; s + 4 <= rows; s += 4) score_rows<4>(out + s, x + s, w, n, ahead);
  for (; s < rows; ++s) score_rows<1>(out + s, x + s, w, n, ahead);
}
static inline float scaled(Scored s, int n, float eps) {
  return s.dot * rsqrt(s.squares / static_cast<float>(n) + eps);
}

// score[q * kMaxSources + r] = w_q . x_r of R rows in cache and Q queries, in the order of score_rows
template <int R, int Q>
static inline void dot_block(float* score, const float* const* x, const float* const* w, int n) {
  V d[R][Q][2];
  for (int r = 0; r < R; ++r)
    for (int q = 0; q < Q; ++q) d[r][q][0] = d[r][q][1] = zero();
  int i = 0;
  for (; i + 32 <= n; i += 32)
    for (int half = 0; half < 2; ++half) {
      V a[R];
      for (int r = 0; r < R; ++r) a[r] = load(x[r] + i + 16 * half);
      for (int q = 0; q < Q; ++q) {
        const V b = load(w[q] + i + 16 * half);
        for (int r = 0; r < R; ++r) d[r][q][half] = fma(a[r], b, d[r][q][half]);
      }
    }
  for (; i < n; i += 16)
    for (int r = 0; r < R; ++r)
      for (int q = 0; q < Q; ++q)
        d[r][q][0] = fma(load_n(x[r] + i, n - i), load_n(w[q] + i, n - i), d[r][q][0]);
  for (int q = 0; q < Q; ++q)
    for (int r = 0; r < R; ++r) score[q * kMaxSources + r] = hsum(d[r][q][0] + d[r][q][1]);
}
template <int R, int Q>
static inline void dot_rows(float* score, const float* const* x, const float* const* w, int queries, int n) {
  int q = 0;
  for (; q + Q <= queries; q += Q) dot_block<R, Q>(score + q * kMaxSources, x, w + q, n);
  for (; q < queries; ++q) dot_block<R, 1>(score + q * kMaxSources, x, w + q, n);
}

// What is left of the finished blocks' softmax beside its weighted sum.
struct Bank {
  float top, sum;
};
// score becomes e^(score - top).
static inline Bank bank_weights(float* score, int n) {
  Bank bank{-__builtin_inff(), 0};
  for (int s = 0; s < n; ++s) bank.top = score[s] > bank.top ? score[s] : bank.top;
  for (int s = 0; s < n; s += 16) store_n(score + s, exp(load_n(score + s, n - s) - set1(bank.top)), n - s);
  for (int s = 0; s < n; ++s) bank.sum += score[s];
  return bank;
}
// Shares of the bank's weighted sum and of the partial, whose score comes last. Nothing can overflow, and the
// greater of the two exponentials is 1.
struct Shares {
  float bank, partial;
};
static inline Shares fold(Bank bank, float score) {
  const float top = bank.top > score ? bank.top : score;
  alignas(64) float e[16] = {bank.top - top, score - top};
  store(e, exp(load(e)));
  const float sum = e[0] * bank.sum + e[1];
  return {e[0] / sum, e[1] / sum};
}

// N vectors, `step` floats apart, of the weighted sum of rows; the order of every caller.
template <int N, class Left>
static inline void bank_sum(V (&y)[N], const float* const* x, const float* weight, int rows, int i,
                            Left left) {
  for (int p = 0; p < N; ++p) y[p] = zero();
  for (int r = 0; r < rows; ++r)
    for (int p = 0; p < N; ++p) y[p] = fma(set1(weight[r]), load_n(x[r] + i + 16 * p, left), y[p]);
}
// out = shares.bank * (what `bank` puts into y) + shares.partial * partial; returns its sum of squares, in
// the order of sum_squares.
template <class Sum>
static inline float fold_rows(float* out, const Sum& bank, const float* partial, Shares shares, int n) {
  const V of_bank = set1(shares.bank), of_partial = set1(shares.partial);
  V square[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    V y[4];
    bank(y, i, Full{});
    for (int p = 0; p < 4; ++p) {
      y[p] = fma(of_partial, load(partial + i + 16 * p), of_bank * y[p]);
      store(out + i + 16 * p, y[p]);
      square[p] = fma(y[p], y[p], square[p]);
    }
  }
  for (; i < n; i += 16) {
    V y[1];
    bank(y, i, n - i);
    y[0] = fma(of_partial, load_n(partial + i, n - i), of_bank * y[0]);
    store_n(out + i, y[0], n - i);
    square[0] = fma(y[0], y[0], square[0]);
  }
  return hsum((square[0] + square[1]) + (square[2] + square[3]));
}

static void mix(const MixArgs& m, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(row_count(m.rows, step), call);
  Scratch scratch{call.scratch};
  float* mixed = scratch.take<float>(round_up(m.width, 16));
  float score[kMaxSources];
  Scored scored[kMaxSources];
  const float* x[kMaxSources];
  const int finished = m.sources - 1;
  for (int i = part.first; i < part.last; ++i) {
    const int t = source_row(m.rows, step, i);
    const long ahead = ahead_of(m.rows, step, i, part.last, m.ld);
    for (int s = 0; s < m.sources; ++s) x[s] = m.source[s] + static_cast<size_t>(t) * m.ld;
    score_all(scored, x, m.query, m.sources, m.width, ahead);
    for (int s = 0; s < m.sources; ++s) score[s] = scaled(scored[s], m.width, m.mix_eps);
    float squares;
    if (m.bank) {
      const float* row = m.bank + static_cast<size_t>(t) * m.ld_bank;
      const float* kept = row + round_up(m.width, 16);
      const long next = ahead_of(m.rows, step, i, part.last, m.ld_bank);
      const auto sum = [&](auto& y, int c, auto left) {
        for (size_t p = 0; p < sizeof(y) / sizeof(V); ++p) {
          __builtin_prefetch(row + c + 16 * p + next, 0, 2);
          y[p] = load_n(row + c + 16 * p, left);
        }
      };
      squares = fold_rows(mixed, sum, x[0], fold({kept[0], kept[1]}, score[0]), m.width);
    } else {
      const Bank bank = bank_weights(score, finished);
      const auto sum = [&](auto& y, int c, auto left) { bank_sum(y, x, score, finished, c, left); };
      squares = fold_rows(mixed, sum, x[finished], fold(bank, score[finished]), m.width);
    }
    see_nonfinite(step, t, m.site, squares);
    if (m.out_mix)
      for (int c = 0; c < m.width; ++c) m.out_mix[static_cast<size_t>(i) * m.width + c] = mixed[c];
    store_row(m.out_f32 ? m.out_f32 + static_cast<size_t>(i) * m.ld_f32 : nullptr,
              m.out_op ? static_cast<op_t*>(m.out_op) + static_cast<size_t>(i) * m.ld_op : nullptr, mixed,
              m.norm, rsqrt(squares / static_cast<float>(m.width) + m.eps), m.width);
  }
}

// Sums of a token's finished blocks for sub-layers [from, to). They are read much later: past the caches they
// go, which spares memory the reading of lines that will be overwritten whole.
static void mix_bank_row(const MixBankArgs& m, int t, int from, int to, long ahead) {
  constexpr int kQueries = kWidePanels >= 8 ? 3 : 1, kTile = 1024;
  const float* x[kMaxSources];
  float score[kMaxBankSites * kMaxSources];
  Scored scored[kMaxSources];
  const int n = m.sources, sites = to - from;
  const float* const* query = m.query + from;
  for (int s = 0; s < n; ++s) x[s] = m.source[s] + static_cast<size_t>(t) * m.ld;
  score_all(scored, x, query[0], n, m.width, ahead);
  int s = 0;
  for (; s + 4 <= n; s += 4)
    dot_rows<4, kQueries>(score + kMaxSources + s, x + s, query + 1, sites - 1, m.width);
  for (; s < n; ++s) dot_rows<1, 2 * kQueries>(score + kMaxSources + s, x + s, query + 1, sites - 1, m.width);
  float* out = m.out + static_cast<size_t>(t) * m.ld_out + static_cast<size_t>(from) * m.row;
  for (int j = 0; j < sites; ++j) {
    float* mine = score + j * kMaxSources;
    for (s = 0; s < n; ++s)
      mine[s] = scaled({j ? mine[s] : scored[s].dot, scored[s].squares}, m.width, m.mix_eps);
    const Bank bank = bank_weights(mine, n);
    float* kept = out + static_cast<size_t>(j) * m.row + round_up(m.width, 16);
    kept[0] = bank.top, kept[1] = bank.sum;
  }
  for (int tile = 0; tile < m.width; tile += kTile) {  // the tile's columns of all rows stay in L1
    const int end = min_int(tile + kTile, m.width);
    for (int j = 0; j < sites; ++j) {
      const float* mine = score + j * kMaxSources;
      float* to_row = out + static_cast<size_t>(j) * m.row;
      int i = tile;
      for (; i + 64 <= end; i += 64) {
        V y[4];
        bank_sum(y, x, mine, n, i, Full{});
        for (int p = 0; p < 4; ++p) store_past(to_row + i + 16 * p, y[p]);
      }
      for (; i < end; i += 16) {
        V y[1];
        bank_sum(y, x, mine, n, i, end - i);
        store_n(to_row + i, y[0], end - i);
      }
    }
  }
}

static void mix_bank(const MixBankArgs& m, const Call& call) {
  const int tokens = call.step->tokens, cut = mix_bank_cut(m, tokens), sites = m.sites / cut;
  const Slice part = slice(tokens * cut, call);
  for (int unit = part.first; unit < part.last;) {
    const int t = unit / cut, first = unit % cut, units = min_int(cut - first, part.last - unit);
    mix_bank_row(m, t, first * sites, (first + units) * sites,
                 ahead_of(Rows::tokens, *call.step, t, (part.last + cut - 1) / cut, m.ld));
    unit += units;
  }
  stores_done();
}
