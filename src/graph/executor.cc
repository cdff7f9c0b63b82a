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
// Nodes whose arguments are asked for ahead: the weights of a step push them out of the nearer caches.
constexpr int kFetchAhead = 3;

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
      tasks_(graph.nodes().size()),
      progress_(std::make_unique<Progress[]>(graph.nodes().size())),
      threads_(std::make_unique<PerThread[]>(team.threads())) {
  size_t widest = 0;
  for (int i = 0; i < graph.stages(); ++i) widest = std::max(widest, graph.stage(i).size());
  starts_.resize(widest + 1);
  for (const Node& node : graph.nodes()) {
    if (node.grows) growing_.push_back(static_cast<int>(after_begin_.size()));
    after_begin_.push_back(static_cast<int>(after_.size()));
    after_.insert(after_.end(), node.after.begin(), node.after.end());
    calls_.push_back({node.invoke, node.kernel, node.args.data(), static_cast<int>(node.args.size())});
  }
  after_begin_.push_back(static_cast<int>(after_.size()));
  followers_.assign(tasks_.size(), -1);
  follows_.assign(tasks_.size(), false);
  for (int i = 0; i < static_cast<int>(tasks_.size()); ++i) {
    const std::vector<int>& after = graph.nodes()[i].after;
    if (after.size() != 1 || followers_[after[0]] >= 0) continue;
    followers_[after[0]] = i;
    follows_[i] = true;
  }
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
  return std::min(kMostTasks, task_count(units, node.cost(node.args.data(), step), team_.threads()));
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
  if (&plan != plan_) std::copy(plan.tasks.begin(), plan.tasks.end(), tasks_.begin());
  plan_ = &plan;
  for (const int i : growing_) tasks_[i] = static_cast<uint16_t>(tasks_of(graph_.nodes()[i], step));
}

void Executor::run(const StepHeader& step) {
  const auto begin = Clock::now();
  if (trace_) trace_->begin_step(step);
  set_tasks(step);
  if (mode_ == ExecMode::super) {
    ++stats_.joins;
    turn_ ^= 1;
    team_.run(team_.threads(), [&](int, int thread) { work(thread, step); });
  } else if (mode_ == ExecMode::streams) {
    for (int i = 0; i < graph_.stages(); ++i) run_stage(graph_.stage(i), step);
  } else {
    for (int i = 0; i < static_cast<int>(graph_.nodes().size()); ++i) {
      const int tasks = tasks_[i];
      stats_.joins += tasks > 1;
      team_.run(tasks, [&](int task, int thread) { run_task(i, task, thread, step); });
    }
  }
  ++stats_.steps;
  stats_.seconds += since(begin);
}

void Executor::run_task(int index, int task, int thread, const StepHeader& step) {
  const NodeCall& node = calls_[index];
  const Call call{&step, task, tasks_[index], scratch_.as<std::byte>(kScratchBytes * thread)};
  ++threads_[thread].tasks;
  if (!trace_) {
    node.invoke(node.kernel, node.args, call);
    return;
  }
  const auto begin = Trace::now();
  node.invoke(node.kernel, node.args, call);
  trace_->record(thread, {index, task, begin, Trace::now()});
}

