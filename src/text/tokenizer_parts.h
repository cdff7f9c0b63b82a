// What the two file readers make and Tokenizer runs. Not for other layers.
#pragma once

#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "text/added_tokens.h"
#include "text/bpe.h"
#include "text/regex.h"

namespace weft {

struct TokenizerParts {
  Bpe bpe;
  AddedTokens added;
  std::vector<Regex> splits;  // each applied to every piece of the one before
  // Moonshot's class cuts long text before it looks for anything (`moonshot_cut`); other tokenizers do not.
  bool moonshot_cut;

  // id -> its text where that is not bpe.tokens()[id]: added tokens, and vocabulary entries no text can
  // become.
  std::unordered_map<int, std::string> other_texts;
  std::vector<bool> special;  // by id; as long as the vocabulary
};

// Fills `special` from the rest.
TokenizerParts assemble(TokenizerParts parts);

// `where` names the file in errors; `merges_beside`: whether a merges.txt lies in the same folder.
TokenizerParts parse_bpe_json(std::string_view text, const std::string& where, bool merges_beside, bool jit);
TokenizerParts parse_tiktoken(std::string_view ranks, const std::string& ranks_where, std::string_view config,
                              const std::string& config_where, bool jit);

// The chunks that Moonshot's tokenization_kimi.py encodes one by one: at most 400,000 characters, and inside
// them at most 25,000 in a row that are all white space (python isspace) or all not. Well-formed `text`;
// empty text has no chunk.
std::vector<std::string_view> moonshot_cut(std::string_view text);

}  // namespace weft
