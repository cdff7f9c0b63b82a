// Debug filling of cache memory that nobody owns.
//
// Fresh zeros hide rows that were never written, and stale values hide reads of a stranger's rows. With
// poison on, unowned pages and slots hold a pattern, and taking one checks that nobody wrote to it meanwhile
// (a padded batch row that went through a stale block table, for instance).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace weft {

enum class Poison : uint8_t {
  none = 0,
  numbers = 0x3e,  // 0.186 as f32 and bf16: plausible, so only a comparison notices
  nans = 0xff,     // NaN as f32, bf16, e4m3 and e8m0: spreads into the result
};

inline void poison_fill(Poison poison, std::byte* data, size_t bytes) {
  if (poison != Poison::none && bytes > 0) std::memset(data, static_cast<int>(poison), bytes);
}

inline bool poison_intact(Poison poison, const std::byte* data, size_t bytes) {
  return poison == Poison::none ||
         std::all_of(data, data + bytes, [=](std::byte b) { return b == static_cast<std::byte>(poison); });
}

}  // namespace weft
