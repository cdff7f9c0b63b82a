// KDA, what stands before and behind the recurrence: convolution, SiLU, L2 norm, gates; the gated norm, the
// new tail.
//
// Every pass runs down the tokens of a chunk for 16 channels at a time: weights and the convolution's window
// stay in registers, and each line of the projections is read once.

// Rows of one chunk, `ld` floats apart, with zeros in q, k and v up to a multiple of 16. ld is no multiple of 64: rows one L1 set apart would evict each
// other.
struct KdaRows {
  float *q, *k, *v;  // after conv, SiLU and L2
  float* alpha;      // exp(g)
  float* beta;       // [rows]
  int ld;
  KdaRows(Scratch& s, const KdaArgs& a, int rows) : ld(round_up(max_int(a.key_dim, a.value_dim), 64) + 16) {
    float** const all[] = {&q, &k, &v, &alpha};
    for (float** p : all) *p = s.take<float>(static_cast<size_t>(rows) * ld);
    beta = s.take<float>(rows);
  }
};

// The inputs of a chunk: rows first .. first + n of a span, the rows before the span from its tail.
struct KdaSource {
  const KdaArgs& a;
  const Span& span;
  const float* tail;
  int head, first, n;
  size_t token(int i) const { return static_cast<size_t>(span.begin + first + i); }
  // The rows one tile chunk later: 20 us from now they come from L2, not from L3 at half the speed.
  bool more() const { return first + n + kPageTokens <= span.length; }
};

static constexpr int kOpLine = 64 / static_cast<int>(sizeof(op_t));

// f(c, lanes) for each 16 of `dim` channels. Whole blocks without a mask: on Zen 4 masked loads and stores of bf16 took
// as long as the functions between them.
template <class F>
static inline void each_block(int dim, const F& f) {
  int c = 0;
  for (; c + 16 <= dim; c += 16) f(c, Full{});
  if (c < dim) f(c, dim - c);
}

// Convolution and SiLU of 16 channels down the tokens of a chunk, four at a time. lane(row) reads them from a
// row; w: weights; x: the kTaps - 1 rows before.
template <int kTaps, class Lane, class Open>
WEFT_INLINE void conv_tokens(float* out, int ld, const KdaSource& s, const op_t* in, const V (&w)[kTaps],
                             V (&x)[kTaps + 3], bool fetch, const Lane& lane,
                             const Open& sigmoids) {
  constexpr int kBefore = kTaps - 1;
  const size_t step = s.a.ld_qkv;
  const auto tokens = [&](auto count, int i) {
    constexpr int kN = decltype(count)::value;
    V sum[kN], open[kN];
    for (int t = 0; t < kN; ++t) {
      if (fetch) __builtin_prefetch(in + (t + kPageTokens) * step, 0, 2);
      x[kBefore + t] = lane(in + t * step);
    }
    for (int t = 0; t < kN; ++t) {
      sum[t] = w[0] * x[t];
      for (int tap = 1; tap < kTaps; ++tap) sum[t] = fma(w[tap], x[t + tap], sum[t]);
      open[t] = sum[t];
    }
    sigmoids(open);
    for (int t = 0; t < kN; ++t) store(out + static_cast<size_t>(i + t) * ld, sum[t] * open[t]);
    for (int tap = 0; tap < kBefore; ++tap) x[tap] = x[tap + kN];
    in += kN * step;
  };
  int i = 0;
  for (; i + 4 <= s.n; i += 4) tokens(Count<4>{}, i);
  for (; i < s.n; ++i) tokens(Count<1>{}, i);
}

