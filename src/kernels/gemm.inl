// Packed GEMM and GEMV for every weight format, grouped over MLA heads, and the expert products of MoE.
//
// A unit of work is two panels (32 columns) of one group, for all rows: weights are read once per step.
// Narrow formats are expanded to bf16 lines in blocks of k that stay in L1 (fp8: of one scale block); few rows
// expand them in registers.

static constexpr int kRowBlock = 32;   // rows of one product: two tiles on amx
static constexpr int kRowSuper = 512;  // rows whose accumulators are kept while a k block is expanded once
static constexpr int kUnitColumns = 2 * kPanel;
static constexpr int kFewRows = 16;  // one tile: four panels side by side, and no block of A to keep
static constexpr int kExpandK = 256;
static constexpr int kFewExpandK = 128;  // twice the panels
// k of A that stays in L2 with kRowSuper rows: 256 KB beside 512 KB of accumulators. 512 and 1024 lost 15-35
// % on amx.
static constexpr int kBlockK = 256;
static constexpr int kUnitBlock = 8;  // units that share it

struct Unit {
  const std::byte* codes;  // of the first panel
  const std::byte* scales;
  int panels;  // 1 or 2; 3 or 4 in a product of few rows
};
static inline Unit unit_of(const PackedWeight& w, const std::byte* codes, const std::byte* scales, int pair) {
  return {codes + static_cast<size_t>(2 * pair) * w.panel_bytes(),
          scales ? scales + static_cast<size_t>(2 * pair) * w.panel_scale_bytes() : nullptr,
          min_int(2, w.panels() - 2 * pair)};
}

// bf16 lines of k [k0, k0 + count) of one panel; count a multiple of 32.
template <class Op>
static inline void expand(bf16* lines, const PackedWeight& w, const std::byte* codes, const std::byte* scales,
                          int k0, int count) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(codes) + static_cast<size_t>(k0) * kPanel;
  const uint8_t* e8m0 = reinterpret_cast<const uint8_t*>(scales) + k0 / 32 * kPanel;
  switch (w.format) {
    case WeightFormat::e4m3:
      expand_bytes(lines, bytes, count / 4, kE4m3Bytes);
      return;
    case WeightFormat::int8:
      expand_bytes(lines, bytes, count / 4, kInt8Bytes);
      return;
    case WeightFormat::mxfp8:
      expand_mxfp8(lines, bytes, e8m0, count / 32);
      return;
    case WeightFormat::mxfp4:
      expand_mxfp4(lines, bytes - static_cast<size_t>(k0) * kPanel / 2, e8m0, count / 32);
      return;
    case WeightFormat::bf16:
    case WeightFormat::f32:
      break;
  }
  if constexpr (sizeof(Op) == 2) {  // f32 weights under a bf16 product: rounded here
    const float* from = reinterpret_cast<const float*>(codes) + static_cast<size_t>(k0) * kPanel;
    for (int k = 0; k < count; k += 2) {
      alignas(64) Op low[16], high[16];
      store(low, load(from + k * kPanel));
      store(high, load(from + (k + 1) * kPanel));
      interleave(lines + k * kPanel, low, high);
    }
  }
}

// c (+)= partial scale for the e4m3 block at k0, panel by panel.
static inline void add_scaled(float* c, int ldc, const float* partial, int rows, const PackedWeight& w,
                              const Unit& unit, int k0) {
  for (int p = 0; p < unit.panels; ++p) {
    const V s =
        set1(reinterpret_cast<const float*>(unit.scales + p * w.panel_scale_bytes())[k0 / kScaleBlock]);
    for (int r = 0; r < rows; ++r) {
      float* at = c + static_cast<size_t>(r) * ldc + p * kPanel;
      const V part = load(partial + r * 2 * kUnitColumns + p * kPanel);
      store(at, k0 > 0 ? fma(part, s, load(at)) : part * s);
    }
  }
}

// What to fetch into L2 during one step of a unit.
struct AheadOf {
  Ahead rows, weights;
};

