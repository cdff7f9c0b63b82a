// From stored bytes to panels: every format, read back by the description in packed.h.
#include "model/packing.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/dtype.h"

namespace weft {
namespace {

struct Stored {
  std::vector<uint8_t> values, scales;
  TensorInfo value_info, scale_info;
  StoredMatrix matrix() {
    value_info.data = reinterpret_cast<const std::byte*>(values.data()), value_info.bytes = values.size();
    scale_info.data = reinterpret_cast<const std::byte*>(scales.data()), scale_info.bytes = scales.size();
    return {&value_info, scales.empty() ? nullptr : &scale_info, rows, columns};
  }
  int64_t rows, columns;
};

constexpr WeightFormat kStored[] = {WeightFormat::e4m3, WeightFormat::mxfp4, WeightFormat::mxfp8,
                                    WeightFormat::int8};

// Codes that meet every value; scales within what the formats allow.
Stored stored(WeightFormat format, int64_t rows, int64_t columns) {
  Stored s;
  s.rows = rows, s.columns = columns;
  s.value_info.name = "w", s.scale_info.name = "w_scale", s.value_info.file = s.scale_info.file = "file";
  uint32_t seed = 1;
  const auto next = [&] { return static_cast<uint8_t>((seed = seed * 1664525 + 1013904223) >> 24); };
  s.values.resize(rows * columns / (format == WeightFormat::mxfp4 ? 2 : 1));
  for (uint8_t& v : s.values) {
    v = next();
    if (format == WeightFormat::int8 && v == 0x80) v = 0;
    if ((format == WeightFormat::e4m3 || format == WeightFormat::mxfp8) && (v & 0x7F) == 0x7F) v = 0x80;
  }
  const bool mx = format == WeightFormat::mxfp4 || format == WeightFormat::mxfp8;
  s.value_info.dtype = format == WeightFormat::mxfp4  ? StoredDtype::u8
                       : format == WeightFormat::int8 ? StoredDtype::i8
                                                      : StoredDtype::f8_e4m3;
  s.scale_info.dtype = mx ? StoredDtype::u8 : StoredDtype::f32;
  if (mx) {
    s.scales.resize(rows * columns / 32);
    for (uint8_t& e : s.scales) e = static_cast<uint8_t>(100 + next() % 40);
  } else {
    const int64_t count = format == WeightFormat::int8 ? rows : (rows + 127) / 128 * ((columns + 127) / 128);
    s.scales.resize(count * 4);
    for (int64_t i = 0; i < count; ++i) {
      const float scale = 0.01f * static_cast<float>(1 + next());
      std::memcpy(s.scales.data() + 4 * i, &scale, 4);
    }
  }
  return s;
}

struct Panel {
  PackedWeight w;
  std::vector<uint8_t> codes, scales;
};
Panel packed(const StoredMatrix& m, int64_t first) {
  Panel p;
  p.w.n = static_cast<int>(m.rows), p.w.k = static_cast<int>(m.columns), p.w.format = packed_format(m);
  p.codes.resize(p.w.panel_bytes()), p.scales.resize(p.w.panel_scale_bytes());
  pack_rows(m, first, reinterpret_cast<std::byte*>(p.codes.data()),
            reinterpret_cast<std::byte*>(p.scales.data()));
  return p;
}
// What packed.h says of (column, k).
double unpacked(const Panel& p, int c, int k) {
  const auto scale_f32 = [&](int i) {
    float s;
    std::memcpy(&s, p.scales.data() + 4 * i, 4);
    return static_cast<double>(s);
  };
  const int lane = 2 * c + k % 2;
  const uint8_t code = p.w.format == WeightFormat::mxfp4
                           ? p.codes[k / 8 * 64 + 2 * lane + k % 8 / 4] >> (k % 8 / 2 % 2 * 4) & 15
                           : p.codes[k / 4 * 64 + 2 * lane + k % 4 / 2];
  switch (p.w.format) {
    case WeightFormat::e4m3:
      return e4m3_to_float(code) * scale_f32(k / 128);
    case WeightFormat::int8:
      return (code & 128 ? -(code & 127) : code) * scale_f32(c);
    case WeightFormat::mxfp8:
      EXPECT_NE(code, 0x80) << "-0";
      return std::ldexp(e4m3_to_float(code), p.scales[k / 32 * 16 + c] - 127);
    case WeightFormat::mxfp4:
      EXPECT_NE(code, 8) << "-0";
      return std::ldexp(e2m1_to_float(code), p.scales[k / 32 * 16 + c] - 127);
    default:
      return NAN;
  }
}

TEST(Packing, KeepsEveryValue) {
  for (const WeightFormat format : kStored) {
    Stored s = stored(format, 21, 160);  // a panel and a third; e4m3: a block and a quarter
    const StoredMatrix m = s.matrix();
    ASSERT_EQ(packed_format(m), format);
    for (const int64_t first : {0, 16}) {
      const Panel p = packed(m, first);
      for (int c = 0; c < kPanel; ++c) {
        std::vector<float> row(160, 0);
        if (first + c < 21) read_row(m, first + c, 0, 160, row.data());
        for (int k = 0; k < 160; ++k)
          ASSERT_FLOAT_EQ(unpacked(p, c, k), row[k])
              << static_cast<int>(format) << " row " << first + c << " k " << k;
      }
    }
    std::vector<float> all(160), part(37);  // a part of a row, from an odd column
    read_row(m, 20, 0, 160, all.data());
    read_row(m, 20, 33, 37, part.data());
    for (int k = 0; k < 37; ++k) EXPECT_EQ(part[k], all[33 + k]);
    EXPECT_GT(std::abs(all[1]) + std::abs(all[2]) + std::abs(all[3]), 0);
  }
}

std::string refusal(Stored s) {
  try {
    packed(s.matrix(), 0);
    return "packed";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(Packing, RefusesWhatNoKernelCanRead) {
  Stored s = stored(WeightFormat::int8, 16, 32);
  s.values[33] = 0x80;
  EXPECT_EQ(refusal(s), "file: w: -128 at row 1, column 1: int8 weights are -127..127");
  s = stored(WeightFormat::int8, 16, 32);
  const float infinite = INFINITY;
  std::memcpy(s.scales.data() + 8, &infinite, 4);
  EXPECT_EQ(refusal(s), "file: w_scale: scale inf of row 2 is not finite; the file is damaged");
  s = stored(WeightFormat::mxfp8, 16, 64);
  s.values[64 + 7] = 0xFF;
  EXPECT_EQ(refusal(s), "file: w: NaN at row 1, column 7; the file is damaged");
  for (const WeightFormat format : {WeightFormat::mxfp4, WeightFormat::mxfp8}) {
    s = stored(format, 16, 64);
    s.scales[3] = 192;
    EXPECT_EQ(
        refusal(s),
        "file: w_scale: scale byte 192 at row 1, group 1 is beyond what weights can be; the file is damaged");
    s.scales[3] = 255;
    EXPECT_EQ(refusal(s), "file: w_scale: scale byte 255 at row 1, group 1 is NaN; the file is damaged");
  }
}

// Groups too small for a normal bf16 become zero, and their neighbours stay.
TEST(Packing, FlushesTinyGroups) {
  for (const auto& [format, least] :
       {std::pair{WeightFormat::mxfp4, 2}, std::pair{WeightFormat::mxfp8, 10}}) {
    Stored s = stored(format, 16, 64);
    s.scales[2] = static_cast<uint8_t>(least - 1), s.scales[4] = static_cast<uint8_t>(least);
    const Panel p = packed(s.matrix(), 0);
    double flushed = 0, kept = 0, neighbour = 0;
    for (int k = 0; k < 32; ++k)
      flushed += std::abs(unpacked(p, 1, k)), neighbour += std::abs(unpacked(p, 1, 32 + k)),
          kept += std::abs(unpacked(p, 2, k));
    EXPECT_EQ(flushed, 0);
    EXPECT_GT(kept, 0);
    EXPECT_GT(neighbour, 0);
  }
}

}  // namespace
}  // namespace weft
