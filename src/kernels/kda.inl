// KDA: short convolution, gate, L2 norm, chunked recurrence, gated norm, for prefill and decode alike.
//
// Chunks of up to 16 tokens cut at absolute multiples of 16, so that a token's numbers do not depend on how its
// sequence was cut at multiples of 16; a chunk of one token is the decode step. Everything is f32. Decays enter as
// running products of alpha = exp(g) <= 1 towards the start or the end of the chunk: exp(-cumsum g) overflows for
// real gates (kda.md 2.2), a product of alphas only underflows, which is right. The chunk is solved by forward
// substitution: a doubling inverse loses everything with correlated keys (kda.md 2.4).

struct KdaRoom {
  static constexpr int kC = kKdaChunk, kD = kMaxHeadDim;
  float *q, *k, *v;          // [16][kD] after conv, SiLU and L2
  float *alpha;              // [16][kD]
  float *q_in, *k_in;        // decayed from the chunk's start, inclusive
  float *k_out;              // [kD][16] decayed to the chunk's end, transposed
  float *u, *o;              // [16][kD] corrections e, outputs
  float *attend, *lower;     // [16][16] A_qk and L
  float *last;               // [kD] decay of the whole chunk
  explicit KdaRoom(Scratch& s) {
    float** const all[] = {&q, &k, &v, &alpha, &q_in, &k_in, &k_out, &u, &o};
    for (float** p : all) *p = s.take<float>(kC * kD);
    attend = s.take<float>(kC * kC);
    lower = s.take<float>(kC * kC);
    last = s.take<float>(kD);
  }
};

// silu(conv) of `dim` channels of one token; rows before the span come from the tail.
static inline void conv_row(float* out, const KdaArgs& a, const Span& span, const float* tail, int row, int source,
                            int channel, int dim) {
  for (int c = 0; c < dim; c += 16) {
    const int left = dim - c;
    V sum = zero();
    for (int tap = 0; tap < a.taps; ++tap) {
      const int r = row + tap - (a.taps - 1);  // local row of the span, negative: in the tail
      const float* x = r >= 0 ? a.qkv + static_cast<size_t>(span.begin + r) * a.ld_qkv + source + c
                              : tail + static_cast<size_t>(a.taps - 1 + r) * a.conv_stride + channel + c;
      sum = fma(load_n(a.conv + static_cast<size_t>(tap) * a.conv_stride + channel + c, left), load_n(x, left), sum);
    }
    store_n(out + c, silu(sum), left);
  }
}

static inline void l2_normalise(float* x, int dim, float scale) {
  const V factor = set1(rsqrt(sum_squares(x, dim) + 1e-6f) * scale);
  for (int c = 0; c < dim; c += 16) store_n(x + c, load_n(x + c, dim - c) * factor, dim - c);
}

static inline void decay_row(float* alpha, const KdaArgs& a, int token, int head) {
  const float* f = a.decay + static_cast<size_t>(token) * a.ld_decay + static_cast<size_t>(head) * a.key_dim;
  const float* bias = a.bias + static_cast<size_t>(head) * a.key_dim;
  const V slope = set1(a.slope[head]);
  for (int c = 0; c < a.key_dim; c += 16) {
    const int left = a.key_dim - c;
    const V x = load_n(f + c, left) + load_n(bias + c, left);
    const V g = a.bounded ? set1(a.lower_bound) * sigmoid(slope * x) : negate(slope * softplus(x));
    store_n(alpha + c, exp(g), left);
  }
}

