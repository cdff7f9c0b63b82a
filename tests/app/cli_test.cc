#include <gtest/gtest.h>
#include <sched.h>

#include "app/program.h"

namespace weft {
namespace {

using namespace program;

class Cli : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new Folder;
    model_ = make_model(*folder_);
  }
  static void TearDownTestSuite() {
    delete folder_;
    folder_ = nullptr;
  }

  // Greedy, quiet, without the prompt: stdout is the text.
  static Arguments greedy(const Arguments& more, const std::string& model = model_) {
    Arguments all = {"run", model, "--temp", "0", "-q", "--no-display-prompt", "--ignore-eos"};
    all.insert(all.end(), more.begin(), more.end());
    return all;
  }
  static void expect_usage_error(const Arguments& arguments, const std::string& says, int status = 2) {
    const Ran ran = run(arguments, {.close_stdin = true});
    SCOPED_TRACE(::testing::PrintToString(arguments));
    EXPECT_EQ(ran.status, status);
    EXPECT_EQ(ran.out, "");
    const size_t at = ran.err.find("weft: ");
    ASSERT_NE(at, std::string::npos) << ran.err;
    EXPECT_EQ(count(ran.err.substr(at), "\n"), 1u) << ran.err;  // one line, the last one
    EXPECT_NE(ran.err.find(says, at), std::string::npos) << ran.err;
  }
  static std::string first_of(const std::string& text) { return text.substr(0, text.find(' ')); }

  static inline Folder* folder_ = nullptr;
  static inline std::string model_;
};

const std::string kTiny = WEFT_SOURCE_DIR "/tests/golden/kimi_linear-tiny";  // no tokenizer, vocabulary 131

TEST_F(Cli, HelpAndVersionSucceed) {
  EXPECT_EQ(run({"--version"}).out.substr(0, 5), "weft ");
  const Ran help = run({"--help"});
  EXPECT_EQ(help.status, 0);
  EXPECT_EQ(help.err, "");
  for (const std::string name :
       {"run", "chat", "tokenize", "inspect", "plan", "synth", "verify", "bench", "isa"}) {
    EXPECT_NE(help.out.find("\n  " + name + " "), std::string::npos) << name;
    EXPECT_EQ(run({name, "--help"}).status, 0) << name;
  }
  EXPECT_NE(run({"isa"}).out.find("portable  usable"), std::string::npos);
}

TEST_F(Cli, WrongUseIsOneLineAndTwo) {
  expect_usage_error({}, "no command given");
  expect_usage_error({"sing"}, "no command \"sing\"");
  expect_usage_error({"run"}, "--model is required");
  expect_usage_error({"run", "-m", model_, "--fast"}, "--fast");
  expect_usage_error({"run", "-m", model_, "-n", "many", "-p", "x"}, "many");
  expect_usage_error({"run", "-m", model_, "-n", "-2", "-p", "x"}, "-n -2");
  expect_usage_error({"run", "-m", model_, "-t", "0", "-p", "x"}, "--threads");
  expect_usage_error({"run", "-m", model_, "--cpu-list", "4-x", "-p", "x"}, "--cpu-list 4-x");
  expect_usage_error({"run", "-m", model_, "-c", "-1", "-p", "x"}, "--ctx-size");
  expect_usage_error({"run", "-m", model_, "-p", "x", "-f", "y"}, "-p and -f");
  expect_usage_error({"run", "-m", model_, "-p", ""}, "empty");
  expect_usage_error({"run", "-m", model_}, "empty");  // stdin is closed
  expect_usage_error({"run", "-m", model_, "-p", "x", "--isa", "mmx"}, "mmx");
  expect_usage_error({"run", "-m", model_, "-p", "x", "-c", "2000000"}, "2000000");
}

