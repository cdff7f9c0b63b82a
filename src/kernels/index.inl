// Lightning indexer: I(t, s) = sum_h w_h ReLU(q_h . k_s), and the exact top-k of it, streaming over the paged keys.
//
// The keys lie in panels of 16, the form the product consumes; scores of one panel live in L1 and only those above
// the running threshold are kept. Order: score descending, index ascending; -0 is +0, NaN is -inf.

static constexpr int kScoreRows = 128;  // (token, head) rows of one product

struct Candidates {
  uint32_t* key;  // order-preserving bits of the score
  int32_t* index;
  int32_t* histogram;  // [2048]
  int n = 0, topk, capacity;
  uint32_t threshold = 0;  // a later candidate must beat it
};

static inline uint32_t order_bits(float score) {
  uint32_t b;
  __builtin_memcpy(&b, &score, 4);
  return b & 0x80000000u ? ~b : b | 0x80000000u;
}

// Keeps the topk best, stable. Three counting passes over 11, 11 and 10 bits find the k-th key exactly; a sort or a
// quickselect costs more than the scoring at 8K (feasibility.md 3).
static inline void shrink(Candidates& c) {
  if (c.n <= c.topk) return;
  uint32_t prefix = 0, mask = 0;
  int want = c.topk;  // rank of the k-th among those that share the prefix
  const int shift[3] = {21, 10, 0}, width[3] = {2048, 2048, 1024};
  for (int pass = 0; pass < 3; ++pass) {
    const uint32_t digits = static_cast<uint32_t>(width[pass] - 1);
    for (int i = 0; i < width[pass]; ++i) c.histogram[i] = 0;
    for (int i = 0; i < c.n; ++i)
      if ((c.key[i] & mask) == prefix) ++c.histogram[c.key[i] >> shift[pass] & digits];
    int digit = width[pass] - 1;
    while (c.histogram[digit] < want) want -= c.histogram[digit--];
    prefix |= static_cast<uint32_t>(digit) << shift[pass];
    mask |= digits << shift[pass];
  }
  int kept = 0;  // `want` of those equal to the k-th key stay: the first ones, which have the lowest index
  for (int i = 0; i < c.n; ++i) {
    if (c.key[i] < prefix || (c.key[i] == prefix && want-- <= 0)) continue;
    c.key[kept] = c.key[i];
    c.index[kept++] = c.index[i];
  }
  c.n = kept;
  c.threshold = prefix;
}

static inline void offer(Candidates& c, const float* score, int first, int count) {
  for (int i = 0; i < count; ++i) {
    const uint32_t key = order_bits(score[i]);
    if (key <= c.threshold) continue;
    c.key[c.n] = key;
    c.index[c.n++] = first + i;
  }
  if (c.n + kPanel > c.capacity) shrink(c);
}

// Token positions of the chosen keys, ascending, then the open tail of a pooled row.
static inline int emit(const IndexArgs& a, int32_t* out, const int32_t* chosen, int keys, int visible) {
  int n = 0;
  for (int i = 0; i < keys; ++i)
    for (int s = 0; s < a.pool; ++s) out[n++] = (chosen ? chosen[i] : i) * a.pool + s;
  for (int p = visible / a.pool * a.pool; p < visible; ++p) out[n++] = p;
  for (int i = n; i < a.width; ++i) out[i] = -1;
  return n;
}

static inline void select_forced(int32_t* out, int32_t* count, const int32_t* forced, int width) {
  int n = 0;
  while (n < width && forced[n] >= 0) out[n] = forced[n], ++n;
  *count = n;
  for (int i = n; i < width; ++i) out[i] = -1;
}

// Scores of up to 16 keys of one panel for `tokens` rows: relu(c) weighted over heads.
static inline void head_sum(float* score, const float* c, const float* weight, int heads) {
  V sum = zero();
  for (int h = 0; h < heads; ++h) sum = fma(set1(weight[h]), max(zero(), load(c + h * kPanel)), sum);
  store(score, sum);
}

