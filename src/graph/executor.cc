#include "graph/executor.h"

namespace weft {

Executor::Executor(Team& team) : team_(team), scratch_(kScratchBytes * team.threads()) {}

void Executor::run(const Graph& graph, const StepHeader& step) {
  for (const Node& node : graph.nodes()) {
    const int units = node.units(node.args.data(), step);
    const int tasks = task_count(units, node.cost(node.args.data(), step), team_.threads());
    if (tasks == 0) continue;
    team_.run(tasks, [&](int task, int thread) {
      node.invoke(node.kernel, node.args.data(), {&step, task, tasks, scratch_.as<std::byte>(kScratchBytes * thread)});
    });
  }
}

}  // namespace weft
