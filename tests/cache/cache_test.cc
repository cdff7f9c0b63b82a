// Both caches and the handle over them against a shadow that simply remembers the tokens of every sequence.
//
// A fake model stands in for the kernels: per token it writes one row of each slab, and folds the token into
// a state whose value depends on every token before it in order. So a row read from a stranger's page, a page
// written while shared, and a state that is ahead of or behind its pages all show.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>

#include "base/check.h"
#include "cache/sequence.h"

namespace weft {
namespace {

constexpr size_t kRows[] = {12, 7, 32};  // bytes per token of each slab; 7 leaves rows unaligned
constexpr int kPooledSlab = 3;           // and one row of 5 bytes for every 4 tokens
constexpr size_t kPooledRow = 5;
constexpr size_t kSlotBytes = 100;  // not a multiple of a cache line

struct State {
  uint64_t hash;
  uint64_t tokens;
};

CacheShape shape(bool truncatable = false) {
  CacheShape shape;
  for (size_t row : kRows) shape.slab_bytes_per_page.push_back(row * kPageTokens);
  shape.slab_bytes_per_page.push_back(kPooledRow * kPageTokens / 4);
  shape.slot_bytes = kSlotBytes;
  shape.truncatable_anywhere = truncatable;
  return shape;
}

uint64_t mix(uint64_t hash, int token) {
  return (hash ^ static_cast<uint64_t>(token + 1)) * 0x9e3779b97f4a7c15ull + 1;
}

std::byte* row(Caches& caches, const Sequence& sequence, int slab, size_t bytes, int t) {
  PagedCache& paged = caches.paged();
  const int32_t page = sequence.block_table()[t / kPageTokens];
  return paged.slab(slab) + page * paged.stride(slab) + (t % kPageTokens) * bytes;
}

std::byte* pooled_row(Caches& caches, const Sequence& sequence, int pool) {
  PagedCache& paged = caches.paged();
  const int per_page = kPageTokens / 4;
  const int32_t page = sequence.block_table()[pool / per_page];
  return paged.slab(kPooledSlab) + page * paged.stride(kPooledSlab) + (pool % per_page) * kPooledRow;
}

std::byte* state_of(Caches& caches, const Sequence& sequence) {
  return caches.states().base() + sequence.state_slot() * caches.states().stride();
}

// What a step of the fake model does for the tokens at position() and after.
void run_model(Caches& caches, const Sequence& sequence, std::span<const int> tokens) {
  State state;
  std::byte* slot = state_of(caches, sequence);
  std::memcpy(&state, slot, sizeof state);
  for (size_t i = 0; i < tokens.size(); ++i) {
    const int t = sequence.position() + static_cast<int>(i);
    for (int slab = 0; slab < 3; ++slab)
      std::memset(row(caches, sequence, slab, kRows[slab], t), tokens[i] + slab, kRows[slab]);
    if (t % 4 == 3) std::memset(pooled_row(caches, sequence, t / 4), tokens[i] + 3, kPooledRow);
    state = {mix(state.hash, tokens[i]), state.tokens + 1};
  }
  std::memcpy(slot, &state, sizeof state);
  std::memcpy(slot + kSlotBytes - sizeof state, &state,
              sizeof state);  // the last bytes of the slot count too
}

bool all_equal(const std::byte* data, size_t bytes, int value) {
  return std::all_of(data, data + bytes, [=](std::byte b) { return b == static_cast<std::byte>(value); });
}

void expect_holds(Caches& caches, const Sequence& sequence, const std::vector<int>& tokens) {
  ASSERT_EQ(sequence.position(), static_cast<int>(tokens.size()));
  ASSERT_EQ(sequence.block_table().size(), (tokens.size() + 63) / 64);
  State expected = {0, 0};
  for (int t = 0; t < sequence.position(); ++t) {
    for (int slab = 0; slab < 3; ++slab)
      ASSERT_TRUE(all_equal(row(caches, sequence, slab, kRows[slab], t), kRows[slab], tokens[t] + slab))
          << "slab " << slab << " row " << t;
    if (t % 4 == 3) {
      ASSERT_TRUE(all_equal(pooled_row(caches, sequence, t / 4), kPooledRow, tokens[t] + 3))
          << "pool " << t / 4;
    }
    expected = {mix(expected.hash, tokens[t]), expected.tokens + 1};
  }
  for (size_t offset : {size_t{0}, kSlotBytes - sizeof(State)}) {
    State state;
    std::memcpy(&state, state_of(caches, sequence) + offset, sizeof state);
    ASSERT_EQ(state.tokens, expected.tokens) << "the state is at another position than the pages";
    ASSERT_EQ(state.hash, expected.hash);
  }
}

std::vector<int> numbers(int n, int first = 1) {
  std::vector<int> tokens(n);
  for (int i = 0; i < n; ++i) tokens[i] = (first + i * 7) % 200;
  return tokens;
}

void step(Caches& caches, Sequence& sequence, std::vector<int>& shadow, const std::vector<int>& tokens) {
  sequence.extend(static_cast<int>(tokens.size()));
  run_model(caches, sequence, tokens);
  sequence.commit(static_cast<int>(tokens.size()));
  shadow.insert(shadow.end(), tokens.begin(), tokens.end());
}

struct Live {
  Sequence sequence;
  std::vector<int> tokens;
  std::set<int> saved;  // where checkpoint() said yes and nothing was cut since; some may have been evicted
};

// The invariants that need no knowledge of what the sequences hold.
void audit(Caches& caches, const std::vector<std::unique_ptr<Live>>& live) {
  std::map<int32_t, int> owners;
  std::set<int> slots;
  for (const auto& one : live) {
    for (int32_t page : one->sequence.block_table()) ++owners[page];
    ASSERT_TRUE(slots.insert(one->sequence.state_slot()).second) << "two sequences share a state slot";
  }
  for (int32_t page = 0; page < caches.paged().pages(); ++page)
    ASSERT_EQ(caches.paged().owners(page), owners.contains(page) ? owners[page] : 0) << "page " << page;
  const CacheUsage usage = caches.usage();
  ASSERT_EQ(usage.pages_used, static_cast<int>(owners.size()));
  ASSERT_EQ(usage.sequences, static_cast<int>(live.size()));
  ASSERT_EQ(caches.states().slots() - caches.states().slots_free(), usage.sequences + usage.checkpoints);
}

struct RandomCase {
  uint32_t seed;
  Poison poison;
  bool truncatable;
};

class RandomOperations : public testing::TestWithParam<RandomCase> {};

// How often each kind of operation really happened, so that a test that refuses everything cannot pass.
struct Tally {
  int steps = 0, straddles = 0, full = 0, failed = 0, abandoned = 0, cuts = 0, refused = 0, forks = 0,
      evictions = 0;
};

class Machine {
 public:
  explicit Machine(const RandomCase& c)
      : random_(c.seed),
        truncatable_(c.truncatable),
        caches_(shape(c.truncatable),
                {.pages = 16, .sequences = 9, .checkpoints = c.seed % 2 ? 4 : 12, .max_tokens = 700},
                c.poison) {}

