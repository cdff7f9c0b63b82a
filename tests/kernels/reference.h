// Double-precision forms of every kernel, written from the models' definitions (docs name the papers), token
// by token and element by element, each with the error a correct single-precision form may have.
//
// Error bounds follow from the formula: u = 2^-24 is half an ulp of f32 (one rounding), a sum of k products
// in any order errs by at most (k + 2) u sum |a b|, rounding to bf16 by 2^-8 relative. kElementary covers
// exp, sigmoid, tanh and relatives ("about 1 ulp", composed of a division and an addition).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/kernels.h"

namespace weft::reference {

inline constexpr double kU = 0x1p-24;
inline constexpr double kBf16 = 0x1p-8;  // 8 significant bits: half an ulp just above a power of two
inline constexpr double kElementary = 8 * kU;
inline constexpr double kTiny = 1e-35;  // results below are flushed

using Vec = std::vector<double>;

// A value and how far a correct f32 computation of it may be off.
struct Bounded {
  double value = 0, error = 0;
};
struct BoundedVec {
  Vec value, error;
  explicit BoundedVec(size_t n = 0) : value(n), error(n) {}
  void put(size_t i, const Bounded& x) { value[i] = x.value, error[i] = x.error; }
  void push(const Bounded& x) { value.push_back(x.value), error.push_back(x.error); }
  Bounded operator[](size_t i) const { return {value[i], error[i]}; }
  size_t size() const { return value.size(); }
};

inline Bounded stored(const Bounded& x, bool bf16) {
  return {x.value, x.error + (bf16 ? kBf16 * (std::abs(x.value) + x.error) : 0) + kTiny};
}

inline double sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}
inline double silu(double x) {
  return x * sigmoid(x);
}
inline double softplus(double x) {
  return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x));
}

// sum_i a_i b_i
template <class A, class B>
inline Bounded dot(const A& a, const B& b, int n) {
  double sum = 0, size = 0;
  for (int i = 0; i < n; ++i) {
    const double term = static_cast<double>(a(i)) * static_cast<double>(b(i));
    sum += term, size += std::abs(term);
  }
  return {sum, (n + 2) * kU * size};
}

// Gated activations (kimi.md 5.1, glm5_next.md 3.4). Slopes: |silu'| <= 1.1, |(b tanh(g/b) sigmoid(g))'| <= 1
// + min(b, |g|)/4.
inline Bounded activate(const ActParams& act, const Bounded& g, const Bounded& u) {
  double gate = 0, up = u.value, slope = 1.1;
  switch (act.kind) {
    case Act::swiglu:
      gate = silu(g.value);
      break;
    case Act::swiglu_clamped:
      gate = silu(std::min<double>(g.value, act.limit));
      up = std::clamp<double>(u.value, -act.limit, act.limit);
      break;
    case Act::situ:
      gate = act.beta * std::tanh(g.value / act.beta) * sigmoid(g.value);
      if (act.linear_beta > 0) up = act.linear_beta * std::tanh(u.value / act.linear_beta);
      slope = 1 + std::min<double>(act.beta, std::abs(g.value)) / 4;
      break;
  }
  return {gate * up, slope * g.error * (std::abs(up) + u.error) + std::abs(gate) * u.error +
                         3 * kElementary * std::abs(gate * up)};
}

// x w / sqrt(mean(x^2) + eps)
inline BoundedVec rms_norm(const BoundedVec& x, const Vec& weight, double eps) {
  const int n = static_cast<int>(x.size());
  double squares = 0, spread = 0;
  for (int i = 0; i < n; ++i) squares += x.value[i] * x.value[i], spread += std::abs(x.value[i]) * x.error[i];
  const double mean = squares / n + eps, f = 1 / std::sqrt(mean);
  // d f = f^3 mean(x dx); the sum of squares itself and the division and root round
  const double f_error = f * f * f * spread / n + f * ((n + 2) * kU / 2 + 4 * kU);
  BoundedVec y(n);
  for (int i = 0; i < n; ++i) {
    const double w = weight[i];
    y.value[i] = x.value[i] * f * w;
    y.error[i] =
        std::abs(w) * (f * x.error[i] + std::abs(x.value[i]) * f_error) + 3 * kU * std::abs(y.value[i]);
  }
  return y;
}
inline BoundedVec exact(const Vec& x) {
  BoundedVec y(x.size());
  y.value = x;
  return y;
}