// The part of a chunk that does not touch the state: inputs, decays, A_qk and L.
static inline void kda_prepare(const KdaRoom& w, const KdaArgs& a, const Span& span, const float* tail, int first,
                               int n, int head, float* beta) {
  constexpr int kD = KdaRoom::kD, kC = KdaRoom::kC;
  const int K = a.key_dim, q0 = head * K, v0 = head * a.value_dim;
  const float scale = rsqrt(static_cast<float>(K));
  for (int i = 0; i < n; ++i) {
    const int row = first + i, token = span.begin + row;
    conv_row(w.q + i * kD, a, span, tail, row, q0, q0, K);
    conv_row(w.k + i * kD, a, span, tail, row, a.k_offset + q0, a.heads * K + q0, K);
    conv_row(w.v + i * kD, a, span, tail, row, a.v_offset + v0, 2 * a.heads * K + v0, a.value_dim);
    l2_normalise(w.q + i * kD, K, scale);
    l2_normalise(w.k + i * kD, K, 1.f);
    decay_row(w.alpha + i * kD, a, token, head);
    const float b = a.beta[static_cast<size_t>(token) * a.ld_beta + head];
    float lanes[16];
    store(lanes, sigmoid(set1(b)));
    beta[i] = lanes[0];
  }
  for (int c = 0; c < K; c += 16) {
    const int left = K - c;
    V in = set1(1.f), out = set1(1.f);
    for (int i = 0; i < n; ++i) {
      in = in * load_n(w.alpha + i * kD + c, left);
      store_n(w.k_in + i * kD + c, load_n(w.k + i * kD + c, left) * in, left);
      store_n(w.q_in + i * kD + c, load_n(w.q + i * kD + c, left) * in, left);
    }
    store_n(w.last + c, in, left);
    for (int i = n - 1; i >= 0; --i) {
      float lanes[16];
      store(lanes, load_n(w.k + i * kD + c, left) * out);
      for (int d = 0; d < min_int(16, left); ++d) w.k_out[(c + d) * kC + i] = lanes[d];
      out = out * load_n(w.alpha + i * kD + c, left);
    }
  }
  constexpr int kBlocks = kD / 16;
  const int blocks = (K + 15) / 16;
  for (int j = 0; j < n; ++j) {
    V decayed[kBlocks];  // k_j decayed to row i
    for (int b = 0; b < blocks; ++b) decayed[b] = load_n(w.k + j * kD + 16 * b, K - 16 * b);
    for (int i = j; i < n; ++i) {
      V attend = zero(), lower = zero();
      for (int b = 0; b < blocks; ++b) {
        const int left = K - 16 * b;
        if (i > j) decayed[b] = decayed[b] * load_n(w.alpha + i * kD + 16 * b, left);
        attend = fma(load_n(w.q + i * kD + 16 * b, left), decayed[b], attend);
        lower = fma(load_n(w.k + i * kD + 16 * b, left), decayed[b], lower);
      }
      w.attend[i * kC + j] = hsum(attend);
      w.lower[i * kC + j] = beta[i] * hsum(lower);
    }
  }
}

// One block of up to 32 value columns of the state: corrections, outputs, update.
static inline void kda_columns(const KdaRoom& w, const KdaArgs& a, float* state, int n, int column, int panels,
                               const float* beta) {
  constexpr int kD = KdaRoom::kD, kC = KdaRoom::kC;
  float *u = w.u + column, *o = w.o + column, *s = state + column;
  mma(u, kD, w.k_in, kD, s, kPanel, a.v_stride, n, panels, a.key_dim, false);
  mma(o, kD, w.q_in, kD, s, kPanel, a.v_stride, n, panels, a.key_dim, false);
  for (int p = 0; p < panels; ++p) {
    const int c = kPanel * p, left = a.value_dim - column - c;
    for (int i = 0; i < n; ++i) {
      V e = set1(beta[i]) * (load_n(w.v + i * kD + column + c, left) - load(u + i * kD + c));
      V y = load(o + i * kD + c);
      for (int j = 0; j < i; ++j) {
        const V before = load(u + j * kD + c);
        e = e - set1(w.lower[i * kC + j]) * before;
        y = fma(set1(w.attend[i * kC + j]), before, y);
      }
      store(u + i * kD + c, e);
      store(o + i * kD + c, fma(set1(w.attend[i * kC + i]), e, y));
    }
  }
  for (int d = 0; d < a.key_dim; ++d)
    for (int p = 0; p < panels; ++p) {
      float* at = s + static_cast<size_t>(d) * a.v_stride + kPanel * p;
      store(at, load(at) * set1(w.last[d]));
    }
  mma(s, a.v_stride, w.k_out, kC, u, kPanel, kD, a.key_dim, panels, n, true);
}

