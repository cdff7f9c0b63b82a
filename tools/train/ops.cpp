// Fused training kernels for one core: each runs forward and backward over bf16 activations with fp32 inside.
// Plain loops, vectorised by the compiler (-O3 -march=native -ffast-math); ops.py compiles and wraps them, and
// tests them against plain PyTorch. Why they exist: with AMX the matrix products take a fraction of a step, and
// eager point-wise operations would take nearly all of it.
#include <algorithm>
#include <vector>

#include "numbers.h"

static inline float tanh_(float x) { return 1.0f - 2.0f / (1.0f + expf(x < 30.0f ? 2.0f * x : 60.0f)); }

extern "C" {

// Attention-Residual mix of `sources` [rows, dim] followed by an RMSNorm. key = the product of the two released
// vectors. Saved for the backward pass: weights [rows, sources], inverse rms of sources and of the mix.
void mix_forward(int64_t rows, int64_t dim, int64_t sources, const bf16** src, const float* key,
                 const float* gamma, float eps_mix, float eps_norm, bf16* out, float* weight, float* inverse,
                 float* inverse_out) {
  std::vector<float> mixed(dim);
  for (int64_t t = 0; t < rows; ++t) {
    float logit[16], top = -1e30f, sum = 0;
    for (int64_t s = 0; s < sources && sources > 1; ++s) {
      const bf16* x = src[s] + t * dim;
      float square = 0, dot = 0;
      for (int64_t i = 0; i < dim; ++i) {
        float v = up(x[i]);
        square += v * v;
        dot += v * key[i];
      }
      float r = 1.0f / sqrtf(square / dim + eps_mix);
      inverse[t * sources + s] = r;
      logit[s] = dot * r;
      if (logit[s] > top) top = logit[s];
    }
    if (sources == 1) logit[0] = top = 0;
    for (int64_t s = 0; s < sources; ++s) sum += logit[s] = expf(logit[s] - top);
    memset(mixed.data(), 0, dim * 4);
    for (int64_t s = 0; s < sources; ++s) {
      float a = weight[t * sources + s] = logit[s] / sum;
      const bf16* x = src[s] + t * dim;
      for (int64_t i = 0; i < dim; ++i) mixed[i] += a * up(x[i]);
    }
    float square = 0;
    for (int64_t i = 0; i < dim; ++i) square += mixed[i] * mixed[i];
    float r = inverse_out[t] = 1.0f / sqrtf(square / dim + eps_norm);
    for (int64_t i = 0; i < dim; ++i) out[t * dim + i] = down(mixed[i] * r * gamma[i]);
  }
}

void mix_backward(int64_t rows, int64_t dim, int64_t sources, const bf16** src, const float* key,
                  const float* gamma, const float* weight, const float* inverse, const float* inverse_out,
                  const bf16* dout, bf16** dsrc, float* dkey, float* dgamma) {
  std::vector<float> mixed(dim), dmix(dim);
  for (int64_t t = 0; t < rows; ++t) {
    const float* a = weight + t * sources;
    memset(mixed.data(), 0, dim * 4);
    for (int64_t s = 0; s < sources; ++s) {
      const bf16* x = src[s] + t * dim;
      for (int64_t i = 0; i < dim; ++i) mixed[i] += a[s] * up(x[i]);
    }
    float r = inverse_out[t], dot = 0;
    for (int64_t i = 0; i < dim; ++i) {
      float d = up(dout[t * dim + i]), n = mixed[i] * r;
      dgamma[i] += d * n;
      dot += d * gamma[i] * n;
      mixed[i] = n;
    }
    dot /= dim;
    for (int64_t i = 0; i < dim; ++i)
      dmix[i] = (up(dout[t * dim + i]) * gamma[i] - mixed[i] * dot) * r;
    if (sources == 1) {
      for (int64_t i = 0; i < dim; ++i) dsrc[0][t * dim + i] = down(dmix[i]);
      continue;
    }
    float da[16], mean = 0, score[16];
    for (int64_t s = 0; s < sources; ++s) {
      const bf16* x = src[s] + t * dim;
      float sum = 0, dotk = 0;
      for (int64_t i = 0; i < dim; ++i) {
        sum += dmix[i] * up(x[i]);
        dotk += key[i] * up(x[i]);
      }
      da[s] = sum;
      score[s] = dotk;
      mean += a[s] * sum;
    }
    for (int64_t s = 0; s < sources; ++s) {
      const bf16* x = src[s] + t * dim;
      bf16* dx = dsrc[s] + t * dim;
      float dl = a[s] * (da[s] - mean), rs = inverse[t * sources + s];
      float lin = dl * rs, back = dl * score[s] * rs * rs * rs / dim;
      for (int64_t i = 0; i < dim; ++i) {
        float v = up(x[i]);
        dkey[i] += lin * v;
        dx[i] = down(a[s] * dmix[i] + lin * key[i] - back * v);
      }
    }
  }
}

// SiTU: hidden = 4 tanh(g/4) sigmoid(g) 25 tanh(u/25), each expert's columns times its routing weight (or null).
void situ_forward(int64_t rows, int64_t width, int64_t experts, const bf16* gu, const float* route, bf16* out) {
  int64_t each = width / experts;
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t e = 0; e < experts; ++e) {
      float w = route ? route[t * experts + e] : 1.0f;
      const bf16 *g = gu + t * 2 * width + e * each, *u = g + width;
      bf16* o = out + t * width + e * each;
      if (w == 0) {
        memset(o, 0, each * 2);
        continue;
      }
      for (int64_t i = 0; i < each; ++i) {
        float x = up(g[i]);
        o[i] = down(w * 100.0f * tanh_(x * 0.25f) * sigmoid(x) * tanh_(up(u[i]) * 0.04f));
      }
    }
}

