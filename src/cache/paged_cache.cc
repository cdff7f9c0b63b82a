#include "cache/paged_cache.h"

#include <limits>
#include <utility>

#include "base/check.h"

namespace weft {

PagedCache::PagedCache(std::vector<size_t> slab_bytes_per_page, int pages, Poison poison)
    : strides_(std::move(slab_bytes_per_page)), poison_(poison) {
  WEFT_CHECK(pages > 0, "{} pages", pages);
  for (size_t i = 0; i < strides_.size(); ++i) {
    WEFT_CHECK(strides_[i] > 0, "slab {} has no bytes", i);
    if (strides_[i] > std::numeric_limits<ptrdiff_t>::max() / static_cast<size_t>(pages) - bytes_per_page_)
      fail("cache of {} pages is too large: slab {} takes {} bytes a page", pages, i, strides_[i]);
    bytes_per_page_ += strides_[i];
  }
  for (size_t stride : strides_) {
    Buffer& slab = memory_.emplace_back(stride * static_cast<size_t>(pages), "token cache");
    poison_fill(poison_, slab.as<std::byte>(), slab.size());
  }
  owners_.assign(pages, 0);
  free_.reserve(pages);  // release() never allocates
  for (int32_t page = pages - 1; page >= 0; --page) free_.push_back(page);
}

int32_t PagedCache::take() {
  WEFT_CHECK(!free_.empty(), "no free page: ask pages_free() first");
  const int32_t page = free_.back();
  free_.pop_back();
  for (int i = 0; i < slabs(); ++i)
    WEFT_CHECK(poison_intact(poison_, at(i, page), strides_[i]), "page {} of slab {} was written while free",
               page, i);
  owners_[page] = 1;
  return page;
}

int32_t PagedCache::take_copy(int32_t from) {
  WEFT_CHECK(owners_.at(from) > 0, "page {} is free", from);
  const int32_t page = take();
  for (int i = 0; i < slabs(); ++i) std::memcpy(at(i, page), at(i, from), strides_[i]);
  return page;
}

void PagedCache::share(int32_t page) {
  WEFT_CHECK(owners_.at(page) > 0, "page {} is free", page);
  ++owners_[page];
}

void PagedCache::release(int32_t page) {
  WEFT_CHECK(owners_.at(page) > 0, "page {} released twice", page);
  if (--owners_[page] > 0) return;
  for (int i = 0; i < slabs(); ++i) poison_fill(poison_, at(i, page), strides_[i]);
  free_.push_back(page);
}

}  // namespace weft
