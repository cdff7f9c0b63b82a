// Text of a growing sequence of tokens, in deltas that are whole code points.
#pragma once

#include <string>

#include "text/tokenizer.h"

namespace weft {

// The deltas joined equal Tokenizer::decode of all ids. An incomplete code point is held back until it is
// whole or can no longer become so; then every longest ill-formed part is one U+FFFD.
class Detokenizer {
 public:
  // `tokenizer` must outlive this. `skip_special` leaves out tokens flagged special.
  explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  std::string push(int id);  // error: no such id
  std::string flush();       // what is held back; afterwards as new

 private:
  std::string take(bool last);

  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string held_;
};

}  // namespace weft
