// Lightning indexer: I(t, s) = sum_h w_h ReLU(q_h . k_s), and the exact top-k of it, streaming over the paged
// keys. The matrix of queries by keys never exists: 64 keys at a time are scored for all rows of a tile and
// offered to their lists.

// Keys of each format in the form the product takes, and their queries. kStream: the product reads the cache
// itself, and fetches ahead; otherwise expand() does.
struct OperandKeys {
  using Q = op_t;
  using K = op_t;
  static constexpr bool kStream = true, kScales = false;
  static int width(int dim) { return round_up(dim, kStep); }
  static const K* panel(K*, const std::byte* p, const std::byte*, int) { return reinterpret_cast<const K*>(p); }
  static const float* scale(const std::byte*, int, float*) { return nullptr; }
  static void query(Q* row, float*, int32_t*, const op_t* q, int dim) {
    __builtin_memcpy(row, q, static_cast<size_t>(dim) * sizeof(op_t));
  }
};

// Group scales stay inside the product: E4M3 times a power of two is exact in bf16.
struct Mxfp8Keys {
  using Q = op_t;
  using K = bf16;
  static constexpr bool kStream = false, kScales = true;
  static int width(int dim) { return round_up(dim, kStep); }
  static const K* panel(K* room, const std::byte* p, const std::byte* ahead, int width) {
    for (int k = 0; k < width; k += kStep) {
      if (ahead) fetch(ahead + k * kPanel);
      expand(room, p, width, k);
    }
    return room;
  }
  // k [k, k + 32) of a panel
  static void expand(K* room, const std::byte* p, int width, int k) {
    const auto* codes = reinterpret_cast<const uint8_t*>(p);
    expand_mxfp8(room + k * kPanel, codes + k * kPanel, codes + (width + k / kStep) * kPanel, 1);
  }
  WEFT_INLINE void fetch(const std::byte* group) {  // as LatentRows::fetch: never a call
    for (int line = 0; line < 8; ++line) __builtin_prefetch(group + 64 * line, 0, 2);
  }
  static const float* scale(const std::byte* p, int width, float* room) {
    const auto* scales = reinterpret_cast<const uint8_t*>(p) + width * kPanel;
    uint8_t top = 0;
    for (int i = 0; i < width / kStep * kPanel; ++i) top = scales[i] > top ? scales[i] : top;
    if (top != 255) return nullptr;
    for (int c = 0; c < kPanel; ++c) {
      room[c] = 1;
      for (int g = 0; g < width / kStep; ++g)
        if (scales[g * kPanel + c] == 255) room[c] = __builtin_nanf("");
    }
    return room;
  }
  static void query(Q* row, float*, int32_t*, const op_t* q, int dim) {
    for (int k = 0; k < dim; k += kStep) {
      const V low = load_n(q + k, dim - k), high = load_n(q + k + 16, dim - k - 16);
      const float largest = hmax(max(max(negate(low), low), max(negate(high), high)));
      if (!finite(largest) || !(largest > 0)) {  // zeros, or NaN that must stay
        store_n(row + k, low, dim - k), store_n(row + k + 16, high, dim - k - 16);
        continue;
      }
      const uint32_t b = float_bits(largest);  // the smallest power of two 2^e with largest <= 448 2^e
      const int e = max_int(-100, static_cast<int>(b >> 23) - 135 + ((b & 0x7fffff) > 0x600000));
      const V down = set1(pow2(-e)), up = set1(pow2(e));
      store_n(row + k, round_e4m3(low * down) * up, dim - k);
      store_n(row + k + 16, round_e4m3(high * down) * up, dim - k - 16);
    }
  }
};

