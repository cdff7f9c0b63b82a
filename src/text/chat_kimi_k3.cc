// Kimi-K3 and K3.1: "XTML". The prompt is a list of segments, cut exactly as the model's own encoder cuts it.
//
//   <|open|>NAME key="value"<|sep|>  ...  <|close|>NAME<|sep|>   and <|end_of_msg|> after every message
//
// Only the four marks are control tokens; names, attributes and values are ordinary text, so that nothing a
// user writes can open or close anything. The generation prompt opens `think` (or `response`), and the model
// closes it.
#include <algorithm>

#include "text/chat_formats.h"
#include "text/chat_message.h"
#include "text/chat_parser.h"

namespace weft {
namespace {

bool thinks(const ChatRequest& request) {
  return request.thinking && request.effort != "none";
}

class Writer {
 public:
  using Pairs = std::initializer_list<std::pair<std::string_view, std::string_view>>;

  void text(std::string_view text) {
    if (!text.empty()) segments_.push_back({std::string(text), false});
  }
  void control(std::string_view text) { segments_.push_back({std::string(text), true}); }

  void open(std::string_view name, Pairs attributes = {}) {
    control("<|open|>");
    text(name);
    for (const auto& [key, value] : attributes) {
      text(fmt::format(" {}", key));
      text("=\"");
      text(escaped(value));
      text("\"");
    }
    control("<|sep|>");
  }
  void close(std::string_view name) {
    control("<|close|>");
    text(name);
    control("<|sep|>");
  }
  void end_message() {
    close("message");
    control("<|end_of_msg|>");
  }
  void system(std::string_view type, std::string_view body) {
    open("message", {{"role", "system"}, {"type", type}});
    text(body);
    end_message();
  }
  std::vector<ChatSegment> take() { return std::move(segments_); }

 private:
  static std::string escaped(std::string_view value) {
    std::string out;
    for (const char c : value) out += c == '&' ? "&amp;" : c == '"' ? "&quot;" : std::string(1, c);
    return out;
  }
  std::vector<ChatSegment> segments_;
};

std::string tools_json(const std::vector<PyJson>& tools) {
  PyJson list = PyJson::array();
  for (const PyJson& tool : tools) list.push(tool);
  return "```json\n" + list.dump(PyJson::Style::sorted) + "\n```";
}

class Encoder {
 public:
  explicit Encoder(const ChatRequest& request)
      : request_(request), thinking_(thinks(request)), messages_(message_views(request)) {}

  std::vector<ChatSegment> encode() {
    const std::string choice = tool_choice_word(request_);
    declare_tools(choice);
    if (thinking_) state_effort();
    for (size_t i = 0; i < messages_.size();) {
      if (messages_[i].role() == "tool") {
        size_t end = i;
        while (end < messages_.size() && messages_[end].role() == "tool") ++end;
        results(i, end);
        i = end;
      } else {
        message(messages_[i++]);
      }
    }
    if (choice == "none")
      out_.system(
          "tool-choice",
          "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.");
    else if (choice != "auto")
      out_.system(
          "tool-choice",
          "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.");
    state_response_format();
    if (request_.add_generation_prompt) {
      out_.open("message", {{"role", "assistant"}});
      out_.open(thinking_ ? "think" : "response");
    }
    return out_.take();
  }

 private:
  void declare_tools(const std::string& choice) {
    std::vector<PyJson> tools = tool_list(request_.tools, "tools");
    // The format has no word for "this tool": naming one leaves it as the only tool, and a call required.
    if (choice.starts_with("="))
      std::erase_if(tools, [&](const PyJson& tool) {
        return tool_function(tool).find("name")->text() != choice.substr(1);
      });
    if (tools.empty()) return;
    out_.system("tool-declare",
                "# Tools\nHere are the available tools, described in JSONSchema.\n\n" + tools_json(tools));
  }

