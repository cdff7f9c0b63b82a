// The packed weight layout ("NZ"): one for every instruction set.
//
// A weight W [n, k] is cut into panels of 16 output columns. Inside a panel k runs in pairs: one 64-byte line holds
// 16 columns x 2 k as bf16 (c0k0 c0k1 c1k0 c1k1 ...): what vdpbf16ps and an AMX tile row consume as it is; the other
// ISAs split the pair with a shift and a mask. n is padded to 16 and k to 32 with zeros (32 k = one AMX step = one MX
// group), so no kernel has a tail in k.
//
//  format  codes per panel                                             scales
//  bf16    k_padded/2 lines of 64 bytes                                -
//  f32     k_padded lines of 64 bytes, 16 columns each                 -
//  e4m3    k_padded/4 lines: 16-bit lane j = codes of (column j/2,     f32 [panels][ceil(k/128)], on the
//          k+j%2) in the low byte and (same column, k+2+j%2) in the    accumulator of each 128-k block
//          high byte: two table look-ups and no shuffle per line
//  mxfp4   k_padded/8 lines: 16-bit lane j = 4 nibbles of column j/2,  E8M0 [panels][k_padded/32][16],
//          nibble i is k + 2i + j%2; never -0                          folded into the bf16 exponent (exact); 2..191
//  mxfp8   as e4m3; never -0                                           as mxfp4; 10..191
//  int8    as e4m3, each code sign and magnitude (-127..127)           f32 [panels][16], on the finished sum: exact
//                                                                      weights under bf16 activations, no second rounding
#pragma once

#include <cstddef>
#include <cstdint>

namespace weft {

inline constexpr int kPanel = 16;       // columns of a panel
inline constexpr int kStep = 32;        // k padding
inline constexpr int kScaleBlock = 128; // k covered by one fp8 scale

enum class WeightFormat : uint8_t { bf16, f32, e4m3, mxfp4, mxfp8, int8 };
// The word people use for it; e4m3 with its blocks is what checkpoints call fp8.
static constexpr const char* format_name(WeightFormat format) {
  switch (format) {
    case WeightFormat::bf16: return "bf16";
    case WeightFormat::f32: return "f32";
    case WeightFormat::e4m3: return "fp8";
    case WeightFormat::mxfp4: return "mxfp4";
    case WeightFormat::mxfp8: return "mxfp8";
    case WeightFormat::int8: return "int8";
  }
  return "?";
}

static constexpr int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

// Index keys of a DSA layer lie in panels of 16 keys, k along the panel. Bytes of a panel for keys of `dim` values:
//  operand  as 16 columns of a bf16 or f32 weight: what the ISA multiplies
//  mxfp8    E4M3 lines as above, then E8M0 [k_padded/32][16]: OCP Microscaling, groups of 32 along k
//  int8     lines of 16 keys x 4 k, k padded to 64, then f32 [16]: one symmetric scale per key
enum class IndexFormat : uint8_t { operand, mxfp8, int8 };
static constexpr int kQuadStep = 64;  // k padding of int8: one AMX step
static constexpr size_t index_panel_bytes(IndexFormat format, int dim, int operand_bytes) {
  const size_t lanes = static_cast<size_t>(round_up(dim, format == IndexFormat::int8 ? kQuadStep : kStep)) * kPanel;
  switch (format) {
    case IndexFormat::operand: return lanes * operand_bytes;
    case IndexFormat::mxfp8: return lanes + lanes / 32;
    case IndexFormat::int8: return lanes + kPanel * 4;
  }
  return 0;
}

// Latent rows of a DSA layer. Bytes of a row:
//  operand  latent | rope as the ISA multiplies them, padded to 32 values
//  fp8      latent in E4M3, padded to 64 | f32 scale per 128 of them, a power of two | rope in bf16; padded to 16 bytes:
//           656 for 512 + 64, 528 for 512
enum class LatentFormat : uint8_t { operand, fp8 };
static constexpr int kCodeLine = 64;
static constexpr size_t latent_row_bytes(LatentFormat format, int latent, int rope, int operand_bytes) {
  if (format == LatentFormat::operand) return static_cast<size_t>(round_up(latent + rope, kStep)) * operand_bytes;
  return round_up(round_up(latent, kCodeLine) + (latent + kScaleBlock - 1) / kScaleBlock * 4 + rope * 2, 16);
}

// A view; the owner is the weight store of the model.
struct PackedWeight {
  const std::byte* codes = nullptr;   // [panels][panel_bytes]
  const std::byte* scales = nullptr;  // see the table above
  int32_t n = 0, k = 0;               // logical sizes, one group
  WeightFormat format = WeightFormat::bf16;

  constexpr int k_padded() const { return round_up(k, kStep); }
  constexpr int panels() const { return (n + kPanel - 1) / kPanel; }
  constexpr size_t panel_bytes() const {
    const size_t lanes = static_cast<size_t>(k_padded()) * kPanel;
    switch (format) {
      case WeightFormat::bf16: return lanes * 2;
      case WeightFormat::f32: return lanes * 4;
      case WeightFormat::e4m3:
      case WeightFormat::mxfp8:
      case WeightFormat::int8: return lanes;
      case WeightFormat::mxfp4: return lanes / 2;
    }
    return 0;
  }
  constexpr size_t panel_scale_bytes() const {
    if (format == WeightFormat::e4m3) return static_cast<size_t>((k + kScaleBlock - 1) / kScaleBlock) * 4;
    if (format == WeightFormat::mxfp4 || format == WeightFormat::mxfp8)
      return static_cast<size_t>(k_padded() / 32) * kPanel;
    if (format == WeightFormat::int8) return kPanel * 4;
    return 0;
  }
  constexpr size_t code_bytes() const { return panel_bytes() * panels(); }
  constexpr size_t scale_bytes() const { return panel_scale_bytes() * panels(); }
};

}  // namespace weft
