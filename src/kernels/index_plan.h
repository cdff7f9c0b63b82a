// How the indexer cuts a step: rows of one span in tiles that share every key they load, and where there are
// few rows, the keys of each tile in parts. The executor counts tasks by it, the kernel finds its share by
// it.
//
// Static, for the ISA units include it (base/dtype.h says why).
#pragma once

#include "kernels/kernels.h"

namespace weft {

static constexpr int kIndexLists = 64;       // (row, part) lists of one step
static constexpr int kIndexPartKeys = 8192;  // fewer are not worth a list of top-k and its merge

struct IndexPlan {
  int rows;   // of a tile
  int parts;  // of every tile
  int tiles;
};

struct IndexTile {
  int token, rows;
};

static inline IndexPlan index_plan(const IndexArgs& a, const StepHeader& step) {
  IndexPlan plan{32, 1, 0};
  // What one row needs of the scratch: candidates (twice top-k and slack) and the queries of its heads.
  const size_t row = 8 * (2 * static_cast<size_t>(a.topk / a.pool) + 256) +
                     (static_cast<size_t>(a.heads) + 32) * (a.dim + 64) * 4;
  while (plan.rows > 1 && plan.rows * row > kScratchBytes / 4 * 3) plan.rows /= 2;
  int longest = 0;
  for (int i = 0; i < step.spans; ++i) {
    plan.tiles += (step.span[i].length + plan.rows - 1) / plan.rows;
    const int keys = (step.span[i].position + step.span[i].length) / a.pool;
    if (keys > longest) longest = keys;
  }
  if (step.tokens > 0 && step.tokens <= kIndexLists / 2 && longest > a.topk / a.pool) {
    const int most = kIndexLists / step.tokens, wanted = longest / kIndexPartKeys;
    plan.parts = wanted < 1 ? 1 : wanted < most ? wanted : most;
  }
  return plan;
}

static inline IndexTile index_tile(const IndexPlan& plan, const StepHeader& step, int tile) {
  for (int i = 0; i < step.spans; ++i) {
    const int tiles = (step.span[i].length + plan.rows - 1) / plan.rows;
    if (tile < tiles) {
      const int first = tile * plan.rows, left = step.span[i].length - first;
      return {step.span[i].begin + first, left < plan.rows ? left : plan.rows};
    }
    tile -= tiles;
  }
  return {0, 0};
}

}  // namespace weft
