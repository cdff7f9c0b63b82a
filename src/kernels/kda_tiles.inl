// KDA in chunks of 64 tokens on tiles (kda.md 2.1, 2.3): bf16 operands, f32 sums, f32 state.
//
// E_ij, the decay between two tokens of a chunk, never exists. The pairs are split by halving: rows 32-63
// against rows 0-31, then each half alike, down to blocks of 8 rows. The halves of one level share an anchor,
// the token between them: rows are decayed from it, columns to it, both by running products of alpha <= 1,
// and the pair is a plain product. What remains, 8 x 8 blocks on the diagonal, is summed in f32. One anchor
// for more would need exp(-cumsum), which overflows (kda.md 2.2).
//
// The L2 norms are factors of rows: they are put on 64 x 64 scores, residuals, corrections and outputs
// instead of on keys and queries, which so are written to their operands while they are in L1: 32 channels of
// all tokens at a time.
#ifdef WEFT_TILES

struct KdaTileRoom {
  static constexpr int kC = kPageTokens, kHalf = kC / 2, kLevels = 3, kWide = 4 * kPanel;
  KdaRows rows;  // [64], q and k before their norms
  op_t* in;      // [128][K] keys, then queries, decayed from the chunk's start, inclusive
  op_t *left[kLevels], *right[kLevels];  // [64] rows, 2 panels
  float* scores[kLevels];                // keys, then queries of second halves against keys of first halves
  op_t* k_out;                           // [K][64] keys decayed to the chunk's end
  float* last;                           // [K] decay of the whole chunk
  float* squares;                        // [2][64][16] of keys and queries
  float *k_norm, *q_norm;                // [64]
  float *lower, *inverse, *product;      // [64][64]: -L, (I + L)^-1, room
  op_t *attend, *solve;                  // [64][64]: A_qk before the norms, (I + L)^-1
  float *u, *o;                          // [64][64] keys against the state, then e; [64][ld] outputs
  op_t* state_lines;                     // panels of the state the next chunk starts from
  op_t *r_lines, *e_lines;               // four panels of 64 rows
  KdaTileRoom(Scratch& s, const KdaArgs& a) : rows(s, a, kC) {
    const size_t K = a.key_dim;
    in = s.take<op_t>(2 * kC * K);
    for (op_t*& p : left) p = s.take<op_t>(kC * K);
    for (op_t*& p : right) p = s.take<op_t>(kHalf * K);
    for (float*& p : scores) p = s.take<float>(kC * kHalf);
    k_out = s.take<op_t>(kC * K);
    last = s.take<float>(K);
    squares = s.take<float>(2 * kC * 16);
    k_norm = s.take<float>(kC);
    q_norm = s.take<float>(kC);
    float** const square[] = {&lower, &inverse, &product};
    for (float** p : square) *p = s.take<float>(kC * kC);
    attend = s.take<op_t>(kC * kC);
    solve = s.take<op_t>(kC * kC);
    u = s.take<float>(kC * kWide);
    o = s.take<float>(static_cast<size_t>(kC) * rows.ld);
    state_lines = s.take<op_t>(K * a.v_stride);
    r_lines = s.take<op_t>(kC * kWide);
    e_lines = s.take<op_t>(kC * kWide);
  }
};

// 32 channels of a row
struct Wide {
  V a, b;
};
static inline Wide load2(const float* p) {
  return {load(p), load(p + 16)};
}
static inline Wide operator*(Wide x, Wide y) {
  return {x.a * y.a, x.b * y.b};
}

