// KDA for training, head dim 64: convolution, SiLU, L2 norm, gate, recurrence, output norm and gate of one layer in
// one call, forward and backward. The token recurrence in fp32 with the state in L1 (16 KB) needs no decay
// factoring, hence no overflow care; the state entering every chunk of 32 tokens is kept, the backward pass
// recomputes the chunk from it. Formulas and their transposes: S~ = diag(a) S, e = b (v - S~'k), S = S~ + k e',
// o = S'q / 8.
#include <immintrin.h>

#include <vector>

#include "numbers.h"

#define D 64
#define CHUNK 32

typedef float V16 __attribute__((vector_size(64)));

struct Row {
  V16 v[4];
};
static inline float sum16(V16 x) { return _mm512_reduce_add_ps((__m512)x); }

// out[i] (+)= sum of x[i], 64 vectors: sixteen at a time by a tree of shuffles, 3 operations a vector instead of 10.
static inline void sums(const V16* x, float* out, bool add) {
  auto pair = [](V16 a, V16 b) { return _mm512_unpacklo_ps((__m512)a, (__m512)b) + _mm512_unpackhi_ps((__m512)a, (__m512)b); };
  auto quad = [&](const V16* y) {
    __m512d a = _mm512_castps_pd(pair(y[0], y[1])), b = _mm512_castps_pd(pair(y[2], y[3]));
    return _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)) + _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
  };
  auto fold = [](__m512 a, __m512 b) { return _mm512_shuffle_f32x4(a, b, 0x44) + _mm512_shuffle_f32x4(a, b, 0xEE); };
  for (int i = 0; i < D; i += 16, x += 16) {
    __m512 a = fold(quad(x), quad(x + 4)), b = fold(quad(x + 8), quad(x + 12));
    __m512 s = _mm512_shuffle_f32x4(a, b, 0x88) + _mm512_shuffle_f32x4(a, b, 0xDD);
    _mm512_storeu_ps(out + i, add ? s + _mm512_loadu_ps(out + i) : s);
  }
}

// Values of one head over one chunk, as the recurrence wants them, with what the backward pass needs again.
struct Chunk {
  float conv[3][CHUNK][D];  // after the convolution, before SiLU
  alignas(64) float q[CHUNK][D], k[CHUNK][D], v[CHUNK][D], a[CHUNK][D], gate[CHUNK][D];
  float norm[2][CHUNK], beta[CHUNK];
  alignas(64) float e[CHUNK][D], o[CHUNK][D];
};

struct Layer {
  int64_t batch, time, heads, stride;  // proj rows: q | k | v | g | b, `stride` wide
  const uint8_t* cut;                  // [batch, time]: the state is forgotten before this token (null: never)
  int64_t lead;                        // rows of proj before the first token of each sequence: the convolution's history
  const bf16 *proj, *f;
  const float *conv, *alog, *dt, *onorm;  // conv [3, 4, heads * D]
  int64_t at(int64_t b, int64_t t) const { return (b * (time + lead) + lead + t) * stride; }
  const bf16* row(int64_t b, int64_t t) const { return proj + at(b, t); }
};

static void prepare(const Layer& L, int64_t b, int64_t h, int64_t t0, int n, Chunk& c) {
  int64_t P = L.heads * D;
  float slope = expf(L.alog[h]);
  for (int m = 0; m < 3; ++m) {
    const float* w = L.conv + m * 4 * P + h * D;
    for (int t = 0; t < n; ++t) {
      float* y = c.conv[m][t];
      memset(y, 0, D * 4);
      for (int j = 0; j < 4; ++j) {
        int64_t at = t0 + t - 3 + j;
        if (at < -L.lead) continue;
        const bf16* x = L.row(b, at) + m * P + h * D;
        for (int d = 0; d < D; ++d) y[d] += w[j * P + d] * up(x[d]);
      }
      float* out = m == 0 ? c.q[t] : m == 1 ? c.k[t] : c.v[t];
      for (int d = 0; d < D; ++d) out[d] = y[d] * sigmoid(y[d]);
      if (m == 2) continue;
      float s = 0;
      for (int d = 0; d < D; ++d) s += out[d] * out[d];
      float r = c.norm[m][t] = 1.0f / sqrtf(s + 1e-6f);
      for (int d = 0; d < D; ++d) out[d] *= r;
    }
  }
  for (int t = 0; t < n; ++t) {
    int64_t row = b * L.time + t0 + t;
    const bf16* f = L.f + row * P + h * D;
    float kept = L.cut && L.cut[row] ? 0.0f : 1.0f;
    for (int d = 0; d < D; ++d) {
      c.gate[t][d] = sigmoid(slope * (up(f[d]) + L.dt[h * D + d]));
      c.a[t][d] = expf(-5.0f * c.gate[t][d]) * kept;
    }
    c.beta[t] = sigmoid(up(L.row(b, t0 + t)[4 * P + h]));
  }
}

