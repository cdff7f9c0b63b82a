// Absorbed MLA: scores and values come from the same latent rows, gathered by position or by index.
//
// Products run over rows (token, head) in panels of 16: S^T [keys, rows] = K Q^T takes the gathered rows as
// they are and the queries packed once, its softmax works on 16 rows at a time without a sum across lanes,
// and P [rows, keys] comes out of a transpose. Keys go in blocks of the list in ascending order, cut at list
// positions that are multiples of the block, with the online softmax between: a row's sums have one order
// whether its list is the whole prefix (several tokens share the gathered block) or a selection (one token at
// a time). A key a row does not see has weight exactly 0 and a block it does not see leaves it untouched, so
// company changes no bit.

// On tiles the accumulated values pass through the tiles once a block: 256 keys keep that below an eighth of
// the product.
#ifdef WEFT_TILES
static constexpr int kListBlock = 256;
#else
static constexpr int kListBlock = 128;
#endif
static constexpr int kAttentionRows = 128;
static constexpr int kChunk = 32;  // keys of one call of the product
// A row's largest exponent may rise by this (in powers of two) before its sums are scaled down.
static constexpr float kStaleTop = 8;

struct AttentionRoom {
  op_t *q, *p, *gathered, *lines;
  float *s, *o, *top, *sum, *keep, *seen;
  int rows, width, value_width, ld_p, ld_o;
  size_t line_panel;
  AttentionRoom(Scratch& scratch, const AttentionArgs& a, int rows)
      : rows(round_up(rows, 16)),
        width(round_up(a.latent + a.rope, kStep)),
        value_width(round_up(a.latent, kPanel)),
        ld_p(kListBlock +
             32),  // strides away from powers of two: rows of a tile spread over the cache's sets
        ld_o(value_width + kPanel),
        line_panel(kListBlock * kPanel + 32) {
    q = scratch.take<op_t>(static_cast<size_t>(this->rows) * width);
    p = scratch.take<op_t>(static_cast<size_t>(this->rows) * ld_p);
    gathered = scratch.take<op_t>(static_cast<size_t>(kListBlock) * width + kCodeLine);
    lines = scratch.take<op_t>(kBf16Operands ? value_width / kPanel * line_panel : 0);
    s = scratch.take<float>(static_cast<size_t>(kListBlock) * this->rows);
    keep = scratch.take<float>(this->rows);
    seen = scratch.take<float>(this->rows);
    take_sums(scratch);
  }
  void take_sums(Scratch& scratch) {
    o = scratch.take<float>(static_cast<size_t>(rows) * ld_o);
    top = scratch.take<float>(rows);
    sum = scratch.take<float>(rows);
  }
};

// Values as products want them: pairs of rows beside each other in bf16, the rows themselves in f32.
template <class Op>
static inline void pair_values(const AttentionRoom& w, const Op* pair, int j) {
  if constexpr (sizeof(Op) == 2) {
    int c = 0;
#ifdef WEFT_FETCHING_PRODUCT
    for (; c + 2 * kPanel <= w.value_width; c += 2 * kPanel) {
      Op* line = w.lines + c / kPanel * w.line_panel + j * kPanel;
      Line line0, line1;
      pair_lines(line0, line1, pair + c, pair + w.width + c);
      store_line(line, line0), store_line(line + w.line_panel, line1);
    }
#endif
    for (; c < w.value_width; c += kPanel)
      interleave(w.lines + c / kPanel * w.line_panel + j * kPanel, pair + c, pair + w.width + c);
  }
}

// Keys [0, keys) of a block that starts at list position `first` and has `count` of them; zeros behind.
// (Beside the scores of earlier keys it costs as much: its stores to L2 fill the store buffer, and the tile
// products wait for that.)
// The first `whole` stay where they lie.
static inline void gather(const AttentionRoom& w, const LatentRows& from, int first, int count, int keys,
                          int whole, bool paired) {
  for (int j = 0; j < whole && paired; j += 2) pair_values(w, from.in_place(first + j), j);
  for (int j = whole; j < keys; j += 2) {
    op_t* rows = w.gathered + static_cast<size_t>(j) * w.width;
    constexpr int kSoon = 8;
    for (int i = 0; i < 2; ++i) {
      if (j + kSoon + i < count) from.fetch_narrow(first + j + kSoon + i);
      if (j + i < count)
        from.read(rows + i * w.width, first + j + i);
      else
        __builtin_memset(rows + i * w.width, 0, w.width * sizeof(op_t));
    }
    if (paired) pair_values(w, rows, j);
  }
}

