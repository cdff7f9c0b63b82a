// Expanded MLA for prefill: see ExpandedArgs. Blocks of 64 keys at absolute positions, in ascending order.

static constexpr int kExpandedRows = 512;

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

struct ExpandedRoom {
  int q_width, v_width, row_width;  // of a query row, padded to 32; of a value row, padded to 16; of a latent row
  ProductScratch product;
  op_t *q, *p, *gathered, *key_rows, *keys, *value_rows, *lines;
  float *s, *o, *top, *sum;
  int32_t* cursor;         // into the row's list
  ExpandedRoom(Scratch& scratch, const ExpandedArgs& a, int rows)
      : q_width(round_up(a.nope + a.rope, kStep)), v_width(round_up(a.v, kPanel)), row_width(round_up(a.latent + a.rope, kStep)), product(scratch) {
    const size_t m = round_up(rows, 16);
    q = scratch.take<op_t>(m * q_width);
    p = scratch.take<op_t>(m * kKeyBlock);
    gathered = scratch.take<op_t>(static_cast<size_t>(kKeyBlock) * row_width + kCodeLine);
    key_rows = scratch.take<op_t>(static_cast<size_t>(kKeyBlock) * q_width);
    keys = scratch.take<op_t>(static_cast<size_t>(kKeyBlock) * q_width);
    value_rows = scratch.take<op_t>(static_cast<size_t>(kKeyBlock) * v_width);
    lines = scratch.take<op_t>(static_cast<size_t>(kKeyBlock) * v_width);
    s = scratch.take<float>(m * kKeyBlock);
    o = scratch.take<float>(m * v_width);
    top = scratch.take<float>(m);
    sum = scratch.take<float>(m);
    cursor = scratch.take<int32_t>(m);
  }
};

// rows [64, ld] = C [64, R] W^T of one head, as operands; columns beyond n are cleared.
static inline void expand_rows(op_t* rows, int ld, const ExpandedRoom& w, const ExpandedArgs& a, const PackedWeight& weight,
                               int head) {
  const int pairs = (weight.panels() + 1) / 2;
  for (int pair = 0; pair < pairs; ++pair) {
    const Unit unit = unit_of(weight, weight.codes + head * weight.code_bytes(), nullptr, pair);
    product(w.product.c, kUnitColumns, w.gathered, w.row_width, kKeyBlock, weight, &unit, 1, w.product.lines,
            w.product.partial);
    const int column = pair * kUnitColumns, last = min_int(kUnitColumns, ld - column);
    for (int r = 0; r < kKeyBlock; ++r)
      for (int i = 0; i < last; i += 16)
        store_n(rows + static_cast<size_t>(r) * ld + column + i,
                column + i < weight.n ? load(w.product.c + r * kUnitColumns + i) : zero(), last - i);
  }
}

// The keys of a block that a row sees: its prefix, or the members of its list.
static inline uint64_t seen_keys(const ExpandedArgs& a, const StepHeader& step, int t, int first, int32_t* cursor) {
  const int visible = step.position[t] + 1;
  if (!a.list || a.count[t] == visible) return first_bits(visible - first);
  const int32_t* list = a.list + static_cast<size_t>(t) * a.width;
  uint64_t seen = 0;
  for (; *cursor < a.count[t] && list[*cursor] < first + kKeyBlock; ++*cursor)
    seen |= uint64_t{1} << (list[*cursor] - first);
  return seen;
}

