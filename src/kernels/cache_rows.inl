// What a DSA layer writes per token: its latent row and its index key.

// The values as an operand row holds them, so that both formats see the same numbers.
static inline void store_fp8_row(std::byte* to, const op_t* row, int latent, int rope) {
  auto* codes = reinterpret_cast<uint8_t*>(to);
  const int stored = round_up(latent, kCodeLine);
  alignas(64) float x[kScaleBlock];
  uint8_t* scales = codes + stored;
  for (int c = 0; c < latent; c += kScaleBlock) {
    const int n = min_int(kScaleBlock, latent - c);
    float scale = 1, size = 0;
    for (int i = 0; i < n; i += 16) store(x + i, load_n(row + c + i, n - i));
    for (int i = 0; i < n; ++i) size += x[i] - x[i];
    if (finite(size)) fp8_tile_quantize(x, n, TileScale::pow2_amax_floor, codes + c, &scale);
    else __builtin_memset(codes + c, 0x7f, n);  // NaN: it must show in what attends to it
    __builtin_memcpy(scales + c / kScaleBlock * 4, &scale, 4);
  }
  clear(codes, latent, stored);
  uint8_t* pe = scales + (latent + kScaleBlock - 1) / kScaleBlock * 4;
  for (int i = 0; i < rope; ++i) {
    const uint16_t b = float_to_bf16(as_float(row[latent + i]));
    __builtin_memcpy(pe + 2 * i, &b, 2);
  }
}

static void latent(const LatentArgs& a, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(step.tokens, call);
  const size_t row_bytes = latent_row_bytes(a.format, a.latent, a.rope, sizeof(op_t));
  op_t* narrow = Scratch{call.scratch}.take<op_t>(round_up(a.latent + a.rope, kStep));
  for (int t = part.first; t < part.last; ++t) {
    const float* kv = a.kv + static_cast<size_t>(t) * a.ld_kv;
    const Span& span = step.span[step.span_of[t]];
    const int position = step.position[t];
    const int page = step.block_table[static_cast<size_t>(span.table) * step.table_stride + position / kPageTokens];
    std::byte* to = a.slab + static_cast<size_t>(page) * a.page_bytes + position % kPageTokens * row_bytes;
    op_t* row = a.format == LatentFormat::operand ? reinterpret_cast<op_t*>(to) : narrow;
    const V factor = set1(rsqrt(sum_squares(kv, a.latent) / static_cast<float>(a.latent) + a.eps));
    for (int c = 0; c < a.latent; c += 16) {
      const int left = a.latent - c;
      store_n(row + c, load_n(kv + c, left) * factor * load_n(a.norm + c, left), left);
    }
    if (a.rope) rotate(row + a.latent, kv + a.latent, a.table + static_cast<size_t>(t) * a.rope, a.rope, a.mode);
    clear(row, a.latent + a.rope, round_up(a.latent + a.rope, kStep));
    if (a.format == LatentFormat::fp8) store_fp8_row(to, row, a.latent, a.rope);
  }
}

static inline void layer_norm(float* out, const float* x, const float* weight, const float* bias, float eps, int n) {
  V sum = zero();
  for (int c = 0; c < n; c += 16) sum = sum + load_n(x + c, n - c);
  const float mean = hsum(sum) / static_cast<float>(n);
  V squares = zero();
  for (int c = 0; c < n; c += 16) {
    const V d = select(first_n(n - c), load_n(x + c, n - c) - set1(mean), zero());
    squares = fma(d, d, squares);
  }
  const V factor = set1(rsqrt(hsum(squares) / static_cast<float>(n) + eps));
  for (int c = 0; c < n; c += 16) {
    const int left = n - c;
    store_n(out + c, fma((load_n(x + c, left) - set1(mean)) * factor, load_n(weight + c, left), load_n(bias + c, left)),
            left);
  }
}