// Softmax over the block of some panels of 16 rows: weights into p, tops and sums updated, keep[row] what the
// values so far are to be scaled by. Row lane i sees the first seen[i] keys; four keys a step.
struct Softmax {
  const AttentionRoom& w;
  const AttentionArgs& a;
  const float* seen;  // [rows]
  int keys, panel, end;
  int j = 0;
  bool all = false;
  V shift{}, total{};
  alignas(64) op_t line[16 * 64 / sizeof(op_t)] = {};  // 16 lines of 16 lanes, to be transposed

  float scale() const { return a.scale * 1.44269504088896341f; }  // powers of two
  M visible(int key) const { return less(set1(static_cast<float>(key)), load(seen + panel * kPanel)); }
  void begin() {
    const V low = set1(-__builtin_inff()), x2 = set1(scale());
    all = true;
    for (int i = 0; i < kPanel; ++i) all = all && seen[panel * kPanel + i] >= static_cast<float>(keys);
    const float* s = w.s + panel * kPanel;
    V best[4] = {low, low, low, low};
    for (int key = 0; key < keys; key += 4)
      for (int i = 0; i < 4; ++i) {
        const V x = load(s + static_cast<size_t>(key + i) * w.rows) * x2;
        best[i] = max(all ? x : select(visible(key + i), x, low), best[i]);
      }
    float* top = w.top + panel * kPanel;
    const V before = load(top), high = max(max(best[0], best[1]), max(best[2], best[3]));
    const M rises = less(before + set1(kStaleTop), high);
    const V now = select(rises, high, before);
    shift = select(less(low, now), negate(now), zero());  // a row that has seen nothing: nothing to add
    store(w.keep + panel * kPanel, select(rises, exp2(before + shift), set1(1.f)));
    store(top, now);
    total = zero();
  }
  void step() {
    if (panel >= end) return;
    if (j == 0) begin();
    constexpr int kKeys = 64 / static_cast<int>(sizeof(op_t));  // of one transpose
    const float* s = w.s + static_cast<size_t>(j) * w.rows + panel * kPanel;
    V x[4];
    for (int i = 0; i < 4; ++i) {
      x[i] = exp2(fma(load(s + i * w.rows), set1(scale()), shift));
      if (!all) x[i] = select(visible(j + i), x[i], zero());
    }
    total = total + ((x[0] + x[1]) + (x[2] + x[3]));
    store_pairs(line + j % kKeys * kPanel, x[0], x[1]);
    store_pairs(line + (j % kKeys + 2) * kPanel, x[2], x[3]);
    j += 4;
    if (j % kKeys == 0) {
      const uint32_t* rows[16];
      for (int i = 0; i < 16; ++i) rows[i] = reinterpret_cast<const uint32_t*>(line) + 16 * i;
      transpose16(reinterpret_cast<uint32_t*>(w.p + static_cast<size_t>(panel) * kPanel * w.ld_p + j - kKeys),
                  rows, w.ld_p * static_cast<int>(sizeof(op_t)) / 4);
    }
    if (j < keys) return;
    float* sum = w.sum + panel * kPanel;
    store(sum, fma(load(sum), load(w.keep + panel * kPanel), total));
    ++panel;
    j = 0;
  }
  void finish() {
    while (panel < end) step();
  }
};

// S^T of kChunk keys.
template <class Op>
static inline void score_chunk(const AttentionRoom& w, const Op* keys, float* s) {
  mma_keys(s, w.rows, keys, w.width, w.q, kChunk, w.rows / kPanel, w.width);
}

// O += P V for some panels of rows, beside other work.
template <class Op, class Side>
static inline void add_values(const AttentionRoom& w, const Op* p, int row, int rows, int keys, Side& side) {
  float* o = w.o + static_cast<size_t>(row) * w.ld_o;
  p += static_cast<size_t>(row) * w.ld_p;
  if constexpr (sizeof(Op) == 2) {
    mma_beside(o, w.ld_o, p, w.ld_p, w.lines, w.line_panel, rows, w.value_width / kPanel, keys, true, side);
  } else {
    mma(o, w.ld_o, p, w.ld_p, w.gathered, kPanel, w.width, rows, w.value_width / kPanel, keys, true);
    side.finish();
  }
}

