#include "text/unicode.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "base/check.h"

namespace weft {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

// What a split expression can ask about a code point: its category (marks, punctuation and symbols are never
// told apart further) and whether its script is Han.
enum Class : uint8_t { cf, ll, lm, lo, lu, m, nd, no, p, s, han };

struct Range {
  char32_t first, last;
  Class klass;
};

// Differences in general category between Unicode 14 and 16 (DerivedGeneralCategory.txt of both), and U+180E.
constexpr Range kRecent[] = {
    {0x0897, 0x0897, m},     {0x0cf3, 0x0cf3, m},    {0x0ece, 0x0ece, m},     {0x180e, 0x180e, cf},
    {0x1b4e, 0x1b4f, p},     {0x1b7f, 0x1b7f, p},    {0x1c89, 0x1c89, lu},    {0x1c8a, 0x1c8a, ll},
    {0x2427, 0x2429, s},     {0x2ffc, 0x2fff, s},    {0x31e4, 0x31e5, s},     {0x31ef, 0x31ef, s},
    {0xa7cb, 0xa7cc, lu},    {0xa7cd, 0xa7cd, ll},   {0xa7da, 0xa7da, lu},    {0xa7db, 0xa7db, ll},
    {0xa7dc, 0xa7dc, lu},    {0x105c0, 0x105f3, lo}, {0x10d40, 0x10d49, nd},  {0x10d4a, 0x10d4d, lo},
    {0x10d4e, 0x10d4e, lm},  {0x10d4f, 0x10d4f, lo}, {0x10d50, 0x10d65, lu},  {0x10d69, 0x10d6d, m},
    {0x10d6e, 0x10d6e, p},   {0x10d6f, 0x10d6f, lm}, {0x10d70, 0x10d85, ll},  {0x10d8e, 0x10d8f, s},
    {0x10ec2, 0x10ec4, lo},  {0x10efc, 0x10eff, m},  {0x1123f, 0x11240, lo},  {0x11241, 0x11241, m},
    {0x11380, 0x11389, lo},  {0x1138b, 0x1138b, lo}, {0x1138e, 0x1138e, lo},  {0x11390, 0x113b5, lo},
    {0x113b7, 0x113b7, lo},  {0x113b8, 0x113c0, m},  {0x113c2, 0x113c2, m},   {0x113c5, 0x113c5, m},
    {0x113c7, 0x113ca, m},   {0x113cc, 0x113d0, m},  {0x113d1, 0x113d1, lo},  {0x113d2, 0x113d2, m},
    {0x113d3, 0x113d3, lo},  {0x113d4, 0x113d5, p},  {0x113d7, 0x113d8, p},   {0x113e1, 0x113e2, m},
    {0x116d0, 0x116e3, nd},  {0x11b00, 0x11b09, p},  {0x11bc0, 0x11be0, lo},  {0x11be1, 0x11be1, p},
    {0x11bf0, 0x11bf9, nd},  {0x11f00, 0x11f01, m},  {0x11f02, 0x11f02, lo},  {0x11f03, 0x11f03, m},
    {0x11f04, 0x11f10, lo},  {0x11f12, 0x11f33, lo}, {0x11f34, 0x11f3a, m},   {0x11f3e, 0x11f42, m},
    {0x11f43, 0x11f4f, p},   {0x11f50, 0x11f59, nd}, {0x11f5a, 0x11f5a, m},   {0x1342f, 0x1342f, lo},
    {0x13439, 0x1343f, cf},  {0x13440, 0x13440, m},  {0x13441, 0x13446, lo},  {0x13447, 0x13455, m},
    {0x13460, 0x143fa, lo},  {0x16100, 0x1611d, lo}, {0x1611e, 0x1612f, m},   {0x16130, 0x16139, nd},
    {0x16d40, 0x16d42, lm},  {0x16d43, 0x16d6a, lo}, {0x16d6b, 0x16d6c, lm},  {0x16d6d, 0x16d6f, p},
    {0x16d70, 0x16d79, nd},  {0x18cff, 0x18cff, lo}, {0x1b132, 0x1b132, lo},  {0x1b155, 0x1b155, lo},
    {0x1cc00, 0x1ccef, s},   {0x1ccf0, 0x1ccf9, nd}, {0x1cd00, 0x1ceb3, s},   {0x1d2c0, 0x1d2d3, no},
    {0x1df25, 0x1df2a, ll},  {0x1e030, 0x1e06d, lm}, {0x1e08f, 0x1e08f, m},   {0x1e4d0, 0x1e4ea, lo},
    {0x1e4eb, 0x1e4eb, lm},  {0x1e4ec, 0x1e4ef, m},  {0x1e4f0, 0x1e4f9, nd},  {0x1e5d0, 0x1e5ed, lo},
    {0x1e5ee, 0x1e5ef, m},   {0x1e5f0, 0x1e5f0, lo}, {0x1e5f1, 0x1e5fa, nd},  {0x1e5ff, 0x1e5ff, p},
    {0x1f6dc, 0x1f6dc, s},   {0x1f774, 0x1f776, s},  {0x1f77b, 0x1f77f, s},   {0x1f7d9, 0x1f7d9, s},
    {0x1f8b2, 0x1f8bb, s},   {0x1f8c0, 0x1f8c1, s},  {0x1fa75, 0x1fa77, s},   {0x1fa87, 0x1fa89, s},
    {0x1fa8f, 0x1fa8f, s},   {0x1faad, 0x1faaf, s},  {0x1fabb, 0x1fabf, s},   {0x1fac6, 0x1fac6, s},
    {0x1face, 0x1facf, s},   {0x1fada, 0x1fadc, s},  {0x1fadf, 0x1fadf, s},   {0x1fae8, 0x1fae9, s},
    {0x1faf7, 0x1faf8, s},   {0x1fbcb, 0x1fbef, s},  {0x2b739, 0x2b739, han}, {0x2ebf0, 0x2ee5d, han},
    {0x31350, 0x323af, han},
};

// Old code points that take their place. None is named in a known split expression.
char32_t stand_in(Class klass, size_t bytes) {
  const bool three = bytes == 3;
  switch (klass) {
    case cf:
      return three ? 0x200b : 0x1d173;
    case ll:
      return three ? 0x1e01 : 0x10428;
    case lm:
      return three ? 0x1d2c : 0x16fe0;
    case lo:
      return three ? 0x1200 : 0x10000;
    case lu:
      return three ? 0x1e00 : 0x10400;
    case m:
      return three ? 0x0e31 : 0x101fd;
    case nd:
      return three ? 0x0e50 : 0x104a0;
    case no:
      return three ? 0x2189 : 0x10107;
    case p:
      return three ? 0x2056 : 0x10100;
    case s:
      return three ? 0x2422 : 0x1f300;
    case han:
      return three ? 0x3400 : 0x20000;
  }
  WEFT_CHECK(false, "character class {}", static_cast<int>(klass));
  return 0;
}

const Range* recent(char32_t c) {
  const Range* range = std::lower_bound(std::begin(kRecent), std::end(kRecent), c,
                                        [](const Range& r, char32_t value) { return r.last < value; });
  return range != std::end(kRecent) && range->first <= c ? range : nullptr;
}

void write_code_point(char32_t c, char* out, size_t bytes) {
  for (size_t i = bytes - 1; i > 0; --i, c >>= 6) out[i] = static_cast<char>(0x80 | (c & 0x3f));
  out[0] = static_cast<char>((bytes == 3 ? 0xe0 : 0xf0) | c);
}

bool eight_ascii(const char* text) {
  uint64_t word;
  std::memcpy(&word, text, sizeof word);
  return (word & 0x8080808080808080u) == 0;
}

// First byte at or after `at` that is not ASCII, or the end.
size_t skip_ascii(std::string_view text, size_t at) {
  while (at + 8 <= text.size() && eight_ascii(text.data() + at)) at += 8;
  while (at < text.size() && static_cast<unsigned char>(text[at]) < 0x80) ++at;
  return at;
}

// Where the first part that is not a code point begins, or the end.
size_t well_formed_end(std::string_view text, size_t at) {
  while ((at = skip_ascii(text, at)) < text.size()) {
    const Utf8Part part = utf8_part(text, at);
    if (part.kind != Utf8Part::Kind::code_point) break;
    at += part.length;
  }
  return at;
}

}  // namespace