// out [n][dim]: channels from `channel` on of the convolution, columns from `source` on of the projection.
template <int kTaps, class Open>
static inline void conv_columns(float* out, int ld, const KdaSource& s, int source, int channel, int dim,
                                const Open& sigmoids) {
  const KdaArgs& a = s.a;
  constexpr int kBefore = kTaps - 1;
  const auto columns = [&](int c, auto left) {
    V w[kTaps], x[kBefore + 4];
    const auto lane = [&](const op_t* row) { return load_n(row, left); };
    for (int tap = 0; tap < kTaps; ++tap)
      w[tap] = load_n(a.conv + static_cast<size_t>(tap) * a.conv_stride + channel + c, left);
    const op_t* in = static_cast<const op_t*>(a.qkv) + s.token(0) * a.ld_qkv + source + c;
    for (int tap = 0; tap < kBefore; ++tap) {
      const int row = s.first + tap - kBefore;  // of the span; negative: in the tail
      x[tap] = row >= 0
                   ? lane(in - (kBefore - tap) * static_cast<size_t>(a.ld_qkv))
                   : load_n(s.tail + static_cast<size_t>(row + kBefore) * a.conv_stride + channel + c, left);
    }
    conv_tokens<kTaps>(out + c, ld, s, in, w, x, s.more() && c % kOpLine == 0, lane, sigmoids);
  };
  each_block(dim, columns);
}
// f(Count<taps>)
template <class F>
static inline void with_taps(int taps, const F& f) {
  switch (taps) {
    case 1:
      return f(Count<1>{});
    case 2:
      return f(Count<2>{});
    case 3:
      return f(Count<3>{});
    default:
      return f(Count<4>{});
  }
}
static inline void conv_silu(float* out, int ld, const KdaSource& s, int source, int channel, int dim) {
  with_taps(s.a.taps, [&](auto taps) {
    conv_columns<decltype(taps)::value>(out, ld, s, source, channel, dim, [](auto& x) { sigmoid_each(x); });
  });
}

static inline void l2_normalise(float* x, int dim, float scale) {
  const V factor = set1(rsqrt(sum_squares(x, dim) + 1e-6f) * scale);
  for (int c = 0; c < dim; c += 16) store(x + c, load(x + c) * factor);
}

// exp(g) of gates x: g = lowest sigmoid(slope x) or -slope softplus(x)
template <int N>
WEFT_INLINE void kda_alphas(V (&x)[N], bool bounded, V slope, V lowest) {
  if (bounded) {
    for (int t = 0; t < N; ++t) x[t] = slope * x[t];
    sigmoid_each(x);
    for (int t = 0; t < N; ++t) x[t] = lowest * x[t];
  } else {
    for (int t = 0; t < N; ++t) x[t] = negate(slope * softplus(x[t]));
  }
  exp_each(x);
}
// alpha [n][dim] of key channels [0, dim) of the head
static inline void kda_decays(float* alpha, int ld, const KdaSource& s, int dim) {
  const KdaArgs& a = s.a;
  const size_t channel = static_cast<size_t>(s.head) * a.key_dim, step = a.ld_decay;
  const V slope = set1(a.slope[s.head]), lowest = set1(a.lower_bound);
  const auto columns = [&](int c, auto left) {
    const V bias = load_n(a.bias + channel + c, left);
    const op_t* in = static_cast<const op_t*>(a.decay) + s.token(0) * step + channel + c;
    const bool fetch = s.more() && c % kOpLine == 0;
    const auto tokens = [&](auto count, int i) {
      constexpr int kN = decltype(count)::value;
      V g[kN];
      for (int t = 0; t < kN; ++t) {
        if (fetch) __builtin_prefetch(in + (t + kPageTokens) * step, 0, 2);
        g[t] = load_n(in + t * step, left) + bias;
      }
      kda_alphas(g, a.bounded, slope, lowest);
      for (int t = 0; t < kN; ++t) store(alpha + static_cast<size_t>(i + t) * ld + c, g[t]);
      in += kN * step;
    };
    int i = 0;
    for (; i + 4 <= s.n; i += 4) tokens(Count<4>{}, i);
    for (; i < s.n; ++i) tokens(Count<1>{}, i);
  };
  each_block(dim, columns);
}

static inline void kda_betas(const KdaRows& r, const KdaSource& s) {
  const op_t* beta = static_cast<const op_t*>(s.a.beta) + s.head;
  for (int i = 0; i < s.n; ++i) r.beta[i] = as_float(beta[s.token(i) * s.a.ld_beta]);
  for (int i = 0; i < s.n; i += 16) store_n(r.beta + i, sigmoid(load_n(r.beta + i, s.n - i)), s.n - i);
}