void situ_backward(int64_t rows, int64_t width, int64_t experts, const bf16* gu, const float* route,
                   const bf16* dout, bf16* dgu, float* droute) {
  int64_t each = width / experts;
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t e = 0; e < experts; ++e) {
      float w = route ? route[t * experts + e] : 1.0f, dw = 0;
      int64_t at = t * 2 * width + e * each;
      const bf16 *g = gu + at, *u = g + width, *d = dout + t * width + e * each;
      if (w == 0) {
        memset(dgu + at, 0, each * 2);
        memset(dgu + at + width, 0, each * 2);
        droute[t * experts + e] = 0;
        continue;
      }
      for (int64_t i = 0; i < each; ++i) {
        float x = up(g[i]), a = tanh_(x * 0.25f), s = sigmoid(x), b = tanh_(up(u[i]) * 0.04f), dy = up(d[i]);
        dw += dy * 100.0f * a * s * b;
        dgu[at + i] = down(w * dy * 25.0f * b * s * (1 - a * a + 4 * a * (1 - s)));
        dgu[at + width + i] = down(w * dy * 4.0f * a * s * (1 - b * b));
      }
      if (droute) droute[t * experts + e] = dw;
    }
}

// Weighted cross-entropy; logits are replaced by their gradient. hit[t] = 1 where the target is the largest logit.
void cross_entropy(int64_t rows, int64_t vocab, bf16* logits, const int64_t* target, const float* weight,
                   float* loss, float* hit) {
  std::vector<float> p(vocab);
  for (int64_t t = 0; t < rows; ++t) {
    bf16* x = logits + t * vocab;
    float top = -1e30f, sum = 0;
    for (int64_t i = 0; i < vocab; ++i) {
      float v = up(x[i]);
      top = v > top ? v : top;
    }
    for (int64_t i = 0; i < vocab; ++i) sum += p[i] = expf(up(x[i]) - top);
    float own = up(x[target[t]]), w = weight[t], scale = w / sum;
    loss[t] = logf(sum) + top - own;
    hit[t] = own >= top;
    if (w == 0) {
      memset(x, 0, vocab * 2);
      continue;
    }
    float exact = scale * p[target[t]] - w;
    for (int64_t i = 0; i < vocab; ++i) x[i] = down(scale * p[i]);
    x[target[t]] = down(exact);
  }
}

// Causal softmax of bf16 scores in place; row t of a block sees columns 0..first + t, of those only where `chosen`
// [batch, rows, columns] (or null) is set.
void softmax_rows(int64_t blocks, int64_t heads, int64_t rows, int64_t columns, int64_t first, float scale,
                  const uint8_t* chosen, bf16* score) {
  std::vector<float> p(columns);
  for (int64_t b = 0; b < blocks; ++b)
    for (int64_t t = 0; t < rows; ++t) {
      bf16* x = score + (b * rows + t) * columns;
      int64_t n = first + t + 1;
      const uint8_t* m = chosen ? chosen + (b / heads * rows + t) * columns : nullptr;
      float top = -1e30f, sum = 0;
      for (int64_t i = 0; i < n; ++i) {
        float v = up(x[i]) * scale;
        if (m) v = m[i] ? v : -1e30f;
        p[i] = v;
        top = v > top ? v : top;
      }
      for (int64_t i = 0; i < n; ++i) sum += p[i] = expf(p[i] - top);
      float r = 1 / sum;
      for (int64_t i = 0; i < n; ++i) x[i] = down(p[i] * r);
      memset(x + n, 0, (columns - n) * 2);
    }
}