// C [m, 16 panels] (+)= A [m, k0 .. k0 + count) W for one unit. A: f32 or operand rows. e4m3: count is one
// scale block.
template <class A>
static inline void product_step(float* c, int ldc, const A* a, int lda, int m, const PackedWeight& w,
                                const Unit& unit, int k0, int count, bf16* lines, float* partial,
                                AheadOf& ahead) {
  const bool more = k0 > 0;
  if (w.format == WeightFormat::bf16) {
    mma_ahead(c, ldc, a + k0, lda,
              reinterpret_cast<const bf16*>(unit.codes) + static_cast<size_t>(k0) * kPanel,
              w.panel_bytes() / 2, m, unit.panels, count, more, ahead.rows, ahead.weights);
    return;
  }
  if constexpr (sizeof(A) == 4) {
    if (w.format == WeightFormat::f32) {
      mma(c, ldc, a + k0, lda, reinterpret_cast<const float*>(unit.codes) + static_cast<size_t>(k0) * kPanel,
          w.panel_bytes() / 4, kPanel, m, unit.panels, min_int(count, w.k - k0), more);
      return;
    }
  }
  const int expanded = round_up(count, kStep);
  const size_t panel = static_cast<size_t>(expanded) * kPanel;
  for (int p = 0; p < unit.panels; ++p)
    expand<A>(lines + p * panel, w, unit.codes + p * w.panel_bytes(),
              unit.scales ? unit.scales + p * w.panel_scale_bytes() : nullptr, k0, expanded);
  if (w.format != WeightFormat::e4m3) {
    mma(c, ldc, a + k0, lda, lines, panel, m, unit.panels, count, more);
    return;
  }
  for (int i = 0; i < m; i += kRowBlock) {
    const int rows = min_int(kRowBlock, m - i);
    mma(partial, 2 * kUnitColumns, a + static_cast<size_t>(i) * lda + k0, lda, lines, panel, rows,
        unit.panels, count, false);
    add_scaled(c + static_cast<size_t>(i) * ldc, ldc, partial, rows, w, unit, k0);
  }
}

// k of one step. bf16 and f32 weights of few rows run through all of k: nothing is re-read.
static inline int product_k_step(const PackedWeight& w, int m, bool expands) {
  if (w.format == WeightFormat::e4m3) return kScaleBlock;
  if (m <= kFewRows) return expands ? kFewExpandK : round_up(w.k, kStep);
#if defined(WEFT_BF16_PRODUCT) && !defined(WEFT_TILES)
  // Register blocks stop for every k block: all of k is 8 to 15 % faster than 256 (64 and 512 rows, Zen 4).
  return expands ? 2 * kExpandK : round_up(w.k, kStep);
#else
  return expands ? kExpandK : kBlockK;
#endif
}

// int8: the columns' scales, once the sum is complete.
static inline void scale_columns(float* c, int ldc, int m, const Unit& unit) {
  for (int p = 0; p < unit.panels; ++p) {
    const V s = load(reinterpret_cast<const float*>(unit.scales) + p * kPanel);
    for (int r = 0; r < m; ++r) {
      float* at = c + static_cast<size_t>(r) * ldc + p * kPanel;
      store(at, load(at) * s);
    }
  }
}

