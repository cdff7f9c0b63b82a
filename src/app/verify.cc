// weft verify: recorded logits of golden folders against this machine's kernels.
#include "engine/verify.h"

#include <memory>

#include "app/cli.h"
#include "app/report.h"

namespace weft {
namespace {

struct VerifyFlags {
  std::vector<std::string> directories, isas = {""}, cases, execs = {"super"};
  std::vector<int> threads = {1}, chunks = {0};
  std::string dsa = "sparse";
  bool json = false;
};

Json row_json(const VerifyRow& row) {
  Json out = {{"case", row.name},
              {"mode", row.mode},
              {"tokens", row.tokens},
              {"chunk", row.chunk},
              {"max_error", row.error},
              {"mean_error", row.mean_error},
              {"row_quantile", row.row_quantile},
              {"bound", row.bound},
              {"pass", row.pass}};
  const auto count = [](int n) { return n < 0 ? Json() : Json(n); };  // null: not recorded
  out["sets_wrong"] = count(row.sets_wrong);
  out["experts_wrong"] = count(row.experts_wrong);
  out["greedy_wrong"] = count(row.greedy_wrong);
  return out;
}

Json report_json(const VerifyReport& report) {
  Json rows = Json::array();
  for (const VerifyRow& row : report.rows) rows.push_back(row_json(row));
  return {{"directory", report.directory},
          {"family", report.family},
          {"isa", report.isa},
          {"threads", report.threads},
          {"exec", report.exec},
          {"pass", report.pass()},
          {"rows", rows}};
}

// A forced run is judged by its row quantile, a free one by its largest error; both columns show.
void print_report(const VerifyReport& report) {
  fmt::print("{}: {}, {}, {} thread{}, {}: {}\n", report.directory, report.family, report.isa, report.threads,
             report.threads == 1 ? "" : "s", report.exec, report.pass() ? "pass" : "FAIL");
  fmt::print("  {:<16} {:<7} {:>6} {:>6} {:>10} {:>10} {:>10} {:>10} {:>5} {:>7} {:>6}  \n", "case", "mode",
             "tokens", "chunk", "max error", "nine rows", "mean", "bound", "sets", "experts", "greedy");
  const auto wrong = [](int n) { return n < 0 ? std::string("-") : std::to_string(n); };
  for (const VerifyRow& r : report.rows)
    fmt::print("  {:<16} {:<7} {:>6} {:>6} {:>10.3g} {:>10.3g} {:>10.3g} {:>10.3g} {:>5} {:>7} {:>6}  {}\n",
               r.name, r.mode, r.tokens, r.chunk ? std::to_string(r.chunk) : "all", r.error, r.row_quantile,
               r.mean_error, r.bound, wrong(r.sets_wrong), wrong(r.experts_wrong), wrong(r.greedy_wrong),
               r.pass ? "pass" : "FAIL");
}

void run_verify(const VerifyFlags& flags) {
  bool pass = true;
  Json all = Json::array();
  const auto check = [&](const std::string& directory) {
    for (const std::string& isa : flags.isas)
      for (const int threads : flags.threads)
        for (const std::string& exec : flags.execs) {
          const VerifyReport report = verify(
              directory, {isa, threads, flags.chunks, exec_mode(exec), flags.cases, dsa_mode(flags.dsa)});
          pass = pass && report.pass();
          if (flags.json)
            all.push_back(report_json(report));
          else
            print_report(report);
        }
  };
  for (const std::string& directory : flags.directories) {
    try {
      check(directory);
    } catch (const UsageError&) {
      throw;
    } catch (const Error& error) {  // one bad folder does not hide the others' results
      pass = false;
      if (flags.json) all.push_back({{"directory", directory}, {"pass", false}, {"error", error.what()}});
      fmt::print(stderr, "weft: {}\n", error.what());
    }
  }
  if (flags.json) print_json(all);
  if (!pass) throw ExitCode{kExitFailed};
}

}  // namespace

void add_verify(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("verify", "Compare with the recorded logits of golden folders");
  auto flags = std::make_shared<VerifyFlags>();
  sub->add_option("directories", flags->directories, "Folders with golden.json and golden.safetensors")
      ->type_name("DIR")
      ->required()
      ->take_all();
  sub->add_option("--isa", flags->isas, "Instruction sets (default: the best here)")
      ->type_name("A,B")
      ->delimiter(',')
      ->take_all()
      ->allow_extra_args(false);
  sub->add_option("-t,--threads", flags->threads, "Numbers of threads (default: 1)")
      ->type_name("N,M")
      ->delimiter(',')
      ->take_all()
      ->allow_extra_args(false)
      ->check(CLI::Range(1, 4096));
  sub->add_option("--chunk", flags->chunks, "Tokens per step, 0 = the whole prompt (default: 0)")
      ->type_name("N,M")
      ->delimiter(',')
      ->take_all()
      ->allow_extra_args(false)
      ->check(CLI::Range(0, 1 << 20));
  sub->add_option("--exec", flags->execs, "How steps run: super (default), streams, ops")
      ->type_name("A,B")
      ->delimiter(',')
      ->take_all()
      ->allow_extra_args(false);
  sub->add_option("--cases", flags->cases, "Names of cases (default: all)")
      ->type_name("N,M")
      ->delimiter(',')
      ->take_all()
      ->allow_extra_args(false);
  add_dsa_flag(*sub, flags->dsa);
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] { run_verify(*flags); });
}

}  // namespace weft