// Mean and biased variance (dsa.md 2.1)
inline BoundedVec layer_norm(const Vec& x, const Vec& weight, const Vec& bias, double eps) {
  const int n = static_cast<int>(x.size());
  double mean = 0, size = 0, variance = 0, spread = 0;
  for (const double v : x) mean += v / n, size += std::abs(v) / n;
  const double mean_error = (n + 2) * kU * size;
  for (const double v : x) {
    variance += (v - mean) * (v - mean) / n;
    spread += std::abs(v - mean) * (mean_error + kU * std::abs(v - mean)) / n;
  }
  const double f = 1 / std::sqrt(variance + eps),
               f_error = f * f * f * spread + f * ((n + 2) * kU / 2 + 4 * kU);
  BoundedVec y(n);
  for (int i = 0; i < n; ++i) {
    const double d = x[i] - mean;
    y.value[i] = d * f * weight[i] + bias[i];
    y.error[i] = std::abs(weight[i]) * (f * (mean_error + kU * std::abs(d)) + std::abs(d) * f_error +
                                        2 * kU * std::abs(d) * f) +
                 kU * std::abs(y.value[i]) + kU * std::abs(bias[i]);
  }
  return y;
}

// Rotates the first `dims` values by position * inv_freq (dsa.md 2.2).
inline void rotate(BoundedVec& x, int first, int dims, double position, const Vec& inv_freq, double scale,
                   RopeMode mode) {
  if (mode == RopeMode::none) return;
  for (int j = 0; j < dims / 2; ++j) {
    const int a = first + (mode == RopeMode::interleaved ? 2 * j : j);
    const int b = first + (mode == RopeMode::interleaved ? 2 * j + 1 : j + dims / 2);
    const double c = std::cos(position * inv_freq[j]) * scale, s = std::sin(position * inv_freq[j]) * scale;
    const Bounded p = x[a], q = x[b];
    const double size = std::abs(p.value) + std::abs(q.value), error = (p.error + q.error) * std::abs(scale);
    x.put(a, {p.value * c - q.value * s, error + 5 * kU * size * std::abs(scale)});
    x.put(b, {p.value * s + q.value * c, error + 5 * kU * size * std::abs(scale)});
  }
}

// softmax of scores, given how far each score may be off: relative error of every weight.
inline BoundedVec softmax(const BoundedVec& score) {
  const size_t n = score.size();
  BoundedVec p(n);
  double top = -INFINITY, sum = 0, off = 0;
  for (size_t i = 0; i < n; ++i) top = std::max(top, score.value[i]), off = std::max(off, score.error[i]);
  for (size_t i = 0; i < n; ++i) sum += p.value[i] = std::exp(score.value[i] - top);
  for (size_t i = 0; i < n; ++i) {
    p.value[i] /= sum;
    // the difference to the top rounds too: relative kU of it
    const double distance = (top - score.value[i]) * kU * 2;
    p.error[i] =
        p.value[i] * (2 * off + distance + (static_cast<double>(n) + 2) * kU + 2 * kElementary) + kTiny;
  }
  return p;
}

// sum_s p_s x_s per channel
template <class X>
inline Bounded weighted(const BoundedVec& p, const X& x) {
  double sum = 0, error = 0;
  const auto n = static_cast<double>(p.size());
  for (size_t s = 0; s < p.size(); ++s) {
    const double v = x(s);
    sum += p.value[s] * v;
    error += std::abs(v) * (p.error[s] + (n + 2) * kU * p.value[s]);
  }
  return {sum, error};
}

// ---- KDA (kda.md 1.2, 1.3) ----