// Rows [t, t + tokens) of one span that see more keys than top-k.
static inline void index_rows(const IndexArgs& a, const StepHeader& step, Scratch scratch, int t, int tokens) {
  const int width = round_up(a.dim, kStep), rows = tokens * a.heads, best = a.topk / a.pool;
  const Span& span = step.span[step.span_of[t]];
  op_t* q = scratch.take<op_t>(static_cast<size_t>(round_up(rows, 16)) * width);
  float* c = scratch.take<float>(static_cast<size_t>(round_up(rows, 16)) * kPanel);
  float* weight = scratch.take<float>(rows);
  int32_t* histogram = scratch.take<int32_t>(2048);
  Candidates found[16];
  for (int i = 0; i < tokens; ++i) {
    found[i].topk = best;
    found[i].capacity = 2 * best + 2 * kPanel;
    found[i].key = scratch.take<uint32_t>(found[i].capacity);
    found[i].index = scratch.take<int32_t>(found[i].capacity);
    found[i].histogram = histogram;
    for (int h = 0; h < a.heads; ++h) {
      op_t* row = q + static_cast<size_t>(i * a.heads + h) * width;
      __builtin_memcpy(row, static_cast<const op_t*>(a.q) + static_cast<size_t>(t + i) * a.ld_q + h * a.dim,
                       static_cast<size_t>(a.dim) * sizeof(op_t));
      clear(row, a.dim, width);
      weight[i * a.heads + h] = a.weight[static_cast<size_t>(t + i) * a.ld_weight + h] * a.scale;
    }
  }
  const int per_page = kPageTokens / a.pool, page_panels = (per_page + kPanel - 1) / kPanel;
  const int keys = (step.position[t + tokens - 1] + 1) / a.pool;  // of the last row, which sees most
  const int32_t* pages = step.block_table + static_cast<size_t>(span.table) * step.table_stride;
  alignas(64) float score[kPanel];
  for (int page = 0; page * per_page < keys; ++page) {
    const op_t* panels =
        reinterpret_cast<const op_t*>(a.slab + static_cast<size_t>(pages[page]) * a.page_bytes);
    for (int p = 0; p < page_panels; ++p) {
      const int first = page * per_page + p * kPanel;
      if (first >= keys) break;
      const int in_page = min_int(kPanel, per_page - p * kPanel);
      mma_keys(c, kPanel, q, width, panels + static_cast<size_t>(p) * width * kPanel, rows, 1, width);
      for (int i = 0; i < tokens; ++i) {
        const int visible = (step.position[t + i] + 1) / a.pool;
        const int count = min_int(in_page, visible - first);
        if (count <= 0) continue;
        head_sum(score, c + static_cast<size_t>(i) * a.heads * kPanel, weight + i * a.heads, a.heads);
        for (int s = 0; s < count; ++s) score[s] = score[s] == score[s] ? score[s] + 0.f : -__builtin_inff();
        offer(found[i], score, first, count);
      }
    }
  }
  for (int i = 0; i < tokens; ++i) {
    shrink(found[i]);
    a.count[t + i] = emit(a, a.out + static_cast<size_t>(t + i) * a.width, found[i].index, found[i].n,
                          step.position[t + i] + 1);
  }
}

static void index(const IndexArgs& a, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(step.tokens, call);
  const int room = (1 << 21) / (8 * (2 * a.topk / a.pool + 2 * kPanel));  // candidate lists in the scratch
  const int together = max_int(1, min_int(min_int(16, room), kScoreRows / a.heads));
  for (int t = part.first; t < part.last;) {
    const int visible = step.position[t] + 1;
    if (visible / a.pool <= a.topk / a.pool) {  // everything is selected: no scores (dsa.md 2.6)
      a.count[t] = emit(a, a.out + static_cast<size_t>(t) * a.width, nullptr, visible / a.pool, visible);
      ++t;
      continue;
    }
    int n = 1;
    while (n < together && t + n < part.last && step.span_of[t + n] == step.span_of[t]) ++n;
    index_rows(a, step, Scratch{call.scratch}, t, n);
    t += n;
  }
  for (int t = part.first; t < part.last; ++t) {
    int32_t* row = a.out + static_cast<size_t>(t) * a.width;
    if (step.seen_selection && step.seen_selection[a.layer])
      __builtin_memcpy(step.seen_selection[a.layer] + static_cast<size_t>(t) * a.width, row, sizeof(int32_t) * a.width);
    if (step.forced_selection && step.forced_selection[a.layer])
      select_forced(row, a.count + t, step.forced_selection[a.layer] + static_cast<size_t>(t) * a.width, a.width);
  }
}