// 32 channels from c on of every operand, while they are in L1.
static inline void kda_strip(const KdaTileRoom& w, int K, int c) {
  constexpr int kC = KdaTileRoom::kC;
  const KdaRows r = w.rows;  // copies: every store might change what a reference reads
  const int k_tiles = K / kStep, strip = c / kStep;
  const Wide one = {set1(1.f), set1(1.f)};
  const auto row = [&](const float* x, int i) { return load2(x + static_cast<size_t>(i) * r.ld + c); };
  Wide decay = one;
  float* squares = w.squares;
  for (int first = 0; first < kC; first += 16) {
    op_t *k_out = row_in_tiles(w.in, k_tiles, first, strip),
         *q_out = row_in_tiles(w.in, k_tiles, kC + first, strip);
    for (int i = first; i < first + 16; ++i, k_out += kStep, q_out += kStep, squares += 16) {
      const Wide k = row(r.k, i), q = row(r.q, i);
      decay = decay * row(r.alpha, i);
      const Wide k_in = k * decay, q_in = q * decay;
      pair_line(k_out, k_in.a, k_in.b);
      pair_line(q_out, q_in.a, q_in.b);
      float* qq = squares + kC * 16;
      store(squares, fma(k.a, k.a, fma(k.b, k.b, load(squares))));
      store(qq, fma(q.a, q.a, fma(q.b, q.b, load(qq))));
    }
  }
  store(w.last + c, decay.a);
  store(w.last + c + 16, decay.b);

  alignas(64) op_t pair[2][kC / 2][2 * kPanel];  // token pairs of 16 channels
  alignas(64) op_t key[kC / 2][kStep];
  decay = one;
  for (int i = kC - 2; i >= 0; i -= 2) {
    const Wide second = row(r.k, i + 1) * decay;
    decay = decay * row(r.alpha, i + 1);
    const Wide first = row(r.k, i) * decay;
    decay = decay * row(r.alpha, i);
    pair_line(pair[0][i / 2], first.a, second.a);
    pair_line(pair[1][i / 2], first.b, second.b);
  }
  const uint32_t* at[16];
  for (int h = 0; h < 2; ++h)
    for (int t = 0; t < 2; ++t) {
      for (int j = 0; j < 16; ++j) at[j] = reinterpret_cast<const uint32_t*>(pair[h][16 * t + j]);
      transpose16(reinterpret_cast<uint32_t*>(row_in_tiles(w.k_out, kC / kStep, c + 16 * h, t)), at);
    }

  for (int level = 0, half = kC / 2; level < KdaTileRoom::kLevels; ++level, half /= 2) {
    for (int first = 0; first < kC; first += 2 * half) {
      const int anchor = first + half;
      const auto at_row = [&](int i) { return row_in_tiles(w.left[level], k_tiles, first + i, strip); };
      op_t* right = key[first / 2];
      decay = one;
      for (int i = 0; i < half; ++i) {
        decay = decay * row(r.alpha, anchor + i);
        const Wide k = row(r.k, anchor + i) * decay, q = row(r.q, anchor + i) * decay;
        store(at_row(i), k.a, k.b);
        store(at_row(half + i), q.a, q.b);
      }
      decay = one;
      for (int i = half - 1; i >= 0; --i) {
        const Wide k = row(r.k, first + i) * decay;
        store(right + i * kStep, k.a, k.b);
        decay = decay * row(r.alpha, first + i);
      }
    }
    for (int p = 0; p < 2; ++p) {
      for (int j = 0; j < 16; ++j) at[j] = reinterpret_cast<const uint32_t*>(key[16 * p + j]);
      transpose16(reinterpret_cast<uint32_t*>(w.right[level] + (p * k_tiles + strip) * kTile), at);
    }
  }
}

// The scores of all levels, keys and queries of second halves against keys of first halves.
static inline void kda_level_products(const KdaTileRoom& w, int K) {
  const int steps = K / kStep;
  const size_t rows = static_cast<size_t>(steps) * kTile, panel = rows;
  for (int m = 0; m < 2; ++m)
    product_2x2(w.scores[0] + m * 32 * 32, 32, w.left[0] + 2 * m * rows, rows, w.right[0], panel, steps);
  for (int level = 1; level < KdaTileRoom::kLevels; ++level)  // row blocks 2 p and 2 p + 1 meet panel p only
    product_halves(w.scores[level], w.left[level], rows, w.right[level], panel, steps);
}

