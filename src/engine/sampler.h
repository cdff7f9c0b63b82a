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

// Scratch for one vocabulary, reused over rows and requests; keeps nothing between calls. One thread at a
// time.
class Sampler {
 public:
  // Only the first `known` tokens are ever sampled, or counted in a distribution: the rows behind pad the
  // model, and no tokenizer has text for them. They may still stand in a prompt.
  explicit Sampler(int vocab, int known = INT32_MAX);

  // logits: [vocab], -inf = impossible. `params` must have passed validate(vocab).
  // Error: NaN or +inf in the row, or nothing but -inf. The caller knows, and adds, request and layer.
  Sample sample(const SamplingParams& params, std::span<const float> logits, const History& history);

 private:
  struct Candidate {
    float logit;  // adjusted
    int32_t token;
    double weight;  // probability relative to the likeliest token
  };

  std::span<const float> adjust(const SamplingParams&, std::span<const float> logits, const History&);
  void top_k(int64_t k);
  void top_p(double p);
  int32_t draw(uint64_t seed, uint64_t position) const;

  size_t known_;
  std::vector<float> adjusted_;
  std::vector<int32_t> counts_;  // [vocab], all zero between calls
  std::vector<Candidate> candidates_;
};

}  // namespace weft