  void operate() {
    if (live_.empty() || (below(12) == 0 && caches_.can_create())) {
      live_.push_back(std::make_unique<Live>(caches_.create()));
      expect_holds(caches_, live_.back()->sequence, {});
      return;
    }
    Live& one = *live_[below(live_.size())];
    switch (below(10)) {
      case 0:
      case 1:
      case 2:
      case 3:
        return extend(one);
      case 4:
        return fail(one);
      case 5:
        return save(one);
      case 6:
      case 7:
        return cut(one);
      case 8:
        return fork(one);
      case 9:
        if (below(3) == 0) release(one);
    }
  }

  void check_all() {
    audit(caches_, live_);
    for (auto& one : live_) expect_holds(caches_, one->sequence, one->tokens);
  }

  void finish() {
    check_all();
    live_.clear();
    audit(caches_, live_);
    EXPECT_EQ(caches_.paged().pages_free(), caches_.paged().pages());
    EXPECT_EQ(caches_.states().slots_free(), caches_.states().slots());
    EXPECT_EQ(caches_.usage().bytes_used, 0u);
  }

  Tally tally;

 private:
  int below(size_t n) { return static_cast<int>(random_() % n); }

  // Mostly decode steps and chunks that cross a page or end on its edge.
  int step_length(const Sequence& sequence) {
    const int to_edge = kPageTokens - sequence.position() % kPageTokens;
    const int lengths[] = {1, 2, 5, to_edge, to_edge + 1, 64, 63, 130};
    return lengths[below(std::size(lengths))];
  }