// d score = scale p (dp - delta), in place of dp.
void softmax_rows_backward(int64_t all, int64_t rows, int64_t columns, int64_t first, float scale, const bf16* p,
                           const float* delta, bf16* dp) {
  for (int64_t r = 0; r < all; ++r) {
    int64_t n = first + r % rows + 1;
    const bf16* a = p + r * columns;
    bf16* d = dp + r * columns;
    for (int64_t i = 0; i < n; ++i) d[i] = down(scale * up(a[i]) * (up(d[i]) - delta[r]));
    memset(d + n, 0, (columns - n) * 2);
  }
}

// -log of the share that the columns marked in `same` have in a row's soft-max, all others counted exp(noise) times; a
// row sees columns 0 .. last[row]. score [batch, heads, rows, columns] becomes the loss's gradient (rows of weight 0
// cost nothing); last, weight [batch, rows], same [batch, rows, columns], loss [batch, rows] summed over the heads.
void source_rows(int64_t batch, int64_t heads, int64_t rows, int64_t columns, float scale, float noise,
                 const int64_t* last, const float* weight, const uint8_t* same, bf16* score, float* loss) {
  std::vector<float> p(columns);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t t = 0; t < rows; ++t) {
        int64_t at = b * rows + t, n = last[at] + 1;
        bf16* x = score + ((b * heads + h) * rows + t) * columns;
        const uint8_t* m = same + at * columns;
        if (weight[at] == 0) {
          memset(x, 0, columns * 2);
          continue;
        }
        float top = -1e30f, best = -1e30f, all = 0, part = 0;
        for (int64_t i = 0; i < n; ++i) {
          float v = p[i] = up(x[i]) * scale + (m[i] ? 0.0f : noise);
          top = v > top ? v : top;
          best = m[i] && v > best ? v : best;
        }
        for (int64_t i = 0; i < n; ++i) all += expf(p[i] - top);
        for (int64_t i = 0; i < n; ++i) part += m[i] ? expf(p[i] - best) : 0;
        loss[at] += logf(all) + top - logf(part) - best;
        float a = weight[at] * scale / all, c = weight[at] * scale / part;
        for (int64_t i = 0; i < n; ++i) {
          float v = expf(p[i] - top) * a;
          x[i] = down(m[i] ? v - expf(p[i] - best) * c : v);
        }
        memset(x + n, 0, (columns - n) * 2);
      }
}

// Indexer: score = sum over heads of weight relu(dot), and the `top` best visible columns of every row as booleans.
// dot [heads, rows, columns], weight [rows, heads]; of equal scores at the edge the lower columns are taken.
void select_rows(int64_t heads, int64_t rows, int64_t columns, int64_t first, int64_t top, const bf16* dot,
                 const float* weight, uint8_t* chosen) {
  std::vector<float> score(columns), sorted(columns);
  for (int64_t t = 0; t < rows; ++t) {
    int64_t n = first + t + 1;
    uint8_t* out = chosen + t * columns;
    memset(out, 0, columns);
    if (n <= top) {
      memset(out, 1, n);
      continue;
    }
    memset(score.data(), 0, n * 4);
    for (int64_t h = 0; h < heads; ++h) {
      const bf16* x = dot + (h * rows + t) * columns;
      float a = weight[t * heads + h];
      for (int64_t i = 0; i < n; ++i) {
        float v = up(x[i]);
        score[i] += a * (v > 0 ? v : 0);
      }
    }
    memcpy(sorted.data(), score.data(), n * 4);
    std::nth_element(sorted.begin(), sorted.begin() + (n - top), sorted.begin() + n);
    float edge = sorted[n - top];
    int64_t left = top;
    for (int64_t i = 0; i < n; ++i) left -= out[i] = score[i] > edge;
    for (int64_t i = 0; i < n && left > 0; ++i)
      if (score[i] == edge) out[i] = 1, --left;
  }
}
}
