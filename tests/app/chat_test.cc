// R07 and the rest of weft chat, on pipes and on terminals.
#include <gtest/gtest.h>

#include "app/program.h"

namespace weft {
namespace {

using namespace program;

const Environment kXterm = {{"TERM", "xterm"}, {"NO_COLOR", ""}};

class Chat : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new Folder;
    model_ = make_model(*folder_);
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  // Short answers, always the same.
  static Arguments chat(const Arguments& more = {}) {
    Arguments all = {"chat", model_, "--temp", "0", "-n", "8", "--ignore-eos"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static Arguments endless() { return {"chat", model_, "--ignore-eos", "-c", "200000"}; }
  // "prompt 12 tokens" of one message sent alone.
  static std::string prompt_size(const std::string& message) {
    const Ran ran = run({"run", model_, "--chat", "-p", message, "-n", "1"});
    const size_t at = ran.err.rfind("prompt ");
    return ran.err.substr(at, ran.err.find(" tokens", at) + 7 - at);
  }
  // How many answers were given.
  static size_t answers(const std::string& text) { return count(text, "peak memory"); }

  static inline Folder* folder_ = nullptr;
  static inline std::string model_;
};

TEST_F(Chat, InputThatEndsEndsTheProgram) {
  const Ran empty = run(chat());
  EXPECT_EQ(empty.status, 0) << empty.err;
  EXPECT_EQ(empty.out, "");
  const Ran closed = run(chat(), {.close_stdin = true});
  EXPECT_EQ(closed.status, 0) << closed.err;
  EXPECT_EQ(closed.out, "");
  const Ran unfinished = run(chat(), {.input = "hi"});
  EXPECT_EQ(unfinished.status, 0) << unfinished.err;
  EXPECT_EQ(answers(unfinished.err), 1u) << unfinished.err;
  EXPECT_EQ(unfinished.out,
            run({"run", model_, "--chat", "--temp", "0", "-n", "8", "--ignore-eos", "-p", "hi"}).out);
}

TEST_F(Chat, EmptyLinesSendNothing) {
  const Ran ran = run(chat(), {.input = "\n   \n\t\r\n\n"});
  EXPECT_EQ(ran.status, 0);
  EXPECT_EQ(ran.out, "");
  EXPECT_EQ(answers(ran.err), 0u);
}

TEST_F(Chat, APipeIsOneMessageALineAndCleanText) {
  const Ran ran = run(chat(), {.input = "hi\nand you?\n", .environment = kXterm});
  EXPECT_EQ(answers(ran.err), 2u) << ran.err;
  EXPECT_EQ(ran.out.find('\x1b'), std::string::npos);
  EXPECT_EQ(ran.err.find('\x1b'), std::string::npos);
  EXPECT_FALSE(ran.out.starts_with("> ")) << ran.out;
  EXPECT_EQ(ran.out.find("\n> "), std::string::npos) << ran.out;
  // The conversation stays in the caches.
  EXPECT_EQ(ran.err.find("reused"), ran.err.rfind("reused"));
  EXPECT_NE(ran.err.find("reused"), std::string::npos) << ran.err;
  EXPECT_EQ(answers(run(chat({"-q"}), {.input = "hi\n"}).err), 0u);
}

TEST_F(Chat, ClearForgets) {
  const Ran ran = run(chat(), {.input = "hi\n/clear\nhi\n/quit\nnever sent\n"});
  EXPECT_EQ(ran.status, 0);
  ASSERT_EQ(answers(ran.err), 2u) << ran.err;
  const size_t half = ran.out.size() / 2;
  EXPECT_EQ(ran.out.substr(0, half), ran.out.substr(half));
}

TEST_F(Chat, APastedTextIsOneTurn) {
  Terminal terminal(chat(), kXterm);
  ASSERT_TRUE(terminal.expect("\x1b[?2004h")) << terminal.shown();
  EXPECT_TRUE(terminal.expect("> "));
  terminal.send("\x1b[200~one\rtwo\rthree\x1b[201~\r");
  ASSERT_TRUE(terminal.expect("peak memory")) << terminal.shown();
  EXPECT_NE(terminal.shown().find(prompt_size("one\ntwo\nthree") + ","), std::string::npos)
      << terminal.shown();
  ASSERT_TRUE(terminal.expect("> "));
  EXPECT_FALSE(terminal.settings_restored());  // the test can see the editor's settings
  terminal.send("\x04");
  EXPECT_EQ(terminal.status(), 0);
  EXPECT_EQ(answers(terminal.shown()), 1u) << terminal.shown();
  EXPECT_TRUE(terminal.settings_restored());
  EXPECT_EQ(count(terminal.shown(), "\x1b[?2004h"), count(terminal.shown(), "\x1b[?2004l"));
}

// The same sent before the program has looked at its terminal.
TEST_F(Chat, WhatWasTypedWhileLoadingIsKept) {
  Terminal terminal(chat(), kXterm);
  terminal.send("\x1b[200~one\rtwo\rthree\x1b[201~\r\x04");
  EXPECT_EQ(terminal.status(), 0) << terminal.shown();
  EXPECT_EQ(answers(terminal.shown()), 1u) << terminal.shown();
  EXPECT_NE(terminal.shown().find(prompt_size("one\ntwo\nthree") + ","), std::string::npos)
      << terminal.shown();
  EXPECT_TRUE(terminal.settings_restored());
}

TEST_F(Chat, LinesAreEdited) {
  Terminal terminal(chat(), kXterm);
  ASSERT_TRUE(terminal.expect("> "));
  // "wörd" with the end cut and written anew, the beginning added, a word removed: "hello wö".
  terminal.send(
      "w\xc3\xb6rd\x7f\x7f\x01"
      "hello \x05 gone\x17\x7f\r");
  ASSERT_TRUE(terminal.expect("peak memory")) << terminal.shown();
  EXPECT_NE(terminal.shown().find(prompt_size("hello wö") + ","), std::string::npos) << terminal.shown();
  ASSERT_TRUE(terminal.expect("> "));
  terminal.send("/clear\r");
  ASSERT_TRUE(terminal.expect("> /clear"));
  ASSERT_TRUE(terminal.expect("> "));
  terminal.send("\x1b[A\x1b[A");  // the message before
  ASSERT_TRUE(terminal.expect("hello wö"));
  terminal.send("\r");
  ASSERT_TRUE(terminal.expect("peak memory")) << terminal.shown();
  terminal.send("\x04");
  EXPECT_EQ(terminal.status(), 0);
  EXPECT_EQ(count(terminal.shown(), prompt_size("hello wö")), 2u) << terminal.shown();
}

TEST_F(Chat, TerminalsWithoutEscapesGetNone) {
  for (const char* term : {"", "dumb"}) {
    Terminal terminal(chat(), {{"TERM", term}});
    ASSERT_TRUE(terminal.expect("> "));
    terminal.send("hi\n");
    ASSERT_TRUE(terminal.expect("peak memory")) << terminal.shown();
    ASSERT_TRUE(terminal.expect("> "));
    terminal.send("\n");
    ASSERT_TRUE(terminal.expect("> "));
    terminal.send("\x04");
    EXPECT_EQ(terminal.status(), 0);
    EXPECT_EQ(answers(terminal.shown()), 1u);
    EXPECT_EQ(terminal.shown().find('\x1b'), std::string::npos) << terminal.shown();
    EXPECT_TRUE(terminal.settings_restored());
  }
}

TEST_F(Chat, CtrlCStopsTheAnswerNotTheProgram) {
  for (const char* term : {"xterm", "dumb"}) {
    Terminal terminal(endless(), {{"TERM", term}});
    ASSERT_TRUE(terminal.expect("> "));
    terminal.send("hi\n");
    ASSERT_TRUE(terminal.expect_more(200));
    terminal.send("\x03");
    ASSERT_TRUE(terminal.expect("(stopped)", 3)) << terminal.shown();
    ASSERT_TRUE(terminal.expect("> "));
    terminal.send("again\n");
    ASSERT_TRUE(terminal.expect_more(200));
    terminal.send("\x03");
    ASSERT_TRUE(terminal.expect("(stopped)", 3));
    ASSERT_TRUE(terminal.expect("> "));
    terminal.send("\x04");
    EXPECT_EQ(terminal.status(), 0);
    EXPECT_TRUE(terminal.settings_restored());
  }
}

TEST_F(Chat, CtrlCTwiceAtThePromptEndsTheProgram) {
  for (const char* term : {"xterm", "dumb"}) {
    Terminal terminal(chat(), {{"TERM", term}});
    ASSERT_TRUE(terminal.expect("> "));
    terminal.send("half a line\x03");
    ASSERT_TRUE(terminal.expect("once more")) << terminal.shown();
    ASSERT_TRUE(terminal.expect("> "));
    EXPECT_EQ(terminal.status(0.3), -1);  // once does not
    terminal.send("\x03");
    EXPECT_EQ(terminal.status(), 130) << terminal.shown();
    EXPECT_EQ(answers(terminal.shown()), 0u);
    EXPECT_TRUE(terminal.settings_restored());
  }
}

TEST_F(Chat, SignalsThatEndTheProgramRestoreTheTerminal) {
  for (const int number : {SIGTERM, SIGHUP}) {
    Terminal terminal(chat(), kXterm);
    ASSERT_TRUE(terminal.expect("> "));
    ASSERT_FALSE(terminal.settings_restored());
    terminal.signal(number);
    EXPECT_EQ(terminal.status(), 128 + number);
    EXPECT_TRUE(terminal.settings_restored());
  }
}

// A message that does not fit is refused, and the conversation goes on.
TEST_F(Chat, AMessageTooLongIsRefused) {
  std::string words;
  for (int i = 0; i < 200; ++i) words += " word" + std::to_string(i);
  Terminal terminal(chat({"-c", "128"}), kXterm);
  ASSERT_TRUE(terminal.expect("> "));
  terminal.send(words + "\r");
  ASSERT_TRUE(terminal.expect("the context holds 128")) << terminal.shown();
  terminal.send("hi\r");
  ASSERT_TRUE(terminal.expect("peak memory")) << terminal.shown();
  terminal.send("\x04");
  EXPECT_EQ(terminal.status(), 0);
  const Ran piped = run(chat({"-c", "128"}), {.input = words});
  EXPECT_EQ(piped.status, 2);
  EXPECT_NE(piped.err.find("weft: the prompt has "), std::string::npos) << piped.err;
}

// Formats that reason: set apart by a mark without colours, by dim text with them.
TEST_F(Chat, EveryFormatAnswers) {
  for (const auto& [family, tokenizer] : std::vector<std::pair<std::string, std::string>>{
           {"kimi_k31", "kimi_small"}, {"glm5_next", "glm_small"}, {"deepseek_v32", "dsv_small"}}) {
    const std::string model = make_model(*folder_, family, tokenizer);
    const Ran ran = run({"chat", model, "-n", "6", "--temp", "0", "--ignore-eos"}, {.input = "hi\nso?\n"});
    EXPECT_EQ(ran.status, 0) << family << ": " << ran.err;
    EXPECT_EQ(answers(ran.err), 2u) << family << ": " << ran.err;
    EXPECT_NE(ran.out, "") << family;
  }
  const Ran wrong = run({"chat", *folder_ / "kimi_k31", "--effort", "heroic"});
  EXPECT_EQ(wrong.status, 1);
  EXPECT_NE(wrong.err.find("heroic"), std::string::npos) << wrong.err;
}

}  // namespace
}  // namespace weft
