// weft bench exec: what the three ways to run a step cost and gain, on one loaded model.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>

#include "app/bench.h"
#include "app/bench_lab.h"
#include "app/bench_rig.h"
#include "app/report.h"
#include "base/cpu.h"
#include "graph/trace.h"

namespace weft {
namespace {

struct ExecFlags {
  CommonFlags common;
  int depth = 0, tokens = 64, repeats = 5;
  std::string trace;
  bool json = false;
};

struct ExecRow {
  const char* mode;
  double tokens_per_s = 0, deviation = 0;
  ExecStats stats = {};  // of all repeats
  double hollow_us = 0;  // of one step whose kernels do nothing
};

using Clock = std::chrono::steady_clock;
double since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// Modes take turns, so that a slow minute of the machine meets all of them.
std::vector<ExecRow> measure(BenchRig& rig, const ExecFlags& flags) {
  constexpr ExecMode kModes[] = {ExecMode::ops, ExecMode::streams, ExecMode::super};
  std::vector<ExecRow> rows;
  std::vector<std::vector<double>> rates(std::size(kModes)), hollow(std::size(kModes));
  for (const ExecMode mode : kModes) rows.push_back({exec_name(mode)});
  const Graph empty = rig.model().parts().graph.hollow();
  int32_t zero = 0;
  Span span{0, 1, flags.depth, 0, 0};
  StepHeader step;
  step.tokens = step.spans = step.logit_rows = 1;
  step.token = step.position = step.span_of = step.logit_row = step.block_table = &zero;
  step.span = &span;
  for (int i = -1; i < flags.repeats; ++i)  // -1: warm-up
    for (size_t m = 0; m < std::size(kModes); ++m) {
      rig.model().exec(kModes[m]);
      rig.back_to(flags.depth);
      rig.generate(2);  // captures
      rig.model().executor().reset_stats();
      const auto start = Clock::now();
      rig.generate(flags.tokens);
      if (i < 0) continue;
      rates[m].push_back(flags.tokens / since(start));
      const ExecStats s = rig.model().executor().stats();
      rows[m].stats.steps += s.steps, rows[m].stats.tasks += s.tasks, rows[m].stats.joins += s.joins;
      rows[m].stats.waits += s.waits, rows[m].stats.seconds += s.seconds, rows[m].stats.idle += s.idle;
      Executor executor(rig.direct().team(), empty, kModes[m]);
      executor.run(step);
      constexpr int kSteps = 50;
      const auto begin = Clock::now();
      for (int n = 0; n < kSteps; ++n) executor.run(step);
      hollow[m].push_back(since(begin) / kSteps * 1e6);
    }
  for (size_t m = 0; m < std::size(kModes); ++m) {
    rows[m].tokens_per_s = median(rates[m]);
    rows[m].deviation = deviation(rates[m]);
    rows[m].hollow_us = median(hollow[m]);
  }
  return rows;
}

// From the input of a DSA layer to its indexer: the projections of queries, latent rows, keys and head
// weights.
struct Prolog {
  int tokens, layers = 0;
  double us = 0;        // of a layer
  double of_bound = 0;  // by the time its bytes take from memory
};

Prolog prolog_of(const Graph& graph, const std::vector<Trace::NodeSpan>& spans, int tokens,
                 double bandwidth) {
  Prolog out{tokens};
  double bytes = 0;
  const std::vector<Node>& nodes = graph.nodes();
  for (size_t at = 0; at < nodes.size(); ++at) {
    if (std::strcmp(nodes[at].op, "index") != 0 || !spans[at].begin) continue;
    const std::string scope = nodes[at].label.substr(0, nodes[at].label.rfind("indexer"));
    int64_t begin = spans[at].begin;
    std::vector<int> before = nodes[at].after;
    std::vector<bool> seen(nodes.size());
    while (!before.empty()) {
      const int i = before.back();
      before.pop_back();
      if (seen[i] || !nodes[i].label.starts_with(scope)) continue;
      seen[i] = true;
      before.insert(before.end(), nodes[i].after.begin(), nodes[i].after.end());
      bytes += spans[i].cost.bytes;
      if (spans[i].begin) begin = std::min(begin, spans[i].begin);
    }
    ++out.layers;
    out.us += static_cast<double>(spans[at].begin - begin) / 1e3;
  }
  if (out.layers == 0) return out;
  out.of_bound = out.us * 1e-6 / (bytes / bandwidth);
  out.us /= out.layers;
  return out;
}

// Each sample beside a reading of the bandwidth: a machine with neighbours has another one every second.
std::vector<Prolog> measure_prologs(BenchRig& rig, const ExecFlags& flags) {
  Prober prober(rig.direct().kernels(), rig.direct().threads());
  const std::vector<Ceiling> ceilings = prober.ceilings();
  const Ceiling& read = *std::find_if(ceilings.begin(), ceilings.end(), [](const Ceiling& c) {
    return c.name == std::string_view("dram read");
  });
  std::vector<Prolog> out;
  for (const int tokens : {1, 8}) {
    Prolog sum{tokens};
    std::vector<double> us, of_bound;
    for (int i = 0; i < std::max(15, flags.repeats); ++i) {
      rig.back_to(flags.depth);
      rig.read(tokens);  // captures
      rig.back_to(flags.depth);
      Trace trace(rig.model().parts().graph, rig.direct().threads());
      rig.model().executor().trace(&trace);
      rig.read(tokens);
      rig.model().executor().trace(nullptr);
      sum = prolog_of(rig.model().parts().graph, trace.last_step(), tokens, prober.once(read));
      us.push_back(sum.us), of_bound.push_back(sum.of_bound);
    }
    out.push_back({tokens, sum.layers, median(us), median(of_bound)});
  }
  return out;
}

void print(BenchRig& rig, const ExecFlags& flags, const std::vector<ExecRow>& rows,
           const std::vector<Prolog>& prologs) {
  const double layers = rig.model().config().layers.size();
  const Graph& graph = rig.model().parts().graph;
  const double threads = rig.direct().threads();
  if (flags.json) {
    Json out = Json::array();
    for (const ExecRow& r : rows) {
      const double steps = static_cast<double>(r.stats.steps);
      out.push_back({{"mode", r.mode},
                     {"model", rig.model().checkpoint().name()},
                     {"isa", rig.direct().kernels().isa},
                     {"cpu", cpu_name()},
                     {"threads", rig.direct().threads()},
                     {"n_gen", flags.tokens},
                     {"n_depth", flags.depth},
                     {"tokens_per_s", r.tokens_per_s},
                     {"stddev", r.deviation},
                     {"tasks_per_step", r.stats.tasks / steps},
                     {"joins_per_layer", r.stats.joins / steps / layers},
                     {"waits_per_layer", r.stats.waits / steps / layers},
                     {"idle_share", r.stats.idle / (r.stats.seconds * threads)},
                     {"empty_us_per_layer", r.hollow_us / layers}});
    }
    for (const Prolog& p : prologs)
      if (p.layers)
        out.push_back({{"mode", "prolog"},
                       {"tokens", p.tokens},
                       {"layers", p.layers},
                       {"us_per_layer", p.us},
                       {"of_bound", p.of_bound}});
    print_json(out);
    return;
  }
  fmt::print("{}, {} threads, {} ({}), {} nodes in {} stages, {} layers; {} tokens at depth {}\n\n",
             rig.model().checkpoint().name(), rig.direct().threads(), rig.direct().kernels().isa, cpu_name(),
             graph.nodes().size(), graph.stages(), layers, flags.tokens, flags.depth);
  fmt::print("| {:<7} | {:>16} | {:>6} | {:>10} | {:>11} | {:>11} | {:>6} | {:>14} |\n", "mode", "t/s",
             "of ops", "tasks/step", "joins/layer", "waits/layer", "idle", "empty us/layer");
  fmt::print(
      "| :{0:-<6} | {0:->15}: | {0:->5}: | {0:->9}: | {0:->10}: | {0:->10}: | {0:->5}: | {0:->13}: |\n", "");
  for (const ExecRow& r : rows) {
    const double steps = static_cast<double>(r.stats.steps);
    fmt::print("| {:<7} | {:>16} | {:>6.2f} | {:>10.0f} | {:>11.1f} | {:>11.1f} | {:>6} | {:>14.2f} |\n",
               r.mode, fmt::format("{:.1f} ± {:.1f}", r.tokens_per_s, r.deviation),
               r.tokens_per_s / rows[0].tokens_per_s, r.stats.tasks / steps, r.stats.joins / steps / layers,
               r.stats.waits / steps / layers,
               std::strcmp(r.mode, "super") == 0
                   ? fmt::format("{:.1f} %", 100 * r.stats.idle / (r.stats.seconds * threads))
                   : "-",
               r.hollow_us / layers);
  }
  for (const Prolog& p : prologs)
    if (p.layers)
      fmt::print(
          "\nprolog of a DSA layer (super), {} token{}: {:.0f} us, {:.2f} times its bytes / memory bandwidth",
          p.tokens, p.tokens == 1 ? "" : "s", p.us, p.of_bound);
  fmt::print("\n");
}

void run(const ExecFlags& flags) {
  EngineOptions engine = engine_options(flags.common);
  if (engine.context == 0) engine.context = flags.depth + flags.tokens + 8;
  BenchRig rig(engine);
  rig.start_at(flags.depth);
  const std::vector<ExecRow> rows = measure(rig, flags);  // leaves the model in super mode
  print(rig, flags, rows, measure_prologs(rig, flags));
  if (flags.trace.empty()) return;
  Trace trace(rig.model().parts().graph, rig.direct().threads());
  rig.model().exec(engine.exec);
  rig.back_to(flags.depth);
  rig.generate(2);
  rig.model().executor().trace(&trace);
  rig.generate(4);
  trace.write(flags.trace);
}

}  // namespace

void add_bench_exec(CLI::App& bench) {
  CLI::App* sub =
      bench.add_subcommand("exec", "The three ways to run a step (--exec), compared on one model");
  auto flags = std::make_shared<ExecFlags>();
  add_engine_flags(*sub, flags->common);
  sub->add_option("-n,--n-gen", flags->tokens, "Tokens to generate (default: 64)")
      ->check(CLI::Range(1, 1 << 20));
  sub->add_option("-d,--n-depth", flags->depth, "Tokens in the caches before (default: 0)")
      ->check(CLI::Range(0, 1 << 24));
  sub->add_option("-r,--repetitions", flags->repeats, "Repeats (default: 5)")->check(CLI::Range(1, 1000));
  sub->add_option("--trace", flags->trace, "Write a Chrome trace of four steps of --exec")->type_name("FILE");
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] { run(*flags); });
}

}  // namespace weft
