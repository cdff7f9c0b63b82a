// GLM-5.3 and GLM-5.3-Flash. Role tags are tokens and turns have no end mark: the next role tag ends one.
//
// The model always thinks, and its output starts inside the reasoning, whatever a client asked for; a parser
// that waited for <think> would take all of it for the answer.
#include <algorithm>
#include <map>
#include <set>

#include "text/chat_formats.h"
#include "text/chat_message.h"
#include "text/chat_parser.h"

namespace weft {
namespace {

constexpr const char* kName = "glm5";

class Encoder {
 public:
  explicit Encoder(const ChatRequest& request) : request_(request), messages_(message_views(request)) {}

  std::vector<ChatSegment> encode() {
    const char* effort = request_.effort == "low" ? "Low" : request_.effort == "high" ? "High" : "Max";
    out_.control("[gMASK]<sop><|system|>").text(std::string("Reasoning Effort: ") + effort);
    if (response_format_word(request_) != "text")
      fail("response_format: the {} format has no words for it; describe the JSON in a message", kName);
    declare_tools(offered_tools(request_, kName));
    const int last_user = last_message(messages_, {"user"});
    for (size_t i = 0; i < messages_.size(); ++i) {
      const MessageView& message = messages_[i];
      if (message.role() == "user") {
        out_.control("<|user|>");
        content(message);
      } else if (message.role() == "system" || message.role() == "developer") {
        out_.control("<|system|>");
        content(message);
      } else if (message.role() == "assistant") {
        answer(message, !request_.clear_thinking || int(i) > last_user);
      } else if (message.role() == "tool") {
        i = results(i);
      } else {
        message.refuse_role();
      }
    }
    if (request_.add_generation_prompt) out_.control("<|assistant|><think>");
    return out_.take();
  }

 private:
  void declare_tools(const std::vector<PyJson>& tools) {
    if (tools.empty()) return;
    out_.control("<|system|>")
        .text(
            "\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
            "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n");
    for (const PyJson& tool : tools) {
      const PyJson& function = tool_function(tool);
      const PyJson* deferred = function.find("defer_loading");
      if (deferred && deferred->kind() == PyJson::Kind::boolean && deferred->as_bool()) continue;
      PyJson shown = PyJson::object();
      for (const auto& [key, value] : function.members())
        if (key != "defer_loading" && key != "strict") shown.set(key, value);
      out_.text(shown.dump() + "\n");
    }
    // The example is tokenised with the tags as tokens, which the model has seen so.
    out_.text(
            "</tools>\n\nFor each function call, output the function name and arguments within the following "
            "XML "
            "format:\n")
        .control("<tool_call>")
        .text("{function-name}")
        .control("<arg_key>")
        .text("{arg-key-1}")
        .control("</arg_key><arg_value>")
        .text("{arg-value-1}")
        .control("</arg_value><arg_key>")
        .text("{arg-key-2}")
        .control("</arg_key><arg_value>")
        .text("{arg-value-2}")
        .control("</arg_value>")
        .text("...")
        .control("</tool_call>");
  }

  void content(const MessageView& message) {
    for (const ContentPart& part : message.parts()) {
      if (part.medium.empty())
        out_.text(part.text);
      else if (part.medium == "image" && request_.images)
        out_.control("<|begin_of_image|><|image|><|end_of_image|>");
      else
        out_.text("<reminder>You are unable to process this " + part.medium +
                  " because you don't have multi-modal input ability. Try different methods.</reminder>");
    }
  }

  void answer(const MessageView& message, bool keep_reasoning) {
    std::string text = message.text(kName);
    std::string reasoning = message.reasoning();
    if (!message.json().find("reasoning_content") && !message.json().find("reasoning")) {
      if (const size_t close = text.find("</think>"); close != std::string::npos) {
        reasoning = text.substr(0, close);
        if (const size_t open = reasoning.rfind("<think>"); open != std::string::npos)
          reasoning.erase(0, open + 7);
        text.erase(0, text.rfind("</think>") + 8);
      }
    }
    out_.control("<|assistant|><think>");
    if (keep_reasoning) out_.text(reasoning);
    out_.control("</think>").text(python_strip(text));
    for (const ToolCall& call : message.calls()) {
      out_.control("<tool_call>").text(call.name);
      const PyJson arguments = argument_object(call);
      for (const auto& [key, value] : arguments.members())
        out_.control("<arg_key>")
            .text(key)
            .control("</arg_key><arg_value>")
            .text(argument_text(value))
            .control("</arg_value>");
      out_.control("</tool_call>");
    }
  }

