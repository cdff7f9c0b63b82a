// The two ends of a chat: the request as flags describe it, and the answer as a person reads it.
#pragma once

#include <string>

#include "app/cli.h"
#include "app/terminal.h"
#include "text/chat.h"

namespace weft {

struct ChatFlags {
  std::string system, effort;
  bool thinking = true;
};
void add_chat_flags(CLI::App& sub, ChatFlags& flags);
// A request that holds the system message, if any. error: a model without tokenizer; thinking that cannot be
// turned off.
ChatRequest begin_chat(const ChatFlags& flags, const Engine& engine);
PyJson chat_message(const char* role, const std::string& content);

// Reasoning is set apart from the answer, tool calls are named.
class AnswerPrinter {
 public:
  // Reasoning is dim where the terminal has colours; else every line of it starts with "| ".
  explicit AnswerPrinter(Output& out) : out_(out), dim_(terminal_style(1).color) {}
  ~AnswerPrinter();
  void show(const ChatEvent& event);
  void finish();  // ends the last line and the dim text

 private:
  enum class Part : uint8_t { none, reasoning, content, call };
  void enter(Part part);

  Output& out_;
  bool dim_;
  Part part_ = Part::none;
};

}  // namespace weft
