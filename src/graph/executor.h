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
  // How many tasks of a node are taken and done, for two steps in turn: whoever completes a node clears the
  // counters of the next step while the line is in its cache (clearing all before a step took 0.1 us per
  // node). Eight nodes share a line, so what one thread changes and the other looks for next moves between
  // them at once.
  struct Progress {
    struct Turn {
      std::atomic<uint16_t> claimed{0};  // latecomers drive it above the number of tasks
      std::atomic<uint16_t> done{0};
    } turn[2];
  };
  static constexpr int kMostTasks = 1 << 15;
  struct NodeCall {  // what running a task needs of a node
    void (*invoke)(const void* kernel, const void* args, const Call& call);
    const void* kernel;
    const std::byte* args;
    int bytes;
  };
  struct Claim {
    int node = -1, task = 0;  // node -1: none
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
  void work(int thread, const StepHeader& step);
  Claim claim(int& first);
  Claim wait(int& first, PerThread& mine, const StepHeader& step);
  void run_claimed(Claim claim, bool others, int thread, const StepHeader& step);
  void complete(int node, int thread, const StepHeader& step);
  bool follows(int node) const;
  bool ready(int node) const;
  int claims(int node) const;
  void fetch_next(int first, const StepHeader& step) const;

  Team& team_;
  const Graph& graph_;
  const ExecMode mode_;
  Buffer scratch_;                            // kScratchBytes per thread
  std::vector<std::unique_ptr<Plan>> plans_;  // by kind
  const Plan* plan_ = nullptr;                // that tasks_ comes from
  std::vector<int> growing_;                  // nodes
  std::vector<int> starts_;                   // of a stage: first task of each of its nodes
  std::vector<uint16_t> tasks_;               // per node, in this step
  std::vector<NodeCall> calls_;               // per node
  std::vector<int> after_, after_begin_;      // what nodes wait for, one list behind the other
  std::vector<int> followers_;                // per node: the first that waits for it alone, or -1
  std::vector<uint8_t> follows_;              // per node: is one
  std::unique_ptr<Progress[]> progress_;      // per node
  int turn_ = 0;                              // of this step
  std::unique_ptr<PerThread[]> threads_;
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<uint32_t> wakes_{0};
  ExecStats stats_;
  Trace* trace_ = nullptr;
};

}  // namespace weft
