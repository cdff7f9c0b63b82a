// Elementary functions on V, about 1 ulp of f32 where the comment says nothing else.

static inline V negate(V x) { return zero() - x; }

// N values at once, step by step: one chain of 20 dependent operations alone leaves the machine idle.
template <int N>
WEFT_INLINE void exp_each(V (&x)[N]) {
  // Cody-Waite: e^x = 2^n e^r, |r| <= ln2/2; the minimax polynomial of degree 6 leaves 2e-9.
  V n[N], p[N];
  for (int i = 0; i < N; ++i) x[i] = min(set1(88.7228f), max(set1(-103.9f), x[i]));
  for (int i = 0; i < N; ++i) n[i] = round(x[i] * set1(1.44269504088896341f));
  for (int i = 0; i < N; ++i) x[i] = fma(n[i], set1(-0.693359375f), x[i]);
  for (int i = 0; i < N; ++i) x[i] = fma(n[i], set1(2.12194440e-4f), x[i]);
  for (int i = 0; i < N; ++i) p[i] = fma(set1(1.383684459e-3f), x[i], set1(8.374817669e-3f));
  constexpr float kRest[] = {4.1668225080e-2f, 0.1666641980f, 0.4999999106f, 1.f, 1.f};
  for (const float c : kRest)
    for (int i = 0; i < N; ++i) p[i] = fma(p[i], x[i], set1(c));
  for (int i = 0; i < N; ++i) x[i] = scale2(p[i], n[i]);
}
// 2^x for x <= 8, at least 2^-126; the series leaves 2e-7.
static inline V exp2(V x) {
  const V y = max(set1(-126.f), x), n = round(y), r = y - n;
  V p = set1(1.54035304e-4f);
  constexpr float kSeries[] = {1.33335581e-3f, 9.61812911e-3f, 5.55041087e-2f, 2.40226507e-1f, 6.93147181e-1f, 1.f};
  for (const float c : kSeries) p = fma(p, r, set1(c));
  return scale2(p, n);
}
template <int N>
WEFT_INLINE void sigmoid_each(V (&x)[N]) {
  for (int i = 0; i < N; ++i) x[i] = negate(x[i]);
  exp_each(x);
  for (int i = 0; i < N; ++i) x[i] = reciprocal(set1(1.f) + x[i]);
}
WEFT_INLINE V exp(V x) {
  V one[] = {x};
  exp_each(one);
  return one[0];
}
WEFT_INLINE V sigmoid(V x) {
  V one[] = {x};
  sigmoid_each(one);
  return one[0];
}
static inline V silu(V x) { return x * sigmoid(x); }

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|); log1p(y) = 2 atanh(y / (2 + y)), the series to s^15 leaves 4e-10.
WEFT_INLINE V softplus(V x) {
  const V y = exp(negate(max(negate(x), x)));
  const V s = y * reciprocal(set1(2.f) + y), s2 = s * s;
  V p = set1(1.f / 15);
  constexpr float kSeries[] = {1.f / 13, 1.f / 11, 1.f / 9, 1.f / 7, 1.f / 5, 1.f / 3, 1.f};
  for (const float c : kSeries) p = fma(p, s2, set1(c));
  return max(zero(), x) + (s + s) * p;
}

static inline V tanh(V x) {
  // 1 - 2/(e^2x + 1) cancels near 0: there the odd minimax polynomial of the Cephes library.
  const V x2 = x * x;
  V p = set1(-5.70498872745e-3f);
  p = fma(p, x2, set1(2.06390887954e-2f));
  p = fma(p, x2, set1(-5.37397155531e-2f));
  p = fma(p, x2, set1(1.33314422036e-1f));
  p = fma(p, x2, set1(-3.33332819422e-1f));
  const V small = fma(p * x2, x, x);
  const V large = set1(1.f) - set1(2.f) / (exp(x + x) + set1(1.f));
  return select(less(max(negate(x), x), set1(0.625f)), small, large);
}

static inline V activate(const ActParams& act, V gate, V up) {
  switch (act.kind) {
    case Act::swiglu: return silu(gate) * up;
    case Act::swiglu_clamped: {
      const V limit = set1(act.limit);
      return silu(min(limit, gate)) * min(limit, max(negate(limit), up));
    }
    case Act::situ: {
      const V beta = set1(act.beta), linear = set1(act.linear_beta);
      const V g = beta * tanh(gate / beta) * sigmoid(gate);
      return g * (act.linear_beta > 0 ? linear * tanh(up / linear) : up);
    }
  }
  return zero();
}
