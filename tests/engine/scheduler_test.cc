// What a step is filled with: decode first, prompt chunks cut at absolute multiples of 64, the budget kept.
#include "engine/scheduler.h"

#include <gtest/gtest.h>

#include <map>

namespace weft {
namespace {

struct Fixture {
  // A state of a few bytes: nothing runs here.
  explicit Fixture(int pages, int budget, int sequences = 8)
      : caches({{64}, 64, false}, {pages, sequences, 0, 1024}), batch(budget, sequences, sequences, 1024) {}
  ~Fixture() { sequences.clear(); }

  // A sequence that holds `held` tokens and is given `pending` more.
  void add(int held, int pending) {
    sequences.push_back(caches.create());
    if (held) sequences.back().extend(held), sequences.back().commit(held);
    tokens.push_back(
        std::vector<int32_t>(static_cast<size_t>(held + pending), static_cast<int32_t>(tokens.size())));
  }
  std::vector<Job> jobs() {
    std::vector<Job> out;
    for (size_t i = 0; i < sequences.size(); ++i) out.push_back({&sequences[i], &tokens[i]});
    return out;
  }
  std::vector<Scheduled> step() { return schedule(jobs(), batch); }
  void commit(const std::vector<Scheduled>& work) {
    for (const Scheduled& s : work) sequences[static_cast<size_t>(s.job)].commit(s.tokens);
  }

  Caches caches;
  Batch batch;
  std::vector<Sequence> sequences;
  std::vector<std::vector<int32_t>> tokens;
};

using Taken = std::vector<std::pair<int, int>>;  // job, tokens
Taken taken(const std::vector<Scheduled>& work) {
  Taken out;
  for (const Scheduled& s : work) out.emplace_back(s.job, s.tokens);
  return out;
}

TEST(Scheduler, DecodesBeforePrompts) {
  Fixture f(64, 128);
  f.add(0, 300);
  f.add(10, 1);
  f.add(0, 20);
  f.add(70, 1);
  const auto work = f.step();
  // 126 are left for the prompts: 64 of the first, which ends on a page edge, then all of the short one
  EXPECT_EQ(taken(work), (Taken{{1, 1}, {3, 1}, {0, 64}, {2, 20}}));
  EXPECT_EQ(work[0].logit_row, 0);
  EXPECT_EQ(work[1].logit_row, 1);
  EXPECT_EQ(work[2].logit_row, -1);
  EXPECT_EQ(work[3].logit_row, 2);
  const StepHeader& h = f.batch.header();
  EXPECT_EQ(h.tokens, 86);
  EXPECT_EQ(h.logit_rows, 3);
  EXPECT_EQ(h.logit_row[2], 85);
  EXPECT_EQ(h.position[0], 10);
  EXPECT_EQ(h.position[1], 70);
  EXPECT_EQ(h.token[2], 0);
  EXPECT_EQ(h.token[85], 2);
  f.commit(work);
}

// Whatever the company, a chunk ends at a multiple of 64 or where the prompt ends; nothing is cut to fill a
// step.
TEST(Scheduler, ChunksEndAtMultiplesOf64) {
  for (const int budget : {64, 80, 100, 128, 200, 512})
    for (const int held : {0, 1, 63, 64, 65, 130}) {
      Fixture f(200, budget + 2);
      f.add(5, 1);
      f.add(held, 333);
      f.add(held, 150);
      f.add(9, 1);
      std::map<int, int> steps;
      for (int guard = 0; guard < 100; ++guard) {
        const auto work = f.step();
        if (work.empty()) break;
        EXPECT_LE(f.batch.tokens(), budget + 2);
        for (const Scheduled& s : work) {
          const Sequence& q = f.sequences[static_cast<size_t>(s.job)];
          const int end = q.position() + s.tokens,
                    whole = static_cast<int>(f.tokens[static_cast<size_t>(s.job)].size());
          EXPECT_TRUE(end % 64 == 0 || end == whole)
              << "budget " << budget << ", held " << held << ": ends at " << end;
          EXPECT_EQ(s.logit_row >= 0, end == whole);
          ++steps[s.job];
        }
        f.commit(work);
      }
      for (const Job& job : f.jobs()) EXPECT_EQ(job.pending(), 0) << "budget " << budget;
    }
}

// A step too small for a whole page beside the decodes still goes on.
TEST(Scheduler, SmallStepsMakeProgress) {
  Fixture f(64, 16);
  f.add(3, 1);
  f.add(0, 100);
  int steps = 0;
  for (auto work = f.step(); !work.empty() && steps < 100; work = f.step(), ++steps) {
    EXPECT_LE(f.batch.tokens(), 16);
    f.commit(work);
  }
  EXPECT_EQ(f.sequences[1].position(), 100);
  EXPECT_LT(steps, 10);
}

TEST(Scheduler, JobsWithoutPagesArePassedOver) {
  Fixture f(3, 512);
  f.add(64, 1);   // needs a page
  f.add(0, 200);  // needs four
  f.add(0, 30);
  const auto work = f.step();
  EXPECT_EQ(taken(work), (Taken{{0, 1}, {2, 30}}));
  f.commit(work);
}

TEST(Scheduler, NothingToDo) {
  Fixture f(4, 64);
  f.add(10, 0);
  EXPECT_TRUE(f.step().empty());
}

}  // namespace
}  // namespace weft
