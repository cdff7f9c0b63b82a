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

static constexpr int round_up(int x, int unit) { return (x + unit - 1) / unit * unit; }

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
