#include "base/json.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <functional>

#include "base/check.h"

namespace weft {
namespace {

std::string error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

std::string parse_error(const std::string& text) {
  return error_of([&] { parse_json(text, "f.json"); });
}

bool is_utf8(const std::string& text) {
  return printable(text, text.size() + 1) == text;
}

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

struct TemporaryFile {
  explicit TemporaryFile(const std::string& content) {
    path = "/tmp/weft_json_test_" + std::to_string(::getpid());
    FILE* file = std::fopen(path.c_str(), "wb");
    std::fwrite(content.data(), 1, content.size(), file);
    std::fclose(file);
  }
  ~TemporaryFile() { ::unlink(path.c_str()); }
  std::string path;
};

TEST(ParseJson, AgreesWithTheLibraryOnEveryKind) {
  const std::string text =
      R"({"a": [1, -2, 3.5, 18446744073709551615, 1e3, true, false, null, "x\u00e9\n", {}, [], [[1], {"b": [2]}]],
          "\u0000key": {"deep": {"deeper": [{"z": 0}, {"z": 1}]}}, "": ""})";
  EXPECT_EQ(parse_json(text, "f"), Json::parse(text));
  EXPECT_EQ(parse_json("7", "f"), Json(7));
  EXPECT_EQ(parse_json("\xef\xbb\xbf[1]", "f"), Json::parse("[1]"));  // a byte order mark
}

TEST(ParseJson, RefusesMalformedTextInOneShortValidLine) {
  const std::string cases[] = {"",
                               " ",
                               "{",
                               "[1,]",
                               "[1 2]",
                               "{\"a\":1,}",
                               "{'a':1}",
                               "{\"a\" 1}",
                               "nul",
                               "NaN",
                               "[Infinity]",
                               "01",
                               "1e999",
                               "[1] x",
                               "{}{}",
                               "\"\xff\"",
                               "\"\xc0\xaf\"",
                               "\"\xed\xa0\x80\"",
                               "\"\\ud800\"",
                               "\"\n\"",
                               "\xff\xfe",
                               std::string("[1\0]", 4),
                               "// no\n1",
                               "\"" + std::string(1 << 20, 'a'),
                               "[" + std::string(1 << 20, '\x01')};
  for (const std::string& text : cases) {
    const std::string message = parse_error(text);
    EXPECT_EQ(message.rfind("f.json: not valid JSON at line ", 0), 0u)
        << text.substr(0, 20) << " -> " << message;
    EXPECT_LT(message.size(), 250u);
    EXPECT_TRUE(is_utf8(message)) << message;
  }
}

TEST(ParseJson, PointsAtLineAndColumn) {
  EXPECT_SAYS(parse_error("{\n  \"a\": 1,\n  \"b\": ?\n}"), "line 3, column 8:");
}

TEST(ParseJson, RefusesRepeatedKeysInOneObjectOnly) {
  EXPECT_SAYS(parse_error(R"({"a": 1, "b": {"a": 2}, "a": 3})"), "the key \"a\" appears twice");
  EXPECT_EQ(parse_error(R"({"a": 1, "b": {"a": 2}, "c": [{"a": 3}, {"a": 4}]})"), "");
}

TEST(ParseJson, RefusesDepthAboveTheLimit) {
  auto nested = [](int depth) { return std::string(depth, '[') + std::string(depth, ']'); };
  EXPECT_EQ(parse_error(nested(100)), "");
  EXPECT_SAYS(parse_error(nested(101)), "deeper than 100");
  EXPECT_SAYS(parse_error(std::string(10'000'000, '[')), "deeper than 100");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  EXPECT_SAYS(parse_error(objects), "deeper than 100");
  EXPECT_EQ(parse_error("[\"" + std::string(1000, '[') + "\"]"), "");  // brackets inside a string are text
}

