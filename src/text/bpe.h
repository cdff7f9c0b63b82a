// Byte-pair encoding of one pre-token: start from single bytes and keep merging the neighbours whose merge
// has the lowest rank, leftmost first, until no two neighbours can merge.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace weft {

// (left id, right id) -> (rank, merged id): open addressing, for a lookup is the whole cost of merging and a
// std::unordered_map of the half million pairs of a real vocabulary misses the cache twice as often.
class MergeTable {
 public:
  static constexpr uint32_t kNoMerge = UINT32_MAX;
  struct Merge {
    uint32_t rank = kNoMerge;
    int id = -1;
  };

  void reserve(size_t pairs);
  void set(int left, int right, Merge merge);  // the last one wins
  Merge find(int left, int right) const;
  size_t size() const { return size_; }

 private:
  struct Slot {
    uint64_t key = UINT64_MAX;
    Merge merge;
  };
  size_t slot_of(uint64_t key) const;
  void grow(size_t slots);

  std::vector<Slot> slots_ = std::vector<Slot>(16);  // a power of two
  size_t size_ = 0;
};

class Bpe {
 public:
  // `tokens[id]` = the bytes of each token that text can become; empty: no such token. With `whole_first` a
  // pre-token that is itself a token is emitted at once, even if no sequence of merges reaches it (tiktoken,
  // ignore_merges).
  Bpe(std::vector<std::string> tokens, MergeTable merges, bool whole_first);
  Bpe(const Bpe&) = delete;  // ids_ looks into tokens_
  Bpe(Bpe&&) = default;

  // Appends the ids of `piece`, in O(n log n). Error: a byte has no token.
  void encode(std::string_view piece, std::vector<int>& ids) const;

  std::optional<int> find(std::string_view bytes) const;
  const std::vector<std::string>& tokens() const { return tokens_; }

 private:
  void merge(std::string_view piece, std::vector<int>& ids) const;

  std::vector<std::string> tokens_;
  std::unordered_map<std::string_view, int> ids_;
  std::array<int, 256> bytes_;  // -1: none
  MergeTable merges_;
  bool whole_first_;
};

}  // namespace weft
