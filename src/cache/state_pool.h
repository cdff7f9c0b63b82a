// Per-sequence state of constant size, in slots.
//
// One slot holds everything of a sequence that does not grow with its length: the KDA states of all layers
// (f32), the conv tails and the k-pool rings. They live in one slot because they are only ever right
// together. The layout inside a slot is the model's; a kernel finds its part at base() + slot * stride() +
// offset.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/memory.h"
#include "cache/poison.h"

namespace weft {

class StatePool {
 public:
  // slot_bytes may be 0 (a model without such state): slots are then only counted.
  // Error: the memory cannot be had.
  StatePool(size_t slot_bytes, int slots, Poison poison = Poison::none);

  std::byte* base() { return memory_.as<std::byte>(); }
  size_t stride() const { return stride_; }  // bytes from slot to slot: slot_bytes rounded up to a cache line

  int slots() const { return static_cast<int>(taken_.size()); }
  int slots_free() const { return static_cast<int>(free_.size()); }
  size_t bytes() const { return stride_ * taken_.size(); }

  // Zeroed, always: the state of an empty sequence is zero, and a recycled slot holds a stranger's.
  // Both need slots_free() > 0.
  int take();
  int take_copy(int from);
  void release(int slot);

  void zero(int slot);
  void copy(int from, int to);

 private:
  std::byte* at(int slot) { return base() + static_cast<size_t>(slot) * stride_; }
  int take_undefined();

  size_t stride_;
  Poison poison_;
  Buffer memory_;
  std::vector<bool> taken_;
  std::vector<int> free_;
};

}  // namespace weft
