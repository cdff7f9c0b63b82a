#include "engine/verify.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/check.h"
#include "engine/golden.h"
#include "kernels/dispatch.h"

namespace weft {
namespace {

using Case = GoldenCase;
using Seen = GoldenRun;
using Runner = GoldenRunner;

std::unique_ptr<Runner> make_runner(const std::string& directory, const VerifyOptions& options) {
  BuildOptions build;
  build.exec = options.exec;
  build.dsa = options.dsa;
  return std::make_unique<Runner>(directory,
                                  options.kernels ? *options.kernels : choose_kernels(options.isa, cpu_features()),
                                  options.threads, build);
}

// Per row: whether any layer chose otherwise.
std::vector<bool> differing_rows(const std::vector<std::vector<int32_t>>& a, const std::vector<std::vector<int32_t>>& b,
                                 size_t tokens) {
  std::vector<bool> differs(tokens);
  for (size_t l = 0; l < a.size() && l < b.size(); ++l) {
    const size_t per_row = a[l].size() / tokens;
    for (size_t i = 0; i < tokens; ++i)
      if (!std::equal(a[l].begin() + i * per_row, a[l].begin() + (i + 1) * per_row, b[l].begin() + i * per_row))
        differs[i] = true;
  }
  return differs;
}
int count(const std::vector<bool>& rows) { return static_cast<int>(std::count(rows.begin(), rows.end(), true)); }

// Largest error of each row; fills the row's totals.
std::vector<double> compare_logits(const Case& c, const std::vector<float>& logits, VerifyRow& row) {
  const size_t tokens = c.ids.size(), vocab = logits.size() / tokens;
  std::vector<double> errors(tokens);
  double sum = 0;
  for (size_t i = 0; i < logits.size(); ++i) {
    const double d = std::fabs(static_cast<double>(logits[i]) - c.logits[i]);
    errors[i / vocab] = std::isfinite(d) ? std::max(errors[i / vocab], d) : INFINITY;
    sum += d;
  }
  std::vector<double> sorted = errors;
  std::sort(sorted.begin(), sorted.end());
  row.error = sorted.back();
  row.mean_error = sum / static_cast<double>(logits.size());
  row.row_quantile = sorted[std::min(tokens - 1, tokens * 9 / 10)];
  return errors;
}

// For a golden.json that records none: the largest of the tiny checkpoints whose logits are, like theirs, N(0, 1).
constexpr double kTypicalDrift = 0.27;

// f32 operands: everything equal, logits within the f32 bound.
void judge_f32(Runner& runner, const Case& c, const Seen& seen, VerifyRow& row) {
  const double recorded = number_at(runner.golden().json(), {"tolerance", "logits_fp32_vs_fp64"});
  compare_logits(c, seen.logits, row);
  row.bound = recorded > 0 ? 5 * recorded : 3e-4;
  if (!c.experts.empty()) row.experts_wrong = count(differing_rows(c.experts, seen.experts, c.ids.size()));
  if (!c.selected.empty()) row.sets_wrong = count(differing_rows(c.selected, seen.selected, c.ids.size()));
  if (!c.greedy.empty()) row.greedy_wrong = runner.greedy(c, seen.logits);
  row.pass = row.error <= row.bound && row.sets_wrong <= 0 && row.experts_wrong <= 0 && row.greedy_wrong <= 0;
}

// bf16 operands with the reference's choices forced. Single rows are ill-conditioned (a small KDA output before o_norm, a
// small expert sum before its norm), so nine rows in ten and the mean are judged, not the maximum.
void judge_forced(Runner& runner, const Case& c, double drift, const Seen& seen, VerifyRow& row) {
  const double mean = number_at(runner.golden().json(),
                                {"bf16_activations", "selections_and_experts_forced", "mean_abs_logit_change"});
  compare_logits(c, seen.logits, row);
  row.bound = 2 * drift;
  row.pass = row.row_quantile <= row.bound && (mean <= 0 || row.mean_error <= 2 * mean);
}

// bf16 operands, own choices. Rows that choose as the reference in every layer are within the bound, all of them; a row
// that flips a near call moves by O(1), and at most one row in five may.
void judge_free(const Case& c, const Seen& seen, VerifyRow& row) {
  const std::vector<double> errors = compare_logits(c, seen.logits, row);
  const std::vector<bool> experts = differing_rows(c.experts, seen.experts, c.ids.size()),
                          sets = differing_rows(c.selected, seen.selected, c.ids.size());
  row.bound = 2 * c.bf16_drift;
  row.experts_wrong = count(experts);
  row.sets_wrong = count(sets);
  row.pass = true;
  int flipped = 0;
  for (size_t i = 0; i < errors.size(); ++i) {
    const bool same = !experts[i] && !sets[i];
    flipped += !same;
    if (same && errors[i] > row.bound) row.pass = false;
  }
  row.pass = row.pass && 5 * flipped <= static_cast<int>(errors.size());
}

}  // namespace

bool VerifyReport::pass() const {
  return !rows.empty() && std::all_of(rows.begin(), rows.end(), [](const VerifyRow& r) { return r.pass; });
}

VerifyReport verify(const std::string& directory, const VerifyOptions& options) {
  const std::unique_ptr<Runner> made = make_runner(directory, options);
  Runner& runner = *made;
  std::unique_ptr<Runner> reference;  // f32 operands: completes the choices a case does not record
  if (runner.bf16()) {
    VerifyOptions exact = options;
    exact.kernels = nullptr;
    exact.isa = "portable";
    reference = make_runner(directory, exact);
  }
  const double forced_drift = number_at(
      runner.golden().json(), {"bf16_activations", "selections_and_experts_forced", "max_abs_logit_change"});
  double drift = forced_drift;  // of bf16 activations with the same choices, largest
  for (const Json& json : runner.golden().json()["cases"])
    drift = std::max(drift, number_at(json, {"bf16_activations_max_abs_diff"}));
  if (drift <= 0) drift = kTypicalDrift;

  VerifyReport report{directory, runner.isa(), runner.model().config().family,
                      exec_name(options.exec), options.threads, {}};
  std::set<std::string> wanted(options.cases.begin(), options.cases.end());
  for (const Json& json : runner.golden().json()["cases"]) {
    Case c = runner.read_case(json);
    if (!options.cases.empty() && !wanted.contains(c.name)) continue;
    wanted.erase(c.name);
    if (reference) {
      const Seen exact = reference->run(c, 0, false);
      if (c.experts.empty()) c.experts = exact.experts;
      if (c.selected.empty()) c.selected = exact.selected;
    }
    for (const int chunk : options.chunks) {
      VerifyRow row;
      row.name = c.name, row.tokens = static_cast<int>(c.ids.size()), row.chunk = chunk;
      row.mode = "free";
      if (!runner.bf16()) {
        judge_f32(runner, c, runner.run(c, chunk, false), row);
      } else {
        if (c.bf16_drift > 0) {
          judge_free(c, runner.run(c, chunk, false), row);
          report.rows.push_back(row);
        }
        row = {};
        row.name = c.name, row.tokens = static_cast<int>(c.ids.size()), row.chunk = chunk, row.mode = "forced";
        judge_forced(runner, c, drift, runner.run(c, chunk, true), row);
      }
      report.rows.push_back(row);
    }
  }
  if (!wanted.empty()) usage("--cases: {}/golden.json has no case {}", directory, *wanted.begin());
  return report;
}

}  // namespace weft
