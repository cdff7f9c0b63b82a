#include "app/bench_kernels.h"

#include <fmt/ranges.h>
#include <algorithm>
#include <chrono>

#include <cstdio>

#include "app/bench.h"
#include "app/report.h"
#include "base/check.h"
#include "base/cpu.h"
#include "kernels/dispatch.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;

// The ceilings of a process, measured once: they say what bounds a case.
struct Machine {
  Machine(const KernelTable& kernels, int threads) : prober(kernels, threads) {
    for (const Ceiling& c : prober.ceilings()) {
      fmt::print(stderr, "{}, {} thread{}\n", c.name, threads, threads == 1 ? "" : "s");
      ceilings.push_back(c), rates.push_back(prober.rate(c).value);
    }
  }
  size_t find(const std::string& name) const {
    for (size_t i = 0; i < ceilings.size(); ++i)
      if (ceilings[i].name == name) return i;
    return 0;  // "int8" where the ISA has no int8 product: its product
  }
  Prober prober;
  std::vector<Ceiling> ceilings;
  std::vector<double> rates;
};

struct Bound {
  size_t ceiling;
  double amount;  // bytes or operations
};

// max(bytes / bandwidth, flops / peak). A hot case's bytes come from the smallest cache that holds them.
Bound bound_of(const Machine& m, const Cost& cost, Peak peak, bool cold) {
  const Topology t = topology();
  const bool dram = cold || cost.bytes > static_cast<double>(t.l3) / 2;
  const bool l3 = cost.bytes > static_cast<double>(t.l2) * m.prober.threads();
  const size_t level = m.find(dram ? "dram read" : l3 ? "l3 read" : "l2 read");
  const size_t unit = m.find(peak == Peak::int8 ? "int8" : peak == Peak::fma ? "fma" : "product");
  return cost.bytes / m.rates[level] >= cost.flops / m.rates[unit] ? Bound{level, cost.bytes}
                                                                   : Bound{unit, cost.flops};
}

// Seconds of every function, and of the bound by its ceiling's rate, in turn: a slow minute of the machine
// hits all of them. The bound comes last.
std::vector<std::vector<double>> sample(const std::vector<const std::function<void(int)>*>& runs, int copies,
                                        int repeats, Machine& machine, const Bound& bound) {
  constexpr double kSampleSeconds = 0.02;
  std::vector<int> count(runs.size(), 1);
  std::vector<int> next(runs.size(), 0);
  const auto timed = [&](size_t i) {
    const Clock::time_point start = Clock::now();
    for (int j = 0; j < count[i]; ++j) {
      (*runs[i])(next[i]);
      next[i] = (next[i] + 1) % copies;
    }
    return std::chrono::duration<double>(Clock::now() - start).count() / count[i];
  };
  for (size_t i = 0; i < runs.size(); ++i) {
    timed(i);
    count[i] = std::clamp(static_cast<int>(kSampleSeconds / std::max(timed(i), 1e-9)), 1, 100000);
  }
  std::vector<std::vector<double>> samples(runs.size() + 1);
  for (int r = 0; r < repeats; ++r) {
    for (size_t i = 0; i < runs.size(); ++i) samples[i].push_back(timed(i));
    samples.back().push_back(bound.amount / machine.prober.once(machine.ceilings[bound.ceiling]));
  }
  return samples;
}

KernelRow measure(const KernelTable& kernels, const KernelCase& c, Machine& machine, bool cold,
                  const KernelBenchOptions& options) {
  const int threads = machine.prober.threads();
  Lab lab(kernels, threads, cold, options.compare);
  const Timed timed = c.make(lab);
  std::vector<const std::function<void(int)>*> runs = {&timed.run};
  for (const auto& other : timed.others) runs.push_back(&other.second);
  const Bound bound = bound_of(machine, timed.cost, timed.peak, cold);
  const auto samples = sample(runs, timed.copies, options.repeats, machine, bound);
  KernelRow row = {c.kernel, c.name, cold ? "cold" : "hot", threads, 0, 0, 0, 0, "", 0, {}};
  row.seconds = median(samples[0]);
  const auto [low, high] = std::minmax_element(samples[0].begin(), samples[0].end());
  row.spread = (*high - *low) / row.seconds;
  row.gflops = timed.cost.flops / row.seconds / 1e9, row.gbs = timed.cost.bytes / row.seconds / 1e9;
  row.bound = machine.ceilings[bound.ceiling].name;
  row.percent_of_bound = 100 * median(samples.back()) / row.seconds;
  for (size_t i = 1; i < runs.size(); ++i)
    row.compare.emplace_back(timed.others[i - 1].first, median(samples[i]) / row.seconds);
  return row;
}

