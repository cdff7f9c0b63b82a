// Packed GEMM and GEMV for every weight format, grouped over MLA heads, and the expert products of MoE.
//
// A unit of work is two panels (32 columns) of one group, for all rows: weights are read once per step. Narrow
// formats are expanded to bf16 lines in blocks of k that stay in L1: fp8 128 k (its scale block), mxfp4 and f32 256.

static constexpr int kRowBlock = 32;       // rows of one product: two tiles on amx
static constexpr int kRowSuper = 512;      // rows whose accumulators are kept while a k block is expanded once
static constexpr int kUnitColumns = 2 * kPanel;
static constexpr int kExpandK = 256;
static constexpr int kBlockK = 512;        // of A that stays in L2 with kRowSuper rows
static constexpr int kUnitBlock = 8;       // units that share it

struct Unit {
  const std::byte* codes;   // of the first panel
  const std::byte* scales;
  int panels;               // 1 or 2
};
static inline Unit unit_of(const PackedWeight& w, const std::byte* codes, const std::byte* scales, int pair) {
  return {codes + static_cast<size_t>(2 * pair) * w.panel_bytes(),
          scales ? scales + static_cast<size_t>(2 * pair) * w.panel_scale_bytes() : nullptr,
          min_int(2, w.panels() - 2 * pair)};
}

// bf16 lines of k [k0, k0 + count) of one panel; count a multiple of 32.
template <class Op>
static inline void expand(bf16* lines, const PackedWeight& w, const std::byte* codes, const std::byte* scales, int k0,
                          int count) {
  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(codes);
  if (w.format == WeightFormat::e4m3) {
    for (int k = 0; k < count; k += 4) expand_e4m3(lines + k * kPanel, bytes + static_cast<size_t>(k0 + k) * kPanel);
  } else if (w.format == WeightFormat::mxfp4) {
    const uint8_t* e8m0 = reinterpret_cast<const uint8_t*>(scales) + k0 / 32 * kPanel;
    for (int k = 0; k < count; k += 8)
      expand_mxfp4(lines + k * kPanel, bytes + static_cast<size_t>(k0 + k) * kPanel / 2, e8m0 + k / 32 * kPanel);
  } else if constexpr (sizeof(Op) == 2) {  // f32 weights under a bf16 product: rounded here
    const float* from = reinterpret_cast<const float*>(codes) + static_cast<size_t>(k0) * kPanel;
    for (int k = 0; k < count; k += 2) {
      alignas(64) Op low[16], high[16];
      store(low, load(from + k * kPanel));
      store(high, load(from + (k + 1) * kPanel));
      interleave(lines + k * kPanel, low, high);
    }
  }
}

// C [m, 32] (+)= A [m, k0 .. k0 + count) W for one unit. A: f32 or operand rows. e4m3: count is one scale block.
template <class A>
static inline void product_step(float* c, int ldc, const A* a, int lda, int m, const PackedWeight& w, const Unit& unit,
                                int k0, int count, bf16* lines, float* partial) {
  const bool more = k0 > 0;
  if (w.format == WeightFormat::bf16) {
    mma(c, ldc, a + k0, lda, reinterpret_cast<const bf16*>(unit.codes) + static_cast<size_t>(k0) * kPanel,
        w.panel_bytes() / 2, m, unit.panels, count, more);
    return;
  }
  if constexpr (sizeof(A) == 4) {
    if (w.format == WeightFormat::f32) {
      mma(c, ldc, a + k0, lda, reinterpret_cast<const float*>(unit.codes) + static_cast<size_t>(k0) * kPanel,
          w.panel_bytes() / 4, kPanel, m, unit.panels, min_int(count, w.k - k0), more);
      return;
    }
  }
  for (int p = 0; p < unit.panels; ++p)
    expand<A>(lines + p * kExpandK * kPanel, w, unit.codes + p * w.panel_bytes(),
              unit.scales ? unit.scales + p * w.panel_scale_bytes() : nullptr, k0, round_up(count, kStep));
  if (w.format != WeightFormat::e4m3) {
    mma(c, ldc, a + k0, lda, lines, size_t{kExpandK} * kPanel, m, unit.panels, count, more);
    return;
  }
  for (int i = 0; i < m; i += kRowBlock) {
    const int rows = min_int(kRowBlock, m - i);
    mma(partial, kUnitColumns, a + static_cast<size_t>(i) * lda + k0, lda, lines, size_t{kExpandK} * kPanel, rows,
        unit.panels, count, false);
    for (int p = 0; p < unit.panels; ++p) {
      const V s = set1(reinterpret_cast<const float*>(unit.scales + p * w.panel_scale_bytes())[k0 / kScaleBlock]);
      for (int r = 0; r < rows; ++r) {
        float* at = c + static_cast<size_t>(i + r) * ldc + p * kPanel;
        const V part = load(partial + r * kUnitColumns + p * kPanel);
        store(at, more ? fma(part, s, load(at)) : part * s);
      }
    }
  }
}

