#include "graph/graph.h"

#include <algorithm>
#include <numeric>

namespace weft {

Slot Graph::value(std::string label, size_t bytes) {
  WEFT_CHECK(bytes > 0, "{}", label);
  slots_.push_back({std::move(label), (bytes + 63) & ~size_t{63}});
  return {static_cast<int>(slots_.size()) - 1};
}

Slot Graph::external(std::string label) {
  slots_.push_back({std::move(label)});
  return {static_cast<int>(slots_.size()) - 1};
}

void Graph::bind(Slot slot, const void* address) {
  WEFT_CHECK(slots_[slot.id].bytes == 0 && address, "{}", slots_[slot.id].label);
  slots_[slot.id].address = address;
}

void Graph::append(Node node, std::vector<Fixup> fixups) {
  const int index = static_cast<int>(nodes_.size());
  for (Fixup& fixup : fixups) {
    fixup.node = index;
    SlotInfo& slot = slots_[fixup.slot.id];
    if (slot.first < 0) slot.first = index;
    slot.last = index;
    fixups_.push_back(fixup);
  }
  nodes_.push_back(std::move(node));
}

// Largest first, each at the lowest offset that is free for its whole lifetime.
void Graph::plan() {
  std::vector<int> order;
  for (int i = 0; i < static_cast<int>(slots_.size()); ++i)
    if (slots_[i].bytes && slots_[i].first >= 0) order.push_back(i);
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return slots_[a].bytes > slots_[b].bytes; });
  std::vector<int> placed;
  arena_bytes_ = 0;
  for (int i : order) {
    SlotInfo& slot = slots_[i];
    std::vector<std::pair<size_t, size_t>> taken;  // [begin, end) of those alive at the same time
    for (int j : placed)
      if (slots_[j].first <= slot.last && slot.first <= slots_[j].last)
        taken.emplace_back(slots_[j].offset, slots_[j].offset + slots_[j].bytes);
    std::sort(taken.begin(), taken.end());
    size_t offset = 0;
    for (const auto& [begin, end] : taken) {
      if (begin >= offset + slot.bytes) break;
      offset = std::max(offset, end);
    }
    slot.offset = offset;
    arena_bytes_ = std::max(arena_bytes_, offset + slot.bytes);
    placed.push_back(i);
  }
}

void Graph::patch(std::byte* arena) {
  for (const Fixup& fixup : fixups_) {
    const SlotInfo& slot = slots_[fixup.slot.id];
    const std::byte* base = slot.bytes ? arena + slot.offset : static_cast<const std::byte*>(slot.address);
    WEFT_CHECK(base, "{} is not bound", slot.label);
    const std::byte* pointer = base + fixup.byte_offset;
    std::memcpy(nodes_[fixup.node].args.data() + fixup.field, &pointer, sizeof(pointer));
  }
}

}  // namespace weft
