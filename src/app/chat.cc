// weft chat: a conversation on the terminal. What was said stays in the caches, so a turn costs its own
// tokens only.
#include "app/answer.h"
#include "app/cli.h"
#include "app/line_reader.h"
#include "app/model_flags.h"
#include "base/check.h"

namespace weft {
namespace {

constexpr const char* kHelp =
    "/clear forgets the conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer.\n"
    "Alt-Enter starts a new line; pasted lines are one message.";

struct ChatCommand {
  CommonFlags common;
  SamplingFlags sampling;
  ChatFlags chat;
  bool quiet = false;
};

class Conversation {
 public:
  Conversation(const ChatCommand& flags, Engine& engine, const Notes& notes)
      : flags_(flags),
        engine_(engine),
        notes_(notes),
        chat_(begin_chat(flags.chat, engine)),
        session_(engine.new_session()) {
    std::string says;
    sampling_ = sampling_params(flags.sampling, engine.config(), &says);
    notes.line("sampling  " + says);
    // Words that the format does not know should fail now and not after the first message.
    ChatRequest trial = chat_;
    trial.messages.push(chat_message("user", "hello"));
    engine.chat().encode(trial);
  }

  void clear() {
    chat_ = begin_chat(flags_.chat, engine_);
    said_ = PyJson::array();
  }

  // error (usage): the conversation no longer fits the context; it is as it was before.
  void turn(const std::string& message) {
    ChatRequest request = chat_;
    for (const PyJson& old : said_.items()) request.messages.push(old);
    const PyJson user = chat_message("user", message);
    request.messages.push(user);

    const ChatFormat& format = engine_.chat();
    const std::unique_ptr<ChatParser> parser = format.parser(request);
    Output out;
    AnswerPrinter printer(out);
    ChatReply reply;
    const auto take = [&](const std::vector<ChatEvent>& events) {
      for (const ChatEvent& event : events) {
        reply.add(event);
        printer.show(event);
      }
    };
    Request work;
    work.prompt = engine_.encode(format.encode(request));
    work.max_tokens = flags_.sampling.max_tokens;
    work.stop = flags_.sampling.stop;
    work.sampling = sampling_;
    work.hide_special = false;  // the parser reads them
    work.session = &session_;
    Progress progress(notes_, "reading");
    work.on_prefill = [&](int done, int total) {
      progress.update(static_cast<double>(done) / total, fmt::format("{} of {} tokens", done, total));
    };
    work.on_token = [&](int32_t, const std::string& piece) {
      progress.clear();
      take(parser->push(piece));
      if (out.reader_gone()) fail("stdout was closed by its reader");
    };
    const Engine::Id id = engine_.submit(std::move(work));
    std::optional<Result> result;
    while (!(result = engine_.take(id))) {
      if (interrupted()) engine_.cancel(id);
      engine_.step();
    }
    forget_interrupts();
    progress.clear();
    take(parser->finish());
    printer.finish();
    if (result->finish == Finish::cancelled) notes_.line("(stopped)");
    notes_.line(describe_stats(result->stats));
    if (result->finish == Finish::error) throw Error(result->error);
    // A message stopped before its answer began was never sent.
    if (result->output.empty()) return;
    PyJson answer = chat_message("assistant", reply.content);
    if (!reply.reasoning.empty()) answer.set("reasoning_content", PyJson::string(reply.reasoning));
    said_.push(user);
    said_.push(std::move(answer));
    if (session_.sequence.position() + 1 >= engine_.context())
      notes_.line(fmt::format("(the context of {} tokens is full: /clear, or start with a larger -c)",
                              engine_.context()));
  }

 private:
  const ChatCommand& flags_;
  Engine& engine_;
  const Notes& notes_;
  ChatRequest chat_;               // its messages: the system's
  PyJson said_ = PyJson::array();  // the turns
  SamplingParams sampling_;
  Session session_;
};

bool blank(const std::string& text) {
  return text.find_first_not_of(" \t\r\n") == text.npos;
}

void chat(const ChatCommand& flags) {
  check_sampling_flags(flags.sampling);
  catch_interrupts(3);  // one stops an answer; who presses three times in one means the program
  const Notes notes(flags.quiet);
  const std::unique_ptr<Engine> engine = load_engine(flags.common, notes, true);
  Conversation conversation(flags, *engine, notes);
  forget_interrupts();
  LineReader reader;
  if (reader.interactive()) notes.line(kHelp);

  bool warned = false;
  for (;;) {
    std::string message;
    const LineReader::Status status = reader.read("> ", message);
    if (status == LineReader::Status::end) return;
    if (status == LineReader::Status::interrupt) {
      forget_interrupts();
      if (!reader.interactive() || (warned && blank(message))) throw ExitCode{kExitInterrupted};
      warned = true;
      notes.line("(Ctrl-C once more ends the program)");
      continue;
    }
    warned = false;
    if (blank(message)) continue;
    if (message == "/quit" || message == "/exit") return;
    if (message == "/clear") {
      conversation.clear();
      continue;
    }
    if (message == "/help") {
      notes.line(kHelp);
      continue;
    }
    try {
      conversation.turn(message);
    } catch (const UsageError& error) {
      if (!reader.interactive()) throw;
      notes.warning(error.what());
    }
  }
}

}  // namespace

void add_chat(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("chat", "Talk to a model");
  auto flags = std::make_shared<ChatCommand>();
  add_engine_flags(*sub, flags->common);
  add_sampling_flags(*sub, flags->sampling);
  add_chat_flags(*sub, flags->chat);
  sub->add_flag("-q,--quiet", flags->quiet, "Nothing on stderr but warnings and errors");
  sub->callback([flags] { chat(*flags); });
}

}  // namespace weft
