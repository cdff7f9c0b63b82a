// Expanded MLA for prefill: see ExpandedArgs. Groups of 256 keys at absolute positions, in ascending order,
// meet 64 rows at a time: sums of values are read and written once per group, a group's products with the
// weights share their loads (64 keys against 512 rows: 1.46 times the time).

static constexpr int kExpandedRows = 512, kKeyGroup = 4 * kKeyBlock, kRowGroup = kKeyBlock;

// The maximum of no scores. Finite: the difference of two is 0.
static constexpr float kNothingSeen = -1e30f;

// Which keys of a group a row sees.
struct SeenKeys {
  uint64_t block[kKeyGroup / kKeyBlock];
};

// 2^x of scores below their maximum. Where shares are rounded to bf16 behind it, 2^-16 is near enough.
template <int N>
WEFT_INLINE void shares(V (&x)[N]) {
  if constexpr (kBf16Operands) exp2_near_1(x);
  else
    for (V& one : x) one = exp2(one);
}

// The largest, or the sum, of each of 16 rows of 16.
template <class F>
static inline V fold_rows(const float (&rows)[16][16], const F& f) {
  alignas(64) float column[16][16];
  const uint32_t* at[16];
  for (int i = 0; i < 16; ++i) at[i] = reinterpret_cast<const uint32_t*>(rows[i]);
  transpose16(reinterpret_cast<uint32_t*>(column), at);
  V x[16];
  for (int i = 0; i < 16; ++i) x[i] = load(column[i]);
  for (int half = 8; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] = f(x[i], x[i + half]);
  return x[0];
}

// Online softmax of 16 rows over `blocks` blocks of scores; rescales their accumulated values. A row alone
// would wait for its maximum, then for its sum, as long as its 256 shares take. scale > 0, with log2(e).
struct SoftmaxRows {
  const float* s;      // [16][kKeyGroup]
  op_t* p;             // [16][kKeyGroup]
  float *o, *top, *sum;  // [16][value_width], [16], [16]
  int value_width;
};
static inline void softmax_rows(const SoftmaxRows& w, const SeenKeys* seen, int blocks, float scale) {
  constexpr uint64_t kAll = ~uint64_t{0};
  const auto lanes = [](uint64_t bits, int j) { return from_bits(static_cast<uint32_t>(bits >> 16 * j) & 0xffff); };
  alignas(64) float part[16][16], top[16], keep[16];
  const V low = set1(kNothingSeen), factor = set1(scale);
  for (int r = 0; r < 16; ++r) {
    V best = low;
    for (int b = 0; b < blocks; ++b) {
      const float* s = w.s + r * kKeyGroup + b * kKeyBlock;
      V x[4];
      for (int j = 0; j < 4; ++j) x[j] = load(s + 16 * j);
      if (const uint64_t bits = seen[r].block[b]; bits != kAll)
        for (int j = 0; j < 4; ++j) x[j] = select(lanes(bits, j), x[j], low);
      best = max(best, max(max(x[0], x[1]), max(x[2], x[3])));
    }
    store(part[r], best);
  }
  const V before = load(w.top), after = max(before, factor * fold_rows(part, [](V x, V y) { return max(x, y); }));
  store(w.top, after);
  store(top, after);
  for (int r = 0; r < 16; ++r) {
    const V offset = set1(-top[r]);
    V total = zero();
    for (int b = 0; b < blocks; ++b) {
      const int at = r * kKeyGroup + b * kKeyBlock;
      const uint64_t bits = seen[r].block[b];
      if (bits == 0) {
        __builtin_memset(w.p + at, 0, kKeyBlock * sizeof(op_t));
        continue;
      }
      V p[4];
      for (int j = 0; j < 4; ++j) p[j] = max(set1(-126.f), fma(load(w.s + at + 16 * j), factor, offset));
      shares(p);
      if (bits != kAll)
        for (int j = 0; j < 4; ++j) p[j] = select(lanes(bits, j), p[j], zero());
      for (int j = 0; j < 4; ++j) store(w.p + at + 16 * j, p[j]);
      total = total + ((p[0] + p[1]) + (p[2] + p[3]));
    }
    store(part[r], total);
  }
  const V kept = exp2(before - after);
  store(keep, kept);
  store(w.sum, fma(load(w.sum), kept, fold_rows(part, [](V x, V y) { return x + y; })));
  for (int r = 0; r < 16; ++r)
    if (float* o = w.o + static_cast<size_t>(r) * w.value_width; keep[r] != 1.f)
      for (int c = 0; c < w.value_width; c += 16) store(o + c, load(o + c) * set1(keep[r]));
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
    const size_t m = round_up(rows, 16), group = kKeyGroup;
    q = scratch.take<op_t>(m * q_width);
    p = scratch.take<op_t>(kRowGroup * group);
    gathered = scratch.take<op_t>(group * row_width + kCodeLine);
    key_rows = scratch.take<op_t>(group * q_width);
    keys = scratch.take<op_t>(group * q_width);
    value_rows = scratch.take<op_t>(group * v_width);
    lines = scratch.take<op_t>(group * v_width);
    s = scratch.take<float>(kRowGroup * group);
    o = scratch.take<float>(m * v_width);
    top = scratch.take<float>(m);
    sum = scratch.take<float>(m);
    cursor = scratch.take<int32_t>(m);
  }
};

