// Row-wise kernels: embedding, RMSNorm, rope, hyper-connections, copies.

static inline int row_count(Rows rows, const StepHeader& step) {
  return rows == Rows::tokens ? step.tokens : step.logit_rows;
}
static inline int source_row(Rows rows, const StepHeader& step, int i) {
  return rows == Rows::logits ? step.logit_row[i] : i;
}

// From row i of a slice to the row that will be needed next. Rows come from memory faster when they are asked
// for while the one before is worked on: alone, a row's few pages are over before the hardware's prefetch is
// at speed. The last one asks for what lies 2 KB behind.
static inline long ahead_of(Rows rows, const StepHeader& step, int i, int last, int ld) {
  constexpr long kBehind = 512;
  return i + 1 < last ? static_cast<long>(source_row(rows, step, i + 1) - source_row(rows, step, i)) * ld
                      : kBehind;
}

static void embed(const EmbedArgs& e, const Call& call) {
  const Slice part = slice(call.step->tokens, call);
  for (int t = part.first; t < part.last; ++t) {
    const size_t from = static_cast<size_t>(call.step->token[t]) * e.width;
    for (int s = 0; s < e.copies; ++s) {
      float* out = e.out + static_cast<size_t>(t) * e.ld_out + static_cast<size_t>(s) * e.width;
      const bf16* narrow = reinterpret_cast<const bf16*>(e.table) + from;
      const float* wide = reinterpret_cast<const float*>(e.table) + from;
      int i = 0;
      for (; i + 16 <= e.width; i += 16) store(out + i, e.bf16 ? load(narrow + i) : load(wide + i));
      for (; i < e.width; ++i) out[i] = e.bf16 ? widen(narrow[i]) : wide[i];
    }
    clear(e.out + static_cast<size_t>(t) * e.ld_out, e.copies * e.width, round_up(e.copies * e.width, kStep));
  }
}

static void norm(const NormArgs& n, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(row_count(n.rows, step), call);
  for (int i = part.first; i < part.last; ++i) {
    const int t = source_row(n.rows, step, i);
    const float* x = n.x + static_cast<size_t>(t) * n.ld_x;
    const float squares = sum_squares(x, n.width);
    see_nonfinite(step, n.rows == Rows::compact ? step.logit_row[i] : t, n.site, squares);
    store_row(n.out_f32 ? n.out_f32 + static_cast<size_t>(i) * n.ld_f32 : nullptr,
              n.out_op ? static_cast<op_t*>(n.out_op) + static_cast<size_t>(i) * n.ld_op : nullptr, x,
              n.weight, rsqrt(squares / static_cast<float>(n.width) + n.eps), n.width);
  }
}

static void rope_table(const RopeTableArgs& r, const Call& call) {
  const Slice part = slice(call.step->tokens, call);
  for (int t = part.first; t < part.last; ++t)
    for (int j = 0; j < r.pairs; ++j) {
      // double: at a million tokens an f32 angle is off by 0.06 rad
      const double angle = call.step->position[t] * r.inv_freq[j];
      float* out = r.out + static_cast<size_t>(t) * r.pairs * 2 + j;
      out[0] = static_cast<float>(__builtin_cos(angle)) * r.scale;
      out[r.pairs] = static_cast<float>(__builtin_sin(angle)) * r.scale;
    }
}

static inline float as_float(float x) {
  return x;
}
[[maybe_unused]] static inline float as_float(bf16 x) {
  return widen(x);
}
static inline void put(float* p, float x) {
  *p = x;
}
template <class T>
static inline void put(T* p, float x) {
  store_n(p, set1(x), 1);
}

// One pair of a rotation. table: cosines of all pairs, then their sines.
template <class In, class Out>
static inline void rotate_pair(Out* out, const In* x, const float* table, int pairs, int j, RopeMode mode) {
  const int first = mode == RopeMode::interleaved ? 2 * j : j;
  const int second = mode == RopeMode::interleaved ? 2 * j + 1 : j + pairs;
  const float a = as_float(x[first]), b = as_float(x[second]), c = table[j], s = table[pairs + j];
  put(out + first, a * c - b * s);
  put(out + second, a * s + b * c);
}

