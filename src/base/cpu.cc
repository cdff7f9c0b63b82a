#include "base/cpu.h"

#include <errno.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <hwloc.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/cgroup.h"
#include "base/check.h"

namespace weft {
namespace {

constexpr uint64_t kYmmState = 0x6, kZmmState = 0xE0, kTileState = 0x60000;
constexpr uint32_t kTileBits = 1u << 24;

bool all(uint64_t value, uint64_t bits) {
  return (value & bits) == bits;
}

// Collects what is missing, in the order it was asked for.
class Requirements {
 public:
  bool need(bool there, const char* what) {
    if (!there) join(missing_, what);
    return there;
  }
  bool need_bit(uint32_t word, int bit, const char* name) {
    if (word >> bit & 1) return true;
    join(cpuid_, name);
    return false;
  }
  bool met() const { return missing_.empty() && cpuid_.empty(); }
  std::string text() const {
    if (cpuid_.empty()) return missing_;
    return fmt::format("the CPU has no {}{}{}", cpuid_, missing_.empty() ? "" : "; ", missing_);
  }

 private:
  static void join(std::string& list, const char* item) {
    if (!list.empty()) list.append(", ");
    list.append(item);
  }
  std::string missing_, cpuid_;
};

std::string permission_text(int error) {
  // What sandboxes and old kernels answer, so these two deserve a hint.
  if (error == EPERM) return "the kernel denied the AMX tile permission (EPERM: a seccomp filter?)";
  if (error == ENOSYS)
    return "the kernel does not know the AMX tile permission (ENOSYS: a seccomp filter or an old kernel)";
  return fmt::format("the kernel denied the AMX tile permission (errno {})", error);
}

}  // namespace

CpuFeatures decide_features(const CpuProbe& p) {
  CpuFeatures f;
  Requirements avx2;
  avx2.need_bit(p.leaf1_ecx, 28, "AVX");
  avx2.need_bit(p.leaf7_ebx, 5, "AVX2");
  avx2.need_bit(p.leaf1_ecx, 12, "FMA");
  avx2.need_bit(p.leaf1_ecx, 29, "F16C");
  avx2.need_bit(p.leaf7_ebx, 3, "BMI1");
  avx2.need_bit(p.leaf7_ebx, 8, "BMI2");
  avx2.need(all(p.xcr0, kYmmState), "the operating system has not enabled the YMM registers");
  f.avx2 = avx2.met();
  f.no_avx2 = avx2.text();

  Requirements avx512 = avx2;
  avx512.need_bit(p.leaf7_ebx, 16, "AVX512F");
  avx512.need_bit(p.leaf7_ebx, 30, "AVX512BW");
  avx512.need_bit(p.leaf7_ebx, 17, "AVX512DQ");
  avx512.need_bit(p.leaf7_ebx, 31, "AVX512VL");
  avx512.need_bit(p.leaf7_ebx, 28, "AVX512CD");
  avx512.need(all(p.xcr0, kZmmState), "the operating system has not enabled the ZMM registers");
  f.avx512 = avx512.met();
  bool bf16 = avx512.need_bit(p.leaf7_1_eax, 5, "AVX512_BF16");
  bool vnni = avx512.need_bit(p.leaf7_ecx, 11, "AVX512_VNNI");
  bool vbmi = avx512.need_bit(p.leaf7_ecx, 1, "AVX512_VBMI");
  bool vbmi2 = avx512.need_bit(p.leaf7_ecx, 6, "AVX512_VBMI2");
  f.avx512_bf16 = f.avx512 && bf16;
  f.avx512_vnni = f.avx512 && vnni;
  f.avx512_vbmi = f.avx512 && vbmi;
  f.avx512_vbmi2 = f.avx512 && vbmi2;
  f.no_avx512 = avx512.text();

  Requirements amx = avx512;
  bool tile = amx.need_bit(p.leaf7_edx, 24, "AMX_TILE");
  bool tile_bf16 = amx.need_bit(p.leaf7_edx, 22, "AMX_BF16");
  bool tile_int8 = amx.need_bit(p.leaf7_edx, 25, "AMX_INT8");
  bool enabled = amx.need(all(p.xcr0, kTileState), "the operating system has not enabled the AMX tiles");
  bool asked = tile && enabled;
  if (asked && p.tile_permission != 0) amx.need(false, permission_text(p.tile_permission).c_str());
  f.amx_tile = asked && p.tile_permission == 0;
  f.amx_bf16 = f.amx_tile && tile_bf16;
  f.amx_int8 = f.amx_tile && tile_int8;
  f.no_amx = amx.text();
  return f;
}

CpuProbe probe_cpu() {
  CpuProbe p;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return p;
  p.leaf1_ecx = c;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
    p.leaf7_ebx = b, p.leaf7_ecx = c, p.leaf7_edx = d;
    if (a >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) p.leaf7_1_eax = a;
  }
  if (p.leaf1_ecx >> 27 & 1) {  // OSXSAVE: without it XGETBV itself is an illegal instruction
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    p.xcr0 = static_cast<uint64_t>(high) << 32 | low;
  }
  if ((p.leaf7_edx & kTileBits) && all(p.xcr0, kTileState)) {
    // Threads made afterwards inherit the grant, so once, before any team starts, is enough.
    constexpr int kArchReqXcompPerm = 0x1023, kTileDataFeature = 18;
    static const int answer = syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileDataFeature) == 0 ? 0 : errno;
    p.tile_permission = answer;
  }