// rows [n, ld] = C [n, R] W^T of one head, as operands; columns beyond the weight's are cleared.
static inline void expand_rows(op_t* rows, int ld, int n, const ExpandedRoom& w, const PackedWeight& weight, int head) {
  const int pairs = (weight.panels() + 1) / 2, ldc = w.product.kLdc;
  Unit unit[kUnitBlock];
  for (int first = 0; first < pairs; first += kUnitBlock) {
    const int units = min_int(kUnitBlock, pairs - first), column = first * kUnitColumns;
    for (int u = 0; u < units; ++u) unit[u] = unit_of(weight, weight.codes + head * weight.code_bytes(), nullptr, first + u);
    product(w.product.c, ldc, w.gathered, w.row_width, n, weight, unit, units, w.product.lines, w.product.partial);
    const int width = min_int(units * kUnitColumns, ld - column);
    for (int r = 0; r < n; ++r) {
      const float* from = w.product.c + static_cast<size_t>(r) * ldc;
      op_t* to = rows + static_cast<size_t>(r) * ld + column;
      for (int i = 0; i < width; i += 16) store_n(to + i, column + i < weight.n ? load(from + i) : zero(), width - i);
    }
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

// Keys and values of n positions from `first` on, in the forms that the products take.
static inline void expand_group(const ExpandedRoom& w, const ExpandedArgs& a, const LatentRows& from, int first, int n,
                                int head) {
  const op_t* row[16];
  for (int j = 0; j < n; ++j) from.read(w.gathered + static_cast<size_t>(j) * w.row_width, first + j);
  expand_rows(w.key_rows, w.q_width, n, w, a.key, head);
  for (int j = 0; j < n; j += kPanel) {
    for (int r = 0; r < kPanel; ++r) {
      op_t* key = w.key_rows + static_cast<size_t>(j + r) * w.q_width;
      __builtin_memcpy(key + a.nope, w.gathered + static_cast<size_t>(j + r) * w.row_width + a.latent,
                       static_cast<size_t>(a.rope) * sizeof(op_t));
      clear(key, a.nope + a.rope, w.q_width);
      row[r] = key;
    }
    pack_keys(w.keys + static_cast<size_t>(j) * w.q_width, row, w.q_width);
  }
  expand_rows(w.value_rows, w.v_width, n, w, a.value, head);
  pack_values(w.lines, w.value_rows, w.v_width, kKeyGroup, w.v_width / kPanel, n);
}

// Rows [t, t + rows) of one span and one head; whole blocks of 64.
static inline void attend_expanded(const ExpandedArgs& a, const StepHeader& step, Scratch scratch, int t, int rows,
                                   int head) {
  constexpr float kLog2e = 1.44269504f;
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
    w.top[r] = kNothingSeen;
    w.sum[r] = 0;
    w.cursor[r] = 0;
  }
  __builtin_memset(w.o, 0, static_cast<size_t>(rows) * w.v_width * sizeof(float));
  const LatentRows from(a, step, t, nullptr);
  const int start = step.position[t], total = start + rows;  // rows are whole blocks: so are their keys
  for (int first = 0; first < total; first += kKeyGroup) {
    const int n = min_int(kKeyGroup, total - first);
    expand_group(w, a, from, first, n, head);
    for (int r = max_int(0, first - start) / kRowGroup * kRowGroup; r < rows; r += kRowGroup) {
      const int keys = min_int(n, start + r + kRowGroup - first), blocks = keys / kKeyBlock;
      mma_keys(w.s, kKeyGroup, w.q + static_cast<size_t>(r) * w.q_width, w.q_width, w.keys, kRowGroup, keys / kPanel,
               w.q_width);
      float* o = w.o + static_cast<size_t>(r) * w.v_width;
      for (int i = 0; i < kRowGroup; i += 16) {
        SeenKeys seen[16];
        for (int j = 0; j < 16; ++j)
          for (int b = 0; b < blocks; ++b)
            seen[j].block[b] = seen_keys(a, step, t + r + i + j, first + b * kKeyBlock, w.cursor + r + i + j);
        softmax_rows({w.s + i * kKeyGroup, w.p + i * kKeyGroup, o + static_cast<size_t>(i) * w.v_width, w.top + r + i,
                      w.sum + r + i, w.v_width},
                     seen, blocks, a.scale * kLog2e);
      }
      mma_packed_values(o, w.v_width, w.p, kKeyGroup, w.value_rows, w.v_width, w.lines, kKeyGroup, kRowGroup,
                        w.v_width / kPanel, keys);
    }
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
