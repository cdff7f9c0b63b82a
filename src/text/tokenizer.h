// Text to token ids and back.
//
// Two kinds of files are read:
//  * tokenizer.json of HF tokenizers: byte-level BPE with Split and ByteLevel pre-tokenizers, no normalizer.
//  What
//    weft does not do exactly as the reference is refused, with the field's name. The post-processor is not
//    run: encode() never adds a token, the chat encoder writes BOS and the like.
//  * tiktoken.model + tokenizer_config.json of Moonshot's Kimi models: ranks, Kimi's split expression, 256
//  reserved
//    ids behind the ranks, named by `added_tokens_decoder` or else `<|reserved_token_ID|>`.
//
// Text that is not well-formed UTF-8 is encoded as if each ill-formed part were U+FFFD.
// Character classes are those of Unicode 16, as in the references (see with_stand_ins); script properties
// other than Han are PCRE2's.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

struct TokenizerParts;

class Tokenizer {
 public:
  enum class Specials {
    all,         // every added token is recognised: text that weft's own chat encoder wrote
    added_only,  // tokens flagged special are text, other added tokens are recognised
    none,        // nothing is recognised: text from users
  };

  // Reads whichever of the two kinds `dir` holds. Error: neither (names what was looked for), or a file that
  // is damaged or asks for what weft does not do. `jit` false runs the split expressions without machine
  // code.
  static std::unique_ptr<Tokenizer> load(const std::string& dir, bool jit = true);

  explicit Tokenizer(TokenizerParts parts);
  ~Tokenizer();

  // Thread-safe, in time about linear in the length. Pieces that the chat encoder treats as separate segments
  // must be encoded one by one. Error: the split expression ran into a resource limit.
  std::vector<int> encode(std::string_view text, Specials specials) const;

  // Lengths in bytes of the pre-tokens of `text`, no added token recognised. Adds up to the text, or to the
  // text with its ill-formed parts replaced.
  std::vector<size_t> split(std::string_view text) const;

  // The bytes of a token; need not be whole code points. Valid as long as the tokenizer. Error: no such id
  // (vocab rows beyond the tokenizer's are padding of the model).
  std::string_view token_bytes(int id) const;
  // Ill-formed parts of the joined bytes become U+FFFD. `skip_special` leaves out tokens flagged special.
  std::string decode(std::span<const int> ids, bool skip_special = false) const;

  int vocab_size() const;                                    // one more than the largest id
  std::optional<int> token_id(std::string_view text) const;  // an added token or one whole vocabulary entry
  bool is_special(int id) const;                             // false for an id that does not exist

 private:
  void encode_cut(std::string_view text, Specials specials, std::vector<int>& ids) const;
  void encode_plain(std::string_view text, std::vector<int>& ids) const;
  void split_plain(std::string_view text, std::vector<size_t>& lengths) const;

  std::unique_ptr<const TokenizerParts> parts_;
};

}  // namespace weft
