// KDA on tiles, before and behind the recurrence.
//
// Keys, queries and decays take a line of 32 channels at a time, even and odd ones apart: a shift and a mask
// widen them, where neighbours would take the one shuffle port. Rows so hold 16 even channels, then 16 odd
// ones.
#ifdef WEFT_TILES

// f(place of the half, reader of its 16 of 32 values)
template <class F>
static inline void each_half(const F& f) {
  f(0, [](const auto* p) { return even(p); });
  f(16, [](const auto* p) { return odd(p); });
}

// out [n][32]: convolution and SiLU of 32 channels from `channel` on
static inline void kda_conv_line(float* out, int ld, const KdaSource& s, int source, int channel) {
  with_taps(s.a.taps, [&](auto taps) {
    constexpr int kTaps = decltype(taps)::value, kBefore = kTaps - 1;
    const KdaArgs& a = s.a;
    const op_t* in = static_cast<const op_t*>(a.qkv) + s.token(0) * a.ld_qkv + source;
    each_half([&](int half, auto lane) {
      V w[kTaps], x[kBefore + 4];
      for (int tap = 0; tap < kTaps; ++tap)
        w[tap] = lane(a.conv + static_cast<size_t>(tap) * a.conv_stride + channel);
      for (int tap = 0; tap < kBefore; ++tap) {
        const int row = s.first + tap - kBefore;  // of the span; negative: in the tail
        x[tap] = row >= 0 ? lane(in - (kBefore - tap) * static_cast<size_t>(a.ld_qkv))
                          : lane(s.tail + static_cast<size_t>(row + kBefore) * a.conv_stride + channel);
      }
      conv_tokens<kTaps>(out + half, ld, s, in, w, x, half == 0 && s.more(), lane,
                         [](auto& open) { sigmoid_lookup(open); });
    });
  });
}

// out [n][dim]: the same in the channels' own order
static inline void kda_conv_values(float* out, int ld, const KdaSource& s, int source, int channel, int dim) {
  with_taps(s.a.taps, [&](auto taps) {
    conv_columns<decltype(taps)::value>(out, ld, s, source, channel, dim, [](auto& x) { sigmoid_lookup(x); });
  });
}

// alpha [n][32] of key channels from `from` on of the head. A coarse gate moves the log-decay of any stretch
// of tokens by 2^-12 of itself, so the state by 2^-12 / e; an error of exp would add up over thousands of
// slow steps.
static inline void kda_decay_line(float* alpha, int ld, const KdaSource& s, int from) {
  constexpr float kLog2e = 1.44269504f;
  const KdaArgs& a = s.a;
  const size_t channel = static_cast<size_t>(s.head) * a.key_dim + from, step = a.ld_decay;
  const bool bounded = a.bounded;
  const V slope = set1(a.slope[s.head]), steep = set1(-kLog2e * a.slope[s.head]),
          lowest = set1(kLog2e * a.lower_bound);
  each_half([&](int half, auto lane) {
    const V bias = lane(a.bias + channel), start = steep * bias;
    const op_t* in = static_cast<const op_t*>(a.decay) + s.token(0) * step + channel;
    float* out = alpha + half;
    const bool fetch = half == 0 && s.more();
    const auto tokens = [&](auto count) {
      constexpr int kN = decltype(count)::value;
      V g[kN];
      for (int t = 0; t < kN; ++t) {
        if (fetch) __builtin_prefetch(in + (t + kPageTokens) * step, 0, 2);
        g[t] = lane(in + t * step);
      }
      if (bounded) {
        for (int t = 0; t < kN; ++t) g[t] = fma(steep, g[t], start);
        sigmoid_base2(g);
        for (int t = 0; t < kN; ++t) g[t] = lowest * g[t];
        exp2_near_1(g);
      } else {
        for (int t = 0; t < kN; ++t) g[t] = g[t] + bias;
        kda_alphas(g, false, slope, lowest);
      }
      for (int t = 0; t < kN; ++t) store(out + t * ld, g[t]);
      in += kN * step, out += kN * ld;
    };
    int i = 0;
    for (; i + 4 <= s.n; i += 4) tokens(Count<4>{});
    for (; i < s.n; ++i) tokens(Count<1>{});
  });
}

