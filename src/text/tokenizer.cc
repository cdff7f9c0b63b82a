#include "text/tokenizer.h"

#include <algorithm>
#include <filesystem>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "text/tokenizer_parts.h"
#include "text/unicode.h"

namespace weft {

TokenizerParts assemble(TokenizerParts parts) {
  size_t size = parts.bpe.tokens().size();
  for (const AddedToken& token : parts.added.tokens())
    size = std::max(size, static_cast<size_t>(token.id) + 1);
  parts.special.assign(size, false);
  for (const AddedToken& token : parts.added.tokens())
    parts.special[static_cast<size_t>(token.id)] = token.special;
  return parts;
}

namespace {

std::string read_text_file(const std::string& path) {
  std::string text = read_file(path);
  if (const std::string wrong = wrong_content(text); !wrong.empty()) fail("{} {}", printable(path), wrong);
  return text;
}

}  // namespace

std::unique_ptr<Tokenizer> Tokenizer::load(const std::string& dir, bool jit) {
  const auto path = [&](const char* name) { return (std::filesystem::path(dir) / name).string(); };
  const auto present = [&](const char* name) {
    std::error_code ignored;
    return std::filesystem::exists(path(name), ignored);
  };
  if (present("tokenizer.json")) {
    const std::string where = path("tokenizer.json");
    return std::make_unique<Tokenizer>(
        parse_bpe_json(read_text_file(where), where, present("merges.txt"), jit));
  }
  if (present("tiktoken.model")) {
    if (!present("tokenizer_config.json")) {
      fail("{}: tiktoken.model lies there without tokenizer_config.json, which names the special tokens",
           dir);
    }
    const std::string ranks = path("tiktoken.model"), config = path("tokenizer_config.json");
    return std::make_unique<Tokenizer>(
        parse_tiktoken(read_text_file(ranks), ranks, read_text_file(config), config, jit));
  }
  fail("{}: no tokenizer there: looked for tokenizer.json, and for tiktoken.model with tokenizer_config.json",
       dir);
}

Tokenizer::Tokenizer(TokenizerParts parts)
    : parts_(std::make_unique<const TokenizerParts>(std::move(parts))) {}
Tokenizer::~Tokenizer() = default;

std::vector<int> Tokenizer::encode(std::string_view text, Specials specials) const {
  std::string repaired;
  if (!is_well_formed(text)) text = repaired = replace_ill_formed(text);
  std::vector<int> ids;
  if (!parts_->moonshot_cut) {
    encode_cut(text, specials, ids);
  } else {
    for (const std::string_view chunk : moonshot_cut(text)) encode_cut(chunk, specials, ids);
  }
  return ids;
}

void Tokenizer::encode_cut(std::string_view text, Specials specials, std::vector<int>& ids) const {
  if (specials == Specials::none) return encode_plain(text, ids);
  for (const AddedTokens::Piece& piece : parts_->added.cut(text, specials == Specials::all)) {
    if (piece.token != nullptr) {
      ids.push_back(piece.token->id);
    } else {
      encode_plain(piece.text, ids);
    }
  }
}

void Tokenizer::encode_plain(std::string_view text, std::vector<int>& ids) const {
  std::vector<size_t> lengths;
  split_plain(text, lengths);
  for (const size_t length : lengths) {
    parts_->bpe.encode(text.substr(0, length), ids);
    text.remove_prefix(length);
  }
}

void Tokenizer::split_plain(std::string_view text, std::vector<size_t>& lengths) const {
  if (text.empty()) return;
  std::string storage;
  const std::string_view shape = with_stand_ins(text, storage);
  std::vector<size_t> pieces = {shape.size()}, finer;
  for (const Regex& regex : parts_->splits) {
    finer.clear();
    // The end of a piece is the end of the text for the next expression: a look-ahead sees nothing behind it.
    for (size_t at = 0; const size_t length : pieces) {
      regex.split(shape.substr(at, length), finer);
      at += length;
    }
    std::swap(pieces, finer);
  }
  lengths.insert(lengths.end(), pieces.begin(), pieces.end());
}

std::vector<size_t> Tokenizer::split(std::string_view text) const {
  std::string repaired;
  if (!is_well_formed(text)) text = repaired = replace_ill_formed(text);
  std::vector<size_t> lengths;
  if (!parts_->moonshot_cut) {
    split_plain(text, lengths);
  } else {
    for (const std::string_view chunk : moonshot_cut(text)) split_plain(chunk, lengths);
  }
  return lengths;
}

std::string_view Tokenizer::token_bytes(int id) const {
  const auto& other = parts_->other_texts;
  if (const auto found = other.find(id); found != other.end()) return found->second;
  const std::vector<std::string>& tokens = parts_->bpe.tokens();
  if (id < 0 || static_cast<size_t>(id) >= tokens.size() || tokens[static_cast<size_t>(id)].empty()) {
    fail("token id {} does not exist: the tokenizer's ids lie in 0..{}", id, vocab_size() - 1);
  }
  return tokens[static_cast<size_t>(id)];
}

std::string Tokenizer::decode(std::span<const int> ids, bool skip_special) const {
  std::string bytes;
  for (const int id : ids) {
    const std::string_view token = token_bytes(id);
    if (!skip_special || !is_special(id)) bytes += token;
  }
  return is_well_formed(bytes) ? bytes : replace_ill_formed(bytes);
}

int Tokenizer::vocab_size() const {
  return static_cast<int>(parts_->special.size());
}

std::optional<int> Tokenizer::token_id(std::string_view text) const {
  for (const AddedToken& token : parts_->added.tokens()) {
    if (token.text == text) return token.id;
  }
  return parts_->bpe.find(text);
}

bool Tokenizer::is_special(int id) const {
  return id >= 0 && id < vocab_size() && parts_->special[static_cast<size_t>(id)];
}

}  // namespace weft
