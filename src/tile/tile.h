// Row and tile operations shared by the kernels, destination first.

static inline int min_int(int a, int b) { return a < b ? a : b; }
static inline int max_int(int a, int b) { return a > b ? a : b; }

template <int N>
struct Count {  // a number the compiler knows, for generic lambdas
  static constexpr int value = N;
};
// All 16 lanes, where a row's loads and stores may be cut to fewer.
struct Full {};
template <class T>
static inline V load_n(const T* p, Full) {
  return load(p);
}
template <class T>
static inline void store_n(T* p, V x, Full) {
  store(p, x);
}

// Two sums of so many V fit the registers; a power of two, as heads are wide.
static constexpr int kWidePanels = kBlockRows * kBlockPanels >= 16 ? 8 : kBlockRows * kBlockPanels >= 4 ? 2 : 1;

// Part [first, last) of `total` units for a task.
struct Slice {
  int first, last;
};
static inline Slice slice(int total, const Call& call) {
  return {static_cast<int>(static_cast<int64_t>(total) * call.task / call.tasks),
          static_cast<int>(static_cast<int64_t>(total) * (call.task + 1) / call.tasks)};
}

// A bump allocator over the thread's scratch; 64-byte aligned pieces.
struct Scratch {
  std::byte* next;
  template <class T>
  T* take(size_t count) {
    std::byte* p = next;
    next += (count * sizeof(T) + 63) & ~size_t{63};
    return reinterpret_cast<T*>(p);
  }
};

template <class T>
static inline void clear(T* p, int from, int to) {
  for (int i = from; i < to; ++i) p[i] = T{};
}

#ifndef WEFT_BF16_PRODUCT
// out[i] = sum of the lanes of row i of 16
static inline void sums16(float* out, const float* rows) {
  for (int i = 0; i < 16; ++i) out[i] = hsum(load(rows + 16 * i));
}
#endif

template <class T>
static inline void copy_row(T* to, const T* from, int n) {  // n a multiple of 32
  constexpr int kLine = 64 / static_cast<int>(sizeof(T));
  for (int i = 0; i < n; i += kLine) copy_line(to + i, from + i);
}

// Sum of squares: four chains, one order for every caller. kFetch: what lies `ahead` of each line goes to L2.
template <bool kFetch = false>
static inline float sum_squares(const float* x, int n, [[maybe_unused]] long ahead = 0) {
  V s0 = zero(), s1 = zero(), s2 = zero(), s3 = zero();
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    if constexpr (kFetch)
      for (int line = 0; line < 64; line += 16) __builtin_prefetch(x + i + line + ahead, 0, 2);
    const V a = load(x + i), b = load(x + i + 16), c = load(x + i + 32), d = load(x + i + 48);
    s0 = fma(a, a, s0);
    s1 = fma(b, b, s1);
    s2 = fma(c, c, s2);
    s3 = fma(d, d, s3);
  }
  for (; i < n; i += 16) {
    const V a = load_n(x + i, n - i);
    s0 = fma(a, a, s0);
  }
  return hsum((s0 + s1) + (s2 + s3));
}
// out = sum over `rows` of weight[r] x[r]; returns its sum of squares, in the order of sum_squares
static inline float weighted_rows(float* out, const float* const* x, const float* weight, int rows, int n) {
  V square[4] = {zero(), zero(), zero(), zero()};
  int i = 0;
  for (; i + 64 <= n; i += 64) {
    V y[4] = {zero(), zero(), zero(), zero()};
    for (int r = 0; r < rows; ++r)
      for (int p = 0; p < 4; ++p) y[p] = fma(set1(weight[r]), load(x[r] + i + 16 * p), y[p]);
    for (int p = 0; p < 4; ++p) {
      store(out + i + 16 * p, y[p]);
      square[p] = fma(y[p], y[p], square[p]);
    }
  }
  for (; i < n; i += 16) {
    V y = zero();
    for (int r = 0; r < rows; ++r) y = fma(set1(weight[r]), load_n(x[r] + i, n - i), y);
    store_n(out + i, y, n - i);
    square[0] = fma(y, y, square[0]);
  }
  return hsum((square[0] + square[1]) + (square[2] + square[3]));
}
static inline float rsqrt(float x) { return 1.f / __builtin_sqrtf(x); }
static inline bool finite(float x) { return x - x == 0.f; }

