#include "engine/stop.h"

#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "base/check.h"

namespace weft {
namespace {

using Strings = std::vector<std::string>;

struct Outcome {
  Strings shown;  // per push, then of flush
  std::string text;
  int matched;
};

Outcome feed(const Strings& stops, const Strings& pieces) {
  StopMatcher matcher(stops);
  Outcome outcome;
  for (const std::string& piece : pieces) outcome.shown.push_back(matcher.push(piece));
  outcome.shown.push_back(matcher.flush());
  for (const std::string& text : outcome.shown) outcome.text += text;
  outcome.matched = matcher.matched();
  return outcome;
}

Strings bytes(const std::string& text) {
  Strings pieces;
  for (char c : text) pieces.emplace_back(1, c);
  return pieces;
}

// The rule in its plainest form: the first end of any stop string, the longest of those that end there.
std::pair<std::string, int> cut(const Strings& stops, const std::string& text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    int best = -1;
    for (size_t i = 0; i < stops.size(); ++i)
      if (text.substr(0, end).ends_with(stops[i]) && (best < 0 || stops[i].size() > stops[best].size()))
        best = static_cast<int>(i);
    if (best >= 0) return {text.substr(0, end - stops[best].size()), best};
  }
  return {text, -1};
}

TEST(Stop, AcrossTokens) {
  EXPECT_EQ(feed({"O P Q"}, {"say O", " P", " Q and on"}).shown, (Strings{"say ", "", "", ""}));
  EXPECT_EQ(feed({"O P Q"}, {"say O", " P", " R"}).shown, (Strings{"say ", "", "O P R", ""}));
}

TEST(Stop, HoldsBackOnlyWhatMayStillMatch) {
  // After "aab" the tail "ab" is the beginning of a stop string, the first "a" is not.
  EXPECT_EQ(feed({"abc"}, {"a", "a", "b", "x"}).shown, (Strings{"", "a", "", "abx", ""}));
  EXPECT_EQ(feed({"abab!"}, {"ababab", "!"}).shown, (Strings{"ab", "", ""}));
  // After "aabaaa" the "b" continues the beginning "aa", found by two steps back.
  EXPECT_EQ(feed({"aabaaac"}, {"aabaaa", "b", "aaac"}).shown, (Strings{"", "aaba", "", ""}));
  EXPECT_EQ(feed({"xyz"}, {"plain ", "text"}).shown, (Strings{"plain ", "text", ""}));
  EXPECT_EQ(feed({"xyz"}, {"ends in x", ""}).shown, (Strings{"ends in ", "", "x"}));
}

TEST(Stop, OverlappingStops) {
  const Strings stops = {"\n", "Alice:"};
  EXPECT_EQ(feed(stops, {"Hi Al", "ice", "\nBob"}).text, "Hi Alice");
  EXPECT_EQ(feed(stops, {"Hi Al", "ice: x\n"}).text, "Hi ");
  EXPECT_EQ(feed(stops, {"Hi Al", "ice: x\n"}).matched, 1);
  EXPECT_EQ(feed({"abc", "b"}, {"xa", "bc"}).text, "xa");  // "b" is complete first
  EXPECT_EQ(feed({"c", "abc"}, {"xabc"}).matched, 1);      // both end here, "abc" is longer
  EXPECT_EQ(feed({"c", "abc"}, {"xab", "c"}).text, "x");
}

TEST(Stop, CharactersStayWhole) {
  const std::string smile = "\U0001F600", grin = "\U0001F601";  // they differ in the last byte
  EXPECT_EQ(feed({smile + "!"}, {"a" + smile, grin}).shown, (Strings{"a", smile + grin, ""}));
  EXPECT_EQ(feed({smile}, bytes("a" + grin + smile)).text, "a" + grin);
  EXPECT_EQ(feed({smile}, {"a" + grin}).shown, (Strings{"a" + grin, ""}));
}

TEST(Stop, TheWholeAnswer) {
  const Outcome outcome = feed({"all of it"}, {"all ", "of it"});
  EXPECT_EQ(outcome.text, "");
  EXPECT_EQ(outcome.matched, 0);
}

TEST(Stop, NothingAfterIt) {
  StopMatcher matcher(Strings{"."});
  EXPECT_EQ(matcher.push("a.b"), "a");
  EXPECT_TRUE(matcher.stopped());
  EXPECT_EQ(matcher.push("c.d"), "");
  EXPECT_EQ(matcher.flush(), "");
}

TEST(Stop, NoneAtAll) {
  EXPECT_EQ(feed({}, {"a", "", "b"}).shown, (Strings{"a", "", "b", ""}));
}

TEST(Stop, EmptyIsRefusedByName) {
  try {
    StopMatcher matcher(Strings{"x", ""});
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("stop[1]"), std::string::npos) << error.what();
  }
}

TEST(Stop, NulAndHighBytesAreBytes) {
  const std::string nul("\0\xff", 2);
  EXPECT_EQ(feed({nul}, {std::string("a\0", 2), "\xff"}).text, "a");
}

TEST(Stop, AnyCutIntoPiecesGivesTheSame) {
  std::mt19937 random(11);
  const auto word = [&](int most) {
    std::string text(1 + random() % most, 'a');
    for (char& c : text) c = 'a' + random() % 2;
    return text;
  };
  int stopped = 0;
  for (int round = 0; round < 20000; ++round) {
    Strings stops;
    for (int i = 1 + random() % 3; i > 0; --i) stops.push_back(word(7));
    const std::string text = word(16);
    const auto [expected, matched] = cut(stops, text);
    stopped += matched >= 0;
    Strings pieces;
    for (size_t at = 0; at < text.size();) {
      const size_t n = 1 + random() % 5;
      pieces.push_back(text.substr(at, n));
      at += n;
    }
    for (const Strings& cuts : {Strings{text}, bytes(text), pieces}) {
      const Outcome outcome = feed(stops, cuts);
      ASSERT_EQ(outcome.text, expected) << text;
      ASSERT_EQ(outcome.matched >= 0 ? stops[outcome.matched] : "", matched >= 0 ? stops[matched] : "");
    }
  }
  EXPECT_GT(stopped, 5000);
  EXPECT_LT(stopped, 19000);
}

// 100 stop strings of 10,000 bytes that all keep matching: the automaton must not go back over the text.
TEST(Stop, ManyAndLongStayLinear) {
  Strings stops;
  for (int i = 0; i < 100; ++i) stops.push_back(std::string(9999, 'a') + static_cast<char>('b' + i % 20));
  StopMatcher matcher(stops);
  const auto start = std::chrono::steady_clock::now();
  size_t shown = 0;
  for (int i = 0; i < 5000; ++i) shown += matcher.push("aaaa").size();
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  EXPECT_EQ(shown, 20000u - 9999u);
  EXPECT_EQ(matcher.push("bx"), "");  // the held 9,999 bytes are the stop string's
  EXPECT_TRUE(matcher.stopped());
  EXPECT_LT(seconds, 1.0) << "2 million automaton steps";  // takes about 10 ms; quadratic would take minutes
}

}  // namespace
}  // namespace weft
