// KDA, what stands before and behind the recurrence: convolution, SiLU, L2 norm, gates; the gated norm, the new tail.
//
// Every pass runs down the tokens of a chunk for 16 channels at a time: weights and the convolution's window stay in
// registers, and each line of the projections is read once.

// Rows of one chunk, `ld` floats apart. ld is no multiple of 64: rows one L1 set apart would evict each other.
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

// Into L2, once for each line: x is column c of its row.
static inline void prefetch_line(const op_t* x, int c) {
  if (c % (64 / static_cast<int>(sizeof(op_t))) == 0) __builtin_prefetch(x, 0, 2);
}

// How exactly SiLU and the output gate are computed: coarse where bf16 is what follows.
enum class Grade { exact, coarse };
template <Grade kGrade, int N>
static inline void sigmoid_graded(V (&x)[N]) {
#ifdef WEFT_TILES
  if constexpr (kGrade == Grade::coarse) return sigmoid_coarse(x);
#endif
  sigmoid_each(x);
}

template <Grade kGrade, int kTaps>
static inline void conv_columns(float* out, int ld, const KdaSource& s, int source, int channel, int dim) {
  const KdaArgs& a = s.a;
  const size_t step = a.ld_qkv;
  const bool more = s.more();
  constexpr int kBefore = kTaps - 1;
  for (int c = 0; c < dim; c += 16) {
    const int left = dim - c;
    V w[kTaps], x[kBefore + 4];
    for (int tap = 0; tap < kTaps; ++tap)
      w[tap] = load_n(a.conv + static_cast<size_t>(tap) * a.conv_stride + channel + c, left);
    const op_t* in = static_cast<const op_t*>(a.qkv) + s.token(0) * step + source + c;
    for (int tap = 0; tap < kBefore; ++tap) {
      const int row = s.first + tap - kBefore;  // of the span; negative: in the tail
      x[tap] = row >= 0 ? load_n(in - (kBefore - tap) * step, left)
                        : load_n(s.tail + static_cast<size_t>(row + kBefore) * a.conv_stride + channel + c, left);
    }
    const auto tokens = [&](auto count, int i) {
      constexpr int kN = decltype(count)::value;
      V sum[kN], open[kN];
      for (int t = 0; t < kN; ++t) {
        if (more) prefetch_line(in + t * step + kPageTokens * step, c);
        x[kBefore + t] = load_n(in + t * step, left);
      }
      for (int t = 0; t < kN; ++t) {
        sum[t] = w[0] * x[t];
        for (int tap = 1; tap < kTaps; ++tap) sum[t] = fma(w[tap], x[t + tap], sum[t]);
        open[t] = sum[t];
      }
      sigmoid_graded<kGrade>(open);
      for (int t = 0; t < kN; ++t) store_n(out + static_cast<size_t>(i + t) * ld + c, sum[t] * open[t], left);
      for (int tap = 0; tap < kBefore; ++tap) x[tap] = x[tap + kN];
      in += kN * step;
    };
    int i = 0;
    for (; i + 4 <= s.n; i += 4) tokens(Count<4>{}, i);
    for (; i < s.n; ++i) tokens(Count<1>{}, i);
  }
}
template <Grade kGrade>
static inline void conv_silu(float* out, int ld, const KdaSource& s, int source, int channel, int dim) {
  switch (s.a.taps) {
    case 1: return conv_columns<kGrade, 1>(out, ld, s, source, channel, dim);
    case 2: return conv_columns<kGrade, 2>(out, ld, s, source, channel, dim);
    case 3: return conv_columns<kGrade, 3>(out, ld, s, source, channel, dim);
    default: return conv_columns<kGrade, 4>(out, ld, s, source, channel, dim);
  }
}

static inline void l2_normalise(float* x, int dim, float scale) {
  const V factor = set1(rsqrt(sum_squares(x, dim) + 1e-6f) * scale);
  for (int c = 0; c < dim; c += 16) store_n(x + c, load_n(x + c, dim - c) * factor, dim - c);
}