std::vector<KernelCase> chosen_cases(const std::vector<std::string>& filters) {
  std::vector<KernelCase> all, chosen;
  add_gemm_cases(all);
  add_moe_cases(all);
  add_row_cases(all);
  add_dsa_cases(all);
  add_kda_cases(all);
  for (KernelCase& c : all) {
    const std::string name = c.kernel + " " + c.name;
    if (std::all_of(filters.begin(), filters.end(), [&](const auto& f) { return name.find(f) != name.npos; }))
      chosen.push_back(std::move(c));
  }
  if (chosen.empty())
    usage("no case is called like {}; `weft bench kernels --list` names them", fmt::join(filters, " and "));
  return chosen;
}

std::string time_text(double seconds) {
  return seconds < 1e-3 ? fmt::format("{:.1f} us", seconds * 1e6) : fmt::format("{:.2f} ms", seconds * 1e3);
}

std::string compare_text(const KernelRow& row) {
  std::string text;
  for (const auto& [name, ratio] : row.compare)
    text += fmt::format("{}{:.2f}x {}", text.empty() ? "" : ", ", ratio, name);
  return text;
}

void print_rows(const std::vector<KernelRow>& rows, const std::string& isa) {
  fmt::print("{}, {}\n\n", cpu_name(), isa);
  fmt::print(
      "| {:<10} | {:<44} | {:<5} | {:>7} | {:>10} | {:>6} | {:>8} | {:>7} | {:<9} | {:>10} | compare |\n",
      "kernel", "case", "cache", "threads", "time", "spread", "GFLOP/s", "GB/s", "bound", "% of bound");
  fmt::print(
      "| :{0:-<9} | :{0:-<43} | :{0:-<4} | {0:->6}: | {0:->9}: | {0:->5}: | {0:->7}: | {0:->6}: | :{0:-<8} | "
      "{0:->9}: | :------ |\n",
      "");
  for (const KernelRow& r : rows)
    fmt::print(
        "| {:<10} | {:<44} | {:<5} | {:>7} | {:>10} | {:>4.0f} % | {:>8.1f} | {:>7.2f} | {:<7} | {:>10.1f} | "
        "{} |\n",
        r.kernel, r.name, r.cache, r.threads, time_text(r.seconds), 100 * r.spread, r.gflops, r.gbs, r.bound,
        r.percent_of_bound, compare_text(r));
}

Json rows_json(const std::vector<KernelRow>& rows, const std::string& isa) {
  Json out = Json::array();
  for (const KernelRow& r : rows) {
    Json compare = Json::object();
    for (const auto& [name, ratio] : r.compare) compare[name] = ratio;
    out.push_back({{"kernel", r.kernel},
                   {"case", r.name},
                   {"cache", r.cache},
                   {"isa", isa},
                   {"cpu", cpu_name()},
                   {"threads", r.threads},
                   {"seconds", r.seconds},
                   {"spread", r.spread},
                   {"gflops", r.gflops},
                   {"gbs", r.gbs},
                   {"bound", r.bound},
                   {"percent_of_bound", r.percent_of_bound},
                   {"compare", std::move(compare)}});
  }
  return out;
}

std::vector<int> thread_counts(const std::vector<int>& wanted) {
  if (!wanted.empty()) return wanted;
  const int all = default_threads().threads;
  return all > 1 ? std::vector<int>{1, all} : std::vector<int>{1};
}

void add_thread_flags(CLI::App& sub, std::string& isa, std::vector<int>& threads) {
  sub.add_option("--isa", isa, "Instruction set (default: the best)")->type_name("NAME");
  sub.add_option("-t,--threads", threads, "Thread counts (default: 1 and all)")
      ->type_name("N,M")
      ->delimiter(',')
      ->check(CLI::Range(1, 4096))
      ->allow_extra_args(false);
}

