// Runs a graph's nodes one after another on a team.
#pragma once

#include "base/memory.h"
#include "base/team.h"
#include "graph/graph.h"

namespace weft {

class Executor {
 public:
  explicit Executor(Team& team);
  // The graph must be patched. Allocates nothing.
  void run(const Graph& graph, const StepHeader& step);

 private:
  Team& team_;
  Buffer scratch_;  // kScratchBytes per thread
};

}  // namespace weft