// -beta_i |k_i| |k_j| row by row into `lower`; the queries' scores as they are into `attend`.
static inline void kda_scores(const KdaTileRoom& w, int row, int column, int n, const float* k,
                              const float* q) {
  const V factor = set1(-w.rows.beta[row] * w.k_norm[row]);
  store_n(w.lower + row * KdaTileRoom::kC + column, factor * load(w.k_norm + column) * load_n(k, n), n);
  store_n(row_in_tiles(w.attend, 2, row, column / kStep) + column % kStep, load_n(q, n), n);
}
static inline void kda_levels(const KdaTileRoom& w) {
  const float *first = w.scores[0], *second = w.scores[1], *third = w.scores[2];
  for (int i = 0; i < 32; ++i)
    for (int c = 0; c < 32; c += 16)
      kda_scores(w, 32 + i, c, 16, first + i * 32 + c, first + (32 + i) * 32 + c);
  for (int g = 0; g < 2; ++g, second += 32 * 16)
    for (int i = 0; i < 16; ++i)
      kda_scores(w, 32 * g + 16 + i, 32 * g, 16, second + i * 16, second + (16 + i) * 16);
  for (int g = 0; g < 4; ++g, third += 16 * 16)  // two groups share a panel: each uses its own 8 columns
    for (int i = 0; i < 8; ++i) {
      const float* at = third + i * 16 + 8 * (g % 2);
      kda_scores(w, 16 * g + 8 + i, 16 * g, 8, at, at + 8 * 16);
    }
}

// The 8 x 8 block of rows `first` .. : A_qk below and on the diagonal, L transposed above it, 64 sums at
// once.
template <int kBlocks>
static inline void kda_diagonal(const KdaTileRoom& w, int first) {
  constexpr int kC = KdaTileRoom::kC, kN = 8;
  const KdaRows r = w.rows;
  alignas(64) float part[kN * kN][16];
  alignas(64) float sum[kN * kN];
  for (int j = 0; j < kN; ++j) {
    V decayed[kBlocks];
    const float* at = r.k + static_cast<size_t>(first + j) * r.ld;
    const float* own = r.q + static_cast<size_t>(first + j) * r.ld;
    V attend = zero();
    for (int b = 0; b < kBlocks; ++b) {
      decayed[b] = load(at + 16 * b);
      attend = fma(load(own + 16 * b), decayed[b], attend);
    }
    store(part[j * kN + j], attend);
    for (int i = j + 1; i < kN; ++i) {
      const size_t row = static_cast<size_t>(first + i) * r.ld;
      const float *q = r.q + row, *k = r.k + row, *alpha = r.alpha + row;
      V lower = zero();
      attend = zero();
      for (int b = 0; b < kBlocks; ++b) {
        decayed[b] = decayed[b] * load(alpha + 16 * b);
        attend = fma(load(q + 16 * b), decayed[b], attend);
        lower = fma(load(k + 16 * b), decayed[b], lower);
      }
      store(part[i * kN + j], attend);
      store(part[j * kN + i], lower);
    }
  }
  for (int i = 0; i < kN * kN; i += 16) sums16(sum + i, part[i]);
  for (int i = 0; i < kN; ++i) {
    const int row = first + i;
    float* lower = w.lower + row * kC + first;
    for (int j = 0; j < i; ++j)
      lower[j] = -r.beta[row] * w.k_norm[row] * w.k_norm[first + j] * sum[j * kN + i];
    store_n(row_in_tiles(w.attend, 2, row, first / kStep) + first % kStep, load_n(sum + i * kN, i + 1), kN);
  }
}