// ReLU lets positive factors out: a key's scale multiplies its score, a query's its head weight, and the
// product is exact.
struct Int8Keys {
  using Q = Int8Query;
  using K = Int8Panel;
  static constexpr bool kStream = sizeof(K) == 1, kScales = true;
  static int width(int dim) { return round_up(dim, kQuadStep); }
  static const K* panel(K* room, const std::byte* p, const std::byte*, int width) {
    return int8_panel(room, p, width);
  }
  static const float* scale(const std::byte* p, int width, float*) {
    return reinterpret_cast<const float*>(p + width * kPanel);
  }
  static void query(Q* row, float* weight, int32_t* bias, const op_t* q, int dim) {
    V top = zero(), sum = zero();
    for (int k = 0; k < dim; k += 16) {
      const V x = load_n(q + k, dim - k);
      top = max(max(negate(x), x), top);
      sum = sum + (x - x);  // NaN where x is not finite: max() above hides it
    }
    const float largest = hmax(top) + hsum(sum), up = largest > 0 ? 127.f / largest : 0;
    *weight *= largest / 127.f;
    sum = zero();
    for (int k = 0; k < dim; k += 16) {
      const V x = up > 0 ? round(load_n(q + k, dim - k) * set1(up)) : zero();
      store_int8_query(row + k, x);
      sum = sum + x;
    }
    *bias = -128 * static_cast<int32_t>(hsum(sum));
  }
};

// Everything of one part of a tile that lives as long as the scan.
struct IndexScan {
  const IndexArgs& a;
  const int32_t* pages;
  int per_page, page_panels, page_shift;  // one, two or four panels a page: no division on the way
  size_t panel_bytes;
  IndexScan(const IndexArgs& a, const StepHeader& step, int t)
      : a(a),
        pages(step.block_table + static_cast<size_t>(step.span[step.span_of[t]].table) * step.table_stride),
        per_page(kPageTokens / a.pool),
        page_panels((per_page + kPanel - 1) / kPanel),
        page_shift(page_panels / 2),
        panel_bytes(index_panel_bytes(a.format, a.dim, sizeof(op_t))) {}
  const std::byte* panel(int i) const {
    return a.slab + static_cast<size_t>(pages[i >> page_shift]) * a.page_bytes + in_page(i) * panel_bytes;
  }
  int in_page(int i) const { return i & (page_panels - 1); }
  int first(int i) const { return (i >> page_shift) * per_page + in_page(i) * kPanel; }  // key of a panel
  int keys(int i) const { return min_int(kPanel, per_page - in_page(i) * kPanel); }
  int panels(int keys) const {
    return keys / per_page * page_panels + (keys % per_page + kPanel - 1) / kPanel;
  }
};

static inline void select_forced(int32_t* out, int32_t* count, const int32_t* forced, int width) {
  int n = 0;
  while (n < width && forced[n] >= 0) out[n] = forced[n], ++n;
  *count = n;
  for (int i = n; i < width; ++i) out[i] = -1;
}

// Token positions of the chosen keys, ascending, then the open tail of a pooled row; forced choices in their
// place.
static inline void emit(const IndexArgs& a, const StepHeader& step, int t, const int32_t* chosen, int keys) {
  int32_t* out = a.out + static_cast<size_t>(t) * a.width;
  const int visible = step.position[t] + 1;
  int n = 0;
  for (int i = 0; i < keys; ++i)
    for (int s = 0; s < a.pool; ++s) out[n++] = (chosen ? chosen[i] : i) * a.pool + s;
  for (int p = visible / a.pool * a.pool; p < visible; ++p) out[n++] = p;
  for (int i = n; i < a.width; ++i) out[i] = -1;
  if (step.seen_selection && step.seen_selection[a.layer])
    __builtin_memcpy(step.seen_selection[a.layer] + static_cast<size_t>(t) * a.width, out,
                     sizeof(int32_t) * a.width);
  a.count[t] = n;
  if (step.forced_selection && step.forced_selection[a.layer])
    select_forced(out, a.count + t, step.forced_selection[a.layer] + static_cast<size_t>(t) * a.width,
                  a.width);
}

static inline TopK take_list(Scratch& scratch, int k) {
  const int capacity = 2 * k + 128;
  return {scratch.take<float>(capacity + 16), scratch.take<int32_t>(capacity + 16), 0, k, capacity, false, 0};
}
static inline TopKRoom take_room(Scratch& scratch, int k) {
  return {scratch.take<float>(2 * k + 144), scratch.take<int32_t>(kTopKBins)};
}

