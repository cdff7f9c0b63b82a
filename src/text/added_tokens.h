// The tokens that are found in the text before anything is split: control marks and other whole words.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft {

struct AddedToken {
  std::string text;
  int id = -1;
  bool single_word = false;  // not beside a letter, mark, digit or connector
  bool lstrip = false;       // takes the white space before it along, rstrip the one behind
  bool rstrip = false;
  bool normalized = false;  // looked for in a second pass, in what the first one left
  bool special = false;     // a control mark: hidden by decode(skip_special)
};

// Finds the longest of a set of texts at a position.
class TextSet {
 public:
  static constexpr size_t kNone = SIZE_MAX;

  // Texts are not empty and differ; `values` are what find() returns for them.
  void build(std::vector<std::pair<std::string, size_t>> texts);
  // Value of the longest text that `subject` has at `at`, or kNone.
  size_t longest_at(std::string_view subject, size_t at) const;

 private:
  std::vector<std::pair<std::string, size_t>> texts_;  // sorted by text
  std::vector<size_t> first_ =
      std::vector<size_t>(257, 0);  // texts_ that begin with byte b: [first_[b], first_[b+1])
};

class AddedTokens {
 public:
  struct Piece {
    std::string_view text;
    const AddedToken* token;  // null: ordinary text
  };

  AddedTokens() = default;
  explicit AddedTokens(std::vector<AddedToken> tokens);

  // Cuts well-formed `text` at the added tokens. Those flagged special stay part of the text unless
  // `special_too`.
  std::vector<Piece> cut(std::string_view text, bool special_too) const;

  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  void cut_pass(const TextSet& set, std::string_view text, bool special_too, std::vector<Piece>& out) const;

  std::vector<AddedToken> tokens_;
  TextSet raw_, normalized_;  // values index tokens_
};

}  // namespace weft
