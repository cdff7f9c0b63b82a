// Absorbed MLA: scores and values come from the same latent rows, gathered page by page or index by index.
//
// Rows of the product are (token, head). Keys go in blocks of 64 positions of the list in ascending order, cut at
// list positions that are multiples of 64, with the online softmax between: a row's sums have one order whether its
// list is the whole prefix (several tokens share the gathered block) or a selection (one token at a time). A key a row
// does not see has weight exactly 0 and a block it does not see leaves it untouched, so company changes no bit.

static constexpr int kAttentionRows = 64;

struct AttentionRoom {
  op_t *q, *p, *gathered, *keys, *values;
  float *s, *o, *top, *sum;
  AttentionRoom(Scratch& scratch, const AttentionArgs& a, int rows) {
    const size_t m = round_up(rows, 16), width = a.row_elements, value_panels = (a.latent + kPanel - 1) / kPanel;
    q = scratch.take<op_t>(m * width);
    p = scratch.take<op_t>(m * kKeyBlock);
    gathered = scratch.take<op_t>(kKeyBlock * width);
    keys = scratch.take<op_t>(kKeyBlock * width);
    values = scratch.take<op_t>(value_panels * kKeyBlock * kPanel);
    s = scratch.take<float>(m * kKeyBlock);
    o = scratch.take<float>(m * value_panels * kPanel);
    top = scratch.take<float>(m);
    sum = scratch.take<float>(m);
  }
};

// The rows of list positions [first, first + count); the rest of the block reads as zeros.
template <class Args>
static inline void gather(op_t* rows, const Args& a, const int32_t* pages, const int32_t* list, int first, int count) {
  const size_t width = a.row_elements;
  for (int j = 0; j < kKeyBlock; ++j) {
    op_t* to = rows + j * width;
    if (j >= count) {
      __builtin_memset(to, 0, width * sizeof(op_t));
      continue;
    }
    const int position = list ? list[first + j] : first + j;
    const op_t* from =
        reinterpret_cast<const op_t*>(a.slab + static_cast<size_t>(pages[position / kPageTokens]) * a.page_bytes) +
        static_cast<size_t>(position % kPageTokens) * width;
    __builtin_memcpy(to, from, width * sizeof(op_t));
  }
}
static inline void pack_block(op_t* panels, const op_t* rows, int width) {
  const op_t* row[16];
  for (int panel = 0; panel < kKeyBlock / kPanel; ++panel) {
    for (int r = 0; r < kPanel; ++r) row[r] = rows + static_cast<size_t>(panel * kPanel + r) * width;
    pack_keys(panels + static_cast<size_t>(panel) * width * kPanel, row, width);
  }
}

// Online softmax of one row over a block of 64 scores, of which those in `seen` count; rescales its accumulated values.
struct SoftmaxRow {
  const float* s;      // [64]
  op_t* p;             // [64]
  float *o, *top, *sum;
  int value_width;
};
static inline void softmax_row(const SoftmaxRow& w, uint64_t seen, float scale) {
  const V low = set1(-__builtin_inff());
  V best = low;
  for (int j = 0; j < kKeyBlock; j += 16)
    best = max(best, select(from_bits(static_cast<uint32_t>(seen >> j) & 0xffff), load(w.s + j) * set1(scale), low));
  const float before = *w.top, high = hmax(best), top = high > before ? high : before;
  V total = zero();
  for (int j = 0; j < kKeyBlock; j += 16) {
    const V p = exp(fma(load(w.s + j), set1(scale), set1(-top)));
    const V kept = select(from_bits(static_cast<uint32_t>(seen >> j) & 0xffff), p, zero());
    store(w.p + j, kept);
    total = total + kept;
  }
  float lanes[16];
  store(lanes, exp(set1(before - top)));  // exp(-inf) = 0: nothing accumulated yet
  const float keep = lanes[0];
  *w.top = top;
  *w.sum = *w.sum * keep + hsum(total);
  if (keep != 1.f)
    for (int c = 0; c < w.value_width; c += 16) store(w.o + c, load(w.o + c) * set1(keep));
}
static inline uint64_t first_bits(int n) { return n >= 64 ? ~uint64_t{0} : n <= 0 ? 0 : (uint64_t{1} << n) - 1; }

// Whether ExpandedArgs takes this row.
static inline bool expands(const StepHeader& step, int t, int below) {
  const Span& span = step.span[step.span_of[t]];
  const int block = step.position[t] / kKeyBlock * kKeyBlock;
  return block < below && block >= span.position && block + kKeyBlock <= span.position + span.length;
}