// The values so far of rows whose tops have risen.
static inline void scale_values(const AttentionRoom& w, int row, int rows) {
  for (int r = row; r < row + rows; ++r) {
    if (w.keep[r] == 1.f) continue;
    float* o = w.o + static_cast<size_t>(r) * w.ld_o;
    for (int c = 0; c < w.value_width; c += 16) store(o + c, load(o + c) * set1(w.keep[r]));
  }
}

// Queries in panels of 16 rows (token t + r / heads, head head0 + r % heads).
static inline void pack_queries(const AttentionArgs& a, const AttentionRoom& w, Scratch scratch, int t,
                                int rows, int head0, int heads) {
  op_t* none = scratch.take<op_t>(w.width);
  op_t* padded = scratch.take<op_t>(static_cast<size_t>(16) * w.width);
  clear(none, 0, w.width);
  for (int panel = 0; panel < w.rows; panel += 16) {
    const op_t* at[16];
    for (int i = 0; i < 16; ++i) {
      const int r = panel + i;
      op_t* q = padded + static_cast<size_t>(i) * w.width;
      at[i] = none;
      if (r >= rows) continue;
      __builtin_memcpy(q,
                       static_cast<const op_t*>(a.q) + static_cast<size_t>(t + r / heads) * a.ld_q +
                           static_cast<size_t>(head0 + r % heads) * a.q_head,
                       static_cast<size_t>(a.latent + a.rope) * sizeof(op_t));
      clear(q, a.latent + a.rope, w.width);
      at[i] = q;
    }
    if (half_panel(rows)) __builtin_memcpy(at + 8, at, 8 * sizeof(at[0]));
    pack_keys(w.q + static_cast<size_t>(panel) * w.width, at, w.width);
  }
}

// Sums of keys [from, to) of the list, from nothing, for rows (token t + i, head head0 + h), i < tokens, h <
// heads. The rows of keys [to, end) are fetched when this segment ends.
static inline void attend_segment(const AttentionArgs& a, const StepHeader& step, const AttentionRoom& w,
                                  const LatentRows& rows, int t, int tokens, int heads, int from, int to,
                                  int end) {
  for (int r = 0; r < w.rows; ++r) w.top[r] = -__builtin_inff(), w.sum[r] = 0;
  __builtin_memset(w.o, 0, static_cast<size_t>(w.rows) * w.ld_o * sizeof(float));
  for (int first = from; first < to; first += kListBlock) {
    const int count = min_int(kListBlock, to - first), keys = round_up(count, kChunk);
    const int whole = rows.straight() ? count / kChunk * kChunk : 0;
    const bool paired = !rows_as_values(tokens * heads, w.value_width);
    gather(w, rows, first, count, keys, whole, paired);
    // The rows of the next block are fetched while this one is scored.
#ifdef WEFT_FETCHING_PRODUCT
    const bool half = half_panel(tokens * heads);
    const int products = keys / kChunk * key_products(kChunk, w.rows / kPanel, half);
    RowsAhead ahead(rows, first + kListBlock, kListBlock, end, products);
    for (int j = 0; j < keys; j += kChunk)
      mma_keys_beside(w.s + static_cast<size_t>(j) * w.rows, w.rows,
                      j < whole ? rows.in_place(first + j) : w.gathered + static_cast<size_t>(j) * w.width,
                      w.q, kChunk, w.rows / kPanel, w.width, half, ahead);
#else
    int ahead = first + kListBlock;
    const int ahead_end = min_int(end, ahead + kListBlock), share = kListBlock / (keys / kChunk);
    for (int j = 0; j < keys; j += kChunk) {
      for (const int stop = min_int(ahead_end, ahead + share); ahead < stop; ++ahead) rows.fetch(ahead);
      score_chunk(w, j < whole ? rows.in_place(first + j) : w.gathered + static_cast<size_t>(j) * w.width,
                  w.s + static_cast<size_t>(j) * w.rows);
    }
#endif
    for (int r = 0; r < w.rows; ++r) {
      const int token = min_int(r, tokens * heads - 1) / heads;
      w.seen[r] =
          static_cast<float>(rows.list ? count : min_int(count, step.position[t + token] + 1 - first));
    }
    const int panels = w.rows / kPanel;
    Softmax softmax{w, a, w.seen, keys, 0, min_int(2, panels)};
    softmax.finish();
    for (int p = 0; p < panels; p += 2) {
      const int n = product_rows(min_int(2, panels - p) * kPanel, tokens * heads - p * kPanel);
      if (first > from) scale_values(w, p * kPanel, n);
      softmax.end = min_int(p + 4, panels);
#ifdef WEFT_FETCHING_PRODUCT
      if (!paired) {
        const op_t* piece[kListBlock / kChunk];
        for (int j = 0; j < keys; j += kChunk)
          piece[j / kChunk] = j < whole ? rows.in_place(first + j) : w.gathered + j * w.width;
        mma_row_values(w.o, w.ld_o, w.p, w.ld_p, piece, w.width, n, w.value_width, keys);
        continue;
      }
#endif
      add_values(w, w.p, p * kPanel, n, keys, softmax);
    }
  }
}

