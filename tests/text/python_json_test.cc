// Expected spellings: python 3's json.dumps(..., ensure_ascii=False) and repr(float).
#include "text/python_json.h"

#include <gtest/gtest.h>

#include <chrono>

namespace weft {
namespace {

std::string again(std::string_view text) {
  return PyJson::parse(text, "test").dump();
}

TEST(PythonJson, NumbersAreSpelledLikePython) {
  const char* const kCases[][2] = {
      {"0", "0"},
      {"-0", "0"},
      {"-0.0", "-0.0"},
      {"1.0", "1.0"},
      {"1.50", "1.5"},
      {"1e20", "1e+20"},
      {"1E2", "100.0"},
      {"1e-7", "1e-07"},
      {"0.0001", "0.0001"},
      {"0.00001", "1e-05"},
      {"1e15", "1000000000000000.0"},
      {"1e16", "1e+16"},
      {"123456789.125e-2", "1234567.89125"},
      {"5e-324", "5e-324"},
      {"1e-400", "0.0"},
      {"1.7976931348623157e308", "1.7976931348623157e+308"},
      {"0.1", "0.1"},
      {"123456789012345678901234567890", "123456789012345678901234567890"},
      {"-18446744073709551616", "-18446744073709551616"},
  };
  for (const auto& [text, expected] : kCases) EXPECT_EQ(again(text), expected);
}

TEST(PythonJson, StringsAndOrder) {
  EXPECT_EQ(again(R"({"b":1,"a":[true,false,null],"b":2})"), R"({"b": 2, "a": [true, false, null]})");
  EXPECT_EQ(again(R"("\u00e9\ud83d\ude42\/\u0001\u007f")"), "\"é🙂/\\u0001\x7f\"");
  EXPECT_EQ(again(R"("\ud83d x")"), "\"\xEF\xBF\xBD x\"");
  EXPECT_EQ(again(R"("\ud83dé")"), "\"\xEF\xBF\xBDé\"");
  EXPECT_EQ(PyJson::parse(R"({"é":1,"z":{"b":2,"B":1},"10":0,"9":0})", "t").dump(PyJson::Style::sorted),
            R"({"10":0,"9":0,"z":{"B":1,"b":2},"é":1})");
}

TEST(PythonJson, RefusesWhatIsNotJson) {
  for (const char* text : {"",
                           " ",
                           "{",
                           "[1,]",
                           "{\"a\":1,}",
                           "{'a': 1}",
                           "01",
                           "+1",
                           ".5",
                           "1.",
                           "1e",
                           "-",
                           "NaN",
                           "Infinity",
                           "tru",
                           "nul",
                           "\"a",
                           "\"\n\"",
                           "\"\\x\"",
                           "\"\\u12\"",
                           "\"\\u12g4\"",
                           "1 2",
                           "[1 2]",
                           "{\"a\" 1}",
                           "{1: 2}",
                           "\"\xff\"",
                           "\"\xc0\x80\"",
                           "\"\xed\xa0\x80\"",
                           "\"\xf5\x80\x80\x80\"",
                           "\"\xe2\x82\""})
    EXPECT_THROW(PyJson::parse(text, "t"), Error) << text;
  EXPECT_THROW(PyJson::parse(std::string_view("1\0", 2), "t"), Error);
  try {
    PyJson::parse("[1, x]", "body");
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(), "body: not valid JSON: expected a value at byte 4 of 6");
  }
}

TEST(PythonJson, WideObjectsAreReadInLinearTime) {
  std::string text = "{";
  for (int i = 0; i < 200000; ++i) text += fmt::format("\"k{}\": {},", i, i);
  text.back() = '}';
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(PyJson::parse(text, "t").members().size(), 200000u);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(5));
}

TEST(PythonJson, Strip) {
  EXPECT_EQ(python_strip(" \n\x1c\u00a0\u3000 a b \u2028\t"), "a b");
  EXPECT_EQ(python_strip(" \n "), "");
  EXPECT_EQ(python_strip("\u200b"), "\u200b");  // zero width space is none for python
}

}  // namespace
}  // namespace weft
