// A split expression, run by PCRE2.
//
// Tokenizer files write their expressions for Oniguruma, fancy-regex or Rust. Where PCRE2 reads the same text
// otherwise the constructor rewrites it (a script name means Script, not Script_Extensions) or refuses it
// (`&&` and nested sets, which PCRE2 takes for literals).
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

struct pcre2_real_code_8;

namespace weft {

class Regex {
 public:
  struct Match {
    size_t begin, end;  // bytes; may be empty
  };

  // `where` names the expression in errors. Without `jit`, or where the system forbids it, the interpreter
  // runs.
  Regex(std::string_view pattern, const std::string& where, bool jit = true);

  // First match at or after byte `from` of `subject`, which must be well-formed UTF-8 and `from` a boundary.
  // Thread-safe; uses no machine stack to speak of. Error: a resource limit was hit (backtracking beyond some
  // small multiple of the length): a partial answer would be another tokenization.
  std::optional<Match> find(std::string_view subject, size_t from) const;

  // Appends the lengths in bytes of the pieces of `subject`: every match, and whatever lies between two
  // matches.
  void split(std::string_view subject, std::vector<size_t>& lengths) const;

 private:
  std::string where_;
  std::shared_ptr<const pcre2_real_code_8> code_;
};

}  // namespace weft
