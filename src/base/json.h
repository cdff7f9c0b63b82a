// Strict reading of JSON that comes from files and clients.
//
// nlohmann's get<int>() turns 3.5 into 3, true into 1 and -1 into a huge unsigned. Here a value is taken only if it
// is what the field says, and an error names file, field, what was found and what was expected.
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

// Parses `text`; `where` (a file name, "request body") starts every error. Refuses nesting deeper than `max_depth`
// before the recursive parser sees it, duplicate keys, and anything after the value.
Json parse_json(std::string_view text, const std::string& where, int max_depth = 100);

// Reads a whole file; error: names the file and the system's reason, and says so for a git-LFS pointer or HTML page.
std::string read_file(const std::string& path);
Json parse_json_file(const std::string& path);

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
  std::vector<int64_t> integers(const char* key, int64_t low, int64_t high) const;  // an array, or one integer
  std::vector<std::string> strings(const char* key) const;                          // an array of strings
  Fields object(const char* key) const;
  std::optional<Fields> optional_object(const char* key) const;

  const Json& json() const { return *object_; }
  const std::string& where() const { return where_; }
  std::string path(const char* key) const;  // "config.json: text_config.hidden_size"

 private:
  const Json* find(const char* key) const;  // null when absent or null
  const Json* object_;
  std::string where_;
};

}  // namespace weft
