// What a DSA layer writes per token: its latent row and its index key.

static void latent(const LatentArgs& a, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(step.tokens, call);
  for (int t = part.first; t < part.last; ++t) {
    const float* kv = a.kv + static_cast<size_t>(t) * a.ld_kv;
    const Span& span = step.span[step.span_of[t]];
    const int position = step.position[t];
    const int page = step.block_table[static_cast<size_t>(span.table) * step.table_stride + position / kPageTokens];
    op_t* row = reinterpret_cast<op_t*>(a.slab + static_cast<size_t>(page) * a.page_bytes) +
                static_cast<size_t>(position % kPageTokens) * a.row_elements;
    const V factor = set1(rsqrt(sum_squares(kv, a.latent) / static_cast<float>(a.latent) + a.eps));
    for (int c = 0; c < a.latent; c += 16) {
      const int left = a.latent - c;
      store_n(row + c, load_n(kv + c, left) * factor * load_n(a.norm + c, left), left);
    }
    if (a.rope) rotate(row + a.latent, kv + a.latent, a.table + static_cast<size_t>(t) * a.rope, a.rope, a.mode);
    clear(row, a.latent + a.rope, a.row_elements);
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

// Key number `key` of a sequence, in panels of 16 keys: element (key, d) beside its neighbours of the same d.
static inline void store_key(const IndexKeyArgs& a, const StepHeader& step, const Span& span, int key, const float* x) {
  const int per_page = kPageTokens / a.pool;
  const int page = step.block_table[static_cast<size_t>(span.table) * step.table_stride + key / per_page];
  const int in_page = key % per_page, lane = in_page % kPanel;
  op_t* panel = reinterpret_cast<op_t*>(a.slab + static_cast<size_t>(page) * a.page_bytes) +
                static_cast<size_t>(in_page / kPanel) * round_up(a.dim, kStep) * kPanel;
  constexpr int kK = kBf16Operands ? 2 : 1;  // k of one line
  alignas(64) op_t narrow[kMaxHeadDim];
  for (int c = 0; c < a.dim; c += 16) store(narrow + c, load_n(x + c, a.dim - c));
  const int padded = round_up(a.dim, kStep);  // a page that was just taken holds anything
  clear(narrow, a.dim, padded);
  for (int d = 0; d < padded; ++d) panel[static_cast<size_t>(d / kK) * kPanel * kK + lane * kK + d % kK] = narrow[d];
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
