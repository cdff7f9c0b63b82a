// Facts hidden in a long text, and whether an answer names the right one.
//
// A fact is "The secret code of amber anchor is 120734."; several of one template stand in a document, so
// that finding one needs the key, not just something that looks like a fact. Documents are cut from a
// haystack text at sentence ends; facts go between sentences.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace weft {

// Keys are pairs of these; tools/train/words.txt lists the same for the trainer.
std::span<const char* const> needle_adjectives();
std::span<const char* const> needle_nouns();

struct Fact {
  std::string key, value;
  std::string sentence() const { return "The secret code of " + key + " is " + value + "."; }
  std::string question() const { return "What is the secret code of " + key + "?"; }
};

// Only the generator's bits, which the standard fixes: the same documents everywhere.
class Draw {
 public:
  explicit Draw(uint64_t seed) : bits_(seed) {}
  int below(int n) { return static_cast<int>(bits_() % static_cast<uint64_t>(n)); }

 private:
  std::mt19937_64 bits_;
};

// Distinct keys, distinct values of six digits. error (usage): more than there are keys.
std::vector<Fact> draw_facts(int count, Draw& draw);

struct NeedleDocument {
  std::string text;
  std::vector<Fact> facts;  // the first ones are asked for, one per depth
};

class Haystack {
 public:
  using CountTokens = std::function<int(std::string_view)>;
  // error: fewer than two sentences.
  Haystack(std::string text, const CountTokens& count);

  // A document of about `tokens` (facts included) from a random place on, the haystack repeating where it is
  // too short. The first depths.size() facts stand at those percentages of it, the others anywhere, no two at
  // one place. error (usage): too short for the facts.
  NeedleDocument document(int tokens, const std::vector<int>& depths, std::vector<Fact> facts,
                          Draw& draw) const;
  size_t sentences() const { return sentences_.size(); }

 private:
  std::vector<std::string> sentences_;  // each with the blank or line end behind it
  std::vector<int> tokens_;
  const CountTokens count_;
};

enum class Verdict : uint8_t { right, other_fact, wrong };
// Numbers of six digits are what counts: right if the asked value is the only one in the answer.
Verdict judge(std::string_view answer, const Fact& asked, const std::vector<Fact>& facts);

}  // namespace weft
