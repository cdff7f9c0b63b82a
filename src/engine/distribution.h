// One row of logits as a distribution, worked on in chunks that may run side by side.
//
// In order: begin(); find_largest() of every chunk, settle(); with `likelihood` set, count() of every chunk,
// merge_census(); with `open` and `race` set, walk() of every chunk, merge_walk(). Chunks have a fixed size
// and are put together in their order, so nothing depends on who ran which.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "engine/census.h"
#include "engine/race.h"

namespace weft {

struct Candidate {
  float logit;
  int32_t token;
  // Likelier first.
  bool operator<(const Candidate& other) const {
    return logit != other.logit ? logit > other.logit : token < other.token;
  }
};

struct Distribution {
  static constexpr size_t kChunk = 8192;
  static size_t chunks(size_t tokens) { return (tokens + kChunk - 1) / kChunk; }

  std::span<const float> logits;
  Candidate best = {};    // the likeliest token
  Likelihood likelihood;  // at a temperature that suits the caller
  bool masses = false;    // the census adds up weights too
  Census census;
  // Tokens of the buckets in front of it run the race, those inside are listed for the caller to sort out,
  // those behind it are left out.
  BucketRange open;
  Race race;
  std::vector<Candidate> list;

  void begin(std::span<const float> row);
  void find_largest(size_t chunk);
  std::string settle();  // what is wrong with a row that is no distribution, or ""
  void count(size_t chunk);
  void merge_census();
  void walk(size_t chunk);
  void merge_walk(size_t keep);  // of what is listed only the likeliest, in any order

 private:
  struct Part {  // what one chunk contributes
    float largest;
    bool nan;
    Census census;
    std::vector<Candidate> list;
    Race race;
  };
  std::span<const float> chunk(size_t c) const {
    return logits.subspan(c * kChunk, std::min(kChunk, logits.size() - c * kChunk));
  }
  std::vector<Part> parts_;
};

}  // namespace weft