// One chunk forward. A token's own update of the state is applied when the next token reads it, so that the state is
// passed once per token; with `keep` every decayed state S~ is stored there for the backward pass.
static void walk(Chunk& c, int n, Row* S, Row* keep) {
  Row e = {};
  alignas(64) float zero[D] = {};
  const float* last = zero;
  const Row* from = S;
  for (int t = 0; t < n; ++t) {
    Row r = {}, p = {};
    Row* to = keep ? keep + t * D : S;
    float kq = 0;
    const float *a = c.a[t], *k = c.k[t], *q = c.q[t];
    for (int d = 0; d < D; ++d) {
      for (int j = 0; j < 4; ++j) {
        V16 x = (from[d].v[j] + e.v[j] * last[d]) * a[d];
        to[d].v[j] = x;
        r.v[j] += x * k[d];
        p.v[j] += x * q[d];
      }
    }
    for (int d = 0; d < D; ++d) kq += k[d] * q[d];
    for (int j = 0; j < 4; ++j) {
      V16 v = *(const V16*)&c.v[t][j * 16];
      e.v[j] = (v - r.v[j]) * c.beta[t];
      *(V16*)&c.e[t][j * 16] = e.v[j];
      *(V16*)&c.o[t][j * 16] = (p.v[j] + e.v[j] * kq) * 0.125f;
    }
    last = k;
    from = to;
  }
  if (keep) return;
  for (int d = 0; d < D; ++d)
    for (int j = 0; j < 4; ++j) S[d].v[j] = from[d].v[j] + e.v[j] * last[d];
}

extern "C" {

// state: [batch, heads, D, D] entering and leaving (null: zero, not returned); saved: [batch, heads, chunks, D, D].
void kda_forward(int64_t batch, int64_t time, int64_t heads, int64_t stride, int64_t lead, const bf16* proj, const bf16* f,
                 const float* conv, const float* alog, const float* dt, const float* onorm, const uint8_t* cut,
                 float* state, float* saved, bf16* out) {
  Layer L{batch, time, heads, stride, cut, lead, proj, f, conv, alog, dt, onorm};
  int64_t P = heads * D, chunks = (time + CHUNK - 1) / CHUNK;
  static thread_local Chunk c;
  alignas(64) static thread_local Row S[D];
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      if (state)
        memcpy(S, state + (b * heads + h) * D * D, sizeof(S));
      else
        memset(S, 0, sizeof(S));
      for (int64_t i = 0; i < chunks; ++i) {
        int64_t t0 = i * CHUNK;
        int n = time - t0 < CHUNK ? int(time - t0) : CHUNK;
        if (saved) memcpy(saved + ((b * heads + h) * chunks + i) * D * D, S, sizeof(S));
        prepare(L, b, h, t0, n, c);
        walk(c, n, S, nullptr);
        for (int t = 0; t < n; ++t) {
          int64_t row = b * time + t0 + t;
          const bf16* g = L.row(b, t0 + t) + 3 * P + h * D;
          float s = 0;
          for (int d = 0; d < D; ++d) s += c.o[t][d] * c.o[t][d];
          float r = 1.0f / sqrtf(s / D + 1e-5f);
          for (int d = 0; d < D; ++d)
            out[row * P + h * D + d] = down(c.o[t][d] * r * onorm[d] * sigmoid(up(g[d])));
        }
      }
      if (state) memcpy(state + (b * heads + h) * D * D, S, sizeof(S));
    }
}