  void state_effort() {
    const std::string effort = request_.effort.empty() ? "max" : request_.effort;
    if (effort != "low" && effort != "medium" && effort != "high" && effort != "max")
      fail("thinking_effort: \"{}\" is unknown; expected low, medium, high, max or none", effort);
    out_.system(
        "thinking-effort",
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response "
        "channel), supported values include `low`, `medium`, `high`, and `max`.\n"
        "Now the system is invoked with `thinking_effort=" +
            effort + "`.");
  }

  void state_response_format() {
    const std::string word = response_format_word(request_);
    if (word == "text") return;
    std::string body =
        "The system is invoked with `response_format=" + word +
        "`.\nYour response must be raw JSON data without markdown code blocks (```json) or any "
        "additional formatting.";
    if (word == "json_schema")
      body += "\nThe JSON data must match the following schema:\n```json\n" +
              response_schema(request_).dump(PyJson::Style::sorted) + "\n```";
    out_.system("response-format", body);
  }

  void content(const MessageView& message) {
    for (const ContentPart& part : message.parts()) {
      if (part.medium.empty())
        out_.text(part.text);
      else if (part.medium == "image" && request_.images)
        out_.control("<|kimi_image_placeholder|>");
      else
        fail("{}: {} parts are not supported here; send text", message.where("content"), part.medium);
    }
  }

  void message(const MessageView& message) {
    const bool assistant = message.role() == "assistant";
    const bool system = message.role() == "system" || message.role() == "developer";
    if (!assistant && !system && message.role() != "user") message.refuse_role();
    if (const PyJson* tools = message.json().find("tools"); system && tools) {
      out_.system(
          "tool-declare",
          "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\nYou have "
          "access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n" +
              tools_json(tool_list(*tools, message.where("tools"))));
      if (!message.json().find("content")) return;
    }
    const std::string_view role = assistant ? "assistant" : system ? "system" : "user";
    const std::string name = message.string("name");
    if (name.empty())
      out_.open("message", {{"role", role}});
    else
      out_.open("message", {{"role", role}, {"name", name}});
    if (assistant)
      answer(message);
    else
      content(message);
    out_.end_message();
  }

  void answer(const MessageView& message) {
    if (thinking_) {
      const std::string reasoning = message.reasoning();
      out_.open("think");
      if (!python_strip(reasoning).empty()) out_.text(reasoning);
      out_.close("think");
    }
    out_.open("response");
    content(message);
    out_.close("response");
    calls_ = message.calls();
    results_ = 0;
    if (calls_.empty()) return;
    out_.open("tools");
    for (size_t i = 0; i < calls_.size(); ++i) {
      out_.open("call", {{"tool", calls_[i].name}, {"index", std::to_string(i + 1)}});
      arguments(calls_[i]);
      out_.close("call");
    }
    out_.close("tools");
  }

  void arguments(const ToolCall& call) {
    if (call.arguments->is_string()) {
      // Cut-off arguments of an earlier answer are kept as they are; what is JSON but no object is a client's
      // mistake.
      try {
        PyJson::parse(call.arguments->text(), call.where);
      } catch (const NestingError&) {
        throw;
      } catch (const Error&) {
        if (!python_strip(call.arguments->text()).empty()) {
          out_.open("json", {{"type", "object"}});
          out_.text(call.arguments->text());
          out_.close("json");
          return;
        }
      }
    }
    const PyJson object = argument_object(call);
    for (const auto& [key, value] : object.members()) {
      out_.open("argument", {{"key", key}, {"type", value.kind_name()}});
      out_.text(argument_text(value));
      out_.close("argument");
    }
  }

