#include "engine/sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/check.h"

namespace weft {

namespace {

constexpr double kGreedyBelow = 1e-5;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void check_range(const char* field, double value, double low, double high) {
  if (!(value >= low && value <= high))
    usage("{} is {}: give a number from {} to {}", field, value, low, high);
}

// The finaliser of SplitMix64: every input bit reaches every output bit.
uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

constexpr uint64_t kGolden = 0x9e3779b97f4a7c15u;

// In (0, 1), both ends excluded; 52 bits, so that adding one half stays exact.
double uniform(uint64_t key, int32_t token) {
  const uint64_t bits = scramble(key + kGolden * (static_cast<uint64_t>(token) + 1));
  return (static_cast<double>(bits >> 12) + 0.5) * 0x1p-52;
}

// The largest of some logits, and whether one is NaN. Lane by lane, so that the compiler uses registers as
// wide as it may: one running index instead takes 0.3 ms for 160 thousand logits, 2 % of a decode step; this
// 0.04.
struct Largest {
  float value = -kInfinity;
  bool nan = false;
};
Largest largest(std::span<const float> x) {
  constexpr size_t kLanes = 16;
  float top[kLanes];
  int nan[kLanes] = {};
  std::fill(top, top + kLanes, -kInfinity);
  const size_t whole = x.size() / kLanes * kLanes;
  for (size_t i = 0; i < whole; i += kLanes)
    for (size_t j = 0; j < kLanes; ++j) {
      top[j] = x[i + j] > top[j] ? x[i + j] : top[j];
      nan[j] |= x[i + j] != x[i + j];
    }
  Largest all;
  const auto add = [&all](float value, bool is_nan) {
    all.value = value > all.value ? value : all.value;
    all.nan |= is_nan;
  };
  for (size_t j = 0; j < kLanes; ++j) add(top[j], nan[j]);
  for (size_t i = whole; i < x.size(); ++i) add(x[i], std::isnan(x[i]));
  return all;
}

int32_t checked_argmax(std::span<const float> logits) {
  constexpr size_t kBlock = 4096;
  Largest all;
  size_t from = 0;  // where the first block with the largest begins
  for (size_t i = 0; i < logits.size(); i += kBlock) {
    const Largest block = largest(logits.subspan(i, std::min(kBlock, logits.size() - i)));
    all.nan |= block.nan;
    if (block.value > all.value) all.value = block.value, from = i;
  }
  if (all.nan) {
    const auto at = std::ranges::find_if(logits, [](float x) { return std::isnan(x); });
    fail("the logit of token {} is NaN", at - logits.begin());
  }
  const auto best =
      static_cast<int32_t>(std::find(logits.begin() + from, logits.end(), all.value) - logits.begin());
  if (all.value == kInfinity) fail("the logit of token {} is +inf", best);
  if (all.value == -kInfinity) fail("all {} logits are -inf: no token is possible", logits.size());
  return best;
}

double log_sum_exp(std::span<const float> logits, float largest) {
  double sum = 0;
  for (float x : logits) sum += std::exp(static_cast<double>(x) - largest);
  return largest + std::log(sum);
}

std::vector<TokenLogprob> likeliest(std::span<const float> logits, int n, double normalizer) {
  std::vector<int32_t> ids(logits.size());
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
  n = std::min<int>(n, static_cast<int>(ids.size()));
  std::partial_sort(ids.begin(), ids.begin() + n, ids.end(), [&](int32_t a, int32_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  std::vector<TokenLogprob> result;
  for (int i = 0; i < n; ++i) result.push_back({ids[i], static_cast<float>(logits[ids[i]] - normalizer)});
  return result;
}

// Likeliest first.
constexpr auto kBefore = [](const auto& a, const auto& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.token < b.token;
};

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

Sampler::Sampler(int vocab, int known)
    : known_(static_cast<size_t>(std::min(vocab, known))), counts_(vocab, 0) {}

// The row with bias and penalties applied: `logits` itself when there are none.
std::span<const float> Sampler::adjust(const SamplingParams& params, std::span<const float> logits,
                                       const History& history) {
  const bool repetition = params.repetition_penalty != 1;
  const bool counting = params.presence_penalty != 0 || params.frequency_penalty != 0;
  if (!repetition && !counting && params.logit_bias.empty()) return logits;
  for (int32_t token : history.tokens)
    WEFT_CHECK(token >= 0 && token < static_cast<int32_t>(counts_.size()), "token {} in the history", token);
  adjusted_.assign(logits.begin(), logits.end());
  for (const auto& [token, bias] : params.logit_bias) adjusted_[token] += static_cast<float>(bias);
  if (repetition) {
    for (int32_t token : history.tokens) {
      float& x = adjusted_[token];
      if (counts_[token]++ == 0)
        x *= static_cast<float>(x > 0 ? 1 / params.repetition_penalty : params.repetition_penalty);
    }
    for (int32_t token : history.tokens) counts_[token] = 0;
  }
  if (counting) {
    const auto output = history.tokens.subspan(history.prompt);
    for (int32_t token : output) ++counts_[token];
    for (int32_t token : output) {
      if (counts_[token] == 0) continue;
      adjusted_[token] -=
          static_cast<float>(params.presence_penalty + params.frequency_penalty * counts_[token]);
      counts_[token] = 0;
    }
  }
  return adjusted_;
}

void Sampler::top_k(int64_t k) {
  if (k <= 0 || k >= static_cast<int64_t>(candidates_.size())) return;
  std::nth_element(candidates_.begin(), candidates_.begin() + k, candidates_.end(), kBefore);
  candidates_.resize(k);
}

void Sampler::top_p(double p) {
  if (p >= 1) return;
  // In order of ids, or of top_k's selection: either way the same sum for the same row.
  double total = 0;
  for (const Candidate& c : candidates_) total += c.weight;
  // The set is small nearly always, so the head is sorted in growing pieces instead of the whole
  // vocabulary at once.
  const size_t n = candidates_.size();
  double sum = 0;
  for (size_t sorted = 0, piece = 256; sorted < n; piece *= 8) {
    const size_t end = std::min(n, sorted + piece);
    const auto begin = candidates_.begin();
    if (end < n) std::nth_element(begin + sorted, begin + end, candidates_.end(), kBefore);
    std::sort(begin + sorted, begin + end, kBefore);
    for (; sorted < end; ++sorted) {
      sum += candidates_[sorted].weight;
      if (sum >= p * total) return candidates_.resize(sorted + 1);
    }
  }
}

int32_t Sampler::draw(uint64_t seed, uint64_t position) const {
  const uint64_t key = scramble(scramble(seed + kGolden) + kGolden * (position + 1));
  double best = std::numeric_limits<double>::infinity();  // E / weight
  int32_t winner = candidates_.front().token;
  for (const Candidate& c : candidates_) {
    const double u = uniform(key, c.token);
    // -log(1 - u) >= u: nearly all tokens lose without a logarithm.
    if (c.weight == 0 || u > best * c.weight) continue;
    const double finish = -std::log1p(-u) / c.weight;
    if (finish < best || (finish == best && c.token < winner)) {
      best = finish;
      winner = c.token;
    }
  }
  return winner;
}

Sample Sampler::sample(const SamplingParams& params, std::span<const float> all, const History& history) {
  WEFT_CHECK(all.size() == counts_.size(), "{} logits for {} tokens", all.size(), counts_.size());
  WEFT_CHECK(history.prompt <= history.tokens.size());
  const std::span<const float> logits = all.first(known_);
  const int32_t first = checked_argmax(logits);
  const std::span<const float> row = adjust(params, all, history).first(known_);
  const int32_t best = row.data() == logits.data() ? first : checked_argmax(row);

  Sample sample;
  sample.token = best;
  if (!params.greedy()) {
    candidates_.clear();
    for (size_t i = 0; i < row.size(); ++i)
      if (row[i] > -kInfinity) candidates_.push_back({row[i], static_cast<int32_t>(i), 0});
    top_k(params.top_k);
    for (Candidate& c : candidates_)
      c.weight = std::exp((static_cast<double>(c.logit) - row[best]) / params.temperature);
    top_p(params.top_p);
    if (params.min_p > 0)
      std::erase_if(candidates_, [&](const Candidate& c) { return c.weight < params.min_p; });
    sample.token = draw(params.seed, history.tokens.size());
  }
  if (params.logprobs >= 0) {
    const double normalizer = log_sum_exp(logits, logits[first]);
    sample.logprob = static_cast<float>(logits[sample.token] - normalizer);
    if (params.logprobs > 0) sample.alternatives = likeliest(logits, params.logprobs, normalizer);
  }
  return sample;
}

}  // namespace weft
