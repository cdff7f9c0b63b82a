// How much work a kernel is, and into how many tasks it is cut. Used by the executor, by bench and by `weft plan`.
// bytes: what must move from or to memory once; flops: multiply and add counted apart.
#pragma once

#include "kernels/kernels.h"

namespace weft {

struct Cost {
  double bytes = 0, flops = 0;
  bool coarse = false;  // a finer cut repeats work or gains nothing: no more tasks than threads
};

int row_count(Rows rows, const StepHeader& step);

Cost cost(const EmbedArgs&, const StepHeader&);
Cost cost(const NormArgs&, const StepHeader&);
Cost cost(const GemmArgs&, const StepHeader&);
Cost cost(const KdaArgs&, const StepHeader&);
Cost cost(const RopeTableArgs&, const StepHeader&);
Cost cost(const RopeArgs&, const StepHeader&);
Cost cost(const LatentArgs&, const StepHeader&);
Cost cost(const IndexKeyArgs&, const StepHeader&);
Cost cost(const IndexArgs&, const StepHeader&);
Cost cost(const IndexMergeArgs&, const StepHeader&);
Cost cost(const IndexPassesArgs&, const StepHeader&);
Cost cost(const RecentArgs&, const StepHeader&);
Cost cost(const AttentionArgs&, const StepHeader&);
Cost cost(const AttentionMergeArgs&, const StepHeader&);
Cost cost(const ExpandedArgs&, const StepHeader&);
Cost cost(const MixArgs&, const StepHeader&);
Cost cost(const MixBankArgs&, const StepHeader&);
Cost cost(const HcPreArgs&, const StepHeader&);
Cost cost(const HcPostArgs&, const StepHeader&);
Cost cost(const HcEndArgs&, const StepHeader&);
Cost cost(const RouteArgs&, const StepHeader&);
Cost cost(const ExpertSortArgs&, const StepHeader&);
Cost cost(const ExpertsArgs&, const StepHeader&);
Cost cost(const CombineArgs&, const StepHeader&);
Cost cost(const CopyArgs&, const StepHeader&);

// The finest cut a kernel allows in this step: rows, panel pairs, (span, head) pairs. 0: nothing to do.
int units(const EmbedArgs&, const StepHeader&);
int units(const NormArgs&, const StepHeader&);
int units(const GemmArgs&, const StepHeader&);
int units(const KdaArgs&, const StepHeader&);
int units(const RopeTableArgs&, const StepHeader&);
int units(const RopeArgs&, const StepHeader&);
int units(const LatentArgs&, const StepHeader&);
int units(const IndexKeyArgs&, const StepHeader&);
int units(const IndexArgs&, const StepHeader&);
int units(const IndexMergeArgs&, const StepHeader&);
int units(const IndexPassesArgs&, const StepHeader&);
int units(const RecentArgs&, const StepHeader&);
int units(const AttentionArgs&, const StepHeader&);
int units(const AttentionMergeArgs&, const StepHeader&);
int units(const ExpandedArgs&, const StepHeader&);
int units(const MixArgs&, const StepHeader&);
int units(const MixBankArgs&, const StepHeader&);
int units(const HcPreArgs&, const StepHeader&);
int units(const HcPostArgs&, const StepHeader&);
int units(const HcEndArgs&, const StepHeader&);
int units(const RouteArgs&, const StepHeader&);
int units(const ExpertSortArgs&, const StepHeader&);
int units(const ExpertsArgs&, const StepHeader&);
int units(const CombineArgs&, const StepHeader&);
int units(const CopyArgs&, const StepHeader&);

// What a task reads first of weights: `pieces` of kFirstBytes, `stride` bytes apart.
inline constexpr int kFirstBytes = 512;
struct FirstWeights {
  const std::byte* at = nullptr;
  size_t stride = 0;
  int pieces = 0;
};
template <class Args>
FirstWeights first_weights(const Args&, const StepHeader&, int,
                           int) {  // others read values of the step first
  return {};
}
FirstWeights first_weights(const GemmArgs&, const StepHeader&, int task, int tasks);

// Whether cost and units depend on the positions of a step, not only on its numbers of rows and spans.
template <class Args>
inline constexpr bool kGrowsWithContext = false;
template <>
inline constexpr bool kGrowsWithContext<IndexArgs> = true;
template <>
inline constexpr bool kGrowsWithContext<IndexMergeArgs> = true;
template <>
inline constexpr bool kGrowsWithContext<AttentionArgs> = true;
template <>
inline constexpr bool kGrowsWithContext<AttentionMergeArgs> = true;
template <>
inline constexpr bool kGrowsWithContext<ExpandedArgs> = true;

// Tasks for `threads` threads: enough to balance, none shorter than about a fork and join.
int task_count(int units, const Cost& cost, int threads);

}  // namespace weft