  // A run of results. It is put into the order of the calls only if every id in it belongs to a call; the
  // index counts results since the last assistant message, not calls.
  void results(size_t begin, size_t end) {
    struct Result {
      const MessageView* message;
      size_t call;  // calls_.size() when it matches none
    };
    std::vector<Result> run;
    bool all_match = true;
    for (size_t i = begin; i < end; ++i) {
      const std::string id = messages_[i].string("tool_call_id");
      const auto match = std::find_if(calls_.begin(), calls_.end(),
                                      [&](const ToolCall& c) { return !id.empty() && c.id == id; });
      run.push_back({&messages_[i], size_t(match - calls_.begin())});
      all_match &= match != calls_.end();
    }
    if (all_match)
      std::stable_sort(run.begin(), run.end(),
                       [](const Result& a, const Result& b) { return a.call < b.call; });
    for (const Result& result : run) {
      std::string name = result.message->string("tool");
      if (name.empty()) name = result.message->string("name");
      const size_t call = all_match ? result.call : results_;
      if (name.empty() && call < calls_.size()) name = calls_[call].name;
      if (name.empty())
        fail("{}: missing, and no call of the assistant message before it says which tool answered",
             result.message->where("name"));
      out_.open("message", {{"role", "tool"}, {"tool", name}, {"index", std::to_string(++results_)}});
      content(*result.message);
      out_.end_message();
    }
  }

  const ChatRequest& request_;
  bool thinking_;
  std::vector<MessageView> messages_;
  Writer out_;
  std::vector<ToolCall> calls_;  // of the last assistant message
  size_t results_ = 0;           // since then
};

constexpr std::string_view kOpenThink = "<|open|>think<|sep|>", kCloseThink = "<|close|>think<|sep|>",
                           kOpenResponse = "<|open|>response<|sep|>",
                           kCloseResponse = "<|close|>response<|sep|>", kOpenTools = "<|open|>tools<|sep|>",
                           kCloseTools = "<|close|>tools<|sep|>", kOpenCall = "<|open|>call",
                           kCloseCall = "<|close|>call<|sep|>", kOpenArgument = "<|open|>argument",
                           kCloseArgument = "<|close|>argument<|sep|>", kOpenJson = "<|open|>json",
                           kCloseJson = "<|close|>json<|sep|>", kCloseMessage = "<|close|>message<|sep|>",
                           kEndOfMessage = "<|end_of_msg|>";

class K3Parser : public StreamParser {
 public:
  explicit K3Parser(const ChatRequest& request)
      : StreamParser(request), state_(thinks(request) ? State::think : State::response) {}

 protected:
  bool step() override {
    switch (state_) {
      case State::think:
        return in_think();
      case State::response:
        return in_response();
      case State::between:
        return in_between();
      case State::tools:
        return in_tools();
      case State::call:
        return in_call();
      case State::tag:
        return in_tag();
      case State::argument:
        return in_argument();
      case State::json:
        return in_json();
      case State::done:
        break;
    }
    std::string ignored;
    scan({}, ignored);
    return false;
  }

 private:
  enum class State : uint8_t { think, response, between, tools, call, tag, argument, json, done };

  bool go(State state) {
    state_ = state;
    fresh_ = true;
    return true;
  }

  // Where a channel that ends may lead; `hit` counts from the first of these in the caller's list of markers.
  bool leave(int hit) {
    static constexpr State kNext[] = {State::response, State::tools, State::done, State::done};
    return go(kNext[hit]);
  }

  bool in_think() {
    std::string text;
    const int hit = scan(
        {kOpenResponse, kOpenTools, kCloseMessage, kEndOfMessage, kCloseThink, kCloseResponse, kOpenThink},
        text);
    reason(text);
    if (hit == kNone) return false;
    if (hit < 4) return leave(hit);
    if (hit == 4) return go(State::between);
    if (hit == 6) {  // the model repeats the prompt's opener; elsewhere the same words are text
      if (!std::exchange(fresh_, false)) reason(kOpenThink);
      return true;
    }
    // A closer of the response without an opener: the model went straight to its answer.
    emit(Kind::reasoning_was_content, "");
    emit(Kind::content, std::exchange(reasoning_, {}));
    return go(State::between);
  }

  void reason(std::string_view text) {
    if (text.empty()) return;
    fresh_ = false;
    reasoning_ += text;
    emit(Kind::reasoning, text);
  }

  bool in_response() {
    std::string text;
    const int hit = scan({kOpenResponse, kOpenTools, kCloseMessage, kEndOfMessage, kCloseResponse}, text);
    if (!text.empty()) fresh_ = false;
    emit(Kind::content, text);
    if (hit == kNone) return false;
    if (hit == 4) return go(State::between);
    if (hit != 0) return leave(hit);
    if (!std::exchange(fresh_, false)) emit(Kind::content, kOpenResponse);
    return true;
  }

