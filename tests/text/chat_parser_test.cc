// Reading models' answers, against the goldens and at every cut of the bytes.
#include <gtest/gtest.h>

#include <random>

#include "text/chat_golden.h"

namespace weft {
namespace {

struct Streamed {
  ChatReply whole;   // as a reply in one piece shows it
  ChatReply stream;  // as a client of a stream joins it: what was sent stays sent
  bool operator==(const Streamed& other) const { return text() == other.text(); }
  std::string text() const { return describe(whole) + "\n" + describe(stream); }

  static std::string describe(const ChatReply& reply) {
    std::string out = json_quote(reply.reasoning) + " " + json_quote(reply.content);
    for (const ChatReply::Call& call : reply.calls) out += " " + call.id + " " + call.name + call.arguments;
    return out;
  }
};

class Collector {
 public:
  Collector(const char* format, const ChatRequest& request) : parser_(chat_format(format).parser(request)) {}
  void push(std::string_view bytes) { take(parser_->push(bytes)); }
  Streamed finish() {
    take(parser_->finish());
    return result_;
  }
  size_t sent() const { return sent_; }

 private:
  void take(const std::vector<ChatEvent>& events) {
    for (const ChatEvent& event : events) {
      result_.whole.add(event);
      if (event.kind != ChatEvent::Kind::reasoning_was_content) result_.stream.add(event);
      sent_ += event.text.size();
    }
  }
  std::unique_ptr<ChatParser> parser_;
  Streamed result_;
  size_t sent_ = 0;
};

Streamed parse(const char* format, const ChatRequest& request, std::string_view text) {
  Collector collector(format, request);
  collector.push(text);
  return collector.finish();
}

void expect_reply(const ChatReply& reply, const PyJson& expected) {
  EXPECT_EQ(reply.reasoning, expected.find("reasoning")->text());
  EXPECT_EQ(reply.content, expected.find("content")->text());
  const auto& calls = expected.find("tool_calls")->items();
  ASSERT_EQ(reply.calls.size(), calls.size());
  for (size_t i = 0; i < calls.size(); ++i) {
    EXPECT_EQ(reply.calls[i].name, calls[i].find("name")->text());
    EXPECT_EQ(json(reply.calls[i].arguments).dump(PyJson::Style::sorted),
              json(calls[i].find("arguments")->text()).dump(PyJson::Style::sorted));
    EXPECT_FALSE(reply.calls[i].id.empty());
  }
}

// In one piece, cut in two at every byte, and in pieces of 1, 2, 3, 5 and 7 bytes: always the same.
void expect_cuts_agree(const char* format, const ChatRequest& request, const std::string& text) {
  const Streamed whole = parse(format, request, text);
  for (size_t cut = 1; cut < text.size(); ++cut) {
    Collector collector(format, request);
    collector.push(std::string_view(text).substr(0, cut));
    collector.push(std::string_view(text).substr(cut));
    ASSERT_EQ(collector.finish().text(), whole.text()) << "cut at " << cut;
  }
  for (const size_t step : {1, 2, 3, 5, 7}) {
    Collector collector(format, request);
    for (size_t at = 0; at < text.size(); at += step) collector.push(std::string_view(text).substr(at, step));
    ASSERT_EQ(collector.finish().text(), whole.text()) << "pieces of " << step;
  }
}

TEST(ChatAnswers, EqualTheGoldensAtEveryCut) {
  int seen = 0;
  for (const auto& [format, file] : kFiles) {
    const PyJson cases = golden(file);
    for (const PyJson& item : cases.find("outputs")->items()) {
      SCOPED_TRACE(std::string(format) + ": " + item.find("name")->text());
      ++seen;
      ChatRequest request;
      if (const PyJson* thinking = item.find("thinking")) request.thinking = thinking->as_bool();
      if (const PyJson* tools = item.find("tools"); tools && tools->is_array()) request.tools = *tools;
      const std::string text = item.find("text")->text();
      const Streamed reply = parse(format, request, text);
      expect_reply(reply.whole, *item.find("expect"));
      expect_reply(reply.stream, *item.find(item.find("expect_stream") ? "expect_stream" : "expect"));
      expect_cuts_agree(format, request, text);
    }
  }
  EXPECT_EQ(seen, 24 + 4 + 13 + 10);
}

// Every beginning of every golden answer, as a token limit leaves it: nothing of the beginning of a marker is
// shown before finish(), and whole calls are JSON.
TEST(ChatAnswers, CutOffAnywhere) {
  for (const auto& [format, file] : kFiles) {
    const PyJson cases = golden(file);
    for (const PyJson& item : cases.find("outputs")->items()) {
      ChatRequest request;
      if (const PyJson* thinking = item.find("thinking")) request.thinking = thinking->as_bool();
      if (const PyJson* tools = item.find("tools"); tools && tools->is_array()) request.tools = *tools;
      const std::string text = item.find("text")->text();
      const size_t calls = item.find("expect")->find("tool_calls")->items().size();
      for (size_t end = 0; end < text.size(); ++end) {
        const Streamed reply = parse(format, request, text.substr(0, end));
        EXPECT_LE(reply.whole.calls.size(), calls);
        for (const ChatReply::Call& call : reply.whole.calls) EXPECT_TRUE(json(call.arguments).is_object());
      }
    }
  }
}

// Markers and halves of markers in any order: what a derailed model writes must not depend on the cuts
// either, and arguments of whole calls stay JSON.
TEST(ChatAnswers, MarkerSoup) {
  const char* const kPieces[] = {"<|open|>",
                                 "<|close|>",
                                 "<|sep|>",
                                 "think",
                                 "response",
                                 "tools",
                                 "message",
                                 "<|open|>call tool=\"f\"<|sep|>",
                                 "<|close|>call<|sep|>",
                                 "<|open|>tools<|sep|>",
                                 "<|close|>think<|sep|>",
                                 "<|open|>argument key=\"k\" type=\"number\"<|sep|>",
                                 "<|open|>argument key=\"s\"<|sep|>",
                                 "<|close|>argument<|sep|>",
                                 "<|open|>json<|sep|>",
                                 "\"",
                                 "<",
                                 "\n",
                                 " ",
                                 "1",
                                 "é",
                                 "<think>",
                                 "</think>",
                                 "<tool_call>",
                                 "f",
                                 "<arg_key>",
                                 "</arg_key>",
                                 "<arg_value>",
                                 "</arg_value>",
                                 "</tool_call>",
                                 "｜DSML｜",
                                 "<｜DSML｜function_calls>",
                                 "<｜DSML｜invoke name=\"f\">",
                                 "<｜DSML｜parameter name=\"k\" string=\"false\">",
                                 "</｜DSML｜parameter>",
                                 "</｜DSML｜invoke>",
                                 "</｜DSML｜function_calls>",
                                 "<|tool_calls_section_begin|>",
                                 "<|tool_call_begin|>",
                                 "functions.f:0",
                                 "<|tool_call_argument_begin|>",
                                 "<|tool_call_end|>",
                                 "<|tool_calls_section_end|>"};
  std::mt19937 random(7);
  for (int round = 0; round < 1500; ++round) {
    std::string text;
    for (size_t i = random() % 25; i > 0; --i) text += kPieces[random() % std::size(kPieces)];
    for (const auto& [format, file] : kFiles) {
      SCOPED_TRACE(std::string(format) + ": " + text);
      const Streamed whole = parse(format, ChatRequest(), text);
      if (std::string_view(format) != "kimi_linear") {  // whose arguments are the model's own text
        for (const ChatReply::Call& call : whole.whole.calls) ASSERT_TRUE(json(call.arguments).is_object());
      }
      Collector bytes(format, ChatRequest()), pieces(format, ChatRequest());
      for (const char& c : text) bytes.push(std::string_view(&c, 1));
      for (size_t at = 0, step = 0; at < text.size(); at += step)
        pieces.push(std::string_view(text).substr(at, step = 1 + random() % 9));
      ASSERT_EQ(bytes.finish().text(), whole.text());
      ASSERT_EQ(pieces.finish().text(), whole.text());
    }
  }
}

TEST(ChatAnswers, NoPieceOfAMarkerIsShown) {
  const struct {
    const char* format;
    const char* text;
    size_t shown;  // bytes that may be sent before the rest arrives
  } kCases[] = {
      {"kimi_k3", "abc<|close|>thi", 3},
      {"kimi_k3", "abc<", 3},
      {"glm5", "abc</thi", 3},
      {"glm5", "abc<tool_cal", 3},
      {"deepseek_v32", "abc</thin", 3},
      {"deepseek_v32", "abc\n\n<\xEF\xBD", 3},
      {"kimi_linear", "abc<|tool_call", 3},
  };
  for (const auto& test : kCases) {
    Collector collector(test.format, ChatRequest());
    for (const char* c = test.text; *c; ++c) collector.push(std::string_view(c, 1));
    EXPECT_EQ(collector.sent(), test.shown) << test.format << " " << test.text;
    const Streamed reply = collector.finish();
    EXPECT_EQ(reply.whole.reasoning + reply.whole.content, test.text);
  }
}

// A long string argument is sent while it grows, in every format that marks strings or has a schema for them.
TEST(ChatAnswers, ArgumentsAreStreamed) {
  const struct {
    const char* format;
    const char* begin;
  } kCases[] = {
      {"kimi_k3",
       "<|close|>think<|sep|><|open|>tools<|sep|><|open|>call tool=\"f\" index=\"1\"<|sep|><|open|>argument "
       "key=\"code\" type=\"string\"<|sep|>"},
      {"glm5", "</think><tool_call>f<arg_key>code</arg_key><arg_value>"},
      {"deepseek_v32",
       "</think>\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"code\" "
       "string=\"true\">"},
      {"kimi_linear",
       "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\""},
  };
  for (const auto& test : kCases) {
    ChatRequest request;
    request.tools = json(
        R"([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"code": {"type": "string"}}}}}])");
    Collector collector(test.format, request);
    collector.push(test.begin);
    const size_t before = collector.sent();
    for (int i = 0; i < 100; ++i) {
      collector.push("0123456789");
      EXPECT_EQ(collector.sent(), before + size_t(i + 1) * 10) << test.format;
    }
    EXPECT_TRUE(collector.finish().whole.calls.empty()) << "a call that never ended";
  }
}

TEST(ChatAnswers, BothSpellingsOfTheSection) {
  for (const char* section : {"tool_calls_section", "tool_call_section"}) {
    const std::string text = std::string("a<|") + section +
                             "_begin|><|tool_call_begin|>functions.f:3<|tool_call_argument_begin|> "
                             "<|tool_call_end|><|" +
                             section + "_end|>b";
    const ChatReply reply = parse("kimi_linear", ChatRequest(), text).whole;
    EXPECT_EQ(reply.content, "ab");
    ASSERT_EQ(reply.calls.size(), 1u);
    EXPECT_EQ(reply.calls[0].id, "functions.f:3");
    EXPECT_EQ(reply.calls[0].arguments, "{}");
    expect_cuts_agree("kimi_linear", ChatRequest(), text);
  }
}

// K3's names may hold anything, marks included: inside quotes they end nothing.
TEST(ChatAnswers, K3NamesWithMarks) {
  const std::string text =
      "r<|close|>think<|sep|>\n <|open|>response<|sep|>a<|close|>response<|sep|>\n<|open|>tools<|sep|>"
      "<|open|>callback<|sep|><|open|>call tool=\"t&quot;&amp;<|sep|>\" index=\"1\"<|sep|>"
      "<|open|>argument key=\"<|sep|>\" type=\"string\"<|sep|>v<|close|>argument<|sep|><|close|>call<|sep|>"
      "<|close|>tools<|sep|> <|close|>message<|sep|>after";
  const ChatReply reply = parse("kimi_k3", ChatRequest(), text).whole;
  EXPECT_EQ(Streamed::describe(reply), R"("r" "a" call_0 t"&<|sep|>{"<|sep|>": "v"})");
  expect_cuts_agree("kimi_k3", ChatRequest(), text);
}

// GLM has no mode without thinking: a request that asks for one is split all the same.
TEST(ChatAnswers, GlmAlwaysThinks) {
  ChatRequest request;
  request.thinking = false;
  EXPECT_EQ(Streamed::describe(parse("glm5", request, "why</think>ok").whole), R"("why" "ok")");
  EXPECT_EQ(chat_format("glm5").thinking(), ChatFormat::Thinking::always);
}

TEST(ChatAnswers, GlmTypesFollowTheSchema) {
  ChatRequest request;
  request.tools = json(R"([{"type": "function", "function": {"name": "f", "parameters": {"properties": {
      "s": {"type": "string"}, "i": {"type": "integer"}, "sn": {"type": ["string", "null"]},
      "any": {}, "alt": {"anyOf": [{"type": "string"}, {"type": "integer"}]}, "e": {"enum": ["1", "2"]}}}}}])");
  auto value = [&](const std::string& key, const std::string& text) {
    const std::string answer =
        "</think><tool_call>f<arg_key>" + key + "</arg_key><arg_value>" + text + "</arg_value></tool_call>";
    const ChatReply reply = parse("glm5", request, answer).whole;
    return json(reply.calls.at(0).arguments).members().at(0).second.dump();
  };
  EXPECT_EQ(value("s", "12"), "\"12\"");
  EXPECT_EQ(value("i", "12"), "12");
  EXPECT_EQ(value("i", "007"), "\"007\"");
  EXPECT_EQ(value("sn", "null"), "null");
  EXPECT_EQ(value("sn", "12"), "\"12\"");
  EXPECT_EQ(value("any", "12"), "12");
  EXPECT_EQ(value("any", "x y"), "\"x y\"");
  EXPECT_EQ(value("alt", "12"), "12");
  EXPECT_EQ(value("alt", "1.5"), "\"1.5\"");
  EXPECT_EQ(value("e", "1"), "\"1\"");
  EXPECT_EQ(value("undeclared", "{\"a\": 1.50}"), "{\"a\": 1.5}");
}