// Pairs are (2j, 2j+1) interleaved, (j, j + dims/2) half-split. In place when out == x.
template <class In, class Out>
static inline void rotate(Out* out, const In* x, const float* table, int dims, RopeMode mode) {
  if (mode == RopeMode::none) {
    for (int i = 0; i < dims; i += 16) store_n(out + i, load_n(x + i, dims - i), dims - i);
    return;
  }
  const int pairs = dims / 2;
  int j = 0;
  if (mode == RopeMode::half_split) {
    for (; j + 16 <= pairs; j += 16) {
      const V a = load(x + j), b = load(x + pairs + j), c = load(table + j), s = load(table + pairs + j);
      store(out + j, a * c - b * s);
      store(out + pairs + j, a * s + b * c);
    }
  } else if constexpr (sizeof(In) == 2 && sizeof(Out) == 2) {
    for (; j + 16 <= pairs; j += 16) {
      const V a = even(x + 2 * j), b = odd(x + 2 * j), c = load(table + j), s = load(table + pairs + j);
      alignas(64) Out first[16], second[16];
      store(first, a * c - b * s);
      store(second, a * s + b * c);
      interleave(out + 2 * j, first, second);
    }
  }
  for (; j < pairs; ++j) rotate_pair(out, x, table, pairs, j, mode);
}

static void rope(const RopeArgs& r, const Call& call) {
  const Slice part = slice(call.step->tokens, call);
  for (int t = part.first; t < part.last; ++t) {
    const float* table = r.table + static_cast<size_t>(t) * (r.dims / 2) * 2;
    for (int h = 0; h < r.heads; ++h)
      rotate(
          static_cast<op_t*>(r.out) + static_cast<size_t>(t) * r.ld_out + static_cast<size_t>(h) * r.out_head,
          static_cast<const op_t*>(r.x) + static_cast<size_t>(t) * r.ld_x + static_cast<size_t>(h) * r.x_head,
          table, r.dims, r.mode);
  }
}

static constexpr int kKeepC = 8;  // HcPreArgs::keep: post at 0, C at 8

// Sinkhorn normalisation of C [n, n] (glm5_next.md 3.1), a token per lane: softmax rows, then alternate; eps
// where the formula has it. One token's 40 sums and divisions wait for each other; sixteen tokens wait
// together.
static inline void sinkhorn(V* c, int n, int iterations, float eps) {
  const V small = set1(eps), one = set1(1.f);
  for (int a = 0; a < n; ++a) {
    V *row = c + a * n, top = row[0], sum = zero();
    for (int b = 1; b < n; ++b) top = max(top, row[b]);
    for (int b = 0; b < n; ++b) sum = sum + (row[b] = exp(row[b] - top));
    for (int b = 0; b < n; ++b) row[b] = row[b] / sum + small;
  }
  const auto scale = [&](V* first, int step) {
    V sum = small;
    for (int i = 0; i < n; ++i) sum = sum + first[i * step];
    const V factor = one / sum;
    for (int i = 0; i < n; ++i) first[i * step] = first[i * step] * factor;
  };
  for (int i = 0; i < iterations; ++i) {
    if (i > 0)
      for (int a = 0; a < n; ++a) scale(c + a * n, 1);
    for (int b = 0; b < n; ++b) scale(c + b, n);
  }
}
// The same of 16 tokens' C in rows of 16
static inline void sinkhorn_rows(float (&rows)[16][16], int n, int iterations, float eps) {
  alignas(64) float lanes[16][16];
  const uint32_t* from[16];
  V c[16];
  const auto turn = [&](float(&out)[16][16], const float(&in)[16][16]) {
    for (int i = 0; i < 16; ++i) from[i] = reinterpret_cast<const uint32_t*>(in[i]);
    transpose16(reinterpret_cast<uint32_t*>(out[0]), from);
  };
  turn(lanes, rows);
  for (int i = 0; i < n * n; ++i) c[i] = load(lanes[i]);
  sinkhorn(c, n, iterations, eps);
  for (int i = 0; i < n * n; ++i) store(lanes[i], c[i]);
  turn(rows, lanes);
}