// The sums of one row so far, and of a later segment added to it. A segment the row does not see has sum 0.
struct RowSums {
  float *out, *top, *sum;
};
static inline void fold(const RowSums& to, const RowSums& more, int width) {
  if (*more.sum == 0) return;
  const float top = *to.top < *more.top ? *more.top : *to.top;
  const float keep = hmax(exp2(set1(*to.top - top))), add = hmax(exp2(set1(*more.top - top)));
  for (int c = 0; c < width; c += 16)
    store(to.out + c, fma(load(to.out + c), set1(keep), load(more.out + c) * set1(add)));
  *to.sum = __builtin_fmaf(*to.sum, keep, *more.sum * add);
  *to.top = top;
}

static inline void finish_row(const AttentionArgs& a, int t, int head, const RowSums& row) {
  op_t* out =
      static_cast<op_t*>(a.out) + static_cast<size_t>(t) * a.ld_out + static_cast<size_t>(head) * a.out_head;
  const float sum = *row.sum;
  const V factor = set1(sum > 0 || sum != sum ? 1.f / sum : 0.f);  // an empty list gives 0
  for (int c = 0; c < a.latent; c += 16) store_n(out + c, load(row.out + c) * factor, a.latent - c);
  clear(out, a.latent, a.out_head);
}

static inline RowSums row_sums(const AttentionRoom& w, int r) {
  return {w.o + static_cast<size_t>(r) * w.ld_o, w.top + r, w.sum + r};
}

// Rows (token t + i, head head0 + h) for i < tokens, h < heads, over all their keys. list null: whole
// prefixes.
static inline void attend(const AttentionArgs& a, const StepHeader& step, Scratch scratch, int t, int tokens,
                          int head0, int heads, const int32_t* list, int keys) {
  const int rows = tokens * heads, segment = segment_keys(keys, a.heads);
  AttentionRoom total(scratch, a, rows);
  pack_queries(a, total, scratch, t, rows, head0, heads);
  AttentionRoom part = total;
  if (keys > segment) part.take_sums(scratch);
  const LatentRows from(a, step, t, list);
  for (int i = 0; i < min_int(keys, kListBlock); ++i) from.fetch(i);
  attend_segment(a, step, total, from, t, tokens, heads, 0, min_int(segment, keys), keys);
  for (int first = segment; first < keys; first += segment) {
    attend_segment(a, step, part, from, t, tokens, heads, first, min_int(first + segment, keys), keys);
    for (int r = 0; r < rows; ++r) fold(row_sums(total, r), row_sums(part, r), total.value_width);
  }
  for (int r = 0; r < rows; ++r) finish_row(a, t + r / heads, head0 + r % heads, row_sums(total, r));
}

static inline int keys_of(const AttentionArgs& a, const StepHeader& step, int t) {
  return a.list ? a.count[t] : step.position[t] + 1;
}
// Token t's part of `segments` * tokens sums.
static inline RowSums part_sums(const AttentionArgs& a, int part, int head) {
  const size_t row = static_cast<size_t>(part) * a.heads + head;
  return {a.part_out + row * round_up(a.latent, kPanel), a.part_top + row, a.part_sum + row};
}

