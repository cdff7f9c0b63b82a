// weft run: continue a text, answer once, or continue token ids.
#include <unistd.h>

#include "app/answer.h"
#include "app/cli.h"
#include "app/model_flags.h"
#include "base/check.h"

namespace weft {
namespace {

struct RunFlags {
  CommonFlags common;
  SamplingFlags sampling;
  ChatFlags chat_flags;
  std::string prompt, file;
  bool has_prompt = false, has_file = false;
  bool chat = false, raw = false, ids = false, special = false, hide_prompt = false, quiet = false;
};

std::string prompt_text(const RunFlags& flags) {
  if (flags.has_prompt) return flags.prompt;
  if (!flags.has_file && ::isatty(STDIN_FILENO) == 1)
    Notes(flags.quiet).line("reading the prompt from the terminal: end it with Ctrl-D on a line of its own");
  std::string text = flags.has_file ? read_prompt_file(flags.file) : read_all(STDIN_FILENO, "stdin");
  if (text.ends_with('\n')) text.pop_back();  // the editor's or echo's, hardly meant
  return text;
}

std::vector<int32_t> prompt_ids(const RunFlags& flags, const std::string& text, Engine& engine,
                                ChatRequest& chat) {
  if (flags.ids) return parse_ids(text);
  if (flags.chat) {
    chat = begin_chat(flags.chat_flags, engine);
    chat.messages.push(chat_message("user", text));
    return engine.encode(engine.chat().encode(chat));
  }
  using Specials = Tokenizer::Specials;
  std::vector<int32_t> ids = engine.encode(text, flags.special ? Specials::all : Specials::none);
  const int bos = engine.config().bos;
  if (wants_bos(engine.config(), engine.model().checkpoint().path()) && (ids.empty() || ids[0] != bos))
    ids.insert(ids.begin(), bos);
  return ids;
}

void check(const RunFlags& flags) {
  if (flags.has_prompt && flags.has_file) usage("-p and -f: give the prompt once");
  if (flags.ids && flags.chat) usage("--ids and --chat: the chat format needs text");
  if (flags.raw && flags.chat) usage("--raw and --chat: choose one");
  if (flags.ids && !flags.sampling.stop.empty()) usage("--ids and --stop: stop strings need text");
  check_sampling_flags(flags.sampling);
}

void run(const RunFlags& flags) {
  check(flags);
  catch_interrupts(2);
  const std::string text = prompt_text(flags);
  if (text.empty()) usage("the prompt is empty: give text by -p, -f or stdin");
  const Notes notes(flags.quiet);
  const std::unique_ptr<Engine> engine = load_engine(flags.common, notes, !flags.ids);

  ChatRequest chat;
  Request request;
  request.prompt = prompt_ids(flags, text, *engine, chat);
  request.max_tokens = flags.sampling.max_tokens;
  request.stop = flags.sampling.stop;
  std::string says;
  request.sampling = sampling_params(flags.sampling, engine->config(), &says);
  notes.line("sampling  " + says);

  Output out;
  AnswerPrinter answer(out);
  std::unique_ptr<ChatParser> parser;
  if (flags.chat) {
    parser = engine->chat().parser(chat);
    request.hide_special = false;  // the parser reads them
  }
  Progress progress(notes, "reading  ");
  bool begun = false;
  const auto begin = [&] {  // the prompt shows when it has been read: until then the terminal holds the bar
    if (begun) return;
    begun = true;
    progress.clear();
    if (!flags.ids && !flags.chat && !flags.hide_prompt) out.write(text);
  };
  request.on_prefill = [&](int done, int total) {
    progress.update(static_cast<double>(done) / total, fmt::format("{} of {} tokens", done, total));
  };
  request.on_token = [&](int32_t token, const std::string& piece) {
    begin();
    if (flags.ids) {
      if (token >= 0) out.write((out.line_open() ? " " : "") + std::to_string(token));
    } else if (parser) {
      for (const ChatEvent& event : parser->push(piece)) answer.show(event);
    } else {
      out.write(piece);
    }
    if (out.reader_gone()) fail("stdout was closed by its reader");
  };

  const Engine::Id id = engine->submit(std::move(request));
  std::optional<Result> result;
  while (!(result = engine->take(id))) {
    if (interrupted()) engine->cancel(id);
    engine->step();
  }
  begin();
  if (parser)
    for (const ChatEvent& event : parser->finish()) answer.show(event);
  answer.finish();
  out.end_line();
  notes.line(describe_stats(result->stats));
  if (!flags.common.trace.empty()) engine->save_trace(flags.common.trace);
  if (result->finish == Finish::error) throw Error(result->error);
  if (result->finish == Finish::cancelled) throw ExitCode{kExitInterrupted};
}

}  // namespace

void add_run(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("run", "Continue a text (or, with --chat, answer one message)");
  auto flags = std::make_shared<RunFlags>();
  add_engine_flags(*sub, flags->common);
  CLI::Option* prompt =
      sub->add_option("-p,--prompt", flags->prompt, "The text to continue (default: read from stdin)")
          ->type_name("TEXT");
  CLI::Option* file = sub->add_option("-f,--file", flags->file,
                                      "Read the prompt from a file; one newline at its end is left out")
                          ->type_name("FILE");
  add_sampling_flags(*sub, flags->sampling);
  sub->add_flag("--chat", flags->chat, "Send the prompt as a message in the model's chat format");
  sub->add_flag("--raw", flags->raw, "Continue the prompt as it is (default)");
  sub->add_flag("--special", flags->special, "Recognise the names of special tokens in the prompt");
  sub->add_flag("--ids", flags->ids, "Prompt and output are token ids, as in \"1 2 3\"; needs no tokenizer");
  sub->add_flag("--no-display-prompt", flags->hide_prompt, "Do not repeat the prompt before the text");
  sub->add_option("--trace", flags->common.trace, "Write what ran when, as a Chrome trace")
      ->type_name("FILE");
  sub->add_flag("-q,--quiet", flags->quiet, "Nothing on stderr but warnings and errors");
  add_chat_flags(*sub, flags->chat_flags);
  sub->callback([flags, prompt, file] {
    flags->has_prompt = prompt->count() > 0;
    flags->has_file = file->count() > 0;
    run(*flags);
  });
}

}  // namespace weft
