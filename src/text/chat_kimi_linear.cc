// Kimi-Linear, in the template of Kimi-K2-Instruct: <|im_ROLE|>name<|im_middle|>text<|im_end|> per message.
//
// Whatever ids a client uses, calls are renumbered functions.NAME:N through the conversation and results take
// those in order. No reasoning.
#include <algorithm>
#include <deque>

#include "text/chat_formats.h"
#include "text/chat_message.h"
#include "text/chat_parser.h"

namespace weft {
namespace {

constexpr const char* kName = "kimi_linear";

class Encoder {
 public:
  explicit Encoder(const ChatRequest& request) : request_(request) {}

  std::vector<ChatSegment> encode() {
    const std::vector<MessageView> messages = message_views(request_);
    if (response_format_word(request_) != "text")
      fail("response_format: the {} format has no words for it; describe the JSON in a message", kName);
    if (const std::vector<PyJson> tools = offered_tools(request_, kName); !tools.empty()) {
      PyJson list = PyJson::array();
      for (const PyJson& tool : tools) list.push(tool);
      out_.control("<|im_system|>").text("tool_declare").control("<|im_middle|>").text(list.dump());
      out_.control("<|im_end|>");
    }
    // The new line after the default system turn is an accident of the template that the model was trained
    // with.
    if (!messages.empty() && messages[0].role() != "system" && messages[0].role() != "developer")
      out_.control("<|im_system|>")
          .text("system")
          .control("<|im_middle|>")
          .text("You are Kimi, an AI assistant created by Moonshot AI.")
          .control("<|im_end|>")
          .text("\n");
    for (const MessageView& message : messages) turn(message);
    if (request_.add_generation_prompt)
      out_.control("<|im_assistant|>").text("assistant").control("<|im_middle|>");
    return out_.take();
  }

 private:
  void turn(const MessageView& message) {
    const std::string role = message.role() == "developer" ? "system" : message.role();
    if (role != "system" && role != "user" && role != "assistant" && role != "tool") message.refuse_role();
    const std::string name = message.string("name");
    out_.control(role == "user" ? "<|im_user|>" : role == "assistant" ? "<|im_assistant|>" : "<|im_system|>");
    out_.text(name.empty() ? role : name).control("<|im_middle|>");
    if (role == "tool") out_.text("## Return of " + result_id(message, name) + "\n");
    out_.text(message.text(kName));
    if (role == "assistant") calls(message.calls());
    out_.control("<|im_end|>");
  }

  void calls(const std::vector<ToolCall>& calls) {
    if (calls.empty()) return;
    out_.control("<|tool_calls_section_begin|>");
    for (const ToolCall& call : calls) {
      pending_.push_back(next_id(call.name));
      out_.control("<|tool_call_begin|>").text(pending_.back()).control("<|tool_call_argument_begin|>");
      out_.text(arguments(call)).control("<|tool_call_end|>");
    }
    out_.control("<|tool_calls_section_end|>");
  }

  // A string goes in as it is; it is read only to refuse what would overflow the next reader's stack.
  static std::string arguments(const ToolCall& call) {
    if (call.arguments->is_object()) return call.arguments->dump();
    try {
      PyJson::parse(call.arguments->text(), call.where);
    } catch (const NestingError&) {
      throw;
    } catch (const Error&) {
    }
    return call.arguments->text();
  }

  std::string next_id(const std::string& name) { return fmt::format("functions.{}:{}", name, numbered_++); }

  std::string result_id(const MessageView& message, const std::string& name) {
    if (pending_.empty() && name.empty())
      fail("{}: missing, and no call is left that this could be the result of", message.where("name"));
    if (pending_.empty()) return next_id(name);
    const std::string id = pending_.front();
    pending_.pop_front();
    return id;
  }

  const ChatRequest& request_;
  SegmentList out_;
  size_t numbered_ = 0;
  std::deque<std::string> pending_;  // calls without a result yet
};

class KimiLinearParser : public StreamParser {
 public:
  using StreamParser::StreamParser;

 protected:
  bool step() override {
    switch (state_) {
      case State::content:
        return in_content();
      case State::section:
        return in_section();
      case State::id:
        return in_id();
      case State::arguments:
        return in_arguments();
    }
    return false;
  }

 private:
  enum class State : uint8_t { content, section, id, arguments };

  bool go(State state) {
    state_ = state;
    id_.clear();
    return true;
  }

  bool in_content() {
    std::string text;
    // The family's models write the section's name in both numbers, or leave the section out.
    const int hit =
        scan({"<|tool_call_begin|>", "<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"}, text);
    emit(Kind::content, text);
    return hit != kNone && go(hit == 0 ? State::id : State::section);
  }

  bool in_section() {
    std::string layout;
    const int hit =
        scan({"<|tool_call_begin|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"}, layout);
    return hit != kNone && go(hit == 0 ? State::id : State::content);
  }

  bool in_id() {
    std::string text;
    const int hit = scan({"<|tool_call_argument_begin|>", "<|tool_call_end|>"}, text);
    id_ += text;
    if (hit == kNone) return false;
    const std::string id(python_strip(id_));
    std::string name = id.substr(0, id.rfind(':'));
    if (name.starts_with("functions.")) name.erase(0, 10);
    begin_call(name, id);
    blank_ = true;
    return hit == 0 ? go(State::arguments) : close();
  }

  bool in_arguments() {
    std::string text;
    const int hit = scan({"<|tool_call_end|>"}, text);
    if (blank_) text.erase(0, std::min(text.find_first_not_of(" \t\r\n"), text.size()));
    if (!text.empty()) blank_ = false;
    call_text(text);
    return hit != kNone && close();
  }

  bool close() {
    if (blank_) call_text("{}");
    end_call();
    return go(State::section);
  }

  State state_ = State::content;
  std::string id_;
  bool blank_ = true;  // no arguments yet
};

class KimiLinear : public ChatFormat {
 public:
  const char* name() const override { return kName; }
  Thinking thinking() const override { return Thinking::never; }
  std::vector<std::string> stops() const override { return {"<|im_end|>"}; }
  std::vector<ChatSegment> encode(const ChatRequest& request) const override {
    return Encoder(request).encode();
  }
  std::unique_ptr<ChatParser> parser(const ChatRequest& request) const override {
    return std::make_unique<KimiLinearParser>(request);
  }
};

}  // namespace

const ChatFormat& kimi_linear_format() {
  static const KimiLinear format;
  return format;
}

}  // namespace weft
