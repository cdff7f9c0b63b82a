// What ran when: every task of every step, kept in memory and written as Chrome trace JSON (chrome://tracing,
// Perfetto). Process 1 has a row per thread, process 2 a row per stream (the lane of a node in its stage).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "graph/graph.h"

namespace weft {

class Trace {
 public:
  struct Event {
    int node, task;
    int64_t begin, end;  // now()
  };
  // limit: events kept per thread; later ones are dropped.
  Trace(const Graph& graph, int threads, size_t limit = size_t{1} << 18);

  static int64_t now();  // ns
  void begin_step(const StepHeader& step);
  void record(int thread, const Event& event);
  struct NodeSpan {
    int64_t begin = 0, end = 0;  // of its first and its last task; 0: it had none
    Cost cost;
  };
  std::vector<NodeSpan> last_step() const;  // per node
  std::vector<double> busy() const;         // per node: seconds of all its tasks, of all steps
  // error: the file cannot be written.
  void write(const std::string& path) const;

 private:
  struct Step {
    int64_t begin;
    int tokens;
    std::vector<Cost> cost;  // per node
  };
  std::string events() const;
  const Graph& graph_;
  int64_t start_;
  size_t limit_;
  std::vector<std::vector<Event>> threads_;
  std::vector<Step> steps_;
};

}  // namespace weft
