// One row (without tiles: a few) times panels of narrow weights, expanded in registers.
//
// A buffer of lines in L1, and sixteen rows of a tile for one, cost more than the memory behind the codes: 35
// ns per 512 weights of e4m3 and 28 of mxfp4 against 27 and 18 here, where memory takes 25 and 13 (Emerald
// Rapids). Tiles also slow down five times when a neighbour on the same core uses them.
//
// Bits are those of the product of many rows. There, a tile product of 32 k is two chains from zero, over
// even and over odd k, then one addition of both to each other and one to C, everything rounded and flushed
// as f32 is in a worker thread: measured equal to silicon's on 3e7 values, denormals and overflows among
// them.
#ifdef WEFT_BF16_PRODUCT

struct Panels {  // consecutive ones of packed.h
  const uint8_t* codes;
  size_t bytes;  // of one panel
  const uint8_t* scales;
  size_t scale_bytes;
  int k;
};
// One step of 32 k of panels side by side. Reading a line asks for one that comes later.
struct StepCodes {
  const uint8_t* at;
  size_t panel;
  size_t ahead;
  const uint8_t* line(int p, int i) const {
    const uint8_t* codes = at + p * panel + 64 * i;
    prefetch(codes + ahead);
    return codes;
  }
};

#ifdef WEFT_TILES

using row_t = float;  // what a row is multiplied as

static inline const float* row_operand(float* room, const bf16* x, int k) {
  for (int i = 0; i < k; i += 16) store(room + i, load(x + i));
  return room;
}

// sum[p] += one step of 32 k of panel p
struct PairSteps {  // bf16
  static constexpr int kBytes = 1024, kAhead = 1024;
  template <int NP>
  void add(V (&sum)[NP], const float* x, const StepCodes& codes) const {
    V low[NP], high[NP];
    for (int p = 0; p < NP; ++p) low[p] = high[p] = zero();
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
#pragma GCC unroll 8
      for (int p = 0; p < NP; ++p) {
        const bf16* line = reinterpret_cast<const bf16*>(codes.line(p, i));
        low[p] = fma(set1(x[2 * i]), even(line), low[p]);
        high[p] = fma(set1(x[2 * i + 1]), odd(line), high[p]);
      }
    for (int p = 0; p < NP; ++p) sum[p] = sum[p] + (low[p] + high[p]);
  }
};
struct ByteSteps {
  static constexpr int kBytes = 512, kAhead = 2048;  // 1 KB lost 3 % of bandwidth, 4 KB or L2 only up to 10 %
  const ByteLookup look;
  template <int NP>
  void add(V (&sum)[NP], const float* x, const StepCodes& codes) const {
    V a[NP], b[NP];  // lanes: (column, parity of k); a and b have half of the columns each
    for (int p = 0; p < NP; ++p) a[p] = b[p] = zero();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const V x0 = repeat_pair(x + 4 * i), x1 = repeat_pair(x + 4 * i + 2);
#pragma GCC unroll 8
      for (int p = 0; p < NP; ++p) {
        V a0, a1, b0, b1;
        look.widen(raw(codes.line(p, i)), a0, a1, b0, b1);
        a[p] = fma(x0, a0, a[p]), b[p] = fma(x0, b0, b[p]);
        a[p] = fma(x1, a1, a[p]), b[p] = fma(x1, b1, b[p]);
      }
    }
    for (int p = 0; p < NP; ++p) sum[p] = sum[p] + add_pairs(a[p], b[p]);
  }
};
struct NibbleSteps {
  static constexpr int kBytes = 256, kAhead = 2048;
  const V table = load(kE2m1);
  template <int NP>
  void add(V (&sum)[NP], const float* x, const StepCodes& codes) const {
    V low[NP], high[NP];
    for (int p = 0; p < NP; ++p) low[p] = high[p] = zero();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i, x += 8)
#pragma GCC unroll 8
      for (int p = 0; p < NP; ++p) {
        const Line code = raw(codes.line(p, i));  // a column's nibbles: four of even k, then four of odd k
        low[p] = fma(set1(x[0]), nibble<0>(code, table), low[p]);
        high[p] = fma(set1(x[1]), nibble<4>(code, table), high[p]);
        low[p] = fma(set1(x[2]), nibble<1>(code, table), low[p]);
        high[p] = fma(set1(x[3]), nibble<5>(code, table), high[p]);
        low[p] = fma(set1(x[4]), nibble<2>(code, table), low[p]);
        high[p] = fma(set1(x[5]), nibble<6>(code, table), high[p]);
        low[p] = fma(set1(x[6]), nibble<3>(code, table), low[p]);
        high[p] = fma(set1(x[7]), nibble<7>(code, table), high[p]);
      }
    for (int p = 0; p < NP; ++p) sum[p] = sum[p] + (low[p] + high[p]);
  }
};
// An MX group is a step. Its scale is a power of two, so it may wait for the step's sum: the bits differ from
// scaled weights' only where a product leaves the normal range of f32.
template <int NP, class Steps>
static inline void add_group(const Steps& steps, V (&sum)[NP], const float* x, const StepCodes& codes,
                             const uint8_t* e8m0, size_t scale_panel) {
  V part[NP];
  for (int p = 0; p < NP; ++p) part[p] = zero();
  steps.add(part, x, codes);
  for (int p = 0; p < NP; ++p) sum[p] = fma(part[p], powers(e8m0 + p * scale_panel), sum[p]);
}
static inline ByteSteps mxfp8_steps() {
  return {ByteLookup(kE4m3Bytes)};
}