  // Outside all channels: layout is dropped, but words are part of the answer.
  bool in_between() {
    std::string text;
    const int hit =
        scan({kOpenResponse, kOpenTools, kCloseMessage, kEndOfMessage, kOpenThink, kCloseResponse}, text);
    const bool blank = text.find_first_not_of(" \t\r\n") == std::string::npos;
    if (fresh_ && blank) {
      space_between_ += text;
    } else {
      emit(Kind::content, std::exchange(space_between_, {}) + text);
      fresh_ = false;
    }
    if (hit == kNone) return false;
    space_between_.clear();
    if (hit < 4) return leave(hit);
    return go(hit == 4 ? State::think : State::between);
  }

  bool in_tools() {
    std::string ignored;
    const int hit = scan({kCloseMessage, kEndOfMessage, kCloseTools, kOpenCall}, ignored);
    if (hit == kNone) return false;
    if (hit == 3) return tag("call");
    return go(hit == 2 ? State::between : State::done);
  }

  bool in_call() {
    std::string ignored;
    const int hit =
        scan({kCloseMessage, kEndOfMessage, kCloseTools, kCloseCall, kOpenArgument, kOpenJson}, ignored);
    if (hit == kNone) return false;
    if (hit == 4) return tag("argument");
    if (hit == 5) return tag("json");
    if (hit == 3) {
      close_arguments();
      end_call();
      return go(State::tools);
    }
    lose_call();
    return go(hit == 2 ? State::between : State::done);
  }

  bool tag(const char* name) {
    tag_ = name;
    attributes_.clear();
    quoted_ = false;
    return go(State::tag);
  }

  // To the <|sep|> outside quotes: a name may itself contain "<|sep|>", but its quotes are escaped.
  bool in_tag() {
    std::string text;
    const int hit = quoted_ ? scan({"\""}, text) : scan({"\"", "<|sep|>"}, text);
    attributes_ += text;
    if (hit == kNone) return false;
    if (hit == 0) {
      attributes_ += '"';
      quoted_ = !quoted_;
      return true;
    }
    const bool known = attributes_.empty() || attributes_[0] == ' ';  // not <|open|>callback
    const Attributes attributes = parse_attributes(attributes_, true);
    if (tag_ == "call") {
      if (!known) return go(State::tools);
      begin_call(attribute(attributes, "tool"));
      return go(State::call);
    }
    if (!known) return go(State::call);
    if (tag_ == "json") return go(State::json);
    const std::string_view type = attribute(attributes, "type");
    begin_argument(attribute(attributes, "key"), type.empty() || type == "string");
    return go(State::argument);
  }

  bool in_argument() {
    std::string text;
    const int hit = scan({kCloseArgument}, text);
    argument_piece(text);
    if (hit == kNone) return false;
    end_argument();
    return go(State::call);
  }

  bool in_json() {
    std::string ignored;
    return scan({kCloseJson}, ignored) != kNone && go(State::call);
  }

  State state_;
  bool fresh_ = true;  // nothing read in this state yet
  std::string reasoning_;
  std::string space_between_;
  std::string_view tag_;
  std::string attributes_;
  bool quoted_ = false;
};

class KimiK3 : public ChatFormat {
 public:
  const char* name() const override { return "kimi_k3"; }
  Thinking thinking() const override { return Thinking::optional; }
  std::vector<std::string> stops() const override { return {"<|end_of_msg|>"}; }
  std::vector<ChatSegment> encode(const ChatRequest& request) const override {
    return Encoder(request).encode();
  }
  std::unique_ptr<ChatParser> parser(const ChatRequest& request) const override {
    return std::make_unique<K3Parser>(request);
  }
};

}  // namespace

const ChatFormat& kimi_k3_format() {
  static const KimiK3 format;
  return format;
}

}  // namespace weft
