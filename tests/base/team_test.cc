#include "base/team.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <time.h>
#include <xmmintrin.h>

#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>

#include "base/check.h"

// Counts this program's allocations, to prove that run() makes none.
static std::atomic<long> allocations{0};
void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes ? bytes : 1)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept {
  std::free(p);
}
void operator delete(void* p, size_t) noexcept {
  std::free(p);
}

namespace weft {
namespace {

// Waits without burning the core the others need.
void nap(int microseconds) {
  timespec time{0, microseconds * 1000L};
  nanosleep(&time, nullptr);
}

// Plain, non-atomic slots: a task run twice or not at all shows, and ThreadSanitizer sees a missing
// hand-over.
void check_runs(Team& team, int runs, int most_tasks) {
  std::vector<int> slot(most_tasks);
  for (int run = 0; run < runs; ++run) {
    int tasks = run % (most_tasks + 1);
    team.run(tasks, [&](int task, int thread) {
      slot[task] += 1;
      for (int i = run % 7 * 20; i > 0; --i) _mm_pause();  // long enough that workers get a share
      ASSERT_TRUE(0 <= thread && thread < team.threads());
    });
    for (int i = 0; i < tasks; ++i) {
      ASSERT_EQ(slot[i], 1) << "run " << run << " task " << i << " of " << tasks;
      slot[i] = 0;
    }
  }
}

TEST(Team, ManySmallRuns) {
  for (int threads : {1, 2, 3}) {
    Team team(threads);
    check_runs(team, 20000, 9);
  }
}

TEST(Team, OversubscribedFinishes) {
  Team team(8, true);
  check_runs(team, 5000, 33);
}

TEST(Team, RunsWithGapsWakeSleepers) {
  Team team(3);
  std::vector<int> slot(6);
  for (int run = 0; run < 200; ++run) {
    team.run(6, [&](int task, int) { slot[task] += 1; });
    nap(run % 2 ? 300 : 60);  // beyond and around the spin time
  }
  EXPECT_EQ(slot, std::vector<int>(6, 200));
}

TEST(Team, CallerSleepsForALongTask) {
  Team team(2);
  for (int run = 0; run < 50; ++run) {
    int finished[2] = {};
    team.run(2, [&](int task, int) {
      if (task == run % 2) nap(400);
      finished[task] = 1;
    });
    ASSERT_EQ(finished[0] + finished[1], 2);
  }
}

TEST(Team, SleepingWorkersAreWokenAndTakePart) {
  Team team(2);
  bool both = false;
  for (int run = 0; run < 200 && !both; ++run) {
    nap(3000);  // the worker has long stopped spinning
    std::atomic<int> by_thread[2] = {};
    team.run(8, [&](int, int thread) {
      nap(200);
      ++by_thread[thread];
    });
    both = by_thread[0] > 0 && by_thread[1] > 0;
    EXPECT_EQ(by_thread[0] + by_thread[1], 8);
  }
  EXPECT_TRUE(both);
}

TEST(Team, NoTwoTasksShareAThreadNumber) {
  Team team(3);
  std::atomic<int> inside[3] = {};
  std::atomic<int> clashes{0};
  for (int run = 0; run < 300; ++run) {
    team.run(12, [&](int, int thread) {
      if (inside[thread].fetch_add(1) != 0) ++clashes;
      nap(1);
      inside[thread].fetch_sub(1);
    });
  }
  EXPECT_EQ(clashes, 0);
}

// A worker stuck in its task (as if preempted) leaves every other task to the caller.
TEST(Team, CallerTakesUnclaimedTasks) {
  Team team(2);
  std::atomic<int> others{0};
  std::atomic<int> stuck{-1};
  for (int run = 0; run < 200 && stuck != 1; ++run) {
    others = 0, stuck = -1;
    team.run(64, [&](int, int thread) {
      int nobody = -1;
      if (thread == 1 && stuck.compare_exchange_strong(nobody, 1)) {
        while (others < 63) nap(50);
        return;
      }
      ++others;
      nap(10);
    });
  }
  EXPECT_EQ(stuck, 1);  // the worker did get a task, and the caller did the other 63
  EXPECT_EQ(others, 63);
}

TEST(Team, AnyThreadMayCallAndInitRunsOncePerThread) {
  static std::atomic<int> inits;
  inits = 0;
  {
    Team team(3, false, [] { ++inits; });
    check_runs(team, 100, 5);
    std::thread([&] { check_runs(team, 100, 5); }).join();
    check_runs(team, 100, 5);
  }
  EXPECT_EQ(inits, 4);  // two workers, two callers
}

TEST(Team, FloatModeIsSetInTasksAndRestored) {
  for (int threads : {1, 3}) {
    Team team(threads);
    for (unsigned own : {0x1F80u, 0x7F80u, 0x9FC0u}) {  // default; rounding to zero; FTZ and DAZ already set
      _mm_setcsr(own);
      std::atomic<int> wrong{0};
      team.run(16, [&](int, int) {
        if ((_mm_getcsr() & ~0x3Fu) != 0x9FC0u) ++wrong;  // sticky exception flags aside
        volatile float tiny = std::numeric_limits<float>::denorm_min();
        volatile float twice = tiny + tiny;
        if (twice != 0.0f) ++wrong;
        nap(20);
      });
      unsigned after = _mm_getcsr();
      _mm_setcsr(0x1F80);
      EXPECT_EQ(after, own);
      EXPECT_EQ(wrong, 0);
    }
  }
}

TEST(Team, RunDoesNotAllocate) {
  Team team(2);
  check_runs(team, 10, 4);
  std::atomic<int> sum{0};
  long before = allocations;
  for (int run = 0; run < 1000; ++run) team.run(4, [&](int task, int) { sum += task; });
  EXPECT_EQ(allocations - before, 0);
  EXPECT_EQ(sum, 6000);
}

TEST(Team, ManyTeamsComeAndGo) {
  for (int i = 0; i < 100; ++i) {
    Team team(1 + i % 4);
    if (i % 3) check_runs(team, 3, 4);
  }
}

using TeamDeathTest = ::testing::Test;

TEST(TeamDeathTest, MisuseIsCaught) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  for (int threads : {1, 2}) {
    auto nested = [&] {
      Team team(threads);
      team.run(2, [&](int, int) { team.run(2, [](int, int) {}); });
    };
    EXPECT_DEATH(nested(), "inside one of its tasks");
    auto throwing = [&] {
      Team team(threads);
      // One task alone: two that throw at once end as "terminate called recursively".
      team.run(2, [](int task, int) {
        if (task == 0) throw std::runtime_error("lost");
      });
    };
    EXPECT_DEATH(throwing(), "lost");
  }
  EXPECT_DEATH(Team(0), "a team of 0 threads");
}

TEST(TeamDeathTest, RefusedThreadIsAnError) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto starved = [] {
    rlimit limit{};
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = 2ull << 30;  // no room for the stacks
    setrlimit(RLIMIT_AS, &limit);
    try {
      Team team(4000);
    } catch (const Error& error) {
      fprintf(stderr, "%s\n", error.what());
      std::_Exit(7);
    }
    std::_Exit(0);
  };
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)  // they need terabytes of address space
  EXPECT_EXIT(starved(), ::testing::ExitedWithCode(7), "the system refused thread .* of 4000");
#else
  (void)starved;
#endif
}

}  // namespace
}  // namespace weft
