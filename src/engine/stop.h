// Stop strings in streamed text.
//
// A stop string may begin in one token and end in another, so text that could still become one is held back,
// and nothing else is: after every push the text handed out so far is all text up to the longest tail that is
// the beginning of a stop string. Of several stop strings the one that is complete first wins, and among
// those complete at the same byte the longest; so the result does not depend on how the text was cut into
// pieces.
//
// If pieces and stop strings are whole UTF-8 characters, so is everything handed out.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

class StopMatcher {
 public:
  // UsageError: an empty stop string, which would match before the first token (names it: stop[1]).
  explicit StopMatcher(std::span<const std::string> stops);

  // Takes the next piece of text and returns what may be shown now. Once stopped() is true this is the text
  // before the stop string, and all later pieces are swallowed.
  std::string push(std::string_view piece);
  // The text is at its end: what was held back is shown after all. Empty when stopped.
  std::string flush();

  bool stopped() const { return matched_ >= 0; }
  int matched() const { return matched_; }  // index of the stop string that ended the text, or -1

 private:
  struct Stop {
    std::string text;
    std::vector<int32_t>
        border;        // [i]: longest proper prefix of text[0, i] that is its suffix (Knuth-Morris-Pratt)
    int32_t seen = 0;  // longest prefix that is a suffix of the pushed text
  };

  std::vector<Stop> stops_;
  std::string held_;
  int matched_ = -1;
};

}  // namespace weft
