// Strict reading of JSON that comes from files and clients.
//
// nlohmann's get<int>() turns 3.5 into 3, true into 1 and -1 into a huge unsigned. Here a value is taken only
// if it is what the field says, and an error names file, field, what was found and what was expected.
#pragma once

#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

using Json = nlohmann::json;

// Parses `text`; `where` (a file name, "request body") starts every error. Refuses nesting deeper than
// `max_depth` (an array or object is one level), duplicate keys, invalid UTF-8, and anything after the value.
Json parse_json(std::string_view text, const std::string& where, int max_depth = 100);

// Reads a whole file; error: names the file and the system's reason, and says so for a git-LFS pointer.
std::string read_file(const std::string& path);
Json parse_json_file(const std::string& path);  // error: also for an empty file and an HTML page

// `text` made fit for a one-line message: valid UTF-8, control characters as \xNN, cut after `max_bytes` with
// "...".
std::string printable(std::string_view text, size_t max_bytes = 200);

// What a download left in place of a data file that starts with `head`: "is a git-LFS pointer ...", "is an
// HTML page ..."; empty when it looks like neither. Needs at most the first 512 bytes.
std::string wrong_content(std::string_view head);

// A JSON object seen with its origin. Getters without a default fail when the key is absent or null.
// Whole floats (56.0, 3e0) count as integers; 56.5, "56" and true do not.
class Fields {
 public:
  Fields(const Json& object, std::string where);  // error: not an object

  bool has(const char* key) const;  // present and not null
  int64_t integer(const char* key, int64_t low, int64_t high) const;
  int64_t integer(const char* key, int64_t low, int64_t high, int64_t absent) const;
  double number(const char* key, double low, double high) const;
  double number(const char* key, double low, double high, double absent) const;
  bool boolean(const char* key) const;
  bool boolean(const char* key, bool absent) const;
  std::string string(const char* key) const;
  std::string string(const char* key, const std::string& absent) const;
  std::vector<int64_t> integers(const char* key, int64_t low,
                                int64_t high) const;        // an array, or one integer
  std::vector<std::string> strings(const char* key) const;  // an array of strings
  Fields object(const char* key) const;
  std::optional<Fields> optional_object(const char* key) const;

  const Json& json() const { return *object_; }
  const std::string& where() const { return where_; }
  std::string path(const char* key) const;  // "config.json: text_config.hidden_size"

 private:
  const Json* find(const char* key) const;  // null when absent or null
  const Json* object_;
  std::string where_;
  std::string prefix_;  // starts the path of a key: where_ + ": " at the top, where_ + "." below
};

}  // namespace weft
