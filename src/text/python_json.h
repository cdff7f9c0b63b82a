// JSON as the prompt encoders of the released models read and spell it, which is python's way.
//
// The base parser (base/json.h) sorts keys and rounds integers beyond 64 bits; both change the tokens of a
// prompt. Here objects keep their insertion order, integers keep every digit, and floats are spelled like
// python's repr (1e20 -> 1e+20, 1.50 -> 1.5, 1E2 -> 100.0), so that a client's arguments come back as the
// model saw them in training.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/check.h"

namespace weft {

// Nesting beyond the limit: apart from other errors, because malformed arguments may be passed on as text,
// deep ones not.
class NestingError : public Error {
 public:
  using Error::Error;
};

class PyJson {
 public:
  enum class Kind : uint8_t { null, boolean, number, string, array, object };
  enum class Style : uint8_t {
    spaced,  // ", " and ": ", insertion order: python's default, with ensure_ascii off
    sorted,  // "," and ":", keys in code point order at every level: K3's tool list and schemas
  };
  using Member = std::pair<std::string, PyJson>;

  PyJson() = default;  // null
  static PyJson boolean(bool value);
  static PyJson string(std::string value);
  static PyJson array();
  static PyJson object();

  // Strict JSON in UTF-8. Of a repeated key the last value counts, at the place of the first, as in python.
  // An escaped lone surrogate becomes U+FFFD. Error: starts with `where`, says what was expected at which
  // byte.
  static PyJson parse(std::string_view text, std::string_view where, int max_depth = kMaxDepth);
  // Empty when the text is not JSON or nested too deep: for what a model wrote.
  static std::optional<PyJson> try_parse(std::string_view text);
  static constexpr int kMaxDepth = 100;

  Kind kind() const { return kind_; }
  bool is_null() const { return kind_ == Kind::null; }
  bool is_string() const { return kind_ == Kind::string; }
  bool is_array() const { return kind_ == Kind::array; }
  bool is_object() const { return kind_ == Kind::object; }
  const char* kind_name() const;  // JSON's word for it: "null", "boolean", "number", ...

  bool as_bool() const;                            // kind boolean
  const std::string& text() const;                 // kind string: its value; number: its python spelling
  const std::vector<PyJson>& items() const;        // kind array
  const std::vector<Member>& members() const;      // kind object
  const PyJson* find(std::string_view key) const;  // null when absent, JSON null, or this is no object

  void push(PyJson value);                  // kind array
  void set(std::string key, PyJson value);  // kind object; replaces a member of that name

  std::string dump(Style style = Style::spaced) const;

 private:
  friend class PyJsonReader;
  void dump_to(std::string& out, Style style) const;

  Kind kind_ = Kind::null;
  bool flag_ = false;
  std::string text_;
  std::vector<PyJson> items_;
  std::vector<Member> members_;
};

// `text` between double quotes with JSON's escapes; bytes from 0x80 on pass unchanged. The second form
// appends the escaped bytes without quotes, and may be given a string piece by piece.
std::string json_quote(std::string_view text);
void json_escape_to(std::string& out, std::string_view text);

// The repr of a python float. Infinities and NaN do not occur in JSON.
std::string python_float(double value);

// Without the white space python's str.strip() removes at both ends (Unicode's, and U+001C..U+001F).
std::string_view python_strip(std::string_view text);

}  // namespace weft
