#include "text/python_json.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <unordered_map>

namespace weft {
namespace {

void append_utf8(std::string& out, uint32_t code) {
  if (code < 0x80) {
    out += char(code);
  } else if (code < 0x800) {
    out += char(0xC0 | code >> 6);
    out += char(0x80 | (code & 63));
  } else if (code < 0x10000) {
    out += char(0xE0 | code >> 12);
    out += char(0x80 | (code >> 6 & 63));
    out += char(0x80 | (code & 63));
  } else {
    out += char(0xF0 | code >> 18);
    out += char(0x80 | (code >> 12 & 63));
    out += char(0x80 | (code >> 6 & 63));
    out += char(0x80 | (code & 63));
  }
}

// Length of the UTF-8 character at the start of `s`, 0 when ill-formed (overlong forms and surrogates
// included).
size_t utf8_length(std::string_view s) {
  auto byte = [&](size_t i) { return i < s.size() ? uint8_t(s[i]) : uint8_t(0); };
  auto tail = [&](size_t i) { return (byte(i) & 0xC0) == 0x80; };
  const uint8_t a = byte(0), b = byte(1);
  if (a < 0x80) return 1;
  if (a >= 0xC2 && a <= 0xDF) return tail(1) ? 2 : 0;
  if (a >= 0xE0 && a <= 0xEF) {
    if ((a == 0xE0 && b < 0xA0) || (a == 0xED && b > 0x9F)) return 0;
    return tail(1) && tail(2) ? 3 : 0;
  }
  if (a >= 0xF0 && a <= 0xF4) {
    if ((a == 0xF0 && b < 0x90) || (a == 0xF4 && b > 0x8F)) return 0;
    return tail(1) && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

// Integers stay as written; python reads "-0" as 0. A float beyond double's range keeps its own spelling,
// because python's "Infinity" is not JSON.
std::string python_number(std::string lexeme) {
  if (lexeme.find_first_of(".eE") == std::string::npos) return lexeme == "-0" ? "0" : lexeme;
  double value = 0;
  if (std::from_chars(lexeme.data(), lexeme.data() + lexeme.size(), value).ec != std::errc()) {
    value = std::strtod(lexeme.c_str(), nullptr);  // tells overflow from underflow, which from_chars does not
    if (std::isinf(value)) return lexeme;
  }
  return python_float(value);
}

}  // namespace

class PyJsonReader {
 public:
  PyJsonReader(std::string_view text, std::string_view where, int max_depth)
      : text_(text), where_(where), max_depth_(max_depth) {}

  PyJson document() {
    PyJson value = read(0);
    skip_space();
    if (pos_ != text_.size()) error("the end");
    return value;
  }

 private:
  [[noreturn]] void error(const char* expected) const {
    fail("{}: not valid JSON: expected {} at byte {} of {}", where_, expected, pos_, text_.size());
  }

  char peek() const { return pos_ < text_.size() ? text_[pos_] : '\0'; }

  void skip_space() { pos_ = std::min(text_.find_first_not_of(" \t\r\n", pos_), text_.size()); }

  bool take(char c) {
    skip_space();
    if (peek() != c || pos_ == text_.size()) return false;
    ++pos_;
    return true;
  }

  PyJson read(int depth) {
    skip_space();
    switch (peek()) {
      case '{':
        return nested(depth), object(depth);
      case '[':
        return nested(depth), array(depth);
      case '"':
        return PyJson::string(string());
      case 't':
        return word("true"), PyJson::boolean(true);
      case 'f':
        return word("false"), PyJson::boolean(false);
      case 'n':
        return word("null"), PyJson();
      default:
        return number();
    }
  }

  void nested(int depth) const {
    if (depth >= max_depth_)
      throw NestingError(
          fmt::format("{}: nested more than {} levels deep at byte {}", where_, max_depth_, pos_));
  }

  void word(std::string_view expected) {
    if (text_.substr(pos_, expected.size()) != expected) error("a value");
    pos_ += expected.size();
  }

  PyJson array(int depth) {
    PyJson value = PyJson::array();
    ++pos_;
    if (take(']')) return value;
    do value.items_.push_back(read(depth + 1));
    while (take(','));
    if (!take(']')) error("',' or ']'");
    return value;
  }

  PyJson object(int depth) {
    PyJson value = PyJson::object();
    std::unordered_map<std::string, size_t> places;  // a search per key would make wide objects quadratic
    ++pos_;
    if (take('}')) return value;
    do {
      skip_space();
      if (peek() != '"') error("a key in double quotes");
      std::string key = string();
      if (!take(':')) error("':'");
      const auto [place, added] = places.emplace(key, value.members_.size());
      if (added)
        value.members_.emplace_back(std::move(key), read(depth + 1));
      else
        value.members_[place->second].second = read(depth + 1);
    } while (take(','));
    if (!take('}')) error("',' or '}'");
    return value;
  }

  uint32_t hex4() {
    uint32_t code = 0;
    const char* begin = text_.data() + pos_;
    if (text_.size() - pos_ < 4 || std::from_chars(begin, begin + 4, code, 16).ptr != begin + 4)
      error("four hexadecimal digits");
    pos_ += 4;
    return code;
  }

  void escape(std::string& out) {
    static constexpr std::string_view kNames = "\"\\/bfnrt", kValues = "\"\\/\b\f\n\r\t";
    const char c = peek();
    if (const size_t i = kNames.find(c); i != std::string_view::npos && pos_ < text_.size()) {
      ++pos_;
      out += kValues[i];
      return;
    }
    if (c != 'u') error("an escape character");
    ++pos_;
    uint32_t code = hex4();
    if (code >= 0xD800 && code < 0xDC00 && text_.substr(pos_, 2) == "\\u") {
      const size_t second = pos_;
      pos_ += 2;
      const uint32_t low = hex4();
      if (low >= 0xDC00 && low < 0xE000)
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      else
        pos_ = second;
    }
    append_utf8(out, code >= 0xD800 && code < 0xE000 ? 0xFFFD : code);
  }

  std::string string() {
    std::string out;
    ++pos_;
    for (;;) {
      if (pos_ == text_.size()) error("'\"'");
      const char c = text_[pos_];
      if (c == '"') return ++pos_, out;
      if (c == '\\') {
        ++pos_;
        escape(out);
        continue;
      }
      if (uint8_t(c) < 0x20) error("a control character to be escaped");
      const size_t length = utf8_length(text_.substr(pos_));
      if (length == 0) error("valid UTF-8");
      out.append(text_, pos_, length);
      pos_ += length;
    }
  }

  void digits() {
    if (!is_digit(peek())) error(pos_ < text_.size() ? "a value" : "more text");
    while (is_digit(peek())) ++pos_;
  }

  PyJson number() {
    const size_t begin = pos_;
    if (peek() == '-') ++pos_;
    if (peek() == '0')
      ++pos_;
    else
      digits();
    if (peek() == '.') ++pos_, digits();
    if (peek() == 'e' || peek() == 'E') {
      ++pos_;
      if (peek() == '+' || peek() == '-') ++pos_;
      digits();
    }
    PyJson value;
    value.kind_ = PyJson::Kind::number;
    value.text_ = python_number(std::string(text_.substr(begin, pos_ - begin)));
    return value;
  }

  std::string_view text_;
  std::string_view where_;
  int max_depth_;
  size_t pos_ = 0;
};

PyJson PyJson::boolean(bool value) {
  PyJson json;
  json.kind_ = Kind::boolean;
  json.flag_ = value;
  return json;
}

PyJson PyJson::string(std::string value) {
  PyJson json;
  json.kind_ = Kind::string;
  json.text_ = std::move(value);
  return json;
}

PyJson PyJson::array() {
  PyJson json;
  json.kind_ = Kind::array;
  return json;
}

PyJson PyJson::object() {
  PyJson json;
  json.kind_ = Kind::object;
  return json;
}

PyJson PyJson::parse(std::string_view text, std::string_view where, int max_depth) {
  return PyJsonReader(text, where, max_depth).document();
}

std::optional<PyJson> PyJson::try_parse(std::string_view text) {
  try {
    return parse(text, "model output");
  } catch (const Error&) {
    return std::nullopt;
  }
}

const char* PyJson::kind_name() const {
  static constexpr std::array kNames = {"null", "boolean", "number", "string", "array", "object"};
  return kNames[size_t(kind_)];
}

bool PyJson::as_bool() const {
  WEFT_CHECK(kind_ == Kind::boolean, "a {} read as a boolean", kind_name());
  return flag_;
}

const std::string& PyJson::text() const {
  WEFT_CHECK(kind_ == Kind::string || kind_ == Kind::number, "a {} read as text", kind_name());
  return text_;
}

const std::vector<PyJson>& PyJson::items() const {
  WEFT_CHECK(kind_ == Kind::array, "a {} read as an array", kind_name());
  return items_;
}

const std::vector<PyJson::Member>& PyJson::members() const {
  WEFT_CHECK(kind_ == Kind::object, "a {} read as an object", kind_name());
  return members_;
}

const PyJson* PyJson::find(std::string_view key) const {
  for (const auto& [name, value] : members_)
    if (name == key) return value.is_null() ? nullptr : &value;
  return nullptr;
}

void PyJson::push(PyJson value) {
  WEFT_CHECK(kind_ == Kind::array);
  items_.push_back(std::move(value));
}

void PyJson::set(std::string key, PyJson value) {
  WEFT_CHECK(kind_ == Kind::object);
  for (auto& [name, old] : members_)
    if (name == key) {
      old = std::move(value);
      return;
    }
  members_.emplace_back(std::move(key), std::move(value));
}

std::string PyJson::dump(Style style) const {
  std::string out;
  dump_to(out, style);
  return out;
}

void PyJson::dump_to(std::string& out, Style style) const {
  const char* comma = style == Style::sorted ? "," : ", ";
  switch (kind_) {
    case Kind::null:
      out += "null";
      break;
    case Kind::boolean:
      out += flag_ ? "true" : "false";
      break;
    case Kind::number:
      out += text_;
      break;
    case Kind::string:
      out += json_quote(text_);
      break;
    case Kind::array:
      out += '[';
      for (size_t i = 0; i < items_.size(); ++i) {
        if (i) out += comma;
        items_[i].dump_to(out, style);
      }
      out += ']';
      break;
    case Kind::object: {
      std::vector<const Member*> order;
      for (const Member& member : members_) order.push_back(&member);
      // Byte order of UTF-8 is code point order.
      if (style == Style::sorted)
        std::sort(order.begin(), order.end(), [](auto* a, auto* b) { return a->first < b->first; });
      out += '{';
      for (size_t i = 0; i < order.size(); ++i) {
        if (i) out += comma;
        out += json_quote(order[i]->first);
        out += style == Style::sorted ? ":" : ": ";
        order[i]->second.dump_to(out, style);
      }
      out += '}';
    }
  }
}

void json_escape_to(std::string& out, std::string_view text) {
  static constexpr std::string_view kValues = "\"\\\b\f\n\r\t", kNames = "\"\\bfnrt";
  for (const char c : text) {
    if (const size_t i = kValues.find(c); i != std::string_view::npos) {
      out += '\\';
      out += kNames[i];
    } else if (uint8_t(c) < 0x20) {
      out += fmt::format("\\u{:04x}", int(c));
    } else {
      out += c;
    }
  }
}

std::string json_quote(std::string_view text) {
  std::string out = "\"";
  json_escape_to(out, text);
  return out += '"';
}

std::string python_float(double value) {
  WEFT_CHECK(std::isfinite(value));
  // Shortest digits that read back the same, as d.ddde+XX; python writes them plainly for exponents -4 .. 15.
  std::array<char, 40> buffer;
  const auto end =
      std::to_chars(buffer.data(), buffer.data() + buffer.size(), value, std::chars_format::scientific).ptr;
  const std::string_view shortest(buffer.data(), size_t(end - buffer.data()));
  const size_t e = shortest.find('e');
  const int exponent = std::atoi(std::string(shortest.substr(e + 1)).c_str());
  if (exponent < -4 || exponent >= 16) return std::string(shortest);
  std::string digits;
  for (const char c : shortest.substr(0, e))
    if (is_digit(c)) digits += c;
  std::string out(1, '0');
  if (exponent < 0) {
    out += '.';
    out.append(size_t(-exponent) - 1, '0');
    out += digits;
  } else {
    if (digits.size() < size_t(exponent) + 2) digits.append(size_t(exponent) + 2 - digits.size(), '0');
    out = digits.substr(0, size_t(exponent) + 1);
    out += '.';
    out += digits.substr(size_t(exponent) + 1);
  }
  return std::signbit(value) ? '-' + out : out;
}

std::string_view python_strip(std::string_view text) {
  static constexpr std::string_view kSpaces[] = {
      " ",      "\t",     "\n",     "\v",     "\f",     "\r",     "\x1c",   "\x1d",   "\x1e",   "\x1f",
      "\u0085", "\u00a0", "\u1680", "\u2000", "\u2001", "\u2002", "\u2003", "\u2004", "\u2005", "\u2006",
      "\u2007", "\u2008", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000"};
  auto cut = [&](bool front) {
    for (const std::string_view space : kSpaces) {
      if (front ? !text.starts_with(space) : !text.ends_with(space)) continue;
      front ? text.remove_prefix(space.size()) : text.remove_suffix(space.size());
      return true;
    }
    return false;
  };
  while (cut(true)) {
  }
  while (cut(false)) {
  }
  return text;
}

}  // namespace weft