#ifdef WEFT_BF16_PRODUCT
static inline Panels panels_of(const PackedWeight& w, const Unit& first) {
  const auto bytes = [](const std::byte* p) { return reinterpret_cast<const uint8_t*>(p); };
  return {bytes(first.codes), w.panel_bytes(), bytes(first.scales), w.panel_scale_bytes(), w.k_padded()};
}
#ifdef WEFT_TILES
// One row by the panels of units that follow each other: c [16 panels]. False: not a format that gains by it.
// The rows of c behind the first are room for the row itself.
static inline bool product_of_row(float* c, int ldc, const op_t* a, const PackedWeight& w, const Unit* unit,
                                  int units) {
  if (w.k_padded() > (kRowSuper - 1) * ldc) return false;
  const Panels panels = panels_of(w, *unit);
  const int count = 2 * (units - 1) + unit[units - 1].panels;
  const row_t* x = row_operand(c + ldc, a, w.k_padded());
  switch (w.format) {
    case WeightFormat::e4m3:
      panels_by<4>(count, [&](auto np, int p) {
        row_blocks<np.value>(c, x, panels, p, ByteSteps{ByteLookup(kE4m3Bytes)}, kScaleBlock);
      });
      return true;
    case WeightFormat::int8:
      panels_by<4>(count, [&](auto np, int p) {
        row_sums<np.value>(c, x, panels, p, ByteSteps{ByteLookup(kInt8Bytes)});
      });
      for (int u = 0; u < units; ++u) scale_columns(c + u * kUnitColumns, ldc, 1, unit[u]);
      return true;
    case WeightFormat::mxfp8:
      panels_by<4>(count, [&](auto np, int p) { row_groups<np.value>(c, x, panels, p, mxfp8_steps()); });
      return true;
    case WeightFormat::mxfp4:
      panels_by<4>(count, [&](auto np, int p) { row_groups<np.value>(c, x, panels, p, NibbleSteps{}); });
      return true;
    case WeightFormat::bf16:
      panels_by<8>(count, [&](auto np, int p) { row_sums<np.value>(c, x, panels, p, PairSteps{}); });
      return true;
    case WeightFormat::f32:
      return false;
  }
  return false;
}
#else
// Rows that share lines expanded in registers: so many of mxfp4, mxfp8 and int8, twice as many of the others.
// Of more rows lines in L1 are the faster ones (512 rows: by 5 to 20 %; 64 rows of mxfp4 by 8 %; Zen 4).
static constexpr int kCodeRows = 32;
// m rows by the panels of units that follow each other: c [m, 16 panels]. False: many, or several of bf16.
static inline bool product_of_codes(float* c, int ldc, const op_t* a, int lda, int m, const PackedWeight& w,
                                    const Unit* unit, int units) {
  const bool costly = w.format == WeightFormat::e4m3 || w.format == WeightFormat::f32;
  if (m > (costly ? 2 : 1) * kCodeRows) return false;
  const Panels panels = panels_of(w, *unit);
  const int count = 2 * (units - 1) + unit[units - 1].panels;
  const auto row = [&](int r) { return Row{a + static_cast<size_t>(r) * lda, static_cast<size_t>(lda)}; };
  const auto sums = [&](const auto& steps) {
    row_blocks_by(m, count, [&](auto rows, auto np, int r, int p) {
      block_sums<rows.value, np.value>(c + static_cast<size_t>(r) * ldc, ldc, row(r), panels, p, steps);
    });
    return true;
  };
  const auto groups = [&](const auto& steps) {
    row_blocks_by(m, count, [&](auto rows, auto np, int r, int p) {
      block_groups<rows.value, np.value>(c + static_cast<size_t>(r) * ldc, ldc, row(r), panels, p, steps);
    });
    return true;
  };
  switch (w.format) {
    case WeightFormat::e4m3:
      row_blocks_by(m, count, [&](auto rows, auto np, int r, int p) {
        block_blocks<rows.value, np.value>(c + static_cast<size_t>(r) * ldc, ldc, row(r), panels, p,
                                           ByteSteps{ByteLookup(kE4m3Bytes)}, kScaleBlock);
      });
      return true;
    case WeightFormat::int8:
      sums(ByteSteps{ByteLookup(kInt8Bytes)});
      for (int u = 0; u < units; ++u) scale_columns(c + u * kUnitColumns, ldc, m, unit[u]);
      return true;
    case WeightFormat::mxfp8:
      return groups(mxfp8_steps());
    case WeightFormat::mxfp4:
      return groups(NibbleSteps{});
    case WeightFormat::f32:
      return sums(SingleSteps{});
    case WeightFormat::bf16:
      if (m > 1) return false;
      panels_by<8>(count, [&](auto np, int p) {
        block_sums<1, np.value>(c, ldc, row(0), panels, p, PairSteps{});
      });
      return true;
  }
  return false;
}
#endif
#else
static inline bool product_of_row(float*, int, const float*, const PackedWeight&, const Unit*, int) {
  return false;
}
#endif

#ifdef WEFT_TILES
// C [m, 32 units] for units that follow each other. False: not a narrow format, or few rows of e4m3: there
// this takes 0.8 to 1.19 of the time, the less the busier the core's other thread (Emerald Rapids).
static inline bool product_of_narrow(float* c, int ldc, const bf16* a, int lda, int m, const PackedWeight& w,
                                     const Unit* unit, int units, bf16* lines, float* partial) {
  const Panels panels = panels_of(w, *unit);
  const int count = 2 * (units - 1) + unit[units - 1].panels;
  const auto multiply = [&]<bool kBlocks>(const auto& codes) {
    narrow_product<kBlocks>(c, ldc, a, lda, m, panels, count, codes, lines, partial);
    return true;
  };
  switch (w.format) {
    case WeightFormat::e4m3:
      return m > kFewRows && multiply.template operator()<true>(ByteCodes{ByteLookup(kE4m3Bytes)});
    case WeightFormat::int8:
      multiply.template operator()<false>(ByteCodes{ByteLookup(kInt8Bytes)});
      for (int u = 0; u < units; ++u) scale_columns(c + u * kUnitColumns, ldc, m, unit[u]);
      return true;
    case WeightFormat::mxfp8:
      return multiply.template operator()<false>(Mxfp8Codes{});
    case WeightFormat::mxfp4:
      return multiply.template operator()<false>(Mxfp4Codes{});
    case WeightFormat::bf16:
    case WeightFormat::f32:
      return false;
  }
  return false;
}
#endif

