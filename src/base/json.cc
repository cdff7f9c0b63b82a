#include "base/json.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace weft {
namespace {

// Length of the well-formed UTF-8 sequence that starts at text[at], 0 if there is none. Overlong forms,
// surrogates and values above U+10FFFF are not well formed.
size_t utf8_length(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return at + i < text.size() ? static_cast<unsigned char>(text[at + i]) : 0u; };
  auto tail = [&](size_t i, unsigned low = 0x80, unsigned high = 0xbf) {
    return byte(i) >= low && byte(i) <= high;
  };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  if (first >= 0xc2 && first <= 0xdf) return tail(1) ? 2 : 0;
  if (first >= 0xe0 && first <= 0xef) {
    const unsigned low = first == 0xe0 ? 0xa0 : 0x80, high = first == 0xed ? 0x9f : 0xbf;
    return tail(1, low, high) && tail(2) ? 3 : 0;
  }
  if (first >= 0xf0 && first <= 0xf4) {
    const unsigned low = first == 0xf0 ? 0x90 : 0x80, high = first == 0xf4 ? 0x8f : 0xbf;
    return tail(1, low, high) && tail(2) && tail(3) ? 4 : 0;
  }
  return 0;
}

// What a message says it found: enough to recognise the value, never the whole of it.
std::string describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::string:
      return fmt::format("the string \"{}\"", printable(value.get_ref<const std::string&>(), 40));
    case Json::value_t::array:
      return fmt::format("an array of {}", value.size());
    case Json::value_t::object:
      return "an object";
    default:
      return value.dump();  // a number, true, false, null
  }
}

[[noreturn]] void refuse(const std::string& path, const Json* found, const std::string& expected) {
  if (found == nullptr) fail("{} is missing, expected {}", path, expected);
  fail("{} is {}, expected {}", path, describe(*found), expected);
}

// Builds the document as nlohmann's own handler does, but owns the rules it lacks: a repeated key keeps the
// last value there silently, and depth is unlimited. The library's parser itself keeps its stack on the heap,
// so a refusal at the bracket that is one too deep comes before anything recursive (copy, dump, compare) sees
// the tree.
class DocumentBuilder {
 public:
  DocumentBuilder(std::string_view text, const std::string& where, int max_depth)
      : text_(text), where_(where), max_depth_(max_depth) {}

  Json take() { return std::move(root_); }

  bool null() { return put(nullptr); }
  bool boolean(bool value) { return put(value); }
  bool number_integer(int64_t value) { return put(value); }
  bool number_unsigned(uint64_t value) { return put(value); }
  bool number_float(double value, const std::string&) { return put(value); }
  bool string(std::string& value) { return put(std::move(value)); }
  bool binary(Json::binary_t&) { return false; }  // not a JSON text's
  bool start_object(size_t) { return open(Json::object()); }
  bool start_array(size_t) { return open(Json::array()); }
  bool end_object() { return close(); }
  bool end_array() { return close(); }

