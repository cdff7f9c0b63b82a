#include "engine/batch.h"

#include <algorithm>

#include "base/check.h"

namespace weft {

Batch::Batch(int max_tokens, int max_logits, int max_sequences, int max_context)
    : max_tokens_(max_tokens), max_logits_(max_logits), max_sequences_(max_sequences),
      table_stride_(pages_for(max_context)), token_(max_tokens), position_(max_tokens), span_of_(max_tokens),
      logit_row_(max_logits), tables_(static_cast<size_t>(max_sequences) * table_stride_), spans_(max_sequences) {
  clear();
}

void Batch::clear() {
  header_ = {};
  header_.token = token_.data();
  header_.position = position_.data();
  header_.span_of = span_of_.data();
  header_.span = spans_.data();
  header_.block_table = tables_.data();
  header_.table_stride = table_stride_;
  header_.logit_row = logit_row_.data();
}

int Batch::add(const Sequence& sequence, std::span<const int32_t> tokens, WantLogits want) {
  const int n = static_cast<int>(tokens.size()), first = header_.tokens, index = header_.spans;
  WEFT_CHECK(n > 0 && n <= room() && index < max_sequences_, "{} tokens, {} spans", n, index);
  WEFT_CHECK(sequence.reserved() == n, "{} reserved, {} given", sequence.reserved(), n);
  const std::span<const int32_t> table = sequence.block_table();
  WEFT_CHECK(static_cast<int>(table.size()) <= table_stride_);
  std::copy(table.begin(), table.end(), tables_.begin() + static_cast<size_t>(index) * table_stride_);
  spans_[index] = {first, n, sequence.position(), index, sequence.state_slot()};
  for (int i = 0; i < n; ++i) {
    token_[first + i] = tokens[i];
    position_[first + i] = sequence.position() + i;
    span_of_[first + i] = index;
  }
  header_.tokens += n;
  header_.spans += 1;
  const int row = header_.logit_rows;
  const int wanted = want == WantLogits::none ? 0 : want == WantLogits::last ? 1 : n;
  WEFT_CHECK(row + wanted <= max_logits_, "{} logit rows", row + wanted);
  for (int i = 0; i < wanted; ++i) logit_row_[header_.logit_rows++] = first + n - wanted + i;
  return row;
}

}  // namespace weft