// What an encoder writes as a past answer, its parser reads back.
TEST(ChatAnswers, RoundTripThroughThePrompt) {
  const char* const kArguments =
      R"({"code": "a\nb \"q\" & <b>\t\\ é", "n": -1.5, "big": 123456789012345678901234567890, "o": {"x": [1, null]}})";
  ChatRequest request = conversation(R"([{"role": "user", "content": "w"}])");
  request.tools = json(
      R"([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"code": {"type": "string"}}}}}])");
  PyJson function = PyJson::object();
  function.set("name", PyJson::string("f"));
  function.set("arguments", json(kArguments));
  PyJson call = PyJson::object();
  call.set("function", function);
  PyJson calls = PyJson::array();
  calls.push(call);
  PyJson answer = PyJson::object();
  answer.set("role", PyJson::string("assistant"));
  answer.set("content", PyJson::string("Looking."));
  answer.set("tool_calls", calls);
  for (const auto& [format, file] : kFiles) {
    SCOPED_TRACE(format);
    const bool thinks = chat_format(format).thinking() != ChatFormat::Thinking::never;
    if (thinks)
      answer.set("reasoning_content", PyJson::string("hm\n"));
    else
      answer.set("reasoning_content", PyJson());
    ChatRequest longer = request;
    longer.messages.push(answer);
    longer.add_generation_prompt = false;
    const std::string prompt = encode(format, request), history = encode(format, longer);
    ASSERT_EQ(history.substr(0, prompt.size()), prompt);
    std::string text = history.substr(prompt.size());
    for (const std::string& stop : chat_format(format).stops())
      if (text.ends_with(stop)) text.resize(text.size() - stop.size());
    const ChatReply reply = parse(format, request, text).whole;
    EXPECT_EQ(reply.reasoning, thinks ? "hm\n" : "");
    EXPECT_EQ(reply.content, "Looking.");
    ASSERT_EQ(reply.calls.size(), 1u);
    EXPECT_EQ(reply.calls[0].arguments, json(kArguments).dump());
    expect_cuts_agree(format, request, text);
  }
}

}  // namespace
}  // namespace weft
