// One step's input, put together from spans of sequences: the token-flat batch.
#pragma once

#include <span>
#include <vector>

#include "cache/sequence.h"
#include "kernels/kernels.h"

namespace weft {

enum class WantLogits : uint8_t { none, last, all };

class Batch {
 public:
  // max_context: tokens of the longest sequence. Allocates everything a step needs.
  Batch(int max_tokens, int max_logits, int max_sequences, int max_context);

  void clear();
  int tokens() const { return header_.tokens; }
  int room() const { return max_tokens_ - header_.tokens; }
  // Appends `tokens` of a sequence that was extended by as many. Returns the span's first logit row.
  int add(const Sequence& sequence, std::span<const int32_t> tokens, WantLogits want);
  const StepHeader& header() const { return header_; }
  StepHeader& header() { return header_; }

 private:
  int max_tokens_, max_logits_, max_sequences_, table_stride_;
  std::vector<int32_t> token_, position_, span_of_, logit_row_, tables_;
  std::vector<Span> spans_;
  StepHeader header_;
};

}  // namespace weft