  struct Result {
    std::string id;
    std::string text;
  };

  // One message holds one result, or a list of {"tool_call_id", "output"}.
  void collect(const MessageView& message, std::vector<Result>& run) const {
    const PyJson* content = message.json().find("content");
    const bool outputs = content && content->is_array() && !content->items().empty() &&
                         content->items()[0].find("output") != nullptr;
    if (!outputs) {
      run.push_back({message.string("tool_call_id"), message.text(kName)});
      return;
    }
    for (size_t i = 0; i < content->items().size(); ++i) {
      const PyJson* output = content->items()[i].find("output");
      const PyJson* id = content->items()[i].find("tool_call_id");
      if (!output || !output->is_string() || (id && !id->is_string()))
        fail("{}[{}]: expected {{\"tool_call_id\": \"..\", \"output\": \"..\"}}", message.where("content"),
             i);
      run.push_back({id ? id->text() : "", output->text()});
    }
  }

  // A run of results shares one turn, in the order of the calls when every id is known and none occurs twice.
  // Returns the index of the run's last message.
  size_t results(size_t begin) {
    std::vector<Result> run;
    size_t end = begin;
    for (; end < messages_.size() && messages_[end].role() == "tool"; ++end) collect(messages_[end], run);
    std::map<std::string, size_t> places;
    bool clear = true;
    if (begin > 0)
      for (const ToolCall& call : messages_[begin - 1].calls())
        clear &= places.emplace(call.id, places.size()).second;
    std::set<std::string> seen;
    for (const Result& result : run)
      clear &= !result.id.empty() && places.count(result.id) && seen.insert(result.id).second;
    if (clear)
      std::sort(run.begin(), run.end(),
                [&](const Result& a, const Result& b) { return places[a.id] < places[b.id]; });
    out_.control("<|observation|>");
    for (const Result& result : run)
      out_.control("<tool_response>").text(result.text).control("</tool_response>");
    return end - 1;
  }

  const ChatRequest& request_;
  std::vector<MessageView> messages_;
  SegmentList out_;
};

// The JSON kinds a schema allows, by their JSON Schema names; empty: no word about it.
using Kinds = std::set<std::string, std::less<>>;

void collect_kinds(const PyJson& schema, Kinds& kinds) {
  if (const PyJson* type = schema.find("type")) {
    if (type->is_string()) kinds.insert(type->text());
    if (type->is_array())
      for (const PyJson& one : type->items())
        if (one.is_string()) kinds.insert(one.text());
    return;
  }
  if (const PyJson* values = schema.find("enum"); values && values->is_array())
    for (const PyJson& value : values->items()) kinds.insert(value.kind_name());
  if (const PyJson* value = schema.find("const")) kinds.insert(value->kind_name());
  for (const char* choice : {"anyOf", "oneOf", "allOf"})
    if (const PyJson* schemas = schema.find(choice); schemas && schemas->is_array())
      for (const PyJson& one : schemas->items()) collect_kinds(one, kinds);
}

class GlmParser : public StreamParser {
 public:
  explicit GlmParser(const ChatRequest& request) : StreamParser(request) {
    for (const PyJson& tool : tool_list(request.tools, "tools")) {
      const PyJson& function = tool_function(tool);
      const PyJson* parameters = function.find("parameters");
      const PyJson* properties = parameters ? parameters->find("properties") : nullptr;
      if (!properties || !properties->is_object()) continue;
      for (const auto& [key, schema] : properties->members())
        collect_kinds(schema, kinds_[function.find("name")->text()][key]);
    }
  }

