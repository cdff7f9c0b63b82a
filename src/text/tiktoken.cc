// Reads Moonshot's tiktoken.model and the names in tokenizer_config.json.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "text/tokenizer_parts.h"
#include "text/unicode.h"

namespace weft {
namespace {

constexpr int kReserved = 256;
constexpr int kMaxRanks = 1 << 22;

// Moonshot's expression. Its letter sets are intersections, `[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]` and
// the same with Ll for Lu and Lt; written here as the complement of everything else, because PCRE2 has no
// `&&` and a set repeats without the stack that a look-ahead per character takes.
constexpr std::string_view kSplit =
    R"([\p{Han}]+)"
    R"(|[^\r\n\p{L}\p{N}]?[^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}]*[^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|[^\r\n\p{L}\p{N}]?[^\p{Ll}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}]+[^\p{Lu}\p{Lt}\p{N}\p{P}\p{S}\p{Z}\p{C}\p{Han}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)"
    R"(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr size_t kChunkCharacters = 400'000;
constexpr size_t kRunCharacters = 25'000;

// Value of a base64 digit; -1: not one.
int base64_digit(char c) {
  if (c >= 'A' && c <= 'Z') return c - 'A';
  if (c >= 'a' && c <= 'z') return c - 'a' + 26;
  if (c >= '0' && c <= '9') return c - '0' + 52;
  return c == '+' ? 62 : c == '/' ? 63 : -1;
}

// Empty when `text` is not padded base64 of at least one byte.
std::string base64_decode(std::string_view text) {
  if (text.empty() || text.size() % 4 != 0) return "";
  const size_t padding = text.ends_with("==") ? 2 : text.ends_with('=') ? 1 : 0;
  std::string out;
  uint32_t bits = 0;
  for (size_t i = 0; i < text.size() - padding; ++i) {
    const int digit = base64_digit(text[i]);
    if (digit < 0) return "";
    bits = bits << 6 | static_cast<uint32_t>(digit);
    // 6 (i + 1) bits are in: a byte is whole whenever that passes a multiple of 8.
    if (i % 4 != 0) out += static_cast<char>(bits >> (6 - 2 * (i % 4)));
  }
  return out;
}

// Lines "base64 rank" with ranks 0, 1, 2, ... in any order.
std::vector<std::string> read_ranks(std::string_view text, const std::string& where) {
  std::vector<std::string> tokens;
  size_t line_number = 0, count = 0;
  while (!text.empty()) {
    const size_t newline = text.find('\n');
    std::string_view line = text.substr(0, newline);
    text = newline == text.npos ? std::string_view() : text.substr(newline + 1);
    ++line_number;
    if (line.ends_with('\r')) line.remove_suffix(1);
    if (line.empty()) continue;
    const size_t space = std::min(line.find(' '), line.size());
    std::string bytes = base64_decode(line.substr(0, space));
    const std::string_view number = line.substr(std::min(space + 1, line.size()));
    int rank = -1;
    const auto parsed = std::from_chars(number.data(), number.data() + number.size(), rank);
    const bool whole = parsed.ec == std::errc() && parsed.ptr == number.data() + number.size();
    if (bytes.empty() || !whole || rank < 0 || rank >= kMaxRanks) {
      fail("{}: line {} is not \"base64 rank\": {}", where, line_number, printable(line, 60));
    }
    if (tokens.size() <= static_cast<size_t>(rank)) tokens.resize(static_cast<size_t>(rank) + 1);
    std::string& slot = tokens[static_cast<size_t>(rank)];
    if (!slot.empty()) fail("{}: line {}: the rank {} is there twice", where, line_number, rank);
    slot = std::move(bytes);
    ++count;
  }
  if (count == 0) fail("{}: no ranks in it", where);
  if (count != tokens.size()) {
    fail("{}: {} ranks but the largest is {}: ranks are missing (is the file whole?)", where, count,
         tokens.size() - 1);
  }
  return tokens;
}

// tiktoken merges any two neighbours whose joined bytes have a rank. As a merge list: every way to cut a
// token in two.
MergeTable merges_of(const std::vector<std::string>& tokens, const std::string& where) {
  std::unordered_map<std::string_view, int> ids;
  ids.reserve(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) {
    if (!ids.emplace(tokens[id], static_cast<int>(id)).second)
      fail("{}: two ranks have the bytes of rank {}", where, id);
  }
  for (int byte = 0; byte < 256; ++byte) {
    const char c = static_cast<char>(byte);
    if (!ids.contains(std::string_view(&c, 1))) fail("{}: no rank for the byte 0x{:02X}", where, byte);
  }
  MergeTable table;
  table.reserve(2 * tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) {
    const std::string_view token = tokens[id];
    for (size_t cut = 1; cut < token.size(); ++cut) {
      const auto left = ids.find(token.substr(0, cut));
      if (left == ids.end()) continue;
      const auto right = ids.find(token.substr(cut));
      if (right == ids.end()) continue;
      table.set(left->second, right->second, {static_cast<uint32_t>(id), static_cast<int>(id)});
    }
  }
  return table;
}

std::vector<AddedToken> read_added_tokens(const Fields& config, int ranks) {
  std::map<int, AddedToken> named;
  std::unordered_map<std::string, int> ids;
  const Fields list = config.object("added_tokens_decoder");
  for (const auto& entry : list.json().items()) {
    const std::string& key = entry.key();
    const Fields fields(entry.value(), list.path(key.c_str()));
    AddedToken token;
    const auto parsed = std::from_chars(key.data(), key.data() + key.size(), token.id);
    if (parsed.ec != std::errc() || parsed.ptr != key.data() + key.size() || token.id < ranks ||
        token.id >= ranks + kReserved || key != std::to_string(token.id)) {
      fail("{}: expected an id from {} to {}, the reserved ones behind the ranks of tiktoken.model",
           fields.where(), ranks, ranks + kReserved - 1);
    }
    token.text = fields.string("content");
    token.special = fields.boolean("special", false);
    if (token.text.empty()) fail("{} is empty", fields.path("content"));
    // Moonshot's own encoder does not look at these flags, so a file that sets one means something we cannot
    // know.
    for (const char* flag : {"single_word", "lstrip", "rstrip"}) {
      if (fields.boolean(flag, false)) fail("{}: true is not supported", fields.path(flag));
    }
    named.emplace(token.id, std::move(token));
  }
  std::vector<AddedToken> added;
  for (int id = ranks; id < ranks + kReserved; ++id) {
    AddedToken token;
    if (const auto found = named.find(id); found != named.end()) {
      token = found->second;
    } else {
      token.id = id;
      token.text =
          fmt::format("<|reserved_token_{}|>", id);  // the id itself, not its place among the reserved
      token.special = true;
    }
    if (const auto [first, fresh] = ids.emplace(token.text, id); !fresh) {
      fail("{}: the ids {} and {} have the same text", list.where(), first->second, id);
    }
    added.push_back(std::move(token));
  }
  return added;
}

}  // namespace

std::vector<std::string_view> moonshot_cut(std::string_view text) {
  std::vector<std::string_view> chunks;
  size_t start = 0, characters = 0, run = 0;
  bool run_is_space = false;
  for (size_t at = 0; at < text.size(); at += code_point_length(text[at])) {
    const bool space = is_python_space(code_point_at(text, at));
    const bool chunk_full = characters == kChunkCharacters;
    if (chunk_full || space != run_is_space) {
      run_is_space = space;
      run = 0;
    }
    if (chunk_full || run == kRunCharacters) {
      chunks.push_back(text.substr(start, at - start));
      start = at;
      run = 0;
      if (chunk_full) characters = 0;
    }
    ++run;
    ++characters;
  }
  if (start < text.size()) chunks.push_back(text.substr(start));
  return chunks;
}

TokenizerParts parse_tiktoken(std::string_view ranks, const std::string& ranks_where, std::string_view config,
                              const std::string& config_where, bool jit) {
  std::vector<std::string> tokens = read_ranks(ranks, ranks_where);
  MergeTable merges = merges_of(tokens, ranks_where);
  const Json json = parse_json(config, config_where);
  std::vector<AddedToken> added =
      read_added_tokens(Fields(json, config_where), static_cast<int>(tokens.size()));
  std::unordered_map<int, std::string> other_texts;
  for (const AddedToken& token : added) other_texts.emplace(token.id, token.text);
  std::vector<Regex> splits = {Regex(kSplit, "Kimi's split expression", jit)};
  return assemble({Bpe(std::move(tokens), std::move(merges), true),
                   AddedTokens(std::move(added)),
                   std::move(splits),
                   true,
                   std::move(other_texts),
                   {}});
}

}  // namespace weft
