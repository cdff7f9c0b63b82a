#include "base/memory.h"

#include <errno.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>

#include "base/check.h"

namespace weft {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

constexpr size_t round_up(size_t bytes, size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}

// Maps one huge page too much and gives the ends back: mmap itself promises only 4 KB alignment.
uint8_t* map_huge(size_t bytes) {
  size_t length = round_up(bytes, kHugePage);
  void* got = mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  auto* begin = static_cast<uint8_t*>(got);
  size_t head = (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (head > 0) munmap(begin, head);
  if (head < kHugePage) munmap(begin + head + length, kHugePage - head);
  madvise(begin + head, length, MADV_HUGEPAGE);  // refused where the system has none: slower, not wrong
  return begin + head;
}

// The number of a "Name:   123 kB" line, in bytes; 0 when absent.
size_t kilobyte_line(const std::string& text, const char* name) {
  size_t at = text.find(name);
  return at == text.npos ? 0 : std::strtoull(text.c_str() + at + std::strlen(name), nullptr, 10) * 1024;
}

}  // namespace

Buffer::Buffer(size_t bytes, const char* what) {
  if (bytes == 0) return;
  if (bytes >= kHugeBytes) {
    if (bytes <= std::numeric_limits<size_t>::max() - 2 * kHugePage) data_ = map_huge(bytes);
  } else {
    data_ = static_cast<uint8_t*>(std::aligned_alloc(kAlign, round_up(bytes, kAlign)));
    if (data_ != nullptr) std::memset(data_, 0, bytes);
  }
  if (data_ == nullptr) {
    fail("the system refused {} bytes ({:.1f} GiB) for the {}; {:.1f} GiB are available", bytes,
         bytes / 0x1p30, what, available_memory() / 0x1p30);
  }
  size_ = bytes;
}

void Buffer::release() noexcept {
  if (data_ == nullptr) return;
  if (size_ >= kHugeBytes)
    munmap(data_, round_up(size_, kHugePage));
  else
    std::free(data_);
}

size_t peak_rss() {
  // Not getrusage: its maximum is inherited through exec and then tells of the parent.
  return kilobyte_line(read_text("/proc/self/status").value_or(""), "VmHWM:");
}

size_t available_memory(const ReadText& read) {
  size_t system = kilobyte_line(read("/proc/meminfo").value_or(""), "MemAvailable:");
  std::optional<uint64_t> group = cgroup_memory_left(read);
  if (!group) return system;
  return system == 0 ? *group : std::min<size_t>(system, *group);
}

}  // namespace weft
