// Reads tokenizer.json. Everything that changes ids is either understood or refused: a field that is passed
// over in silence shows only as slightly worse answers of the model.
#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/check.h"
#include "base/json.h"
#include "text/tokenizer_parts.h"
#include "text/unicode.h"

namespace weft {
namespace {

constexpr int kMaxId = (1 << 22) - 1;  // far beyond any vocabulary; a larger id would only allocate

// What ByteLevel does by itself when `use_regex` is on: GPT-2's expression.
constexpr std::string_view kGpt2Split =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";

// ByteLevel writes bytes as characters: printable Latin-1 as itself, the other 68 bytes as U+0100 upward in
// order.
const std::array<int16_t, 324>& byte_of_character() {
  static const std::array<int16_t, 324> table = [] {
    std::array<int16_t, 324> bytes;
    bytes.fill(-1);
    int16_t next = 256;
    for (int16_t byte = 0; byte < 256; ++byte) {
      const bool printable = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      bytes[static_cast<size_t>(printable ? byte : next++)] = byte;
    }
    return bytes;
  }();
  return table;
}

// The bytes that a vocabulary entry stands for; empty if it is not written in ByteLevel's characters.
std::string bytes_of_entry(std::string_view entry) {
  std::string bytes;
  for (size_t at = 0; at < entry.size(); at += code_point_length(entry[at])) {
    const char32_t c = code_point_at(entry, at);
    const int16_t byte = c < byte_of_character().size() ? byte_of_character()[c] : int16_t{-1};
    if (byte < 0) return "";
    bytes += static_cast<char>(byte);
  }
  return bytes;
}

bool is_null_or_empty(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || found->is_null() ||
         (found->is_string() && found->get_ref<const std::string&>().empty());
}

int id_of(const Json& value, const std::string& where) {
  if (value.is_number_integer() && value >= 0 && value <= kMaxId) return value.get<int>();
  fail("{}: expected a token id from 0 to {}", where, kMaxId);
}

using Vocabulary = std::unordered_map<std::string_view, int>;  // looks into the Json

struct VocabularyTexts {
  Vocabulary ids;
  std::vector<std::string> tokens;                   // bytes by id; empty: none
  std::unordered_map<int, std::string> other_texts;  // entries not written in ByteLevel's characters
};

VocabularyTexts read_vocabulary(const Fields& model) {
  const Json& entries = model.object("vocab").json();
  const std::string where = model.path("vocab");
  VocabularyTexts out;
  out.ids.reserve(entries.size());
  int last = -1;
  for (const auto& entry : entries.items()) {
    const int id = id_of(entry.value(), where + "." + printable(entry.key(), 40));
    if (entry.key().empty()) fail("{}: the empty text is a token", where);
    out.ids.emplace(entry.key(), id);
    last = std::max(last, id);
  }
  out.tokens.resize(static_cast<size_t>(last + 1));
  for (const auto& [text, id] : out.ids) {
    std::string& slot = out.tokens[static_cast<size_t>(id)];
    if (!slot.empty() || out.other_texts.contains(id)) fail("{}: two texts have the id {}", where, id);
    slot = bytes_of_entry(text);
    if (slot.empty()) out.other_texts.emplace(id, text);
  }
  // Bytes that no UTF-8 text contains may be missing; any other would leave some text without ids.
  std::array<bool, 256> present = {};
  for (const std::string& token : out.tokens) {
    if (token.size() == 1) present[static_cast<unsigned char>(token[0])] = true;
  }
  for (int byte = 0; byte < 0xf5; ++byte) {
    if (byte == 0xc0 || byte == 0xc1 || present[static_cast<size_t>(byte)]) continue;
    fail("{}: no token for the byte 0x{:02X}: not a byte-level vocabulary", where, byte);
  }
  return out;
}

MergeTable read_merges(const Fields& model, const Vocabulary& vocabulary, bool merges_beside) {
  const std::string where = model.path("merges");
  const auto found = model.json().find("merges");
  if (found == model.json().end() || !found->is_array()) fail("{} is missing or not an array", where);
  const Json& merges = *found;
  if (merges.empty() && merges_beside) fail("{} is empty but a merges.txt lies beside the file", where);
  const bool strings = !merges.empty() && merges[0].is_string();

  const auto token = [&](std::string_view text, size_t rank) {
    const auto entry = vocabulary.find(text);
    if (entry == vocabulary.end())
      fail("{}[{}]: \"{}\" is not in the vocabulary", where, rank, printable(text, 80));
    return entry->second;
  };
  MergeTable table;
  table.reserve(merges.size());
  std::string merged;
  for (size_t rank = 0; rank < merges.size(); ++rank) {
    const Json& merge = merges[rank];
    std::string_view left, right;
    if (merge.is_string() != strings) fail("{}[{}]: strings and pairs are mixed", where, rank);
    if (strings) {
      const std::string_view line = merge.get_ref<const std::string&>();
      const size_t space = line.find(' ');
      if (space == line.npos || line.find(' ', space + 1) != line.npos) {
        fail("{}[{}]: expected two tokens with one space between, found \"{}\"", where, rank,
             printable(line, 80));
      }
      left = line.substr(0, space);
      right = line.substr(space + 1);
    } else {
      if (!merge.is_array() || merge.size() != 2 || !merge[0].is_string() || !merge[1].is_string()) {
        fail("{}[{}]: expected a pair of tokens", where, rank);
      }
      left = merge[0].get_ref<const std::string&>();
      right = merge[1].get_ref<const std::string&>();
    }
    const int left_id = token(left, rank), right_id = token(right, rank);
    merged.assign(left).append(right);
    table.set(left_id, right_id, {static_cast<uint32_t>(rank), token(merged, rank)});
  }
  return table;
}

void check_model(const Fields& model) {
  if (const std::string type = model.string("type"); type != "BPE") {
    fail("{} is \"{}\", weft reads only BPE", model.path("type"), printable(type, 40));
  }
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!is_null_or_empty(model.json(), key)) fail("{} is not supported, expected null", model.path(key));
  }
  if (model.number("dropout", 0.0, 1.0, 0.0) != 0.0)
    fail("{}: random merges are not supported", model.path("dropout"));
  if (model.boolean("byte_fallback", false)) {
    fail("{}: SentencePiece vocabularies are not supported", model.path("byte_fallback"));
  }
}

