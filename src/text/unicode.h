// UTF-8 and the few character properties the tokenizers need beside PCRE2's.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace weft {

struct Utf8Part {
  enum class Kind {
    code_point,  // well-formed
    ill_formed,  // the longest beginning of a sequence that cannot become well-formed (Unicode 3.9, "maximal
                 // subpart")
    unfinished,  // the text ends inside a sequence that could still become well-formed
  };
  size_t length;  // >= 1 bytes
  Kind kind;
};

// The part that begins at text[at]; at < text.size().
Utf8Part utf8_part(std::string_view text, size_t at);

// Every ill-formed part, and an unfinished end, becomes U+FFFD.
std::string replace_ill_formed(std::string_view text);
bool is_well_formed(std::string_view text);

// The code point at text[at] of well-formed text, and where it or the one before `at` begins.
char32_t code_point_at(std::string_view text, size_t at);
size_t code_point_before(std::string_view text, size_t at);
inline size_t code_point_length(char lead) {
  const auto byte = static_cast<unsigned char>(lead);
  return byte < 0x80 ? 1 : byte < 0xe0 ? 2 : byte < 0xf0 ? 3 : 4;
}

bool is_white_space(char32_t c);   // Unicode White_Space, which is also `\s` of the reference tokenizers
bool is_python_space(char32_t c);  // str.isspace: White_Space and U+001C..U+001F

// The reference tokenizers know Unicode 16 and PCRE2 10.42 knows Unicode 14. Returns the well-formed `text`
// with every code point that differs between the two replaced by an old one of the same length in bytes,
// general category and Han-ness, so that a match in the result is a match in `text`. Also replaces U+180E,
// which PCRE2 takes for white space and Unicode has not since 6.3. Returns `text` itself when there is
// nothing to replace, else a view of `storage`.
std::string_view with_stand_ins(std::string_view text, std::string& storage);

}  // namespace weft
