// The golden chat cases and small helpers on requests, for the tests of prompts and of answers.
#pragma once

#include <fstream>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "text/chat.h"

namespace weft {

inline const char* const kFiles[][2] = {{"kimi_k3", "kimi_k3"},
                                        {"kimi_linear", "kimi_linear"},
                                        {"glm5", "glm53"},
                                        {"deepseek_v32", "deepseek_v32"}};

inline PyJson golden(const std::string& file) {
  const std::string path = WEFT_SOURCE_DIR "/tests/golden/chat/" + file + ".json";
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  text << in.rdbuf();
  return PyJson::parse(text.str(), path);
}

inline PyJson json(std::string_view text) {
  return PyJson::parse(text, "test");
}

// V3.2 prompts are in chat mode, the others think, unless they say otherwise, and all see images. Where an
// item says tools_on_own_message (it is false then), the tools belong to the first message.
inline ChatRequest request_of(const PyJson& item, const std::string& format) {
  ChatRequest request;
  request.messages = *item.find("messages");
  request.thinking = format != "deepseek_v32";
  request.images = true;
  if (const PyJson* options = item.find("options"))
    for (const auto& [key, value] : options->members()) set_template_option(request, key, value);
  const PyJson* tools = item.find("tools");
  if (!tools) return request;
  if (!item.find("tools_on_own_message")) {
    request.tools = *tools;
    return request;
  }
  PyJson first = request.messages.items()[0];
  first.set("tools", *tools);
  PyJson messages = PyJson::array();
  for (size_t i = 0; i < request.messages.items().size(); ++i)
    messages.push(i ? request.messages.items()[i] : first);
  request.messages = messages;
  return request;
}

inline std::string joined(const std::vector<ChatSegment>& segments) {
  std::string text;
  for (const ChatSegment& segment : segments) text += segment.text;
  return text;
}

inline std::string encode(const char* format, const ChatRequest& request) {
  return joined(chat_format(format).encode(request));
}

inline ChatRequest conversation(std::string_view messages) {
  ChatRequest request;
  request.messages = json(messages);
  return request;
}

}  // namespace weft