  bool key(std::string& name) {
    auto [entry, fresh] = open_.back()->get_ref<Json::object_t&>().try_emplace(name);
    if (!fresh) fail("{}: the key \"{}\" appears twice in one object", printable(where_), printable(name));
    slot_ = &entry->second;
    return true;
  }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
    // The library quotes the last token whole, which may be megabytes and need not be UTF-8: keep its reason
    // only.
    std::string_view reason = error.what();
    if (const size_t at = reason.find("syntax error "); at != reason.npos) reason.remove_prefix(at + 13);
    reason = reason.substr(0, reason.find("; last read"));
    if (const size_t at = reason.rfind("] "); at != reason.npos) reason.remove_prefix(at + 2);
    const std::string_view before = text_.substr(0, position == 0 ? 0 : std::min(position, text_.size()) - 1);
    const auto line = std::count(before.begin(), before.end(), '\n') + 1;
    const size_t column = before.size() - (before.rfind('\n') + 1) + 1;  // npos + 1 == 0: the first line
    fail("{}: not valid JSON at line {}, column {}: {}", printable(where_), line, column,
         printable(reason, 120));
  }

 private:
  Json* place(Json value) {
    if (open_.empty()) return &(root_ = std::move(value));
    if (open_.back()->is_object()) return &(*slot_ = std::move(value));
    return &open_.back()->get_ref<Json::array_t&>().emplace_back(std::move(value));
  }
  bool put(Json value) { return place(std::move(value)) != nullptr; }
  bool open(Json empty) {
    if (static_cast<int>(open_.size()) >= max_depth_) {
      fail("{}: JSON nested deeper than {} levels", printable(where_), max_depth_);
    }
    // Only the last element of an open array is ever open, so growth never moves something pointed to.
    open_.push_back(place(std::move(empty)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  std::string_view text_;
  const std::string& where_;
  int max_depth_;
  Json root_;
  std::vector<Json*> open_;
  Json* slot_ = nullptr;
};

int64_t as_integer(const std::string& path, const Json* value, int64_t low, int64_t high) {
  auto within = [&](int64_t number) { return number >= low && number <= high; };
  if (value != nullptr && value->is_number_unsigned()) {
    const uint64_t number = value->get<uint64_t>();
    if (number <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max()) &&
        within(static_cast<int64_t>(number)))
      return static_cast<int64_t>(number);
  } else if (value != nullptr && value->is_number_integer()) {
    if (within(value->get<int64_t>())) return value->get<int64_t>();
  } else if (value != nullptr && value->is_number_float()) {
    const double number = value->get<double>();
    const double limit = 9223372036854775808.0;  // 2^63, the first double that does not fit
    if (number == std::floor(number) && number >= -limit && number < limit &&
        within(static_cast<int64_t>(number)))
      return static_cast<int64_t>(number);
  }
  refuse(path, value, fmt::format("an integer from {} to {}", low, high));
}

double as_number(const std::string& path, const Json* value, double low, double high) {
  if (value != nullptr && value->is_number()) {
    const double number = value->get<double>();
    if (number >= low && number <= high) return number;
  }
  refuse(path, value, fmt::format("a number from {} to {}", low, high));
}

bool as_boolean(const std::string& path, const Json* value) {
  if (value == nullptr || !value->is_boolean()) refuse(path, value, "true or false");
  return value->get<bool>();
}

std::string as_string(const std::string& path, const Json* value) {
  if (value == nullptr || !value->is_string()) refuse(path, value, "a string");
  return value->get<std::string>();
}

}  // namespace

std::string printable(std::string_view text, size_t max_bytes) {
  std::string out;
  for (size_t at = 0; at < text.size();) {
    if (out.size() >= max_bytes) return out + "...";
    const size_t length = utf8_length(text, at);
    const unsigned char first = static_cast<unsigned char>(text[at]);
    if (length == 0 || first < 0x20 || first == 0x7f) {
      out += fmt::format("\\x{:02x}", first);
      ++at;
    } else {
      out.append(text, at, length);
      at += length;
    }
  }
  return out;
}

std::string wrong_content(std::string_view head) {
  const std::string_view start = head.substr(0, 512);
  if (start.starts_with("version https://git-lfs.github.com/spec/"))
    return "is a git-LFS pointer, not the file it stands for: run `git lfs pull` or download the file again";
  const size_t first = start.find_first_not_of(" \t\r\n");
  std::string text(start.substr(first == start.npos ? start.size() : first, 16));
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c;
  if (text.starts_with("<!doctype html") || text.starts_with("<html"))
    return "is an HTML page (often a login or error page saved by the download): download the file again";
  return "";
}

Json parse_json(std::string_view text, const std::string& where, int max_depth) {
  DocumentBuilder builder(text, where, max_depth);
  Json::sax_parse(text.data(), text.data() + text.size(), &builder);
  return builder.take();
}

