// Random bytes of one tensor: a pure function of seed, tensor and position, so that any thread can make any
// piece.
//
// A draw picks one of 4096 equally likely quantiles of the normal distribution, already encoded in the
// tensor's dtype (bf16 has about 3000 values within four deviations, so a finer draw would not show). One
// 64-bit hash gives four draws: 2-3 GB/s of bf16 per core, where a Box-Muller pair per value gives a
// twentieth.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "app/synth.h"

namespace weft {

// Of all tensors that are drawn alike: an expert's own table would take longer than its weights.
struct SynthTable {
  float scale = 0;   // fp8: middle of the block scales
  int exponent = 0;  // mxfp4: lower of the two group exponents
  std::vector<float> f32;
  std::vector<uint16_t> bf16;
  std::vector<uint8_t> e4m3;
  std::vector<uint8_t> e2m1[2];  // two codes for each of 2^16 draws of two values; for either group exponent
};

class SynthTables {
 public:
  std::shared_ptr<const SynthTable> get(const SynthTensor& tensor);

 private:
  using Key = std::tuple<SynthFill, StoredDtype, float, float, bool>;
  std::map<Key, std::shared_ptr<const SynthTable>> made_;
};

class SynthFiller {
 public:
  SynthFiller(const SynthTensor& tensor, uint64_t seed, SynthTables& tables);

  // Bytes [first, first + bytes) of the tensor. first must be a multiple of kPiece.
  static constexpr size_t kPiece = 64 << 10;
  void fill(size_t first, size_t bytes, std::byte* out) const;

 private:
  template <class T>
  void draw_codes(const std::vector<T>& codes, size_t first, size_t bytes, std::byte* out) const;
  void draw_mxfp4(size_t first, size_t bytes, std::byte* out) const;
  void draw_mxfp4_scales(size_t first, size_t bytes, std::byte* out) const;
  void draw_fp8_scales(size_t first, size_t bytes, std::byte* out) const;

  SynthFill fill_;
  StoredDtype dtype_;
  bool power_of_two_;
  uint64_t key_;
  std::shared_ptr<const SynthTable> table_;
};

}  // namespace weft
