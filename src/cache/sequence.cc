#include "cache/sequence.h"

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace weft {

Sequence::Sequence(Caches& caches, uint64_t id, int slot) : caches_(&caches), id_(id), slot_(slot) {
  table_.reserve(pages_for(caches.limits().max_tokens));
}

Sequence::Sequence(Sequence&& other) noexcept
    : caches_(std::exchange(other.caches_, nullptr)),
      id_(other.id_),
      slot_(std::exchange(other.slot_, -1)),
      position_(std::exchange(other.position_, 0)),
      reserved_(std::exchange(other.reserved_, 0)),
      table_(std::move(other.table_)) {}

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  if (this == &other) return *this;
  release();
  caches_ = std::exchange(other.caches_, nullptr);
  id_ = other.id_;
  slot_ = std::exchange(other.slot_, -1);
  position_ = std::exchange(other.position_, 0);
  reserved_ = std::exchange(other.reserved_, 0);
  table_ = std::move(other.table_);
  return *this;
}

bool Sequence::last_page_is_shared() const {
  return position_ % kPageTokens != 0 && caches_->paged().owners(table_[position_ / kPageTokens]) > 1;
}

bool Sequence::can_extend(int n) const {
  WEFT_CHECK(alive() && n >= 0, "can_extend({})", n);
  if (n > caches_->limits().max_tokens - position_) return false;
  const int copies = n > 0 && last_page_is_shared();
  const int wanted = pages_for(position_ + n) - pages_for(position_) + copies;
  return wanted <= caches_->paged().pages_free();
}

void Sequence::extend(int n) {
  WEFT_CHECK(alive() && reserved_ == 0, "a step of {} tokens is under way", reserved_);
  WEFT_CHECK(can_extend(n), "no room for {} tokens: ask can_extend first", n);
  if (n == 0) return;
  PagedCache& paged = caches_->paged();
  if (last_page_is_shared()) {
    int32_t& page = table_[position_ / kPageTokens];
    const int32_t own = paged.take_copy(page);
    paged.release(page);
    page = own;
  }
  while (static_cast<int>(table_.size()) < pages_for(position_ + n)) table_.push_back(paged.take());
  reserved_ = n;
}

void Sequence::trim_pages() {
  while (static_cast<int>(table_.size()) > pages_for(position_)) {
    caches_->paged().release(table_.back());
    table_.pop_back();
  }
}

void Sequence::commit(int n) {
  WEFT_CHECK(alive() && n >= 0 && n <= reserved_, "commit({}) of {} reserved tokens", n, reserved_);
  position_ += n;
  reserved_ = 0;
  trim_pages();
}

void Sequence::abandon() {
  WEFT_CHECK(alive());
  reserved_ = 0;
  trim_pages();
}

int Sequence::step_failed() {
  WEFT_CHECK(alive());
  if (caches_->truncatable_anywhere_) {
    abandon();
    return position_;
  }
  // Not truncation_point(position_): that trusts the slot.
  const Caches::Checkpoint* saved = caches_->deepest_checkpoint(id_, position_);
  go_back(saved ? saved->position : 0);
  return position_;
}

bool Sequence::checkpoint() {
  WEFT_CHECK(alive() && reserved_ == 0, "checkpoint in a step of {} tokens", reserved_);
  return position_ == 0 || caches_->truncatable_anywhere_ || caches_->save(*this);
}

int Sequence::truncation_point(int to) const {
  WEFT_CHECK(alive() && to >= 0 && to <= position_, "truncation to {} of {} tokens", to, position_);
  if (to == position_ || caches_->truncatable_anywhere_) return to;
  const Caches::Checkpoint* saved = caches_->deepest_checkpoint(id_, to);
  return saved ? saved->position : 0;
}

void Sequence::truncate(int to) {
  WEFT_CHECK(alive() && reserved_ == 0, "truncation in a step of {} tokens", reserved_);
  const int point = truncation_point(to);
  if (point != to)
    fail("sequence of {} tokens cannot go back to {}: the nearest saved state is at {}", position_, to,
         point);
  if (to < position_) go_back(to);
}

void Sequence::go_back(int to) {
  if (to == 0) {
    caches_->states().zero(slot_);
  } else if (!caches_->truncatable_anywhere_) {
    caches_->restore(*this, to);
  }
  caches_->forget_checkpoints(id_, to);
  position_ = to;
  reserved_ = 0;
  trim_pages();
}

