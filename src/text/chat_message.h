// What the encoders share: strict reading of messages, and the list of segments they write.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat.h"

namespace weft {

// A part of a message's content: text, or a medium ("image", "video", "audio") with empty text.
struct ContentPart {
  std::string text;
  std::string medium;
};

struct ToolCall {
  std::string id;  // empty when absent
  std::string name;
  const PyJson* arguments;  // an object or a string
  std::string where;        // "messages[1].tool_calls[0].function.arguments"
};

// One message of a request, with its place for errors.
class MessageView {
 public:
  MessageView(const PyJson& json, size_t index);

  const std::string& role() const { return role_; }
  size_t index() const { return index_; }
  const PyJson& json() const { return *json_; }
  std::string where(std::string_view field) const;   // "messages[3].content"
  [[noreturn]] void refuse_role() const;             // the error for a role the format does not know
  std::string string(std::string_view field) const;  // empty when absent or null; error: not a string
  std::string reasoning() const;                     // reasoning_content, else reasoning
  std::vector<ContentPart> parts() const;            // null or absent: an error, but none for the assistant
  std::string text(std::string_view format_name) const;  // parts joined; a medium is an error
  std::vector<ToolCall> calls() const;

 private:
  const PyJson* json_;
  size_t index_;
  std::string role_;
};

std::vector<MessageView> message_views(
    const ChatRequest& request);  // error: not an array of objects with roles

// The index of the last message with one of the roles, -1 when there is none.
int last_message(const std::vector<MessageView>& messages, std::initializer_list<std::string_view> roles);

// The tools of an array (request.tools, or a message's own); error: no array of objects. Empty for null.
std::vector<PyJson> tool_list(const PyJson& tools, std::string_view where);
// The inner object of {"type": "function", "function": {..}}, or the tool itself where it is given bare.
const PyJson& tool_function(const PyJson& tool);

// The arguments as an object; a blank string is {}. Error: neither an object nor a JSON text of one.
PyJson argument_object(const ToolCall& call);
std::string argument_text(const PyJson& value);  // strings raw, others as python JSON

// The tool_choice as a word: "auto", "none", "required", or "=NAME" for a named function. Error: anything
// else.
std::string tool_choice_word(const ChatRequest& request);
// The same for templates that have no words for it: only auto and none pass, and none leaves the tools out.
std::vector<PyJson> offered_tools(const ChatRequest& request, const char* format_name);
// "text", "json_object" or "json_schema". Error: anything else.
std::string response_format_word(const ChatRequest& request);
const PyJson& response_schema(const ChatRequest& request);

// Segments with neighbours of one kind merged, so that text around a value is encoded together with it, as
// upstream.
class SegmentList {
 public:
  SegmentList& control(std::string_view text) { return add(text, true); }
  SegmentList& text(std::string_view text) { return add(text, false); }
  std::vector<ChatSegment> take() { return std::move(segments_); }

 private:
  SegmentList& add(std::string_view text, bool allow_special);
  std::vector<ChatSegment> segments_;
};

}  // namespace weft
