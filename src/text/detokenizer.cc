#include "text/detokenizer.h"

#include <utility>

#include "text/unicode.h"

namespace weft {

std::string Detokenizer::push(int id) {
  const std::string_view bytes = tokenizer_->token_bytes(id);
  if (skip_special_ && tokenizer_->is_special(id)) return "";
  held_ += bytes;
  return take(false);
}

std::string Detokenizer::flush() {
  return take(true);
}

std::string Detokenizer::take(bool last) {
  // The end may be the beginning of a code point: of at most 3 bytes, so look for where the parts stop being
  // final.
  size_t keep = held_.size();
  for (size_t at = 0; at < held_.size() && !last;) {
    const Utf8Part part = utf8_part(held_, at);
    // Python's incremental decoder, the reference for deltas, waits for the third byte of a surrogate before
    // it replaces the first: the same text, one token later.
    const bool half_surrogate = held_[at] == '\xed' && at + 2 == held_.size() &&
                                part.kind == Utf8Part::Kind::ill_formed && (held_[at + 1] & 0xe0) == 0xa0;
    if (part.kind == Utf8Part::Kind::unfinished || half_surrogate) {
      keep = at;
      break;
    }
    at += part.length;
  }
  std::string ready = replace_ill_formed(std::string_view(held_).substr(0, keep));
  held_.erase(0, keep);
  return ready;
}

}  // namespace weft
