// What every kernel test needs: the tables this machine can run, a team to run them on, poisoned buffers,
// packed random weights and a comparison that prints its worst element.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/cpu.h"
#include "base/dtype.h"
#include "base/memory.h"
#include "base/team.h"
#include "kernels/dispatch.h"
#include "kernels/work.h"

namespace weft {

extern const KernelTable kernel_table_amxmodel;

namespace test {

// Usable tables of this machine, and the amx kernels over the software tile model; what is missing is
// printed.
inline const std::vector<const KernelTable*>& tables() {
  static const std::vector<const KernelTable*> all = [] {
    std::vector<const KernelTable*> usable;
    for (const IsaChoice& choice : isa_choices(cpu_features())) {
      if (choice.missing.empty())
        usable.push_back(choice.table);
      else
        std::fprintf(stderr, "not tested here: %s: %s\n", choice.name.c_str(), choice.missing.c_str());
    }
    if (cpu_features().no_avx512.empty())
      usable.push_back(&kernel_table_amxmodel);
    else
      std::fprintf(stderr, "not tested here: amxmodel: %s\n", cpu_features().no_avx512.c_str());
    return usable;
  }();
  return all;
}
inline std::string table_name(const ::testing::TestParamInfo<const KernelTable*>& info) {
  return info.param->isa;
}

// Runs kernels as the product does: on a team, so with FTZ and DAZ and with tiles configured.
class Machine {
 public:
  static Machine& of(const KernelTable& table) {
    static std::map<const KernelTable*, std::unique_ptr<Machine>> machines;
    auto& machine = machines[&table];
    if (!machine) machine.reset(new Machine(table));
    return *machine;
  }

  // tasks 0: the finest cut the kernel allows.
  template <class Args>
  void run(KernelFn<Args> kernel, const Args& args, const StepHeader& step, int tasks = 0, int threads = 2) {
    if (tasks == 0) tasks = units(args, step);
    for (int i = 0; i < threads; ++i)
      std::memset(scratch_.data() + i * kScratchBytes, 0xFF, size_t{256} << 10);
    teams_[threads - 1]->run(tasks, [&](int task, int thread) {
      kernel(args, {&step, task, tasks, scratch_.as<std::byte>(kScratchBytes * thread)});
    });
  }

 private:
  explicit Machine(const KernelTable& table) : scratch_(2 * kScratchBytes) {
    std::memset(scratch_.data(), 0xFF, scratch_.size());
    for (int threads : {1, 2}) teams_.push_back(std::make_unique<Team>(threads, false, table.thread_init));
  }
  Buffer scratch_;
  std::vector<std::unique_ptr<Team>> teams_;
};

// A test over all tables.
class KernelTest : public ::testing::TestWithParam<const KernelTable*> {
 protected:
  const KernelTable& table() const { return *GetParam(); }
  Machine& machine() const { return Machine::of(table()); }
  bool narrow() const { return table().bf16_operands; }
};
#define WEFT_KERNEL_TESTS(suite) \
  INSTANTIATE_TEST_SUITE_P(Isa, suite, ::testing::ValuesIn(tables()), table_name)

// The same numbers everywhere: the standard library's distributions are not specified.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    const auto x = static_cast<uint32_t>(((state_ >> 18) ^ state_) >> 27);
    const int turn = static_cast<int>(state_ >> 59);
    return x >> turn | x << (-turn & 31);
  }
  int below(int n) { return static_cast<int>(bits() % static_cast<uint32_t>(n)); }
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(bits() >> 8) * 0x1p-24f;
  }
  float normal() {  // near enough: a sum of eight uniforms
    float sum = 0;
    for (int i = 0; i < 8; ++i) sum += uniform(-1, 1);
    return sum * 0.61237f;
  }
  std::vector<float> normals(size_t n, float scale = 1) {
    std::vector<float> x(n);
    for (float& v : x) v = normal() * scale;
    return x;
  }
  std::vector<int> shuffled(int n) {
    std::vector<int> order(n);
    for (int i = 0; i < n; ++i) order[i] = i;
    for (int i = n - 1; i > 0; --i) std::swap(order[i], order[below(i + 1)]);
    return order;
  }

 private:
  uint64_t state_;
};