struct KdaShape {
  int heads, key_dim, value_dim, taps;
  bool bounded;
  double lower_bound, norm_eps;
  bool tiles = false;  // chunks of 64 in bf16, where the kernel takes them (kernels/kda.inl)
};
// On tiles, where bf16 follows: sigmoid off by a share of itself (gates), or from a table of parabolas.
inline constexpr double kCoarse = 0x1p-12, kLookup = 2.8e-4;
// One sequence from its start: rows q|k|v [T][heads (2K + V)], decay [T][heads K], beta [T][heads], gate
// [T][heads V].
struct KdaInput {
  Vec qkv, decay, beta, gate;
  Vec conv;  // [taps][channels]
  Vec slope, bias, norm;
  Vec state;  // [heads][K][V]
  Vec tail;   // [taps - 1][channels]
};
struct KdaOutput {
  BoundedVec y;      // [T][heads V]
  BoundedVec state;  // [heads][K][V]
};

// The forget gate, g <= 0, and how far it may be off.
inline Bounded kda_gate(const KdaShape& s, double slope, double x, bool coarse = false) {
  if (s.bounded) {
    const double chance = sigmoid(slope * x);
    return {s.lower_bound * chance,
            std::abs(s.lower_bound) *
                (chance * (1 - chance) * std::min(slope * std::abs(x), 1e6) * 3 * kU + (coarse ? kCoarse : kElementary) * chance)};
  }
  const double g = -slope * softplus(x);
  return {g, std::abs(g) * kElementary + slope * sigmoid(x) * std::abs(x) * kU};
}

