// DeepSeek-V3.2: encoding_dsv32.py of the release, which has no Jinja template.
//
// Whether the model thinks is written after the last user turn (or the last result after it): <think>, or
// </think> at once. Reasoning of earlier turns is not written; that of a tool loop after the last user turn
// is.
#include "text/chat_formats.h"
#include "text/chat_message.h"
#include "text/chat_parser.h"

namespace weft {
namespace {

constexpr const char* kName = "deepseek_v32";
constexpr std::string_view kDsml = "｜DSML｜";

// Between `## Tools` and the list of functions. The tags in it are tokens for the model, as they are in
// calls.
constexpr std::string_view kToolWords =
    R"(## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply to the user:
<｜DSML｜function_calls>
<｜DSML｜invoke name="$FUNCTION_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$FUNCTION_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. Here is an example:

<｜DSML｜function_calls>
...
</｜DSML｜function_calls>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
)";

bool thinks(const ChatRequest& request) {
  return request.thinking && request.effort != "none";
}

class Encoder {
 public:
  explicit Encoder(const ChatRequest& request)
      : request_(request),
        thinking_(thinks(request)),
        messages_(message_views(request)),
        last_user_(last_message(messages_, {"user", "developer"})) {}

  std::vector<ChatSegment> encode() {
    out_.control("<｜begin▁of▁sentence｜>");
    // The request's own tools and format go on a system message of their own, in front.
    declare_tools(offered_tools(request_, kName));
    if (response_format_word(request_) == "json_object")
      fail("response_format: the {} format has words for json_schema only", kName);
    if (response_format_word(request_) == "json_schema") state_schema(response_schema(request_));
    for (const MessageView& message : messages_) {
      if (message.role() == "system")
        system(message);
      else if (message.role() == "developer")
        developer(message);
      else if (message.role() == "user")
        user(message, message.text(kName));
      else if (message.role() == "assistant")
        answer(message);
      else if (message.role() == "tool")
        result(message);
      else
        message.refuse_role();
    }
    return out_.take();
  }

 private:
  // Fixed text of the format: the marks in it are tokens.
  void fixed(std::string_view text) {
    while (!text.empty()) {
      size_t at = text.size();
      std::string_view mark;
      for (const std::string_view candidate :
           {kDsml, std::string_view("<think>"), std::string_view("</think>")})
        if (const size_t found = text.find(candidate); found < at) at = found, mark = candidate;
      out_.text(text.substr(0, at)).control(mark);
      text.remove_prefix(at + mark.size());
    }
  }

  void declare_tools(const std::vector<PyJson>& tools) {
    if (tools.empty()) return;
    out_.text("\n\n");
    fixed(kToolWords);
    for (const PyJson& tool : tools) out_.text(tool_function(tool).dump() + "\n");
    out_.text("</functions>\n");
  }

  void state_schema(const PyJson& schema) {
    out_.text("\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n" +
              schema.dump());
  }

  void extras(const MessageView& message) {
    if (const PyJson* tools = message.json().find("tools"))
      declare_tools(tool_list(*tools, message.where("tools")));
    if (const PyJson* schema = message.json().find("response_format")) state_schema(*schema);
  }

  void system(const MessageView& message) {
    if (message.json().find("content") || !message.json().find("tools")) out_.text(message.text(kName));
    extras(message);
  }

  void open_answer(bool think) { out_.control(think ? "<think>" : "</think>"); }

  void user(const MessageView& message, const std::string& text) {
    out_.control("<｜User｜>").text(text);
    close_user(message);
  }

  void developer(const MessageView& message) {
    const std::string text = message.text(kName);
    if (text.empty()) fail("{}: empty; a developer message is the user's text", message.where("content"));
    out_.control("<｜User｜>");
    extras(message);
    out_.text("\n\n# The user's message is: " + text);
    close_user(message);
  }

  void close_user(const MessageView& message) {
    out_.control("<｜Assistant｜>");
    open_answer(thinking_ && int(message.index()) == last_user_);
  }

  void answer(const MessageView& message) {
    const std::vector<ToolCall> calls = message.calls();
    if (thinking_ && int(message.index()) > last_user_) {
      const std::string reasoning = message.reasoning();
      if (reasoning.empty() && calls.empty())
        fail("{}: missing; with thinking on, an answer after the last user message needs it (or tool_calls)",
             message.where("reasoning_content"));
      out_.text(reasoning).control("</think>");
    }
    out_.text(message.text(kName));
    if (!calls.empty()) {
      fixed("\n\n<｜DSML｜function_calls>");
      for (const ToolCall& call : calls) invoke(call);
      fixed("\n</｜DSML｜function_calls>");
    }
    out_.control("<｜end▁of▁sentence｜>");
    expected_ = calls.size();
    results_ = 0;
  }

  void invoke(const ToolCall& call) {
    fixed("\n<｜DSML｜invoke name=\"");
    out_.text(call.name + "\">\n");
    const PyJson arguments = argument_object(call);
    bool first = true;
    for (const auto& [key, value] : arguments.members()) {
      if (!std::exchange(first, false)) out_.text("\n");
      fixed("<｜DSML｜parameter name=\"");
      out_.text(key + (value.is_string() ? "\" string=\"true\">" : "\" string=\"false\">") +
                argument_text(value));
      fixed("</｜DSML｜parameter>");
    }
    fixed("\n</｜DSML｜invoke>");
  }