// Rows (token t + i, head head0 + h) for i < tokens, h < heads. list null: all see their whole prefix.
static inline void attend(const AttentionArgs& a, const StepHeader& step, Scratch scratch, int t, int tokens, int head0,
                          int heads, const int32_t* list, int list_count) {
  const int rows = tokens * heads, width = a.row_elements, panels = (a.latent + kPanel - 1) / kPanel;
  const int value_width = panels * kPanel;
  AttentionRoom w(scratch, a, rows);
  for (int i = 0; i < tokens; ++i)
    for (int h = 0; h < heads; ++h) {
      op_t* q = w.q + static_cast<size_t>(i * heads + h) * width;
      __builtin_memcpy(q, static_cast<const op_t*>(a.q) + static_cast<size_t>(t + i) * a.ld_q +
                              static_cast<size_t>(head0 + h) * a.q_head,
                       static_cast<size_t>(a.latent + a.rope) * sizeof(op_t));
      clear(q, a.latent + a.rope, width);
    }
  __builtin_memset(w.o, 0, static_cast<size_t>(rows) * value_width * sizeof(float));
  for (int r = 0; r < rows; ++r) w.top[r] = -__builtin_inff(), w.sum[r] = 0;
  const Span& span = step.span[step.span_of[t]];
  const int32_t* pages = step.block_table + static_cast<size_t>(span.table) * step.table_stride;
  const int total = list ? list_count : step.position[t + tokens - 1] + 1;
  for (int first = 0; first < total; first += kKeyBlock) {
    gather(w.gathered, a, pages, list, first, min_int(kKeyBlock, total - first));
    pack_block(w.keys, w.gathered, width);
    mma_keys(w.s, kKeyBlock, w.q, width, w.keys, rows, kKeyBlock / kPanel, width);
    for (int r = 0; r < rows; ++r) {
      const int seen = (list ? list_count : step.position[t + r / heads] + 1) - first;
      if (seen > 0)
        softmax_row({w.s + r * kKeyBlock, w.p + r * kKeyBlock, w.o + static_cast<size_t>(r) * value_width, w.top + r,
                     w.sum + r, value_width},
                    first_bits(seen), a.scale);
      else __builtin_memset(w.p + r * kKeyBlock, 0, kKeyBlock * sizeof(op_t));
    }
    mma_values(w.o, value_width, w.p, kKeyBlock, w.gathered, width, w.values, rows, panels, kKeyBlock);
  }
  for (int r = 0; r < rows; ++r) {
    op_t* out = static_cast<op_t*>(a.out) + static_cast<size_t>(t + r / heads) * a.ld_out +
                static_cast<size_t>(head0 + r % heads) * a.out_head;
    const V factor = set1(w.sum[r] > 0 || w.sum[r] != w.sum[r] ? 1.f / w.sum[r] : 0.f);  // an empty list gives 0
    for (int c = 0; c < a.latent; c += 16)
      store_n(out + c, load(w.o + static_cast<size_t>(r) * value_width + c) * factor, a.latent - c);
    clear(out, a.latent, a.out_head);
  }
}

// Unit: (tile of tokens, block of heads).
static void attention(const AttentionArgs& a, const Call& call) {
  const StepHeader& step = *call.step;
  const int block = min_int(a.heads, step.tokens <= 4 ? 32 : kAttentionRows);  // few tokens: more tasks
  const int blocks = (a.heads + block - 1) / block;
  const int tile = max_int(1, kAttentionRows / block);
  const int tiles = (step.tokens + tile - 1) / tile;
  const Slice part = slice(tiles * blocks, call);
  for (int u = part.first; u < part.last; ++u) {
    const int head0 = u % blocks * block, heads = min_int(block, a.heads - head0);
    const int end = min_int((u / blocks + 1) * tile, step.tokens);
    for (int t = u / blocks * tile; t < end;) {
      if (expands(step, t, a.expand_below)) {
        ++t;
        continue;
      }
      const bool dense = !a.list || a.count[t] == step.position[t] + 1;
      int n = 1;
      while (dense && t + n < end && step.span_of[t + n] == step.span_of[t] && !expands(step, t + n, a.expand_below) &&
             (!a.list || a.count[t + n] == step.position[t + n] + 1))
        ++n;
      attend(a, step, Scratch{call.scratch}, t, n, head0, heads,
             dense ? nullptr : a.list + static_cast<size_t>(t) * a.width, dense ? 0 : a.count[t]);
      t += n;
    }
  }
}
