// Speed of whole steps, in the words of llama-bench: pp reads a prompt, tg generates.
#pragma once

#include <string>
#include <vector>

#include "app/cli.h"
#include "kernels/work.h"

namespace weft {

struct BenchOptions {
  EngineOptions engine;  // context 0: as much as the tests need
  std::vector<int> prompts = {512}, generations = {128}, depths = {0};
  int repeats = 5;
};

struct BenchRow {
  std::string test;  // "pp512", "tg128 @ d8192"
  int prompt = 0, generated = 0, depth = 0;
  double tokens_per_s = 0;       // median of the repeats
  double deviation = 0;          // sample deviation, 0 for one repeat
  std::vector<Cost> costs = {};  // of every kernel of one repeat
  double percent_of_bound = 0;   // what this machine could do at most with them, by the time taken
};

struct BenchReport {
  std::string model, family, isa, cpu;
  int threads = 0, repeats = 0;
  size_t weights_bytes = 0, planned_bytes = 0, peak_rss_bytes = 0;
  std::vector<BenchRow> rows;
};

// Random token ids (timing does not depend on them but for experts and selections, which they spread). One
// warm-up run of every test. A test of 0 tokens is left out. error (usage): negative numbers, a context
// beyond the model's.
BenchReport bench_model(const BenchOptions& options);

// The other subcommands of `weft bench`.
void add_bench_machine(CLI::App& bench);
void add_bench_kernels(CLI::App& bench);
void add_bench_exec(CLI::App& bench);

double median(std::vector<double> values);            // 0 for none
double deviation(const std::vector<double>& values);  // n - 1; 0 for fewer than two

}  // namespace weft