  // Results are written in the order given; the block closes, and the answer opens, when all of them are
  // there.
  void result(const MessageView& message) {
    const bool follows = message.index() > 0 && (messages_[message.index() - 1].role() == "tool" ||
                                                 messages_[message.index() - 1].role() == "assistant");
    if (!follows || results_ == expected_)
      fail(
          "{}: a tool result without a call: it must follow the assistant message whose tool_calls it "
          "answers",
          message.where("role"));
    if (results_++ == 0) out_.text("\n\n<function_results>");
    out_.text("\n<result>" + message.text(kName) + "</result>");
    if (results_ < expected_) return;
    out_.text("\n</function_results>\n\n");
    open_answer(thinking_ && int(message.index()) > last_user_);
  }

  const ChatRequest& request_;
  bool thinking_;
  std::vector<MessageView> messages_;
  int last_user_;
  SegmentList out_;
  size_t expected_ = 0;  // calls of the last assistant message
  size_t results_ = 0;   // of which these have a result
};

class V32Parser : public StreamParser {
 public:
  explicit V32Parser(const ChatRequest& request)
      : StreamParser(request), state_(thinks(request) ? State::reasoning : State::content) {}

 protected:
  bool step() override {
    switch (state_) {
      case State::reasoning:
        return in_reasoning();
      case State::content:
        return in_content();
      case State::section:
        return in_section();
      case State::call:
        return in_call();
      case State::tag:
        return in_tag();
      case State::value:
        return in_value();
    }
    return false;
  }

  void finished() override {
    if (state_ == State::reasoning) settle(Kind::reasoning);
    if (state_ == State::content && calls() == 0) settle(Kind::content);
  }

 private:
  enum class State : uint8_t { reasoning, content, section, call, tag, value };
  static constexpr std::string_view kOpenCalls = "<｜DSML｜function_calls>",
                                    kCloseCalls = "</｜DSML｜function_calls>";

  bool go(State state) {
    state_ = state;
    return true;
  }

  bool in_reasoning() {
    std::string text;
    const int hit = scan({"</think>", kOpenCalls, "<think>"}, text);
    if (!text.empty()) fresh_ = false;
    prose(Kind::reasoning, text);
    if (hit == kNone) return false;
    if (hit == 2) {  // the model repeats the prompt's opener; later the same letters are text
      if (!std::exchange(fresh_, false)) prose(Kind::reasoning, "<think>");
      return true;
    }
    if (hit == 1) return drop_space(), go(State::section);
    settle(Kind::reasoning);
    return go(State::content);
  }

  bool in_content() {
    std::string text;
    const int hit = scan({kOpenCalls}, text);
    prose(Kind::content, text);
    if (hit == kNone) return false;
    drop_space();
    return go(State::section);
  }

  bool in_section() {
    std::string layout;
    const int hit = scan({"<｜DSML｜invoke", kCloseCalls}, layout);
    if (hit == kNone) return false;
    return hit == 0 ? tag(true) : go(State::content);
  }

  bool in_call() {
    std::string layout;
    const int hit = scan({"<｜DSML｜parameter", "</｜DSML｜invoke>", kCloseCalls}, layout);
    if (hit == kNone) return false;
    if (hit == 0) return tag(false);
    if (hit == 2) return lose_call(), go(State::content);
    close_arguments();
    end_call();
    return go(State::section);
  }

  bool tag(bool invoke) {
    invoke_ = invoke;
    quoted_ = false;
    attributes_.clear();
    return go(State::tag);
  }

  bool in_tag() {
    std::string text;
    const int hit = quoted_ ? scan({"\""}, text) : scan({"\"", ">"}, text);
    attributes_ += text;
    if (hit == kNone) return false;
    if (hit == 0) {
      attributes_ += '"';
      quoted_ = !quoted_;
      return true;
    }
    const Attributes attributes = parse_attributes(attributes_, false);
    if (invoke_) return begin_call(attribute(attributes, "name")), go(State::call);
    begin_argument(attribute(attributes, "name"), attribute(attributes, "string") != "false");
    return go(State::value);
  }

  bool in_value() {
    std::string text;
    const int hit = scan({"</｜DSML｜parameter>"}, text);
    argument_piece(text);
    if (hit == kNone) return false;
    end_argument();
    return go(State::call);
  }

  State state_;
  bool fresh_ = true;  // no reasoning read yet
  bool invoke_ = false;
  bool quoted_ = false;
  std::string attributes_;
};

class DeepseekV32 : public ChatFormat {
 public:
  const char* name() const override { return kName; }
  Thinking thinking() const override { return Thinking::optional; }
  std::vector<std::string> stops() const override { return {"<｜end▁of▁sentence｜>"}; }
  std::vector<ChatSegment> encode(const ChatRequest& request) const override {
    return Encoder(request).encode();
  }
  std::unique_ptr<ChatParser> parser(const ChatRequest& request) const override {
    return std::make_unique<V32Parser>(request);
  }
};

}  // namespace

const ChatFormat& deepseek_v32_format() {
  static const DeepseekV32 format;
  return format;
}

}  // namespace weft
