// weft ask: questions about a document, which is read once.
#include <algorithm>
#include <utility>

#include "app/answer.h"
#include "app/cli.h"
#include "app/model_flags.h"
#include "app/questions.h"
#include "app/report.h"
#include "base/check.h"

namespace weft {
namespace {

struct AskFlags {
  CommonFlags common;
  ChatFlags chat;
  std::string file;
  std::vector<std::string> questions;
  int max_tokens = 256;
  bool quiet = false;
};

std::string rate(double tokens, double seconds) {
  return seconds > 0 ? fmt::format("{:.0f} tokens/s", tokens / seconds) : "no time";
}

// How many rows of the caches the last token's attention read, of how many there are.
std::string rows_read(const Engine& engine, int visible) {
  const Builder& parts = engine.model().parts();
  const ModelConfig& config = engine.config();
  int dsa = 0, dense = 0;
  for (const LayerSpec& layer : config.layers) {
    const bool selects = parts.selection_width > 0 && (layer.own_indexer || layer.shared_index);
    if (layer.mixer == Mixer::mla) (selects ? dsa : dense) += 1;
  }
  std::string text;
  if (dsa) {
    const int read = std::min(visible, config.indexer.topk);
    text = fmt::format("{} of {} rows ({:.2g} %) in each of {} DSA layers", read, visible,
                       100.0 * read / visible, dsa);
  }
  if (dense) text += fmt::format("{}all {} rows in each of {} MLA layers", dsa ? ", " : "", visible, dense);
  const int recurrent = config.num_layers() - dsa - dense;
  if (recurrent) text += fmt::format("{}none in {} KDA layers", dsa || dense ? ", " : "", recurrent);
  return text;
}

void report(const AskFlags& flags, Engine& engine, const Questions& questions, const Notes& notes) {
  if (questions.shared_tokens())
    notes.line(fmt::format("document  {} tokens, read once in {:.2f} s: {}", questions.shared_tokens(),
                           questions.shared_seconds(),
                           rate(questions.shared_tokens(), questions.shared_seconds())));
  int visible = 0;
  for (size_t i = 0; i < flags.questions.size(); ++i) {
    const RequestStats& s = questions.answer(static_cast<int>(i)).stats;
    visible = s.prompt_tokens + s.output_tokens - 1;
    const double first = s.prefill_seconds + (i == 0 ? questions.shared_seconds() : 0);
    notes.line(fmt::format(
        "answer {}  first token after {:.1f} ms ({} of {} prompt tokens were in the caches), then {}", i + 1,
        1e3 * first, i == 0 ? 0 : s.reused_tokens, s.prompt_tokens,
        s.output_tokens > 1 ? rate(s.output_tokens - 1, s.decode_seconds) : "nothing"));
  }
  const CacheLayout& layout = engine.model().parts().caches;
  const auto pages = static_cast<size_t>(pages_for(visible));
  notes.line(fmt::format("caches    {} for {} tokens: latent rows {}, index keys {}; recurrent state {}",
                         human_bytes((layout.latent_bytes + layout.index_bytes) * pages + layout.slot_bytes),
                         visible, human_bytes(layout.latent_bytes * pages),
                         human_bytes(layout.index_bytes * pages), human_bytes(layout.slot_bytes)));
  notes.line("attention the last query read " + rows_read(engine, visible));
}

void ask(const AskFlags& flags) {
  catch_interrupts(2);
  const Notes notes(flags.quiet);
  std::string document = read_prompt_file(flags.file);
  document.erase(document.find_last_not_of(" \r\n\t") + 1);
  if (document.empty()) usage("{} holds no text", printable(flags.file));
  const std::unique_ptr<Engine> engine = load_engine(flags.common, notes, true);
  Questions questions(*engine, begin_chat(flags.chat, *engine), document, flags.questions, flags.max_tokens);
  Output out;
  while (!questions.done()) {
    AnswerPrinter answer(out);
    Progress progress(notes, "reading  ");
    bool begun = false;
    const auto begin = [&] {  // the bar and the answer share the terminal
      progress.clear();
      if (!std::exchange(begun, true)) out.write("> " + flags.questions[questions.next()] + "\n");
    };
    questions.submit({[&](int done, int total) {
                        progress.update(static_cast<double>(done) / total,
                                        fmt::format("{} of {} tokens", done, total));
                      },
                      [&](const ChatEvent& event) {
                        begin();
                        answer.show(event);
                        if (out.reader_gone()) fail("stdout was closed by its reader");
                      }});
    int answered = -1;
    while (questions.running()) {
      if (interrupted()) questions.cancel();
      engine->step();
      answered = questions.poll();
    }
    answer.finish();
    out.end_line();
    if (interrupted()) throw ExitCode{kExitInterrupted};
    if (answered < 0) continue;
    const Answer& done = questions.answer(answered);
    if (done.finish == Finish::error) throw Error(done.error);
    if (!begun) out.write("> " + flags.questions[answered] + "\n(no answer)\n");
    if (!questions.done()) out.write("\n");
  }
  report(flags, *engine, questions, notes);
}

}  // namespace

void add_ask(CLI::App& app) {
  CLI::App* sub =
      app.add_subcommand("ask", "Questions about a document, which is read once; answers are greedy");
  auto flags = std::make_shared<AskFlags>();
  add_engine_flags(*sub, flags->common);
  sub->add_option("-f,--file", flags->file, "The document, a plain text")->type_name("FILE")->required();
  sub->add_option(
         "-q,--question",
         [flags](const CLI::results_t& words) {
           flags->questions = words;
           return true;
         },
         "A question; may be given several times")
      ->type_name("TEXT")
      ->required()
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
  sub->add_option("-n,--predict", flags->max_tokens, "Most tokens of an answer (default: 256)")
      ->type_name("N")
      ->check(CLI::PositiveNumber);
  sub->add_flag("--quiet", flags->quiet, "Nothing on stderr but warnings and errors");
  add_chat_flags(*sub, flags->chat);
  sub->callback([flags] { ask(*flags); });
}

}  // namespace weft