// Rows [t, t + rows) of one span and one head.
static inline void attend_expanded(const ExpandedArgs& a, const StepHeader& step, Scratch scratch, int t, int rows,
                                   int head) {
  const ExpandedRoom w(scratch, a, rows);
  for (int r = 0; r < rows; ++r) {
    op_t* q = w.q + static_cast<size_t>(r) * w.q_width;
    __builtin_memcpy(q, static_cast<const op_t*>(a.q) + static_cast<size_t>(t + r) * a.ld_q + head * a.q_head,
                     static_cast<size_t>(a.nope) * sizeof(op_t));
    if (a.rope)
      __builtin_memcpy(q + a.nope,
                       static_cast<const op_t*>(a.q_pe) + static_cast<size_t>(t + r) * a.ld_pe + head * a.pe_head,
                       static_cast<size_t>(a.rope) * sizeof(op_t));
    clear(q, a.nope + a.rope, w.q_width);
    w.top[r] = -__builtin_inff();
    w.sum[r] = 0;
    w.cursor[r] = 0;
  }
  __builtin_memset(w.o, 0, static_cast<size_t>(rows) * w.v_width * sizeof(float));
  const LatentRows from(a, step, t, nullptr);
  const int total = step.position[t + rows - 1] + 1;
  for (int first = 0; first < total; first += kKeyBlock) {
    for (int j = 0; j < kKeyBlock; ++j)  // rows are whole blocks, so all 64 keys are there
      from.read(w.gathered + static_cast<size_t>(j) * w.row_width, first + j);
    expand_rows(w.key_rows, w.q_width, w, a, a.key, head);
    for (int j = 0; j < kKeyBlock; ++j) {
      op_t* key = w.key_rows + static_cast<size_t>(j) * w.q_width;
      __builtin_memcpy(key + a.nope, w.gathered + static_cast<size_t>(j) * w.row_width + a.latent,
                       static_cast<size_t>(a.rope) * sizeof(op_t));
      clear(key, a.nope + a.rope, w.q_width);
    }
    pack_block(w.keys, w.key_rows, w.q_width);
    expand_rows(w.value_rows, w.v_width, w, a, a.value, head);
    // Rows above the block see nothing of it; blocks of rows are aligned, so whole blocks of 64 rows are passed over.
    const int skip = max_int(0, first - step.position[t]) / kKeyBlock * kKeyBlock, m = rows - skip;
    mma_keys(w.s + skip * kKeyBlock, kKeyBlock, w.q + static_cast<size_t>(skip) * w.q_width, w.q_width, w.keys, m,
             kKeyBlock / kPanel, w.q_width);
    for (int r = skip; r < rows; ++r) {
      const uint64_t seen = seen_keys(a, step, t + r, first, w.cursor + r);
      if (seen)
        softmax_row({w.s + r * kKeyBlock, w.p + r * kKeyBlock, w.o + static_cast<size_t>(r) * w.v_width, w.top + r,
                     w.sum + r, w.v_width},
                    seen, a.scale);
      else __builtin_memset(w.p + r * kKeyBlock, 0, kKeyBlock * sizeof(op_t));
    }
    mma_values(w.o + static_cast<size_t>(skip) * w.v_width, w.v_width, w.p + skip * kKeyBlock, kKeyBlock, w.value_rows,
               w.v_width, w.lines, m, w.v_width / kPanel, kKeyBlock);
  }
  for (int r = 0; r < rows; ++r) {
    op_t* out = static_cast<op_t*>(a.out) + static_cast<size_t>(t + r) * a.ld_out + head * a.v;
    const float* gate = a.gate ? a.gate + static_cast<size_t>(t + r) * a.ld_gate + head * a.v : nullptr;
    const V factor = set1(w.sum[r] > 0 || w.sum[r] != w.sum[r] ? 1.f / w.sum[r] : 0.f);  // an empty list gives 0
    for (int c = 0; c < a.v; c += 16) {
      const V y = load(w.o + static_cast<size_t>(r) * w.v_width + c) * factor;
      store_n(out + c, gate ? y * sigmoid(load_n(gate + c, a.v - c)) : y, a.v - c);
    }
  }
}

// Unit: (span, head).
static void attention_expanded(const ExpandedArgs& a, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(step.spans * a.heads, call);
  for (int u = part.first; u < part.last; ++u) {
    const Span& span = step.span[u / a.heads];
    const int from = round_up(span.position, kKeyBlock);
    const int to = min_int((span.position + span.length) / kKeyBlock * kKeyBlock, a.expand_below);
    for (int position = from; position < to; position += kExpandedRows)
      attend_expanded(a, step, Scratch{call.scratch}, span.begin + position - span.position,
                      min_int(kExpandedRows, to - position), u % a.heads);
  }
}