// Rows whose every byte is 0xFF (a NaN in both types) until somebody writes them. Sixteen rows of slack stand
// behind.
template <bool kOperand>
class RowBuffer {
 public:
  RowBuffer(const KernelTable& table, int rows, int ld)
      : narrow_(kOperand && table.bf16_operands),
        ld_(ld),
        bytes_((static_cast<size_t>(round_up(rows, 16)) + 16) * ld * (narrow_ ? 2 : 4) + 64) {
    poison();
  }
  RowBuffer(RowBuffer&&) = default;
  RowBuffer(const RowBuffer& other) : narrow_(other.narrow_), ld_(other.ld_), bytes_(other.bytes_.size()) {
    std::memcpy(bytes_.data(), other.bytes_.data(), bytes_.size());
  }
  void poison() { std::memset(bytes_.data(), 0xFF, bytes_.size()); }
  void set(int row, int column, float x) {
    const size_t i = static_cast<size_t>(row) * ld_ + column;
    if (narrow_)
      bytes_.template as<uint16_t>()[i] = float_to_bf16(x);
    else
      bytes_.template as<float>()[i] = x;
  }
  float get(int row, int column) const {
    const size_t i = static_cast<size_t>(row) * ld_ + column;
    return narrow_ ? bf16_to_float(bytes_.template as<uint16_t>()[i]) : bytes_.template as<float>()[i];
  }
  bool untouched(int row, int column) const {
    const size_t i = static_cast<size_t>(row) * ld_ + column;
    return narrow_ ? bytes_.template as<uint16_t>()[i] == 0xFFFF
                   : float_bits(bytes_.template as<float>()[i]) == ~0u;
  }
  // Row `row` from column `column`: n values, then zeros up to column + `clear_to`.
  void fill(int row, int column, const float* x, int n, int clear_to = 0) {
    for (int i = 0; i < n; ++i) set(row, column + i, x[i]);
    for (int i = n; i < clear_to; ++i) set(row, column + i, 0);
  }
  std::vector<double> read(int row, int column, int n) const {
    std::vector<double> out(n);
    for (int i = 0; i < n; ++i) out[i] = get(row, column + i);
    return out;
  }
  bool same_row(int row, const RowBuffer& other, int other_row, int column, int n) const {
    const size_t size = narrow_ ? 2 : 4;
    return std::memcmp(bytes_.data() + (static_cast<size_t>(row) * ld_ + column) * size,
                       other.bytes_.data() + (static_cast<size_t>(other_row) * other.ld_ + column) * size,
                       n * size) == 0;
  }
  bool same_bytes(const RowBuffer& other) const {
    return std::memcmp(bytes_.data(), other.bytes_.data(), bytes_.size()) == 0;
  }
  template <class T = float>
  T* data() const {
    return bytes_.template as<T>();
  }
  void* at(int column) const { return bytes_.data() + static_cast<size_t>(column) * (narrow_ ? 2 : 4); }
  int ld() const { return ld_; }

 private:
  bool narrow_;
  int ld_;
  Buffer bytes_;
};
using OpRows = RowBuffer<true>;
using F32Rows = RowBuffer<false>;

// What a value reads as after a store of the operand type.
inline float as_operand(const KernelTable& table, float x) {
  return table.bf16_operands ? bf16_to_float(float_to_bf16(x)) : x;
}