void machine(const std::string& isa, const std::vector<int>& threads, bool json) {
  const KernelTable& kernels = choose_kernels(isa, cpu_features());
  Json out = Json::array();
  if (!json)
    fmt::print(
        "{}, {}\n\n| {:<13} | threads | {:>10} | unit  | spread |\n| :------------ | ------: | ---------: | "
        ":---- | -----: |\n",
        cpu_name(), kernels.isa, "what", "median");
  for (const int t : thread_counts(threads)) {
    Prober prober(kernels, t);
    const auto show = [&](const char* name, const char* unit, double scale, const Rate& rate) {
      if (json)
        out.push_back({{"what", name},
                       {"unit", unit},
                       {"threads", t},
                       {"value", rate.value / scale},
                       {"spread", rate.spread},
                       {"isa", kernels.isa},
                       {"cpu", cpu_name()}});
      else
        fmt::print("| {:<13} | {:>7} | {:>10.1f} | {:<5} | {:>4.0f} % |\n", name, t, rate.value / scale, unit,
                   100 * rate.spread);
    };
    for (const Ceiling& c : prober.ceilings()) show(c.name, c.bytes ? "GB/s" : "GOP/s", 1e9, prober.rate(c));
    show("fork and join", "k/s", 1e3, prober.fork_join());
  }
  if (json) print_json(out);
}

}  // namespace

std::vector<KernelRow> bench_kernels(const KernelBenchOptions& options) {
  if (options.repeats < 5) usage("-r {}: expected 5 or more", options.repeats);
  const KernelTable& kernels = choose_kernels(options.isa, cpu_features());
  const std::vector<KernelCase> cases = chosen_cases(options.filters);
  std::vector<KernelRow> rows;
  for (const int threads : thread_counts(options.threads)) {
    Machine machine(kernels, threads);
    for (const KernelCase& c : cases)
      for (const bool cold : {true, false}) {
        if (cold ? !options.cold : !options.hot) continue;
        fmt::print(stderr, "{} {}, {}, {} thread{}\n", c.kernel, c.name, cold ? "cold" : "hot", threads,
                   threads == 1 ? "" : "s");
        rows.push_back(measure(kernels, c, machine, cold, options));
      }
  }
  return rows;
}

void add_bench_machine(CLI::App& bench) {
  struct Flags {
    std::string isa;
    std::vector<int> threads;
    bool json = false;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* sub = bench.add_subcommand("machine", "What this machine can do at most");
  add_thread_flags(*sub, flags->isa, flags->threads);
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] { machine(flags->isa, flags->threads, flags->json); });
}

void add_bench_kernels(CLI::App& bench) {
  struct Flags {
    KernelBenchOptions options;
    bool json = false, only_cold = false, only_hot = false, list = false;
  };
  auto flags = std::make_shared<Flags>();
  CLI::App* sub =
      bench.add_subcommand("kernels", "Every kernel at real sizes, as percent of what the machine could do");
  add_thread_flags(*sub, flags->options.isa, flags->options.threads);
  sub->add_option("filter", flags->options.filters, "Words that must occur in the kernel's or case's name");
  CLI::Option* cold = sub->add_flag("--cold", flags->only_cold, "Only with weights and caches from memory");
  sub->add_flag("--hot", flags->only_hot, "Only with the same ones again and again")->excludes(cold);
  sub->add_flag("--compare", flags->options.compare, "Also time the same work done otherwise");
  sub->add_option("-r,--repetitions", flags->options.repeats, "Samples, 5 or more (default: 7)")
      ->type_name("N");
  sub->add_flag("--list", flags->list, "Name the cases and end");
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] {
    if (flags->list) {
      for (const KernelCase& c : chosen_cases(flags->options.filters))
        fmt::print("{} {}\n", c.kernel, c.name);
      return;
    }
    flags->options.hot = !flags->only_cold, flags->options.cold = !flags->only_hot;
    const std::vector<KernelRow> rows = bench_kernels(flags->options);
    const std::string isa = choose_kernels(flags->options.isa, cpu_features()).isa;
    flags->json ? print_json(rows_json(rows, isa)) : print_rows(rows, isa);
  });
}

}  // namespace weft