#else  // each product continues its column's chain; R rows share what a line of codes expands to

// sum[r][p] += one step of 32 k of panel p times row r
template <int R, int NP>
using Sums = V[R][NP];
struct Row {
  const bf16* x;
  size_t ld;
};
template <int R, int NP>
WEFT_INLINE void add_line(Sums<R, NP>& sum, int p, const Row& a, int k, Line line) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sum[r][p] = dot_pair(sum[r][p], a.x + r * a.ld + k, line);
}
#define WEFT_EXPANDING __attribute__((always_inline)) inline
struct PairSteps {
  static constexpr int kBytes = 1024, kAhead = 0;
  template <int R, int NP, class Scale>
  WEFT_EXPANDING void add(Sums<R, NP>& sum, const Row& a, const StepCodes& codes, const Scale&) const {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
#pragma GCC unroll 8
      for (int p = 0; p < NP; ++p)
        add_line<R, NP>(sum, p, a, 2 * i, raw(codes.at + p * codes.panel + 64 * i));
  }
};
struct SingleSteps {  // f32, rounded to bf16 here
  static constexpr int kBytes = 2048, kAhead = kCodesAhead;
  template <int R, int NP, class Scale>
  WEFT_EXPANDING void add(Sums<R, NP>& sum, const Row& a, const StepCodes& codes, const Scale&) const {
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i)
#pragma GCC unroll 8
      for (int p = 0; p < NP; ++p) {
        const float* k = reinterpret_cast<const float*>(codes.line(p, 2 * i));
        add_line<R, NP>(sum, p, a, 2 * i, pair_rounded(load(k), load(k + kPanel)));
      }
  }
};
struct ByteSteps {
  static constexpr int kBytes = 512, kAhead = kCodesAhead;
  const ByteLookup look;
  template <int R, int NP, class Scale>
  WEFT_EXPANDING void add(Sums<R, NP>& sum, const Row& a, const StepCodes& codes, const Scale& scale) const {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)
#pragma GCC unroll 8
      for (int p = 0; p < NP; ++p) {
        Line first, second;
        look.expand(raw(codes.line(p, i)), first, second);
        add_line<R, NP>(sum, p, a, 4 * i, scale(first, p));
        add_line<R, NP>(sum, p, a, 4 * i + 2, scale(second, p));
      }
  }
};
struct NibbleSteps {
  static constexpr int kBytes = 256, kAhead = kCodesAhead;
  const Line table = e2m1_table();
  template <int R, int NP, class Scale>
  WEFT_EXPANDING void add(Sums<R, NP>& sum, const Row& a, const StepCodes& codes, const Scale& scale) const {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i)
#pragma GCC unroll 8
      for (int p = 0; p < NP; ++p) {
        const Line code = raw(codes.line(p, i));
        add_line<R, NP>(sum, p, a, 8 * i, scale(e2m1_line<0>(code, table), p));
        add_line<R, NP>(sum, p, a, 8 * i + 2, scale(e2m1_line<1>(code, table), p));
        add_line<R, NP>(sum, p, a, 8 * i + 4, scale(e2m1_line<2>(code, table), p));
        add_line<R, NP>(sum, p, a, 8 * i + 6, scale(e2m1_line<3>(code, table), p));
      }
  }
};
static inline ByteSteps mxfp8_steps() {
  return {ByteLookup(kMxfp8Bytes)};
}

