#include "text/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <cstdint>

#include "base/check.h"
#include "base/json.h"
#include "text/unicode.h"

namespace weft {
namespace {

constexpr size_t kJitStackFirst = 32 * 1024;
// Sets and categories repeat without using this stack; only groups push, so this is far beyond any known
// expression.
constexpr size_t kJitStackMost = 8 * 1024 * 1024;
constexpr uint32_t kHeapKib = 1024 * 1024;  // of the interpreter, whose own default is 20 GB

std::string message_of(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

pcre2_code* compile(std::string_view pattern, int& error, size_t& offset) {
  return pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), PCRE2_UTF | PCRE2_UCP,
                       &error, &offset, nullptr);
}

bool is_script(std::string_view name) {
  int error;
  size_t offset;
  pcre2_code* code = compile(fmt::format("\\p{{sc:{}}}", name), error, offset);
  pcre2_code_free(code);
  return code != nullptr;
}

// `\p{Han}` to `\p{sc:Han}`: since 10.40 the short form means Script_Extensions, which takes in 。、「」.
std::string translate(std::string_view pattern, const std::string& where) {
  std::string out;
  bool in_set = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    out += c;
    if (c == '\\' && i + 1 < pattern.size()) {
      out += pattern[++i];
      if ((pattern[i] != 'p' && pattern[i] != 'P') || pattern.substr(i + 1, 1) != "{") continue;
      const size_t close = pattern.find('}', i);
      if (close == pattern.npos) continue;
      std::string_view name = pattern.substr(i + 2, close - i - 2);
      const bool negated = name.starts_with('^');
      if (negated) name.remove_prefix(1);
      out += negated ? "{^" : "{";
      const bool plain =
          std::all_of(name.begin(), name.end(), [](char l) { return (l | 32) >= 'a' && (l | 32) <= 'z'; });
      if (plain && name.size() > 2 && is_script(name)) out += "sc:";
      out += name;
      out += '}';
      i = close;
    } else if (in_set) {
      if (c == '[') fail("{}: a set inside a set is not supported", where);
      if (c == '&' && pattern.substr(i + 1, 1) == "&")
        fail("{}: set intersection (&&) is not supported", where);
      if (c == ']') in_set = false;
    } else if (c == '[') {
      in_set = true;
      // A bracket right after the opening one is a member.
      if (pattern.substr(i + 1, 1) == "^") out += pattern[++i];
      if (pattern.substr(i + 1, 1) == "]") out += pattern[++i];
    }
  }
  return out;
}

// PCRE2's working memory. One per thread: sharing needs a lock, and making one per match costs more than the
// match.
struct Workspace {
  pcre2_match_context* context = pcre2_match_context_create(nullptr);
  pcre2_match_data* data = pcre2_match_data_create(1, nullptr);
  pcre2_jit_stack* stack = pcre2_jit_stack_create(kJitStackFirst, kJitStackMost, nullptr);

  Workspace() {
    if (context == nullptr || data == nullptr) fail("out of memory for the tokenizer's regular expressions");
    pcre2_set_heap_limit(context, kHeapKib);
    // A null stack (no JIT in this build of PCRE2) only means that compiled code never asks for it.
    if (stack != nullptr) pcre2_jit_stack_assign(context, nullptr, stack);
  }
  ~Workspace() {
    pcre2_jit_stack_free(stack);
    pcre2_match_data_free(data);
    pcre2_match_context_free(context);
  }
};

}  // namespace

Regex::Regex(std::string_view pattern, const std::string& where, bool jit) : where_(where) {
  const std::string translated = translate(pattern, where);
  int error = 0;
  size_t offset = 0;
  pcre2_code* code = compile(translated, error, offset);
  if (code == nullptr) {
    fail("{}: not a regular expression: {} at byte {} of {}", where, message_of(error), offset,
         printable(translated, 200));
  }
  code_ = std::shared_ptr<const pcre2_real_code_8>(
      code, [](const pcre2_real_code_8* owned) { pcre2_code_free(const_cast<pcre2_real_code_8*>(owned)); });
  // The result is ignored on purpose: without JIT (hardened kernels forbid it) the interpreter gives the same
  // pieces.
  if (jit) pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
}

std::optional<Regex::Match> Regex::find(std::string_view subject, size_t from) const {
  thread_local Workspace workspace;
  // The default limit of 10 million is below what one long run of spaces needs under `\s*[\r\n]+`.
  const auto limit = static_cast<uint32_t>(std::min<size_t>(10'000'000 + 16 * subject.size(), UINT32_MAX));
  pcre2_set_match_limit(workspace.context, limit);
  pcre2_set_depth_limit(workspace.context, limit);
  // The check of the whole subject at every call would make the loop of split() quadratic.
  const int found = pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(subject.data()), subject.size(),
                                from, PCRE2_NO_UTF_CHECK, workspace.data, workspace.context);
  if (found == PCRE2_ERROR_NOMATCH) return std::nullopt;
  if (found < 0) fail("{}: cannot split a text of {} bytes: {}", where_, subject.size(), message_of(found));
  const size_t* bounds = pcre2_get_ovector_pointer(workspace.data);
  // `\K` inside a lookahead may set the begin behind the end; before `from` it would undo the last piece.
  if (bounds[0] < from || bounds[1] < bounds[0]) fail("{}: the expression matches backwards", where_);
  return Match{bounds[0], bounds[1]};
}

void Regex::split(std::string_view subject, std::vector<size_t>& lengths) const {
  size_t done = 0, from = 0;
  while (from <= subject.size()) {
    const std::optional<Match> match = find(subject, from);
    if (!match) break;
    if (match->begin > done) lengths.push_back(match->begin - done);
    if (match->end > match->begin) lengths.push_back(match->end - match->begin);
    done = from = match->end;
    if (match->end == match->begin) from += from < subject.size() ? code_point_length(subject[from]) : 1;
  }
  if (subject.size() > done) lengths.push_back(subject.size() - done);
}

}  // namespace weft