#ifdef WEFT_TILES
// The mxfp8 keys of one row, expanded beside the products of the keys before them, a group of 32 k at a time:
// as a pass of its own it left the tiles idle (64K keys from memory 1.34 instead of 0.93 ms, Emerald Rapids).
// Four panels in turn: two are in use, two are made.
struct Mxfp8Ahead {
  static constexpr int kRoom = 4, kAhead = 8;
  const IndexScan& s;
  bf16* room;
  int width, panel, to, base = 0, k = 0;  // to: end of the panels; base: first panel of the call
  const std::byte *codes = nullptr, *fetched = nullptr;
  bf16* made(int panel) const { return room + static_cast<size_t>(panel % kRoom) * width * kPanel; }
  void ready(int p) {
    while (panel < min_int(to, base + p + 2)) expand();
  }
  void step(int p) {
    if (panel < min_int(to, base + p + kRoom)) expand();
  }
  void expand() {
    if (k == 0) codes = s.panel(panel), fetched = s.panel(min_int(panel + kAhead, to - 1));
    Mxfp8Keys::fetch(fetched + k * kPanel);
    Mxfp8Keys::expand(made(panel), codes, width, k);
    if ((k += kStep) == width) k = 0, ++panel;
  }
};
#endif

// The best of panels [from, to) for rows [t, t + rows).
template <class Keys>
static inline void scan(const IndexScan& s, const StepHeader& step, Scratch scratch, int t, int rows,
                        int from, int to, TopK* found, const TopKRoom& room) {
  using Q = typename Keys::Q;
  using K = typename Keys::K;
  const IndexArgs& a = s.a;
  const int width = Keys::width(a.dim), padded = padded_heads(a.heads);
  const size_t all = static_cast<size_t>(round_up(rows * padded, kScoreHeads));
  Q* q = scratch.take<Q>(all * width);
  float* weight = scratch.take<float>(all);
  int32_t* bias = scratch.take<int32_t>(all);
  float* product = scratch.take<float>(static_cast<size_t>(padded) * kPanel);
  float* score = scratch.take<float>(static_cast<size_t>(rows) * kScorePanels * kPanel);
  K* expanded = scratch.take<K>(Keys::kStream ? 0 : static_cast<size_t>(kScorePanels) * width * kPanel);
  float* scale_room = scratch.take<float>(kScorePanels * kPanel);
  __builtin_memset(q, 0, all * width * sizeof(Q));
  for (int i = 0; i < rows; ++i)
    for (int h = 0; h < padded; ++h) {
      const int row = i * padded + h;
      weight[row] = h < a.heads ? a.weight[static_cast<size_t>(t + i) * a.ld_weight + h] * a.scale : 0;
      if (h < a.heads)
        Keys::query(q + static_cast<size_t>(row) * width, weight + row, bias + row,
                    static_cast<const op_t*>(a.q) + static_cast<size_t>(t + i) * a.ld_q + h * a.dim, a.dim);
    }
  const ScoreQueries<Q> queries{q, weight, rows, a.heads, width, bias, product};
#ifdef WEFT_TILES
  Mxfp8Ahead ahead{s, reinterpret_cast<bf16*>(expanded), width, from, to};
  const bool beside = !Keys::kStream && rows == 1;
#else
  constexpr bool beside = false;
#endif
  const int together = score_panels_of(rows);
  for (int p = from; p < to; p += together) {
    ScoreKeys<K> keys;
    const float* scale[kScorePanels];
    int first[kScorePanels];
    keys.panels = min_int(together, to - p), keys.fetch = Keys::kStream && rows <= 2;
    for (int i = 0; i < together; ++i) {
      const std::byte* next = s.panel(min_int(p + together + i, to - 1));
      keys.next[i] = reinterpret_cast<const K*>(next);
      if (Keys::kScales && rows <= 2) __builtin_prefetch(next + width * kPanel, 0, 2);
    }
    for (int i = 0; i < keys.panels; ++i) {
      const std::byte* at = s.panel(p + i);
      if (!beside) {
        const auto* ahead = rows <= 2 ? reinterpret_cast<const std::byte*>(keys.next[i]) : nullptr;
        keys.panel[i] = Keys::panel(expanded + static_cast<size_t>(i) * width * kPanel, at, ahead, width);
      }
      scale[i] = Keys::scale(at, width, scale_room + i * kPanel);
      first[i] = s.first(p + i);
    }
#ifdef WEFT_TILES
    if constexpr (!Keys::kStream)
      if (beside) {
        for (int i = 0; i < keys.panels; ++i) keys.panel[i] = ahead.made(p + i);
        ahead.base = p;
        score_panels(score, queries, keys, ahead);
      }
#endif
    if (!beside) score_panels(score, queries, keys);
    for (int i = 0; i < rows; ++i) {
      const int visible = (step.position[t + i] + 1) / a.pool;
      for (int j = 0; j < keys.panels; j += 4) {
        V x[4];
        uint32_t valid[4];
        const int groups = min_int(4, keys.panels - j);
        for (int g = 0; g < groups; ++g) {
          x[g] = load(score + (i * kScorePanels + j + g) * kPanel);
          if (scale[j + g]) x[g] = x[g] * load(scale[j + g]);
          x[g] = ordered(x[g]);
          valid[g] = bits(first_n(min_int(s.keys(p + j + g), visible - first[j + g])));
        }
        offer(found[i], room, x, first + j, valid, groups);
      }
    }
  }
}

