// Which rows absorbed attention leaves to the expanded form, and how it cuts the keys of the others: in segments,
// each summed from nothing, whose sums are folded in their order. Where the cuts lie is a matter of the row alone
// (its number of keys), so that a row has the same bits whether one task takes all of it or every segment is a task
// of its own.
//
// Static, for the ISA units include it (base/dtype.h says why).
#pragma once

#include "kernels/kernels.h"

namespace weft {

static constexpr int kAttentionParts = 64;  // (row, segment) sums of one step
static constexpr int kMostSegments = 16;    // of a row

// Every fold passes over the values once: 4 % of a segment of 512 keys for 16 heads. Many heads have tasks
// enough by themselves.
static inline int shortest_segment(int heads) {
  return heads > 32 ? 2048 : 512;
}
static inline int segment_keys(int keys, int heads) {
  int size = shortest_segment(heads);
  while (size < keys && size * kMostSegments < keys) size *= 2;
  return size;
}

// Tasks of a row: segments, of which a row of few keys leaves the last ones empty; 1: a task takes whole
// rows.
static inline int attention_segments(const AttentionArgs& a, const StepHeader& step) {
  if (!a.part_sum || step.tokens == 0) return 1;
  int longest = 0;
  for (int i = 0; i < step.spans; ++i) {
    const int keys = step.span[i].position + step.span[i].length;
    if (keys > longest) longest = keys;
  }
  if (a.list && a.width < longest) longest = a.width;
  const int shortest = shortest_segment(a.heads), wanted = (longest + shortest - 1) / shortest;
  const int segments = wanted < 1 ? 1 : wanted < kMostSegments ? wanted : kMostSegments;
  return segments * step.tokens > kAttentionParts ? 1 : segments;
}

// Whether ExpandedArgs takes this row.
static inline bool expands(const StepHeader& step, int t, int below) {
  const Span& span = step.span[step.span_of[t]];
  const int block = step.position[t] / kKeyBlock * kKeyBlock;
  return block < below && block >= span.position && block + kKeyBlock <= span.position + span.length;
}

}  // namespace weft