#endif

// Codes of panels p0 .. p0 + NP at k. Behind a panel's end lies what another stream reads at its begin: there
// the panels after these are asked for.
template <int NP, class Steps>
static inline StepCodes codes_at(const Panels& w, int p0, int k) {
  const size_t at = static_cast<size_t>(k / kStep) * Steps::kBytes;
  const size_t ahead = at + Steps::kAhead < w.bytes ? Steps::kAhead : Steps::kAhead + (NP - 1) * w.bytes;
  return {w.codes + p0 * w.bytes + at, w.bytes, ahead};
}

#ifdef WEFT_TILES

// c [16 NP] of panels from p0: without scales
template <int NP, class Steps>
static inline void row_sums(float* c, const row_t* x, const Panels& w, int p0, const Steps& steps) {
  V sum[NP];
  for (int p = 0; p < NP; ++p) sum[p] = zero();
  for (int k = 0; k < w.k; k += kStep) steps.add(sum, x + k, codes_at<NP, Steps>(w, p0, k));
  for (int p = 0; p < NP; ++p) store(c + kPanel * (p0 + p), sum[p]);
}
// an f32 scale per `block` k of a panel, on the sum of the block
template <int NP, class Steps>
static inline void row_blocks(float* c, const row_t* x, const Panels& w, int p0, const Steps& steps,
                              int block) {
  const float* scale[NP];
  for (int p = 0; p < NP; ++p) scale[p] = reinterpret_cast<const float*>(w.scales + (p0 + p) * w.scale_bytes);
  V sum[NP];
  for (int k0 = 0; k0 < w.k; k0 += block) {
    V part[NP];
    for (int p = 0; p < NP; ++p) part[p] = zero();
    for (int k = k0; k < min_int(k0 + block, w.k); k += kStep)
      steps.add(part, x + k, codes_at<NP, Steps>(w, p0, k));
    for (int p = 0; p < NP; ++p) {
      const V s = set1(scale[p][k0 / block]);
      sum[p] = k0 > 0 ? fma(part[p], s, sum[p]) : part[p] * s;
    }
  }
  for (int p = 0; p < NP; ++p) store(c + kPanel * (p0 + p), sum[p]);
}
// an E8M0 scale per step and column
template <int NP, class Steps>
static inline void row_groups(float* c, const row_t* x, const Panels& w, int p0, const Steps& steps) {
  const uint8_t* e8m0 = w.scales + p0 * w.scale_bytes;
  V sum[NP];
  for (int p = 0; p < NP; ++p) sum[p] = zero();
  for (int k = 0; k < w.k; k += kStep, e8m0 += kPanel)
    add_group(steps, sum, x + k, codes_at<NP, Steps>(w, p0, k), e8m0, w.scale_bytes);
  for (int p = 0; p < NP; ++p) store(c + kPanel * (p0 + p), sum[p]);
}

#else