// C [m, 32 units], ldc columns, for units that share A and follow each other. k is cut so that a block of A
// stays in L2 while the units pass over it; every element is still one chain in ascending k.
template <class A>
static inline void product(float* c, int ldc, const A* a, int lda, int m, const PackedWeight& w,
                           const Unit* unit, int units, bf16* lines, float* partial) {
  if constexpr (sizeof(A) == sizeof(op_t))
#if defined(WEFT_BF16_PRODUCT) && !defined(WEFT_TILES)
    if (product_of_codes(c, ldc, a, lda, m, w, unit, units)) return;
#else
    if (m == 1 && product_of_row(c, ldc, a, w, unit, units)) return;
#endif
#ifdef WEFT_TILES
  if constexpr (sizeof(A) == sizeof(op_t))
    if (product_of_narrow(c, ldc, a, lda, m, w, unit, units, lines, partial)) return;
#endif
  const int k = sizeof(A) == 4 ? round_up(w.k, 2) : w.k_padded();  // only tiles want whole steps
  const bool expands = w.format != WeightFormat::bf16 && (sizeof(A) == 2 || w.format != WeightFormat::f32);
  const int step = product_k_step(w, m, expands);
  AheadOf ahead{};
  if (m <= kFewRows) {
    for (int u = 0; u < units; u += 2) {
      Unit wide = unit[u];
      if (u + 1 < units) wide.panels += unit[u + 1].panels;
      for (int k0 = 0; k0 < k; k0 += step)
        product_step(c + u * kUnitColumns, ldc, a, lda, m, w, wide, k0, min_int(step, k - k0), lines, partial,
                     ahead);
    }
  } else {
    const int blocks = (m + kRowBlock - 1) / kRowBlock, block_steps = blocks * (step / kStep);
    for (int k0 = 0; k0 < k; k0 += step) {
      // the block of A behind this one; behind the last, the first again: the next units' turn
      const int next = k0 + step < k ? k0 + step : 0, width = min_int(step, k - next);
      const int lines_a = width * static_cast<int>(sizeof(A)) / 64, all = block_steps * units;
      ahead.rows = {reinterpret_cast<const std::byte*>(a + next), lda * sizeof(A), lines_a, m,
                    (m * lines_a + all - 1) / all};
      for (int u = 0; u < units; ++u) {
        const bool last = u + 1 == units;
        const int k1 = last ? next : k0, lines_b = min_int(step, k - k1) * kPanel * 2 / 64;
        if (w.format == WeightFormat::bf16 && (!last || k0 + step < k))
          ahead.weights = {unit[last ? 0 : u + 1].codes + static_cast<size_t>(k1) * kPanel * 2,
                           w.panel_bytes(), lines_b, unit[last ? 0 : u + 1].panels,
                           (2 * lines_b + block_steps - 1) / block_steps};
        product_step(c + u * kUnitColumns, ldc, a, lda, m, w, unit[u], k0, min_int(step, k - k0), lines,
                     partial, ahead);
      }
    }
  }
  if (w.format == WeightFormat::int8)
    for (int u = 0; u < units; ++u) scale_columns(c + u * kUnitColumns, ldc, m, unit[u]);
}

struct ProductScratch {
  static constexpr int kLdc = kUnitBlock * kUnitColumns + 16;  // an odd number of cache lines
  float* c;                                                    // [kRowSuper, kLdc]
  float* partial;                                              // [kRowBlock, 64]
  bf16* lines;  // two panels of kExpandK or four of kFewExpandK, twice: those multiplied and those made
  explicit ProductScratch(Scratch& s)
      : c(s.take<float>(kRowSuper * kLdc)),
        partial(s.take<float>(kRowBlock * 2 * kUnitColumns)),
        lines(s.take<bf16>(4 * kExpandK * kPanel)) {}
};