// Rows of one tile that are scored: those that see more keys than top-k. The others, which come first, take
// all.
static inline void index_tile(const IndexArgs& a, const Call& call, const IndexPlan& plan, int tile,
                              int part0, int part1) {
  const StepHeader& step = *call.step;
  const IndexTile rows = index_tile(plan, step, tile);
  const int best = a.topk / a.pool;
  int skip = 0;
  for (; skip < rows.rows && (step.position[rows.token + skip] + 1) / a.pool <= best; ++skip)
    if (part0 == 0)
      emit(a, step, rows.token + skip, nullptr, (step.position[rows.token + skip] + 1) / a.pool);
  const int t = rows.token + skip, n = rows.rows - skip;
  const bool whole = part0 == 0 && part1 == plan.parts;
  if (plan.parts > 1)
    for (int i = 0; i < rows.rows; ++i)
      for (int p = part0; p < part1; ++p)
        a.part_count[(rows.token + i) * plan.parts + p] = p == 0 && (i < skip || whole) ? -1 : 0;
  if (n == 0) return;
  Scratch scratch{call.scratch};
  TopK found[32];
  for (int i = 0; i < n; ++i) found[i] = take_list(scratch, best);
  const TopKRoom room = take_room(scratch, best);
  const IndexScan s(a, step, t);
  const int panels = s.panels((step.position[t + n - 1] + 1) / a.pool);  // of the last row, which sees most
  const auto cut = [&](int part) {
    return part == plan.parts ? panels
                              : static_cast<int>(static_cast<int64_t>(panels) * part / plan.parts) /
                                    kScorePanels * kScorePanels;
  };
  const int from = cut(part0), to = cut(part1);
  switch (a.format) {
    case IndexFormat::operand:
      scan<OperandKeys>(s, step, scratch, t, n, from, to, found, room);
      break;
    case IndexFormat::mxfp8:
      scan<Mxfp8Keys>(s, step, scratch, t, n, from, to, found, room);
      break;
    case IndexFormat::int8:
      scan<Int8Keys>(s, step, scratch, t, n, from, to, found, room);
      break;
  }
  for (int i = 0; i < n; ++i) {
    shrink(found[i], room);
    if (whole) {
      emit(a, step, t + i, found[i].index, found[i].n);
      continue;
    }
    const int list = (t + i) * plan.parts + part0;
    __builtin_memcpy(a.part_score + static_cast<size_t>(list) * best, found[i].score,
                     sizeof(float) * found[i].n);
    __builtin_memcpy(a.part_index + static_cast<size_t>(list) * best, found[i].index,
                     sizeof(int32_t) * found[i].n);
    a.part_count[list] = found[i].n;
  }
}

