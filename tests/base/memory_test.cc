#include "base/memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <type_traits>

#include "base/check.h"

namespace weft {
namespace {

constexpr size_t kMega = size_t{1} << 20;

static_assert(!std::is_copy_constructible_v<Buffer> && !std::is_copy_assignable_v<Buffer>);

TEST(Buffer, AlignedAndZeroOnceAndAgain) {
  for (int round = 0; round < 2;
       ++round) {  // the second time the allocator may hand back what the first one dirtied
    for (size_t bytes : {size_t{1}, size_t{63}, size_t{64}, size_t{4097}, Buffer::kHugeBytes - 1,
                         Buffer::kHugeBytes, Buffer::kHugeBytes + 1, 7 * kMega + 3}) {
      Buffer buffer(bytes);
      ASSERT_EQ(buffer.size(), bytes);
      size_t align = bytes >= Buffer::kHugeBytes ? 2 * kMega : Buffer::kAlign;
      ASSERT_EQ(reinterpret_cast<uintptr_t>(buffer.data()) % align, 0u) << bytes;
      ASSERT_TRUE(std::all_of(buffer.data(), buffer.data() + bytes, [](uint8_t b) { return b == 0; }))
          << bytes;
      std::fill_n(buffer.data(), bytes, 0xA5);
    }
  }
}

TEST(Buffer, MovesAndFreesOnce) {
  Buffer empty(0);
  EXPECT_EQ(empty.data(), nullptr);
  for (size_t bytes : {size_t{100}, 5 * kMega}) {
    Buffer a(bytes);
    a.as<float>(8)[0] = 1.5f;
    uint8_t* data = a.data();
    Buffer b(std::move(a));
    EXPECT_EQ(b.data(), data);
    EXPECT_EQ(a.data(), nullptr);
    EXPECT_EQ(a.size(), 0u);
    Buffer c(10);
    c = std::move(b);
    EXPECT_EQ(c.data(), data);
    EXPECT_EQ(c.size(), bytes);
    EXPECT_EQ(c.as<float>()[2], 1.5f);
  }
}

TEST(Buffer, LargeOnesAreGivenBack) {
  size_t before = available_memory();
  for (int i = 0; i < 200; ++i) {  // 200 GiB of address space if leaked, and 1.6 GiB of touched pages
    Buffer buffer(size_t{1} << 30);
    std::fill_n(buffer.data(), 8 * kMega, 1);
  }
  EXPECT_LT(peak_rss(), size_t{1} << 30);
  EXPECT_GT(before, 0u);
}

TEST(Buffer, RefusalNamesTheBytes) {
  for (size_t bytes : {size_t{1} << 60, ~size_t{0}, ~size_t{0} - 4 * kMega}) {
    try {
      Buffer buffer(bytes, "latent cache");
      FAIL() << bytes;
    } catch (const Error& error) {
      std::string message = error.what();
      EXPECT_NE(message.find(std::to_string(bytes)), message.npos) << message;
      EXPECT_NE(message.find("latent cache"), message.npos) << message;
    }
  }
}

TEST(Memory, PeakGrowsWithTouchedPages) {
  size_t before = peak_rss();
  EXPECT_GT(before, kMega);
  Buffer buffer(before + 64 * kMega);  // more than the process ever had, so that the peak must move
  std::fill_n(buffer.data(), buffer.size(), 1);
  EXPECT_GE(peak_rss(), before + 64 * kMega);
}

TEST(Memory, AvailableIsTheTighterOfSystemAndGroup) {
  using Files = std::map<std::string, std::string>;
  auto available = [](const Files& files) {
    return available_memory([&](const std::string& path) -> std::optional<std::string> {
      auto found = files.find(path);
      return found == files.end() ? std::nullopt : std::optional(found->second);
    });
  };
  Files files = {{"/proc/meminfo", "MemTotal:  9000 kB\nMemFree: 1 kB\nMemAvailable:    4000 kB\n"}};
  EXPECT_EQ(available(files), 4000u * 1024);
  files["/proc/self/cgroup"] = "0::/\n";
  files["/sys/fs/cgroup/memory.max"] = "3000000\n";
  files["/sys/fs/cgroup/memory.current"] = "1000000\n";
  EXPECT_EQ(available(files), 2000000u);
  files["/sys/fs/cgroup/memory.max"] = "3000000000\n";
  EXPECT_EQ(available(files), 4000u * 1024);
  EXPECT_EQ(available({}), 0u);
  EXPECT_GT(available_memory(), kMega);
}

}  // namespace
}  // namespace weft