TEST(Fields, TakesIntegersOnlyWhenTheyAreIntegers) {
  auto read = [](const std::string& value) {
    const Json json = parse_json("{\"width\": " + value + "}", "config.json");
    return Fields(json, "config.json").integer("width", 1, 65536);
  };
  for (const char* good : {"56", "56.0", "5.6e1", "5600e-2"}) EXPECT_EQ(read(good), 56) << good;
  EXPECT_EQ(read("1"), 1);
  EXPECT_EQ(read("65536"), 65536);
  for (const char* bad : {"4294967352", "56.5", "\"56\"", "true", "-56", "0", "null", "65537",
                          "18446744073709551615", "1e300", "9223372036854775808", "9223372036854775808.0",
                          "-9223372036854775809", "[56]", "{}", "4294967352.0"}) {
    const std::string message = error_of([&] { read(bad); });
    EXPECT_EQ(message.rfind("config.json: width is ", 0), 0u) << bad << " -> " << message;
    EXPECT_SAYS(message, "expected an integer from 1 to 65536");
  }
  EXPECT_SAYS(error_of([&] { read("56.5"); }), "is 56.5,");
  EXPECT_SAYS(error_of([&] { read("\"56\""); }), "the string \"56\"");
  EXPECT_SAYS(error_of([&] { read("true"); }), "is true,");
  EXPECT_SAYS(error_of([&] { read("null"); }), "is null,");
}

TEST(Fields, ReadsTheWholeRangeOfInt64) {
  const Json json = parse_json(R"({"low": -9223372036854775808, "high": 9223372036854775807})", "f");
  const int64_t low = std::numeric_limits<int64_t>::min(), high = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(Fields(json, "f").integer("low", low, high), low);
  EXPECT_EQ(Fields(json, "f").integer("high", low, high), high);
}

TEST(Fields, NullAndAbsentMeanTheDefaultOnlyWhereThereIsOne) {
  const Json json = parse_json(R"({"n": null, "zero": 0})", "f.json");
  const Fields fields(json, "f.json");
  EXPECT_FALSE(fields.has("n"));
  EXPECT_FALSE(fields.has("absent"));
  EXPECT_TRUE(fields.has("zero"));
  for (const char* key : {"n", "absent"}) {
    EXPECT_EQ(fields.integer(key, 1, 9, 5), 5);
    EXPECT_EQ(fields.number(key, 0, 1, 0.5), 0.5);
    EXPECT_EQ(fields.boolean(key, true), true);
    EXPECT_EQ(fields.string(key, "x"), "x");
    EXPECT_FALSE(fields.optional_object(key).has_value());
  }
  EXPECT_SAYS(error_of([&] { fields.integer("absent", 1, 9); }),
              "f.json: absent is missing, expected an integer");
  EXPECT_SAYS(error_of([&] { fields.integer("zero", 1, 9, 5); }),
              "zero is 0");  // a wrong value is no absence
  EXPECT_SAYS(error_of([&] { fields.number("n", 0, 1); }), "n is null, expected a number");
  EXPECT_SAYS(error_of([&] { fields.boolean("zero"); }), "zero is 0, expected true or false");
  EXPECT_SAYS(error_of([&] { fields.string("zero", "x"); }), "zero is 0, expected a string");
  EXPECT_SAYS(error_of([&] { fields.optional_object("zero"); }), "zero is 0, expected an object");
}

TEST(Fields, NumbersKeepTheirBounds) {
  const Json json = parse_json(R"({"eps": 1e-6, "one": 1, "big": 2.5, "yes": true})", "f");
  const Fields fields(json, "f");
  EXPECT_EQ(fields.number("eps", 0, 1), 1e-6);
  EXPECT_EQ(fields.number("one", 0, 1), 1.0);
  EXPECT_SAYS(error_of([&] { fields.number("big", 0, 1); }), "big is 2.5, expected a number from 0 to 1");
  EXPECT_SAYS(error_of([&] { fields.number("yes", 0, 1); }), "yes is true");
}

