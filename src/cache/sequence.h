// One handle over both caches of a sequence, so that pages and state cannot disagree about a position.
//
// A step is: can_extend(n), extend(n), run the model, commit(m). The position moves only in commit and
// backwards in truncate. Going back is where hybrids differ from plain attention: pages can be cut anywhere,
// but a recurrent state exists only at the current position and where a checkpoint was taken. truncate()
// therefore refuses any other place instead of leaving the state ahead of the pages.
//
// All positions and lengths are tokens. Not thread safe: the engine's loop thread is the only caller.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cache/paged_cache.h"
#include "cache/state_pool.h"

namespace weft {

// What the model needs; known when its graph is built.
struct CacheShape {
  std::vector<size_t> slab_bytes_per_page;  // one per (layer, kind), see PagedCache
  size_t slot_bytes = 0;                    // KDA states, conv tails and k-pool rings of all layers
  // The slot need not be restored when the sequence is cut. True for models without recurrent layers and
  // without k-pool rings (the ring of an open pool remembers a few tokens only); implied by slot_bytes == 0.
  bool truncatable_anywhere = false;
};

// What the machine gives.
struct CacheLimits {
  int pages = 0;
  int sequences = 0;    // alive at once
  int checkpoints = 0;  // saved states of all sequences together; the least recently used one gives way
  int max_tokens = 0;   // per sequence
};

struct CacheUsage {
  int pages_used = 0;
  int sequences = 0;
  int checkpoints = 0;
  size_t bytes_used = 0;   // of owned pages and slots
  size_t bytes_total = 0;  // allocated
};

class Caches;

// Move-only owner of pages and a state slot. Must not outlive its Caches. A default-constructed, moved-from
// or released Sequence owns nothing and may only be assigned to, asked alive(), or destroyed.
class Sequence {
 public:
  Sequence() = default;
  Sequence(Sequence&& other) noexcept;
  Sequence& operator=(Sequence&& other) noexcept;
  ~Sequence() { release(); }

  bool alive() const { return caches_ != nullptr; }
  int position() const { return position_; }  // tokens committed = position of the next token
  int reserved() const { return reserved_; }  // tokens of the step under way
  int state_slot() const { return slot_; }
  // Pages of position() + reserved() tokens. The address is the same for the whole life of the sequence; the
  // content changes only in extend, commit, abandon, step_failed and truncate.
  std::span<const int32_t> block_table() const { return table_; }

  // Room for n more tokens: within max_tokens, and enough free pages.
  bool can_extend(int n) const;
  // Reserves rows for a step of n tokens. Needs can_extend(n), and no step under way. After it, the pages of
  // rows position() .. position() + n - 1 belong to this sequence alone (a page shared with a fork is copied
  // first).
  void extend(int n);
  // The step is done, and the slot holds the state after n of its tokens (n <= reserved()). Pages reserved
  // beyond that go back. Rejected drafts are not dropped here, since the state has seen them: commit, then
  // truncate.
  void commit(int n);
  // The step is dropped before it has touched the caches: all is as before extend.
  void abandon();
  // The step ran, wholly or in part, and its result is lost. The slot can no longer be trusted, so the
  // sequence goes back to its deepest saved state. Returns position(), from which the caller computes again.
  int step_failed();

  // Saves the state at position(). False: no checkpoint slots were configured. Nothing to do (true) at
  // position 0, at a position already saved, and if the shape is truncatable anywhere. Needs: no step under
  // way.
  bool checkpoint();
  // The deepest position <= to that truncate() takes: position(), a checkpoint, or 0.
  int truncation_point(int to) const;
  // Forgets everything from position `to` on, in both caches. Error: no saved state there (names the nearest
  // one).
  void truncate(int to);

  // A second sequence with the same tokens, state and checkpoints. Pages are shared; whoever first writes to
  // the partial last page gets a copy of it. Needs caches.can_create() and no step under way.
  Sequence fork() const;

  void release();

 private:
  friend class Caches;
  Sequence(Caches& caches, uint64_t id, int slot);

  bool last_page_is_shared() const;
  void trim_pages();
  void go_back(int to);

  Caches* caches_ = nullptr;
  uint64_t id_ = 0;  // names this sequence in the table of checkpoints
  int slot_ = -1;
  int position_ = 0;
  int reserved_ = 0;
  std::vector<int32_t> table_;  // capacity for max_tokens, so that it never moves
};

class Caches {
 public:
  // Allocates everything. Error: the memory cannot be had.
  Caches(const CacheShape& shape, const CacheLimits& limits, Poison poison = Poison::none);
  ~Caches();
  Caches(const Caches&) = delete;
  Caches& operator=(const Caches&) = delete;

  bool can_create() const { return sequences_ < limits_.sequences; }
  Sequence create();  // empty, with a zeroed state; needs can_create()

  PagedCache& paged() { return paged_; }
  StatePool& states() { return states_; }
  const CacheLimits& limits() const { return limits_; }
  CacheUsage usage() const;

 private:
  friend class Sequence;

  // The states saved by checkpoint(). Forks share them, hence the list of sequences. A flat list, since a
  // slot is large (147 MB for GLM-5.3-Flash) and so there are dozens of them, not thousands.
  struct Checkpoint {
    int position;
    int slot;
    uint64_t last_used;
    std::vector<uint64_t> sequences;
  };

  const Checkpoint* deepest_checkpoint(uint64_t sequence, int to) const;  // at or before `to`; null if none
  bool save(const Sequence& sequence);
  void restore(const Sequence& sequence, int position);
  void forget_checkpoints(uint64_t sequence, int after);  // those beyond position `after`
  void evict_checkpoint();

  CacheLimits limits_;
  bool truncatable_anywhere_;
  PagedCache paged_;
  StatePool states_;
  std::vector<Checkpoint> checkpoints_;
  int sequences_ = 0;
  uint64_t next_id_ = 1;
  uint64_t clock_ = 0;
};

}  // namespace weft