static void hc_pre(const HcPreArgs& h, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(step.tokens, call);
  Scratch scratch{call.scratch};
  float* u = scratch.take<float>(round_up(h.width, 16));
  const int n = h.streams;
  alignas(64) float pre[16], post[16], c[16][16] = {};
  const float* stream[kMaxStreams];
  for (int first = part.first; first < part.last; first += 16) {
    const int last = min_int(first + 16, part.last);
    for (int t = first; t < last; ++t) {
      const float* x = h.x + static_cast<size_t>(t) * h.ld_x;
      const float* map = h.map + static_cast<size_t>(t) * h.ld_map;
      const float squares =
          sum_squares<true>(x, n * h.width, ahead_of(Rows::tokens, step, t, part.last, h.ld_x));
      see_nonfinite(step, t, h.site, squares);
      const float r = rsqrt(squares / static_cast<float>(n * h.width) + h.eps);
      for (int i = 0; i < n; ++i) {
        pre[i] = r * map[i] * h.scale[0] + h.base[i];
        post[i] = r * map[n + i] * h.scale[1] + h.base[n + i];
        stream[i] = x + static_cast<size_t>(i) * h.width;
      }
      store_n(pre, sigmoid(load_n(pre, n)) + set1(h.hc_eps), n);
      store_n(h.keep + static_cast<size_t>(t) * 32, set1(2.f) * sigmoid(load_n(post, n)), n);
      for (int i = 0; i < n * n; ++i) c[t - first][i] = r * map[2 * n + i] * h.scale[2] + h.base[2 * n + i];
      const float square = weighted_rows(u, stream, pre, n, h.width);
      store_row(h.out_f32 ? h.out_f32 + static_cast<size_t>(t) * h.ld_f32 : nullptr,
                h.out_op ? static_cast<op_t*>(h.out_op) + static_cast<size_t>(t) * h.ld_op : nullptr, u,
                h.norm, rsqrt(square / static_cast<float>(h.width) + h.eps), h.width);
    }
    for (int i = last - first; i < 16; ++i) clear(c[i], 0, 16);
    sinkhorn_rows(c, n, h.iterations, h.hc_eps);
    for (int t = first; t < last; ++t)
      for (int i = 0; i < n * n; ++i) h.keep[static_cast<size_t>(t) * 32 + kKeepC + i] = c[t - first][i];
  }
}

static void hc_post(const HcPostArgs& h, const Call& call) {
  const Slice part = slice(call.step->tokens, call);
  const int n = h.streams;
  for (int t = part.first; t < part.last; ++t) {
    float* x = h.x + static_cast<size_t>(t) * h.ld_x;
    const float* y = h.y + static_cast<size_t>(t) * h.ld_y;
    const float* keep = h.keep + static_cast<size_t>(t) * 32;
    for (int c = 0; c < h.width; c += 16) {
      const int left = h.width - c;
      V old[kMaxStreams];
      for (int a = 0; a < n; ++a) old[a] = load_n(x + static_cast<size_t>(a) * h.width + c, left);
      const V sub = load_n(y + c, left);
      for (int i = 0; i < n; ++i) {
        V out = set1(keep[i]) * sub;
        for (int a = 0; a < n; ++a) out = fma(set1(keep[kKeepC + a * n + i]), old[a], out);
        store_n(x + static_cast<size_t>(i) * h.width + c, out, left);
      }
    }
  }
}

static void hc_end(const HcEndArgs& h, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(row_count(h.rows, step), call);
  for (int i = part.first; i < part.last; ++i) {
    const float* x = h.x + static_cast<size_t>(source_row(h.rows, step, i)) * h.ld_x;
    for (int c = 0; c < h.width; c += 16) {
      const int left = h.width - c;
      V sum = zero();
      for (int s = 0; s < h.streams; ++s) sum = sum + load_n(x + static_cast<size_t>(s) * h.width + c, left);
      store_n(h.out + static_cast<size_t>(i) * h.ld_out + c, sum * set1(1.f / static_cast<float>(h.streams)),
              left);
    }
  }
}

static void copy(const CopyArgs& c, const Call& call) {
  const StepHeader& step = *call.step;
  const Slice part = slice(row_count(c.rows, step), call);
  for (int i = part.first; i < part.last; ++i)
    __builtin_memcpy(c.out + static_cast<size_t>(i) * c.ld_out,
                     c.x + static_cast<size_t>(source_row(c.rows, step, i)) * c.ld_x,
                     static_cast<size_t>(c.width) * sizeof(float));
}
