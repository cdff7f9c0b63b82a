// Per-token cache memory in pages of 64 tokens.
//
// One slab per (layer, kind): the latent rows of layer 3, the index keys of layer 3, and so on. All slabs
// share one numbering of pages, so that one block table per sequence serves every layer, and a page is owned
// or free in all of them at once. A kernel finds row t of a sequence at
//
//   slab(i) + table[t / kPageTokens] * stride(i) + (t % kPageTokens) * row_bytes
//
// A slab that holds one row per P tokens (pooled index keys) says so by its bytes per page and nothing else:
// pages are always counted in tokens.
//
// Pages are reference counted: sequences with a common beginning share its pages. Nobody may write to a page
// with more than one owner; Sequence::extend sees to that. One thread (the engine's loop) takes and releases.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/memory.h"
#include "cache/poison.h"
#include "kernels/kernels.h"

namespace weft {

constexpr int pages_for(int tokens) {
  return tokens / kPageTokens + (tokens % kPageTokens != 0);
}

class PagedCache {
 public:
  // All memory is allocated here, zeroed (or poisoned). Error: sizes whose product does not fit the address
  // space.
  PagedCache(std::vector<size_t> slab_bytes_per_page, int pages, Poison poison = Poison::none);

  int slabs() const { return static_cast<int>(strides_.size()); }
  std::byte* slab(int i) { return memory_[i].as<std::byte>(); }
  size_t stride(int i) const { return strides_[i]; }  // bytes from page to page

  int pages() const { return static_cast<int>(owners_.size()); }
  int pages_free() const { return static_cast<int>(free_.size()); }
  int owners(int32_t page) const { return owners_[page]; }
  size_t bytes_per_page() const { return bytes_per_page_; }  // summed over the slabs
  size_t bytes() const { return bytes_per_page_ * owners_.size(); }

  // A free page with one owner; its content is undefined. Needs pages_free() > 0.
  int32_t take();
  int32_t take_copy(int32_t from);
  void share(int32_t page);    // one owner more
  void release(int32_t page);  // one owner less; free when none is left

 private:
  std::byte* at(int i, int32_t page) { return slab(i) + static_cast<size_t>(page) * strides_[i]; }

  std::vector<size_t> strides_;
  size_t bytes_per_page_ = 0;
  Poison poison_;
  std::vector<Buffer> memory_;  // one per slab
  std::vector<int32_t> owners_;
  std::vector<int32_t> free_;  // last in, first out: the page freed last is the likeliest to be in a cache
};

}  // namespace weft