static inline void kda_finish(const KdaRoom& w, const KdaArgs& a, int token, int i, int head) {
  const int V_ = a.value_dim;
  const float* o = w.o + i * KdaRoom::kD;
  const float* gate = a.gate + static_cast<size_t>(token) * a.ld_gate + static_cast<size_t>(head) * V_;
  op_t* out = static_cast<op_t*>(a.out) + static_cast<size_t>(token) * a.ld_out + static_cast<size_t>(head) * V_;
  const V factor = set1(rsqrt(sum_squares(o, V_) / static_cast<float>(V_) + a.norm_eps));
  for (int c = 0; c < V_; c += 16) {
    const int left = V_ - c;
    store_n(out + c, load_n(o + c, left) * factor * load_n(a.norm + c, left) * sigmoid(load_n(gate + c, left)), left);
  }
  if (head == a.heads - 1) clear(out, V_, V_ + round_up(a.heads * V_, kStep) - a.heads * V_);
}

// New tail of one head's channels: the last taps - 1 rows of (old tail, span).
static inline void kda_tail(const KdaArgs& a, const Span& span, float* tail, int source, int channel, int dim) {
  const int keep = a.taps - 1;
  for (int r = 0; r < keep; ++r) {
    const int row = span.length - keep + r;  // local row of the span that ends up in tail row r
    const float* from = row >= 0 ? a.qkv + static_cast<size_t>(span.begin + row) * a.ld_qkv + source
                                 : tail + static_cast<size_t>(keep + row) * a.conv_stride + channel;
    float* to = tail + static_cast<size_t>(r) * a.conv_stride + channel;
    for (int c = 0; c < dim; c += 16) store_n(to + c, load_n(from + c, dim - c), dim - c);
  }
}

// Task: (span, head).
static void kda(const KdaArgs& a, const Call& call) {
  Scratch scratch{call.scratch};
  const KdaRoom w(scratch);
  const Slice part = slice(call.step->spans * a.heads, call);
  float beta[kKdaChunk];
  for (int task = part.first; task < part.last; ++task) {
    const Span& span = call.step->span[task / a.heads];
    const int head = task % a.heads;
    std::byte* slot = a.state + static_cast<size_t>(span.state_slot) * call.step->state_stride;
    float* state = reinterpret_cast<float*>(slot) + static_cast<size_t>(head) * a.key_dim * a.v_stride;
    float* tail = reinterpret_cast<float*>(slot + a.tail_offset);
    for (int first = 0; first < span.length;) {
      const int n = min_int(kKdaChunk - (span.position + first) % kKdaChunk, span.length - first);
      kda_prepare(w, a, span, tail, first, n, head, beta);
      for (int column = 0; column < a.value_dim; column += 2 * kPanel)
        kda_columns(w, a, state, n, column, min_int(2, (a.v_stride - column) / kPanel), beta);
      for (int i = 0; i < n; ++i) kda_finish(w, a, span.begin + first + i, i, head);
      first += n;
    }
    const int q0 = head * a.key_dim, v0 = head * a.value_dim;
    kda_tail(a, span, tail, q0, q0, a.key_dim);
    kda_tail(a, span, tail, a.k_offset + q0, a.heads * a.key_dim + q0, a.key_dim);
    kda_tail(a, span, tail, a.v_offset + v0, 2 * a.heads * a.key_dim + v0, a.value_dim);
  }
}