  void extend(Live& one) {
    Sequence& sequence = one.sequence;
    const int n = step_length(sequence);
    if (!sequence.can_extend(n)) {
      ++tally.full;
      return;
    }
    const int32_t* address = sequence.block_table().data();
    const auto before = sequence.position();
    sequence.extend(n);
    ASSERT_EQ(sequence.position(), before);
    ASSERT_EQ(sequence.block_table().data(), before ? address : sequence.block_table().data());
    for (int t = before; t < before + n; ++t)
      ASSERT_EQ(caches_.paged().owners(sequence.block_table()[t / kPageTokens]), 1)
          << "about to write a shared page";
    if (below(8) == 0) {
      sequence.abandon();
      ++tally.abandoned;
    } else {
      std::vector<int> tokens(below(4) == 0 ? below(n + 1) : n);  // sometimes fewer than were reserved
      for (int& token : tokens) token = below(250);
      run_model(caches_, sequence, tokens);
      sequence.commit(static_cast<int>(tokens.size()));
      one.tokens.insert(one.tokens.end(), tokens.begin(), tokens.end());
      ++tally.steps;
      tally.straddles +=
          before % kPageTokens != 0 && before / kPageTokens != sequence.position() / kPageTokens;
    }
    expect_holds(caches_, sequence, one.tokens);
  }

  void fail(Live& one) {
    const int n = step_length(one.sequence);
    if (!one.sequence.can_extend(n)) return;
    one.sequence.extend(n);
    const std::vector<int> tokens(truncatable_ ? 0 : below(n + 1), 77);  // the state stops anywhere
    run_model(caches_, one.sequence, tokens);
    const int position = one.sequence.step_failed();
    ASSERT_EQ(position, one.sequence.position());
    ASSERT_TRUE(position == 0 || one.saved.contains(position) || truncatable_) << position;
    drop(one, position);
    expect_holds(caches_, one.sequence, one.tokens);
    ++tally.failed;
  }

  void save(Live& one) {
    const bool full = caches_.usage().checkpoints == caches_.limits().checkpoints;
    ASSERT_TRUE(one.sequence.checkpoint());
    if (!truncatable_) {
      one.saved.insert(one.sequence.position());
      ASSERT_EQ(one.sequence.truncation_point(one.sequence.position()), one.sequence.position());
    }
    tally.evictions += full;
  }

  void cut(Live& one) {
    const int position = one.sequence.position();
    int to = below(position + 1);
    if (!one.saved.empty() && below(2) == 0) to = *std::next(one.saved.begin(), below(one.saved.size()));
    const int point = one.sequence.truncation_point(to);
    ASSERT_LE(point, to);
    if (truncatable_) {
      ASSERT_EQ(point, to);
    } else {
      ASSERT_TRUE(point == 0 || point == position || one.saved.contains(point)) << point;
    }
    if (point != to) {
      EXPECT_THROW(one.sequence.truncate(to), Error);
      expect_holds(caches_, one.sequence, one.tokens);
      ++tally.refused;
      if (below(8) != 0) return;  // short sequences only would never fill the pages
    }
    one.sequence.truncate(point);
    drop(one, point);
    if (!truncatable_ || point == 0) {
      expect_holds(caches_, one.sequence, one.tokens);
    } else {
      // Such a model keeps no state that the cut must restore: give the slot what the fake model would have.
      State state = {0, 0};
      for (int token : one.tokens) state = {mix(state.hash, token), state.tokens + 1};
      std::memcpy(state_of(caches_, one.sequence), &state, sizeof state);
      std::memcpy(state_of(caches_, one.sequence) + kSlotBytes - sizeof state, &state, sizeof state);
    }
    ++tally.cuts;
  }

  void fork(Live& one) {
    if (!caches_.can_create()) return;
    const int pages_free = caches_.paged().pages_free();
    live_.push_back(std::make_unique<Live>(Live{one.sequence.fork(), one.tokens, one.saved}));
    ASSERT_EQ(caches_.paged().pages_free(), pages_free);
    expect_holds(caches_, live_.back()->sequence, one.tokens);
    ++tally.forks;
  }

  void release(Live& one) {
    std::erase_if(live_, [&](const auto& other) { return other.get() == &one; });
  }

  void drop(Live& one, int position) {
    one.tokens.resize(position);
    one.saved.erase(one.saved.upper_bound(position), one.saved.end());
  }