// out = norm(scale o) * sigmoid(gate), o [64][ld], scale [64]; room: [64][16]
static inline void kda_tile_outputs(const KdaSource& s, const float* o, int ld, const float* scale,
                                    float* room) {
  const KdaArgs& a = s.a;
  const int V_ = a.value_dim;
  const size_t column = static_cast<size_t>(s.head) * V_;
  alignas(64) float factor[kPageTokens];
  for (int i = 0; i < s.n; ++i) {
    const float* x = o + static_cast<size_t>(i) * ld;
    V even_sum = zero(), odd_sum = zero();
    int c = 0;
    for (; c + 32 <= V_; c += 32) {
      even_sum = fma(load(x + c), load(x + c), even_sum);
      odd_sum = fma(load(x + c + 16), load(x + c + 16), odd_sum);
    }
    for (; c < V_; c += 16) {
      const V last = load_n(x + c, V_ - c);
      even_sum = fma(last, last, even_sum);
    }
    store(room + i * 16, even_sum + odd_sum);
  }
  const V mean = set1(1 / static_cast<float>(V_)), eps = set1(a.norm_eps);
  for (int i = 0; i < s.n; i += 16) {
    sums16(factor + i, room + i * 16);
    const V f = load(scale + i);
    store(factor + i, f * rsqrt(fma(f * f * load(factor + i), mean, eps)));
  }
  const bool more = s.more();
  const auto columns = [&](auto count, int c,
                           auto left) {  // 16 * kN columns down the tokens, four V at a time
    constexpr int kN = decltype(count)::value, kRows = 4 / kN;
    V norm[kN];
    for (int p = 0; p < kN; ++p) norm[p] = load_n(a.norm + c + 16 * p, left);
    const op_t* gate = static_cast<const op_t*>(a.gate) + s.token(0) * a.ld_gate + column + c;
    op_t* out = static_cast<op_t*>(a.out) + s.token(0) * a.ld_out + column + c;
    const float* x = o + c;
    const auto rows = [&](auto number, int i) {
      constexpr int kM = decltype(number)::value;
      V open[kM * kN];
      for (int r = 0; r < kM; ++r) {
        if (more) __builtin_prefetch(gate + static_cast<size_t>(r + kPageTokens) * a.ld_gate, 0, 2);
        for (int p = 0; p < kN; ++p)
          open[r * kN + p] = load_n(gate + static_cast<size_t>(r) * a.ld_gate + 16 * p, left);
      }
      sigmoid_lookup(open);
      for (int r = 0; r < kM; ++r) {
        const V f = set1(factor[i + r]);
        for (int p = 0; p < kN; ++p)
          open[r * kN + p] = load_n(x + r * ld + 16 * p, left) * f * (norm[p] * open[r * kN + p]);
        op_t* to = out + static_cast<size_t>(r) * a.ld_out;
        if constexpr (kN == 2)
          store(to, open[2 * r], open[2 * r + 1]);
        else
          store_n(to, open[r], left);
      }
      gate += static_cast<size_t>(kM) * a.ld_gate, out += static_cast<size_t>(kM) * a.ld_out, x += kM * ld;
    };
    int i = 0;
    for (; i + kRows <= s.n; i += kRows) rows(Count<kRows>{}, i);
    for (; i < s.n; ++i) rows(Count<1>{}, i);
  };
  int c = 0;
  for (; c + 32 <= V_; c += 32) columns(Count<2>{}, c, Full{});
  for (; c < V_; c += 16) columns(Count<1>{}, c, V_ - c);
  kda_padding(s);
}

#endif