static inline void see_nonfinite(const StepHeader& step, int token, int site, float value) {
  if (!finite(value) && step.nonfinite && step.nonfinite[token] > site) step.nonfinite[token] = site;
}

// Writes a row as f32 and as operand, each where wanted, both cleared to the next multiple of 32.
static inline void store_row(float* out_f32, op_t* out_op, const float* x, const float* weight, float factor, int n) {
  const V f = set1(factor);
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    const V y = load(x + i) * f * load(weight + i);
    if (out_f32) store(out_f32 + i, y);
    if (out_op) store(out_op + i, y);
  }
  if (const int left = n - i; left > 0) {
    const V y = load_n(x + i, left) * f * load_n(weight + i, left);
    if (out_f32) store_n(out_f32 + i, y, left);
    if (out_op) store_n(out_op + i, y, left);
  }
  if (out_f32) clear(out_f32, n, round_up(n, kStep));
  if (out_op) clear(out_op, n, round_up(n, kStep));
}

// A panel of 16 keys whose k runs along `width` (a multiple of 32) elements of their rows.
static inline void pack_keys(op_t* panel, const op_t* const* row, int width) {
  constexpr int kPerDword = 4 / static_cast<int>(sizeof(op_t));
  const uint32_t* at[16];
  for (int e = 0; e < width; e += 16 * kPerDword) {
    for (int r = 0; r < 16; ++r) at[r] = reinterpret_cast<const uint32_t*>(row[r] + e);
    transpose16(reinterpret_cast<uint32_t*>(panel + e * kPanel), at);
  }
}

// Product with rows as values: C [m, 16 np] += P [m, keys] R, R gathered rows [keys, ld] of operand type.
// `lines` is room for np panels of `keys` on ISAs whose product wants pairs: pack_values fills them, `room`
// keys a panel.
template <class Op>
static inline void pack_values(Op* lines, const Op* rows, int ld, int room, int np, int keys) {
  if constexpr (sizeof(Op) == 2)
    for (int i = 0; i < np; ++i)
      for (int k = 0; k < keys; k += 2)
        interleave(lines + (static_cast<size_t>(room) * i + k) * kPanel,
                   rows + static_cast<size_t>(k) * ld + kPanel * i,
                   rows + static_cast<size_t>(k + 1) * ld + kPanel * i);
}
template <class Op>
static inline void mma_packed_values(float* c, int ldc, const Op* p, int ldp, const Op* rows, int ld,
                                     const Op* lines, int room, int m, int np, int keys) {
  if constexpr (sizeof(Op) == 4)
    mma(c, ldc, p, ldp, rows, kPanel, ld, m, np, keys, true);
  else
    mma(c, ldc, p, ldp, lines, static_cast<size_t>(room) * kPanel, m, np, keys, true);
}
template <class Op>
static inline void mma_values(float* c, int ldc, const Op* p, int ldp, const Op* rows, int ld, Op* lines,
                              int m, int np, int keys) {
  pack_values(lines, rows, ld, keys, np, keys);
  mma_packed_values(c, ldc, p, ldp, rows, ld, lines, keys, m, np, keys);
}

// Product with keys in panels of `width` k: C [m, 16 np] = Q [m, width] K^T.
template <class Op>
static inline void mma_keys(float* c, int ldc, const Op* q, int ldq, const Op* panels, int m, int np, int width) {
  const size_t panel = static_cast<size_t>(width) * kPanel;
  if constexpr (sizeof(Op) == 4) mma(c, ldc, q, ldq, panels, panel, kPanel, m, np, width, false);
  else mma(c, ldc, q, ldq, panels, panel, m, np, width, false);
}
