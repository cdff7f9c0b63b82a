// A replayed step takes no memory from anybody: malloc, new (which is malloc here) and mmap are counted.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "engine/model_rig.h"

namespace {

std::atomic<bool> counting{false};
std::atomic<int> taken{0};
void count() {
  if (counting.load(std::memory_order_relaxed)) taken.fetch_add(1);
}

}  // namespace

// The C library's own, by the names it exports for this purpose.
extern "C" {
void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t n, size_t bytes);
void* __libc_realloc(void* old, size_t bytes);
void* __libc_memalign(size_t align, size_t bytes);

void* malloc(size_t bytes) {
  count();
  return __libc_malloc(bytes);
}
void* calloc(size_t n, size_t bytes) {
  count();
  return __libc_calloc(n, bytes);
}
void* realloc(void* old, size_t bytes) {
  count();
  return __libc_realloc(old, bytes);
}
void* aligned_alloc(size_t align, size_t bytes) {
  count();
  return __libc_memalign(align, bytes);
}
int posix_memalign(void** out, size_t align, size_t bytes) {
  count();
  *out = __libc_memalign(align, bytes);
  return *out ? 0 : ENOMEM;
}
void* mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
  count();
  using Mmap = void* (*)(void*, size_t, int, int, int, off_t);
  static const Mmap system = reinterpret_cast<Mmap>(dlsym(RTLD_NEXT, "mmap"));
  return system(at, bytes, protection, flags, file, offset);
}
}

namespace weft {
namespace {

using test::Ids;
using test::Rig;
using test::RigOptions;

class Replay : public ::testing::TestWithParam<std::tuple<std::string, ExecMode>> {};

TEST_P(Replay, TakesNoMemory) {
  const auto& [name, exec] = GetParam();
  const std::string folder = test::tiny_folder(name);
  const Ids ids = test::golden_ids(folder, name.starts_with("kimi_k3") ? "n200.ids" : "len200.ids");
  RigOptions options;
  options.threads = 2;
  options.exec = exec;
  Rig rig(folder, *test::usable_tables(false).back(), options);
  const auto run = [&](bool counted) {
    Sequence a = rig.create(), b = rig.create();
    const auto steps = [&](Sequence& first, Sequence& second) {
      // Prompts, then one sequence alone and two together in turn: the batch grows and shrinks.
      rig.step({{&first, std::span(ids).first(64), nullptr}}, [](StepHeader&) {});
      for (size_t i = 0; i < 8; ++i) {
        const std::span<const int32_t> next = std::span(ids).subspan(64 + i, 1);
        std::vector<Rig::Piece> pieces = {{&first, next, nullptr}};
        if (i % 3 == 1) pieces.push_back({&second, next, nullptr});
        rig.step(pieces, [&](StepHeader&) { counting = counted; });
        counting = false;
      }
    };
    steps(a, b);
  };
  run(false);  // captures every kind of step
  taken = 0;
  run(true);
  EXPECT_EQ(taken.load(), 0);
  // and the hook does see what is taken
  counting = true;
  std::vector<int>(1000).swap(*std::make_unique<std::vector<int>>());
  counting = false;
  EXPECT_GT(taken.load(), 0);
}

INSTANTIATE_TEST_SUITE_P(
    Folders, Replay,
    ::testing::Combine(::testing::Values("kimi_linear-tiny", "kimi_k3-tiny-mxfp4", "kimi_k31-tiny",
                                         "glm5_next-tiny", "deepseek_v32-tiny", "glm_moe_dsa-tiny"),
                       ::testing::Values(ExecMode::ops, ExecMode::streams, ExecMode::super)),
    [](const auto& info) {
      std::string name = std::get<0>(info.param) + "_" + exec_name(std::get<1>(info.param));
      std::replace(name.begin(), name.end(), '-', '_');
      return name;
    });

}  // namespace
}  // namespace weft
