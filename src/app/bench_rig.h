// A sequence of random token ids: what benchmarks of whole steps drive a model with.
#pragma once

#include <algorithm>
#include <random>
#include <vector>

#include "engine/direct.h"

namespace weft {

class BenchRig {
 public:
  explicit BenchRig(const EngineOptions& options) : direct_({one_saved_state(options)}) {}

  void read(int tokens) {
    while (tokens > 0) {
      const int n = std::min(tokens, direct_.chunk());
      step(n, tokens == n ? WantLogits::last : WantLogits::none);
      tokens -= n;
    }
  }
  void generate(int tokens) {
    for (int i = 0; i < tokens; ++i) step(1, WantLogits::last);
  }
  // Makes `depth` tokens the place to come back to.
  void start_at(int depth) {
    direct_.restart();
    read(depth);
    direct_.sequence().checkpoint();
  }
  void back_to(int depth) { direct_.sequence().truncate(depth); }

  // What every kernel of the steps of `work` must move and multiply.
  template <class F>
  std::vector<Cost> costs(const F& work) {
    counting_ = true, costs_.clear();
    work();
    counting_ = false;
    return costs_;
  }

  Direct& direct() { return direct_; }
  Model& model() { return direct_.model(); }

 private:
  static EngineOptions one_saved_state(EngineOptions options) {  // every repeat goes back to the depth
    options.cache.wait = true;  // nothing is written beside what is measured
    options.checkpoints = 1;
    return options;
  }
  void step(int n, WantLogits want) {
    ids_.resize(n);
    std::uniform_int_distribution<int32_t> id(0, model().config().vocab - 1);
    for (int32_t& token : ids_) token = id(random_);
    direct_.forward(ids_, want, [&](const StepHeader& step) {
      if (counting_)
        for (const Node& node : model().parts().graph.nodes())
          costs_.push_back(node.cost(node.args.data(), step));
    });
  }

  Direct direct_;
  std::vector<int32_t> ids_;
  std::mt19937 random_{1};
  bool counting_ = false;
  std::vector<Cost> costs_;
};

}  // namespace weft