// Rows of a result lie a page apart, where no hardware prefetcher follows: waiting for them was 14 % of 1024 x 1024
// at 512 rows. Asked for 8 rows ahead they are there (5.45 -> 5.01 ms); 16 does no better.
static constexpr int kFinishAhead = 8;
template <class T>
static inline void prefetch_result(const T* at, int n) {
  constexpr int kLine = 64 / sizeof(T);
  for (int i = 0; i < n; i += kLine) __builtin_prefetch(at + i, 1);
}

static inline void finish(const GemmArgs& g, const float* c, int ldc, int row0, int rows, int group, int pair,
                          int pairs) {
  const int n = g.epilogue == Epilogue::activate ? g.w.n / 2 : g.w.n;
  const int width = g.epilogue == Epilogue::activate ? kPanel : kUnitColumns;
  const int column = pair * width, last = min_int(width, n - column);
  const bool singles = g.epilogue == Epilogue::store_f32 || g.epilogue == Epilogue::add_f32;
  for (int r = 0; r < rows; ++r) {
    const float* x = c + static_cast<size_t>(r) * ldc;
    const size_t at =
        static_cast<size_t>(row0 + r) * g.ld_out + static_cast<size_t>(group) * g.out_group + column;
    float* f = static_cast<float*>(g.out) + at;
    op_t* o = static_cast<op_t*>(g.out) + at;
    if (r + kFinishAhead < rows) {
      const size_t ahead = static_cast<size_t>(kFinishAhead) * g.ld_out;
      singles ? prefetch_result(f + ahead, last) : prefetch_result(o + ahead, last);
    }
    for (int i = 0; i < last; i += 16) {
      const V y = load(x + i);
      const int left = last - i;
      switch (g.epilogue) {
        case Epilogue::store_f32:
          store_n(f + i, y, left);
          break;
        case Epilogue::add_f32:
          store_n(f + i, load_n(f + i, left) + y, left);
          break;
        case Epilogue::store_op:
          store_n(o + i, y, left);
          break;
        case Epilogue::activate:
          store_n(o + i, activate(g.act, y, load(x + kPanel)), left);
          break;
        case Epilogue::gate_op: {
          const float* gate = g.gate + static_cast<size_t>(row0 + r) * g.ld_gate +
                              static_cast<size_t>(group) * g.out_group + column + i;
          store_n(o + i, y * sigmoid(load_n(gate, left)), left);
          break;
        }
      }
    }
    if (g.out_pad && pair == pairs - 1 && (g.out_group == 0 || g.out_group > n || group == g.groups - 1))
      clear(o, last, last + g.out_pad);
  }
}

static void gemm(const GemmArgs& g, const Call& call) {
  const int rows = g.rows == Rows::tokens ? call.step->tokens : call.step->logit_rows;
  Scratch scratch{call.scratch};
  const ProductScratch room(scratch);
  const int pairs = (g.w.panels() + 1) / 2;
  const Slice part = slice(g.groups * pairs, call);
  Unit unit[kUnitBlock];
  for (int first = part.first; first < part.last;) {
    const int group = first / pairs;
    const int units = min_int(min_int(kUnitBlock, part.last - first), (group + 1) * pairs - first);
    for (int u = 0; u < units; ++u)
      unit[u] = unit_of(g.w, g.w.codes + group * g.w.code_bytes(),
                        g.w.scales ? g.w.scales + group * g.w.scale_bytes() : nullptr, (first + u) % pairs);
    for (int row0 = 0; row0 < rows; row0 += kRowSuper) {
      const int m = min_int(kRowSuper, rows - row0);
      const size_t at = static_cast<size_t>(row0) * g.ld_a + static_cast<size_t>(group) * g.a_group;
      if (g.precise)
        product(room.c, room.kLdc, static_cast<const float*>(g.a) + at, g.ld_a, m, g.w, unit, units,
                room.lines, room.partial);
      else
        product(room.c, room.kLdc, static_cast<const op_t*>(g.a) + at, g.ld_a, m, g.w, unit, units,
                room.lines, room.partial);
      for (int u = 0; u < units; ++u)
        finish(g, room.c + u * kUnitColumns, room.kLdc, row0, m, group, (first + u) % pairs, pairs);
    }
    first += units;
  }
}
