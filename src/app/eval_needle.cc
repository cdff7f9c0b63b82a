// weft eval needle: can the model find a fact in a long text? Answers are generated, not teacher-forced.
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "app/answer.h"
#include "app/eval.h"
#include "app/heat_map.h"
#include "app/model_flags.h"
#include "app/needle.h"
#include "app/questions.h"
#include "app/report.h"
#include "base/check.h"

namespace weft {
namespace {

struct NeedleFlags {
  CommonFlags common;
  ChatFlags chat;
  std::vector<int> lengths = {1024, 4096}, depths = {0, 25, 50, 75, 100};
  int facts = 8, trials = 10, max_tokens = 64, parallel = 2;
  int64_t seed = 1;
  std::string haystack, svg;
  bool json = false, quiet = false;
};

constexpr size_t kShownFailures = 20;

struct Cell {
  int right = 0, other_fact = 0, done = 0;
};
struct Failure {
  int length, depth;
  std::string question, expected, answer;
};
struct NeedleReport {
  std::vector<std::vector<Cell>> cells;  // [length][depth]
  std::vector<Failure> failures;         // the first ones
  int64_t prompt_tokens = 0, read_tokens = 0, answer_tokens = 0;
  int longest = 0;  // prompt
  double seconds = 0;
};

// One document and the depths asked about it.
struct Trial {
  int length;
  std::vector<int> depths;  // indices
  int number;
};

// Where there are facts enough, one document has one at every depth and is read once for all of them.
std::vector<Trial> plan_trials(const NeedleFlags& flags) {
  std::vector<Trial> trials;
  const int depths = static_cast<int>(flags.depths.size());
  for (int l = 0; l < static_cast<int>(flags.lengths.size()); ++l)
    for (int t = 0; t < flags.trials; ++t) {
      if (flags.facts >= depths) {
        trials.push_back({l, {}, t});
        for (int d = 0; d < depths; ++d) trials.back().depths.push_back(d);
      } else {
        for (int d = 0; d < depths; ++d) trials.push_back({l, {d}, t * depths + d});
      }
    }
  return trials;
}

class NeedleRun {
 public:
  NeedleRun(const NeedleFlags& flags, Engine& engine, const Haystack& haystack)
      : flags_(flags), engine_(engine), haystack_(haystack), chat_(begin_chat(flags.chat, engine)) {
    report_.cells.assign(flags.lengths.size(), std::vector<Cell>(flags.depths.size()));
  }

  NeedleReport run(Progress& progress) {
    const std::vector<Trial> trials = plan_trials(flags_);
    const double start = monotonic_seconds();
    std::vector<Worker> workers(std::min<size_t>(flags_.parallel, trials.size()));
    size_t next = 0, done = 0;
    int64_t total = 0;
    for (const Trial& t : trials) total += flags_.lengths[t.length];
    total_ = total;
    while (done < trials.size()) {
      for (Worker& w : workers) {
        if (!w.questions && next < trials.size()) begin(w, trials[next++]);
        if (!w.questions) continue;
        if (const int question = w.questions->poll(); question >= 0) judge_answer(w, question);
        if (w.questions->done()) {
          read_ += flags_.lengths[w.trial.length] - w.seen;
          w = {};
          ++done;
        } else if (!w.questions->running()) {
          Worker* worker = &w;
          w.questions->submit({[this, worker](int at, int) {
                                 read_ += std::max(0, at - worker->seen);
                                 worker->seen = std::max(worker->seen, at);
                               },
                               {}});
        }
      }
      if (interrupted()) throw ExitCode{kExitInterrupted};
      engine_.step();
      int right = 0, asked = 0;
      for (const auto& row : report_.cells)
        for (const Cell& c : row) right += c.right, asked += c.done;
      progress.update(
          static_cast<double>(read_) / static_cast<double>(total),
          fmt::format("{} of {} documents, {} of {} answers right", done, trials.size(), right, asked));
    }
    report_.seconds = monotonic_seconds() - start;
    return std::move(report_);
  }

