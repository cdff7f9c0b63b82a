// Muon's orthogonalisation with AMX, matrix by matrix: everything of one matrix stays in L2, where torch's batched
// products went through memory and took a quarter of a step of 2,048 tokens.
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <vector>

#include "numbers.h"

namespace {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Own asm: GCC 12's intrinsics name no memory clobber.
#define LOAD(tile, p, stride) asm volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(p), "r"(int64_t(stride)) : "memory")
#define STORE(tile, p, stride) asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(p), "r"(int64_t(stride)) : "memory")
#define ZERO(tile) asm volatile("tilezero %%tmm" #tile ::: "memory")
#define MULTIPLY(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c ::: "memory")

// out [m, n] = alpha a b + beta e; a [m, k], b in pairs of rows [k / 2, n, 2]; all sizes multiples of 32.
void product(int m, int n, int k, const bf16* a, const bf16* b, float alpha, float beta, const bf16* e, bf16* out) {
  alignas(64) static thread_local float c[32 * 32];
  for (int i = 0; i < m; i += 32)
    for (int j = 0; j < n; j += 32) {
      ZERO(0); ZERO(1); ZERO(2); ZERO(3);
      for (int l = 0; l < k; l += 32) {
        LOAD(4, a + i * k + l, k * 2);
        LOAD(5, a + (i + 16) * k + l, k * 2);
        LOAD(6, b + l * n + j * 2, n * 4);
        LOAD(7, b + l * n + (j + 16) * 2, n * 4);
        MULTIPLY(0, 4, 6); MULTIPLY(1, 4, 7); MULTIPLY(2, 5, 6); MULTIPLY(3, 5, 7);
      }
      STORE(0, c, 128); STORE(1, c + 16, 128); STORE(2, c + 16 * 32, 128); STORE(3, c + 16 * 32 + 16, 128);
      for (int r = 0; r < 32; ++r)
        for (int s = 0; s < 32; ++s) {
          int64_t at = int64_t(i + r) * n + j + s;
          out[at] = down(alpha * c[r * 32 + s] + (e ? beta * up(e[at]) : 0.0f));
        }
    }
}

// [rows, columns] -> its transpose in pairs of rows: a transpose of 32-bit pairs.
void pairs_of_transpose(int rows, int columns, const bf16* x, bf16* out) {
  const uint32_t* from = (const uint32_t*)x;
  uint32_t* to = (uint32_t*)out;
  for (int i = 0; i < rows; i += 16)
    for (int j = 0; j < columns / 2; ++j)
      for (int r = 0; r < 16; ++r) to[j * rows + i + r] = from[(i + r) * (columns / 2) + j];
}

void pairs(int rows, int columns, const bf16* x, bf16* out) {
  for (int i = 0; i < rows; i += 2)
    for (int j = 0; j < columns; ++j) {
      out[i * columns + 2 * j] = x[i * columns + j];
      out[i * columns + 2 * j + 1] = x[(i + 1) * columns + j];
    }
}

}  // namespace

// count matrices [rows, columns], rows <= columns, in place: five Newton-Schulz steps towards the nearest
// semi-orthogonal matrix.
extern "C" void muon_orthogonal(int64_t count, int64_t rows, int64_t columns, float* g) {
  syscall(SYS_arch_prctl, 0x1023, 18);  // ask for the tile registers; no harm if they were granted before
  static const TileConfig config;
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  int64_t size = rows * columns;
  std::vector<bf16> x(size), y(size), packed(size), a(rows * rows), b(rows * rows), square(rows * rows);
  for (int64_t n = 0; n < count; ++n, g += size) {
    float sum = 0;
    for (int64_t i = 0; i < size; ++i) sum += g[i] * g[i];
    float scale = 1 / (sqrtf(sum) + 1e-7f);
    for (int64_t i = 0; i < size; ++i) x[i] = down(g[i] * scale);
    for (int step = 0; step < 5; ++step) {
      pairs_of_transpose(rows, columns, x.data(), packed.data());
      product(rows, rows, columns, x.data(), packed.data(), 1, 0, nullptr, a.data());
      pairs_of_transpose(rows, rows, a.data(), square.data());
      product(rows, rows, rows, a.data(), square.data(), 2.0315f, -4.7750f, a.data(), b.data());
      pairs(rows, columns, x.data(), packed.data());
      product(rows, columns, rows, b.data(), packed.data(), 1, 3.4445f, x.data(), y.data());
      x.swap(y);
    }
    for (int64_t i = 0; i < size; ++i) g[i] = up(x[i]);
  }
  asm volatile("tilerelease" ::: "memory");
}
