#include "app/bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>

#include "app/bench_lab.h"
#include "app/bench_rig.h"
#include "app/report.h"
#include "base/check.h"
#include "base/cpu.h"
#include "base/memory.h"
#include "graph/trace.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

void check_options(const BenchOptions& options) {
  const auto none_negative = [](const std::vector<int>& values, const char* flag) {
    for (const int v : values)
      if (v < 0) usage("{} {}: expected 0 or more tokens", flag, v);
  };
  none_negative(options.prompts, "-p");
  none_negative(options.generations, "-n");
  none_negative(options.depths, "-d");
  if (options.repeats < 1) usage("-r {}: expected 1 or more", options.repeats);
}

int longest(const BenchOptions& options) {
  const auto most = [](const std::vector<int>& v) {
    return v.empty() ? 0 : *std::max_element(v.begin(), v.end());
  };
  const int64_t tokens =
      static_cast<int64_t>(most(options.depths)) + std::max(most(options.prompts), most(options.generations));
  if (tokens > INT32_MAX) usage("-d, -p, -n: {} tokens in all are too many", tokens);
  return std::max(static_cast<int>(tokens), 1);
}

template <class F>
BenchRow measure(BenchRig& rig, const BenchOptions& options, BenchRow row, int tokens, const F& work) {
  rig.back_to(row.depth);
  row.costs = rig.costs(work);  // the warm-up
  std::vector<double> rates;
  for (int i = 0; i < options.repeats; ++i) {
    rig.back_to(row.depth);
    const Clock::time_point start = Clock::now();
    work();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    rates.push_back(tokens / std::max(seconds, 1e-9));
  }
  row.tokens_per_s = median(rates);
  row.deviation = deviation(rates);
  if (options.ops) {
    rig.back_to(row.depth);
    Trace trace(rig.model().parts().graph, rig.direct().threads());
    rig.model().executor().trace(&trace);
    const Clock::time_point start = Clock::now();
    work();
    row.wall = std::chrono::duration<double>(Clock::now() - start).count();
    rig.model().executor().trace(nullptr);
    row.busy = trace.busy();
  }
  return row;
}

// Sums the nodes of each kind. bound: seconds of all threads, of every entry of row.costs.
std::vector<OpShare> shares(const BenchRow& row, const std::vector<Node>& nodes,
                            const std::vector<double>& bound, int threads) {
  struct Sum {
    double busy = 0, bound = 0;
  };
  std::map<std::string, Sum> sums;
  for (size_t i = 0; i < row.busy.size(); ++i) sums[nodes[i].op].busy += row.busy[i];
  for (size_t i = 0; i < bound.size(); ++i) sums[nodes[i % nodes.size()].op].bound += bound[i] * threads;
  std::vector<OpShare> out;
  for (const auto& [op, sum] : sums)
    if (sum.busy > 0) out.push_back({op, sum.busy / (row.wall * threads), 100 * sum.bound / sum.busy});
  std::sort(out.begin(), out.end(), [](const OpShare& a, const OpShare& b) { return a.share > b.share; });
  return out;
}

// A stranger on the machine makes a ceiling lower for a fraction of a second, and every percentage higher.
double best_rate(Prober& prober, const Ceiling& ceiling) {
  double best = 0;
  for (int i = 0; i < 5; ++i) best = std::max(best, prober.rate(ceiling).value);
  return best;
}

// The bound of a test: every kernel at the rate of what bounds it, one after another.
void add_bounds(std::vector<BenchRow>& rows, const std::vector<Node>& nodes, const KernelTable& kernels,
                int threads) {
  if (rows.empty()) return;
  Prober prober(kernels, threads);
  double memory = 0, product = 0;
  for (const Ceiling& c : prober.ceilings()) {
    if (c.name == std::string_view("dram read")) memory = best_rate(prober, c);
    if (c.name == std::string_view("product")) product = best_rate(prober, c);
  }
  for (BenchRow& row : rows) {
    std::vector<double> bound;
    for (const Cost& cost : row.costs) bound.push_back(std::max(cost.bytes / memory, cost.flops / product));
    const double seconds = std::accumulate(bound.begin(), bound.end(), 0.0);
    if (!row.busy.empty()) row.ops = shares(row, nodes, bound, threads);
    row.percent_of_bound = 100 * seconds * row.tokens_per_s / std::max(row.prompt, row.generated);
  }
}

std::string test_name(const char* kind, int tokens, int depth) {
  return depth ? fmt::format("{}{} @ d{}", kind, tokens, depth) : fmt::format("{}{}", kind, tokens);
}

Json report_json(const BenchReport& report) {
  Json out = Json::array();
  for (const BenchRow& row : report.rows) {
    Json ops = Json::array();
    for (const OpShare& op : row.ops)
      ops.push_back({{"op", op.op}, {"share", op.share}, {"percent_of_bound", op.percent_of_bound}});
    out.push_back({{"model", report.model},
                   {"family", report.family},
                   {"test", row.test},
                   {"n_prompt", row.prompt},
                   {"n_gen", row.generated},
                   {"n_depth", row.depth},
                   {"tokens_per_s", row.tokens_per_s},
                   {"stddev", row.deviation},
                   {"percent_of_bound", row.percent_of_bound},
                   {"repeats", report.repeats},
                   {"isa", report.isa},
                   {"cpu", report.cpu},
                   {"threads", report.threads},
                   {"weights_bytes", report.weights_bytes},
                   {"planned_bytes", report.planned_bytes},
                   {"peak_rss_bytes", report.peak_rss_bytes}});
    if (!row.ops.empty()) out.back()["ops"] = std::move(ops);
  }
  return out;
}

