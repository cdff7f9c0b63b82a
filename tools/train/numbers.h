// Types and functions that both kernel files use.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

typedef uint16_t bf16;

static inline float up(bf16 x) {
  uint32_t u = uint32_t(x) << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static inline bf16 down(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return bf16((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}
// Bounded: division is a reciprocal estimate with a Newton step, which makes NaN of an infinite denominator.
static inline float sigmoid(float x) { return 1.0f / (1.0f + expf(x > -60.0f ? -x : 60.0f)); }
