// Where kernels are timed: the ISA's table, a team, random operands, and the ceilings of the machine.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/memory.h"
#include "base/team.h"
#include "kernels/work.h"

namespace weft {

// Bytes that a cold case rotates over: beyond any cache, a share of an L3 of hundreds of MB included.
inline constexpr double kColdBytes = 1.2e9;

// A rate measured several times: its median, and (largest - smallest) / median.
struct Rate {
  double value = 0, spread = 0;
};

// One thing a machine can do at most so much of, 1/s: operations in registers, or bytes of a working set.
struct Ceiling {
  const char* name;  // "product", "int8", "fma", "l2 read", ... "dram write"
  Probe kind;
  size_t bytes = 0;  // working set of all threads; 0: registers
};

// Measures ceilings with a team of its own.
class Prober {
 public:
  Prober(const KernelTable& kernels, int threads);
  std::vector<Ceiling> ceilings() const;  // those this ISA has
  double once(const Ceiling& ceiling);    // about 10 ms
  Rate rate(const Ceiling& ceiling);      // seven times
  Rate fork_join();                       // runs of one empty task per thread
  int threads() const { return team_.threads(); }

 private:
  double timed(const Ceiling& ceiling, int rounds);
  const KernelTable& kernels_;
  Team team_;
  Buffer values_, memory_;
  size_t window_ = 0;  // of memory_, moves on: a piece of it is not read again before 1 GB of others
  std::vector<float> sink_;
  std::map<std::string, int> rounds_;
};

// Which register ceiling a case's operations count against.
enum class Peak { product, int8, fma };

// What one timed case needs, alive until it has been timed. Memory is random and reused by no other case.
class Lab {
 public:
  Lab(const KernelTable& kernels, int threads, bool cold, bool compare = false);

  const KernelTable& kernels;
  const bool cold, compare;  // compare: others are wanted
  int threads() const { return team_.threads(); }
  Team& team() { return team_; }

  // Copies to rotate over when one run reads `bytes` of weights or caches: 1 when hot.
  int copies(double bytes) const;

  // Zero-filled; the first overload is operand rows ([rows, ld], rows padded to 16).
  std::byte* room(size_t bytes);
  void* operand_room(int rows, int ld);
  float* f32_room(size_t count);
  int32_t* ints(const std::vector<int32_t>& values);
  // Random values in +-[1/8, 1/2): finite in every product, and no zeros, which flatter AMX by a fifth.
  void* operand(int rows, int ld);
  float* f32(size_t count);
  // `copies` weights behind one another (copy i at codes + i * code_bytes()), of random codes and sane
  // scales.
  PackedWeight weight(WeightFormat format, int n, int k, int copies = 1);

  // A step of `tokens` rows without sequences, or of sequences with pages: tables of one sequence follow each
  // other in memory order. The header may be changed (state_stride, logit_rows).
  struct Sequence {
    int position, length;  // of the first row; rows
  };
  StepHeader& rows(int tokens);
  StepHeader& sequences(const std::vector<Sequence>& sequences);
  int pages() const { return pages_; }  // of the last sequences()

  // Runs a kernel as the executor does.
  template <class Args>
  void launch(KernelFn<Args> kernel, const Args& args, const StepHeader& step) {
    const int tasks = task_count(units(args, step), cost(args, step), threads());
    if (tasks)
      team_.run(tasks, [&](int task, int thread) {
        kernel(args, {&step, task, tasks, scratch_.as<std::byte>(kScratchBytes * thread)});
      });
  }

 private:
  void fill_f32(void* at, size_t count);
  void fill_bf16(void* at, size_t count);
  uint64_t bits();
  Team team_;
  Buffer scratch_;
  std::vector<Buffer> buffers_;
  struct Step {
    StepHeader header;
    std::vector<int32_t> zeros, position, span_of, table;
    std::vector<Span> span;
  };
  std::deque<Step> steps_;
  int pages_ = 0;
  uint64_t state_ = 0x9E3779B97F4A7C15u;
};

// A case, built: `run(copy)` is what is timed, for copies 0, 1, ... in turn.
struct Timed {
  std::function<void(int copy)> run;
  int copies = 1;
  Cost cost;  // of one run
  Peak peak = Peak::product;
  // The same work done otherwise ("unfused", "oneDNN"), timed in turn with it under --compare.
  std::vector<std::pair<std::string, std::function<void(int copy)>>> others;
};

struct KernelCase {
  std::string kernel, name;
  std::function<Timed(Lab&)> make;
};

// The cases of each area, real sizes first. Adding a kernel to the bench is adding cases to one of these.
void add_gemm_cases(std::vector<KernelCase>& all);
void add_moe_cases(std::vector<KernelCase>& all);
void add_row_cases(std::vector<KernelCase>& all);
void add_dsa_cases(std::vector<KernelCase>& all);
void add_kda_cases(std::vector<KernelCase>& all);

}  // namespace weft