// |actual - expected| <= bound, element by element; a NaN on either side fails. Prints the worst one.
inline ::testing::AssertionResult close(const std::vector<double>& actual,
                                        const std::vector<double>& expected,
                                        const std::vector<double>& bound) {
  if (actual.size() != expected.size() || actual.size() != bound.size())
    return ::testing::AssertionFailure()
           << "sizes " << actual.size() << " " << expected.size() << " " << bound.size();
  size_t worst = 0;
  double ratio = -1;
  for (size_t i = 0; i < actual.size(); ++i) {
    const double error = std::abs(actual[i] - expected[i]);
    const double r = error <= bound[i]  ? (error == 0 ? 0 : error / bound[i])
                     : error > bound[i] ? error / bound[i]
                                        : INFINITY;
    if (r > ratio) ratio = r, worst = i;
  }
  if (std::getenv("WEFT_SHOW_ERRORS") && !actual.empty())
    std::fprintf(stderr, "      error / bound %.4f\n", ratio);
  if (ratio <= 1) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "element " << worst << " of " << actual.size() << ": " << actual[worst] << ", expected "
         << expected[worst] << " within " << bound[worst] << " (error / bound " << ratio << ")";
}
#define EXPECT_CLOSE(actual, expected, bound) EXPECT_TRUE(::weft::test::close(actual, expected, bound))

// Packed random weights and their exact values [copies][n][k]: groups of a GEMM or experts. The packing is
// written from the description in packed.h, apart from the loader's.
struct TestWeight {
  PackedWeight packed;
  Buffer codes, scales;
  std::vector<double> value;
  double at(int copy, int row, int column) const {
    return value[(static_cast<size_t>(copy) * packed.n + row) * packed.k + column];
  }
};

inline TestWeight random_weight(Random& random, WeightFormat format, int copies, int n, int k) {
  TestWeight w;
  w.packed.n = n, w.packed.k = k, w.packed.format = format;
  const PackedWeight& p = w.packed;
  w.codes = Buffer(copies * p.code_bytes() + 64);
  w.scales = Buffer(copies * p.scale_bytes() + 64);
  w.value.resize(static_cast<size_t>(copies) * n * k);
  const int blocks = (k + kScaleBlock - 1) / kScaleBlock, groups = p.k_padded() / 32;
  for (int copy = 0; copy < copies; ++copy) {
    std::vector<float> block_scale(static_cast<size_t>((n + 127) / 128) * blocks);
    for (float& s : block_scale)
      s = std::ldexp(random.uniform(1, 2), random.below(8) - 8);  // differ from block to block
    for (int row = 0; row < n; ++row) {
      const int panel = row / kPanel, c = row % kPanel;
      uint8_t* lines = w.codes.data() + copy * p.code_bytes() + panel * p.panel_bytes();
      uint8_t* scales = w.scales.data() + copy * p.scale_bytes() + panel * p.panel_scale_bytes();
      for (int i = 0; i < k; ++i) {
        double& value = w.value[(static_cast<size_t>(copy) * n + row) * k + i];
        switch (format) {
          case WeightFormat::bf16: {
            const uint16_t code = float_to_bf16(random.normal());
            std::memcpy(lines + (i / 2 * 32 + 2 * c + i % 2) * 2, &code, 2);
            value = bf16_to_float(code);
            break;
          }
          case WeightFormat::f32: {
            const float x = random.normal();
            std::memcpy(lines + (i * kPanel + c) * 4, &x, 4);
            value = x;
            break;
          }
          case WeightFormat::e4m3: {
            auto code = static_cast<uint8_t>(random.bits());
            if ((code & 0x7F) == 0x7F) code ^= 1;  // NaN
            const float scale = block_scale[row / kScaleBlock * blocks + i / kScaleBlock];
            std::memcpy(scales + i / kScaleBlock * 4, &scale, 4);
            lines[i / 4 * 64 + 2 * (2 * c + i % 2) + i % 4 / 2] = code;
            value = static_cast<double>(e4m3_to_float(code)) * scale;
            break;
          }
          case WeightFormat::mxfp4: {
            uint8_t& scale = scales[i / 32 * kPanel + c];
            if (i % 32 == 0)
              scale = static_cast<uint8_t>(i == 0 && row % 5 == 0 ? 140 : 120 + random.below(8));
            auto nibble = static_cast<uint8_t>(random.below(16));
            if (nibble == 8) nibble = 0;  // -0 is not allowed
            lines[i / 8 * 64 + 2 * (2 * c + i % 2) + i % 8 / 4] |=
                static_cast<uint8_t>(nibble << (i % 8 / 2 % 2 * 4));
            value = std::ldexp(static_cast<double>(e2m1_to_float(nibble)), scale - 127);
            break;
          }
          case WeightFormat::mxfp8: {
            uint8_t& scale = scales[i / 32 * kPanel + c];
            if (i % 32 == 0) scale = static_cast<uint8_t>(112 + random.below(8));
            auto code = static_cast<uint8_t>(random.bits());
            if ((code & 0x7F) == 0x7F) code ^= 1;  // NaN
            if (code == 0x80) code = 0;            // -0 is not allowed
            lines[i / 4 * 64 + 2 * (2 * c + i % 2) + i % 4 / 2] = code;
            value = std::ldexp(static_cast<double>(e4m3_to_float(code)), scale - 127);
            break;
          }
          case WeightFormat::int8: {
            const float scale = 0.01f * static_cast<float>(1 + row % 7);
            std::memcpy(scales + 4 * c, &scale, 4);
            const int q = random.below(255) - 127;
            lines[i / 4 * 64 + 2 * (2 * c + i % 2) + i % 4 / 2] =
                static_cast<uint8_t>(q < 0 ? 128 - q : q);
            value = static_cast<double>(q) * scale;
            break;
          }
        }
      }
    }
    if (format == WeightFormat::mxfp4 || format == WeightFormat::mxfp8)  // groups of columns that do not exist: any finite scale
      for (int panel = 0; panel < p.panels(); ++panel)
        for (int i = 0; i < groups * kPanel; ++i) {
          uint8_t& s = w.scales.data()[copy * p.scale_bytes() + panel * p.panel_scale_bytes() + i];
          if (s == 0) s = 127;
        }
  }
  w.packed.codes = w.codes.as<std::byte>();
  w.packed.scales = p.scale_bytes() ? w.scales.as<std::byte>() : nullptr;
  return w;
}