TEST_F(Cli, WhatCannotBeReadIsOne) {
  expect_usage_error({"run", "-m", *folder_ / "nowhere", "-p", "x"}, "nowhere", 1);
  expect_usage_error({"run", "-m", "/dev/null", "-p", "x"}, "/dev/null", 1);
  expect_usage_error({"run", "-m", model_, "-f", *folder_ / "no.txt"}, "no.txt", 1);
  expect_usage_error({"run", "-m", model_, "-f", model_}, "directory", 1);
  expect_usage_error({"run", "-m", kTiny, "-p", "x"}, "tokenizer", 1);
  expect_usage_error({"chat", "-m", kTiny}, "tokenizer", 1);
  expect_usage_error({"tokenize", "-m", kTiny, "-p", "x"}, "tokenizer", 1);
}

// A prompt comes by -p, a file or stdin; piped output is the text and one newline at most.
TEST_F(Cli, PromptsFromAnywhereGiveOneText) {
  const Ran direct = run({"run", model_, "-p", "Hello\nworld", "-n", "12", "--temp", "0"});
  ASSERT_EQ(direct.status, 0) << direct.err;
  EXPECT_EQ(direct.out.substr(0, 11), "Hello\nworld");
  EXPECT_EQ(direct.out.back(), '\n');
  EXPECT_EQ(direct.out.find('\x1b'), std::string::npos);
  EXPECT_EQ(direct.err.find('\x1b'), std::string::npos);
  EXPECT_NE(direct.err.find("output 12 tokens"), std::string::npos);
  EXPECT_NE(direct.err.find("tokens/s"), std::string::npos);
  EXPECT_NE(direct.err.find("peak memory"), std::string::npos);
  write_text(*folder_ / "prompt.txt", "Hello\nworld\n");
  EXPECT_EQ(run({"run", model_, "-f", *folder_ / "prompt.txt", "-n", "12", "--temp", "0"}).out, direct.out);
  EXPECT_EQ(run({"run", "-m", model_, "-n", "12", "--temp", "0"}, {.input = "Hello\nworld\n"}).out,
            direct.out);
  const Ran bare = run(greedy({"-p", "Hello\nworld", "-n", "12"}));
  EXPECT_EQ("Hello\nworld" + bare.out, direct.out);
  EXPECT_EQ(bare.err, "");
}

TEST_F(Cli, RatesThatAreNotDefinedAreLeftOut) {
  for (const char* n : {"0", "1"}) {
    const Ran ran = run({"run", model_, "-p", "Hi", "-n", n});
    EXPECT_EQ(ran.status, 0);
    const std::string stats = ran.err.substr(ran.err.rfind("prompt "));
    EXPECT_EQ(count(stats, "tokens/s"), std::string(n) == "0" ? 0u : 1u) << stats;
    EXPECT_EQ(stats.find("inf"), std::string::npos) << stats;
    EXPECT_EQ(stats.find("nan"), std::string::npos) << stats;
  }
}

// Special tokens are text in a prompt unless asked for.
TEST_F(Cli, SpecialTokensOnlyWhenAsked) {
  const auto ids = [&](const Arguments& more) {
    Arguments all = {"tokenize", model_, "-p", "[EOS]"};
    all.insert(all.end(), more.begin(), more.end());
    return run(all).out;
  };
  EXPECT_EQ(ids({"--special"}), "7937\n");
  EXPECT_GT(count(ids({}), " "), 0u);
}

TEST_F(Cli, TokenizeGoesBothWays) {
  const std::string text = "naïve 日本語 🙂\n\n  x = 1\t[EOS]\n";
  const Ran ids = run({"tokenize", model_}, {.input = text});
  EXPECT_EQ(ids.status, 0) << ids.err;
  EXPECT_EQ(run({"tokenize", model_, "--decode"}, {.input = ids.out}).out, text);
  const std::string json = run({"tokenize", model_, "--json", "-p", "[EOS]", "--special"}).out;
  EXPECT_EQ(json, "{\"count\": 1, \"ids\": [7937], \"pieces\": [\"[EOS]\"]}\n");
  expect_usage_error({"tokenize", model_, "--decode", "-p", "8192"}, "8192");
  expect_usage_error({"tokenize", model_, "--decode", "-p", "12 x"}, "\"x\"");
}

