// weft eval tiers: what every tier costs in bytes and in accuracy on golden folders, in one table.
#include <algorithm>
#include <cmath>

#include "app/eval.h"
#include "app/report.h"
#include "base/check.h"
#include "base/cpu.h"
#include "engine/golden.h"
#include "kernels/dispatch.h"

namespace weft {
namespace {

struct TierFlags {
  std::vector<std::string> directories, tiers;
  std::string isa;
  int threads = 0;
  bool json = false;
};

// Against the recorded results, over all cases, each run with its own choices.
struct TierRow {
  std::string tier;
  size_t weights = 0, experts = 0, cache = 0;  // bytes; of weights; of one token
  int rows = 0, selections = 0;                // selections: rows that had to choose, times layers
  double max_error = 0, mean_kl = 0, same_top = 0;
  double mean_overlap = 0, min_overlap = 1;
};

double log_sum(const float* x, size_t n) {
  const double top = *std::max_element(x, x + n);
  double sum = 0;
  for (size_t i = 0; i < n; ++i) sum += std::exp(x[i] - top);
  return top + std::log(sum);
}

void add_logits(TierRow& row, const GoldenCase& c, const GoldenRun& run, size_t vocab) {
  for (size_t t = 0; t < c.ids.size(); ++t) {
    const float *p = c.logits.data() + t * vocab, *q = run.logits.data() + t * vocab;
    const double zp = log_sum(p, vocab), zq = log_sum(q, vocab);
    double kl = 0;
    for (size_t i = 0; i < vocab; ++i) {
      kl += std::exp(p[i] - zp) * ((p[i] - zp) - (q[i] - zq));
      row.max_error = std::max(row.max_error, std::fabs(static_cast<double>(p[i]) - q[i]));
    }
    row.mean_kl += kl;
    row.same_top += std::max_element(p, p + vocab) - p == std::max_element(q, q + vocab) - q;
    ++row.rows;
  }
}

void add_selections(TierRow& row, const GoldenCase& c, const GoldenRun& run, int width) {
  for (size_t l = 0; l < c.selected.size(); ++l)
    for (size_t t = width; t < c.ids.size(); ++t) {
      const int32_t *a = c.selected[l].data() + t * width, *b = run.selected[l].data() + t * width;
      const auto end = [width](const int32_t* list) { return std::find(list, list + width, -1); };
      std::vector<int32_t> both;
      std::set_intersection(a, end(a), b, end(b), std::back_inserter(both));
      const double share = static_cast<double>(both.size()) / static_cast<double>(end(a) - a);
      row.mean_overlap += share;
      row.min_overlap = std::min(row.min_overlap, share);
      ++row.selections;
    }
}

TierRow measure_tier(const TierFlags& flags, const std::string& directory, const Tier& tier) {
  BuildOptions build;
  build.tier = tier;
  GoldenRunner runner(directory, choose_kernels(flags.isa, cpu_features()),
                      flags.threads ? flags.threads : default_threads().threads, build);
  TierRow row;
  row.tier = tier.name;
  const Builder& parts = runner.model().parts();
  row.weights = parts.weights.bytes();
  for (const Matrix& m : parts.weights.matrices)
    if (is_routed_expert(m.sources[0]->name)) row.experts += m.bytes();
  row.cache = (parts.caches.latent_bytes + parts.caches.index_bytes) / kPageTokens;
  for (const Json& json : runner.golden().cases()) {
    const GoldenCase c = runner.read_case(json);
    const GoldenRun run = runner.run(c, 0, false);
    add_logits(row, c, run, static_cast<size_t>(runner.model().config().vocab));
    add_selections(row, c, run, parts.selection_width);
  }
  row.mean_kl /= std::max(row.rows, 1), row.same_top /= std::max(row.rows, 1);
  row.mean_overlap /= std::max(row.selections, 1);
  return row;
}

Json row_json(const std::string& directory, const std::string& isa, const TierRow& r) {
  Json out = {{"directory", directory},
              {"isa", isa},
              {"tier", r.tier},
              {"weights_bytes", r.weights},
              {"expert_bytes", r.experts},
              {"cache_bytes_per_token", r.cache},
              {"rows", r.rows},
              {"max_logit_error", r.max_error},
              {"mean_kl", r.mean_kl},
              {"same_top", r.same_top}};
  out["mean_overlap"] = r.selections ? Json(r.mean_overlap) : Json();  // null: nothing had to choose
  out["min_overlap"] = r.selections ? Json(r.min_overlap) : Json();
  return out;
}

void print_row(const std::string& name, const TierRow& r) {
  const auto overlap = [&](double x) { return r.selections ? fmt::format("{:.4f}", x) : std::string("-"); };
  fmt::print(
      "| {:<26} | {:<12} | {:>11} | {:>11} | {:>9} | {:>9.4f} | {:>9.2e} | {:>8.2f} | {:>7} | {:>7} |\n",
      name, r.tier, human_bytes(r.weights), human_bytes(r.experts), r.cache, r.max_error, r.mean_kl,
      100 * r.same_top, overlap(r.mean_overlap), overlap(r.min_overlap));
}

void run_tiers(const TierFlags& flags) {
  std::vector<Tier> tiers;
  for (const std::string& word : flags.tiers) tiers.push_back(read_tier(word));
  if (tiers.empty()) tiers = named_tiers();
  const std::string isa = choose_kernels(flags.isa, cpu_features()).isa;
  Json all = Json::array();
  bool failed = false;
  if (!flags.json) {
    fmt::print("| {:<26} | {:<12} | {:>11} | {:>11} | {:>9} | {:>9} | {:>9} | {:>8} | {:>7} | {:>7} |\n",
               "golden", "tier", "weights", "experts", "B/token", "max error", "mean KL", "same top",
               "overlap", "min");
    fmt::print(
        "| :{0:-<25} | :{0:-<11} | {0:->10}: | {0:->10}: | {0:->8}: | {0:->8}: | {0:->8}: | {0:->7}: | "
        "{0:->6}: | {0:->6}: |\n",
        "");
  }
  for (const std::string& directory : flags.directories)
    for (const Tier& tier : tiers) {
      try {
        const TierRow row = measure_tier(flags, directory, tier);
        if (flags.json)
          all.push_back(row_json(directory, isa, row));
        else
          print_row(Checkpoint(directory).name(), row);
      } catch (const Error& error) {  // widths that a format cannot cut: the others' rows still count
        failed = true;
        if (flags.json)
          all.push_back({{"directory", directory}, {"tier", tier.name}, {"error", error.what()}});
        fmt::print(stderr, "weft: --tier {}: {}\n", tier.name, error.what());
      }
    }
  if (flags.json)
    print_json(all);
  else
    fmt::print(
        "\n{}, {}: logits against the recorded ones, every run with its own choices; overlap of the selected "
        "sets "
        "over rows that see more than they may select; caches in bytes per token\n",
        cpu_name(), isa);
  if (failed) throw ExitCode{kExitFailed};
}

}  // namespace

void add_eval_tiers(CLI::App& eval) {
  CLI::App* sub =
      eval.add_subcommand("tiers", "Bytes and accuracy of every tier on golden folders, in one table");
  auto flags = std::make_shared<TierFlags>();
  sub->add_option("directories", flags->directories, "Folders with golden.json and golden.safetensors")
      ->type_name("DIR")
      ->required()
      ->take_all();
  sub->add_option("--tiers", flags->tiers, "Names or files (default: every name)")
      ->type_name("A,B")
      ->delimiter(',')
      ->take_all()
      ->allow_extra_args(false);
  sub->add_option("--isa", flags->isa, "Instruction set (default: the best here)")->type_name("NAME");
  sub->add_option("-t,--threads", flags->threads, "Threads")->type_name("N")->check(CLI::Range(1, 4096));
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] { run_tiers(*flags); });
}

}  // namespace weft
