// Pages of the two DSA caches as the kernels lay them out (kernels.h: LatentArgs, IndexKeyArgs), poisoned
// where nobody wrote.
#pragma once

#include "kernel_support.h"

namespace weft::test {

// Latent rows in operands: [pages][kPageTokens][row_elements].
class LatentSlab {
 public:
  LatentSlab(const KernelTable& table, int pages, int width)
      : row_elements(round_up(width, kStep)),
        page_bytes(static_cast<size_t>(kPageTokens) * row_elements * table.operand_bytes()),
        rows(table, pages * kPageTokens, row_elements) {}
  static int row(const TestStep& step, int span, int position) {
    return step.page(span, position / kPageTokens) * kPageTokens + position % kPageTokens;
  }
  std::byte* data() const { return rows.data<std::byte>(); }

  int row_elements;
  size_t page_bytes;
  OpRows rows;
};

// Index keys: per page panels of 16 keys, each as packed.h lays out 16 columns (pairs of k where operands are
// bf16).
class KeySlab {
 public:
  KeySlab(const KernelTable& table, int pages, int dim, int pool)
      : per_page(kPageTokens / pool),
        width(round_up(dim, kStep)),
        pair(table.bf16_operands ? 2 : 1),
        page_elements(round_up(per_page, kPanel) * width),
        page_bytes(static_cast<size_t>(page_elements) * table.operand_bytes()),
        elements(table, pages, page_elements) {}
  int at(int key, int d) const {
    const int in_page = key % per_page;
    return in_page / kPanel * kPanel * width + d / pair * kPanel * pair + in_page % kPanel * pair + d % pair;
  }
  // Key number `key` of the sequence of `span`; columns up to the padded width are zeros.
  void put(const TestStep& step, int span, int key, const float* x, int dim) {
    const int page = step.page(span, key / per_page);
    for (int d = 0; d < width; ++d) elements.set(page, at(key, d), d < dim ? x[d] : 0);
  }
  float get(const TestStep& step, int span, int key, int d) const {
    return elements.get(step.page(span, key / per_page), at(key, d));
  }
  bool untouched(const TestStep& step, int span, int key, int d) const {
    return elements.untouched(step.page(span, key / per_page), at(key, d));
  }
  std::byte* data() const { return elements.data<std::byte>(); }

  int per_page, width, pair, page_elements;
  size_t page_bytes;
  OpRows elements;
};

// Inverse frequencies and the kernel's own table of a step.
struct RopeSetup {
  RopeSetup(const KernelTable& table, Machine& machine, const StepHeader& step, int dims, float scale = 1)
      : values(static_cast<size_t>(step.tokens) * dims + 16) {
    for (int j = 0; j < dims / 2; ++j) freq.push_back(std::pow(1e4, -2.0 * j / dims));
    RopeTableArgs args{freq.data(), dims / 2, scale, values.data()};
    machine.run(table.rope_table, args, step);
  }
  std::vector<double> freq;
  std::vector<float> values;
};

}  // namespace weft::test
