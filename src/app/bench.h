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
  bool ops = false;  // one more repeat of every test, traced
};

// What the kernels of one kind took of a test.
struct OpShare {
  std::string op;
  double share = 0;             // of the threads' time
  double percent_of_bound = 0;  // 0: nothing to move or multiply is counted
};

struct BenchRow {
  std::string test;  // "pp512", "tg128 @ d8192"
  int prompt = 0, generated = 0, depth = 0;
  double tokens_per_s = 0;       // median of the repeats
  double deviation = 0;          // sample deviation, 0 for one repeat
  std::vector<Cost> costs = {};  // of one repeat: of every node of every step
  std::vector<double> busy = {};  // of every node, seconds of all threads
  double wall = 0;                // of that repeat, seconds
  std::vector<OpShare> ops = {};  // the longest first
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
