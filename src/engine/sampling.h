// How a request wants its tokens chosen, and what it is told of each.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

namespace weft {

struct SamplingParams {
  // Below 1e-5, as with 0: greedy, the token of the largest adjusted logit.
  double temperature = 1.0;
  // Only the k likeliest tokens. 0, -1 and k >= vocabulary: all.
  int64_t top_k = 0;
  // The smallest set of likeliest tokens that together have at least this probability; never fewer than one.
  // 1: all.
  double top_p = 1.0;
  // Only tokens at least this likely relative to the likeliest. 0: all. 1: greedy.
  double min_p = 0.0;
  // CTRL's: logits of tokens in the prompt or the output are divided by it if positive, else multiplied. 0.01
  // to 100.
  double repetition_penalty = 1.0;
  // OpenAI's, -2 to 2, over the output only: logit -= presence + frequency * (times the token was put out).
  double presence_penalty = 0.0;
  double frequency_penalty = 0.0;
  std::map<int32_t, double> logit_bias = {};  // added to a token's logit; -100 to 100
  uint64_t seed = 0;                          // who submits a request without a seed draws one
  bool ignore_eos = false;                    // the end-of-sequence token does not end the output
  int logprobs = -1;  // alternatives to report beside the token's own logprob; -1: no logprobs

  bool greedy() const;  // the result is the maximum, whatever the seed

  // UsageError naming the field, what was found and what is allowed. NaN is never allowed.
  void validate(int vocab) const;
};

// What came before the token to be sampled. Under speculation: including the drafts before it.
struct History {
  std::span<const int32_t> tokens;  // prompt, then output
  size_t prompt = 0;                // how many of them are the prompt
};

struct TokenLogprob {
  int32_t token;
  float logprob;  // natural log, of the model's own distribution: no bias, penalties, temperature or filters
};

struct Sample {
  int32_t token = -1;
  float logprob = 0;  // as in TokenLogprob; 0 unless params.logprobs >= 0
  std::vector<TokenLogprob>
      alternatives;  // the params.logprobs likeliest, likeliest first; may hold the token
};

}  // namespace weft