 private:
  struct Worker {
    Trial trial{};
    NeedleDocument document;
    std::unique_ptr<Questions> questions;
    int seen = 0;  // tokens of the document read so far
  };

  void begin(Worker& w, const Trial& trial) {
    const int length = flags_.lengths[trial.length];
    Draw draw(static_cast<uint64_t>(flags_.seed) * 0x9e3779b97f4a7c15u +
              static_cast<uint64_t>(length) * 1000003u + static_cast<uint64_t>(trial.number));
    std::vector<int> depths;
    for (const int d : trial.depths) depths.push_back(flags_.depths[d]);
    const std::vector<Fact> facts = draw_facts(flags_.facts, draw);
    w.trial = trial;
    // The haystack counts sentences one by one, and the chat format adds its own: shorten until the prompt
    // fits.
    for (int room = length;;) {
      Draw same = draw;
      w.document = haystack_.document(room, depths, facts, same);
      std::vector<std::string> asked;
      for (size_t i = 0; i < depths.size(); ++i) asked.push_back(w.document.facts[i].question());
      w.questions = std::make_unique<Questions>(engine_, chat_, w.document.text, asked, flags_.max_tokens);
      int longest = 0;
      for (size_t i = 0; i < asked.size(); ++i)
        longest = std::max(longest, w.questions->prompt_tokens(static_cast<int>(i)));
      if (longest <= length) {
        report_.longest = std::max(report_.longest, longest);
        break;
      }
      room -= longest - length;
      if (room <= 0) usage("--lengths {}: too short for a question in this chat format", length);
    }
  }

  void judge_answer(Worker& w, int question) {
    const Answer& answer = w.questions->answer(question);
    if (answer.finish == Finish::error) throw Error(answer.error);
    const Fact& asked = w.document.facts[question];
    const int depth = w.trial.depths[question];
    Cell& cell = report_.cells[w.trial.length][depth];
    const Verdict verdict = judge(answer.content, asked, w.document.facts);
    ++cell.done;
    cell.right += verdict == Verdict::right;
    cell.other_fact += verdict == Verdict::other_fact;
    report_.prompt_tokens += answer.stats.prompt_tokens;
    report_.read_tokens += answer.stats.prompt_tokens - answer.stats.reused_tokens;
    report_.answer_tokens += answer.stats.output_tokens;
    if (question == 0) report_.read_tokens += w.questions->shared_tokens();
    if (verdict != Verdict::right && report_.failures.size() < kShownFailures)
      report_.failures.push_back({flags_.lengths[w.trial.length], flags_.depths[depth], asked.question(),
                                  asked.value, answer.content});
  }

