#include "engine/sampling.h"

#include <limits>

#include "base/check.h"

namespace weft {
namespace {

constexpr double kGreedyBelow = 1e-5;

void check_range(const char* field, double value, double low, double high) {
  if (!(value >= low && value <= high))
    usage("{} is {}: give a number from {} to {}", field, value, low, high);
}

}  // namespace

bool SamplingParams::greedy() const {
  return temperature < kGreedyBelow || top_k == 1 || top_p == 0 || min_p == 1;
}

void SamplingParams::validate(int vocab) const {
  constexpr double kMost = std::numeric_limits<double>::max();
  if (!(temperature >= 0 && temperature <= kMost))
    usage("temperature is {}: give a number from 0 up", temperature);
  if (top_k < -1) usage("top_k is {}: give a count, or 0 for all tokens", top_k);
  check_range("top_p", top_p, 0, 1);
  check_range("min_p", min_p, 0, 1);
  check_range("repetition_penalty", repetition_penalty, 0.01, 100);
  check_range("presence_penalty", presence_penalty, -2, 2);
  check_range("frequency_penalty", frequency_penalty, -2, 2);
  for (const auto& [token, bias] : logit_bias) {
    if (token < 0 || token >= vocab)
      usage("logit_bias names token {}: the vocabulary has 0 to {}", token, vocab - 1);
    if (!(bias >= -100 && bias <= 100))
      usage("logit_bias of token {} is {}: give a number from -100 to 100", token, bias);
  }
  if (logprobs < -1 || logprobs > vocab) usage("logprobs is {}: give a number from 0 to {}", logprobs, vocab);
}

}  // namespace weft