// R13: ids from outside are checked before they index anything.
TEST_F(Cli, TokenIdsOutsideTheVocabularyAreRefused) {
  for (const char* ids : {"131", "-1", "2147483648", "4294967301", "1.5", "1 a", "5 131", "0x3"})
    expect_usage_error({"run", "-m", kTiny, "--ids", "-p", ids}, "token id");
  expect_usage_error({"run", "-m", kTiny, "--ids", "-p", " "}, "empty");
  const Ran last = run({"run", "-m", kTiny, "--ids", "-p", "130, 0", "-n", "3", "--temp", "0", "-q"});
  EXPECT_EQ(last.status, 0) << last.err;
  EXPECT_EQ(count(last.out, " "), 2u) << last.out;
}

// R14: whatever forces the likeliest token gives the greedy text.
// Half of this model's vocabulary is beyond its tokenizer.
TEST_F(Cli, RowsThatPadTheVocabularyAreNeverSampled) {
  const Folder folder;
  const std::string model = make_model(folder, "kimi_linear", "kimi_small", {"--vocab", "16384"});
  const Ran ran = run({"run", model, "--ids", "-p", "1 2 16000", "-n", "64", "--temp", "3", "--top-p", "1",
                       "--seed", "1", "-q", "--ignore-eos"});
  ASSERT_EQ(ran.status, 0) << ran.err;
  std::istringstream ids(ran.out);
  int count = 0;
  for (int id; ids >> id; ++count) EXPECT_LT(id, 8192);
  EXPECT_EQ(count, 64);
}

TEST_F(Cli, ExtremeSamplingValuesMeanWhatTheySay) {
  const auto text = [&](const Arguments& more) {
    Arguments all = {"run", model_, "-p", "The", "-n", "16", "--seed", "7", "-q", "--ignore-eos"};
    all.insert(all.end(), more.begin(), more.end());
    const Ran ran = run(all);
    EXPECT_EQ(ran.status, 0) << ran.err;
    return ran.out;
  };
  const std::string likeliest = text({"--temp", "0"});
  for (const Arguments& flags : std::vector<Arguments>{{"--temp", "1e-9"},
                                                       {"--temp", "1e-45"},
                                                       {"--top-k", "1"},
                                                       {"--top-p", "0"},
                                                       {"--top-p", "1e-12"},
                                                       {"--min-p", "1"}})
    EXPECT_EQ(text(flags), likeliest) << flags[0] << " " << flags[1];
  const std::string drawn = text({"--temp", "1", "--top-k", "0"});
  EXPECT_NE(drawn, likeliest);
  for (const char* k : {"-1", "8192", "1000000000"})
    EXPECT_EQ(text({"--temp", "1", "--top-k", k}), drawn) << k;
  EXPECT_NE(text({"--temp", "1", "--seed", "8"}), drawn);
  for (const Arguments& flags : std::vector<Arguments>{{"--repeat-penalty", "0"},
                                                       {"--top-p", "1.5"},
                                                       {"--top-p", "-0.1"},
                                                       {"--temp", "-1"},
                                                       {"--temp", "nan"},
                                                       {"--presence-penalty", "1e9"},
                                                       {"--seed", "-2"}}) {
    Arguments all = {"run", model_, "-p", "The"};
    all.insert(all.end(), flags.begin(), flags.end());
    expect_usage_error(all, "");
  }
}

