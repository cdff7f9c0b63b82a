// Runs the recorded cases of a checkpoint's golden.json (engine/golden.h) and compares: logits, selected sets, experts,
// greedy tokens.
//
// Bounds. f32 operands (portable, avx2): five times the recorded f32-against-double difference (3e-4 where none is
// recorded), every recorded choice and greedy token equal. bf16 operands (avx512, amx): a flipped choice moves a row by
// O(1), so every case runs with its choices forced to the recorded ones (those a case does not record come from a run of
// the portable kernels on the same prompt): nine rows in ten within twice the recorded bf16 drift, mean error within
// twice the recorded mean. The cases made for it (bf16_activations_max_abs_diff) also run free: every row that chooses as
// the reference does is within twice the drift.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "graph/executor.h"
#include "model/builder.h"

namespace weft {

struct VerifyOptions {
  std::string isa;
  int threads = 1;
  std::vector<int> chunks = {0};  // tokens per step, 0 = whole prompt
  ExecMode exec = ExecMode::super;
  std::vector<std::string> cases;  // names; empty = all
  DsaMode dsa = DsaMode::sparse;  // otherwise recorded selections are not compared, and long cases must fail
  const KernelTable* kernels = nullptr;  // overrides isa (tests: the tile model)
};

struct VerifyRow {
  std::string name;
  int tokens = 0, chunk = 0;
  std::string mode;  // "free" or "forced"
  double error = 0, mean_error = 0, bound = 0;
  double row_quantile = 0;  // nine rows in ten have a largest error of at most this
  int sets_wrong = -1, experts_wrong = -1, greedy_wrong = -1;  // rows; -1 = not recorded or not compared
  bool pass = false;
};

struct VerifyReport {
  std::string directory, isa, family, exec;
  int threads = 1;
  std::vector<VerifyRow> rows;
  bool pass() const;
};

// error: a directory without golden files, or whose golden.json names tensors that are not there.
VerifyReport verify(const std::string& directory, const VerifyOptions& options);

}  // namespace weft