// `ends`: where a chunk may have ended besides the multiples of kKdaChunk; only the error bound looks at
// them.
//
// On tiles every operand of a product is rounded to bf16: decayed keys and queries, the state, scores, the inverse, the
// residual and the corrections; |sum a b| <= |a| |b| turns their errors into factors of norms. SiLU and the output gate
// come from a table there.
//
// The bound is normwise per value column. I - beta k k^T and diag(alpha) have norm <= 1, so an error of the
// state does not grow from token to token; what one chunk adds is the residual of its triangular system times
// |(I + L)^-1|.
inline KdaOutput kda(const KdaShape& shape, const KdaInput& in, const std::vector<int>& ends) {
  const int H = shape.heads, K = shape.key_dim, V = shape.value_dim, channels = H * (2 * K + V);
  const int T = static_cast<int>(in.beta.size()) / H;
  KdaOutput out;
  out.y = BoundedVec(static_cast<size_t>(T) * H * V);
  out.state = BoundedVec(static_cast<size_t>(H) * K * V);
  struct Token {
    Vec q, k, v, v_error, alpha, e, o;
    double q_error, k_error, alpha_error, beta, q_norm;
  };
  bool wide = false;  // the chunk is on tiles
  const auto conv = [&](int t, int channel) {
    double sum = 0, size = 0;
    for (int tap = 0; tap < shape.taps; ++tap) {
      const int row = t - (shape.taps - 1) + tap;
      const double x = row >= 0 ? in.qkv[static_cast<size_t>(row) * channels + channel]
                                : in.tail[static_cast<size_t>(shape.taps - 1 + row) * channels + channel];
      const double term = in.conv[static_cast<size_t>(tap) * channels + channel] * x;
      sum += term, size += std::abs(term);
    }
    const double y = silu(sum);
    return Bounded{y, 1.1 * (shape.taps + 1) * kU * size + (wide ? kLookup * std::abs(sum) : kElementary * std::abs(y))};
  };
  const auto normalised = [&](Vec& x, int t, int channel, double scale, double& error) {
    double squares = 0, off = 0;
    for (int d = 0; d < K; ++d) {
      const Bounded y = conv(t, channel + d);
      x.push_back(y.value);
      squares += y.value * y.value, off += y.error * y.error;
    }
    const double f = scale / std::sqrt(squares + 1e-6);
    for (double& y : x) y *= f;
    error = 2 * f * std::sqrt(off) + f * std::sqrt(squares) * ((K + 2) * kU / 2 + 5 * kU);
    return f * std::sqrt(squares);
  };
  for (int h = 0; h < H; ++h) {
    Vec S(in.state.begin() + static_cast<size_t>(h) * K * V,
          in.state.begin() + static_cast<size_t>(h + 1) * K * V);
    Vec state_error(V, 0.0);
    for (int first = 0; first < T;) {
      int last = std::min(T, (first / kPageTokens + 1) * kPageTokens);
      for (const int end : ends)
        if (end > first) last = std::min(last, end);
      wide = shape.tiles && K % kStep == 0 && (K & (K - 1)) == 0 && last - first > kPageTokens / 2;
      if (!wide) last = std::min(last, (first / kKdaChunk + 1) * kKdaChunk);
      const int n = last - first;
      const double operand = wide ? kBf16 : 0;
      std::vector<Token> token(n);
      Vec column(V);  // norms of the state's columns at the chunk's start
      for (int v = 0; v < V; ++v) {
        for (int d = 0; d < K; ++d) column[v] += S[d * V + v] * S[d * V + v];
        column[v] = std::sqrt(column[v]);
      }
      for (int i = 0; i < n; ++i) {
        const int t = first + i;
        Token& x = token[i];
        x.q_norm = normalised(x.q, t, h * K, 1 / std::sqrt(static_cast<double>(K)), x.q_error);
        normalised(x.k, t, H * K + h * K, 1, x.k_error);
        for (int v = 0; v < V; ++v) {
          const Bounded y = conv(t, 2 * H * K + h * V + v);
          x.v.push_back(y.value), x.v_error.push_back(y.error);
        }
        x.alpha_error = 0;
        for (int d = 0; d < K; ++d) {
          const Bounded g = kda_gate(shape, in.slope[h],
                                     in.decay[(static_cast<size_t>(t) * H + h) * K + d] + in.bias[h * K + d], wide);
          const double alpha = std::exp(g.value);
          x.alpha.push_back(alpha);
          if (alpha > 0) x.alpha_error = std::max(x.alpha_error, alpha * (g.error + kElementary));
        }
        x.beta = sigmoid(in.beta[static_cast<size_t>(t) * H + h]);
        x.e.resize(V), x.o.resize(V);
        for (int v = 0; v < V; ++v) {
          double read = 0;
          for (int d = 0; d < K; ++d) read += (S[d * V + v] *= x.alpha[d]) * x.k[d];
          x.e[v] = x.beta * (x.v[v] - read);
          for (int d = 0; d < K; ++d) x.o[v] += (S[d * V + v] += x.k[d] * x.e[v]) * x.q[d];
        }
      }
      // |(I + L)^-1|, from the exact L
      std::vector<Vec> inverse(n, Vec(n));
      for (int i = 0; i < n; ++i) {
        inverse[i][i] = 1;
        Vec decayed(K, 1.0);
        for (int j = i - 1; j >= 0; --j) {
          double l = 0;
          for (int d = 0; d < K; ++d)
            l += token[i].k[d] * token[j].k[d] * (decayed[d] *= token[j + 1].alpha[d]);
          for (int c = 0; c <= j; ++c) inverse[i][c] -= token[i].beta * l * inverse[j][c];
        }
      }
      double k_error = 0;
      Vec decay_error(n);  // of a product of alphas within the chunk
      for (int i = 0; i < n; ++i) {
        k_error = std::max(k_error, token[i].k_error);
        decay_error[i] = (i ? decay_error[i - 1] : 0) + token[i].alpha_error + kU;
      }
      std::vector<Vec> e_error(n, Vec(V)), o_error(n, Vec(V));
      for (int v = 0; v < V; ++v) {
        Vec residual(n);
        double before = 0, e_total = 0, moved = 0;
        for (int i = 0; i < n; ++i) {
          const Token& x = token[i];
          const double inner = x.k_error + k_error + decay_error[i] + (K + n + 8) * kU + 2 * operand;
          residual[i] = x.beta * (inner * (column[v] + before) + x.v_error[v]) +
                        (kElementary + 6 * kU + 2 * operand) * x.beta * (std::abs(x.v[v]) + column[v] + before) + kTiny;
          before += std::abs(x.e[v]);
          for (int j = 0; j <= i; ++j) e_error[i][v] += std::abs(inverse[i][j]) * residual[j];
          e_total += e_error[i][v];
          o_error[i][v] =
              x.q_norm * (state_error[v] + e_total + k_error * before) +
              (x.q_error + x.q_norm * (decay_error[i] + (K + n + 8) * kU + 4 * operand)) * (column[v] + before) + kTiny;
          moved += (x.k_error + decay_error[n - 1] + (n + 4) * kU + 2 * operand) * std::abs(x.e[v]);
        }
        state_error[v] += e_total + moved + (decay_error[n - 1] + (n + 3) * kU) * column[v] + K * kTiny;
      }
      for (int i = 0; i < n; ++i) {
        BoundedVec o(V);
        o.value = token[i].o, o.error = o_error[i];
        const BoundedVec normed = rms_norm(o, in.norm, shape.norm_eps);
        for (int v = 0; v < V; ++v) {
          const size_t at = (static_cast<size_t>(first + i) * H + h) * V + v;
          const double open = sigmoid(in.gate[at]);
          out.y.put(at, {normed.value[v] * open,
                         normed.error[v] * open +
                             std::abs(normed.value[v]) * (wide ? kLookup : kElementary * open)});
        }
      }
      first = last;
    }
    for (int d = 0; d < K; ++d)
      for (int v = 0; v < V; ++v)
        out.state.put((static_cast<size_t>(h) * K + d) * V + v, {S[d * V + v], state_error[v]});
  }
  return out;
}

