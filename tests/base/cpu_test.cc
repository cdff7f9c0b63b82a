#include "base/cpu.h"

#include <errno.h>
#include <gtest/gtest.h>
#include <sched.h>

#include <map>

#include "base/cgroup.h"
#include "base/check.h"

namespace weft {
namespace {

constexpr uint64_t kX87Sse = 0x3, kYmm = 0x4, kZmm = 0xE0, kTiles = 0x60000;

// A Sapphire Rapids that has everything, by the manual's bit numbers.
CpuProbe full() {
  CpuProbe p;
  p.leaf1_ecx = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
  p.leaf7_ebx = 1u << 3 | 1u << 5 | 1u << 8 | 1u << 16 | 1u << 17 | 1u << 28 | 1u << 30 | 1u << 31;
  p.leaf7_ecx = 1u << 1 | 1u << 6 | 1u << 11;
  p.leaf7_edx = 1u << 22 | 1u << 24 | 1u << 25;
  p.leaf7_1_eax = 1u << 5;
  p.xcr0 = kX87Sse | kYmm | kZmm | kTiles;
  return p;
}

bool contains(const std::string& text, const char* part) {
  return text.find(part) != text.npos;
}

TEST(CpuFeatures, EverythingThere) {
  CpuFeatures f = decide_features(full());
  EXPECT_TRUE(f.avx2 && f.avx512 && f.avx512_bf16 && f.avx512_vnni && f.avx512_vbmi && f.avx512_vbmi2);
  EXPECT_TRUE(f.amx_tile && f.amx_bf16 && f.amx_int8);
  EXPECT_EQ(f.no_avx2 + f.no_avx512 + f.no_amx, "");
}

TEST(CpuFeatures, RegistersNotEnabledByTheSystem) {
  CpuProbe p = full();
  p.xcr0 = kX87Sse;
  CpuFeatures f = decide_features(p);
  EXPECT_FALSE(f.avx2 || f.avx512 || f.avx512_vbmi || f.amx_tile);
  EXPECT_TRUE(contains(f.no_avx2, "YMM")) << f.no_avx2;
  EXPECT_TRUE(contains(f.no_amx, "YMM") && contains(f.no_amx, "ZMM") && contains(f.no_amx, "tiles"))
      << f.no_amx;

  p.xcr0 = kX87Sse | kYmm;
  f = decide_features(p);
  EXPECT_TRUE(f.avx2);
  EXPECT_EQ(f.no_avx2, "");
  EXPECT_FALSE(f.avx512 || f.avx512_bf16 || f.avx512_vnni || f.avx512_vbmi || f.avx512_vbmi2);
  EXPECT_TRUE(contains(f.no_avx512, "ZMM")) << f.no_avx512;

  // Each of the three ZMM bits alone is needed (opmask, upper halves, upper sixteen).
  for (uint64_t bit : {0x20, 0x40, 0x80}) {
    p.xcr0 = (kX87Sse | kYmm | kZmm) & ~bit;
    EXPECT_FALSE(decide_features(p).avx512) << bit;
  }

  p.xcr0 = kX87Sse | kYmm | kZmm;
  f = decide_features(p);
  EXPECT_TRUE(f.avx512_bf16);
  EXPECT_EQ(f.no_avx512, "");
  EXPECT_FALSE(f.amx_tile || f.amx_bf16 || f.amx_int8);
  EXPECT_TRUE(contains(f.no_amx, "tiles")) << f.no_amx;
  for (uint64_t bit : {0x20000, 0x40000}) {
    p.xcr0 = (kX87Sse | kYmm | kZmm | kTiles) & ~bit;
    EXPECT_FALSE(decide_features(p).amx_tile) << bit;
  }
}

TEST(CpuFeatures, TilePermissionDenied) {
  CpuProbe p = full();
  for (auto [error, name] : {std::pair{EPERM, "EPERM"}, {ENOSYS, "ENOSYS"}, {EINVAL, "errno 22"}}) {
    p.tile_permission = error;
    CpuFeatures f = decide_features(p);
    EXPECT_FALSE(f.amx_tile || f.amx_bf16 || f.amx_int8);
    EXPECT_TRUE(f.avx512_bf16);
    EXPECT_TRUE(contains(f.no_amx, name)) << f.no_amx;
    EXPECT_FALSE(contains(f.no_amx, "CPU has no")) << f.no_amx;
  }
}

TEST(CpuFeatures, Avx512WithoutExtensions) {
  struct Case {
    uint32_t CpuProbe::*word;
    int bit;
    const char* name;
    bool CpuFeatures::*feature;
  };
  for (Case c : {Case{&CpuProbe::leaf7_1_eax, 5, "AVX512_BF16", &CpuFeatures::avx512_bf16},
                 Case{&CpuProbe::leaf7_ecx, 1, "AVX512_VBMI", &CpuFeatures::avx512_vbmi},
                 Case{&CpuProbe::leaf7_ecx, 6, "AVX512_VBMI2", &CpuFeatures::avx512_vbmi2},
                 Case{&CpuProbe::leaf7_ecx, 11, "AVX512_VNNI", &CpuFeatures::avx512_vnni}}) {
    CpuProbe p = full();
    p.*c.word &= ~(1u << c.bit);
    CpuFeatures f = decide_features(p);
    EXPECT_TRUE(f.avx512) << c.name;
    EXPECT_FALSE(f.*c.feature) << c.name;
    EXPECT_EQ(f.no_avx512, std::string("the CPU has no ") + c.name);
    EXPECT_EQ(f.no_amx, f.no_avx512);  // the tiles are there, the tier below is not
    EXPECT_EQ(f.no_avx2, "");
  }
}

TEST(CpuFeatures, EveryBaseBitIsNeeded) {
  for (int bit : {3, 5, 8}) {
    CpuProbe p = full();
    p.leaf7_ebx &= ~(1u << bit);
    EXPECT_FALSE(decide_features(p).avx2) << bit;
    EXPECT_FALSE(decide_features(p).avx512) << bit;
  }
  for (int bit : {12, 28, 29}) {
    CpuProbe p = full();
    p.leaf1_ecx &= ~(1u << bit);
    EXPECT_FALSE(decide_features(p).avx2) << bit;
  }
  for (int bit : {16, 17, 28, 30, 31}) {
    CpuProbe p = full();
    p.leaf7_ebx &= ~(1u << bit);
    EXPECT_TRUE(decide_features(p).avx2) << bit;
    EXPECT_FALSE(decide_features(p).avx512) << bit;
  }
  CpuFeatures nothing = decide_features({});
  EXPECT_FALSE(nothing.avx2 || nothing.avx512 || nothing.amx_tile);
}

// GCC's own run-time check is an independent reader of CPUID and XCR0.
TEST(CpuFeatures, ThisMachineAgreesWithTheCompilerRuntime) {
#if defined(__x86_64__)
  const CpuFeatures& f = cpu_features();
  EXPECT_EQ(f.avx2, bool(__builtin_cpu_supports("avx2")) && __builtin_cpu_supports("fma"));
  EXPECT_EQ(f.avx512, __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512cd"));
  EXPECT_EQ(f.avx512_vbmi, bool(__builtin_cpu_supports("avx512vbmi")));
  EXPECT_EQ(f.avx512_vnni, bool(__builtin_cpu_supports("avx512vnni")));
  EXPECT_EQ(f.avx512_bf16, bool(__builtin_cpu_supports("avx512bf16")));
#endif
  EXPECT_FALSE(cpu_name().empty());
}

TEST(Threads, Quota) {
  EXPECT_EQ(choose_threads(2, 1.0).threads, 1);
  EXPECT_EQ(choose_threads(2, 1.5).threads, 1);
  EXPECT_EQ(choose_threads(8, 2.99).threads, 2);
  EXPECT_EQ(choose_threads(2, {}).threads, 2);
  EXPECT_EQ(choose_threads(2, 64.0).threads, 2);
  EXPECT_EQ(choose_threads(4, 0.25).threads, 1);
  EXPECT_EQ(choose_threads(0, {}).threads, 1);
  EXPECT_EQ(choose_threads(8, 2.5).reason, "2 threads: 8 CPUs in the affinity mask, cgroup quota 2.5 CPUs");
  EXPECT_EQ(choose_threads(1, {}).reason, "1 thread: 1 CPU in the affinity mask, no cgroup quota");
}

TEST(Threads, QuotaText) {
  EXPECT_EQ(parse_cpu_max("150000 100000\n"), 1.5);
  EXPECT_EQ(parse_cpu_max("100000 100000"), 1.0);
  EXPECT_EQ(parse_cpu_max("50000"), 0.5);
  for (const char* none :
       {"max 100000\n", "max", "0 0", "0 100000", "100000 0", "-1 100000", "", " \n", "garbage", "1e5 100000",
        "100000 100000 1", "99999999999999999999 100000", "100000x 100000"}) {
    EXPECT_EQ(parse_cpu_max(none), std::nullopt) << none;
  }
  EXPECT_EQ(parse_cpu_cfs("250000\n", "100000\n"), 2.5);
  EXPECT_EQ(parse_cpu_cfs("-1\n", "100000\n"), std::nullopt);
  EXPECT_EQ(parse_cpu_cfs("", ""), std::nullopt);
}

using Files = std::map<std::string, std::string>;

ReadText reader(Files files) {
  return [files = std::move(files)](const std::string& path) -> std::optional<std::string> {
    auto found = files.find(path);
    if (found == files.end()) return {};
    return found->second;
  };
}

TEST(Threads, QuotaFiles) {
  EXPECT_EQ(cpu_quota(reader({})), std::nullopt);
  // v2: the tightest of the group and its parents; the container's root.
  Files v2 = {{"/proc/self/cgroup", "0::/user.slice/run.scope\n"},
              {"/sys/fs/cgroup/user.slice/run.scope/cpu.max", "max 100000\n"},
              {"/sys/fs/cgroup/user.slice/cpu.max", "300000 100000\n"}};
  EXPECT_EQ(cpu_quota(reader(v2)), 3.0);
  v2["/sys/fs/cgroup/user.slice/run.scope/cpu.max"] = "150000 100000\n";
  EXPECT_EQ(cpu_quota(reader(v2)), 1.5);
  EXPECT_EQ(
      cpu_quota(reader({{"/proc/self/cgroup", "0::/\n"}, {"/sys/fs/cgroup/cpu.max", "200000 100000\n"}})),
      2.0);
  // v1, joined controllers, a host path that the container's mount does not have.
  Files v1 = {{"/proc/self/cgroup", "4:memory:/m\n3:cpu,cpuacct:/docker/abc\n0::/\n"},
              {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "250000\n"},
              {"/sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"}};
  EXPECT_EQ(cpu_quota(reader(v1)), 2.5);
  EXPECT_EQ(cpu_quota(reader({{"/proc/self/cgroup", "no colons\n::\n:"}})), std::nullopt);
}

TEST(Memory, GroupFiles) {
  Files v2 = {{"/proc/self/cgroup", "0::/a\n"},
              {"/sys/fs/cgroup/a/memory.max", "1000\n"},
              {"/sys/fs/cgroup/a/memory.current", "700\n"},
              {"/sys/fs/cgroup/a/memory.stat", "anon 5\ninactive_file 200\nactive_file 9\n"}};
  EXPECT_EQ(cgroup_memory_left(reader(v2)), 500u);
  v2["/sys/fs/cgroup/a/memory.max"] = "max\n";
  EXPECT_EQ(cgroup_memory_left(reader(v2)), std::nullopt);
  v2["/sys/fs/cgroup/a/memory.max"] = "100\n";
  EXPECT_EQ(cgroup_memory_left(reader(v2)), 0u);
  Files v1 = {{"/proc/self/cgroup", "4:memory:/m\n"},
              {"/sys/fs/cgroup/memory/m/memory.limit_in_bytes", "5000\n"},
              {"/sys/fs/cgroup/memory/m/memory.usage_in_bytes", "1000\n"},
              {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"},
              {"/sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n"}};
  EXPECT_EQ(cgroup_memory_left(reader(v1)), 4000u);
}

TEST(Topology, Plausible) {
  Topology t = topology();
  EXPECT_EQ(t.cpus, int(allowed_cpus().size()));
  EXPECT_GE(t.numa_nodes, 1);
  EXPECT_TRUE(t.l1d == 0 || t.l2 == 0 || t.l1d < t.l2);
}

TEST(Topology, FollowsTheAffinityMask) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  int last = allowed_cpus().back();
  CPU_ZERO(&one);
  CPU_SET(last, &one);
  ASSERT_EQ(sched_setaffinity(0, sizeof one, &one), 0);
  EXPECT_EQ(allowed_cpus(), std::vector<int>{last});
  EXPECT_EQ(default_threads().threads, 1);
  sched_setaffinity(0, sizeof before, &before);
}

TEST(Topology, CpuLists) {
  cpu_set_t before;
  ASSERT_EQ(sched_getaffinity(0, sizeof before, &before), 0);
  const std::vector<int> allowed = allowed_cpus();
  use_cpus(std::to_string(allowed.back()));
  EXPECT_EQ(allowed_cpus(), std::vector<int>{allowed.back()});
  EXPECT_EQ(default_threads().threads, 1);
  for (const std::string bad : {"", "x", "0-", "1;2", "99999"})
    EXPECT_THROW(use_cpus(bad), UsageError) << bad;
  if (allowed.size() > 1) {
    EXPECT_THROW(use_cpus(std::to_string(allowed.front())), UsageError);
  }
  EXPECT_EQ(allowed_cpus(), std::vector<int>{allowed.back()});  // a refused list changes nothing
  sched_setaffinity(0, sizeof before, &before);
}

TEST(Topology, MemoryPolicySaysWhatItCannotDo) {
  const std::string note = place_memory(Numa::interleave);
  EXPECT_EQ(note.empty(), topology().numa_nodes > 1) << note;
  place_memory(Numa::local);
}

}  // namespace
}  // namespace weft
