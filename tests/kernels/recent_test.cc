// The list of the most recent tokens, with what may be forced and seen.
#include "kernel_support.h"

namespace weft::test {
namespace {

class Recent : public KernelTest {};

TEST_P(Recent, ListsTheLastTokensAndTakesForcedLists) {
  constexpr int kWidth = 5;
  const TestStep step({{0, 3, 0}, {4, 9, 1}, {60, 1, 2}}, 128, 3);
  StepHeader header = step.header;
  const int tokens = header.tokens;
  ASSERT_EQ(tokens, 13);
  std::vector<int32_t> forced(tokens * kWidth, -1), seen(tokens * kWidth, -7);
  for (int t = 0; t < tokens; ++t) forced[t * kWidth] = t % 2;
  for (const bool force : {false, true}) {
    std::vector<int32_t> list((tokens + 1) * kWidth, -9), count(tokens + 1, -9);
    const int32_t* forced_layers[] = {nullptr, forced.data()};
    int32_t* seen_layers[] = {nullptr, seen.data()};
    header.forced_selection = force ? forced_layers : nullptr;
    header.seen_selection = seen_layers;
    machine().run(table().recent, RecentArgs{1, list.data(), count.data(), kWidth}, header);
    for (int t = 0; t < tokens; ++t) {
      const int visible = header.position[t] + 1, n = std::min(visible, kWidth);
      EXPECT_EQ(count[t], force ? 1 : n);
      for (int i = 0; i < kWidth; ++i) {
        const int expected = i < n ? visible - n + i : -1;
        EXPECT_EQ(seen[t * kWidth + i], expected) << t << " " << i;
        EXPECT_EQ(list[t * kWidth + i], force ? forced[t * kWidth + i] : expected) << t << " " << i;
      }
    }
    for (int i = 0; i < kWidth; ++i) EXPECT_EQ(list[tokens * kWidth + i], -9) << "beyond the rows";
    EXPECT_EQ(count[tokens], -9);
  }
}

WEFT_KERNEL_TESTS(Recent);

}  // namespace
}  // namespace weft::test
