// Any bytes as text for the small tokenizers, and any bytes as tokenizer files.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "base/check.h"
#include "base/json.h"
#include "text/detokenizer.h"
#include "text/tokenizer.h"
#include "text/tokenizer_parts.h"
#include "text/unicode.h"

namespace {

using namespace weft;

void check_text(const Tokenizer& tokenizer, std::string_view text) {
  const std::string repaired = replace_ill_formed(text);
  const std::vector<int> ids = tokenizer.encode(text, Tokenizer::Specials::none);
  WEFT_CHECK(tokenizer.decode(ids) == repaired);
  size_t sum = 0;
  for (const size_t length : tokenizer.split(text)) sum += length;
  WEFT_CHECK(sum == repaired.size());
  tokenizer.encode(text, Tokenizer::Specials::all);
  tokenizer.encode(text, Tokenizer::Specials::added_only);
  // The bytes again as ids: any sequence of tokens streams to what it decodes to.
  std::vector<int> any;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    any.push_back((static_cast<unsigned char>(text[i]) << 8 | static_cast<unsigned char>(text[i + 1])) %
                  tokenizer.vocab_size());
  }
  Detokenizer detokenizer(tokenizer);
  std::string streamed;
  for (const int id : any) {
    const std::string delta = detokenizer.push(id);
    WEFT_CHECK(is_well_formed(delta));
    streamed += delta;
  }
  WEFT_CHECK(streamed + detokenizer.flush() == tokenizer.decode(any));
}

std::string golden(const char* path) {
  const char* root = std::getenv("WEFT_GOLDEN");
  return std::string(root == nullptr ? "tests/golden" : root) + "/tokenizers/" + path;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const std::unique_ptr<Tokenizer> tokenizers[] = {
      Tokenizer::load(golden("glm_small")), Tokenizer::load(golden("dsv_small")),
      Tokenizer::load(golden("kimi_small")), Tokenizer::load(golden("kimi_small"), false)};
  static const std::string config = read_file(golden("kimi_small/tokenizer_config.json"));
  static const std::string ranks = read_file(golden("kimi_small/tiktoken.model"));
  if (size == 0) return 0;
  const std::string_view rest(reinterpret_cast<const char*>(data) + 1, size - 1);
  const unsigned mode = data[0] % 7;
  if (mode < 4) {
    check_text(*tokenizers[mode], rest);
    return 0;
  }
  try {
    if (mode == 4) check_text(Tokenizer(parse_bpe_json(rest, "fuzz", false, true)), rest);
    if (mode == 5) check_text(Tokenizer(parse_tiktoken(rest, "fuzz", config, "config", true)), rest);
    if (mode == 6) check_text(Tokenizer(parse_tiktoken(ranks, "ranks", rest, "fuzz", true)), rest);
  } catch (const Error&) {
  }
  return 0;
}
