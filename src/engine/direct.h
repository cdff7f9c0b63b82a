// One sequence of one model, driven step by step without requests: for what measures and compares.
#pragma once

#include <memory>
#include <span>

#include "engine/batch.h"
#include "engine/engine.h"

namespace weft {

struct DirectOptions {
  EngineOptions engine;  // sequences and need_tokenizer do not count; on_plan and on_load do
  int max_logits = 1;    // rows of one step whose logits are wanted
  bool trace = false;    // as BuildOptions::trace
};

class Direct {
 public:
  // error: all that Model and check_memory say.
  explicit Direct(const DirectOptions& options);

  // Appends ids to the sequence, at most chunk() of them. prepare(StepHeader&) may name choices to force or
  // see. The logits are in model().logits() until the next step. Needs room(ids).
  template <class F>
  void forward(std::span<const int32_t> ids, WantLogits want, const F& prepare) {
    begin(ids, want);
    prepare(batch_->header());
    model_->run(batch_->header());
    sequence_.commit(static_cast<int>(ids.size()));
  }
  void forward(std::span<const int32_t> ids, WantLogits want) {
    forward(ids, want, [](StepHeader&) {});
  }
  void restart() { sequence_.truncate(0); }

  Model& model() { return *model_; }
  const Model& model() const { return *model_; }
  const ModelConfig& config() const { return model_->config(); }
  const KernelTable& kernels() const { return kernels_; }
  Team& team() { return team_; }
  Caches& caches() { return *caches_; }
  Sequence& sequence() { return sequence_; }
  int chunk() const { return chunk_; }
  int context() const { return context_; }
  int threads() const { return team_.threads(); }
  const MemoryPlan& memory() const { return memory_; }

 private:
  void begin(std::span<const int32_t> ids, WantLogits want);

  const KernelTable& kernels_;
  int chunk_, context_ = 0;
  Team team_;
  MemoryPlan memory_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Caches> caches_;
  std::unique_ptr<Batch> batch_;
  Sequence sequence_;
};

}  // namespace weft