// Unit: (tile of rows, part of its keys).
static void index(const IndexArgs& a, const Call& call) {
  const IndexPlan plan = index_plan(a, *call.step);
  const Slice part = slice(plan.tiles * plan.parts, call);
  for (int u = part.first; u < part.last;) {
    const int tile = u / plan.parts, first = u % plan.parts,
              last = min_int(plan.parts, first + part.last - u);
    index_tile(a, call, plan, tile, first, last);
    u += last - first;
  }
}

// Unit: row. Parts come in the order of their keys, so equal scores keep the order of their indices.
static void index_merge(const IndexMergeArgs& args, const Call& call) {
  const IndexArgs& a = args.index;
  const StepHeader& step = *call.step;
  const IndexPlan plan = index_plan(a, step);
  const int best = a.topk / a.pool;
  const Slice part = slice(step.tokens, call);
  for (int t = part.first; t < part.last; ++t) {
    const int32_t* count = a.part_count + t * plan.parts;
    if (plan.parts == 1 || count[0] < 0) continue;
    Scratch scratch{call.scratch};
    TopK found = take_list(scratch, best);
    const TopKRoom room = take_room(scratch, best);
    for (int p = 0; p < plan.parts; ++p) {
      const size_t list = (static_cast<size_t>(t) * plan.parts + p) * best;
      for (int i = 0; i < count[p]; ++i) {
        if (found.full && !(a.part_score[list + i] > found.threshold)) continue;
        found.score[found.n] = a.part_score[list + i];
        found.index[found.n++] = a.part_index[list + i];
        if (found.n + 64 > found.capacity) shrink(found, room);
      }
    }
    shrink(found, room);
    emit(a, step, t, found.index, found.n);
  }
}

// Unit: row.
static void index_passes(const IndexPassesArgs& args, const Call& call) {
  const IndexArgs& a = args.index;
  const StepHeader& step = *call.step;
  const int width = round_up(a.dim, kStep), rows = round_up(a.heads, 16);
  float* product = args.product + static_cast<size_t>(call.task) * rows * args.ld;
  float* score = args.score + static_cast<size_t>(call.task) * args.ld;
  const Slice part = slice(step.tokens, call);
  for (int t = part.first; t < part.last; ++t) {
    Scratch scratch{call.scratch};
    const IndexScan s(a, step, t);
    const int keys = step.position[t] + 1, panels = s.panels(keys);
    op_t* q = scratch.take<op_t>(static_cast<size_t>(rows) * width);
    __builtin_memset(q, 0, static_cast<size_t>(rows) * width * sizeof(op_t));
    for (int h = 0; h < a.heads; ++h)
      OperandKeys::query(q + static_cast<size_t>(h) * width, nullptr, nullptr,
                         static_cast<const op_t*>(a.q) + static_cast<size_t>(t) * a.ld_q + h * a.dim, a.dim);
    for (int p = 0; p < panels; p += s.page_panels)
      mma_keys(product + p * kPanel, args.ld, q, width, reinterpret_cast<const op_t*>(s.panel(p)), a.heads,
               min_int(s.page_panels, panels - p), width);
    for (int k = 0; k < panels * kPanel; k += 16) {
      V sum = zero();
      for (int h = 0; h < a.heads; ++h)
        sum = fma(set1(a.weight[static_cast<size_t>(t) * a.ld_weight + h] * a.scale),
                  max(zero(), load(product + static_cast<size_t>(h) * args.ld + k)), sum);
      store(score + k, sum);
    }
    TopK found = take_list(scratch, a.topk);
    const TopKRoom room = take_room(scratch, a.topk);
    for (int k = 0; k < keys; k += 16) {
      const V x = ordered(load(score + k));
      const uint32_t valid = bits(first_n(keys - k));
      offer(found, room, &x, &k, &valid, 1);
    }
    shrink(found, room);
    emit(a, step, t, found.index, found.n);
  }
}
