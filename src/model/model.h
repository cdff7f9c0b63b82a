// A checkpoint turned into a graph with its weights, ready to run steps.
//
//   Model model(path, kernels, {...});       reads config.json and the headers of the weight files, builds the graph
//   model.memory(limits)                     what everything will take, before any weight is read
//   model.load(team, progress)               packs the weights
//   model.bind(caches)                       gives the graph the caches
//   model.run(step)                          one step; logits of its logit rows afterwards
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/memory.h"
#include "base/team.h"
#include "cache/sequence.h"
#include "graph/executor.h"
#include "model/arch.h"
#include "model/builder.h"
#include "model/checkpoint.h"

namespace weft {

struct MemoryPlan {
  size_t weights = 0;
  size_t latent = 0, index = 0;    // paged caches
  size_t state = 0;                // KDA states, conv tails, k-pool rings of all sequences and checkpoints
  size_t scratch = 0;              // values of one step, logits, per-thread scratch
  size_t total() const { return weights + latent + index + state + scratch; }
};

class Model {
 public:
  // error: everything that is wrong with the folder, its configuration or its tensors' names, shapes and dtypes.
  Model(const std::string& path, const KernelTable& kernels, const BuildOptions& options);

  const ModelConfig& config() const { return config_; }
  const Checkpoint& checkpoint() const { return checkpoint_; }
  const Arch& arch() const { return *arch_; }
  const KernelTable& kernels() const { return builder_->kernels; }
  const Builder& parts() const { return *builder_; }  // graph, weights and cache layout, to inspect
  CacheShape cache_shape() const;
  MemoryPlan memory(const CacheLimits& limits, int threads) const;

  void load(Team& team, const std::function<void(const LoadProgress&)>& progress, const PackCacheOptions& cache = {});
  void bind(Caches& caches, Team& team);

  // Runs one step. Rows of logits() are in the order of step.logit_row. Sets step.nonfinite itself.
  void run(StepHeader step);
  const float* logits(int row) const { return logits_.as<float>() + static_cast<size_t>(row) * builder_->logits_ld; }
  // Where the first NaN or Inf of a token of the last step arose: "layer 3, attention"; empty when nowhere.
  std::string first_nonfinite(int token) const;

  Executor& executor() { return *executor_; }  // after bind(): statistics, traces
  void exec(ExecMode mode);                    // after bind(): from now on

  // Values named by Builder::trace (BuildOptions::trace): rows of the last step.
  const float* trace(const std::string& name) const;
  int trace_width(const std::string& name) const;

 private:
  Checkpoint checkpoint_;
  const Arch* arch_;
  ModelConfig config_;
  std::unique_ptr<Builder> builder_;
  Team* team_ = nullptr;
  std::unique_ptr<Executor> executor_;
  Buffer arena_, logits_;
  std::map<std::string, Buffer> traces_;
  std::vector<int32_t> nonfinite_;
  size_t state_stride_ = 0;
};

}  // namespace weft