void kda_backward(int64_t batch, int64_t time, int64_t heads, int64_t stride, int64_t lead, const bf16* proj, const bf16* f,
                  const float* conv, const float* alog, const float* dt, const float* onorm, const uint8_t* cut, const float* saved,
                  const bf16* dout, bf16* dproj, bf16* df, float* dconv, float* dalog, float* ddt,
                  float* donorm) {
  Layer L{batch, time, heads, stride, cut, lead, proj, f, conv, alog, dt, onorm};
  int64_t P = heads * D, chunks = (time + CHUNK - 1) / CHUNK;
  static thread_local Chunk c;
  alignas(64) static thread_local Row S[D], G[D], keep[CHUNK * D];
  std::vector<float> draw(3 * (time + 3) * D);  // gradient of q, k, v before the convolution, three rows of slack
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t h = 0; h < heads; ++h) {
      memset(G, 0, sizeof(G));
      memset(draw.data(), 0, draw.size() * 4);
      float slope = expf(alog[h]);
      for (int64_t i = chunks - 1; i >= 0; --i) {
        int64_t t0 = i * CHUNK;
        int n = time - t0 < CHUNK ? int(time - t0) : CHUNK;
        memcpy(S, saved + ((b * heads + h) * chunks + i) * D * D, sizeof(S));
        prepare(L, b, h, t0, n, c);
        walk(c, n, S, keep);
        for (int t = n - 1; t >= 0; --t) {
          int64_t row = b * time + t0 + t;
          const bf16 *g = L.row(b, t0 + t) + 3 * P + h * D, *dy = dout + row * P + h * D;
          bf16* dp = dproj + L.at(b, t0 + t) + h * D;
          // Output norm and gate.
          alignas(64) float dO[D];
          float s = 0, dot = 0;
          for (int d = 0; d < D; ++d) s += c.o[t][d] * c.o[t][d];
          float r = 1.0f / sqrtf(s / D + 1e-5f);
          for (int d = 0; d < D; ++d) {
            float n1 = c.o[t][d] * r, sg = sigmoid(up(g[d])), x = up(dy[d]);
            donorm[d] += x * sg * n1;
            dp[3 * P + d] = down(x * n1 * onorm[d] * sg * (1 - sg));
            dO[d] = x * sg * onorm[d];
            dot += dO[d] * n1;
          }
          dot /= D;
          for (int d = 0; d < D; ++d) dO[d] = (dO[d] - c.o[t][d] * r * dot) * r * 0.125f;
          // Recurrence.
          const float *k = c.k[t], *q = c.q[t], *a = c.a[t];
          const Row* T = keep + t * D;
          Row e, o, de = {}, dr;
          float eo = 0;
          for (int j = 0; j < 4; ++j) {
            e.v[j] = *(V16*)&c.e[t][j * 16];
            o.v[j] = *(V16*)&dO[j * 16];
            eo += sum16(e.v[j] * o.v[j]);
          }
          float dq[D], dk[D], dg[D];
          V16 xs[D], ys[D], zs[D];
          for (int d = 0; d < D; ++d) {
            V16 x = {};
            for (int j = 0; j < 4; ++j) {
              V16 y = G[d].v[j] + o.v[j] * q[d];
              G[d].v[j] = y;
              de.v[j] += y * k[d];
              x += y * e.v[j];
            }
            xs[d] = x;
          }
          sums(xs, dk, false);
          float beta = c.beta[t], dbeta = 0;
          float dv[D];
          for (int j = 0; j < 4; ++j) {
            dbeta += sum16(de.v[j] * e.v[j]);
            dr.v[j] = de.v[j] * -beta;
            for (int u = 0; u < 16; ++u) dv[j * 16 + u] = -dr.v[j][u];
          }
          dp[4 * P - h * D + h] = down(dbeta * (1 - beta));  // (dbeta / beta) beta (1 - beta)
          for (int d = 0; d < D; ++d) {
            V16 x = {}, y = {}, z = {};
            for (int j = 0; j < 4; ++j) {
              V16 w = G[d].v[j] + dr.v[j] * k[d], st = T[d].v[j];
              G[d].v[j] = w * a[d];
              x += st * o.v[j];
              y += st * dr.v[j];
              z += w * st;
            }
            xs[d] = x, ys[d] = y, zs[d] = z;
          }
          sums(xs, dq, false), sums(ys, dk, true), sums(zs, dg, false);
          for (int d = 0; d < D; ++d) dq[d] += k[d] * eo;
          // Gate: log a = -5 sigmoid(slope (f + dt)).
          float dslope = 0;
          for (int d = 0; d < D; ++d) {
            float sg = c.gate[t][d], dx = dg[d] * -5.0f * sg * (1 - sg);
            float x = up(f[row * P + h * D + d]) + dt[h * D + d];
            dslope += dx * x;
            df[row * P + h * D + d] = down(dx * slope);
            ddt[h * D + d] += dx * slope;
          }
          dalog[h] += dslope * slope;
          // L2 norm, SiLU, convolution.
          for (int m = 0; m < 3; ++m) {
            float* dx = m == 0 ? dq : m == 1 ? dk : dv;
            if (m < 2) {
              const float* x = m == 0 ? q : k;
              float in = 0;
              for (int d = 0; d < D; ++d) in += dx[d] * x[d];
              for (int d = 0; d < D; ++d) dx[d] = (dx[d] - x[d] * in) * c.norm[m][t];
            }
            const float *y = c.conv[m][t], *w = conv + m * 4 * P + h * D;
            float* dw = dconv + m * 4 * P + h * D;
            for (int d = 0; d < D; ++d) {
              float sg = sigmoid(y[d]);
              dx[d] *= sg * (1 + y[d] * (1 - sg));
            }
            for (int j = 0; j < 4; ++j) {
              int64_t at = t0 + t - 3 + j;
              if (at < -lead) continue;
              const bf16* raw = L.row(b, at) + m * P + h * D;
              float* to = draw.data() + (m * (time + 3) + at + 3) * D;
              for (int d = 0; d < D; ++d) {
                to[d] += dx[d] * w[j * P + d];
                dw[j * P + d] += dx[d] * up(raw[d]);
              }
            }
          }
        }
      }
      for (int m = 0; m < 3; ++m)
        for (int64_t t = 0; t < time; ++t)
          for (int d = 0; d < D; ++d)
            dproj[L.at(b, t) + m * P + h * D + d] = down(draw[(m * (time + 3) + t + 3) * D + d]);
    }
}
}
