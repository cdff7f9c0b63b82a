#include "text/bpe.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "base/check.h"

namespace weft {
namespace {

uint64_t key_of(int left, int right) {
  return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
}

constexpr uint32_t kNone = UINT32_MAX;

struct Symbol {
  int id;
  uint32_t previous, next;  // kNone at the ends
  uint32_t rank;            // of the merge with `next`
};

// Kept between calls: a pre-token is a few bytes, and two allocations would cost more than merging it.
struct Scratch {
  std::vector<Symbol> symbols;
  std::vector<uint64_t> heap;  // rank << 32 | position: the smallest is the next merge, ties go to the left
};

}  // namespace

void MergeTable::reserve(size_t pairs) {
  size_t slots = slots_.size();
  while (slots < 2 * pairs) slots *= 2;
  if (slots > slots_.size()) grow(slots);
}

void MergeTable::grow(size_t slots) {
  std::vector<Slot> old = std::exchange(slots_, std::vector<Slot>(slots));
  for (const Slot& slot : old) {
    if (slot.merge.rank != kNoMerge) slots_[slot_of(slot.key)] = slot;
  }
}

size_t MergeTable::slot_of(uint64_t key) const {
  uint64_t hash = key * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 32;
  size_t at = hash & (slots_.size() - 1);
  while (slots_[at].merge.rank != kNoMerge && slots_[at].key != key) at = (at + 1) & (slots_.size() - 1);
  return at;
}

void MergeTable::set(int left, int right, Merge merge) {
  if (2 * (size_ + 1) > slots_.size()) grow(2 * slots_.size());
  Slot& slot = slots_[slot_of(key_of(left, right))];
  size_ += slot.merge.rank == kNoMerge;
  slot = {key_of(left, right), merge};
}

MergeTable::Merge MergeTable::find(int left, int right) const {
  return slots_[slot_of(key_of(left, right))].merge;
}

Bpe::Bpe(std::vector<std::string> tokens, MergeTable merges, bool whole_first)
    : tokens_(std::move(tokens)), merges_(std::move(merges)), whole_first_(whole_first) {
  ids_.reserve(tokens_.size());
  bytes_.fill(-1);
  for (size_t id = 0; id < tokens_.size(); ++id) {
    const std::string& bytes = tokens_[id];
    if (bytes.empty()) continue;
    ids_.emplace(bytes, static_cast<int>(id));
    if (bytes.size() == 1) bytes_[static_cast<unsigned char>(bytes[0])] = static_cast<int>(id);
  }
}

std::optional<int> Bpe::find(std::string_view bytes) const {
  const auto found = ids_.find(bytes);
  return found == ids_.end() ? std::nullopt : std::optional(found->second);
}

void Bpe::encode(std::string_view piece, std::vector<int>& ids) const {
  if (whole_first_) {
    if (const std::optional<int> whole = find(piece)) {
      ids.push_back(*whole);
      return;
    }
  }
  merge(piece, ids);
}

void Bpe::merge(std::string_view piece, std::vector<int>& ids) const {
  if (piece.empty()) return;
  if (piece.size() >= kNone) fail("a text of {} bytes is too long for the tokenizer", piece.size());
  thread_local Scratch scratch;
  std::vector<Symbol>& symbols = scratch.symbols;
  std::vector<uint64_t>& heap = scratch.heap;
  const auto count = static_cast<uint32_t>(piece.size());
  symbols.resize(count);
  heap.clear();
  for (uint32_t i = 0; i < count; ++i) {
    const auto byte = static_cast<unsigned char>(piece[i]);
    if (bytes_[byte] < 0) fail("the vocabulary has no token for the byte 0x{:02X}", byte);
    symbols[i] = {bytes_[byte], i - 1, i + 1, MergeTable::kNoMerge};
  }
  symbols[0].previous = kNone;
  symbols[count - 1].next = kNone;

  const auto rank_pair = [&](uint32_t at) {
    Symbol& symbol = symbols[at];
    symbol.rank =
        symbol.next == kNone ? MergeTable::kNoMerge : merges_.find(symbol.id, symbols[symbol.next].id).rank;
    if (symbol.rank != MergeTable::kNoMerge) heap.push_back(static_cast<uint64_t>(symbol.rank) << 32 | at);
    return symbol.rank != MergeTable::kNoMerge;
  };
  for (uint32_t i = 0; i < count; ++i) rank_pair(i);
  std::make_heap(heap.begin(), heap.end(), std::greater<>());

  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), std::greater<>());
    const auto at = static_cast<uint32_t>(heap.back());
    const auto rank = static_cast<uint32_t>(heap.back() >> 32);
    heap.pop_back();
    Symbol& left = symbols[at];
    if (left.rank != rank) continue;  // one of the two has merged otherwise since
    Symbol& right = symbols[left.next];
    left.id = merges_.find(left.id, right.id).id;
    left.next = right.next;
    right.rank = MergeTable::kNoMerge;
    if (left.next != kNone) symbols[left.next].previous = at;
    if (rank_pair(at)) std::push_heap(heap.begin(), heap.end(), std::greater<>());
    if (left.previous != kNone && rank_pair(left.previous)) {
      std::push_heap(heap.begin(), heap.end(), std::greater<>());
    }
  }
  for (uint32_t at = 0; at != kNone; at = symbols[at].next) ids.push_back(symbols[at].id);
  // One huge input must not pin its working memory to the thread for ever.
  if (count > (1u << 20)) scratch = {};
}

}  // namespace weft