void check_normalizer(const Fields& root) {
  const std::optional<Fields> normalizer = root.optional_object("normalizer");
  if (!normalizer) return;
  const std::string type = normalizer->string("type");
  const auto steps = normalizer->json().find("normalizers");
  const bool empty =
      type == "Sequence" && steps != normalizer->json().end() && steps->is_array() && steps->empty();
  if (!empty) {
    fail("{}: {} is not supported, expected null or an empty Sequence", root.path("normalizer"),
         printable(type, 40));
  }
}

void check_decoder(const Fields& root) {
  const Fields decoder = root.object("decoder");
  if (const std::string type = decoder.string("type"); type != "ByteLevel") {
    fail("{} is \"{}\", expected ByteLevel", decoder.path("type"), printable(type, 40));
  }
}

Regex read_split(const Fields& step, bool jit) {
  if (const std::string behavior = step.string("behavior"); behavior != "Isolated") {
    fail("{} is \"{}\", expected Isolated", step.path("behavior"), printable(behavior, 40));
  }
  if (step.boolean("invert", false)) fail("{}: true is not supported", step.path("invert"));
  const Fields pattern = step.object("pattern");
  return Regex(pattern.string("Regex"), pattern.path("Regex"), jit);
}

std::vector<Regex> read_pre_tokenizer(const Fields& root, bool jit) {
  const Fields top = root.object("pre_tokenizer");
  std::vector<Fields> steps;
  if (top.string("type") == "Sequence") {
    const auto list = top.json().find("pretokenizers");
    if (list == top.json().end() || !list->is_array()) fail("{} is not an array", top.path("pretokenizers"));
    for (const Json& step : *list) {
      steps.emplace_back(step, fmt::format("{}[{}]", top.path("pretokenizers"), steps.size()));
    }
  } else {
    steps.push_back(top);
  }
  std::vector<Regex> splits;
  bool byte_level = false;
  for (const Fields& step : steps) {
    const std::string type = step.string("type");
    if (byte_level) fail("{}: {} after ByteLevel is not supported", step.where(), printable(type, 40));
    if (type == "Split") {
      splits.push_back(read_split(step, jit));
    } else if (type == "ByteLevel") {
      byte_level = true;
      if (step.boolean("add_prefix_space", true))
        fail("{}: true is not supported", step.path("add_prefix_space"));
      // Both are true when absent, as in files older than use_regex.
      if (step.boolean("use_regex", true)) splits.emplace_back(kGpt2Split, step.path("use_regex"), jit);
    } else {
      fail("{} is \"{}\", weft reads Sequence, Split and ByteLevel", step.path("type"), printable(type, 40));
    }
  }
  if (!byte_level)
    fail("{}: no ByteLevel at its end: not a byte-level tokenizer", root.path("pre_tokenizer"));
  return splits;
}

