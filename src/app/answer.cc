#include "app/answer.h"

#include "base/check.h"

namespace weft {

void add_chat_flags(CLI::App& sub, ChatFlags& flags) {
  const char* group = "Chat";
  sub.add_option("--system", flags.system, "System message")->type_name("TEXT")->group(group);
  sub.add_flag("!--no-thinking", flags.thinking, "Answer without reasoning, where the model can")
      ->group(group);
  sub.add_option("--effort", flags.effort,
                 "Reasoning effort, in the words of the model (low, high, max, ...)")
      ->type_name("WORD")
      ->group(group);
}

ChatRequest begin_chat(const ChatFlags& flags, const Engine& engine) {
  engine.tokenizer();  // its error says what is missing
  if (!flags.thinking && engine.chat().thinking() == ChatFormat::Thinking::always)
    usage("--no-thinking: models of the {} format always reason", engine.chat().name());
  ChatRequest request;
  request.thinking = flags.thinking;
  request.effort = flags.effort;
  if (!flags.system.empty()) request.messages.push(chat_message("system", flags.system));
  return request;
}

PyJson chat_message(const char* role, const std::string& content) {
  PyJson message = PyJson::object();
  message.set("role", PyJson::string(role));
  message.set("content", PyJson::string(content));
  return message;
}

AnswerPrinter::~AnswerPrinter() {
  try {
    if (dim_ && part_ == Part::reasoning) out_.style("\x1b[0m");  // left by an exception: no dim shell
  } catch (...) {                                                 // stdout is what failed
  }
}

void AnswerPrinter::enter(Part part) {
  if (part == part_) return;
  if (part_ == Part::reasoning && dim_) out_.style("\x1b[0m");
  if (part_ != Part::none) {
    out_.end_line();
    out_.write("\n");
  }
  part_ = part;
  if (part == Part::reasoning && dim_) out_.style("\x1b[2m");
}

void AnswerPrinter::show(const ChatEvent& event) {
  switch (event.kind) {
    case ChatEvent::Kind::reasoning: {
      if (event.text.empty()) return;
      enter(Part::reasoning);
      if (dim_) {
        out_.write(event.text);
        return;
      }
      std::string marked;
      bool line_start = !out_.line_open();
      for (const char c : event.text) {
        if (line_start) marked += "| ";
        marked += c;
        line_start = c == '\n';
      }
      out_.write(marked);
      return;
    }
    case ChatEvent::Kind::content:
      if (event.text.empty()) return;
      enter(Part::content);
      out_.write(event.text);
      return;
    case ChatEvent::Kind::call_begin:
      enter(Part::call);
      out_.end_line();
      out_.write("[calls " + event.text + "] ");
      return;
    case ChatEvent::Kind::call_arguments:
      out_.write(event.text);
      return;
    case ChatEvent::Kind::call_end:
    case ChatEvent::Kind::call_lost:
      out_.end_line();
      return;
    case ChatEvent::Kind::reasoning_was_content:
      return;  // it follows as content
  }
}

void AnswerPrinter::finish() {
  if (part_ == Part::reasoning && dim_) out_.style("\x1b[0m");
  part_ = Part::none;
  out_.end_line();
}

}  // namespace weft