// A coarse gate moves the log-decay of any stretch of tokens by 2^-12 of itself, so the state by 2^-12 / e; an error of
// exp would add up over thousands of slow steps.
// alpha of key channels [from, from + dim) of the head
template <Grade kGrade>
static inline void kda_decays(float* alpha, int ld, const KdaSource& s, int from, int dim) {
  const KdaArgs& a = s.a;
  const size_t channel = static_cast<size_t>(s.head) * a.key_dim + from, step = a.ld_decay;
  const bool more = s.more();
  const V slope = set1(a.slope[s.head]), lowest = set1(a.lower_bound);
  for (int c = 0; c < dim; c += 16) {
    const int left = dim - c;
    const V bias = load_n(a.bias + channel + c, left);
    const op_t* in = static_cast<const op_t*>(a.decay) + s.token(0) * step + channel + c;
    const auto tokens = [&](auto count, int i) {
      constexpr int kN = decltype(count)::value;
      V g[kN];
      for (int t = 0; t < kN; ++t) {
        if (more) prefetch_line(in + t * step + kPageTokens * step, c);
        g[t] = load_n(in + t * step, left) + bias;
      }
      if (a.bounded) {
        for (int t = 0; t < kN; ++t) g[t] = slope * g[t];
        sigmoid_graded<kGrade>(g);
        for (int t = 0; t < kN; ++t) g[t] = lowest * g[t];
      } else {
        for (int t = 0; t < kN; ++t) g[t] = negate(slope * softplus(g[t]));
      }
      exp_each(g);
      for (int t = 0; t < kN; ++t) store_n(alpha + static_cast<size_t>(i + t) * ld + c, g[t], left);
      in += kN * step;
    };
    int i = 0;
    for (; i + 4 <= s.n; i += 4) tokens(Count<4>{}, i);
    for (; i < s.n; ++i) tokens(Count<1>{}, i);
  }
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
  conv_silu<Grade::exact>(r.q, r.ld, s, q0, q0, K);
  conv_silu<Grade::exact>(r.k, r.ld, s, a.k_offset + q0, a.heads * K + q0, K);
  conv_silu<Grade::exact>(r.v, r.ld, s, a.v_offset + v0, 2 * a.heads * K + v0, a.value_dim);
  kda_decays<Grade::exact>(r.alpha, r.ld, s, 0, K);
  for (int i = 0; i < s.n; ++i) {
    l2_normalise(r.q + static_cast<size_t>(i) * r.ld, K, scale);
    l2_normalise(r.k + static_cast<size_t>(i) * r.ld, K, 1.f);
  }
  kda_betas(r, s);
}

// out = norm(scale o) * sigmoid(gate), o [n][ld], scale [n] or null for 1
template <Grade kGrade>
static inline void kda_outputs(const KdaSource& s, const float* o, int ld, const float* scale) {
  const KdaArgs& a = s.a;
  const int V_ = a.value_dim;
  const size_t column = static_cast<size_t>(s.head) * V_;
  const bool more = s.more();
  for (int i = 0; i < s.n; ++i, o += ld) {
    const op_t* gate = static_cast<const op_t*>(a.gate) + s.token(i) * a.ld_gate + column;
    op_t* out = static_cast<op_t*>(a.out) + s.token(i) * a.ld_out + column;
    const float f = scale ? scale[i] : 1.f;
    const V factor = set1(f * rsqrt(f * f * sum_squares(o, V_) / static_cast<float>(V_) + a.norm_eps));
    const auto columns = [&](auto count, int c) {
      constexpr int kN = decltype(count)::value;
      V open[kN];
      for (int p = 0; p < kN; ++p) {
        if (more) prefetch_line(gate + static_cast<size_t>(kPageTokens) * a.ld_gate + c + 16 * p, c + 16 * p);
        open[p] = load_n(gate + c + 16 * p, V_ - c - 16 * p);
      }
      sigmoid_graded<kGrade>(open);
      for (int p = 0; p < kN; ++p) {
        const int at = c + 16 * p, left = V_ - at;
        store_n(out + at, load_n(o + at, left) * factor * load_n(a.norm + at, left) * open[p], left);
      }
    };
    int c = 0;
    for (; c + 64 <= V_; c += 64) columns(Count<4>{}, c);
    for (; c < V_; c += 16) columns(Count<1>{}, c);
    if (s.head == a.heads - 1) clear(out, V_, V_ + round_up(a.heads * V_, kStep) - a.heads * V_);
  }
}

// New tail of one head's channels: the last taps - 1 rows of (old tail, span).
static inline void kda_tail(const KdaArgs& a, const Span& span, float* tail, int source, int channel, int dim) {
  const int keep = a.taps - 1;
  for (int r = 0; r < keep; ++r) {
    const int row = span.length - keep + r;  // local row of the span that ends up in tail row r
    const float* before = tail + static_cast<size_t>(keep + row) * a.conv_stride + channel;
    const op_t* in = static_cast<const op_t*>(a.qkv) + static_cast<size_t>(span.begin + row) * a.ld_qkv + source;
    float* to = tail + static_cast<size_t>(r) * a.conv_stride + channel;
    for (int c = 0; c < dim; c += 16)
      store_n(to + c, row >= 0 ? load_n(in + c, dim - c) : load_n(before + c, dim - c), dim - c);
  }
}
