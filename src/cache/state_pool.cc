#include "cache/state_pool.h"

#include <limits>

#include "base/check.h"

namespace weft {

namespace {

// No two slots share a cache line: different threads work on different sequences.
constexpr size_t kSlotAlignment = 64;

size_t checked_stride(size_t slot_bytes, int slots) {
  WEFT_CHECK(slots > 0, "{} slots", slots);
  if (slot_bytes > std::numeric_limits<ptrdiff_t>::max() / static_cast<size_t>(slots) - kSlotAlignment)
    fail("state pool of {} slots is too large: {} bytes a slot", slots, slot_bytes);
  return (slot_bytes + kSlotAlignment - 1) / kSlotAlignment * kSlotAlignment;
}

}  // namespace

StatePool::StatePool(size_t slot_bytes, int slots, Poison poison)
    : stride_(checked_stride(slot_bytes, slots)),
      poison_(poison),
      memory_(stride_ * slots, "state pool"),
      taken_(slots, false) {
  poison_fill(poison_, base(), bytes());
  free_.reserve(slots);
  for (int slot = slots - 1; slot >= 0; --slot) free_.push_back(slot);
}

int StatePool::take_undefined() {
  WEFT_CHECK(!free_.empty(), "no free state slot: ask slots_free() first");
  const int slot = free_.back();
  free_.pop_back();
  WEFT_CHECK(poison_intact(poison_, at(slot), stride_), "state slot {} was written while free", slot);
  taken_[slot] = true;
  return slot;
}

int StatePool::take() {
  const int slot = take_undefined();
  zero(slot);
  return slot;
}

int StatePool::take_copy(int from) {
  const int slot = take_undefined();
  copy(from, slot);
  return slot;
}

void StatePool::release(int slot) {
  WEFT_CHECK(taken_.at(slot), "state slot {} released twice", slot);
  taken_[slot] = false;
  poison_fill(poison_, at(slot), stride_);
  free_.push_back(slot);
}

void StatePool::zero(int slot) {
  WEFT_CHECK(taken_.at(slot), "state slot {} is free", slot);
  if (stride_ > 0) std::memset(at(slot), 0, stride_);
}

void StatePool::copy(int from, int to) {
  WEFT_CHECK(taken_.at(from) && taken_.at(to) && from != to, "copy of state slot {} to {}", from, to);
  if (stride_ > 0) std::memcpy(at(to), at(from), stride_);
}

}  // namespace weft
