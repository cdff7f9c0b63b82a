// Products of several rows with panels of narrow weights on tiles. Codes become bf16 lines in L1 while the
// panels before them are multiplied: tile and vector units run at once only if their instructions are close
// to each other, for the out-of-order window holds a few tile products and no more.
//
// Bits are those of mma() over expanded lines: one chain of additions in ascending k per element.
#ifdef WEFT_TILES

// 64 bytes of codes become kOut values of one panel; kGroup times that is a step of 32 k.
struct ByteCodes {
  static constexpr int kGroup = 8, kOut = 64;
  static constexpr bool kScaled = false;
  const ByteLookup look;
  WEFT_INLINE void expand(const ByteCodes& codes, bf16* to, Line line, Line) {
    Line first, second;
    codes.look.expand(line, first, second);
    store_line(to, first), store_line(to + 32, second);
  }
};
struct Mxfp8Codes {
  static constexpr int kGroup = 8, kOut = 64;
  static constexpr bool kScaled = true;
  const ByteLookup look{kMxfp8Bytes};
  WEFT_INLINE void expand(const Mxfp8Codes& codes, bf16* to, Line line, Line down) {
    Line first, second;
    codes.look.expand(line, first, second);
    store_line(to, scale_down(first, down)), store_line(to + 32, scale_down(second, down));
  }
};
struct Mxfp4Codes {
  static constexpr int kGroup = 4, kOut = 128;
  static constexpr bool kScaled = true;
  const Line table = e2m1_table();
  WEFT_INLINE void expand(const Mxfp4Codes& codes, bf16* to, Line line, Line down) {
    store_line(to, scale_down(e2m1_line<0>(line, codes.table), down));
    store_line(to + 32, scale_down(e2m1_line<1>(line, codes.table), down));
    store_line(to + 64, scale_down(e2m1_line<2>(line, codes.table), down));
    store_line(to + 96, scale_down(e2m1_line<3>(line, codes.table), down));
  }
};

// What becomes of the next turn's codes: its panels' lines, behind one another.
template <class Codes>
struct LinesAhead {
  const Codes codes;
  const uint8_t *from = nullptr, *e8m0 = nullptr;
  bf16* to = nullptr;
  int left = 0, panel_lines = 0, panels = 0;  // lines of codes of this panel, of each; panels behind it
  size_t jump = 0, scale_jump = 0;            // from a panel's end to the next one's begin
  ptrdiff_t fetch = 0, scale_fetch = 0;       // to what the turn after it reads, which is asked for

  // kLines of one panel: whole groups, or a part of one
  template <int kLines>
  inline __attribute__((always_inline)) void expand() {
    Line down = {};
#pragma GCC unroll 32
    for (int i = 0; i < kLines; ++i) {
      if constexpr (Codes::kScaled)
        if (i % Codes::kGroup == 0) down = scale_steps(e8m0 + i / Codes::kGroup * kPanel);
      __builtin_prefetch(from + 64 * i + fetch, 0, 2);
      Codes::expand(codes, to + Codes::kOut * i, raw(from + 64 * i), down);
    }
    from += 64 * kLines, to += Codes::kOut * kLines, left -= kLines;
    if constexpr (Codes::kScaled)
      if (left % Codes::kGroup == 0) {
        e8m0 += max_int(1, kLines / Codes::kGroup) * kPanel;
        __builtin_prefetch(e8m0 + scale_fetch, 0, 2);
      }
    if (left == 0 && panels > 0) --panels, left = panel_lines, from += jump, e8m0 += scale_jump;
  }
  inline __attribute__((always_inline)) void finish() {
    while (left > 0) expand<Codes::kGroup / 4>();
  }
  // Beside one step of tile products. All in one go: a quarter behind every tile product lost up to 7 %.
  template <int kLines>
  inline __attribute__((always_inline)) void share() {
    if (left >= kLines)
      expand<kLines>();
    else
      finish();
  }
};

// Tiles whose products are done or on their way, and where they go: kColumns side by side.
struct DoneTiles {
  float* at = nullptr;
  int ld = 0, tiles = 0;
  template <int T, int kColumns>
  inline __attribute__((always_inline)) void store() const {
    if (T < tiles) tile_store<T>(at + T / kColumns * 16 * ld + T % kColumns * kPanel, ld * 4L);
  }
  template <int kColumns>
  inline __attribute__((always_inline)) void store_all() const {
    store<0, kColumns>(), store<1, kColumns>(), store<2, kColumns>(), store<3, kColumns>();
  }
};

