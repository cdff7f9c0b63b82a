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

// One kind of unit does both here.
template <class Side>
static inline void mma_beside(float* c, int ldc, const bf16* a, int lda, const bf16* b, size_t panel, int m,
                              int np, int k, bool accumulate, Side& side) {
  mma(c, ldc, a, lda, b, panel, m, np, k, accumulate);
  side.finish();
}

#endif
