#include "engine/scheduler.h"

#include <algorithm>

namespace weft {
namespace {

void take(const std::vector<Job>& jobs, int index, int n, Batch& batch, std::vector<Scheduled>& out) {
  const Job& job = jobs[index];
  const bool last = n == job.pending();
  job.sequence->extend(n);
  const int row = batch.add(*job.sequence, {job.tokens->data() + job.sequence->position(), static_cast<size_t>(n)},
                            last ? WantLogits::last : WantLogits::none);
  out.push_back({index, n, last ? row : -1});
}

// As much of the prompt as fits, up to a multiple of 64 unless it is the end. 0: not even that fits beside what the step
// holds already, and filling the step with less would let company change the prompt's numbers.
int chunk_length(const Job& job, int room, bool step_is_small) {
  const int position = job.sequence->position(), end = position + std::min(room, job.pending());
  if (end - position == job.pending()) return end - position;
  const int cut = end / kPageTokens * kPageTokens;
  if (cut > position) return cut - position;
  return step_is_small ? end - position : 0;
}

}  // namespace

std::vector<Scheduled> schedule(const std::vector<Job>& jobs, Batch& batch) {
  batch.clear();
  std::vector<Scheduled> out;
  for (int i = 0; i < static_cast<int>(jobs.size()); ++i)
    if (jobs[i].pending() == 1 && batch.room() > 0 && jobs[i].sequence->can_extend(1)) take(jobs, i, 1, batch, out);
  const bool step_is_small = batch.room() < kPageTokens;  // no prompt could ever go on by a whole page
  for (int i = 0; i < static_cast<int>(jobs.size()) && batch.room() > 0; ++i) {
    if (jobs[i].pending() <= 1) continue;
    const int n = chunk_length(jobs[i], batch.room(), step_is_small);
    if (n > 0 && jobs[i].sequence->can_extend(n)) take(jobs, i, n, batch, out);
  }
  return out;
}

}  // namespace weft