// One key into lane `lane` of its panel; the padded values are zeros, since a page that was just taken holds anything.
static inline void store_operand_key(std::byte* to, int lane, const float* x, int dim) {
  op_t* panel = reinterpret_cast<op_t*>(to);
  constexpr int kK = kBf16Operands ? 2 : 1;  // k of one line
  alignas(64) op_t narrow[kMaxHeadDim];
  for (int c = 0; c < dim; c += 16) store(narrow + c, load_n(x + c, dim - c));
  const int padded = round_up(dim, kStep);
  clear(narrow, dim, padded);
  for (int d = 0; d < padded; ++d) panel[static_cast<size_t>(d / kK) * kPanel * kK + lane * kK + d % kK] = narrow[d];
}
static inline void store_mxfp8_key(std::byte* to, int lane, const float* x, int dim) {
  auto* panel = reinterpret_cast<uint8_t*>(to);
  const int padded = round_up(dim, kStep);
  uint8_t codes[kMaxHeadDim] = {}, scales[kMaxHeadDim / kStep];
  mxfp8_quantize(x, dim, MxScale::rceil, codes, scales);
  // Expansion knows no negative zero, and no scale below 2^-117 (tile/tables.h): such groups are zeros.
  for (int k = 0; k < padded; ++k)
    if (codes[k] == 0x80 || scales[k / kStep] < 10) codes[k] = 0;
  for (int k = 0; k < padded; ++k) panel[k / 4 * 64 + 4 * lane + 2 * (k % 2) + k / 2 % 2] = codes[k];
  for (int g = 0; g < padded / kStep; ++g) panel[padded * kPanel + g * kPanel + lane] = scales[g];
}
static inline void store_int8_key(std::byte* to, int lane, const float* x, int dim) {
  auto* panel = reinterpret_cast<int8_t*>(to);
  const int padded = round_up(dim, kQuadStep);
  int8_t codes[kMaxHeadDim] = {};
  float spread = 0;
  for (int k = 0; k < dim; ++k) spread += x[k] - x[k];
  // What is not finite has no code: a scale that makes every score NaN.
  const float scale = finite(spread) ? int8_quantize(x, dim, codes) : __builtin_nanf("");
  for (int k = 0; k < padded; ++k) panel[k / 4 * 64 + 4 * lane + k % 4] = codes[k];
  __builtin_memcpy(to + static_cast<size_t>(padded) * kPanel + 4 * lane, &scale, 4);
}

// Key number `key` of a sequence, in panels of 16 keys (packed.h: IndexFormat).
static inline void store_key(const IndexKeyArgs& a, const StepHeader& step, const Span& span, int key, const float* x) {
  const int per_page = kPageTokens / a.pool;
  const int page = step.block_table[static_cast<size_t>(span.table) * step.table_stride + key / per_page];
  const int in_page = key % per_page, lane = in_page % kPanel;
  std::byte* panel = a.slab + static_cast<size_t>(page) * a.page_bytes +
                     in_page / kPanel * index_panel_bytes(a.format, a.dim, sizeof(op_t));
  switch (a.format) {
    case IndexFormat::operand: return store_operand_key(panel, lane, x, a.dim);
    case IndexFormat::mxfp8: return store_mxfp8_key(panel, lane, x, a.dim);
    case IndexFormat::int8: return store_int8_key(panel, lane, x, a.dim);
  }
}

// softmax over the pool's tokens per channel of (gate + ape), applied to their keys; f32 throughout (dsa.md 3.2).
static inline void pool_keys(float* out, const IndexKeyArgs& a, const float* ring) {
  for (int c = 0; c < a.dim; c += 16) {
    const int left = a.dim - c;
    V top = set1(-__builtin_inff());
    for (int s = 0; s < a.pool; ++s)
      top = max(top, load_n(ring + (2 * s + 1) * a.dim + c, left) + load_n(a.ape + s * a.dim + c, left));
    V sum = zero(), key = zero();
    for (int s = 0; s < a.pool; ++s) {
      const V p = exp(load_n(ring + (2 * s + 1) * a.dim + c, left) + load_n(a.ape + s * a.dim + c, left) - top);
      sum = sum + p;
      key = fma(p, load_n(ring + 2 * s * a.dim + c, left), key);
    }
    store_n(out + c, key / sum, left);
  }
}

// Tasks: rows, or whole spans where pools are built token by token in the ring.
static void index_key(const IndexKeyArgs& a, const Call& call) {
  const StepHeader& step = *call.step;
  alignas(64) float key[kMaxHeadDim];
  if (a.pool == 1) {
    const Slice part = slice(step.tokens, call);
    for (int t = part.first; t < part.last; ++t) {
      layer_norm(key, a.key + static_cast<size_t>(t) * a.ld_key, a.norm, a.norm_bias, a.eps, a.dim);
      if (a.rope) rotate(key, key, a.table + static_cast<size_t>(t) * a.rope, a.rope, a.mode);
      store_key(a, step, step.span[step.span_of[t]], step.position[t], key);
    }
    return;
  }
  const Slice part = slice(step.spans, call);
  for (int i = part.first; i < part.last; ++i) {
    const Span& span = step.span[i];
    float* ring = reinterpret_cast<float*>(a.ring + static_cast<size_t>(span.state_slot) * step.state_stride);
    for (int r = 0; r < span.length; ++r) {
      const int t = span.begin + r, position = span.position + r, place = position % a.pool;
      layer_norm(ring + 2 * place * a.dim, a.key + static_cast<size_t>(t) * a.ld_key, a.norm, a.norm_bias, a.eps, a.dim);
      __builtin_memcpy(ring + (2 * place + 1) * a.dim, a.pool_gate + static_cast<size_t>(t) * a.ld_gate,
                       static_cast<size_t>(a.dim) * sizeof(float));
      if (place != a.pool - 1) continue;
      pool_keys(key, a, ring);
      store_key(a, step, span, position / a.pool, key);
    }
  }
}
