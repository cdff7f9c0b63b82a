#include "graph/executor.h"

#include <algorithm>
#include <bit>
#include <chrono>

#include "base/wait.h"

namespace weft {
namespace {

using Clock = std::chrono::steady_clock;
double since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// How far a thread looks past nodes that are not ready: side branches lie a few nodes behind the main chain.
constexpr int kLookAhead = 12;

// 0, 1, 2, 3-4, 5-8, ... as 0, 1, 2, 3, 4
int rounded(int n) {
  return n > 0 ? std::bit_width(static_cast<unsigned>(n - 1)) + 1 : 0;
}

}  // namespace

ExecMode exec_mode(std::string_view name) {
  for (const ExecMode mode : {ExecMode::ops, ExecMode::streams, ExecMode::super})
    if (name == exec_name(mode)) return mode;
  usage("--exec {}: expected ops, streams or super", name);
}

const char* exec_name(ExecMode mode) {
  return mode == ExecMode::ops ? "ops" : mode == ExecMode::streams ? "streams" : "super";
}

Executor::Executor(Team& team, const Graph& graph, ExecMode mode)
    : team_(team),
      graph_(graph),
      mode_(mode),
      scratch_(kScratchBytes * team.threads(), "kernel scratch"),
      plans_(kKinds * kKinds * kKinds),
      progress_(std::make_unique<Progress[]>(graph.nodes().size())),
      threads_(std::make_unique<PerThread[]>(team.threads())) {
  size_t widest = 0;
  for (int i = 0; i < graph.stages(); ++i) widest = std::max(widest, graph.stage(i).size());
  starts_.resize(widest + 1);
}

int Executor::kind_of(const StepHeader& step) {
  const int kind[] = {rounded(step.tokens), rounded(step.spans), rounded(step.logit_rows)};
  int at = 0;
  for (const int k : kind) {
    WEFT_CHECK(k < kKinds, "{} tokens, {} spans, {} logit rows", step.tokens, step.spans, step.logit_rows);
    at = at * kKinds + k;
  }
  return at;
}

int Executor::tasks_of(const Node& node, const StepHeader& step) const {
  const int units = node.units(node.args.data(), step);
  return task_count(units, node.cost(node.args.data(), step), team_.threads());
}

const Executor::Plan& Executor::plan_for(const StepHeader& step) {
  std::unique_ptr<Plan>& plan = plans_[kind_of(step)];
  if (!plan) {
    plan = std::make_unique<Plan>();
    for (const Node& node : graph_.nodes())
      plan->tasks.push_back(static_cast<uint16_t>(tasks_of(node, step)));
    ++stats_.captures;
  }
  return *plan;
}

void Executor::set_tasks(const StepHeader& step) {
  const Plan& plan = plan_for(step);
  const std::vector<Node>& nodes = graph_.nodes();
  for (size_t i = 0; i < nodes.size(); ++i)
    progress_[i].tasks = nodes[i].grows ? tasks_of(nodes[i], step) : plan.tasks[i];
}

void Executor::run(const StepHeader& step) {
  const auto begin = Clock::now();
  if (trace_) trace_->begin_step(step);
  set_tasks(step);
  if (mode_ == ExecMode::super) {
    run_super(step);
  } else if (mode_ == ExecMode::streams) {
    for (int i = 0; i < graph_.stages(); ++i) run_stage(graph_.stage(i), step);
  } else {
    for (int i = 0; i < static_cast<int>(graph_.nodes().size()); ++i) {
      const int tasks = progress_[i].tasks;
      stats_.joins += tasks > 1;
      team_.run(tasks, [&](int task, int thread) { run_task(i, task, thread, step); });
    }
  }
  ++stats_.steps;
  stats_.seconds += since(begin);
}

void Executor::run_task(int index, int task, int thread, const StepHeader& step) {
  const Node& node = graph_.nodes()[index];
  const Call call{&step, task, progress_[index].tasks, scratch_.as<std::byte>(kScratchBytes * thread)};
  ++threads_[thread].tasks;
  if (!trace_) {
    node.invoke(node.kernel, node.args.data(), call);
    return;
  }
  const auto begin = Trace::now();
  node.invoke(node.kernel, node.args.data(), call);
  trace_->record(thread, {index, task, begin, Trace::now()});
}

void Executor::run_stage(const std::vector<int>& nodes, const StepHeader& step) {
  int total = 0;
  for (size_t i = 0; i < nodes.size(); ++i) {
    starts_[i] = total;
    total += progress_[nodes[i]].tasks;
  }
  stats_.joins += total > 1;
  team_.run(total, [&](int task, int thread) {
    const auto after =
        std::upper_bound(starts_.begin(), starts_.begin() + static_cast<long>(nodes.size()), task);
    const size_t i =
        static_cast<size_t>(after - starts_.begin()) - 1;  // the last that starts here: empty ones come first
    run_task(nodes[i], task - starts_[i], thread, step);
  });
}

void Executor::run_super(const StepHeader& step) {
  for (size_t i = 0; i < graph_.nodes().size(); ++i) {
    // A node without work still completes after what it waits for: others may wait for those through it
    // alone.
    const int tasks = std::max(1, progress_[i].tasks);
    progress_[i].left.store(tasks, std::memory_order_relaxed);
    progress_[i].unclaimed.store(tasks, std::memory_order_relaxed);
  }
  ++stats_.joins;
  team_.run(team_.threads(), [&](int, int thread) { work(thread, step); });
}

bool Executor::ready(int node) const {
  for (const int before : graph_.nodes()[node].after)
    if (progress_[before].left.load(std::memory_order_acquire) != 0) return false;
  return true;
}

// Runs one task of the node if there is one left. Tasks are claimed only when they can run, so a thread that
// the system takes away holds up nothing it has not begun.
bool Executor::claim(int node, int thread, const StepHeader& step) {
  Progress& p = progress_[node];
  if (p.unclaimed.load(std::memory_order_relaxed) <= 0 || !ready(node)) return false;
  const int left = p.unclaimed.fetch_sub(1, std::memory_order_relaxed);
  if (left <= 0) return false;
  if (p.tasks > 0) run_task(node, p.tasks - left, thread, step);
  if (p.left.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    completed_.fetch_add(1);
    if (sleepers_.load() > 0) futex_wake(completed_, team_.threads());
  }
  return true;
}

void Executor::work(int thread, const StepHeader& step) {
  PerThread& mine = threads_[thread];
  const int nodes = static_cast<int>(graph_.nodes().size());
  for (int first = 0;;) {
    // Read before looking: a node that has unclaimed tasks now completes after it, so that wait() cannot miss
    // the last.
    const uint32_t seen = completed_.load();
    while (first < nodes && progress_[first].unclaimed.load(std::memory_order_relaxed) <= 0) ++first;
    if (first == nodes) return;
    bool found = false;
    for (int i = first; !found && i < std::min(nodes, first + kLookAhead); ++i)
      found = claim(i, thread, step);
    if (found) continue;
    fetch_next(first, step);
    wait(seen, mine);
  }
}

// The weights that the next task of the first node ahead begins with: inputs may be missing, they are there.
void Executor::fetch_next(int first, const StepHeader& step) const {
  const int unclaimed = progress_[first].unclaimed.load(std::memory_order_relaxed),
            tasks = progress_[first].tasks;
  if (unclaimed <= 0 || tasks <= 0) return;
  const Node& node = graph_.nodes()[first];
  const FirstWeights next = node.first_weights(node.args.data(), step, tasks - unclaimed, tasks);
  for (int i = 0; i < next.pieces; ++i)
    for (int line = 0; line < kFirstBytes; line += 64) __builtin_prefetch(next.at + i * next.stride + line);
}

// Until a node completes that had not when `seen` was read.
void Executor::wait(uint32_t seen, PerThread& mine) {
  const auto changed = [&] { return completed_.load(std::memory_order_acquire) != seen; };
  if (changed()) return;
  const auto begin = Clock::now();
  if (!spin_until(changed)) {
    sleepers_.fetch_add(1);
    while (completed_.load() == seen) futex_wait(completed_, seen);
    sleepers_.fetch_sub(1);
  }
  ++mine.waits;
  mine.idle += since(begin);
}

ExecStats Executor::stats() const {
  ExecStats sum = stats_;
  for (int i = 0; i < team_.threads(); ++i) {
    sum.tasks += threads_[i].tasks;
    sum.waits += threads_[i].waits;
    sum.idle += threads_[i].idle;
  }
  return sum;
}

void Executor::reset_stats() {
  stats_ = {};
  for (int i = 0; i < team_.threads(); ++i) threads_[i] = {};
}

}  // namespace weft