// ---- selection ----

// The k best of `score` by (score descending, index ascending), NaN as -inf, as ascending indices
// (dsa.md 2.6).
inline std::vector<int> best(const Vec& score, int k) {
  std::vector<int> order(score.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int>(i);
  const auto key = [&](int i) { return std::isnan(score[i]) ? -INFINITY : score[i]; };
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return key(a) > key(b); });
  order.resize(std::min<size_t>(order.size(), k));
  std::sort(order.begin(), order.end());
  return order;
}

// Token list of a pooled selection: the chosen pools' tokens and the open tail (dsa.md 3.3). pool 1: the keys
// themselves.
inline std::vector<int> expand(const std::vector<int>& chosen, int pool, int visible) {
  std::vector<int> list;
  for (const int p : chosen)
    for (int s = 0; s < pool; ++s) list.push_back(p * pool + s);
  for (int t = visible / pool * pool; t < visible; ++t) list.push_back(t);
  return list;
}

// Hyper-connection maps from their logits (glm5_next.md 3.1): C [n][n] after `iterations` Sinkhorn steps.
// Relative error of an entry: normalising does not widen the spread of log-errors, so the roundings of the
// steps add up, twice (rows against columns).
inline BoundedVec sinkhorn(const BoundedVec& logits, int n, int iterations, double eps) {
  Vec c(static_cast<size_t>(n) * n);
  double off = 0;
  for (int a = 0; a < n; ++a) {
    double sum = 0;
    for (int b = 0; b < n; ++b) sum += std::exp(logits.value[a * n + b]);
    for (int b = 0; b < n; ++b) c[a * n + b] = std::exp(logits.value[a * n + b]) / sum + eps;
    for (int b = 0; b < n; ++b)
      off = std::max(off, logits.error[a * n + b] + 4 * kU * std::abs(logits.value[a * n + b]));
  }
  const auto columns = [&] {
    for (int b = 0; b < n; ++b) {
      double sum = eps;
      for (int a = 0; a < n; ++a) sum += c[a * n + b];
      for (int a = 0; a < n; ++a) c[a * n + b] /= sum;
    }
  };
  columns();
  for (int i = 1; i < iterations; ++i) {
    for (int a = 0; a < n; ++a) {
      double sum = eps;
      for (int b = 0; b < n; ++b) sum += c[a * n + b];
      for (int b = 0; b < n; ++b) c[a * n + b] /= sum;
    }
    columns();
  }
  BoundedVec out(c.size());
  const double relative = 2 * (2 * off + 2 * kElementary + 2 * iterations * (n + 3) * kU);
  for (size_t i = 0; i < c.size(); ++i) out.put(i, {c[i], c[i] * relative});
  return out;
}

}  // namespace weft::reference