#endif
  return p;
}

const CpuFeatures& cpu_features() {
  static const CpuFeatures features = decide_features(probe_cpu());
  return features;
}

std::string cpu_name() {
  std::string name;
#if defined(__x86_64__)
  for (unsigned leaf = 0x80000002u; leaf <= 0x80000004u; ++leaf) {
    unsigned r[4];
    if (!__get_cpuid(leaf, &r[0], &r[1], &r[2], &r[3])) break;
    name.append(reinterpret_cast<const char*>(r), sizeof r);
  }
#endif
  name.resize(std::min(name.find('\0'), name.size()));
  size_t first = name.find_first_not_of(' ');
  if (first == name.npos) return "unknown CPU";
  return name.substr(first, name.find_last_not_of(' ') - first + 1);
}

std::vector<int> allowed_cpus() {
  constexpr int kMost = 8192;  // a plain cpu_set_t ends at 1024 and the call then fails on larger machines
  std::vector<int> cpus;
  cpu_set_t* set = CPU_ALLOC(kMost);
  size_t bytes = CPU_ALLOC_SIZE(kMost);
  if (set != nullptr && sched_getaffinity(0, bytes, set) == 0) {
    for (int cpu = 0; cpu < kMost; ++cpu) {
      if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
  }
  if (set != nullptr) CPU_FREE(set);
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

namespace {

struct Hwloc {
  hwloc_topology_t topology = nullptr;
  hwloc_bitmap_t set = hwloc_bitmap_alloc();
  Hwloc() {
    if (hwloc_topology_init(&topology) != 0 || hwloc_topology_load(topology) != 0)
      fail("hwloc cannot read this machine's topology: {}", std::strerror(errno));
  }
  ~Hwloc() {
    hwloc_bitmap_free(set);
    hwloc_topology_destroy(topology);
  }
};

}  // namespace

void use_cpus(const std::string& list) {
  Hwloc hw;
  const bool characters = list.find_first_not_of("0123456789,-") == list.npos;
  if (!characters || hwloc_bitmap_list_sscanf(hw.set, list.c_str()) != 0 || hwloc_bitmap_iszero(hw.set) ||
      hwloc_bitmap_weight(hw.set) < 0)
    usage("--cpu-list {}: expected CPU numbers and ranges, as in 0-3,8", list);
  const std::vector<int> allowed = allowed_cpus();
  for (int cpu = hwloc_bitmap_first(hw.set); cpu >= 0; cpu = hwloc_bitmap_next(hw.set, cpu))
    if (std::find(allowed.begin(), allowed.end(), cpu) == allowed.end())
      usage("--cpu-list {}: CPU {} is not among those this process may use ({})", list, cpu,
            fmt::join(allowed, ","));
  if (hwloc_set_cpubind(hw.topology, hw.set, HWLOC_CPUBIND_THREAD) != 0)
    fail("--cpu-list {}: the system refuses: {}", list, std::strerror(errno));
}

std::string place_memory(Numa numa) {
  Hwloc hw;
  if (hwloc_get_nbobjs_by_type(hw.topology, HWLOC_OBJ_NUMANODE) < 2)
    return "--numa: this machine has one NUMA node, all memory is equally near";
  const hwloc_membind_policy_t policy =
      numa == Numa::interleave ? HWLOC_MEMBIND_INTERLEAVE : HWLOC_MEMBIND_FIRSTTOUCH;
  const hwloc_const_nodeset_t all = hwloc_topology_get_topology_nodeset(hw.topology);
  if (hwloc_set_membind(hw.topology, all, policy, HWLOC_MEMBIND_THREAD | HWLOC_MEMBIND_BYNODESET) == 0)
    return "";
  return fmt::format("--numa: the system refuses: {}", std::strerror(errno));
}

Topology topology() {
  Topology t;
  t.cpus = static_cast<int>(allowed_cpus().size());
  const Hwloc hw;
  t.numa_nodes = std::max(1, hwloc_get_nbobjs_by_type(hw.topology, HWLOC_OBJ_NUMANODE));
  const auto size = [&](hwloc_obj_type_t type) -> size_t {
    const hwloc_obj_t cache = hwloc_get_obj_by_type(hw.topology, type, 0);
    return cache != nullptr ? cache->attr->cache.size : 0;
  };
  t.l1d = size(HWLOC_OBJ_L1CACHE);
  t.l2 = size(HWLOC_OBJ_L2CACHE);
  t.l3 = size(HWLOC_OBJ_L3CACHE);
  return t;
}

ThreadChoice choose_threads(int cpus, std::optional<double> quota) {
  int threads = std::max(1, cpus);
  std::string reason = fmt::format("{} CPU{} in the affinity mask", threads, threads == 1 ? "" : "s");
  if (quota) {
    if (*quota < threads) threads = std::max(1, static_cast<int>(std::floor(*quota)));
    reason += fmt::format(", cgroup quota {:.4g} CPUs", *quota);
  } else {
    reason += ", no cgroup quota";
  }
  return {threads, fmt::format("{} thread{}: {}", threads, threads == 1 ? "" : "s", reason)};
}

ThreadChoice default_threads() {
  return choose_threads(static_cast<int>(allowed_cpus().size()), cpu_quota());
}

}  // namespace weft
