#include "engine/direct.h"

#include "base/check.h"
#include "base/cpu.h"
#include "kernels/dispatch.h"

namespace weft {

Direct::Direct(const DirectOptions& options)
    : kernels_(choose_kernels(options.engine.isa, cpu_features())),
      chunk_(options.engine.chunk),
      team_(options.engine.threads > 0 ? options.engine.threads : default_threads().threads, options.engine.pin,
            kernels_.thread_init) {
  BuildOptions build = build_options(options.engine);
  build.max_logits = options.max_logits;
  build.trace = options.trace;
  model_ = std::make_unique<Model>(options.engine.model, kernels_, build);
  const CacheLimits limits = cache_limits(config(), options.engine.context, 1,
                                          model_->cache_shape().slot_bytes ? options.engine.checkpoints : 0);
  context_ = limits.max_tokens;
  memory_ = model_->memory(limits, threads());
  if (options.engine.on_plan) options.engine.on_plan(memory_);
  if (options.engine.check_memory) check_memory(*model_, memory_);
  caches_ = std::make_unique<Caches>(model_->cache_shape(), limits);
  model_->load(team_, options.engine.on_load, options.engine.cache);
  model_->bind(*caches_, team_);
  batch_ = std::make_unique<Batch>(chunk_, options.max_logits, 1, limits.max_tokens);
  sequence_ = caches_->create();
}

void Direct::begin(std::span<const int32_t> ids, WantLogits want) {
  const int n = static_cast<int>(ids.size());
  WEFT_CHECK(n <= chunk_ && sequence_.can_extend(n), "{} tokens at {} of {}", n, sequence_.position(),
             context_);
  sequence_.extend(n);
  batch_->clear();
  batch_->add(sequence_, ids, want);
}

}  // namespace weft