void print_report(const BenchReport& report) {
  fmt::print("| {:<24} | {:<12} | {:<10} | {:>7} | {:<8} | {:<16} | {:>20} | {:>10} |\n", "model", "family",
             "weights", "threads", "isa", "test", "t/s", "% of bound");
  fmt::print(
      "| :{0:-<23} | :{0:-<11} | {0:->9}: | {0:->6}: | :{0:-<7} | :{0:-<15} | {0:->19}: | {0:->9}: |\n", "");
  for (const BenchRow& row : report.rows)
    fmt::print("| {:<24} | {:<12} | {:<10} | {:>7} | {:<8} | {:<16} | {:>20} | {:>10.1f} |\n", report.model,
               report.family, human_bytes(report.weights_bytes), report.threads, report.isa, row.test,
               fmt::format("{:.2f} ± {:.2f}", row.tokens_per_s, row.deviation), row.percent_of_bound);
  for (const BenchRow& row : report.rows) {
    if (row.ops.empty()) continue;
    fmt::print("\n| {:<24} | {:>9} | {:>10} |\n", row.test, "% of time", "% of bound");
    fmt::print("| :{0:-<23} | {0:->8}: | {0:->9}: |\n", "");
    for (const OpShare& op : row.ops)
      fmt::print("| {:<24} | {:>9.1f} | {:>10.1f} |\n", op.op, 100 * op.share, op.percent_of_bound);
  }
  fmt::print("\n{}; peak memory {}, planned {}\n", report.cpu, human_bytes(report.peak_rss_bytes),
             human_bytes(report.planned_bytes));
}

}  // namespace

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

double deviation(const std::vector<double>& values) {
  if (values.size() < 2) return 0;
  double mean = 0, sum = 0;
  for (const double v : values) mean += v / static_cast<double>(values.size());
  for (const double v : values) sum += (v - mean) * (v - mean);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

BenchReport bench_model(const BenchOptions& options) {
  check_options(options);
  EngineOptions engine = options.engine;
  if (engine.context == 0)
    engine.context = longest(options);
  else if (engine.context < longest(options))
    usage("-c {}: the tests need {} tokens", engine.context, longest(options));
  BenchRig rig(engine);
  BenchReport report;
  report.model = rig.model().checkpoint().name();
  report.family = rig.model().config().family;
  report.isa = rig.direct().kernels().isa;
  report.cpu = cpu_name();
  report.threads = rig.direct().threads();
  report.repeats = options.repeats;
  report.weights_bytes = rig.model().parts().weights.bytes();
  report.planned_bytes = rig.direct().memory().total();
  for (const int depth : options.depths) {
    rig.start_at(depth);
    for (const int p : options.prompts)
      if (p > 0)
        report.rows.push_back(
            measure(rig, options, {test_name("pp", p, depth), p, 0, depth}, p, [&] { rig.read(p); }));
    for (const int n : options.generations)
      if (n > 0)
        report.rows.push_back(
            measure(rig, options, {test_name("tg", n, depth), 0, n, depth}, n, [&] { rig.generate(n); }));
  }
  report.peak_rss_bytes = peak_rss();  // before the ceilings, which take memory of their own
  add_bounds(report.rows, rig.model().parts().graph.nodes(), rig.direct().kernels(), report.threads);
  return report;
}

void add_bench(CLI::App& app) {
  struct Flags {
    CommonFlags common;
    BenchOptions bench;
    bool json = false;
  };
  CLI::App* sub = app.add_subcommand("bench", "Measure speed");
  sub->require_subcommand(1);
  add_bench_machine(*sub);
  add_bench_kernels(*sub);
  add_bench_exec(*sub);
  CLI::App* model = sub->add_subcommand("model", "Tokens per second of a model: reading prompts, generating");
  auto flags = std::make_shared<Flags>();
  add_engine_flags(*model, flags->common);
  const auto list = [model](const char* name, std::vector<int>& values, const char* help) {
    model->add_option(name, values, help)
        ->type_name("N,M")
        ->delimiter(',')
        ->take_all()
        ->allow_extra_args(false);
  };
  list("-p,--n-prompt", flags->bench.prompts, "Tokens to read, 0 = no such test (default: 512)");
  list("-n,--n-gen", flags->bench.generations, "Tokens to generate, 0 = no such test (default: 128)");
  list("-d,--n-depth", flags->bench.depths, "Tokens in the caches before each test (default: 0)");
  model->add_option("-r,--repetitions", flags->bench.repeats, "Repeats (default: 5)")->type_name("N");
  model->add_flag("--ops", flags->bench.ops, "Also what each kind of kernel took, in one more repeat");
  model->add_flag("--json", flags->json, "As JSON");
  model->callback([flags] {
    flags->bench.engine = engine_options(flags->common);
    const BenchReport report = bench_model(flags->bench);
    if (flags->json)
      print_json(report_json(report));
    else
      print_report(report);
  });
}

}  // namespace weft
