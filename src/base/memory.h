// Owned memory and what is left of it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/cgroup.h"

namespace weft {

// Zero-filled owned bytes, move-only. 64-byte aligned; from kHugeBytes on 2 MB aligned and advised to be huge
// pages, which are worth a fifth of DRAM bandwidth. Large buffers get their pages at first touch, from the
// NUMA node of the thread that touches them.
class Buffer {
 public:
  static constexpr size_t kAlign = 64;
  static constexpr size_t kHugeBytes = size_t{4} << 20;

  Buffer() = default;
  // `what` names the purpose in the error ("latent cache"). Error: the system refuses; it gives the number of
  // bytes.
  explicit Buffer(size_t bytes, const char* what = "buffer");
  ~Buffer() { release(); }
  Buffer(Buffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
  }

  uint8_t* data() const { return data_; }  // null when size() is 0
  size_t size() const { return size_; }
  template <class T>
  T* as(size_t byte_offset = 0) const {
    return reinterpret_cast<T*>(data_ + byte_offset);
  }

 private:
  void release() noexcept;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

size_t peak_rss();  // bytes, the largest resident size of this process so far

// Bytes that can be used now: the smaller of the system's MemAvailable and what the cgroup leaves. 0 =
// unknown.
size_t available_memory(const ReadText& read = read_text);

}  // namespace weft
