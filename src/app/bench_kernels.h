// Speed of single kernels, as percent of what the machine could do.
#pragma once

#include <string>
#include <vector>

#include "app/bench_lab.h"

namespace weft {

struct KernelBenchOptions {
  std::string isa;
  std::vector<int> threads;          // empty: 1 and all
  std::vector<std::string> filters;  // all must occur in "kernel case"
  bool cold = true, hot = true, compare = false;
  int repeats = 7;
};

struct KernelRow {
  std::string kernel, name, cache;  // cache: "cold", "hot"
  int threads = 1;
  double seconds = 0, spread = 0;  // median; (largest - smallest) / median
  double gflops = 0, gbs = 0;
  std::string bound;  // what bounds it: the ceiling's name: "dram read", "product"
  double percent_of_bound = 0;
  std::vector<std::pair<std::string, double>> compare;  // seconds of the others / own
};

// error (usage): an ISA that cannot run here, a filter that fits no case.
std::vector<KernelRow> bench_kernels(const KernelBenchOptions& options);

}  // namespace weft