// One segment of one token, all heads.
static inline void attend_part(const AttentionArgs& a, const StepHeader& step, Scratch scratch, int t, int at,
                               int segments) {
  const int keys = keys_of(a, step, t), segment = segment_keys(keys, a.heads), from = at * segment;
  if ((at > 0 && from >= keys) || expands(step, t, a.expand_below)) return;
  const bool dense = keys == step.position[t] + 1;
  const LatentRows rows(a, step, t, dense ? nullptr : a.list + static_cast<size_t>(t) * a.width);
  const int to = min_int(from + segment, keys);
  for (int head0 = 0; head0 < a.heads; head0 += kAttentionRows) {
    const int heads = min_int(kAttentionRows, a.heads - head0);
    Scratch room = scratch;
    const AttentionRoom w(room, a, heads);
    pack_queries(a, w, room, t, heads, head0, heads);
    for (int i = from; i < min_int(to, from + kListBlock); ++i) rows.fetch(i);
    attend_segment(a, step, w, rows, t, 1, heads, from, to, to);
    for (int h = 0; h < heads; ++h) {
      const RowSums part = part_sums(a, t * segments + at, head0 + h), row = row_sums(w, h);
      *part.top = *row.top, *part.sum = *row.sum;
      __builtin_memcpy(part.out, row.out, static_cast<size_t>(w.value_width) * sizeof(float));
    }
  }
}

// Unit: (token, head). The segments of rows that were cut, in their order.
static void attention_merge(const AttentionMergeArgs& args, const Call& call) {
  const AttentionArgs& a = args.attention;
  const StepHeader& step = *call.step;
  const int segments = attention_segments(a, step);
  if (segments == 1) return;
  const Slice part = slice(step.tokens * a.heads, call);
  for (int u = part.first; u < part.last; ++u) {
    const int t = u / a.heads, head = u % a.heads, keys = keys_of(a, step, t),
              segment = segment_keys(keys, a.heads);
    if (expands(step, t, a.expand_below)) continue;
    const RowSums total = part_sums(a, t * segments, head);
    for (int i = 1; i * segment < keys; ++i)
      fold(total, part_sums(a, t * segments + i, head), round_up(a.latent, kPanel));
    finish_row(a, t, head, total);
  }
}

// Unit: (token, 16 heads), or (token, segment) of few tokens. A task takes neighbouring units of a token
// together, for they share the gathered rows, and neighbouring tokens where all see their whole prefix.
static void attention(const AttentionArgs& a, const Call& call) {
  const StepHeader& step = *call.step;
  const int segments = attention_segments(a, step);
  if (segments > 1) {
    const Slice part = slice(step.tokens * segments, call);
    for (int u = part.first; u < part.last; ++u)
      attend_part(a, step, Scratch{call.scratch}, u / segments, u % segments, segments);
    return;
  }
  const int blocks = (a.heads + kPanel - 1) / kPanel;
  const Slice part = slice(step.tokens * blocks, call);
  const int together = max_int(1, kAttentionRows / a.heads);
  const auto dense = [&](int t) { return keys_of(a, step, t) == step.position[t] + 1; };
  const auto segment = [&](int t) { return segment_keys(step.position[t] + 1, a.heads); };
  for (int u = part.first; u < part.last;) {
    const int t = u / blocks, head0 = u % blocks * kPanel;
    const int last = min_int(min_int(part.last, (t + 1) * blocks), u + kAttentionRows / kPanel);
    const int heads = min_int(a.heads, (last - t * blocks) * kPanel) - head0;
    u = last;
    if (expands(step, t, a.expand_below)) continue;
    int n = 1;
    if (heads == a.heads && dense(t))
      while (n < together && u + blocks <= part.last && step.span_of[t + n] == step.span_of[t] &&
             dense(t + n) && segment(t + n) == segment(t) && !expands(step, t + n, a.expand_below))
        ++n, u += blocks;
    attend(a, step, Scratch{call.scratch}, t, n, head0, heads,
           dense(t) ? nullptr : a.list + static_cast<size_t>(t) * a.width, keys_of(a, step, t + n - 1));
  }
}