// C [m, 16 panels] = A [m, k] W. NT panels side by side are a turn; 4: of up to 16 rows, 2: of more. kBlocks:
// an f32 scale per kScaleBlock k on the sum of the block. kShare: lines of codes expanded beside 32 k of
// products.
template <class Codes, int NT, bool kBlocks, int kShare>
struct NarrowProduct {
  static constexpr int kRows = NT == 4 ? 16 : 32;
  float* const c;
  const int ldc;
  const bf16* const a;
  const int lda, m;
  const Panels& w;
  const int panels;
  const int step;  // k of a turn

  struct Turn {
    int p, k, count;
  };
  int steps() const { return (w.k + step - 1) / step; }
  int turns() const { return steps() * ((panels + NT - 1) / NT); }
  // One block of rows keeps its tiles through all of k; of more, a block of A stays near.
  Turn turn(int i) const {
    const int wide = (panels + NT - 1) / NT;
    const int p = m <= kRows ? i / steps() : i % wide, k = (m <= kRows ? i % steps() : i / wide) * step;
    return {p * NT, k, min_int(step, w.k - k)};
  }
  ptrdiff_t codes_at(const Turn& t) const {
    return static_cast<ptrdiff_t>(t.p * w.bytes + static_cast<size_t>(t.k / kStep) * Codes::kGroup * 64);
  }
  ptrdiff_t scales_at(const Turn& t) const {
    return static_cast<ptrdiff_t>(t.p * w.scale_bytes + static_cast<size_t>(t.k / kStep) * kPanel);
  }
  inline __attribute__((always_inline)) void prepare(LinesAhead<Codes>& x, bf16* to, int i) const {
    const Turn t = turn(i), next = turn(min_int(i + 1, turns() - 1));
    x.from = w.codes + codes_at(t), x.to = to;
    x.left = x.panel_lines = t.count / kStep * Codes::kGroup;
    x.panels = min_int(NT, panels - t.p) - 1;
    x.jump = w.bytes - static_cast<size_t>(x.panel_lines) * 64;
    x.fetch = codes_at(next) - codes_at(t);
    if constexpr (Codes::kScaled) {
      x.e8m0 = w.scales + scales_at(t);
      x.scale_jump = w.scale_bytes - static_cast<size_t>(t.count / kStep) * kPanel;
      x.scale_fetch = scales_at(next) - scales_at(t);
    }
  }
  // A finished tile makes way for the first product of the next block: C's, or zero.
  template <int T>
  static inline __attribute__((always_inline)) void start(bool first, const DoneTiles& done,
                                                          const float* from, int ld) {
    if (!first) return;
    done.store<T, NT>();
    if (from)
      tile_load<T>(from + T / NT * 16 * ld + T % NT * kPanel, ld * 4L);
    else
      tile_zero<T>();
  }
  // MT x NT tiles over `count` k
  template <int MT>
  inline __attribute__((always_inline)) void block(const bf16* a0, const bf16* const (&b)[4], int count,
                                                   bool fresh, const float* from, const DoneTiles& done,
                                                   LinesAhead<Codes>& ahead) const {
    const long a_stride = m == 1 ? 0 : lda * 2L;
    const bf16* a1 = a0 + 16L * lda;
    for (int k = 0; k < count; k += kStep) {
      const bool first = fresh && k == 0;
      const int at = k * kPanel;
      tile_load<4>(a0 + k, a_stride);
      if constexpr (NT == 4) {
        tile_load<5>(b[0] + at, 64), start<0>(first, done, from, ldc), tile_dot<0, 4, 5>();
        tile_load<6>(b[1] + at, 64), start<1>(first, done, from, ldc), tile_dot<1, 4, 6>();
        tile_load<7>(b[2] + at, 64), start<2>(first, done, from, ldc), tile_dot<2, 4, 7>();
        tile_load<5>(b[3] + at, 64), start<3>(first, done, from, ldc), tile_dot<3, 4, 5>();
      } else {
        tile_load<6>(b[0] + at, 64), start<0>(first, done, from, ldc), tile_dot<0, 4, 6>();
        tile_load<7>(b[1] + at, 64), start<1>(first, done, from, ldc), tile_dot<1, 4, 7>();
        if constexpr (MT == 2) {
          tile_load<5>(a1 + k, a_stride), start<2>(first, done, from, ldc), tile_dot<2, 5, 6>();
          start<3>(first, done, from, ldc), tile_dot<3, 5, 7>();
        } else if (first) {
          done.store<2, NT>(), done.store<3, NT>();
        }
      }
      ahead.template share<kShare>();
    }
  }
  // C (+)= scale part, of a block whose tiles are stored. All in one go: two rows behind every tile product
  // lost 12 %.
  inline __attribute__((always_inline)) void add_scaled(float* to, const float* part, int rows,
                                                        const Turn& t) const {
    V scale[NT];
    for (int p = 0; p < NT; ++p) {
      const int panel = min_int(t.p + p, panels - 1);
      scale[p] = set1(reinterpret_cast<const float*>(w.scales + panel * w.scale_bytes)[t.k / kScaleBlock]);
    }
    for (int r = 0; r < rows; ++r, to += ldc, part += kPanel * NT)
      for (int p = 0; p < NT; ++p) {
        const V x = load(part + kPanel * p);
        store(to + kPanel * p, t.k > 0 ? fma(x, scale[p], load(to + kPanel * p)) : x * scale[p]);
      }
  }