// k of one step. bf16 weights of few rows run through all of k: nothing is re-read.
static inline int product_k_step(const PackedWeight& w, int m) {
  if (w.format == WeightFormat::e4m3) return kScaleBlock;
  if (w.format == WeightFormat::bf16) return m > kRowBlock ? kBlockK : round_up(w.k, kStep);
  return kExpandK;
}

// C [m, 32 units], ldc columns, for units that share A. k is cut so that a block of A (512 x 512) stays in L2 while the
// units pass over it; every element is still one chain in ascending k.
template <class A>
static inline void product(float* c, int ldc, const A* a, int lda, int m, const PackedWeight& w, const Unit* unit,
                           int units, bf16* lines, float* partial) {
  const int k = sizeof(A) == 4 ? round_up(w.k, 2) : w.k_padded();  // only tiles want whole steps
  const int step = product_k_step(w, m);
  for (int k0 = 0; k0 < k; k0 += step)
    for (int u = 0; u < units; ++u)
      product_step(c + u * kUnitColumns, ldc, a, lda, m, w, unit[u], k0, min_int(step, k - k0), lines, partial);
}

struct ProductScratch {
  static constexpr int kLdc = kUnitBlock * kUnitColumns;
  float* c;        // [kRowSuper, kLdc]
  float* partial;  // [kRowBlock, 32]
  bf16* lines;     // two panels of kExpandK
  explicit ProductScratch(Scratch& s)
      : c(s.take<float>(kRowSuper * kLdc)),
        partial(s.take<float>(kRowBlock * kUnitColumns)),
        lines(s.take<bf16>(2 * kExpandK * kPanel)) {}
};

static inline void finish(const GemmArgs& g, const float* c, int ldc, int row0, int rows, int group, int pair, int pairs) {
  const int n = g.epilogue == Epilogue::activate ? g.w.n / 2 : g.w.n;
  const int width = g.epilogue == Epilogue::activate ? kPanel : kUnitColumns;
  const int column = pair * width, last = min_int(width, n - column);
  for (int r = 0; r < rows; ++r) {
    const float* x = c + static_cast<size_t>(r) * ldc;
    const size_t at = static_cast<size_t>(row0 + r) * g.ld_out + static_cast<size_t>(group) * g.out_group + column;
    float* f = static_cast<float*>(g.out) + at;
    op_t* o = static_cast<op_t*>(g.out) + at;
    for (int i = 0; i < last; i += 16) {
      const V y = load(x + i);
      const int left = last - i;
      switch (g.epilogue) {
        case Epilogue::store_f32: store_n(f + i, y, left); break;
        case Epilogue::add_f32: store_n(f + i, load_n(f + i, left) + y, left); break;
        case Epilogue::store_op: store_n(o + i, y, left); break;
        case Epilogue::activate: store_n(o + i, activate(g.act, y, load(x + kPanel)), left); break;
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
        product(room.c, room.kLdc, static_cast<const float*>(g.a) + at, g.ld_a, m, g.w, unit, units, room.lines,
                room.partial);
      else
        product(room.c, room.kLdc, static_cast<const op_t*>(g.a) + at, g.ld_a, m, g.w, unit, units, room.lines,
                room.partial);
      for (int u = 0; u < units; ++u)
        finish(g, room.c + u * kUnitColumns, room.kLdc, row0, m, group, (first + u) % pairs, pairs);
    }
    first += units;
  }
}
