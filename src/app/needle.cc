#include "app/needle.h"

#include <algorithm>
#include <set>

#include "base/check.h"

namespace weft {
namespace {

constexpr const char* kAdjectives[] = {
    "amber",  "ancient", "bitter",  "blue",   "brave",   "bright", "broken", "calm",  "clever",  "cold",
    "copper", "crimson", "curious", "dark",   "distant", "eager",  "early",  "empty", "faint",   "frozen",
    "gentle", "golden",  "green",   "hidden", "hollow",  "humble", "iron",   "jolly", "late",    "little",
    "lonely", "loud",    "lucky",   "misty",  "narrow",  "noble",  "old",    "pale",  "patient", "plain",
    "polite", "proud",   "quiet",   "rapid",  "silent",  "silver", "sturdy", "wild"};
constexpr const char* kNouns[] = {
    "anchor",  "apple",  "arrow",  "badger",  "basket",   "beacon",  "bell",    "bridge", "candle", "canyon",
    "castle",  "cedar",  "comet",  "coral",   "crane",    "desert",  "dragon",  "eagle",  "ember",  "falcon",
    "feather", "forest", "garden", "glacier", "hammer",   "harbor",  "island",  "jacket", "kettle", "ladder",
    "lantern", "market", "meadow", "mirror",  "mountain", "needle",  "orchard", "otter",  "pebble", "pepper",
    "piano",   "river",  "rocket", "saddle",  "temple",   "thunder", "valley",  "window"};
constexpr int kDigits = 6;

}  // namespace

std::span<const char* const> needle_adjectives() {
  return kAdjectives;
}
std::span<const char* const> needle_nouns() {
  return kNouns;
}

std::vector<Fact> draw_facts(int count, Draw& draw) {
  const int adjectives = std::ssize(kAdjectives), nouns = std::ssize(kNouns);
  if (count < 1 || count > adjectives * nouns)
    usage("--facts {}: expected 1 to {}", count, adjectives * nouns);
  std::vector<Fact> facts;
  std::set<std::string> keys, values;
  while (static_cast<int>(facts.size()) < count) {
    const int adjective = draw.below(adjectives), noun = draw.below(nouns);
    Fact fact{fmt::format("{} {}", kAdjectives[adjective], kNouns[noun]),
              std::to_string(100000 + draw.below(900000))};
    if (keys.contains(fact.key) || values.contains(fact.value)) continue;
    keys.insert(fact.key), values.insert(fact.value);
    facts.push_back(std::move(fact));
  }
  return facts;
}

Haystack::Haystack(std::string text, const CountTokens& count) : count_(count) {
  for (size_t at = 0; at < text.size();) {
    size_t end = at;
    while (end < text.size() && text[end] != '\n' && !(text[end] == ' ' && end > at && text[end - 1] == '.'))
      ++end;
    while (end < text.size() && (text[end] == '\n' || text[end] == ' '))
      ++end;  // an empty line ends no second one
    sentences_.push_back(text.substr(at, end - at));
    at = end;
  }
  if (sentences_.size() < 2) fail("the haystack has {} sentences: give a longer text", sentences_.size());
  std::string& last = sentences_.back();
  if (!last.ends_with('\n') && !last.ends_with(' ')) last += '\n';
  for (const std::string& sentence : sentences_) tokens_.push_back(count(sentence));
}

NeedleDocument Haystack::document(int tokens, const std::vector<int>& depths, std::vector<Fact> facts,
                                  Draw& draw) const {
  WEFT_CHECK(depths.size() <= facts.size());
  int room = tokens;
  for (const Fact& fact : facts) room -= count_(fact.sentence() + " ");
  const int first = draw.below(static_cast<int>(sentences_.size()));
  std::vector<int> chosen, before = {0};  // sentences, and the tokens before each
  for (int i = first; room > 0; i = (i + 1) % static_cast<int>(sentences_.size())) {
    if (before.back() + tokens_[i] > room) break;
    chosen.push_back(i);
    before.push_back(before.back() + tokens_[i]);
  }
  const int places = static_cast<int>(before.size());
  if (static_cast<int>(facts.size()) > places)
    usage("{} tokens are too few for {} facts in whole sentences of the haystack", tokens, facts.size());

  std::vector<int> fact_at(places, -1);  // fact before each sentence
  for (size_t d = 0; d < depths.size(); ++d) {
    const double wanted = depths[d] / 100.0 * before.back();
    int best = -1;
    for (int p = 0; p < places; ++p)
      if (fact_at[p] < 0 && (best < 0 || std::abs(before[p] - wanted) < std::abs(before[best] - wanted)))
        best = p;
    fact_at[best] = static_cast<int>(d);
  }
  for (size_t f = depths.size(); f < facts.size(); ++f) {
    int p = draw.below(places);
    while (fact_at[p] >= 0) p = draw.below(places);
    fact_at[p] = static_cast<int>(f);
  }

  NeedleDocument out;
  for (int p = 0; p < places; ++p) {
    if (fact_at[p] >= 0) out.text += facts[fact_at[p]].sentence() + " ";
    if (p < places - 1) out.text += sentences_[chosen[p]];
  }
  out.text.erase(out.text.find_last_not_of(" \n") + 1);
  out.facts = std::move(facts);
  return out;
}

Verdict judge(std::string_view answer, const Fact& asked, const std::vector<Fact>& facts) {
  std::set<std::string_view> found;
  const auto digit = [](char c) { return c >= '0' && c <= '9'; };
  for (size_t at = 0; at < answer.size();) {
    size_t end = at;
    while (end < answer.size() && digit(answer[end])) ++end;
    if (end - at == kDigits) found.insert(answer.substr(at, kDigits));
    at = std::max(end, at + 1);
  }
  if (found.size() == 1 && *found.begin() == asked.value) return Verdict::right;
  const bool other = std::any_of(facts.begin(), facts.end(), [&](const Fact& f) {
    return f.value != asked.value && found.contains(f.value);
  });
  return other ? Verdict::other_fact : Verdict::wrong;
}

}  // namespace weft
