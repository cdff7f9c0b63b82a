#include "engine/sampler.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "engine/distribution.h"

namespace weft {

// One row on its way.
struct Sampler::Work {
  Distribution drawn;  // what the token is drawn from
  Distribution own;    // the model's, for logprobs
  std::vector<float> adjusted;
  std::vector<int32_t> counts;  // [vocab], all zero between calls

  std::span<const float> adjust(const SampleRow& row);
  void begin(const SampleRow& row, size_t known);
  std::string settle(const SamplingParams& params);
  void plan(const SampleRow& row);
  int32_t draw(const SamplingParams& params);
  void report(const SamplingParams& params, Sample& sample);

  bool counts_drawn(const SamplingParams& p) const { return !p.greedy() && (keeps_k(p) || p.top_p < 1); }
  bool keeps_k(const SamplingParams& params) const {
    return params.top_k > 0 && params.top_k < static_cast<int64_t>(drawn.logits.size());
  }
};

// The row with bias and penalties applied: `row.logits` itself when there are none.
std::span<const float> Sampler::Work::adjust(const SampleRow& row) {
  const SamplingParams& params = *row.params;
  const bool repetition = params.repetition_penalty != 1;
  const bool counting = params.presence_penalty != 0 || params.frequency_penalty != 0;
  if (!repetition && !counting && params.logit_bias.empty()) return row.logits;
  for (int32_t token : row.history.tokens)
    WEFT_CHECK(token >= 0 && token < static_cast<int32_t>(row.logits.size()), "token {} in the history",
               token);
  adjusted.assign(row.logits.begin(), row.logits.end());
  counts.resize(row.logits.size(), 0);
  for (const auto& [token, bias] : params.logit_bias) adjusted[token] += static_cast<float>(bias);
  if (repetition) {
    for (int32_t token : row.history.tokens) {
      float& x = adjusted[token];
      if (counts[token]++ == 0)
        x *= static_cast<float>(x > 0 ? 1 / params.repetition_penalty : params.repetition_penalty);
    }
    for (int32_t token : row.history.tokens) counts[token] = 0;
  }
  if (counting) {
    const auto output = row.history.tokens.subspan(row.history.prompt);
    for (int32_t token : output) ++counts[token];
    for (int32_t token : output) {
      if (counts[token] == 0) continue;
      adjusted[token] -=
          static_cast<float>(params.presence_penalty + params.frequency_penalty * counts[token]);
      counts[token] = 0;
    }
  }
  return adjusted;
}

void Sampler::Work::begin(const SampleRow& row, size_t known) {
  const SamplingParams& params = *row.params;
  drawn.begin(adjust(row).first(known));
  if (params.logprobs >= 0) own.begin(row.logits.first(known));
}

// The largest logits, and all that can be told from them. The row's error, if it has one.
std::string Sampler::Work::settle(const SamplingParams& params) {
  std::string error = drawn.settle();
  // The k likeliest are found by counting, in buckets of the logits as they are: those of a low temperature
  // would have most of them in the last.
  drawn.masses = !keeps_k(params);
  drawn.likelihood = {drawn.best.logit, drawn.masses ? params.temperature : 1};
  if (params.logprobs >= 0) {
    own.settle();  // an error here is one there
    own.masses = true;
    own.likelihood = {own.best.logit, 1};
  }
  return error;
}

// From the censuses, which tokens are in, out, or to be sorted.
void Sampler::Work::plan(const SampleRow& row) {
  const SamplingParams& params = *row.params;
  if (params.logprobs >= 0) {
    own.merge_census();
    own.open = {0, own.census.reaches_count(params.logprobs)};
  }
  if (params.greedy()) return;
  if (counts_drawn(params)) drawn.merge_census();
  drawn.race = Race(params.seed, row.history.tokens.size(), params.min_p);
  drawn.open = {Likelihood::kBuckets, Likelihood::kLast};  // all run the race
  if (keeps_k(params)) {
    drawn.open = {0, drawn.census.reaches_count(params.top_k)};
  } else if (params.top_p < 1) {
    drawn.open = drawn.census.reaches_mass(params.top_p * drawn.census.total());
  } else if (params.min_p > 0) {
    const double last = -std::log2(params.min_p) * Likelihood::kPerOctave + 1;
    drawn.open.last = static_cast<int>(std::min<double>(last, Likelihood::kLast));
  }
}

// The rest of the draw: filters and race of the listed tokens.
int32_t Sampler::Work::draw(const SamplingParams& params) {
  const bool k = keeps_k(params);
  const Likelihood likelihood(drawn.best.logit, params.temperature);
  drawn.merge_walk(k ? params.top_k : SIZE_MAX);
  std::vector<Candidate>& list = drawn.list;
  if (params.top_p < 1) {
    std::sort(list.begin(), list.end());
    double total = 0, sum = 0;
    if (k) {
      for (const Candidate& c : list) total += likelihood.weight(c.logit);
    } else {
      total = drawn.census.total();
      sum = drawn.census.mass_before(drawn.open.first);
    }
    for (size_t i = 0; i < list.size(); ++i) {
      sum += likelihood.weight(list[i].logit);
      if (sum >= params.top_p * total) list.resize(i + 1);
    }
  }
  for (const Candidate& c : list) {
    const double weight = likelihood.weight(c.logit);
    drawn.race.enter(c.token, weight, [weight] { return weight; });
  }
  return drawn.race.winner();
}

void Sampler::Work::report(const SamplingParams& params, Sample& sample) {
  const double normalizer = own.best.logit + std::log(own.census.total());
  const auto logprob = [&](float logit) { return static_cast<float>(logit - normalizer); };
  sample.logprob = logprob(own.logits[sample.token]);
  if (params.logprobs == 0) return;
  own.merge_walk(params.logprobs);
  std::sort(own.list.begin(), own.list.end());
  for (const Candidate& c : own.list) sample.alternatives.push_back({c.token, logprob(c.logit)});
}

Sampler::Sampler(Team& team, int vocab, int known)
    : team_(team), vocab_(vocab), known_(static_cast<size_t>(std::min(vocab, known))) {}
Sampler::~Sampler() = default;

void Sampler::sample(std::span<SampleRow> rows) {
  const int n = static_cast<int>(rows.size());
  while (work_.size() < rows.size()) work_.push_back(std::make_unique<Work>());
  for (const SampleRow& row : rows) {
    WEFT_CHECK(row.logits.size() == vocab_, "{} logits for {} tokens", row.logits.size(), vocab_);
    WEFT_CHECK(row.history.prompt <= row.history.tokens.size());
  }
  using Several = std::vector<Distribution*>;
  const auto over_chunks = [&](const Several& all, void (Distribution::*pass)(size_t)) {
    const size_t chunks = Distribution::chunks(known_);
    team_.run(static_cast<int>(all.size() * chunks),
              [&](int task, int) { (all[task / chunks]->*pass)(task % chunks); });
  };

  team_.run(n, [&](int i, int) { work_[i]->begin(rows[i], known_); });
  Several all, counted, walked;
  for (int i = 0; i < n; ++i) {
    all.push_back(&work_[i]->drawn);
    if (rows[i].params->logprobs >= 0) all.push_back(&work_[i]->own);
  }
  over_chunks(all, &Distribution::find_largest);
  team_.run(n, [&](int i, int) { rows[i].error = work_[i]->settle(*rows[i].params); });
  for (int i = 0; i < n; ++i) {
    const SamplingParams& params = *rows[i].params;
    Work& work = *work_[i];
    if (!rows[i].error.empty()) continue;
    if (work.counts_drawn(params)) counted.push_back(&work.drawn);
    if (!params.greedy()) walked.push_back(&work.drawn);
    if (params.logprobs >= 0) counted.push_back(&work.own);
    if (params.logprobs > 0) walked.push_back(&work.own);
  }
  over_chunks(counted, &Distribution::count);
  team_.run(n, [&](int i, int) {
    if (rows[i].error.empty()) work_[i]->plan(rows[i]);
  });
  over_chunks(walked, &Distribution::walk);
  team_.run(n, [&](int i, int) {
    const SamplingParams& params = *rows[i].params;
    if (!rows[i].error.empty()) return;
    rows[i].sample.token = params.greedy() ? work_[i]->drawn.best.token : work_[i]->draw(params);
    if (params.logprobs >= 0) work_[i]->report(params, rows[i].sample);
  });
}

}  // namespace weft
