// Elementary functions on V, about 1 ulp of f32 where the comment says nothing else.

static inline V negate(V x) { return zero() - x; }

static inline V exp(V x) {
  // Cody-Waite: e^x = 2^n e^r, |r| <= ln2/2; degree 7 leaves 5e-9.
  const V lowest = set1(-103.9f), highest = set1(88.7228f);
  const V y = min(highest, max(lowest, x));
  const V n = round(y * set1(1.44269504088896341f));
  V r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  V p = set1(1.f / 5040);
  p = fma(p, r, set1(1.f / 720));
  p = fma(p, r, set1(1.f / 120));
  p = fma(p, r, set1(1.f / 24));
  p = fma(p, r, set1(1.f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.f));
  p = fma(p, r, set1(1.f));
  return scale2(p, n);
}
static inline V sigmoid(V x) { return set1(1.f) / (set1(1.f) + exp(negate(x))); }
static inline V silu(V x) { return x / (set1(1.f) + exp(negate(x))); }

// log(1 + e^x) = max(x, 0) + log1p(e^-|x|); log1p(y) = 2 atanh(y / (2 + y)), the series to s^15 leaves 4e-10.
static inline V softplus(V x) {
  const V y = exp(negate(max(negate(x), x)));
  const V s = y / (set1(2.f) + y), s2 = s * s;
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