  std::mt19937 random_;
  bool truncatable_;
  Caches caches_;
  std::vector<std::unique_ptr<Live>> live_;  // before caches_ is gone
};

TEST_P(RandomOperations, EqualTheShadow) {
  Machine machine(GetParam());
  for (int i = 0; i < 10000; ++i) {
    machine.operate();
    if (i % 50 == 0) machine.check_all();
    if (HasFatalFailure()) FAIL() << "operation " << i;
  }
  machine.finish();
  const Tally& tally = machine.tally;
  EXPECT_GT(tally.steps, 1000);
  EXPECT_GT(tally.straddles, 200);
  EXPECT_GT(tally.full, 20);
  EXPECT_GT(tally.failed, 100);
  EXPECT_GT(tally.abandoned, 100);
  EXPECT_GT(tally.cuts, 100);
  EXPECT_GT(tally.forks, 50);
  if (!GetParam().truncatable) {
    EXPECT_GT(tally.refused, 100);
    EXPECT_GT(tally.evictions, GetParam().seed % 2 ? 20 : 0);  // even seeds have slots to spare
  }
}

INSTANTIATE_TEST_SUITE_P(
    Seeds, RandomOperations,
    testing::Values(RandomCase{1, Poison::nans, false}, RandomCase{2, Poison::numbers, false},
                    RandomCase{3, Poison::numbers, false}, RandomCase{4, Poison::nans, false},
                    RandomCase{5, Poison::none, false}, RandomCase{6, Poison::nans, true}),
    [](const auto& info) { return "seed" + std::to_string(info.param.seed); });

CacheLimits small() {
  return {.pages = 6, .sequences = 3, .checkpoints = 2, .max_tokens = 300};
}

TEST(Pages, AreZeroedAtFirstAndPoisonedOnRequest) {
  PagedCache plain({10, 3}, 4);
  EXPECT_EQ(plain.bytes(), 52u);
  EXPECT_TRUE(all_equal(plain.slab(0), 40, 0));
  EXPECT_TRUE(all_equal(plain.slab(1), 12, 0));
  PagedCache poisoned({10, 3}, 4, Poison::numbers);
  EXPECT_TRUE(all_equal(poisoned.slab(1), 12, 0x3e));
  const int32_t page = poisoned.take();
  std::memset(poisoned.slab(0) + page * 10, 1, 10);
  poisoned.release(page);
  EXPECT_TRUE(all_equal(poisoned.slab(0), 40, 0x3e));
}

TEST(Pages, LiveAsLongAsTheirLastOwner) {
  PagedCache paged({8}, 2, Poison::nans);
  const int32_t page = paged.take();
  std::memset(paged.slab(0) + page * 8, 5, 8);
  paged.share(page);
  paged.release(page);
  EXPECT_EQ(paged.owners(page), 1);
  EXPECT_EQ(paged.pages_free(), 1);
  EXPECT_TRUE(all_equal(paged.slab(0) + page * 8, 8, 5));
  const int32_t copy = paged.take_copy(page);
  EXPECT_NE(copy, page);
  EXPECT_TRUE(all_equal(paged.slab(0) + copy * 8, 8, 5));
  EXPECT_EQ(paged.pages_free(), 0);
}

TEST(Pages, TooManyAreAnErrorNotAWrap) {
  EXPECT_THROW(PagedCache({size_t{1} << 40, size_t{1} << 40}, 1 << 23), Error);
  EXPECT_THROW(StatePool(size_t{1} << 50, 1 << 20), Error);
}

TEST(PagesDeathTest, CatchWhoTouchesWhatHeDoesNotOwn) {
  PagedCache paged({8}, 2, Poison::nans);
  const int32_t page = paged.take();
  paged.release(page);
  EXPECT_DEATH(paged.release(page), "released twice");
  EXPECT_DEATH(paged.share(page), "is free");
  std::memset(paged.slab(0) + page * 8 + 7, 0, 1);  // a padding row written through a stale table
  EXPECT_DEATH(paged.take(), "written while free");
}

TEST(States, AreNeverHandedOutDirty) {
  for (Poison poison : {Poison::none, Poison::nans}) {
    StatePool pool(100, 2, poison);
    EXPECT_EQ(pool.stride(), 128u);
    const int slot = pool.take();
    std::memset(pool.base() + slot * pool.stride(), 9, 100);
    pool.release(slot);
    const int again = pool.take();
    EXPECT_EQ(again, slot);  // or the test shows nothing
    EXPECT_TRUE(all_equal(pool.base() + again * pool.stride(), 100, 0));
  }
}

TEST(States, OfNoBytesAreCounted) {
  StatePool pool(0, 2);
  EXPECT_EQ(pool.bytes(), 0u);
  const int slot = pool.take();
  pool.zero(slot);
  EXPECT_NE(pool.take_copy(slot), slot);
  EXPECT_EQ(pool.slots_free(), 0);
}

TEST(StatesDeathTest, RefuseFreeSlots) {
  StatePool pool(8, 2);
  const int slot = pool.take();
  pool.release(slot);
  EXPECT_DEATH(pool.release(slot), "released twice");
  EXPECT_DEATH(pool.take_copy(slot), "copy of state slot");
}

TEST(Sequences, ReserveThenCommit) {
  Caches caches(shape(), small(), Poison::nans);
  Sequence sequence = caches.create();
  EXPECT_TRUE(sequence.can_extend(300));
  EXPECT_FALSE(sequence.can_extend(301));  // max_tokens
  sequence.extend(65);
  EXPECT_EQ(sequence.block_table().size(), 2u);
  EXPECT_EQ(sequence.reserved(), 65);
  sequence.abandon();
  EXPECT_EQ(sequence.block_table().size(), 0u);
  EXPECT_EQ(caches.paged().pages_free(), 6);
  sequence.extend(200);
  run_model(caches, sequence, numbers(64));
  sequence.commit(64);
  EXPECT_EQ(sequence.block_table().size(), 1u);
  expect_holds(caches, sequence, numbers(64));
  EXPECT_FALSE(sequence.can_extend(237));
  Sequence other = caches.create();
  EXPECT_TRUE(other.can_extend(300));
  other.extend(300);
  EXPECT_FALSE(sequence.can_extend(1));  // pages
  EXPECT_TRUE(sequence.can_extend(0));
  other.abandon();
  EXPECT_TRUE(sequence.can_extend(1));
}

TEST(Sequences, RefuseToGoWhereNoStateIs) {
  Caches caches(shape(), small(), Poison::nans);
  Sequence sequence = caches.create();
  std::vector<int> tokens;
  step(caches, sequence, tokens, numbers(70));
  ASSERT_TRUE(sequence.checkpoint());
  step(caches, sequence, tokens, numbers(60, 3));
  try {
    sequence.truncate(100);
    FAIL() << "no state is saved at 100";
  } catch (const Error& error) {
    EXPECT_STREQ(error.what(),
                 "sequence of 130 tokens cannot go back to 100: the nearest saved state is at 70");
  }
  expect_holds(caches, sequence, tokens);
  sequence.truncate(130);
  expect_holds(caches, sequence, tokens);
  sequence.truncate(70);
  tokens.resize(70);
  expect_holds(caches, sequence, tokens);
  step(caches, sequence, tokens, numbers(5, 9));  // other tokens than before
  expect_holds(caches, sequence, tokens);
  sequence.truncate(70);  // the checkpoint survives its use
  sequence.truncate(0);
  expect_holds(caches, sequence, {});
  EXPECT_EQ(caches.usage().checkpoints, 0);
}

TEST(Sequences, DoNotTrustTheStateOfAFailedStep) {
  Caches caches(shape(), small(), Poison::nans);
  Sequence sequence = caches.create();
  std::vector<int> tokens;
  step(caches, sequence, tokens, numbers(10));
  ASSERT_TRUE(sequence.checkpoint());
  step(caches, sequence, tokens, numbers(1, 50));
  sequence.extend(3);
  run_model(caches, sequence, numbers(2));
  EXPECT_EQ(sequence.step_failed(), 10);
  tokens.resize(10);
  expect_holds(caches, sequence, tokens);

  Caches stateless(shape(true), small(), Poison::nans);
  Sequence plain = stateless.create();
  step(stateless, plain, tokens, numbers(11));
  plain.extend(100);
  EXPECT_EQ(plain.step_failed(), 11);
  EXPECT_EQ(plain.block_table().size(), 1u);
}

TEST(Sequences, ForksPartWhenOneWrites) {
  Caches caches(shape(), small(), Poison::nans);
  Sequence first = caches.create();
  std::vector<int> tokens;
  step(caches, first, tokens, numbers(100));
  Sequence second = first.fork();
  EXPECT_EQ(caches.usage().pages_used, 2);
  EXPECT_NE(first.state_slot(), second.state_slot());
  std::vector<int> more = tokens;
  step(caches, second, more, numbers(3, 90));
  EXPECT_EQ(caches.usage().pages_used, 3);
  EXPECT_EQ(first.block_table()[0], second.block_table()[0]);
  EXPECT_NE(first.block_table()[1], second.block_table()[1]);
  expect_holds(caches, first, tokens);
  expect_holds(caches, second, more);
  step(caches, first, tokens, numbers(3, 120));  // now the sole owner: no further copy
  EXPECT_EQ(caches.usage().pages_used, 3);
  expect_holds(caches, second, more);
  first.release();
  EXPECT_FALSE(first.alive());
  expect_holds(caches, second, more);
}

// A fork may need a page for the copy although its own tail has room.
TEST(Sequences, CountTheCopyOfASharedPage) {
  Caches caches(shape(), {.pages = 2, .sequences = 2, .checkpoints = 0, .max_tokens = 300});
  Sequence first = caches.create();
  std::vector<int> tokens;
  step(caches, first, tokens, numbers(70));
  Sequence second = first.fork();
  EXPECT_FALSE(second.can_extend(1));
  EXPECT_TRUE(second.can_extend(0));
  first.release();
  EXPECT_TRUE(second.can_extend(1));
  EXPECT_FALSE(second.checkpoint());  // no slots for them
}

TEST(Sequences, ShareCheckpointsWithForks) {
  Caches caches(shape(), small(), Poison::nans);
  Sequence first = caches.create();
  std::vector<int> tokens;
  step(caches, first, tokens, numbers(70));
  ASSERT_TRUE(first.checkpoint());
  step(caches, first, tokens, numbers(70));
  Sequence second = first.fork();
  EXPECT_EQ(caches.usage().checkpoints, 1);
  first.release();
  EXPECT_EQ(caches.usage().checkpoints, 1);
  second.truncate(70);
  expect_holds(caches, second, numbers(70));
  // A checkpoint made after the fork is the maker's alone.
  Sequence third = second.fork();
  std::vector<int> longer = numbers(70), other = numbers(70);
  step(caches, second, longer, numbers(2));
  ASSERT_TRUE(second.checkpoint());
  step(caches, third, other, numbers(9, 33));
  EXPECT_EQ(third.truncation_point(75), 70);
  second.release();
  third.release();
  EXPECT_EQ(caches.usage().checkpoints, 0);
}

TEST(Sequences, LoseTheCheckpointUsedLongestAgo) {
  Caches caches(shape(), small(), Poison::nans);
  Sequence sequence = caches.create();
  std::vector<int> tokens;
  for (int i = 0; i < 2; ++i) {
    step(caches, sequence, tokens, numbers(20));
    ASSERT_TRUE(sequence.checkpoint());  // at 20, 40
  }
  step(caches, sequence, tokens, numbers(20));
  Sequence other = sequence.fork();
  other.truncate(20);  // 20 is now the younger one
  ASSERT_TRUE(sequence.checkpoint());
  EXPECT_EQ(caches.usage().checkpoints, 2);
  EXPECT_EQ(sequence.truncation_point(59), 20);
  EXPECT_EQ(sequence.truncation_point(60), 60);
}

TEST(Sequences, MoveWithoutLosingTheirTable) {
  Caches caches(shape(), small());
  Sequence first = caches.create();
  first.extend(130);
  const int32_t* address = first.block_table().data();
  Sequence second = std::move(first);
  EXPECT_FALSE(first.alive());
  EXPECT_EQ(second.block_table().data(), address);
  second.commit(130);
  second.extend(170);
  EXPECT_EQ(second.block_table().data(), address);
  second = caches.create();  // releases the old one
  EXPECT_EQ(caches.usage().pages_used, 0);
  EXPECT_EQ(caches.usage().sequences, 1);
}

TEST(Sequences, AddUpTheirBytes) {
  Caches caches(shape(), small());
  const size_t page = (12 + 7 + 32) * 64 + 5 * 16;
  EXPECT_EQ(caches.usage().bytes_total, 6 * page + 5 * 128);
  Sequence sequence = caches.create();
  sequence.extend(65);
  sequence.commit(65);
  ASSERT_TRUE(sequence.checkpoint());
  EXPECT_EQ(caches.usage().bytes_used, 2 * page + 2 * 128);
}

TEST(SequencesDeathTest, RefuseBrokenProtocol) {
  Caches caches(shape(), small());
  Sequence sequence = caches.create();
  EXPECT_DEATH(sequence.extend(301), "ask can_extend");
  sequence.extend(4);
  EXPECT_DEATH(sequence.extend(1), "under way");
  EXPECT_DEATH(sequence.commit(5), "of 4 reserved");
  EXPECT_DEATH(sequence.checkpoint(), "in a step");
  EXPECT_DEATH(sequence.fork(), "in a step");
}

}  // namespace
}  // namespace weft