// (I + L)^-1 in f32: 16 x 16 blocks by forward substitution, then merged twice. A doubling inverse loses
// everything with correlated keys (kda.md 2.4); bf16 products here would lose what one rounding of the result
// keeps.
static inline void kda_invert(const KdaTileRoom& w) {
  constexpr int kC = KdaTileRoom::kC;
  float *t = w.inverse, *room = w.product;
  const float* l = w.lower;
  for (int b = 0; b < kC; b += 16) {
    V row[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      row[i] = select(from_bits(1u << i), set1(1.f), zero());
#pragma GCC unroll 16
      for (int j = 0; j < i; ++j) row[i] = fma(set1(l[(b + i) * kC + b + j]), row[j], row[i]);
    }
    for (int i = 0; i < 16; ++i) store(t + (b + i) * kC + b, row[i]);
  }
  for (int b = 0; b < kC; b += 32) {
    mma(room, 16, l + (b + 16) * kC + b, kC, t + b * kC + b, kPanel, kC, 16, 1, 16, false);
    mma(t + (b + 16) * kC + b, kC, t + (b + 16) * kC + b + 16, kC, room, kPanel, 16, 16, 1, 16, false);
  }
  const float* below = l + 32 * kC;
  mma(room, 32, below, kC, t, kPanel, kC, 32, 1, 32, false);
  mma(room + 16, 32, below + 16, kC, t + 16 * kC + 16, kPanel, kC, 32, 1, 16, false);  // t[0..15][16..31] = 0
  mma(t + 32 * kC, kC, t + 32 * kC + 32, kC, room, kPanel, 32, 16, 2, 16, false);
  mma(t + 48 * kC, kC, t + 48 * kC + 32, kC, room, kPanel, 32, 16, 2, 32, false);
  for (int i = 0; i < kC; ++i)
    for (int c = 0; c < kC; c += 16)
      store(row_in_tiles(w.solve, 2, i, c / kStep) + c % kStep, c <= i ? load(t + i * kC + c) : zero());
}

// The part of a chunk that does not touch the state.
static inline void kda_tile_prepare(const KdaTileRoom& w, const KdaSource& s) {
  constexpr int kC = KdaTileRoom::kC;
  const KdaArgs& a = s.a;
  const KdaRows& r = w.rows;
  const int K = a.key_dim, q0 = s.head * K, k0 = a.heads * K + q0, v0 = s.head * a.value_dim;
  for (int i = s.n; i < kC; ++i) {  // tokens that change nothing
    const size_t row = static_cast<size_t>(i) * r.ld;
    r.beta[i] = 0;
    for (int c = 0; c < r.ld; c += 16) {
      store(r.q + row + c, zero());
      store(r.k + row + c, zero());
      store(r.v + row + c, zero());
      store(r.alpha + row + c, set1(1.f));
    }
  }
  kda_betas(r, s);
  for (int i = 0; i < 2 * kC; ++i) store(w.squares + i * 16, zero());
  for (int i = 0; i < kC; ++i)
    for (int t = 0; t < 2; ++t) store(row_in_tiles(w.attend, 2, i, t), zero(), zero());
  for (int c = 0; c < K; c += kStep) {
    kda_conv_line(r.q + c, r.ld, s, q0 + c, q0 + c);
    kda_conv_line(r.k + c, r.ld, s, a.k_offset + q0 + c, k0 + c);
    kda_decay_line(r.alpha + c, r.ld, s, c);
    kda_strip(w, K, c);
  }
  kda_conv_values(r.v, r.ld, s, a.v_offset + v0, 2 * a.heads * K + v0, a.value_dim);
  const V scale = set1(rsqrt(static_cast<float>(K)));
  for (int i = 0; i < kC; i += 16) {
    sums16(w.k_norm + i, w.squares + i * 16);
    sums16(w.q_norm + i, w.squares + (kC + i) * 16);
    store(w.k_norm + i, rsqrt(load(w.k_norm + i) + set1(1e-6f)));
    store(w.q_norm + i, rsqrt(load(w.q_norm + i) + set1(1e-6f)) * scale);
  }
  kda_level_products(w, K);
  kda_levels(w);
  for (int first = 0; first < kC; first += 8) switch (K / 16) {
      case 2:
        kda_diagonal<2>(w, first);
        break;
      case 4:
        kda_diagonal<4>(w, first);
        break;
      case 8:
        kda_diagonal<8>(w, first);
        break;
      default:
        kda_diagonal<16>(w, first);
    }
  kda_invert(w);
}

// Panels of the state as it is: the first chunk of a piece; later ones find them written by the update.
static inline void kda_state_lines(const KdaTileRoom& w, const KdaArgs& a, const float* state) {
  for (int d = 0; d < a.key_dim; d += 2)
    for (int c = 0; c < a.v_stride; c += kPanel) {
      const float* at = state + static_cast<size_t>(d) * a.v_stride + c;
      pair_line(w.state_lines + static_cast<size_t>(c) * a.key_dim + d * kPanel, load(at),
                load(at + a.v_stride));
    }
}

