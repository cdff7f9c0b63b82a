// The six tile instructions, as inline assembly: GCC 12's intrinsics need literal tile numbers, carry no memory
// clobber, and at -O3 the compiler dropped stores to the configuration.

struct alignas(64) TileConfig {  // one palette for ever: eight tiles of 16 rows x 64 bytes
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

static void tile_configure() {
  const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}
template <int T>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
static inline void tile_load(const void* p, long stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
}
template <int T>
static inline void tile_store(void* p, long stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
}
// tile C += tile A (16 rows x 32 k) tile B (16 k pairs x 16 columns)
template <int C, int A, int B>
static inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// The same in int8: 64 k of signed bytes, lines of 16 columns x 4 k, int32 sums
template <int C, int A, int B>
static inline void tile_dot_int8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
