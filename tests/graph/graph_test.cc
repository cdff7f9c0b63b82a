// Dependencies, stages and memory of random graphs, and that every way to run them gives the same numbers.
#include "graph/graph.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <set>
#include <thread>

#include "base/check.h"
#include "graph/executor.h"
#include "kernels/kernels.h"

namespace weft {
namespace {

constexpr int kWidth = 8;

// out[i] = sum of the sources + i; every task does its share of the columns, as kernels do.
void add_up(const MixArgs& a, const Call& call) {
  for (int c = call.task * kWidth / call.tasks; c < (call.task + 1) * kWidth / call.tasks; ++c) {
    float sum = static_cast<float>(a.site + c);
    for (int i = 0; i < a.sources; ++i) sum += a.source[i][c] * 0.5f;
    a.out_f32[c] = sum;
  }
}

struct Use {
  Slot slot;
  bool writes;
};
struct RandomGraph {
  Graph graph;
  std::vector<Slot> slots;
  std::vector<std::vector<Use>> uses;  // by node
  Slot result;                         // external

  explicit RandomGraph(std::mt19937& random) {
    const auto below = [&](int n) { return static_cast<int>(random() % static_cast<unsigned>(n)); };
    const int nodes = 2 + below(40);
    result = graph.external("result");
    for (int n = 0; n < nodes; ++n) {
      auto m = graph.make<MixArgs>("mix", "n", &add_up);
      m->width = kWidth, m->rows = Rows::tokens, m->site = n;
      std::vector<Use> mine;
      for (int i = 0; i < 3 && !slots.empty(); ++i) {
        const Slot from = slots[std::max(0, static_cast<int>(slots.size()) - 1 - below(8))];
        m.at(m->source[m->sources++], from);
        mine.push_back({from, false});
      }
      const bool again = !slots.empty() && below(4) == 0;  // a second write of a value
      const bool last = n == nodes - 1;
      Slot to = result;
      if (!last && again)
        to = slots[below(static_cast<int>(slots.size()))];
      else if (!last)
        slots.push_back(to = graph.value("v", sizeof(float) * kWidth * (1 + below(40))));
      m.at(m->out_f32, to);
      mine.push_back({to, true});
      uses.push_back(mine);
      m.add();
    }
    graph.plan();
  }

  // Node a before node b, through any number of others.
  std::vector<std::set<int>> before() const {
    std::vector<std::set<int>> all(graph.nodes().size());
    for (size_t n = 0; n < all.size(); ++n)
      for (const int p : graph.nodes()[n].after) {
        all[n].insert(p);
        all[n].insert(all[p].begin(), all[p].end());
      }
    return all;
  }
};

// 10,000 graphs: whoever touches a value that another writes is ordered with it, and two values that share
// memory are never alive at once, whatever order the dependencies leave open.
TEST(Graph, LifetimesNeverOverlap) {
  std::mt19937 random(7);
  int shared = 0, reordered = 0;
  for (int round = 0; round < 10000; ++round) {
    const RandomGraph g(random);
    const auto before = g.before();
    const int nodes = static_cast<int>(g.uses.size());
    for (int b = 0; b < nodes; ++b)
      for (int a = 0; a < b; ++a) {
        bool ordered = false;
        for (const Use& x : g.uses[a])
          for (const Use& y : g.uses[b])
            ordered = ordered || (x.slot.id == y.slot.id && (x.writes || y.writes));
        if (ordered) {
          ASSERT_TRUE(before[b].count(a)) << "round " << round << ": " << a << " and " << b;
        }
        reordered += !before[b].count(a);
      }
    for (size_t i = 0; i < g.slots.size(); ++i)
      for (size_t j = 0; j < i; ++j) {
        const Graph::Place p = g.graph.place(g.slots[i]), q = g.graph.place(g.slots[j]);
        if (p.offset >= q.offset + q.bytes || q.offset >= p.offset + p.bytes) continue;
        ++shared;
        const Slot first = p.first < q.first ? g.slots[i] : g.slots[j];
        const int begin = std::max(p.first, q.first);
        for (int n = 0; n < nodes; ++n)
          for (const Use& use : g.uses[n])
            if (use.slot.id == first.id) {
              ASSERT_TRUE(before[begin].count(n)) << "round " << round;
            }
      }
  }
  EXPECT_GT(shared, 10000);      // the arena is reused
  EXPECT_GT(reordered, 100000);  // and there was an order to choose
}

TEST(Graph, StagesAreAsEarlyAsDependenciesAllow) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const RandomGraph g(random);
    const auto before = g.before();
    size_t in_stages = 0;
    for (int s = 0; s < g.graph.stages(); ++s) {
      in_stages += g.graph.stage(s).size();
      for (const int n : g.graph.stage(s)) {
        EXPECT_EQ(g.graph.nodes()[n].stage, s);
        for (const int m : g.graph.stage(s)) EXPECT_FALSE(before[n].count(m));
        const auto just_before = [&](int p) { return g.graph.nodes()[p].stage == s - 1; };
        EXPECT_TRUE(s == 0 || std::any_of(before[n].begin(), before[n].end(), just_before));
      }
    }
    EXPECT_EQ(in_stages, g.graph.nodes().size());
  }
}

struct Step {
  int32_t token = 0, position = 0, span_of = 0, row = 0;
  Span span{0, 1, 0, 0, 0};
  StepHeader header;
  Step() {
    header.tokens = header.spans = header.logit_rows = 1;
    header.token = &token, header.position = &position, header.span_of = &span_of, header.span = &span;
    header.logit_row = &row;
  }
};