TEST(Fields, PathsNameNestedFieldsAndElements) {
  const Json json =
      parse_json(R"({"text_config": {"rope": {"theta": "x"}, "ids": [1, 2.5], "names": ["a", 3]}})", "f");
  const Fields text = Fields(json, "config.json").object("text_config");
  EXPECT_EQ(text.path("hidden_size"), "config.json: text_config.hidden_size");
  EXPECT_SAYS(error_of([&] { text.object("rope").number("theta", 0, 1); }),
              "config.json: text_config.rope.theta is the");
  EXPECT_SAYS(error_of([&] { text.integers("ids", 0, 9); }), "config.json: text_config.ids[1] is 2.5");
  EXPECT_SAYS(error_of([&] { text.strings("names"); }), "config.json: text_config.names[1] is 3");
  EXPECT_SAYS(error_of([&] { text.strings("rope"); }), "rope is an object, expected an array of strings");
}

TEST(Fields, IntegersTakeAnArrayOrOne) {
  const Json json = parse_json(R"({"many": [1, 2.0], "one": 7, "none": [], "bad": "7"})", "f");
  const Fields fields(json, "f");
  EXPECT_EQ(fields.integers("many", 0, 9), (std::vector<int64_t>{1, 2}));
  EXPECT_EQ(fields.integers("one", 0, 9), (std::vector<int64_t>{7}));
  EXPECT_TRUE(fields.integers("none", 0, 9).empty());
  EXPECT_SAYS(error_of([&] { fields.integers("bad", 0, 9); }), "bad is the string \"7\"");
}

TEST(Fields, MessagesNeverDumpALargeValue) {
  const Json json = {{"a", std::string(1 << 20, 'x')}, {"b", std::vector<int>(100000, 1)}};
  const Fields fields(json, std::string(1 << 20, '\xff'));
  for (const char* key : {"a", "b"}) {
    const std::string message = error_of([&] { fields.integer(key, 0, 1); });
    EXPECT_LT(message.size(), 500u);
    EXPECT_TRUE(is_utf8(message));
  }
  EXPECT_SAYS(error_of([] {
                Fields(Json::array({1, 2}), "f.json");
              }),
              "f.json is an array of 2, expected a JSON object");
}

TEST(Printable, EscapesAndCuts) {
  EXPECT_EQ(printable("a\nb\x7f\xff\xc3\xa9"), "a\\x0ab\\x7f\\xff\xc3\xa9");
  EXPECT_EQ(printable("abcdef", 3), "abc...");
  EXPECT_EQ(printable("abc", 3), "abc");
  EXPECT_EQ(printable("\xed\xa0\x80\xf4\x90\x80\x80\xe0\x80\x80\xc3"),
            "\\xed\\xa0\\x80\\xf4\\x90\\x80\\x80\\xe0\\x80\\x80\\xc3");
}

TEST(ReadFile, GivesBytesOrTheReason) {
  EXPECT_EQ(read_file(TemporaryFile(std::string("a\0b", 3)).path), std::string("a\0b", 3));
  const std::string large(1'000'003, 'q');
  EXPECT_EQ(read_file(TemporaryFile(large).path), large);
  EXPECT_EQ(read_file(TemporaryFile("").path), "");
  EXPECT_SAYS(error_of([] { read_file("/nonexistent/x.json"); }),
              "/nonexistent/x.json: cannot open: No such file");
  EXPECT_SAYS(error_of([] { read_file("/"); }), "/: cannot read: Is a directory");
}

TEST(ReadFile, NamesWhatADownloadLeftBehind) {
  const TemporaryFile pointer("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n");
  EXPECT_SAYS(error_of([&] { read_file(pointer.path); }), "is a git-LFS pointer");
  const TemporaryFile page("\n<!DOCTYPE html><html>");
  EXPECT_SAYS(error_of([&] { parse_json_file(page.path); }), "is an HTML page");
  const TemporaryFile empty(" \n");
  EXPECT_SAYS(error_of([&] { parse_json_file(empty.path); }), "is empty");
}

}  // namespace
}  // namespace weft