Utf8Part utf8_part(std::string_view text, size_t at) {
  const auto lead = static_cast<unsigned char>(text[at]);
  if (lead < 0x80) return {1, Utf8Part::Kind::code_point};
  if (lead < 0xc2 || lead > 0xf4) return {1, Utf8Part::Kind::ill_formed};
  const size_t length = code_point_length(text[at]);
  // Only the second byte has a range of its own (Unicode, table 3-7): overlong forms, surrogates, > U+10FFFF.
  unsigned low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  unsigned high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  for (size_t i = 1; i < length; ++i, low = 0x80, high = 0xbf) {
    if (at + i == text.size()) return {i, Utf8Part::Kind::unfinished};
    const auto byte = static_cast<unsigned char>(text[at + i]);
    if (byte < low || byte > high) return {i, Utf8Part::Kind::ill_formed};
  }
  return {length, Utf8Part::Kind::code_point};
}

std::string replace_ill_formed(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  for (size_t at = 0; at < text.size();) {
    const size_t end = well_formed_end(text, at);
    out.append(text, at, end - at);
    if (end == text.size()) break;
    out += kReplacement;
    at = end + utf8_part(text, end).length;
  }
  return out;
}

bool is_well_formed(std::string_view text) {
  return well_formed_end(text, 0) == text.size();
}

char32_t code_point_at(std::string_view text, size_t at) {
  const size_t length = code_point_length(text[at]);
  const auto lead = static_cast<unsigned char>(text[at]);
  if (length == 1) return lead;
  char32_t c = lead & (0x7f >> length);
  for (size_t i = 1; i < length; ++i) c = c << 6 | (static_cast<unsigned char>(text[at + i]) & 0x3f);
  return c;
}

size_t code_point_before(std::string_view text, size_t at) {
  do --at;
  while ((static_cast<unsigned char>(text[at]) & 0xc0) == 0x80);
  return at;
}

bool is_white_space(char32_t c) {
  return (c >= 0x09 && c <= 0x0d) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

bool is_python_space(char32_t c) {
  return is_white_space(c) || (c >= 0x1c && c <= 0x1f);
}

std::string_view with_stand_ins(std::string_view text, std::string& storage) {
  bool copied = false;
  for (size_t at = 0; (at = skip_ascii(text, at)) < text.size();) {
    const size_t length = code_point_length(text[at]);
    if (length >= 3) {
      if (const Range* range = recent(code_point_at(text, at))) {
        if (!copied) storage.assign(text);
        copied = true;
        write_code_point(stand_in(range->klass, length), storage.data() + at, length);
      }
    }
    at += length;
  }
  return copied ? std::string_view(storage) : text;
}

}  // namespace weft
