// Decides what one step computes: every running sequence's next token, then prompt chunks until the step is full.
//
// Prompt chunks end at absolute multiples of 64 tokens (the last one where the prompt ends): KDA chunks and attention
// blocks are cut there, so how a prompt was chunked changes no bit of it. A step that has less room than that for a prompt
// leaves it to the next one; only where decodes never leave 64 tokens free are chunks cut elsewhere.
#pragma once

#include <vector>

#include "engine/batch.h"

namespace weft {

// A sequence with more tokens than its caches hold.
struct Job {
  Sequence* sequence = nullptr;
  const std::vector<int32_t>* tokens = nullptr;  // all of them; the caches hold sequence->position()
  int pending() const { return static_cast<int>(tokens->size()) - sequence->position(); }
};

struct Scheduled {
  int job;         // index into the jobs given
  int tokens;      // taken this step
  int logit_row;   // of the last one, -1: prompt not finished
};

// Fills `batch` (cleared first). Jobs for which no page is left are passed over; they appear in a later step.
std::vector<Scheduled> schedule(const std::vector<Job>& jobs, Batch& batch);

}  // namespace weft