struct Unscaled {
  Line operator()(Line line, int) const { return line; }
};
// c [R, 16 NP] of panels from p0: without scales
template <int R, int NP, class Steps>
static inline void block_sums(float* c, int ldc, Row a, const Panels& w, int p0, const Steps& steps) {
  V sum[R][NP];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < NP; ++p) sum[r][p] = zero();
  for (int k = 0; k < w.k; k += kStep, a.x += kStep)
    steps.template add<R, NP>(sum, a, codes_at<NP, Steps>(w, p0, k), Unscaled{});
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < NP; ++p) store(c + r * ldc + kPanel * (p0 + p), sum[r][p]);
}
// an f32 scale per `block` k of a panel, on the sum of the block
template <int R, int NP, class Steps>
static inline void block_blocks(float* c, int ldc, Row a, const Panels& w, int p0, const Steps& steps,
                                int block) {
  const float* scale[NP];
  for (int p = 0; p < NP; ++p) scale[p] = reinterpret_cast<const float*>(w.scales + (p0 + p) * w.scale_bytes);
  V sum[R][NP];
  for (int k0 = 0; k0 < w.k; k0 += block) {
    V part[R][NP];
    for (int r = 0; r < R; ++r)
      for (int p = 0; p < NP; ++p) part[r][p] = zero();
    for (int k = k0; k < min_int(k0 + block, w.k); k += kStep, a.x += kStep)
      steps.template add<R, NP>(part, a, codes_at<NP, Steps>(w, p0, k), Unscaled{});
    for (int p = 0; p < NP; ++p) {
      const V s = set1(scale[p][k0 / block]);
      for (int r = 0; r < R; ++r) sum[r][p] = k0 > 0 ? fma(part[r][p], s, sum[r][p]) : part[r][p] * s;
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < NP; ++p) store(c + r * ldc + kPanel * (p0 + p), sum[r][p]);
}
// an E8M0 scale per step and column
template <int R, int NP, class Steps>
static inline void block_groups(float* c, int ldc, Row a, const Panels& w, int p0, const Steps& steps) {
  const uint8_t* e8m0 = w.scales + p0 * w.scale_bytes;
  V sum[R][NP];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < NP; ++p) sum[r][p] = zero();
  for (int k = 0; k < w.k; k += kStep, e8m0 += kPanel, a.x += kStep) {
    Line down[NP];
    for (int p = 0; p < NP; ++p) down[p] = scale_steps(e8m0 + p * w.scale_bytes);
    steps.template add<R, NP>(sum, a, codes_at<NP, Steps>(w, p0, k),
                              [&](Line line, int p) { return scale_down(line, down[p]); });
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < NP; ++p) store(c + r * ldc + kPanel * (p0 + p), sum[r][p]);
}

#endif

// f(Count<panels side by side>, first panel) until all are done. What is left over goes by halves: one panel
// alone waits for its own chain of additions (bf16 in twos or fours: 1.45 times as long as in eights; so 1.25
// and 1.08).
template <int NP, class F>
static inline void panels_by(int panels, const F& f, int p = 0) {
  for (; p + NP <= panels; p += NP) f(Count<NP>{}, p);
  if constexpr (NP > 1) panels_by<NP / 2>(panels, f, p);
}

#ifndef WEFT_TILES
// f(Count<rows>, Count<panels>, first row, first panel): blocks of m rows by panels. Rows are inside: what
// they read again of a panel's codes is in L2.
template <int R, int NP, class F>
static inline void blocks_of(int m, int panels, const F& f) {
  panels_by<NP>(panels, [&](auto np, int p) {
    int r = 0;
    const auto rows = [&](auto count) {
      for (; r + count.value <= m; r += count.value) f(count, np, r, p);
    };
    rows(Count<R>{});
    if constexpr (R > 4) rows(Count<4>{});
    if constexpr (R > 2) rows(Count<2>{});
    if constexpr (R > 1) rows(Count<1>{});
  });
}
template <class F>
static inline void row_blocks_by(int m, int panels, const F& f) {
  if (m == 1)
    blocks_of<1, 4>(m, panels, f);
  else if (m < 4)
    blocks_of<2, 4>(m, panels, f);
  else if (m < 8)
    blocks_of<4, 2>(m, panels, f);
  else
    blocks_of<8, kRowsPanels>(m, panels, f);
}
#endif

#endif
