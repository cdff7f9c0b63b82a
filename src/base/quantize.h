// Row and block quantisers in scalar, exact form: what the loader and the packers use, and what the vector
// kernels are tested against. Formats: OCP Microscaling 1.0 (MX, groups of 32 along the row), DeepSeek's fp8
// with one fp32 scale per 128x128 weight block or per 128-wide tile of a cache row, symmetric int8 per row.
//
// bf16 values are passed as uint16_t codes (base/dtype.h). Nothing here allocates or throws.
#pragma once

#include <cstdint>

namespace weft {

constexpr int kMxGroup = 32;
constexpr int kFp8Block = 128;

// How the exponent of an MX group follows from its largest magnitude. They give equally valid files:
//   floor  floor(log2 amax) - emax, the OCP conversion: the largest element may saturate
//   rceil  the smallest exponent with amax <= max_element * 2^e: never saturates. weft writes this one.
//   even   floor, plus one when amax / 2^floor(log2 amax) >= 1.75 (compressed-tensors)
enum class MxScale : uint8_t { floor, rceil, even };

// x[n] -> codes, scales[ceil(n/32)] (E8M0). A last group of less than 32 is allowed.
// mxfp8: codes[n], E4M3. mxfp4: codes[n/2], n even, E2M1, low nibble = even element.
// A group of zeros has scale 0 (2^-127). Non-finite input, where OCP leaves the choice: with a NaN in the
// group, scale 255 and elements 7F (mxfp4: 0); with an Inf, scale 254, Inf saturates.
void mxfp8_quantize(const float* x, int64_t n, MxScale rule, uint8_t* codes, uint8_t* scales);
void mxfp4_quantize(const float* x, int64_t n, MxScale rule, uint8_t* codes, uint8_t* scales);

// y[n] = element * 2^(scale - 127); scale 255 gives NaN for its group.
void mxfp8_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* y);
void mxfp4_dequantize(const uint8_t* codes, const uint8_t* scales, int64_t n, float* y);

// compressed-tensors' `weight_packed`[rows, cols/2] with `weight_scale`[rows, ceil(cols/32)] -> y[rows,
// cols].
void mxfp4_weight_dequantize(const uint8_t* packed, const uint8_t* scales, int64_t rows, int64_t cols,
                             float* y);

// w[rows, cols] E4M3 with scale[ceil(rows/128), ceil(cols/128)] (`weight_scale_inv`: multiply) -> y[rows,
// cols].
void fp8_block_dequantize(const uint8_t* w, const float* scale, int64_t rows, int64_t cols, float* y);

// Scale of one 128-wide tile with largest magnitude amax. Readers take any; weft writes pow2_amax_floor.
//   pow2_amax_floor   2^ceil(log2(max(amax, 1e-4) / 448))     DeepSeek's activation quantiser
//   pow2_scale_floor  2^ceil(log2(max(amax / 448, 1e-4)))     vLLM's cache writer
//   fp32              max(amax, 1e-4) / 448
enum class TileScale : uint8_t { pow2_amax_floor, pow2_scale_floor, fp32 };
float fp8_tile_scale(float amax, TileScale rule);

// One row x[n] in E4M3 with an fp32 scale per 128 elements: codes[n], scales[ceil(n/128)]. Also the quantiser
// of the indexer's q and k vectors (n = 128).
void fp8_tile_quantize(const float* x, int64_t n, TileScale rule, uint8_t* codes, float* scales);
void fp8_tile_dequantize(const uint8_t* codes, const float* scales, int64_t n, float* y);

// Latent cache rows, latent[512] and rope[64] in bf16:
//   656 bytes  512 E4M3 | 4 fp32 scales | 64 bf16 rope (copied)      DeepSeek's order: scales before rope
//   528 bytes  512 E4M3 | 4 fp32 scales                              models without rope
//   528 bytes  512 E4M3 | 16 E8M0 scales (rceil)                     MXFP8; the same size, so caches carry a
//   layout tag
constexpr int kLatentWidth = 512;
constexpr int kRopeWidth = 64;
constexpr int kLatentRow656 = 656;
constexpr int kLatentRow528 = 528;
void latent656_quantize(const uint16_t* latent, const uint16_t* rope, TileScale rule, uint8_t* row);
void latent656_dequantize(const uint8_t* row, uint16_t* latent, uint16_t* rope);
void latent528_quantize(const uint16_t* latent, TileScale rule, uint8_t* row);
void latent528_dequantize(const uint8_t* row, uint16_t* latent);
void latent528_mx_quantize(const uint16_t* latent, uint8_t* row);
void latent528_mx_dequantize(const uint8_t* row, uint16_t* latent);

// Symmetric int8: q = RNE(x * 127 / amax), returns the scale amax / 127 (0 for a row of zeros). x finite.
float int8_quantize(const float* x, int64_t n, int8_t* q);

// x[128] <- x H / sqrt(128) in place, H in Sylvester order, fp32 butterflies. Orthogonal: dot products stay.
void hadamard128(float* x);

}  // namespace weft