void Executor::run_stage(const std::vector<int>& nodes, const StepHeader& step) {
  int total = 0;
  for (size_t i = 0; i < nodes.size(); ++i) {
    starts_[i] = total;
    total += tasks_[nodes[i]];
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

// A node without work still completes after what it waits for: others may wait for those through it alone.
int Executor::claims(int node) const {
  return std::max<int>(1, tasks_[node]);
}

// Nobody claims such a node: it is one task that waits for one node, and whoever completes that goes on with
// it. (Half of the nodes of a decode step are; claimed as all others an empty step took 1.25 times as long.)
bool Executor::follows(int node) const {
  return follows_[node] && tasks_[node] <= 1;
}

bool Executor::ready(int node) const {
  for (int i = after_begin_[node]; i < after_begin_[node + 1]; ++i)
    if (progress_[after_[i]].turn[turn_].done.load() < claims(after_[i])) return false;
  return true;
}

// A task of the first node that has one; nodes before `first` have none left. Tasks are claimed one by one
// and only when they can run, so a thread that the system takes away holds up nothing it has not begun. (In
// shares of what is left two threads met as often: 0.1 us a task either way.)
Executor::Claim Executor::claim(int& first) {
  const int nodes = static_cast<int>(tasks_.size());
  const auto exhausted = [&](int node) {
    return follows(node) ||
           progress_[node].turn[turn_].claimed.load(std::memory_order_relaxed) >= claims(node);
  };
  while (first < nodes && exhausted(first)) ++first;
  for (int i = first; i < std::min(nodes, first + kLookAhead); ++i) {
    if (exhausted(i) || !ready(i)) continue;
    const int task = progress_[i].turn[turn_].claimed.fetch_add(1, std::memory_order_relaxed);
    if (task < claims(i)) return {i, task};
  }
  return {};
}

// Runs a claimed task and, if told to, those of the same node that others leave: then what is done is counted
// once.
void Executor::run_claimed(Claim claim, bool others, int thread, const StepHeader& step) {
  Progress& p = progress_[claim.node];
  const int tasks = claims(claim.node);
  const int end = std::min(static_cast<int>(calls_.size()), claim.node + 1 + kFetchAhead);
  for (int i = claim.node + 1; i < end; ++i)
    for (int at = 0; at < calls_[i].bytes; at += 64) __builtin_prefetch(calls_[i].args + at);
  int did = 0;
  for (int task = claim.task; task < tasks;) {
    if (tasks_[claim.node] > 0) run_task(claim.node, task, thread, step);
    ++did;
    if (!others || task + 1 == tasks) break;
    task = p.turn[turn_].claimed.fetch_add(1, std::memory_order_relaxed);
  }
  if (p.turn[turn_].done.fetch_add(static_cast<uint16_t>(did)) + did < tasks) return;
  complete(claim.node, thread, step);
}

// What waits for the node may run now; its follower does, here.
void Executor::complete(int node, int thread, const StepHeader& step) {
  for (;;) {
    Progress::Turn& next_step = progress_[node].turn[turn_ ^ 1];
    next_step.claimed.store(0, std::memory_order_relaxed);
    next_step.done.store(0, std::memory_order_relaxed);
    if (sleepers_.load() > 0) {  // they look again after they are counted
      wakes_.fetch_add(1);
      futex_wake(wakes_, team_.threads());
    }
    node = followers_[node];
    if (node < 0 || !follows(node)) return;
    if (tasks_[node] > 0) run_task(node, 0, thread, step);
    progress_[node].turn[turn_].done.store(1);
  }
}

void Executor::work(int thread, const StepHeader& step) {
  for (int first = 0;;) {
    Claim next = claim(first);
    if (next.node < 0) next = wait(first, threads_[thread], step);
    if (next.node < 0) return;
    run_claimed(next, next.node == first, thread, step);
  }
}

// For a task, or until all are taken.
Executor::Claim Executor::wait(int& first, PerThread& mine, const StepHeader& step) {
  const int nodes = static_cast<int>(tasks_.size());
  if (first == nodes) return {};
  fetch_next(first, step);
  const auto begin = Clock::now();
  Claim next;
  const auto over = [&] {
    next = claim(first);
    return next.node >= 0 || first == nodes;
  };
  if (!spin_until(over)) {
    sleepers_.fetch_add(1);
    for (uint32_t seen; seen = wakes_.load(), !over();) futex_wait(wakes_, seen);
    sleepers_.fetch_sub(1);
  }
  ++mine.waits;
  mine.idle += since(begin);
  return next;
}

// The weights that the next task of the first node ahead begins with: inputs may be missing, they are there.
void Executor::fetch_next(int first, const StepHeader& step) const {
  const int task = progress_[first].turn[turn_].claimed.load(std::memory_order_relaxed),
            tasks = tasks_[first];
  if (task >= tasks) return;
  const Node& node = graph_.nodes()[first];
  const FirstWeights next = node.first_weights(node.args.data(), step, task, tasks);
  for (int i = 0; i < next.pieces; ++i)
    for (int line = 0; line < kFirstBytes; line += 64) __builtin_prefetch(next.at + i * next.stride + line);
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
