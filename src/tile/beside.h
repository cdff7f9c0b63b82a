// Products that other work is done beside: tile and vector units run at once only if their instructions are
// neighbours, for the out-of-order window holds a few tile products and no more. `side.step()` does a share
// of the other work, `side.finish()` what is left of it.

#ifdef WEFT_TILES

template <class Side>
static inline void mma_beside(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int m,
                              int np, int k, bool accumulate, Side& side) {
  const long c_stride = ldc * 4L, a_stride = lda * 2L;
  for (int p = 0; p < np; p += 2)
    for (int i = 0; i < m; i += 32) {
      float *c0 = c + static_cast<size_t>(i) * ldc + kPanel * p, *c1 = c0 + 16L * ldc;
      const bf16 *a0 = a + static_cast<size_t>(i) * lda, *a1 = a0 + 16L * lda, *b0 = b + panel * p,
                 *b1 = b0 + panel;
      if (m - i <= 16 || np - p == 1) {
        mma(c0, ldc, a0, lda, b0, panel, m - i <= 16 ? 16 : 32, np - p == 1 ? 1 : 2, k, accumulate);
        continue;
      }
      if (accumulate) {
        tile_load<0>(c0, c_stride), tile_load<1>(c0 + 16, c_stride);
        tile_load<2>(c1, c_stride), tile_load<3>(c1 + 16, c_stride);
      } else {
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
      }
      for (int kk = 0; kk < k; kk += kStep) {
        tile_load<4>(a0 + kk, a_stride);
        tile_load<6>(b0 + kk * kPanel, 64);
        tile_load<7>(b1 + kk * kPanel, 64);
        tile_load<5>(a1 + kk, a_stride);
        tile_dot<0, 4, 6>(), tile_dot<1, 4, 7>(), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
        side.step();
      }
      tile_store<0>(c0, c_stride), tile_store<1>(c0 + 16, c_stride);
      tile_store<2>(c1, c_stride), tile_store<3>(c1 + 16, c_stride);
    }
  side.finish();
}

#elif defined(WEFT_BF16_PRODUCT)

#define WEFT_FETCHING_PRODUCT 1  // mma_keys_beside

// One kind of unit does both here. Not inline: its caller needs all registers for itself.
[[gnu::noinline]] static void mma_apart(float* c, int ldc, const bf16* a, int lda, const bf16* b,
                                        size_t panel, int m, int np, int k, bool accumulate) {
  mma(c, ldc, a, lda, b, panel, m, np, k, accumulate);
}
template <class Side>
static inline void mma_beside(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int m,
                              int np, int k, bool accumulate, Side& side) {
  mma_apart(c, ldc, a, lda, b, panel, m, np, k, accumulate);
  side.finish();
}

// C [m, 16 np] = A B as mma, m a multiple of 8 and k of 32, with fetches between its steps.
template <int NP, class Side>
[[gnu::noinline]] static void mma_fetching(float* c, int ldc, const bf16* a, int lda, const bf16* b,
                                           size_t panel, int k, Side& side) {
  side.begin();
  V acc[8][NP];
  for (int i = 0; i < 8; ++i)
    for (int p = 0; p < NP; ++p) acc[i][p] = zero();
  for (int step = 0; step < k; step += kStep) {
    side.step(step / kStep);
    for (int kk = step; kk < step + kStep; kk += 2) {
      Line line[NP];
      for (int p = 0; p < NP; ++p) line[p] = load_line(b + p * panel + kk * kPanel);
      for (int i = 0; i < 8; ++i)
        for (int p = 0; p < NP; ++p) acc[i][p] = dot_pair(acc[i][p], a + i * lda + kk, line[p]);
    }
  }
  for (int i = 0; i < 8; ++i)
    for (int p = 0; p < NP; ++p) store(c + i * ldc + kPanel * p, acc[i][p]);
}