  const NeedleFlags& flags_;
  Engine& engine_;
  const Haystack& haystack_;
  ChatRequest chat_;
  NeedleReport report_;
  int64_t total_ = 0, read_ = 0;
};

double share(int right, int done) {
  return done ? static_cast<double>(right) / done : 0;
}
Cell sum(const std::vector<Cell>& cells) {
  Cell s;
  for (const Cell& c : cells) s.right += c.right, s.other_fact += c.other_fact, s.done += c.done;
  return s;
}

Json needle_json(const NeedleFlags& flags, const NeedleReport& r, const Engine& engine) {
  Json accuracy = Json::array(), correct = Json::array(), other = Json::array(), by_length = Json::array();
  Cell all;
  for (const auto& row : r.cells) {
    Json shares = Json::array(), counts = Json::array(), others = Json::array();
    for (const Cell& c : row)
      shares.push_back(share(c.right, c.done)), counts.push_back(c.right), others.push_back(c.other_fact);
    accuracy.push_back(shares), correct.push_back(counts), other.push_back(others);
    const Cell s = sum(row);
    by_length.push_back(share(s.right, s.done));
    all.right += s.right, all.done += s.done;
  }
  Json failures = Json::array();
  for (const Failure& f : r.failures)
    failures.push_back({{"length", f.length},
                        {"depth", f.depth},
                        {"question", f.question},
                        {"expected", f.expected},
                        {"answer", f.answer}});
  return {{"model", engine.model().checkpoint().name()},
          {"dsa", flags.common.dsa},
          {"isa", engine.model().kernels().isa},
          {"lengths", flags.lengths},
          {"depths", flags.depths},
          {"facts", flags.facts},
          {"trials", flags.trials},
          {"seed", flags.seed},
          {"accuracy", accuracy},
          {"correct", correct},
          {"other_fact", other},
          {"accuracy_by_length", by_length},
          {"mean_accuracy", share(all.right, all.done)},
          {"questions", all.done},
          {"guess_rate", 1.0 / flags.facts},
          {"prompt_tokens", r.prompt_tokens},
          {"read_tokens", r.read_tokens},
          {"answer_tokens", r.answer_tokens},
          {"longest_prompt", r.longest},
          {"seconds", r.seconds},
          {"failures", failures}};
}

void print_needle(const NeedleFlags& flags, const NeedleReport& r, const Engine& engine) {
  fmt::print(
      "{}: {} facts of one template, one asked: guessing gives {:.1f} %; {} trials a cell; --dsa={}\n\n",
      engine.model().checkpoint().name(), flags.facts, 100.0 / flags.facts, flags.trials, flags.common.dsa);
  const auto cell = [](const Cell& c) {
    return fmt::format("{:.1f} % ({}/{})", 100 * share(c.right, c.done), c.right, c.done);
  };
  fmt::print("| {:<10} |", "depth");
  for (const int length : flags.lengths) fmt::print(" {:>18} |", fmt::format("{} tokens", length));
  fmt::print("\n| :{:-<9} |", "");
  for (size_t i = 0; i < flags.lengths.size(); ++i) fmt::print(" {:->17}: |", "");
  for (size_t d = 0; d < flags.depths.size(); ++d) {
    fmt::print("\n| {:<10} |", fmt::format("{} %", flags.depths[d]));
    for (const auto& row : r.cells) fmt::print(" {:>18} |", cell(row[d]));
  }
  fmt::print("\n| {:<10} |", "all");
  for (const auto& row : r.cells) fmt::print(" {:>18} |", cell(sum(row)));
  Cell all;
  for (const auto& row : r.cells)
    all.other_fact += sum(row).other_fact, all.right += sum(row).right, all.done += sum(row).done;
  fmt::print("\n\n{} of {} right ({:.1f} %), {} named another fact; {:.1f} s, {} tokens read, {} written\n",
             all.right, all.done, 100 * share(all.right, all.done), all.other_fact, r.seconds, r.read_tokens,
             r.answer_tokens);
}

void write_svg(const NeedleFlags& flags, const NeedleReport& r, const Engine& engine) {
  HeatMap map;
  map.title = fmt::format("{}: 1 of {} facts found, guessing {:.1f} %, {} trials a cell",
                          engine.model().checkpoint().name(), flags.facts, 100.0 / flags.facts, flags.trials);
  map.column_title = "tokens", map.row_title = "depth";
  for (const int length : flags.lengths) map.columns.push_back(std::to_string(length));
  for (size_t d = 0; d < flags.depths.size(); ++d) {
    map.rows.push_back(fmt::format("{} %", flags.depths[d]));
    map.cells.emplace_back();
    for (const auto& row : r.cells) map.cells.back().push_back(share(row[d].right, row[d].done));
  }
  std::ofstream file(flags.svg, std::ios::binary);
  file << svg(map);
  file.close();
  if (!file) fail("cannot write {}", printable(flags.svg));
}

void check(const NeedleFlags& flags) {
  if (flags.lengths.empty() || flags.depths.empty())
    usage("--lengths and --depths: give at least one of each");
  for (const int length : flags.lengths)
    if (length < 64) usage("--lengths {}: expected 64 tokens or more", length);
  for (const int depth : flags.depths)
    if (depth < 0 || depth > 100) usage("--depths {}: expected a percentage, 0 to 100", depth);
  Draw draw(0);
  draw_facts(flags.facts, draw);
  if (flags.common.context) usage("-c: --lengths says how long the prompts are");
}

std::string read_haystack(const NeedleFlags& flags) {
  if (!flags.haystack.empty()) return read_prompt_file(flags.haystack);
  const std::string path = resolve_model_folder(flags.common.model) + "/eval/haystack.txt";
  if (::access(path.c_str(), R_OK) != 0)
    fail("{} does not exist: give a long plain text by --haystack FILE", printable(path));
  return read_prompt_file(path);
}

void run_needle(const NeedleFlags& flags) {
  check(flags);
  catch_interrupts(2);
  const Notes notes(flags.quiet);
  std::string text = read_haystack(flags);
  CommonFlags common = flags.common;
  common.context = *std::max_element(flags.lengths.begin(), flags.lengths.end()) + flags.max_tokens;
  EngineOptions options = engine_options(common);
  options.need_tokenizer = true;
  options.sequences = flags.parallel;
  options.checkpoints = 2 * flags.parallel;
  const std::unique_ptr<Engine> engine = load_engine(common, notes, options);
  const Haystack haystack(std::move(text), [&](std::string_view piece) {
    return static_cast<int>(engine->encode(piece, Tokenizer::Specials::none).size());
  });
  Progress progress(notes, "asking   ");
  const NeedleReport report = NeedleRun(flags, *engine, haystack).run(progress);
  progress.clear();
  if (!flags.svg.empty()) write_svg(flags, report, *engine);
  if (flags.json)
    print_json(needle_json(flags, report, *engine));
  else
    print_needle(flags, report, *engine);
}

}  // namespace

void add_eval_needle(CLI::App& eval) {
  CLI::App* sub = eval.add_subcommand(
      "needle", "Share of facts found in long texts, by length and depth; answers are generated and greedy");
  auto flags = std::make_shared<NeedleFlags>();
  add_engine_flags(*sub, flags->common);
  const auto list = [sub](const char* name, std::vector<int>& values, const char* help) {
    sub->add_option(name, values, help)
        ->type_name("N,M")
        ->delimiter(',')
        ->take_all()
        ->allow_extra_args(false);
  };
  list("--lengths", flags->lengths, "Tokens of the prompts, at most (default: 1024,4096)");
  list("--depths", flags->depths, "Where the fact asked for stands, in percent (default: 0,25,50,75,100)");
  sub->add_option("--facts", flags->facts, "Facts of one template in each text, one asked (default: 8)")
      ->type_name("N");
  sub->add_option("--trials", flags->trials, "Questions a cell, each about another text (default: 10)")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  sub->add_option("--seed", flags->seed, "Same seed, same texts (default: 1)")
      ->type_name("N")
      ->check(CLI::NonNegativeNumber);
  sub->add_option("--haystack", flags->haystack,
                  "Plain text the documents are cut from (default: MODEL/eval/haystack.txt)")
      ->type_name("FILE");
  sub->add_option("-n,--predict", flags->max_tokens,
                  "Most tokens of an answer, reasoning included (default: 64)")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  sub->add_option("--parallel", flags->parallel, "Documents at once; changes the speed only (default: 2)")
      ->type_name("N")
      ->check(CLI::Range(1, 256));
  sub->add_option("--svg", flags->svg, "Write the table as a picture")->type_name("FILE");
  sub->add_flag("-q,--quiet", flags->quiet, "Nothing on stderr but warnings and errors");
  sub->add_flag("--json", flags->json, "As JSON");
  add_chat_flags(*sub, flags->chat);
  sub->callback([flags] { run_needle(*flags); });
}

}  // namespace weft
