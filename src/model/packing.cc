#include "model/packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/dtype.h"
#include "base/quantize.h"

namespace weft {
namespace {

constexpr int kLanes = 2 * kPanel;

// Writes 16-bit values of one column into the k pairs of a panel.
void put_column(uint16_t* lines, int column, const uint16_t* values, int64_t k) {
  for (int64_t i = 0; i < k; ++i) lines[i / 2 * kLanes + 2 * column + i % 2] = values[i];
}

void pack_bf16(const StoredMatrix& m, int64_t first, std::byte* codes) {
  std::vector<uint16_t> row(m.columns);
  for (int c = 0; c < kPanel && first + c < m.rows; ++c) {
    read_elements(*m.values, (first + c) * m.columns, m.columns, row.data());
    put_column(reinterpret_cast<uint16_t*>(codes), c, row.data(), m.columns);
  }
}

// Byte codes of one column: the low byte of a lane holds k and k + 1, the high byte k + 2 and k + 3.
void put_bytes(uint8_t* lines, int column, const uint8_t* codes, int64_t k_count) {
  for (int64_t k = 0; k < k_count; ++k) lines[k / 4 * 64 + 2 * (2 * column + k % 2) + k % 4 / 2] = codes[k];
}

[[noreturn]] void fail_scale(const StoredMatrix& m, float scale, int64_t row) {
  fail("{}: {}: scale {} of row {} is not finite; the file is damaged", m.scales->file, m.scales->name, scale, row);
}

void pack_e4m3(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  const int64_t blocks = (m.columns + kScaleBlock - 1) / kScaleBlock;
  std::vector<float> scale(blocks);
  read_elements(*m.scales, first / kScaleBlock * blocks, blocks, scale.data());
  for (const float s : scale)
    if (!std::isfinite(s))
      fail("{}: {}: scale {} of the blocks of rows {}.. is not finite; the file is damaged", m.scales->file,
           m.scales->name, s, first);
  std::memcpy(scales, scale.data(), blocks * sizeof(float));
  std::vector<uint8_t> row(m.columns);
  for (int c = 0; c < kPanel && first + c < m.rows; ++c) {
    read_elements(*m.values, (first + c) * m.columns, m.columns, row.data());
    put_bytes(reinterpret_cast<uint8_t*>(codes), c, row.data(), m.columns);
  }
}

// int8 codes become sign and magnitude, which the kernels look up; -128, which quantisers do not write, is an error.
void pack_int8(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  auto* column_scale = reinterpret_cast<float*>(scales);
  std::memset(scales, 0, kPanel * sizeof(float));
  std::vector<int8_t> row(m.columns);
  std::vector<uint8_t> code(m.columns);
  for (int c = 0; c < kPanel && first + c < m.rows; ++c) {
    read_elements(*m.scales, first + c, 1, column_scale + c);
    if (!std::isfinite(column_scale[c])) fail_scale(m, column_scale[c], first + c);
    read_elements(*m.values, (first + c) * m.columns, m.columns, row.data());
    for (int64_t k = 0; k < m.columns; ++k) {
      if (row[k] == -128)
        fail("{}: {}: -128 at row {}, column {}: int8 weights are -127..127", m.values->file, m.values->name,
             first + c, k);
      code[k] = static_cast<uint8_t>(row[k] < 0 ? 128 - row[k] : row[k]);
    }
    put_bytes(reinterpret_cast<uint8_t*>(codes), c, code.data(), m.columns);
  }
}

// The E8M0 scales of column c, group by group; `flush(g)` for groups whose scale is below `least`: zero for every
// purpose. The kernels look values up times 2^64 and subtract 191 - scale from the exponent.
template <class Flush>
void put_e8m0(const StoredMatrix& m, int64_t row, int c, uint8_t* e8m0, int least, const Flush& flush) {
  const int64_t groups = m.columns / 32;
  std::vector<uint8_t> scale(groups);
  read_elements(*m.scales, row * groups, groups, scale.data());
  for (int64_t g = 0; g < groups; ++g) {
    if (scale[g] > 191)
      fail("{}: {}: scale byte {} at row {}, group {} is {}; the file is damaged", m.scales->file, m.scales->name,
           scale[g], row, g, scale[g] == 255 ? "NaN" : "beyond what weights can be");
    e8m0[g * kPanel + c] = scale[g] < least ? 127 : scale[g];
    if (scale[g] < least) flush(g);
  }
}

void pack_mxfp8(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  auto* e8m0 = reinterpret_cast<uint8_t*>(scales);
  std::vector<uint8_t> row(m.columns);
  std::memset(e8m0, 127, m.columns / 32 * kPanel);
  for (int c = 0; c < kPanel && first + c < m.rows; ++c) {
    read_elements(*m.values, (first + c) * m.columns, m.columns, row.data());
    // 2^-9 2^(10 - 127) is the least normal bf16
    put_e8m0(m, first + c, c, e8m0, 10, [&](int64_t g) { std::memset(row.data() + g * 32, 0, 32); });
    for (int64_t k = 0; k < m.columns; ++k) {
      if ((row[k] & 0x7F) == 0x7F)
        fail("{}: {}: NaN at row {}, column {}; the file is damaged", m.values->file, m.values->name, first + c, k);
      if (row[k] == 0x80) row[k] = 0;  // -0
    }
    put_bytes(reinterpret_cast<uint8_t*>(codes), c, row.data(), m.columns);
  }
}

void pack_mxfp4(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  auto* lines = reinterpret_cast<uint8_t*>(codes);
  auto* e8m0 = reinterpret_cast<uint8_t*>(scales);
  std::vector<uint8_t> row(m.columns / 2);
  std::memset(e8m0, 127, m.columns / 32 * kPanel);
  for (int c = 0; c < kPanel && first + c < m.rows; ++c) {
    read_elements(*m.values, (first + c) * m.columns / 2, m.columns / 2, row.data());
    // below 6 * 2^-126
    put_e8m0(m, first + c, c, e8m0, 2, [&](int64_t g) { std::memset(row.data() + g * 16, 0, 16); });
    for (int64_t k = 0; k < m.columns; ++k) {
      int nibble = row[k / 2] >> (k % 2 * 4) & 15;  // low nibble = even column
      if (nibble == 8) nibble = 0;                  // -0
      const int64_t i = k % 8 / 2, lane = 2 * c + k % 2;
      lines[k / 8 * 64 + 2 * lane + i / 2] |= static_cast<uint8_t>(nibble << (i % 2 * 4));
    }
  }
}

}  // namespace

StoredDtype code_dtype(WeightFormat format) {
  return format == WeightFormat::mxfp4  ? StoredDtype::u8
         : format == WeightFormat::int8 ? StoredDtype::i8
                                        : StoredDtype::f8_e4m3;
}
StoredDtype scale_dtype(WeightFormat format) {
  return format == WeightFormat::mxfp4 || format == WeightFormat::mxfp8 ? StoredDtype::u8 : StoredDtype::f32;
}

EncodedRows encode_rows(const StoredMatrix& m, int64_t first, int64_t count) {
  const WeightFormat format = *m.target;
  StoredMatrix source = m;
  source.target.reset();
  EncodedRows out;
  std::vector<float> row(m.columns);
  const int64_t blocks = (m.columns + kScaleBlock - 1) / kScaleBlock;
  std::vector<float> scales(format == WeightFormat::e4m3 ? blocks : count);
  if (format == WeightFormat::e4m3) {
    std::vector<float> amax(blocks);
    const int64_t block = first / kScaleBlock * kScaleBlock;
    for (int64_t r = block; r < std::min(block + kScaleBlock, m.rows); ++r) {
      read_row(source, r, 0, m.columns, row.data());
      for (int64_t k = 0; k < m.columns; ++k)
        amax[k / kScaleBlock] = std::max(amax[k / kScaleBlock], std::fabs(row[k]));
    }
    for (int64_t i = 0; i < blocks; ++i) scales[i] = fp8_tile_scale(amax[i], TileScale::fp32);
  }
  const size_t width = m.columns / (format == WeightFormat::mxfp4 ? 2 : 1), groups = m.columns / 32;
  const bool mx = scale_dtype(format) == StoredDtype::u8;
  out.codes.resize(count * width);
  out.scales.resize(mx ? count * groups : scales.size() * sizeof(float));
  for (int64_t r = 0; r < count; ++r) {
    read_row(source, first + r, 0, m.columns, row.data());
    auto* codes = reinterpret_cast<uint8_t*>(out.codes.data() + r * width);
    auto* e8m0 = reinterpret_cast<uint8_t*>(out.scales.data() + r * groups);
    if (format == WeightFormat::mxfp4) mxfp4_quantize(row.data(), m.columns, MxScale::rceil, codes, e8m0);
    else if (format == WeightFormat::mxfp8) mxfp8_quantize(row.data(), m.columns, MxScale::rceil, codes, e8m0);
    else if (format == WeightFormat::int8) scales[r] = int8_quantize(row.data(), m.columns, reinterpret_cast<int8_t*>(codes));
    else
      for (int64_t k = 0; k < m.columns; ++k) codes[k] = float_to_e4m3(row[k] / scales[k / kScaleBlock]);
  }
  if (!mx) std::memcpy(out.scales.data(), scales.data(), out.scales.size());
  return out;
}

namespace {

// A panel of a matrix with a target: its rows encoded are a stored matrix of their own.
void pack_encoded(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  const int64_t count = std::min<int64_t>(kPanel, m.rows - first);
  if (count <= 0) {  // padding: zeros, and scales that are no NaN
    if (scale_dtype(*m.target) == StoredDtype::u8) std::memset(scales, 127, m.columns / 32 * kPanel);
    return;
  }
  const EncodedRows rows = encode_rows(m, first, count);
  TensorInfo value = *m.values, scale = *m.values;  // errors name the source
  value.dtype = code_dtype(*m.target), value.data = rows.codes.data(), value.bytes = rows.codes.size();
  scale.dtype = scale_dtype(*m.target), scale.data = rows.scales.data(), scale.bytes = rows.scales.size();
  pack_rows({&value, &scale, count, m.columns}, 0, codes, scales);
}

}  // namespace

WeightFormat packed_format(const StoredMatrix& m) {
  if (m.target) return *m.target;
  switch (m.values->dtype) {
    case StoredDtype::bf16: return WeightFormat::bf16;
    case StoredDtype::f8_e4m3:
      return m.scales->dtype == StoredDtype::f32 ? WeightFormat::e4m3 : WeightFormat::mxfp8;
    case StoredDtype::u8: return WeightFormat::mxfp4;
    case StoredDtype::i8: return WeightFormat::int8;
    default: return WeightFormat::f32;
  }
}

void pack_rows(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  if (m.target) return pack_encoded(m, first, codes, scales);
  switch (packed_format(m)) {
    case WeightFormat::bf16: return pack_bf16(m, first, codes);
    case WeightFormat::e4m3: return pack_e4m3(m, first, codes, scales);
    case WeightFormat::mxfp4: return pack_mxfp4(m, first, codes, scales);
    case WeightFormat::mxfp8: return pack_mxfp8(m, first, codes, scales);
    case WeightFormat::int8: return pack_int8(m, first, codes, scales);
    case WeightFormat::f32: break;
  }
  auto* lines = reinterpret_cast<float*>(codes);
  std::vector<float> row(m.columns);
  for (int c = 0; c < kPanel && first + c < m.rows; ++c) {
    read_row(m, first + c, 0, m.columns, row.data());
    for (int64_t k = 0; k < m.columns; ++k) lines[k * kPanel + c] = row[k];
  }
}

void read_f32(const TensorInfo& tensor, size_t first, size_t count, float* out) {
  switch (tensor.dtype) {
    case StoredDtype::f32: read_elements(tensor, first, count, out); return;
    case StoredDtype::bf16:
    case StoredDtype::f16: {
      std::vector<uint16_t> bits(count);
      read_elements(tensor, first, count, bits.data());
      for (size_t i = 0; i < count; ++i)
        out[i] = tensor.dtype == StoredDtype::bf16 ? bf16_to_float(bits[i]) : half_to_float(bits[i]);
      return;
    }
    default:
      fail("{}: {}: dtype {}, expected BF16, F16 or F32", tensor.file, tensor.name, stored_name(tensor.dtype));
  }
}

namespace {

// The scales of `count` columns from `first` of one row.
std::vector<float> row_scales(const StoredMatrix& m, WeightFormat format, int64_t row, int64_t first, int64_t count) {
  std::vector<float> scale(count);
  if (format == WeightFormat::int8) {
    read_elements(*m.scales, row, 1, scale.data());
    if (!std::isfinite(scale[0])) fail_scale(m, scale[0], row);
    std::fill(scale.begin(), scale.end(), scale[0]);
    return scale;
  }
  const bool mx = format != WeightFormat::e4m3;
  const int64_t block = mx ? 32 : kScaleBlock, blocks = (m.columns + block - 1) / block;
  std::vector<float> of_block(blocks);
  if (mx) {
    std::vector<uint8_t> e8m0(blocks);
    read_elements(*m.scales, row * blocks, blocks, e8m0.data());
    for (int64_t i = 0; i < blocks; ++i) of_block[i] = std::ldexp(1.f, e8m0[i] == 255 ? 1000 : e8m0[i] - 127);
  } else {
    read_elements(*m.scales, row / kScaleBlock * blocks, blocks, of_block.data());
  }
  for (int64_t i = 0; i < count; ++i) {
    scale[i] = of_block[(first + i) / block];
    if (!std::isfinite(scale[i]))
      fail("{}: {}: scale {} of the blocks of row {} is not finite; the file is damaged", m.scales->file,
           m.scales->name, scale[i], row);
  }
  return scale;
}

}  // namespace

void read_row(const StoredMatrix& m, int64_t row, int64_t first, int64_t count, float* out) {
  const WeightFormat format = packed_format(m);
  if (format == WeightFormat::bf16 || format == WeightFormat::f32) {
    read_f32(*m.values, row * m.columns + first, count, out);
    return;
  }
  const std::vector<float> scale = row_scales(m, format, row, first, count);
  const int64_t at = row * m.columns + first;
  if (format == WeightFormat::int8) {
    std::vector<int8_t> codes(count);
    read_elements(*m.values, at, count, codes.data());
    for (int64_t i = 0; i < count; ++i) out[i] = static_cast<float>(codes[i]) * scale[i];
    return;
  }
  const bool nibbles = format == WeightFormat::mxfp4;
  const int64_t begin = nibbles ? at / 2 : at, end = nibbles ? (at + count + 1) / 2 : at + count;
  std::vector<uint8_t> codes(end - begin);
  read_elements(*m.values, begin, end - begin, codes.data());
  for (int64_t i = 0; i < count; ++i) {
    const int64_t k = at + i;
    out[i] = scale[i] * (nibbles ? e2m1_to_float(codes[k / 2 - begin] >> (k % 2 * 4) & 15) : e4m3_to_float(codes[i]));
  }
}

void pack_values(WeightFormat format, const float* rows, int columns, int k_count, std::byte* codes) {
  for (int c = 0; c < columns; ++c)
    for (int k = 0; k < k_count; ++k) {
      const float x = rows[c * k_count + k];
      if (format == WeightFormat::f32) {
        reinterpret_cast<float*>(codes)[k * kPanel + c] = x;
      } else {
        reinterpret_cast<uint16_t*>(codes)[k / 2 * kLanes + 2 * c + k % 2] = float_to_bf16(x);
      }
    }
}

}  // namespace weft
