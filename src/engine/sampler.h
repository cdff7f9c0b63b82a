// From one row of logits to a token.
//
// The order, that of Hugging Face and vLLM: logit_bias and penalties, temperature, top_k, top_p, min_p, draw.
// Ties are broken by the lower token id everywhere: in the maximum and at the edge of every filter.
//
// The draw is an exponential race (Gumbel maximum): every token x that passed the filters gets an E_x ~
// Exp(1), a function of (seed, position, x) alone, and the smallest E_x / p_x wins. That is a sample of p,
// and it depends neither on how often or in which batch the row was computed, nor on an order of the
// vocabulary. A row verified under speculation gives the token that plain decoding gives
// (speculative.md 5.5).
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/team.h"
#include "engine/sampling.h"

namespace weft {

// One row to sample from, and what came of it.
struct SampleRow {
  const SamplingParams* params;   // must have passed validate(vocab)
  std::span<const float> logits;  // [vocab], -inf = impossible
  History history;
  Sample sample = {};
  // NaN or +inf in the row, or nothing but -inf; empty if there is a sample. The caller knows, and adds,
  // request and layer.
  std::string error = {};
};

// Samples the rows of a step on the team. Every row is cut into chunks of a fixed size, and all chunks of all
// rows are the tasks of each pass: find the largest logit; where there is a filter or logprobs, take a census
// by likelihood; run the race. The census tells which few tokens have to be sorted. Chunks are put together
// in their order, so a row's sample depends neither on the threads nor on other rows. As in all that a team
// runs, subnormal numbers count as zero.
//
// Holds scratch for as many rows as were ever sampled at once; keeps nothing between calls. One call at a
// time.
class Sampler {
 public:
  // Only the first `known` tokens are ever sampled, or counted in a distribution: the rows behind pad the
  // model, and no tokenizer has text for them. They may still stand in a prompt.
  Sampler(Team& team, int vocab, int known = INT32_MAX);
  ~Sampler();

  void sample(std::span<SampleRow> rows);

 private:
  struct Work;

  Team& team_;
  size_t vocab_, known_;
  std::vector<std::unique_ptr<Work>> work_;  // one for each row of the largest step so far
};

}  // namespace weft
