// KDA: short convolution, gate, L2 norm, recurrence, gated norm, for prefill and decode alike.
//
// Chunks are cut at absolute positions, multiples of 16 in the exact form and of 64 on tiles, so that a token's numbers
// do not depend on how its sequence was cut at multiples of 64. Decays enter as running products of alpha = exp(g) <= 1:
// exp(-cumsum g) overflows for real gates (kda.md 2.2), a product of alphas only underflows, which is right.

// A piece of a chunk of 64 that goes to the tiles: below half a chunk the exact form is faster.
static inline bool kda_on_tiles([[maybe_unused]] const KdaArgs& a, [[maybe_unused]] int n) {
#ifdef WEFT_TILES
  return n > kPageTokens / 2 && a.key_dim % kStep == 0 && (a.key_dim & (a.key_dim - 1)) == 0;
#else
  return false;
#endif
}

// One token: the state is read from memory once, by the two products, and updated while it is in L2. Meanwhile the start
// of the next head's state is on its way; all of it would fill the line buffers that the update needs.
static inline void kda_one(const KdaExactRoom& w, const KdaSource& s, float* state, const float* next) {
  const KdaArgs& a = s.a;
  const KdaRows& r = w.rows;
  const int K = a.key_dim, stride = a.v_stride;
  constexpr int kAhead = 2;  // lines per row of the state
  kda_inputs(r, s);
  V along = zero();
  float *k_in = w.in, *q_in = w.in + r.ld, *o = w.o;
  for (int c = 0; c < K; c += 16) {
    const int left = K - c;
    const V q = load_n(r.q + c, left), k = load_n(r.k + c, left), alpha = load_n(r.alpha + c, left);
    along = fma(q, k, along);
    store(k_in + c, k * alpha);
    store(q_in + c, q * alpha);
  }
  const V attend = set1(hsum(along)), beta = set1(r.beta[0]);
  const auto columns = [&](auto panels, int column) {
    constexpr int kN = decltype(panels)::value;
    V u[kN], y[kN];
    for (int p = 0; p < kN; ++p) u[p] = y[p] = zero();
    float* at = state + column;
    for (int d = 0; d < K; ++d, at += stride) {
      const V k = set1(k_in[d]), q = set1(q_in[d]);
      for (int p = 0; p < kN; ++p) {
        const V x = load(at + kPanel * p);
        u[p] = fma(k, x, u[p]);
        y[p] = fma(q, x, y[p]);
      }
    }
    for (int p = 0; p < kN; ++p) {
      const int c = column + kPanel * p;
      u[p] = beta * (load_n(r.v + c, a.value_dim - c) - u[p]);
      store(o + c, fma(attend, u[p], y[p]));
    }
    at = state + column;
    for (int d = 0; d < K; ++d, at += stride) {
      const V k = set1(r.k[d]), alpha = set1(r.alpha[d]);
      if (next && column == 0)
        for (int i = 0; i < kAhead; ++i) __builtin_prefetch(next + static_cast<size_t>(d * kAhead + i) * kPanel, 0, 2);
      for (int p = 0; p < kN; ++p) store(at + kPanel * p, fma(k, u[p], alpha * load(at + kPanel * p)));
    }
  };
  int column = 0;
  for (; column + kWidePanels * kPanel <= stride; column += kWidePanels * kPanel)
    columns(Count<kWidePanels>{}, column);
  for (; column < stride; column += kPanel) columns(Count<1>{}, column);
  kda_outputs(s, o, r.ld);
}

// Task: (span, head).
static void kda(const KdaArgs& a, const Call& call) {
  Scratch scratch{call.scratch};
  const KdaExactRoom exact(scratch, a);
#ifdef WEFT_TILES
  const KdaTileRoom tiles(scratch, a);
#endif
  const Slice part = slice(call.step->spans * a.heads, call);
  const auto state_of = [&](int task) {
    std::byte* slot = a.state + static_cast<size_t>(call.step->span[task / a.heads].state_slot) * call.step->state_stride;
    return reinterpret_cast<float*>(slot) + static_cast<size_t>(task % a.heads) * a.key_dim * a.v_stride;
  };
  for (int task = part.first; task < part.last; ++task) {
    const Span& span = call.step->span[task / a.heads];
    const int head = task % a.heads;
    float* state = state_of(task);
    float* tail = reinterpret_cast<float*>(
        a.state + static_cast<size_t>(span.state_slot) * call.step->state_stride + a.tail_offset);
    [[maybe_unused]] bool on_tiles = false;  // the chunk before
    for (int first = 0; first < span.length;) {
      const int position = span.position + first, left = span.length - first;
      int n = min_int(kPageTokens - position % kPageTokens, left);
      if (kda_on_tiles(a, n)) {
#ifdef WEFT_TILES
        kda_tiles(tiles, {a, span, tail, head, first, n}, state, on_tiles);
        on_tiles = true;
#endif
      } else if (n = min_int(kKdaChunk - position % kKdaChunk, left); n > 1) {
        on_tiles = false;
        kda_exact(exact, {a, span, tail, head, first, n}, state);
      } else {
        on_tiles = false;
        const bool more = span.length == 1 && task + 1 < part.last;
        kda_one(exact, {a, span, tail, head, first, 1}, state, more ? state_of(task + 1) : nullptr);
      }
      first += n;
    }
    const int q0 = head * a.key_dim, v0 = head * a.value_dim;
    kda_tail(a, span, tail, q0, q0, a.key_dim);
    kda_tail(a, span, tail, a.k_offset + q0, a.heads * a.key_dim + q0, a.key_dim);
    kda_tail(a, span, tail, a.v_offset + v0, 2 * a.heads * a.key_dim + v0, a.value_dim);
  }
}
