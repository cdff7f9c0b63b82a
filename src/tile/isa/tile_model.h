// A software model of the tile instructions, for tests of the amx kernels on machines without AMX. It follows the
// documented order (even and odd k summed apart from zero, then one add to C) and traps where silicon would fault
// or silently be wrong: unconfigured tiles, one tile in two roles, a read of a tile never written.

struct Tile {
  alignas(64) uint8_t row[16][64];
  bool written;
};
static thread_local Tile model_tile[8];
static thread_local bool model_configured;

static void tile_configure() {
  model_configured = true;
  for (Tile& t : model_tile) t.written = false;
}
static inline Tile& model_write(int t) {
  if (!model_configured) __builtin_trap();
  model_tile[t].written = true;
  return model_tile[t];
}
static inline const Tile& model_read(int t) {
  if (!model_configured || !model_tile[t].written) __builtin_trap();
  return model_tile[t];
}
template <int T>
static inline void tile_zero() {
  __builtin_memset(model_write(T).row, 0, sizeof(Tile::row));
}
template <int T>
static inline void tile_load(const void* p, long stride_bytes) {
  Tile& t = model_write(T);
  for (int r = 0; r < 16; ++r) __builtin_memcpy(t.row[r], static_cast<const uint8_t*>(p) + r * stride_bytes, 64);
}
template <int T>
static inline void tile_store(void* p, long stride_bytes) {
  const Tile& t = model_read(T);
  for (int r = 0; r < 16; ++r) __builtin_memcpy(static_cast<uint8_t*>(p) + r * stride_bytes, t.row[r], 64);
}
template <int C, int A, int B>
static inline void tile_dot() {
  static_assert(C != A && C != B && A != B);
  const Tile &a = model_read(A), &b = model_read(B);
  model_read(C);
  for (int r = 0; r < 16; ++r) {
    V low = zero(), high = zero();
    for (int pair = 0; pair < 16; ++pair) {
      const bf16* x = reinterpret_cast<const bf16*>(a.row[r]) + 2 * pair;
      const bf16* line = reinterpret_cast<const bf16*>(b.row[pair]);
      low = fma(set1(widen(x[0])), even(line), low);
      high = fma(set1(widen(x[1])), odd(line), high);
    }
    float* c = reinterpret_cast<float*>(model_tile[C].row[r]);
    store(c, load(c) + (low + high));
  }
}
template <int C, int A, int B>
static inline void tile_dot_int8() {
  static_assert(C != A && C != B && A != B);
  const Tile &a = model_read(A), &b = model_read(B);
  model_read(C);
  for (int r = 0; r < 16; ++r)
    for (int column = 0; column < 16; ++column) {
      uint32_t sum;  // wraps as silicon does
      __builtin_memcpy(&sum, model_tile[C].row[r] + 4 * column, 4);
      for (int k = 0; k < 64; ++k)
        sum += static_cast<uint32_t>(static_cast<int8_t>(a.row[r][k]) *
                                     static_cast<int8_t>(b.row[k / 4][4 * column + k % 4]));
      __builtin_memcpy(model_tile[C].row[r] + 4 * column, &sum, 4);
    }
}