// Up to 64 value columns: corrections, outputs, update.
static inline void kda_tile_columns(const KdaTileRoom& w, const KdaArgs& a, float* state, int column,
                                    int panels) {
  constexpr int kC = KdaTileRoom::kC, kWide = KdaTileRoom::kWide;
  const KdaRows r = w.rows;
  const int K = a.key_dim, k_tiles = K / kStep, block = k_tiles * kTile;
  const size_t panel = static_cast<size_t>(K) * kPanel, chunk_panel = static_cast<size_t>(kC) * kPanel;
  op_t* lines = w.state_lines + static_cast<size_t>(column) * K;
  const auto o_row = [&](int i) { return w.o + static_cast<size_t>(i) * r.ld + column; };
  for (int i = 0; i < kC; i += 16) {
    const op_t* keys = w.in + static_cast<size_t>(i / 16) * block;
    sum_products(w.u + i * kWide, kWide, panels, Products{keys, lines, panel, k_tiles});
  }
  for (int p = 0; p < panels; ++p) {
    const int c = kPanel * p, left = a.value_dim - column - c;
    const auto residual = [&](int i) {
      return set1(r.beta[i]) * (load_n(r.v + static_cast<size_t>(i) * r.ld + column + c, left) -
                                set1(w.k_norm[i]) * load(w.u + i * kWide + c));
    };
    for (int i = 0; i < kC; i += 2)
      pair_line(w.r_lines + (p * kC + i) * kPanel, residual(i), residual(i + 1));
  }
  for (int i = 0; i < kC; i += 16)  // lower triangular: rows below 32 need one step of k
    sum_products(w.u + i * kWide, kWide, panels,
                 Products{w.solve + i / 16 * 2 * kTile, w.r_lines, chunk_panel, i / 32 + 1});
  for (int p = 0; p < panels; ++p)
    for (int i = 0; i < kC; i += 2) {
      const float* e = w.u + i * kWide + kPanel * p;
      pair_line(w.e_lines + (p * kC + i) * kPanel, set1(w.k_norm[i]) * load(e),
                set1(w.k_norm[i + 1]) * load(e + kWide));
    }
  for (int i = 0; i < kC; i += 16) {
    const op_t* queries = w.in + static_cast<size_t>((kC + i) / 16) * block;
    sum_products(o_row(i), r.ld, panels, Products{queries, lines, panel, k_tiles},
                 Products{w.attend + i / 16 * 2 * kTile, w.e_lines, chunk_panel, i / 32 + 1});
  }
  for (int d = 0; d < K; d += kStep) {  // even channels, then odd ones
    const op_t* keys = w.k_out + static_cast<size_t>(d / 16) * 2 * kTile;
    float* odd_rows = w.product + 16 * kWide;
    sum_products(w.product, kWide, panels, Products{keys, w.e_lines, chunk_panel, kC / kStep});
    sum_products(odd_rows, kWide, panels, Products{keys + 2 * kTile, w.e_lines, chunk_panel, kC / kStep});
    for (int i = 0; i < 16; ++i)
      for (int p = 0; p < panels; ++p) {
        const int c = kPanel * p;
        float* at = state + static_cast<size_t>(d + 2 * i) * a.v_stride + column + c;
        const V x = fma(set1(w.last[d + i]), load(at), load(w.product + i * kWide + c));
        const V y = fma(set1(w.last[d + 16 + i]), load(at + a.v_stride), load(odd_rows + i * kWide + c));
        store(at, x);
        store(at + a.v_stride, y);
        pair_line(lines + p * panel + (d + 2 * i) * kPanel, x, y);
      }
  }
}

static inline void kda_tiles(const KdaTileRoom& w, const KdaSource& s, float* state, bool lines_known) {
  const KdaArgs& a = s.a;
  kda_tile_prepare(w, s);
  if (!lines_known) kda_state_lines(w, a, state);
  for (int column = 0; column < a.value_dim; column += KdaTileRoom::kWide)
    kda_tile_columns(w, a, state, column, min_int(4, (a.v_stride - column) / kPanel));
  kda_tile_outputs(s, w.o, w.rows.ld, w.q_norm, w.squares);
}

#endif
