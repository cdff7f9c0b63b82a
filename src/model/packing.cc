#include "model/packing.h"

#include <cmath>
#include <cstring>

#include "base/check.h"
#include "base/dtype.h"

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

void pack_e4m3(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  const int64_t blocks = (m.columns + kScaleBlock - 1) / kScaleBlock;
  std::vector<float> scale(blocks);
  read_elements(*m.scales, first / kScaleBlock * blocks, blocks, scale.data());
  for (const float s : scale)
    if (!std::isfinite(s))
      fail("{}: {}: scale {} of the blocks of rows {}.. is not finite; the file is damaged", m.scales->file,
           m.scales->name, s, first);
  std::memcpy(scales, scale.data(), blocks * sizeof(float));
  auto* lines = reinterpret_cast<uint8_t*>(codes);
  std::vector<uint8_t> row(m.columns);
  for (int c = 0; c < kPanel && first + c < m.rows; ++c) {
    read_elements(*m.values, (first + c) * m.columns, m.columns, row.data());
    for (int64_t k = 0; k < m.columns; ++k) {
      const int64_t lane = 2 * c + k % 2;  // low byte: k and k+1, high byte: k+2 and k+3
      lines[k / 4 * 64 + 2 * lane + k % 4 / 2] = row[k];
    }
  }
}

void pack_mxfp4(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  auto* lines = reinterpret_cast<uint8_t*>(codes);
  auto* e8m0 = reinterpret_cast<uint8_t*>(scales);
  const int64_t groups = m.columns / 32;
  std::vector<uint8_t> row(m.columns / 2), scale(groups);
  std::memset(e8m0, 127, groups * kPanel);
  for (int c = 0; c < kPanel && first + c < m.rows; ++c) {
    read_elements(*m.values, (first + c) * m.columns / 2, m.columns / 2, row.data());
    read_elements(*m.scales, (first + c) * groups, groups, scale.data());
    for (int64_t g = 0; g < groups; ++g) {
      // The exponent is added to a bf16 exponent field of 126..129: it must stay within 1..254.
      if (scale[g] > 252)
        fail("{}: {}: scale byte {} at row {}, group {} is {}; the file is damaged", m.scales->file, m.scales->name,
             scale[g], first + c, g, scale[g] == 255 ? "NaN" : "beyond what weights can be");
      const bool flush = scale[g] < 2;  // below 6 * 2^-126: zero for every purpose
      e8m0[g * kPanel + c] = flush ? 127 : scale[g];
      if (flush) std::memset(row.data() + g * 16, 0, 16);
    }
    for (int64_t k = 0; k < m.columns; ++k) {
      const int nibble = row[k / 2] >> (k % 2 * 4) & 15;  // low nibble = even column
      const int64_t i = k % 8 / 2, lane = 2 * c + k % 2;
      lines[k / 8 * 64 + 2 * lane + i / 2] |= static_cast<uint8_t>(nibble << (i % 2 * 4));
    }
  }
}

}  // namespace

WeightFormat packed_format(const StoredMatrix& m) {
  if (m.mxfp4) return WeightFormat::mxfp4;
  switch (m.values->dtype) {
    case StoredDtype::bf16: return WeightFormat::bf16;
    case StoredDtype::f8_e4m3: return WeightFormat::e4m3;
    default: return WeightFormat::f32;
  }
}

void pack_rows(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales) {
  switch (packed_format(m)) {
    case WeightFormat::bf16: return pack_bf16(m, first, codes);
    case WeightFormat::e4m3: return pack_e4m3(m, first, codes, scales);
    case WeightFormat::mxfp4: return pack_mxfp4(m, first, codes, scales);
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

void read_row(const StoredMatrix& m, int64_t row, int64_t first, int64_t count, float* out) {
  if (m.values->dtype != StoredDtype::f8_e4m3) {
    read_f32(*m.values, row * m.columns + first, count, out);
    return;
  }
  const int64_t blocks = (m.columns + kScaleBlock - 1) / kScaleBlock;
  std::vector<uint8_t> codes(count);
  std::vector<float> scale(blocks);
  read_elements(*m.values, row * m.columns + first, count, codes.data());
  read_elements(*m.scales, row / kScaleBlock * blocks, blocks, scale.data());
  for (int64_t i = 0; i < count; ++i) {
    const float s = scale[(first + i) / kScaleBlock];
    if (!std::isfinite(s))
      fail("{}: {}: scale {} of the blocks of row {} is not finite; the file is damaged", m.scales->file,
           m.scales->name, s, row);
    out[i] = e4m3_to_float(codes[i]) * s;
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