// A step over some sequences. Pages of every sequence are shuffled over one pool, so that neighbours in a
// sequence are strangers in memory.
struct TestSpan {
  int position, length, slot;
};
class TestStep {
 public:
  // max_context: tokens a block table covers. Sequence = state slot: tables of equal slots are equal in every
  // step.
  TestStep(const std::vector<TestSpan>& spans, int max_context, int sequences, uint64_t page_seed = 1)
      : stride_((max_context + kPageTokens - 1) / kPageTokens), pages_(stride_ * sequences) {
    const std::vector<int> order = Random(page_seed).shuffled(pages_);
    for (size_t i = 0; i < spans.size(); ++i) {
      const TestSpan& s = spans[i];
      span_.push_back({static_cast<int>(token_.size()), s.length, s.position, static_cast<int>(i), s.slot});
      for (int p = 0; p < stride_; ++p) table_.push_back(order[s.slot * stride_ + p]);
      for (int r = 0; r < s.length; ++r) {
        token_.push_back(0);
        position_.push_back(s.position + r);
        span_of_.push_back(static_cast<int>(i));
      }
    }
    header.tokens = static_cast<int>(token_.size()), header.spans = static_cast<int>(span_.size());
    header.token = token_.data(), header.position = position_.data(), header.span_of = span_of_.data();
    header.span = span_.data(), header.block_table = table_.data(), header.table_stride = stride_;
  }
  TestStep(const TestStep&) = delete;
  int pages() const { return pages_; }
  int page(int span, int index) const { return table_[static_cast<size_t>(span) * stride_ + index]; }

  StepHeader header;

 private:
  int stride_, pages_;
  std::vector<int32_t> token_, position_, span_of_, table_;
  std::vector<Span> span_;
};
// Rows without sequences.
inline StepHeader plain_step(int tokens) {
  StepHeader step;
  step.tokens = tokens;
  return step;
}

}  // namespace test
}  // namespace weft