Sequence Sequence::fork() const {
  WEFT_CHECK(alive() && reserved_ == 0, "fork in a step of {} tokens", reserved_);
  WEFT_CHECK(caches_->can_create(), "no free sequence: ask can_create first");
  Sequence twin(*caches_, caches_->next_id_++, caches_->states().take_copy(slot_));
  ++caches_->sequences_;
  for (int32_t page : table_) caches_->paged().share(page);
  twin.table_.insert(twin.table_.end(), table_.begin(),
                     table_.end());  // not assignment, which drops the capacity
  twin.position_ = position_;
  for (Caches::Checkpoint& saved : caches_->checkpoints_)
    if (std::ranges::count(saved.sequences, id_) > 0) saved.sequences.push_back(twin.id_);
  return twin;
}

void Sequence::release() {
  if (!alive()) return;
  caches_->forget_checkpoints(id_, -1);
  position_ = reserved_ = 0;
  trim_pages();
  caches_->states().release(slot_);
  --caches_->sequences_;
  caches_ = nullptr;
  slot_ = -1;
}

Caches::Caches(const CacheShape& shape, const CacheLimits& limits, Poison poison)
    : limits_(limits),
      truncatable_anywhere_(shape.truncatable_anywhere || shape.slot_bytes == 0),
      paged_(shape.slab_bytes_per_page, limits.pages, poison),
      states_(shape.slot_bytes, limits.sequences + limits.checkpoints, poison) {
  WEFT_CHECK(limits.sequences > 0 && limits.checkpoints >= 0 && limits.max_tokens > 0);
  checkpoints_.reserve(limits.checkpoints);
}

Caches::~Caches() {
  WEFT_CHECK(sequences_ == 0, "{} sequences outlive their caches", sequences_);
}

Sequence Caches::create() {
  WEFT_CHECK(can_create(), "no free sequence: ask can_create first");
  Sequence sequence(*this, next_id_++, states_.take());
  ++sequences_;
  return sequence;
}

CacheUsage Caches::usage() const {
  CacheUsage usage;
  usage.pages_used = paged_.pages() - paged_.pages_free();
  usage.sequences = sequences_;
  usage.checkpoints = static_cast<int>(checkpoints_.size());
  usage.bytes_used = usage.pages_used * paged_.bytes_per_page() +
                     static_cast<size_t>(states_.slots() - states_.slots_free()) * states_.stride();
  usage.bytes_total = paged_.bytes() + states_.bytes();
  return usage;
}

const Caches::Checkpoint* Caches::deepest_checkpoint(uint64_t sequence, int to) const {
  const Checkpoint* deepest = nullptr;
  for (const Checkpoint& saved : checkpoints_) {
    if (saved.position > to || std::ranges::count(saved.sequences, sequence) == 0) continue;
    if (!deepest || saved.position > deepest->position) deepest = &saved;
  }
  return deepest;
}

bool Caches::save(const Sequence& sequence) {
  if (limits_.checkpoints == 0) return false;
  const Checkpoint* same = deepest_checkpoint(sequence.id_, sequence.position_);
  if (same && same->position == sequence.position_) {
    checkpoints_[same - checkpoints_.data()].last_used = ++clock_;
    return true;
  }
  if (static_cast<int>(checkpoints_.size()) == limits_.checkpoints) evict_checkpoint();
  checkpoints_.push_back({sequence.position_, states_.take_copy(sequence.slot_), ++clock_, {sequence.id_}});
  return true;
}

void Caches::restore(const Sequence& sequence, int position) {
  const Checkpoint* saved = deepest_checkpoint(sequence.id_, position);
  WEFT_CHECK(saved && saved->position == position, "no state saved at {}", position);
  states_.copy(saved->slot, sequence.slot_);
  checkpoints_[saved - checkpoints_.data()].last_used = ++clock_;
}

void Caches::forget_checkpoints(uint64_t sequence, int after) {
  for (Checkpoint& saved : checkpoints_) {
    if (saved.position <= after || std::erase(saved.sequences, sequence) == 0) continue;
    if (saved.sequences.empty()) states_.release(saved.slot);
  }
  std::erase_if(checkpoints_, [](const Checkpoint& saved) { return saved.sequences.empty(); });
}

void Caches::evict_checkpoint() {
  const auto oldest = std::ranges::min_element(checkpoints_, {}, &Checkpoint::last_used);
  states_.release(oldest->slot);
  checkpoints_.erase(oldest);
}

}  // namespace weft
