// Runs the steps of one planned graph on a team.
//
// How many tasks a node is cut into is captured once per kind of step and replayed: a replayed step allocates
// nothing, asks no kernel what it costs (but those that grow with the context) and decides nothing but who
// takes which task.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <string_view>
#include <vector>

#include "base/memory.h"
#include "base/team.h"
#include "graph/graph.h"
#include "graph/trace.h"

namespace weft {

// Three ways to run the same kernels, with the same bits.
enum class ExecMode : uint8_t {
  ops,      // one node after another, a fork and join for each
  streams,  // one stage after another: its nodes do not depend on each other and run side by side
  super,    // one parallel region: whoever is free takes a task of the first node whose inputs are complete
};
ExecMode exec_mode(std::string_view name);  // usage error for anything else
const char* exec_name(ExecMode mode);

struct ExecStats {
  int64_t steps = 0, captures = 0;
  int64_t tasks = 0;
  int64_t joins = 0;   // times the whole team was forked and joined
  int64_t waits = 0;   // super: times a thread found nothing to do before the step's end
  double seconds = 0;  // of all steps
  double idle = 0;     // super: thread-seconds of those waits
};

class Executor {
 public:
  Executor(Team& team, const Graph& graph, ExecMode mode);
  // The graph must be patched.
  void run(const StepHeader& step);

  ExecMode mode() const { return mode_; }
  ExecStats stats() const;
  void reset_stats();
  // Records every task until it is set to null.
  void trace(Trace* trace) { trace_ = trace; }

 private:
  // Kinds of steps: tokens, spans and logit rows, each rounded up to a power of two, zero apart. What makes a
  // node's units zero (no logit rows) must be part of the kind: a captured zero is not asked again.
  static constexpr int kKinds = 12;
  static int kind_of(const StepHeader& step);
  struct Plan {
    std::vector<uint16_t> tasks;  // per node
  };
  // Of the step that runs; each on its own cache line, as threads hammer them at different moments.
  struct alignas(64) Progress {
    std::atomic<int> unclaimed{0};
    std::atomic<int> left{0};
    int tasks = 0;
  };
  struct alignas(64) PerThread {
    int64_t tasks = 0, waits = 0;
    double idle = 0;
  };

  int tasks_of(const Node& node, const StepHeader& step) const;
  const Plan& plan_for(const StepHeader& step);
  void set_tasks(const StepHeader& step);
  void run_task(int node, int task, int thread, const StepHeader& step);
  void run_stage(const std::vector<int>& nodes, const StepHeader& step);
  void run_super(const StepHeader& step);
  void work(int thread, const StepHeader& step);
  bool ready(int node) const;
  bool claim(int node, int thread, const StepHeader& step);
  void wait(uint32_t seen, PerThread& mine);
  void fetch_next(int first, const StepHeader& step) const;

  Team& team_;
  const Graph& graph_;
  const ExecMode mode_;
  Buffer scratch_;                            // kScratchBytes per thread
  std::vector<std::unique_ptr<Plan>> plans_;  // by kind
  std::unique_ptr<Progress[]> progress_;      // per node
  std::unique_ptr<PerThread[]> threads_;
  std::vector<int> starts_;                         // of a stage: first task of each of its nodes
  alignas(64) std::atomic<uint32_t> completed_{0};  // nodes, over all steps
  std::atomic<int> sleepers_{0};
  ExecStats stats_;
  Trace* trace_ = nullptr;
};

}  // namespace weft