 protected:
  bool step() override {
    switch (state_) {
      case State::reasoning:
        return in_reasoning();
      case State::content:
        return in_content();
      case State::name:
        return in_name();
      case State::call:
        return in_call();
      case State::key:
        return in_key();
      case State::before_value:
        return before_value();
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
  enum class State : uint8_t { reasoning, content, name, call, key, before_value, value };

  bool go(State state) {
    state_ = state;
    text_.clear();
    return true;
  }

  bool in_reasoning() {
    std::string text;
    const int hit = scan({"</think>", "<tool_call>", "<think>"}, text);
    if (!text.empty()) fresh_ = false;
    prose(Kind::reasoning, text);
    if (hit == kNone) return false;
    if (hit == 2) {  // the model repeats the prompt's opener; later the same letters are text
      if (!std::exchange(fresh_, false)) prose(Kind::reasoning, "<think>");
      return true;
    }
    if (hit == 1) return drop_space(), go(State::name);
    settle(Kind::reasoning);
    return go(State::content);
  }

  bool in_content() {
    std::string text;
    const int hit = scan({"<tool_call>"}, text);
    prose(Kind::content, text);
    if (hit == kNone) return false;
    drop_space();
    return go(State::name);
  }

  bool in_name() {
    std::string text;
    const int hit = scan({"<arg_key>", "</tool_call>"}, text);
    text_ += text;
    if (hit == kNone) return false;
    tool_ = python_strip(text_);
    begin_call(tool_);
    return hit == 0 ? go(State::key) : close();
  }

  bool close() {
    close_arguments();
    end_call();
    return go(State::content);
  }

  bool in_call() {
    std::string layout;
    const int hit = scan({"<arg_key>", "</tool_call>"}, layout);
    if (hit == kNone) return false;
    return hit == 0 ? go(State::key) : close();
  }

  bool in_key() {
    std::string text;
    const int hit = scan({"</arg_key>"}, text);
    text_ += text;
    if (hit == kNone) return false;
    key_ = python_strip(text_);
    return go(State::before_value);
  }

  bool before_value() {
    std::string layout;
    const int hit = scan({"<arg_value>", "</tool_call>"}, layout);
    if (hit == kNone) return false;
    if (hit == 1) return close();
    const Kinds& kinds = kinds_[tool_][key_];
    begin_argument(key_, kinds.size() == 1 && kinds.count("string"));
    return go(State::value);
  }

  bool in_value() {
    std::string text;
    const int hit = scan({"</arg_value>"}, text);
    argument_piece(text);
    if (hit == kNone) return false;
    if (plain_argument())
      end_argument();
    else
      end_argument_with(typed(waiting_argument()));
    return go(State::call);
  }

  // The format does not mark strings, so the schema decides: where a string is allowed, JSON counts only if
  // it is of another allowed kind; elsewhere what is not JSON stays text.
  std::string typed(const std::string& text) {
    const Kinds& kinds = kinds_[tool_][key_];
    const std::optional<PyJson> value = PyJson::try_parse(text);
    if (!value) return json_quote(text);
    const std::string kind = value->kind_name();
    const bool whole = kind == "number" && value->text().find_first_of(".e") == std::string::npos;
    const bool allowed = kind != "string" && (kinds.count(kind) || (whole && kinds.count("integer")));
    return allowed || !kinds.count("string") ? value->dump() : json_quote(text);
  }

  State state_ = State::reasoning;
  bool fresh_ = true;  // no reasoning read yet
  std::string text_;   // of the name or key being read
  std::string tool_, key_;
  std::map<std::string, std::map<std::string, Kinds>> kinds_;
};

class Glm5 : public ChatFormat {
 public:
  const char* name() const override { return kName; }
  Thinking thinking() const override { return Thinking::always; }
  std::vector<std::string> stops() const override { return {"<|endoftext|>", "<|user|>", "<|observation|>"}; }
  std::vector<ChatSegment> encode(const ChatRequest& request) const override {
    return Encoder(request).encode();
  }
  std::unique_ptr<ChatParser> parser(const ChatRequest& request) const override {
    return std::make_unique<GlmParser>(request);
  }
};

}  // namespace

const ChatFormat& glm5_format() {
  static const Glm5 format;
  return format;
}

}  // namespace weft
