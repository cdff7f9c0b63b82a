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

struct Bound {
  std::string name;
  double seconds;
};

// max(bytes / bandwidth, flops / peak). A hot case's bytes come from the smallest cache that holds them.
Bound bound_of(const Ceilings& c, const Cost& cost, Peak peak, bool cold) {
  const Topology machine = topology();
  const Rate& bytes = cold || cost.bytes > static_cast<double>(machine.l3) / 2   ? c.dram_read
                      : cost.bytes > static_cast<double>(machine.l2) * c.threads ? c.l3_read
                                                                                 : c.l2_read;
  const char* level = &bytes == &c.dram_read ? "dram" : &bytes == &c.l3_read ? "l3" : "l2";
  const Rate& rate = peak == Peak::int8 && c.int8.value > 0 ? c.int8 : peak == Peak::fma ? c.fma : c.product;
  const double move = cost.bytes / bytes.value, compute = cost.flops / rate.value;
  if (move >= compute) return {level, move};
  return {&rate == &c.int8 ? "int8" : &rate == &c.fma ? "fma" : "product", compute};
}

// Samples of every function in turn, so that a slow minute of the machine hits all of them.
std::vector<std::vector<double>> sample(const std::vector<const std::function<void(int)>*>& runs, int copies,
                                        int repeats) {
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
  std::vector<std::vector<double>> samples(runs.size());
  for (int r = 0; r < repeats; ++r)
    for (size_t i = 0; i < runs.size(); ++i) samples[i].push_back(timed(i));
  return samples;
}

KernelRow measure(const KernelTable& kernels, const KernelCase& c, const Ceilings& ceilings, bool cold,
                  const KernelBenchOptions& options) {
  Lab lab(kernels, ceilings.threads, cold);
  const Timed timed = c.make(lab);
  std::vector<const std::function<void(int)>*> runs = {&timed.run};
  if (options.compare)
    for (const auto& other : timed.others) runs.push_back(&other.second);
  const auto samples = sample(runs, timed.copies, options.repeats);
  KernelRow row = {c.kernel, c.name, cold ? "cold" : "hot", ceilings.threads, 0, 0, 0, 0, "", 0, {}};
  row.seconds = median(samples[0]);
  const auto [low, high] = std::minmax_element(samples[0].begin(), samples[0].end());
  row.spread = (*high - *low) / row.seconds;
  row.gflops = timed.cost.flops / row.seconds / 1e9, row.gbs = timed.cost.bytes / row.seconds / 1e9;
  const Bound bound = bound_of(ceilings, timed.cost, timed.peak, cold);
  row.bound = bound.name, row.percent_of_bound = 100 * bound.seconds / row.seconds;
  for (size_t i = 1; i < runs.size(); ++i)
    row.compare.emplace_back(timed.others[i - 1].first, median(samples[i]) / row.seconds);
  return row;
}

std::vector<KernelCase> chosen_cases(const std::vector<std::string>& filters) {
  std::vector<KernelCase> all, chosen;
  add_gemm_cases(all);
  add_moe_cases(all);
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
      "| {:<10} | {:<44} | {:<5} | {:>7} | {:>10} | {:>6} | {:>8} | {:>7} | {:<7} | {:>10} | compare |\n",
      "kernel", "case", "cache", "threads", "time", "spread", "GFLOP/s", "GB/s", "bound", "% of bound");
  fmt::print(
      "| :{0:-<9} | :{0:-<43} | :{0:-<4} | {0:->6}: | {0:->9}: | {0:->5}: | {0:->7}: | {0:->6}: | :{0:-<6} | "
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

struct Line {
  const char* name;
  const char* unit;
  double scale;
  Rate Ceilings::*rate;
};
constexpr Line kLines[] = {
    {"product", "GFLOP/s", 1e9, &Ceilings::product},    {"int8 product", "GOP/s", 1e9, &Ceilings::int8},
    {"f32 FMA", "GFLOP/s", 1e9, &Ceilings::fma},        {"L2 read", "GB/s", 1e9, &Ceilings::l2_read},
    {"L2 write", "GB/s", 1e9, &Ceilings::l2_write},     {"L3 read", "GB/s", 1e9, &Ceilings::l3_read},
    {"L3 write", "GB/s", 1e9, &Ceilings::l3_write},     {"DRAM read", "GB/s", 1e9, &Ceilings::dram_read},
    {"DRAM write", "GB/s", 1e9, &Ceilings::dram_write}, {"fork and join", "k/s", 1e3, &Ceilings::fork_join},
};

void machine(const std::string& isa, const std::vector<int>& threads, bool json) {
  const KernelTable& kernels = choose_kernels(isa, cpu_features());
  Json out = Json::array();
  if (!json)
    fmt::print(
        "{}, {}\n\n| {:<13} | threads | {:>10} | unit    | spread |\n| :------------ | ------: | ---------: "
        "| :------ | -----: |\n",
        cpu_name(), kernels.isa, "what", "median");
  for (const int t : thread_counts(threads)) {
    const Ceilings c = measure_ceilings(kernels, t);
    for (const Line& line : kLines) {
      const Rate& rate = c.*line.rate;
      if (rate.value == 0) continue;
      if (json)
        out.push_back({{"what", line.name},
                       {"unit", line.unit},
                       {"threads", t},
                       {"value", rate.value / line.scale},
                       {"spread", rate.spread},
                       {"isa", kernels.isa},
                       {"cpu", cpu_name()}});
      else
        fmt::print("| {:<13} | {:>7} | {:>10.1f} | {:<7} | {:>4.0f} % |\n", line.name, t,
                   rate.value / line.scale, line.unit, 100 * rate.spread);
    }
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
    fmt::print(stderr, "ceilings, {} thread{}\n", threads, threads == 1 ? "" : "s");
    const Ceilings ceilings = measure_ceilings(kernels, threads);
    for (const KernelCase& c : cases)
      for (const bool cold : {true, false}) {
        if (cold ? !options.cold : !options.hot) continue;
        fmt::print(stderr, "{} {}, {}, {} thread{}\n", c.kernel, c.name, cold ? "cold" : "hot", threads,
                   threads == 1 ? "" : "s");
        rows.push_back(measure(kernels, c, ceilings, cold, options));
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