std::string read_file(const std::string& path) {
  // A descriptor, not an ifstream: a stream opens directories happily and hides the reason of a failure.
  const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) fail("{}: cannot open: {}", printable(path), std::strerror(errno));
  struct stat info = {};
  std::string text;
  if (::fstat(fd, &info) == 0 && S_ISREG(info.st_mode)) text.reserve(static_cast<size_t>(info.st_size) + 1);
  size_t filled = 0;
  while (true) {
    text.resize(std::max(text.capacity(), filled + 4096));
    const ssize_t got = ::read(fd, text.data() + filled, text.size() - filled);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      const int reason = errno;
      ::close(fd);
      fail("{}: cannot read: {}", printable(path), std::strerror(reason));
    }
    if (got == 0) break;
    filled += static_cast<size_t>(got);
    if (filled == text.size()) text.reserve(2 * filled);
  }
  ::close(fd);
  text.resize(filled);
  if (text.starts_with("version https://git-lfs")) {
    if (const std::string wrong = wrong_content(text); !wrong.empty()) fail("{} {}", printable(path), wrong);
  }
  return text;
}

Json parse_json_file(const std::string& path) {
  const std::string text = read_file(path);
  if (text.find_first_not_of(" \t\r\n") == text.npos) fail("{} is empty, expected JSON", printable(path));
  if (const std::string wrong = wrong_content(text); !wrong.empty()) fail("{} {}", printable(path), wrong);
  return parse_json(text, path);
}

Fields::Fields(const Json& object, std::string where)
    : object_(&object), where_(printable(where, 300)), prefix_(where_ + ": ") {
  if (!object.is_object()) refuse(where_, &object, "a JSON object");
}

const Json* Fields::find(const char* key) const {
  const auto entry = object_->find(key);
  return entry == object_->end() ? nullptr : &*entry;
}

std::string Fields::path(const char* key) const {
  return prefix_ + key;
}

bool Fields::has(const char* key) const {
  const Json* value = find(key);
  return value != nullptr && !value->is_null();
}

int64_t Fields::integer(const char* key, int64_t low, int64_t high) const {
  return as_integer(path(key), find(key), low, high);
}
int64_t Fields::integer(const char* key, int64_t low, int64_t high, int64_t absent) const {
  return has(key) ? integer(key, low, high) : absent;
}

double Fields::number(const char* key, double low, double high) const {
  return as_number(path(key), find(key), low, high);
}
double Fields::number(const char* key, double low, double high, double absent) const {
  return has(key) ? number(key, low, high) : absent;
}

bool Fields::boolean(const char* key) const {
  return as_boolean(path(key), find(key));
}
bool Fields::boolean(const char* key, bool absent) const {
  return has(key) ? boolean(key) : absent;
}

std::string Fields::string(const char* key) const {
  return as_string(path(key), find(key));
}
std::string Fields::string(const char* key, const std::string& absent) const {
  return has(key) ? string(key) : absent;
}

std::vector<int64_t> Fields::integers(const char* key, int64_t low, int64_t high) const {
  const Json* value = find(key);
  if (value == nullptr || !value->is_array()) return {as_integer(path(key), value, low, high)};
  std::vector<int64_t> out;
  for (const Json& element : *value)
    out.push_back(as_integer(fmt::format("{}[{}]", path(key), out.size()), &element, low, high));
  return out;
}

std::vector<std::string> Fields::strings(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr || !value->is_array()) refuse(path(key), value, "an array of strings");
  std::vector<std::string> out;
  for (const Json& element : *value)
    out.push_back(as_string(fmt::format("{}[{}]", path(key), out.size()), &element));
  return out;
}

Fields Fields::object(const char* key) const {
  const Json* value = find(key);
  if (value == nullptr || !value->is_object()) refuse(path(key), value, "an object");
  Fields inner(*value, path(key));
  inner.prefix_ = path(key) + ".";
  return inner;
}

std::optional<Fields> Fields::optional_object(const char* key) const {
  if (!has(key)) return std::nullopt;
  return object(key);
}

}  // namespace weft
