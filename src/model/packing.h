// From stored tensors to the packed layout of kernels/packed.h, one panel of 16 output columns at a time.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "kernels/packed.h"
#include "model/checkpoint.h"

namespace weft {

// A stored weight matrix [rows, columns] with its scales, if it has any.
//   values                          scales
//   BF16, F16, F32                  -
//   F8_E4M3                         F32 [ceil(rows/128), ceil(columns/128)]
//   F8_E4M3 (MXFP8)                 U8 or F8_E8M0 [rows, columns / 32]
//   U8 [rows, columns / 2] (MXFP4)  U8 or F8_E8M0 [rows, columns / 32]
//   I8                              F32 [rows]
struct StoredMatrix {
  const TensorInfo* values = nullptr;
  const TensorInfo* scales = nullptr;
  int64_t rows = 0, columns = 0;
  std::optional<WeightFormat> target = {};  // quantised to it while it is packed: e4m3, mxfp4, mxfp8, int8
};

// The target; without one BF16 and all that is narrower stays, F16 and F32 become f32 (both exactly).
WeightFormat packed_format(const StoredMatrix& m);

// Rows [first, first + 16) of `m` as one panel; rows at or beyond m.rows are zero. The panel's k is m.columns.
// error: a scale that is NaN or out of range, an MXFP8 code that is NaN, naming the tensor.
void pack_rows(const StoredMatrix& m, int64_t first, std::byte* codes, std::byte* scales);

// Rows [first, first + count) of `m` in m.target as a checkpoint stores them, row-major; all of them in one block of 128
// rows. scales: of e4m3 those of that block, amax / 448 of each 128 x 128; of the MX formats each row's, never saturating;
// of int8 one a row. What pack_rows packs of a matrix with a target.
struct EncodedRows {
  std::vector<std::byte> codes, scales;
};
EncodedRows encode_rows(const StoredMatrix& m, int64_t first, int64_t count);
StoredDtype code_dtype(WeightFormat format);   // of the checkpoint's tensors; not for bf16 and f32
StoredDtype scale_dtype(WeightFormat format);

// Dequantised f32 values of columns [first, first + count) of one row.
void read_row(const StoredMatrix& m, int64_t row, int64_t first, int64_t count, float* out);

// A panel given as f32 rows: value (column c, k) at rows[c * k_count + k]. format: bf16 (values must be bf16) or f32.
void pack_values(WeightFormat format, const float* rows, int columns, int k_count, std::byte* codes);

// Any BF16 / F16 / F32 tensor as f32.
void read_f32(const TensorInfo& tensor, size_t first, size_t count, float* out);

}  // namespace weft
