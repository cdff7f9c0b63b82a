#include "text/chat.h"

#include <algorithm>
#include <array>

#include "text/chat_formats.h"
#include "text/chat_message.h"

namespace weft {

const ChatFormat& chat_format(std::string_view name) {
  static const std::array<const ChatFormat*, 4> kFormats = {&kimi_k3_format(), &kimi_linear_format(),
                                                            &glm5_format(), &deepseek_v32_format()};
  std::string known;
  for (const ChatFormat* format : kFormats) {
    if (name == format->name()) return *format;
    known += known.empty() ? "" : ", ";
    known += format->name();
  }
  fail("chat format \"{}\" is unknown; there are {}", name, known);
}

void set_template_option(ChatRequest& request, std::string_view name, const PyJson& value) {
  auto flag = [&] {
    if (value.kind() != PyJson::Kind::boolean)
      fail("chat template option {}: expected true or false, found {}", name, value.dump());
    return value.as_bool();
  };
  if (name == "thinking" || name == "enable_thinking") {
    request.thinking = flag();
  } else if (name == "thinking_effort" || name == "reasoning_effort") {
    if (!value.is_string()) fail("chat template option {}: expected a string, found {}", name, value.dump());
    request.effort = value.text();
  } else if (name == "add_generation_prompt") {
    request.add_generation_prompt = flag();
  } else if (name == "clear_thinking") {
    request.clear_thinking = flag();
  } else if (name == "tool_choice") {
    request.tool_choice = value;
  } else if (name == "response_format") {
    request.response_format = value;
  } else {
    fail(
        "chat template option {} is unknown; there are thinking (enable_thinking), thinking_effort "
        "(reasoning_effort), tool_choice, response_format, add_generation_prompt and clear_thinking",
        name);
  }
}

void ChatReply::add(const ChatEvent& event) {
  switch (event.kind) {
    case ChatEvent::Kind::reasoning:
      reasoning += event.text;
      break;
    case ChatEvent::Kind::content:
      content += event.text;
      break;
    case ChatEvent::Kind::reasoning_was_content:
      reasoning.clear();
      break;
    case ChatEvent::Kind::call_begin:
      calls.push_back({event.id, event.text, ""});
      break;
    case ChatEvent::Kind::call_arguments:
      calls.back().arguments += event.text;
      break;
    case ChatEvent::Kind::call_end:
      break;
    case ChatEvent::Kind::call_lost:
      calls.pop_back();
      break;
  }
}

MessageView::MessageView(const PyJson& json, size_t index) : json_(&json), index_(index) {
  if (!json.is_object()) fail("messages[{}]: expected an object, found {}", index, json.kind_name());
  role_ = string("role");
  if (role_.empty()) fail("{}: missing; expected system, user, assistant or tool", where("role"));
}

std::string MessageView::where(std::string_view field) const {
  return fmt::format("messages[{}].{}", index_, field);
}

void MessageView::refuse_role() const {
  fail("{}: \"{}\" is unknown; expected system, developer, user, assistant or tool", where("role"), role_);
}

std::string MessageView::string(std::string_view field) const {
  const PyJson* value = json_->find(field);
  if (!value) return "";
  if (!value->is_string()) fail("{}: expected a string, found {}", where(field), value->kind_name());
  return value->text();
}

std::string MessageView::reasoning() const {
  return json_->find("reasoning_content") ? string("reasoning_content") : string("reasoning");
}

std::vector<ContentPart> MessageView::parts() const {
  const PyJson* content = json_->find("content");
  if (!content) {
    if (role_ == "assistant") return {};
    fail("{}: missing or null; expected a string or an array of parts", where("content"));
  }
  if (content->is_string()) return {{content->text(), ""}};
  if (!content->is_array())
    fail("{}: expected a string or an array of parts, found {}", where("content"), content->kind_name());
  std::vector<ContentPart> parts;
  for (size_t i = 0; i < content->items().size(); ++i) {
    const PyJson& item = content->items()[i];
    const std::string place = fmt::format("{}[{}]", where("content"), i);
    if (item.is_string()) {
      parts.push_back({item.text(), ""});
      continue;
    }
    const PyJson* type = item.find("type");
    if (!type || !type->is_string())
      fail("{}: expected a part with a type, such as {{\"type\": \"text\"}}", place);
    std::string kind = type->text();
    if (kind == "text") {
      const PyJson* text = item.find("text");
      if (!text || !text->is_string()) fail("{}.text: missing; expected a string", place);
      parts.push_back({text->text(), ""});
      continue;
    }
    if (kind.starts_with("input_")) kind.erase(0, 6);
    if (kind.ends_with("_url")) kind.resize(kind.size() - 4);
    if (kind != "image" && kind != "video" && kind != "audio")
      fail("{}.type: \"{}\" is unknown; expected text or image_url", place, type->text());
    parts.push_back({"", kind});
  }
  return parts;
}

std::string MessageView::text(std::string_view format_name) const {
  std::string joined;
  for (const ContentPart& part : parts()) {
    if (!part.medium.empty())
      fail("{}: {} parts are not supported by the {} format; send text", where("content"), part.medium,
           format_name);
    joined += part.text;
  }
  return joined;
}

std::vector<ToolCall> MessageView::calls() const {
  const PyJson* list = json_->find("tool_calls");
  if (!list) return {};
  if (!list->is_array()) fail("{}: expected an array, found {}", where("tool_calls"), list->kind_name());
  std::vector<ToolCall> calls;
  for (size_t i = 0; i < list->items().size(); ++i) {
    const PyJson& item = list->items()[i];
    const std::string place = fmt::format("{}[{}]", where("tool_calls"), i);
    const PyJson& function = tool_function(item);
    const PyJson* name = function.find("name");
    if (!name || !name->is_string()) fail("{}.function.name: missing; expected a string", place);
    const PyJson* id = item.find("id");
    if (id && !id->is_string()) fail("{}.id: expected a string, found {}", place, id->kind_name());
    const PyJson* arguments = function.find("arguments");
    ToolCall call{id ? id->text() : "", name->text(), arguments, place + ".function.arguments"};
    if (!arguments || !(arguments->is_object() || arguments->is_string()))
      fail("{}: expected a JSON object or the text of one, found {}", call.where,
           arguments ? arguments->kind_name() : "nothing");
    calls.push_back(std::move(call));
  }
  return calls;
}

std::vector<MessageView> message_views(const ChatRequest& request) {
  if (!request.messages.is_array())
    fail("messages: expected an array, found {}", request.messages.kind_name());
  std::vector<MessageView> views;
  for (const PyJson& message : request.messages.items()) views.emplace_back(message, views.size());
  return views;
}

int last_message(const std::vector<MessageView>& messages, std::initializer_list<std::string_view> roles) {
  int last = int(messages.size()) - 1;
  while (last >= 0 && std::find(roles.begin(), roles.end(), messages[size_t(last)].role()) == roles.end())
    --last;
  return last;
}

std::vector<PyJson> tool_list(const PyJson& tools, std::string_view where) {
  if (tools.is_null()) return {};
  if (!tools.is_array()) fail("{}: expected an array, found {}", where, tools.kind_name());
  for (size_t i = 0; i < tools.items().size(); ++i) {
    const PyJson* name = tool_function(tools.items()[i]).find("name");
    if (!name || !name->is_string()) fail("{}[{}].function.name: missing; expected a string", where, i);
  }
  return tools.items();
}

const PyJson& tool_function(const PyJson& tool) {
  const PyJson* function = tool.find("function");
  return function ? *function : tool;
}

PyJson argument_object(const ToolCall& call) {
  if (call.arguments->is_object()) return *call.arguments;
  if (python_strip(call.arguments->text()).empty()) return PyJson::object();
  PyJson value = PyJson::parse(call.arguments->text(), call.where);
  if (!value.is_object())
    fail("{}: expected the text of a JSON object, found {}", call.where, value.kind_name());
  return value;
}

std::string argument_text(const PyJson& value) {
  return value.is_string() ? value.text() : value.dump();
}

std::string tool_choice_word(const ChatRequest& request) {
  const PyJson& choice = request.tool_choice;
  if (choice.is_null()) return "auto";
  if (choice.is_string() &&
      (choice.text() == "auto" || choice.text() == "none" || choice.text() == "required"))
    return choice.text();
  const PyJson* name = tool_function(choice).find("name");
  if (!name || !name->is_string())
    fail(
        "tool_choice: expected auto, none, required or {{\"type\": \"function\", \"function\": {{\"name\": "
        "..}}}}");
  for (const PyJson& tool : tool_list(request.tools, "tools"))
    if (tool_function(tool).find("name")->text() == name->text()) return "=" + name->text();
  fail("tool_choice: \"{}\" is not among the tools", name->text());
}

std::vector<PyJson> offered_tools(const ChatRequest& request, const char* format_name) {
  const std::string choice = tool_choice_word(request);
  if (choice == "none") return {};
  if (choice != "auto")
    fail("tool_choice: the {} format has no words that force a call; use auto or none", format_name);
  return tool_list(request.tools, "tools");
}

std::string response_format_word(const ChatRequest& request) {
  if (request.response_format.is_null()) return "text";
  const PyJson* type = request.response_format.find("type");
  for (const char* known : {"text", "json_object", "json_schema"})
    if (type && type->is_string() && type->text() == known) return known;
  fail("response_format.type: expected text, json_object or json_schema");
}

const PyJson& response_schema(const ChatRequest& request) {
  const PyJson* wrapper = request.response_format.find("json_schema");
  const PyJson* schema = wrapper ? wrapper->find("schema") : nullptr;
  if (!schema || !schema->is_object())
    fail("response_format.json_schema.schema: missing; expected an object");
  return *schema;
}

SegmentList& SegmentList::add(std::string_view text, bool allow_special) {
  if (text.empty()) return *this;
  if (segments_.empty() || segments_.back().allow_special != allow_special)
    segments_.push_back({std::string(text), allow_special});
  else
    segments_.back().text += text;
  return *this;
}

}  // namespace weft
