// Products whose left operand lies in tile order, for kernels that write their operands themselves.
#ifdef WEFT_TILES

// Left operands lie in tile order: 16 rows x 32 k are 1 KB, k ahead of rows. Right operands are panels of 16 columns.
static constexpr int kTile = 16 * kStep;

// A [16, 32 steps] against panels of B
struct Products {
  const op_t *a, *b;
  size_t panel;
  int steps;
};
template <int N>
static inline void add_products(const Products& x) {
  const op_t *a = x.a, *b = x.b;
  for (int k = 0; k < x.steps; ++k, a += kTile, b += kTile) {
    tile_load<4>(a, 64);
    tile_load<5>(b, 64);
    if constexpr (N > 1) tile_load<6>(b + x.panel, 64);
    if constexpr (N > 2) tile_load<7>(b + 2 * x.panel, 64);
    tile_dot<0, 4, 5>();
    if constexpr (N > 3) tile_load<5>(b + 3 * x.panel, 64);
    if constexpr (N > 1) tile_dot<1, 4, 6>();
    if constexpr (N > 2) tile_dot<2, 4, 7>();
    if constexpr (N > 3) tile_dot<3, 4, 5>();
  }
}

// C [16, 16 N] = A B, or the sum of several: one row block against up to four panels. Blocks of 2 x 2 load one tile
// less for five, but read the left operands, which come from L2, twice as often.
template <int N, class... More>
static inline void product_tiles(float* c, long stride, const Products& x, const More&... more) {
  tile_zero<0>();
  if constexpr (N > 1) tile_zero<1>();
  if constexpr (N > 2) tile_zero<2>();
  if constexpr (N > 3) tile_zero<3>();
  add_products<N>(x);
  (add_products<N>(more), ...);
  tile_store<0>(c, stride);
  if constexpr (N > 1) tile_store<1>(c + 16, stride);
  if constexpr (N > 2) tile_store<2>(c + 32, stride);
  if constexpr (N > 3) tile_store<3>(c + 48, stride);
}
template <class... More>
static inline void sum_products(float* c, int ldc, int panels, const Products& x, const More&... more) {
  const long stride = ldc * 4L;
  switch (panels) {
    case 1: return product_tiles<1>(c, stride, x, more...);
    case 2: return product_tiles<2>(c, stride, x, more...);
    case 3: return product_tiles<3>(c, stride, x, more...);
    default: return product_tiles<4>(c, stride, x, more...);
  }
}
// Two row blocks `rows` elements apart against two panels: C [32, 32]
static inline void product_2x2(float* c, int ldc, const op_t* a, size_t rows, const op_t* b, size_t panel, int steps) {
  const long stride = ldc * 4L;
  float* below = c + 16L * ldc;
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int k = 0; k < steps; ++k, a += kTile, b += kTile) {
    tile_load<4>(a, 64);
    tile_load<6>(b, 64);
    tile_load<7>(b + panel, 64);
    tile_dot<0, 4, 6>();
    tile_load<5>(a + rows, 64);
    tile_dot<1, 4, 7>();
    tile_dot<2, 5, 6>();
    tile_dot<3, 5, 7>();
  }
  tile_store<0>(c, stride), tile_store<1>(c + 16, stride);
  tile_store<2>(below, stride), tile_store<3>(below + 16, stride);
}
// Four row blocks, the first two against one panel, the others against the next: C [64, 16]
static inline void product_halves(float* c, const op_t* a, size_t rows, const op_t* b, size_t panel, int steps) {
  tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
  for (int k = 0; k < steps; ++k, a += kTile, b += kTile) {
    tile_load<6>(b, 64);
    tile_load<4>(a, 64);
    tile_dot<0, 4, 6>();
    tile_load<5>(a + rows, 64);
    tile_dot<1, 5, 6>();
    tile_load<7>(b + panel, 64);
    tile_load<4>(a + 2 * rows, 64);
    tile_dot<2, 4, 7>();
    tile_load<5>(a + 3 * rows, 64);
    tile_dot<3, 5, 7>();
  }
  tile_store<0>(c, 64), tile_store<1>(c + 256, 64), tile_store<2>(c + 512, 64), tile_store<3>(c + 768, 64);
}
static inline op_t* row_in_tiles(op_t* tiles, int k_tiles, int row, int k_tile) {
  return tiles + (static_cast<size_t>(row / 16) * k_tiles + k_tile) * kTile + row % 16 * kStep;
}

#endif
