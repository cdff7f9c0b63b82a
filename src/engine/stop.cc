#include "engine/stop.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace weft {

namespace {

std::vector<int32_t> borders(const std::string& text) {
  std::vector<int32_t> border(text.size(), 0);
  int32_t length = 0;
  for (size_t i = 1; i < text.size(); ++i) {
    while (length > 0 && text[i] != text[length]) length = border[length - 1];
    if (text[i] == text[length]) ++length;
    border[i] = length;
  }
  return border;
}

}  // namespace

StopMatcher::StopMatcher(std::span<const std::string> stops) {
  for (size_t i = 0; i < stops.size(); ++i) {
    if (stops[i].empty())
      usage("stop[{}] is an empty string: leave it out, or give at least one character", i);
    stops_.push_back({stops[i], borders(stops[i])});
  }
}

// One automaton per stop string instead of one for all (Aho-Corasick): a token has a few bytes, so 100 stop
// strings cost about as many comparisons per byte, against a table of a node per byte of stop text.
std::string StopMatcher::push(std::string_view piece) {
  if (stopped()) return {};
  int32_t longest = 0;  // over the stop strings, of the beginning seen at the end of the text
  for (char c : piece) {
    held_.push_back(c);
    longest = 0;
    for (size_t i = 0; i < stops_.size(); ++i) {
      Stop& stop = stops_[i];
      int32_t& seen = stop.seen;
      while (seen > 0 && stop.text[seen] != c) seen = stop.border[seen - 1];
      if (stop.text[seen] == c) ++seen;
      const bool complete = seen == static_cast<int32_t>(stop.text.size());
      if (complete && (!stopped() || stop.text.size() > stops_[matched_].text.size()))
        matched_ = static_cast<int>(i);
      longest = std::max(longest, seen);
    }
    if (stopped()) {
      held_.resize(held_.size() - stops_[matched_].text.size());
      return std::exchange(held_, {});
    }
  }
  if (piece.empty()) return {};
  std::string shown = held_.substr(0, held_.size() - longest);
  held_.erase(0, shown.size());
  return shown;
}

std::string StopMatcher::flush() {
  for (Stop& stop : stops_) stop.seen = 0;
  return std::exchange(held_, {});
}

}  // namespace weft