// Everything of a chunk, in f32.
static inline void kda_inputs(const KdaRows& r, const KdaSource& s) {
  const KdaArgs& a = s.a;
  const int K = a.key_dim, q0 = s.head * K, v0 = s.head * a.value_dim;
  const float scale = rsqrt(static_cast<float>(K));
  conv_silu(r.q, r.ld, s, q0, q0, K);
  conv_silu(r.k, r.ld, s, a.k_offset + q0, a.heads * K + q0, K);
  conv_silu(r.v, r.ld, s, a.v_offset + v0, 2 * a.heads * K + v0, a.value_dim);
  kda_decays(r.alpha, r.ld, s, K);
  for (int i = 0; i < s.n; ++i) {
    l2_normalise(r.q + static_cast<size_t>(i) * r.ld, K, scale);
    l2_normalise(r.k + static_cast<size_t>(i) * r.ld, K, 1.f);
  }
  kda_betas(r, s);
}

// Columns of `out` behind the last head, up to a multiple of 32
static inline void kda_padding(const KdaSource& s) {
  const KdaArgs& a = s.a;
  const int width = a.heads * a.value_dim;
  if (s.head == a.heads - 1)
    for (int i = 0; i < s.n; ++i)
      clear(static_cast<op_t*>(a.out) + s.token(i) * a.ld_out, width, round_up(width, kStep));
}

// out = norm(o) * sigmoid(gate), o [n][ld]
static inline void kda_outputs(const KdaSource& s, const float* o, int ld) {
  const KdaArgs& a = s.a;
  const int V_ = a.value_dim;
  const size_t column = static_cast<size_t>(s.head) * V_;
  const bool more = s.more();
  for (int i = 0; i < s.n; ++i, o += ld) {
    const op_t* gate = static_cast<const op_t*>(a.gate) + s.token(i) * a.ld_gate + column;
    op_t* out = static_cast<op_t*>(a.out) + s.token(i) * a.ld_out + column;
    const V factor = set1(rsqrt(sum_squares(o, V_) / static_cast<float>(V_) + a.norm_eps));
    const auto columns = [&](auto count, int c, auto left) {
      constexpr int kN = decltype(count)::value;
      V open[kN];
      for (int p = 0; p < kN; ++p) {
        if (more && (c + 16 * p) % kOpLine == 0)
          __builtin_prefetch(gate + c + 16 * p + kPageTokens * static_cast<size_t>(a.ld_gate), 0, 2);
        open[p] = load_n(gate + c + 16 * p, left);
      }
      sigmoid_each(open);
      for (int p = 0; p < kN; ++p) {
        const int at = c + 16 * p;
        store_n(out + at, load(o + at) * factor * load_n(a.norm + at, left) * open[p], left);
      }
    };
    int c = 0;
    for (; c + 64 <= V_; c += 64) columns(Count<4>{}, c, Full{});
    for (; c + 16 <= V_; c += 16) columns(Count<1>{}, c, Full{});
    if (c < V_) columns(Count<1>{}, c, V_ - c);
  }
  kda_padding(s);
}

// New tail of one head's channels: the last taps - 1 rows of (old tail, span).
static inline void kda_tail(const KdaArgs& a, const Span& span, float* tail, int source, int channel,
                            int dim) {
  const int keep = a.taps - 1;
  for (int r = 0; r < keep; ++r) {
    const int row = span.length - keep + r;  // local row of the span that ends up in tail row r
    const float* before = tail + static_cast<size_t>(keep + row) * a.conv_stride + channel;
    const op_t* in =
        static_cast<const op_t*>(a.qkv) + static_cast<size_t>(span.begin + row) * a.ld_qkv + source;
    float* to = tail + static_cast<size_t>(r) * a.conv_stride + channel;
    for (int c = 0; c < dim; c += 16)
      store_n(to + c, row >= 0 ? load_n(in + c, dim - c) : load_n(before + c, dim - c), dim - c);
  }
}
