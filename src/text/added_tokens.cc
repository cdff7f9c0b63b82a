#include "text/added_tokens.h"

#include <algorithm>

#include "text/regex.h"
#include "text/unicode.h"

namespace weft {
namespace {

// `\w` of the Rust regex crate, by which single_word is defined.
bool is_word_character(std::string_view text, size_t at) {
  static const Regex word("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]", "single_word", false);
  std::string storage;
  return word.find(with_stand_ins(text.substr(at, code_point_length(text[at])), storage), 0).has_value();
}

bool is_alone(std::string_view text, size_t begin, size_t end) {
  return (begin == 0 || !is_word_character(text, code_point_before(text, begin))) &&
         (end == text.size() || !is_word_character(text, end));
}

size_t spaces_before(std::string_view text, size_t at, size_t least) {
  while (at > least) {
    const size_t previous = code_point_before(text, at);
    if (!is_white_space(code_point_at(text, previous))) break;
    at = previous;
  }
  return std::max(at, least);
}

size_t spaces_behind(std::string_view text, size_t at) {
  while (at < text.size() && is_white_space(code_point_at(text, at))) at += code_point_length(text[at]);
  return at;
}

}  // namespace

void TextSet::build(std::vector<std::pair<std::string, size_t>> texts) {
  texts_ = std::move(texts);
  std::sort(texts_.begin(), texts_.end());  // std::string compares bytes as unsigned
  for (size_t byte = 0; byte <= 256; ++byte) {
    const auto begins_below = [&](const auto& entry) {
      return static_cast<unsigned char>(entry.first[0]) < byte;
    };
    first_[byte] = static_cast<size_t>(std::partition_point(texts_.begin(), texts_.end(), begins_below) -
                                       texts_.begin());
  }
}

size_t TextSet::longest_at(std::string_view subject, size_t at) const {
  // Narrows the sorted range byte by byte. A text that ends here sorts first among those that share its
  // bytes.
  const auto lead = static_cast<unsigned char>(subject[at]);
  auto low = texts_.begin() + static_cast<ptrdiff_t>(first_[lead]);
  auto high = texts_.begin() + static_cast<ptrdiff_t>(first_[lead + 1]);
  size_t found = kNone;
  for (size_t depth = 1; low != high; ++depth) {
    if (low->first.size() == depth) found = (low++)->second;
    if (at + depth == subject.size()) break;
    const auto byte = static_cast<unsigned char>(subject[at + depth]);
    const auto byte_of = [depth](const auto& entry) {
      return static_cast<unsigned char>(entry.first[depth]);
    };
    low = std::partition_point(low, high, [&](const auto& entry) { return byte_of(entry) < byte; });
    high = std::partition_point(low, high, [&](const auto& entry) { return byte_of(entry) == byte; });
  }
  return found;
}

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
  std::vector<std::pair<std::string, size_t>> raw, normalized;
  for (size_t i = 0; i < tokens_.size(); ++i) {
    (tokens_[i].normalized ? normalized : raw).emplace_back(tokens_[i].text, i);
  }
  raw_.build(std::move(raw));
  normalized_.build(std::move(normalized));
}

void AddedTokens::cut_pass(const TextSet& set, std::string_view text, bool special_too,
                           std::vector<Piece>& out) const {
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const size_t found = set.longest_at(text, at);
    if (found == TextSet::kNone) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[found];
    size_t begin = at, end = at + token.text.size();
    // A token that does not count still uses up its text: no other one is looked for inside it.
    at = end;
    if (token.special && !special_too) continue;
    if (token.single_word && !is_alone(text, begin, end)) continue;
    if (token.lstrip) begin = spaces_before(text, begin, std::min(done, begin));
    if (token.rstrip) end = spaces_behind(text, end);
    if (begin > done) out.push_back({text.substr(done, begin - done), nullptr});
    out.push_back({text.substr(begin, end - begin), &token});
    done = end;
  }
  if (done < text.size()) out.push_back({text.substr(done), nullptr});
}

std::vector<AddedTokens::Piece> AddedTokens::cut(std::string_view text, bool special_too) const {
  std::vector<Piece> first, out;
  cut_pass(raw_, text, special_too, first);
  for (const Piece& piece : first) {
    if (piece.token != nullptr) {
      out.push_back(piece);
    } else {
      cut_pass(normalized_, piece.text, special_too, out);
    }
  }
  return out;
}

}  // namespace weft