  // lines: two turns' room; partial: [kRows][16 NT]
  void run(Codes codes, bf16* lines, float* partial) const {
    LinesAhead<Codes> ahead{codes};
    DoneTiles done;
    Turn done_turn{};
    float* done_c = nullptr;
    int done_rows = 0;
    prepare(ahead, lines, 0);
    ahead.finish();
    for (int i = 0; i < turns(); ++i) {
      const Turn t = turn(i);
      const size_t room = static_cast<size_t>(NT) * step * kPanel,
                   panel = static_cast<size_t>(t.count) * kPanel;
      if (i + 1 < turns()) prepare(ahead, lines + (i + 1) % 2 * room, i + 1);
      const bf16* b[4];  // a panel that is missing: any other, into columns nobody reads
      for (int p = 0; p < 4; ++p)
        b[p] = lines + i % 2 * room + min_int(p, min_int(NT, panels - t.p) - 1) * panel;
      for (int r = 0; r < m; r += kRows) {
        float* to = c + static_cast<size_t>(r) * ldc + kPanel * t.p;
        const bf16* rows = a + static_cast<size_t>(r) * lda + t.k;
        const bool fresh = kBlocks || m > kRows || t.k == 0, two = NT == 2 && m - r > 16;
        const float* from = kBlocks || t.k == 0 ? nullptr : to;
        if (two)
          block<2>(rows, b, t.count, fresh, from, done, ahead);
        else
          block<1>(rows, b, t.count, fresh, from, done, ahead);
        if (kBlocks && done.at) add_scaled(done_c, partial, done_rows, done_turn);
        done = {kBlocks ? partial : to, kBlocks ? kPanel * NT : ldc, two || NT == 4 ? 4 : 2};
        done_c = to, done_rows = min_int(kRows, m - r), done_turn = t;
      }
      ahead.finish();
    }
    done.store_all<NT>();
    if (kBlocks) add_scaled(done_c, partial, done_rows, done_turn);
  }
};

// kBlocks: more than 16 rows. Turns of 256 k: what is read of C and written per product is half of 128's, and
// two turns' lines still fit L1.
template <bool kBlocks, class Codes>
static inline void narrow_product(float* c, int ldc, const bf16* a, int lda, int m, const Panels& w,
                                  int panels, const Codes& codes, bf16* lines, float* partial) {
  constexpr int kLong = kBlocks ? kScaleBlock : 256, kQuarter = Codes::kGroup / 4;
  const auto product = [&]<int NT, int kShare>(int step) {
    NarrowProduct<Codes, NT, kBlocks, kShare>{c, ldc, a, lda, m, w, panels, step}.run(codes, lines, partial);
  };
  if (m <= 16) {
    if constexpr (!kBlocks) product.template operator()<4, 16 * kQuarter>(128);
  } else if (m <= 32)
    product.template operator()<2, 8 * kQuarter>(kLong);
  else if (m <= 96)
    product.template operator()<2, 4 * kQuarter>(kLong);
  else if (m <= 224)
    product.template operator()<2, 2 * kQuarter>(kLong);
  else
    product.template operator()<2, kQuarter>(kLong);
}

#endif