TEST(Executor, EveryModeGivesTheSameNumbers) {
  std::mt19937 random(11);
  Team one(1), three(3);
  const Step step;
  for (int round = 0; round < 300; ++round) {
    RandomGraph g(random);
    float expected[kWidth], got[kWidth];
    g.graph.bind(g.result, expected);
    Buffer arena(g.graph.arena_bytes() + 64);
    g.graph.patch(arena.as<std::byte>());
    Executor(one, g.graph, ExecMode::ops).run(step.header);
    g.graph.bind(g.result, got);
    g.graph.patch(arena.as<std::byte>());
    for (Team* team : {&one, &three})
      for (const ExecMode mode : {ExecMode::ops, ExecMode::streams, ExecMode::super}) {
        Executor executor(*team, g.graph, mode);
        for (int replay = 0; replay < 3; ++replay) {
          std::fill_n(got, kWidth, -1.f);
          std::fill_n(arena.data(), arena.size(), uint8_t{0xff});
          executor.run(step.header);
          ASSERT_TRUE(std::equal(got, got + kWidth, expected)) << exec_name(mode) << ", round " << round;
        }
        const ExecStats stats = executor.stats();
        EXPECT_EQ(stats.steps, 3);
        EXPECT_EQ(stats.captures, 1);
        EXPECT_GE(stats.tasks, static_cast<int64_t>(3 * g.graph.nodes().size()));
        EXPECT_TRUE(mode != ExecMode::super || stats.joins == 3);
      }
  }
}

// Rows of logits appear only in some steps: a count captured without them must not be replayed with them.
TEST(Executor, KindsOfStepsHaveTheirOwnPlans) {
  Team team(2);
  Graph graph;
  const Slot result = graph.external("result");
  auto m = graph.make<MixArgs>("mix", "logits only", &add_up);
  m->width = kWidth, m->rows = Rows::logits;
  m.at(m->out_f32, result);
  m.add();
  graph.plan();
  float got[kWidth] = {};
  graph.bind(result, got);
  graph.patch(nullptr);
  for (const ExecMode mode : {ExecMode::ops, ExecMode::streams, ExecMode::super}) {
    Executor executor(team, graph, mode);
    Step step;
    step.header.logit_rows = 0;
    std::fill_n(got, kWidth, -1.f);
    executor.run(step.header);
    EXPECT_EQ(got[3], -1.f) << exec_name(mode);
    step.header.logit_rows = 1;
    executor.run(step.header);
    EXPECT_EQ(got[3], 3.f) << exec_name(mode);
    EXPECT_EQ(executor.stats().captures, 2);
  }
}

constexpr int kMany = 32;  // units: a multiple of the tasks of 2 threads, so that none is dropped for equal sizes

// The last word: how many there are. One dawdles, so that the others are done long before it.
void count_task(const GemmArgs& g, const Call& call) {
  int* times = static_cast<int*>(g.out);
  if (call.task == call.tasks / 2) std::this_thread::sleep_for(std::chrono::microseconds(100));
  ++times[call.task];
  if (call.task == 0) times[kMany] = call.tasks;
}
// True if every task before it ran once.
void check_tasks(const MixArgs& m, const Call& call) {
  const int* times = reinterpret_cast<const int*>(m.source[0]);
  const int last = times[kMany];
  *m.out_f32 = static_cast<float>(last) * static_cast<float>(std::count(times, times + last, 1) == last) *
               static_cast<float>(std::count(times + last, times + kMany, 0) == kMany - last);
}

// Steps in turn use and clear each other's counters; more threads than CPUs, so that some sleep.
TEST(Executor, EveryTaskRunsOnceInEveryStep) {
  Graph graph;
  int times[3][kMany + 1];
  float all[3];
  Slot long_node[3], verdict[3];
  for (int i = 0; i < 3; ++i) {
    long_node[i] = graph.external("times"), verdict[i] = graph.external("verdict");
    auto g = graph.make<GemmArgs>("gemm", "long", &count_task);
    g->rows = Rows::logits, g->groups = kMany, g->w.n = 32, g->w.k = 1024;
    if (i) g.at(g->a, verdict[i - 1]);
    g.at(g->out, long_node[i]);
    g.add();
    auto m = graph.make<MixArgs>("mix", "check", &check_tasks);
    m->width = 1, m->rows = Rows::tokens, m->sources = 1;
    m.at(m->source[0], long_node[i]).at(m->out_f32, verdict[i]);
    m.add();
    graph.bind(long_node[i], times[i]), graph.bind(verdict[i], &all[i]);
  }
  graph.plan();
  graph.patch(nullptr);
  for (const int threads : {1, 2, 5}) {
    Team team(threads);
    Executor executor(team, graph, ExecMode::super);
    for (int n = 0; n < 100; ++n) {
      Step step;
      step.header.logit_rows = n % 7 != 3;  // else: nothing to do
      std::fill_n(times[0], 3 * (kMany + 1), 0);
      executor.run(step.header);
      const int tasks = !step.header.logit_rows ? 0 : threads == 1 ? 1 : std::min(kMany, 8 * threads);
      for (const float got : all)
        ASSERT_EQ(got, static_cast<float>(tasks)) << threads << " threads, step " << n;
    }
  }
}

TEST(Executor, NamesItsModes) {
  for (const char* name : {"ops", "streams", "super"}) EXPECT_STREQ(exec_name(exec_mode(name)), name);
  EXPECT_THROW(exec_mode("fast"), UsageError);
}

}  // namespace
}  // namespace weft
