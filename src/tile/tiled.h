// Products whose left operand lies in tile order, for kernels that write their operands themselves.
#ifdef WEFT_TILES

// Left operands lie in tile order: 16 rows x 32 k are 1 KB, k ahead of rows. Right operands are panels of 16 columns.
static constexpr int kTile = 16 * kStep;

// C [16, 16 N] (+)= A B over `steps` of 32 k: one row block against up to four panels. Blocks of 2 x 2 load one tile less
// for five, but read the left operands, which come from L2, twice as often.
template <int N>
static inline void product_tiles(float* c, long stride, const op_t* a, const op_t* b, size_t panel, int steps,
                                bool accumulate) {
  if (accumulate) {
    tile_load<0>(c, stride);
    if constexpr (N > 1) tile_load<1>(c + 16, stride);
    if constexpr (N > 2) tile_load<2>(c + 32, stride);
    if constexpr (N > 3) tile_load<3>(c + 48, stride);
  } else {
    tile_zero<0>();
    if constexpr (N > 1) tile_zero<1>();
    if constexpr (N > 2) tile_zero<2>();
    if constexpr (N > 3) tile_zero<3>();
  }
  for (int k = 0; k < steps; ++k, a += kTile, b += kTile) {
    tile_load<4>(a, 64);
    tile_load<5>(b, 64);
    if constexpr (N > 1) tile_load<6>(b + panel, 64);
    if constexpr (N > 2) tile_load<7>(b + 2 * panel, 64);
    tile_dot<0, 4, 5>();
    if constexpr (N > 3) tile_load<5>(b + 3 * panel, 64);
    if constexpr (N > 1) tile_dot<1, 4, 6>();
    if constexpr (N > 2) tile_dot<2, 4, 7>();
    if constexpr (N > 3) tile_dot<3, 4, 5>();
  }
  tile_store<0>(c, stride);
  if constexpr (N > 1) tile_store<1>(c + 16, stride);
  if constexpr (N > 2) tile_store<2>(c + 32, stride);
  if constexpr (N > 3) tile_store<3>(c + 48, stride);
}
static inline void product_tiles(float* c, int ldc, const op_t* a, const op_t* b, size_t panel, int panels, int steps,
                                bool accumulate) {
  const long stride = ldc * 4L;
  switch (panels) {
    case 1: return product_tiles<1>(c, stride, a, b, panel, steps, accumulate);
    case 2: return product_tiles<2>(c, stride, a, b, panel, steps, accumulate);
    case 3: return product_tiles<3>(c, stride, a, b, panel, steps, accumulate);
    default: return product_tiles<4>(c, stride, a, b, panel, steps, accumulate);
  }
}
static inline op_t* row_in_tiles(op_t* tiles, int k_tiles, int row, int k_tile) {
  return tiles + (static_cast<size_t>(row / 16) * k_tiles + k_tile) * kTile + row % 16 * kStep;
}

#endif
