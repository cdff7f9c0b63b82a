// What this machine can run: instruction sets, cores, caches.
//
// An instruction set counts only if three parties agree: CPUID names it, the operating system saves its
// registers (XCR0; virtual machines and containers do differ), and, for AMX, the kernel gave this process the
// tile permission. Model numbers and environment are never asked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace weft {

// The raw answers, so that tests can invent machines. A leaf the CPU does not have reads as zero.
struct CpuProbe {
  uint32_t leaf1_ecx = 0;
  uint32_t leaf7_ebx = 0, leaf7_ecx = 0, leaf7_edx = 0;
  uint32_t leaf7_1_eax = 0;
  uint64_t xcr0 = 0;  // 0 when the OS has not set OSXSAVE
  int tile_permission =
      0;  // errno of the AMX request, 0 = granted; asked only where CPUID and XCR0 have tiles
};

// Usable now, each by itself.
struct CpuFeatures {
  bool avx2 = false;    // AVX2, FMA, F16C, BMI1, BMI2
  bool avx512 = false;  // F, BW, DQ, VL, CD; implies avx2
  bool avx512_bf16 = false, avx512_vnni = false, avx512_vbmi = false, avx512_vbmi2 = false;
  bool amx_tile = false, amx_bf16 = false, amx_int8 = false;

  // The three kernel tiers: empty when usable, else one line that names everything missing.
  std::string no_avx2;
  std::string no_avx512;  // avx512 and all four extensions above
  std::string no_amx;     // the AVX-512 tier, tiles, bf16 and int8 products, permission
};

CpuFeatures decide_features(const CpuProbe& probe);  // pure
CpuProbe probe_cpu();                                // asks for the tile permission once per process
const CpuFeatures& cpu_features();                   // of this machine, decided once
std::string cpu_name();                              // the brand string, "unknown CPU" without one

// CPUs this process may run on (affinity mask), ascending; never empty.
std::vector<int> allowed_cpus();

// Keeps this thread, and those it starts from now on, to some of the allowed CPUs: "0-3,8". error (usage): not such a
// list; a CPU that is not allowed, with those that are.
void use_cpus(const std::string& list);

// Where memory that is touched from now on comes from. Weights are read by every thread, so on machines with several
// NUMA nodes interleaved pages give each thread the bandwidth of all of them; local ones come from the node of the
// thread that touches them first. Returns "", or why nothing was changed (one node; the system refuses).
enum class Numa { local, interleave };
std::string place_memory(Numa numa);

struct Topology {
  int cpus = 1;                    // in the affinity mask
  int numa_nodes = 1;              // of the machine
  size_t l1d = 0, l2 = 0, l3 = 0;  // bytes of one cache instance, 0 = unknown
};
Topology topology();

struct ThreadChoice {
  int threads;
  std::string reason;  // for the log: "2 threads: 8 CPUs in the affinity mask, cgroup quota 2.5 CPUs"
};
ThreadChoice choose_threads(int cpus, std::optional<double> quota);  // min(cpus, floor(quota)), at least 1
ThreadChoice default_threads();

}  // namespace weft
