#include "graph/graph.h"

#include <algorithm>
#include <functional>

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
    if (slot.users.empty() || slot.users.back() != index) slot.users.push_back(index);
    fixups_.push_back(fixup);
  }
  nodes_.push_back(std::move(node));
}

Graph Graph::hollow() const {
  Graph copy = *this;
  for (Node& node : copy.nodes_) {
    node.invoke = [](const void*, const void*, const Call&) {};
    node.first_weights = [](const void*, const StepHeader&, int, int) { return FirstWeights{}; };
  }
  return copy;
}

size_t Graph::value_bytes() const {
  size_t sum = 0;
  for (const SlotInfo& slot : slots_)
    if (slot.first >= 0) sum += slot.bytes;
  return sum;
}

Graph::Place Graph::place(Slot value) const {
  const SlotInfo& slot = slots_[value.id];
  WEFT_CHECK(slot.bytes, "{}", slot.label);
  return {slot.offset, slot.bytes, slot.first, slot.last};
}

// Which nodes are complete before another can begin: a bit per pair.
class Graph::Order {
 public:
  explicit Order(size_t nodes) : words_((nodes + 63) / 64), bits_(nodes * words_) {}
  bool before(int a, int b) const { return bits_[b * words_ + a / 64] >> (a % 64) & 1; }
  void add(int a, int b) {  // a, and all that is before it, before b
    for (size_t w = 0; w < words_; ++w) bits_[b * words_ + w] |= bits_[a * words_ + w];
    bits_[b * words_ + a / 64] |= uint64_t{1} << (a % 64);
  }

 private:
  size_t words_;
  std::vector<uint64_t> bits_;
};

// A reader waits for the last writer, a writer for the last writer and for all who have read since.
Graph::Order Graph::depend() {
  struct State {
    int writer = -1;
    std::vector<int> readers;
  };
  std::vector<State> state(slots_.size());
  Order order(nodes_.size());
  size_t next = 0;  // fixups are in the order of nodes
  for (int n = 0; n < static_cast<int>(nodes_.size()); ++n) {
    std::vector<int> wanted;
    const size_t first = next;
    for (; next < fixups_.size() && fixups_[next].node == n; ++next) {
      const State& s = state[fixups_[next].slot.id];
      if (s.writer >= 0) wanted.push_back(s.writer);
      if (fixups_[next].writes) wanted.insert(wanted.end(), s.readers.begin(), s.readers.end());
    }
    std::sort(wanted.begin(), wanted.end(), std::greater<>());
    for (const int before : wanted) {  // latest first: what it implies is left out
      if (before == n || order.before(before, n)) continue;
      order.add(before, n);
      nodes_[n].after.push_back(before);
    }
    for (size_t i = first; i < next; ++i) {
      State& s = state[fixups_[i].slot.id];
      if (fixups_[i].writes) s = {n, {}};
    }
    for (size_t i = first; i < next; ++i) {
      State& s = state[fixups_[i].slot.id];
      if (!fixups_[i].writes && s.writer != n) s.readers.push_back(n);
    }
  }
  return order;
}

// As early as dependencies allow.
void Graph::stage() {
  stages_.clear();
  for (int n = 0; n < static_cast<int>(nodes_.size()); ++n) {
    Node& node = nodes_[n];
    node.stage = 0;
    for (const int before : node.after) node.stage = std::max(node.stage, nodes_[before].stage + 1);
    if (node.stage == static_cast<int>(stages_.size())) stages_.emplace_back();
    node.lane = static_cast<int>(stages_[node.stage].size());
    stages_[node.stage].push_back(n);
  }
}

// Largest first, each at the lowest offset that is free whenever it may be alive.
void Graph::place(const Order& order) {
  // Every later use of a value depends on its first.
  const auto apart = [&](const SlotInfo& a, const SlotInfo& b) {
    return a.last < b.first && std::all_of(a.users.rbegin(), a.users.rend(),
                                           [&](int user) { return order.before(user, b.first); });
  };
  std::vector<int> by_size;
  for (int i = 0; i < static_cast<int>(slots_.size()); ++i)
    if (slots_[i].bytes && slots_[i].first >= 0) by_size.push_back(i);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](int a, int b) { return slots_[a].bytes > slots_[b].bytes; });
  std::vector<int> placed;
  arena_bytes_ = 0;
  for (int i : by_size) {
    SlotInfo& slot = slots_[i];
    std::vector<std::pair<size_t, size_t>> taken;  // [begin, end) of those that may be alive at the same time
    for (int j : placed)
      if (!apart(slots_[j], slot) && !apart(slot, slots_[j]))
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

void Graph::plan() {
  const Order order = depend();
  stage();
  place(order);
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