// C [32, 8] = A B, where B holds its 8 columns twice: a register takes two rows of A. 1.5 cycles a product,
// for the broadcasts into half a register are instructions too; with idle lanes it was 2.3 per useful one.
template <int kWidth, class Side>
[[gnu::noinline]] static void mma_half(float* c, int ldc, const bf16* a, int lda, const bf16* b, Side& side) {
  const int width = kWidth ? kWidth : lda;
  side.begin();
  V acc[16];
  for (int i = 0; i < 16; ++i) acc[i] = zero();
  for (int step = 0; step < width; step += kStep) {
    side.step(step / kStep);
    for (int k = step; k < step + kStep; k += 2) {
      const Line line = load_line(b + k * kPanel);
      for (int i = 0; i < 16; ++i)
        acc[i] = dot_pairs(acc[i], a + 2 * i * width + k, a + (2 * i + 1) * width + k, line);
    }
  }
  for (int i = 0; i < 16; ++i) store_halves(c + 2 * i * ldc, c + (2 * i + 1) * ldc, acc[i]);
}

// C [m, columns] += P V, m rounded up to 8; V are rows as they lie, in pieces of 32. What pairs them has
// company here; writing lines and reading them back took a fifth of the time of 8 heads over 32K keys.
[[gnu::noinline]] static void mma_row_values(float* c, int ldc, const bf16* p, int ldp,
                                             const bf16* const* piece, int ld, int m, int columns,
                                             int keys) {
  for (int r = 0; r < m; r += 8, c += 8 * ldc, p += 8 * ldp)
    for (int i = 0; i < columns; i += 32) {
      V acc[8][2];
      for (int h = 0; h < 8; ++h)
        acc[h][0] = load(c + h * ldc + i), acc[h][1] = load(c + h * ldc + i + 16);
      for (int j = 0; j < keys; j += 32) {
        const bf16* row = piece[j / 32] + i;
        for (int k = j; k < j + 32; k += 2, row += 2 * ld) {
          Line line0, line1;
          pair_lines(line0, line1, row, row + ld);
          for (int h = 0; h < 8; ++h) {
            acc[h][0] = dot_pair(acc[h][0], p + h * ldp + k, line0);
            acc[h][1] = dot_pair(acc[h][1], p + h * ldp + k, line1);
          }
        }
      }
      for (int h = 0; h < 8; ++h)
        store(c + h * ldc + i, acc[h][0]), store(c + h * ldc + i + 16, acc[h][1]);
    }
}

// As mma_keys, m a multiple of 32.
template <class Side>
static inline void mma_keys_beside(float* c, int ldc, const bf16* a, const bf16* b, int m, int np, int width,
                                   bool half, Side& side) {
  const size_t panel = static_cast<size_t>(width) * kPanel;
  if (half) {
    for (int i = 0; i < m; i += 32)
      width == 576 ? mma_half<576>(c + i * ldc, ldc, a + i * width, width, b, side)
                   : mma_half<0>(c + i * ldc, ldc, a + i * width, width, b, side);
    return;
  }
  for (int p = 0; p < np; p += 2)
    for (int i = 0; i < m; i += 8)
      if (np - p > 1)
        mma_fetching<2>(c + i * ldc + kPanel * p, ldc, a + i * width, width, b + panel * p, panel, width,
                        side);
      else
        mma_fetching<1>(c + i * ldc + kPanel * p, ldc, a + i * width, width, b + panel * p, panel, width,
                        side);
}
// What mma_keys_beside is made of, for its side to share itself out.
static inline int key_products(int m, int np, bool half) {
  return half ? m / 32 : m / 8 * ((np + 1) / 2);
}

#endif

// Whether rows stand twice in their panel, and how many of `padded` rows a product has to write when so many
// are used; whether mma_row_values takes their values.
#ifdef WEFT_FETCHING_PRODUCT
static inline bool half_panel(int rows) {
  return rows <= kPanel / 2;
}
static inline int product_rows(int padded, int used) {
  return min_int(padded, used);
}
static inline bool rows_as_values(int rows, int columns) {
  return rows <= kPanel && columns % 32 == 0;
}
#else
static inline bool half_panel(int) {
  return false;
}
static inline int product_rows(int padded, int) {
  return padded;
}
static inline bool rows_as_values(int, int) {
  return false;
}
#endif