std::vector<AddedToken> read_added_tokens(const Fields& root, VocabularyTexts& vocabulary) {
  std::vector<AddedToken> added;
  const auto list = root.json().find("added_tokens");
  if (list == root.json().end() || list->is_null()) return added;
  if (!list->is_array()) fail("{} is not an array", root.path("added_tokens"));
  std::unordered_set<std::string> texts;
  std::unordered_map<int, std::string_view> owner;
  for (const auto& [text, id] : vocabulary.ids) owner.emplace(id, text);
  for (const Json& entry : *list) {
    const Fields fields(entry, fmt::format("{}[{}]", root.path("added_tokens"), added.size()));
    AddedToken token;
    token.text = fields.string("content");
    token.id = static_cast<int>(fields.integer("id", 0, kMaxId));
    token.single_word = fields.boolean("single_word", false);
    token.lstrip = fields.boolean("lstrip", false);
    token.rstrip = fields.boolean("rstrip", false);
    token.special = fields.boolean("special", false);
    token.normalized = fields.boolean("normalized", !token.special);
    if (token.text.empty()) fail("{} is empty", fields.path("content"));
    if (!texts.insert(token.text).second) {
      fail("{}: \"{}\" is there twice", fields.path("content"), printable(token.text, 80));
    }
    const auto named = vocabulary.ids.find(token.text);
    const bool moved = named != vocabulary.ids.end() && named->second != token.id;
    const auto [owned, fresh] = owner.emplace(token.id, *texts.find(token.text));
    if (moved || (!fresh && owned->second != token.text)) {
      fail("{}: \"{}\" has the id {}, which disagrees with the vocabulary or another added token",
           fields.path("id"), printable(token.text, 80), token.id);
    }
    vocabulary.other_texts[token.id] = token.text;
    added.push_back(std::move(token));
  }
  return added;
}

}  // namespace

TokenizerParts parse_bpe_json(std::string_view text, const std::string& where, bool merges_beside, bool jit) {
  const Json json = parse_json(text, where);
  const Fields root(json, where);
  const Fields model = root.object("model");
  check_model(model);
  check_normalizer(root);
  check_decoder(root);
  std::vector<Regex> splits = read_pre_tokenizer(root, jit);
  VocabularyTexts vocabulary = read_vocabulary(model);
  MergeTable merges = read_merges(model, vocabulary.ids, merges_beside);
  std::vector<AddedToken> added = read_added_tokens(root, vocabulary);
  return assemble(
      {Bpe(std::move(vocabulary.tokens), std::move(merges), model.boolean("ignore_merges", false)),
       AddedTokens(std::move(added)),
       std::move(splits),
       false,
       std::move(vocabulary.other_texts),
       {}});
}

}  // namespace weft