// R19: every end token of both files ends the run, and the defaults of generation_config.json are shown.
TEST_F(Cli, EveryEndTokenEndsTheRun) {
  std::istringstream words(run(greedy({"--ids", "-p", "1 2 3", "-n", "40"})).out);
  std::vector<std::string> ids;
  for (std::string id; words >> id;)
    if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
  ASSERT_GE(ids.size(), 3u);
  const std::string copy = *folder_ / "ends";
  std::filesystem::copy(model_, copy);
  const std::string config = read_text(copy + "/config.json");
  const auto output = [&](const std::string& eos, const std::string& generation, bool ignore = false) {
    std::string text = config;
    const size_t at = text.find("\"eos_token_id\":");
    const size_t end = text.find_first_of(",\n}", at);
    text.replace(at, end - at, "\"eos_token_id\": " + eos);
    write_text(copy + "/config.json", text);
    write_text(copy + "/generation_config.json", generation);
    Arguments all = {"run", copy, "--ids", "-p", "1 2 3", "-n", "40", "--top-k", "1"};
    if (ignore) all.push_back("--ignore-eos");
    return run(all);
  };
  EXPECT_EQ(output(ids[0], "{}").out, "");  // the end token itself is not shown
  EXPECT_EQ(output("8191", "{\"eos_token_id\": " + ids[0] + "}").out, "");
  EXPECT_EQ(output("8191", "{\"eos_token_id\": [" + ids[2] + ", " + ids[0] + "]}").out, "");
  EXPECT_EQ(output("8191", "{\"eos_token_id\": [8190, " + ids[1] + "]}").out, ids[0] + "\n");
  EXPECT_EQ(count(output(ids[0], "{\"eos_token_id\": " + ids[1] + "}", true).out, " "), 39u);
  const Ran defaults = output("8191", "{\"eos_token_id\": null, \"temperature\": 0.6, \"top_p\": 0.9}");
  EXPECT_EQ(defaults.status, 0);
  EXPECT_NE(defaults.err.find("temperature 0.6 (generation_config.json), top-p 0.9 (generation_config.json)"),
            std::string::npos)
      << defaults.err;
  const Ran broken = output("8191", "{\"eos_token_id\"");
  EXPECT_EQ(broken.status, 1);
  EXPECT_NE(broken.err.find("generation_config.json"), std::string::npos);
}

// R31: a prompt is read whole or refused with both numbers.
TEST_F(Cli, PromptsLongerThanTheContextAreRefused) {
  const auto prompt = [](int n) {
    std::string ids;
    for (int i = 0; i < n; ++i) ids += std::to_string(i % 131) + " ";
    return ids;
  };
  for (const int n : {1, 62, 63})
    for (const char* most : {"-1", "8"}) {
      const Ran ran = run({"run", kTiny, "--ids", "-c", "64", "-p", prompt(n), "-n", most, "--ignore-eos"});
      EXPECT_EQ(ran.status, 0) << ran.err;
      const int expected = std::min(64 - n, std::string(most) == "8" ? 8 : 64);
      EXPECT_EQ(static_cast<int>(count(ran.out, " ")) + 1, expected) << n;
      EXPECT_NE(ran.err.find("prompt " + std::to_string(n) + " token"), std::string::npos) << ran.err;
    }
  for (const int n : {64, 65, 5000}) {
    expect_usage_error({"run", kTiny, "--ids", "-c", "64", "-p", prompt(n)}, std::to_string(n) + " tokens");
    expect_usage_error({"run", kTiny, "--ids", "-c", "64", "-p", prompt(n)}, "64");
  }
}

// R33.
TEST_F(Cli, StopStringsCutWhereTheyBegin) {
  const Arguments base = {"-p", "Hello", "-n", "24"};
  const auto with = [&](const Arguments& more) {
    Arguments all = base;
    all.insert(all.end(), more.begin(), more.end());
    return run(greedy(all));
  };
  std::string text = with({}).out;
  text.pop_back();  // the newline that the program adds
  ASSERT_GT(text.size(), 20u);
  const auto cut = [](const std::string& kept) {
    return kept.empty() || kept.back() == '\n' ? kept : kept + "\n";
  };
  size_t at = 8;
  while ((text[at] & 0xc0) == 0x80) ++at;
  size_t end = at + 6;
  while ((text[end] & 0xc0) == 0x80) ++end;
  const std::string stop = text.substr(at, end - at);
  const std::string before = cut(text.substr(0, text.find(stop)));
  EXPECT_EQ(with({"--stop", stop}).out, before);
  EXPECT_EQ(with({"--stop", "never there", "--stop", stop}).out, before);
  Arguments many;
  for (int i = 0; i < 100; ++i) many.insert(many.end(), {"--stop", "never " + std::to_string(i)});
  many.insert(many.end(), {"--stop", std::string(10000, 'x'), "--stop", stop});
  EXPECT_EQ(with(many).out, before);
  EXPECT_EQ(with({"--stop", text}).out, "");
  EXPECT_EQ(with({"--stop", "{}", "--stop", "[a,b]"}).out, text + "\n");
  EXPECT_EQ(run(greedy({"-p", "Hello", "-n", "24", "--stop", "Hello"})).out, text + "\n");
  expect_usage_error({"run", model_, "-p", "x", "--stop", ""}, "stop");
  expect_usage_error({"run", model_, "-p", "x", "--stop", "x", "--stop", ""}, "stop[1]");
}

// R28: the default follows the affinity mask and is explained; more threads than CPUs run, with a warning.
TEST_F(Cli, ThreadsAreExplained) {
  const Arguments base = {"run", kTiny, "--ids", "-p", "1", "-n", "8", "--temp", "0"};
  cpu_set_t all, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof all, &all), 0);
  CPU_ZERO(&one);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &all)) {
      CPU_SET(cpu, &one);
      break;
    }
  sched_setaffinity(0, sizeof one, &one);
  const Ran narrow = run(base);
  sched_setaffinity(0, sizeof all, &all);
  EXPECT_NE(narrow.err.find("1 thread: 1 CPU in the affinity mask"), std::string::npos) << narrow.err;
  Arguments wide = base;
  wide.insert(wide.end(), {"-t", std::to_string(4 * CPU_COUNT(&all))});
  const Ran many = run(wide);
  EXPECT_EQ(many.status, 0) << many.err;
  EXPECT_EQ(many.out, narrow.out);
  EXPECT_NE(many.err.find("weft: warning: -t "), std::string::npos) << many.err;
}

// R08 b, c.
TEST_F(Cli, AReaderThatLeavesEndsTheProgram) {
  for (const Arguments& arguments : std::vector<Arguments>{
           {"run", model_, "-p", "Hi", "-n", "4000", "--ignore-eos", "-q"}, {"inspect", model_}}) {
    const Ran ran = run(arguments, {.read_at_most = 1});
    EXPECT_LT(ran.seconds_after_close, 1) << arguments[0];
    EXPECT_TRUE(ran.status == 141 || ran.status == 0 || ran.status == 1) << ran.status;
    EXPECT_LE(count(ran.err, "\n"), 1u) << ran.err;
  }
}

// R08 d.
TEST_F(Cli, AFullDeviceIsAnError) {
  for (const Arguments& arguments : std::vector<Arguments>{{"run", model_, "-p", "Hi", "-n", "4", "-q"},
                                                           {"tokenize", model_, "-p", "Hi"},
                                                           {"isa"},
                                                           {"--help"}}) {
    const Ran ran = run(arguments, {.stdout_path = "/dev/full"});
    EXPECT_EQ(ran.status, 1) << arguments[0];
    EXPECT_EQ(ran.err, "weft: cannot write to stdout: No space left on device\n") << arguments[0];
  }
}

TEST_F(Cli, CtrlCEndsARunWithItsFigures) {
  const Ran ran = run({"run", model_, "-p", "Hi", "--ignore-eos", "-c", "200000"}, {.signal_after = 0.1});
  EXPECT_EQ(ran.status, 130);
  EXPECT_NE(ran.err.find("output "), std::string::npos) << ran.err;
}

}  // namespace
}  // namespace weft
