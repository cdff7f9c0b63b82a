// Packed products of every weight format and epilogue against double precision; rows do not depend on their
// company.
#include "kernel_support.h"
#include "kernels/cases.h"
#include "kernels/work.h"
#include "reference.h"

namespace weft::test {
namespace {

using cases::GemmCase;
using namespace reference;

// Inputs of one case and the buffers of one run.
struct Product {
  Product(const KernelTable& table, const GemmCase& c, int rows, uint64_t seed)
      : table(table),
        c(c),
        rows(rows),
        random(seed),
        weight(random_weight(random, c.format, c.groups, c.n, c.k)),
        a_group(round_up(c.k, kStep)),
        n_out(c.epilogue == Epilogue::activate ? c.n / 2 : c.n),
        ld_gate(c.groups * n_out + 5),
        a_op(table, rows, c.groups * a_group + 32),
        a_f32(table, rows, c.groups * a_group + 32),
        gate(table, rows, ld_gate),
        before(table, rows, ld_gate) {
    for (int r = 0; r < rows; ++r)
      for (int g = 0; g < c.groups; ++g) {
        const std::vector<float> x = random.normals(c.k);
        a_op.fill(r, g * a_group, x.data(), c.k, a_group);
        a_f32.fill(r, g * a_group, x.data(), c.k, a_group);
      }
    for (int r = 0; r < rows; ++r)
      for (int i = 0; i < ld_gate; ++i) gate.set(r, i, random.normal()), before.set(r, i, random.normal());
  }

  double input(int r, int g, int k) const {
    return c.precise ? a_f32.get(r, g * a_group + k) : a_op.get(r, g * a_group + k);
  }
  bool op_out() const { return c.epilogue != Epilogue::store_f32 && c.epilogue != Epilogue::add_f32; }
  int pad() const { return op_out() ? round_up(c.groups * n_out, kStep) - c.groups * n_out : 0; }

  // rows [first, first + m) as a step of m rows
  GemmArgs args(int first, void* out, int ld_out) const {
    GemmArgs g{};
    const size_t at = static_cast<size_t>(first) * a_op.ld();
    g.a = c.precise ? a_f32.at(static_cast<int>(at)) : a_op.at(static_cast<int>(at));
    g.ld_a = a_op.ld(), g.a_group = a_group, g.precise = c.precise, g.epilogue = c.epilogue,
    g.rows = Rows::tokens;
    g.groups = c.groups, g.w = weight.packed, g.out = out, g.ld_out = ld_out, g.out_group = n_out,
    g.out_pad = pad();
    g.gate = gate.data() + static_cast<size_t>(first) * ld_gate, g.ld_gate = ld_gate, g.act = c.act;
    return g;
  }

  Bounded expected(int r, int g, int column) const {
    const bool bf16 = table.bf16_operands;
    const auto product = [&](int row) {
      Bounded x =
          dot([&](int k) { return input(r, g, k); }, [&](int k) { return weight.at(g, row, k); }, c.k);
      // fp8: one more product per scale block; f32 weights under a bf16 product are rounded
      double size = 0;
      for (int k = 0; k < c.k; ++k) size += std::abs(input(r, g, k) * weight.at(g, row, k));
      x.error += (c.k / kScaleBlock + 2) * kU * size;
      if (c.format == WeightFormat::f32 && bf16 && !c.precise) x.error += kBf16 * size;
      x.error += kTiny;
      return x;
    };
    const int at = g * n_out + column;
    switch (c.epilogue) {
      case Epilogue::store_f32:
        return product(column);
      case Epilogue::add_f32: {
        const Bounded x = product(column);
        const double sum = x.value + before.get(r, at);
        return {sum, x.error + kU * std::abs(sum)};
      }
      case Epilogue::store_op:
        return stored(product(column), bf16);
      case Epilogue::activate: {
        const int gate_row = column / kPanel * 2 * kPanel + column % kPanel;
        return stored(reference::activate(c.act, product(gate_row), product(gate_row + kPanel)), bf16);
      }
      case Epilogue::gate_op: {
        const Bounded x = product(column);
        const double open = reference::sigmoid(gate.get(r, at));
        return stored({x.value * open, x.error * open + kElementary * std::abs(x.value) * open}, bf16);
      }
    }
    return {};
  }

  const KernelTable& table;
  const GemmCase& c;
  int rows;
  Random random;
  TestWeight weight;
  int a_group, n_out, ld_gate;
  OpRows a_op;
  F32Rows a_f32;
  F32Rows gate, before;
};

template <bool kOp>
RowBuffer<kOp> run(Machine& machine, const Product& p, int first, int m, int tasks, int threads) {
  RowBuffer<kOp> out(p.table, p.rows, p.c.groups * p.n_out + 40);
  if (p.c.epilogue == Epilogue::add_f32)
    for (int r = 0; r < m; ++r)
      for (int i = 0; i < p.c.groups * p.n_out; ++i) out.set(r, i, p.before.get(first + r, i));
  machine.run(p.table.gemm, p.args(first, out.data(), out.ld()), plain_step(m), tasks, threads);
  return out;
}

template <bool kOp>
void check(Machine& machine, const Product& p, const int* sizes, size_t count) {
  const int width = p.c.groups * p.n_out, full = p.rows;
  const RowBuffer<kOp> out = run<kOp>(machine, p, 0, full, 0, 2);
  std::vector<double> actual;
  BoundedVec expected;
  for (int r = 0; r < full; ++r)
    for (int g = 0; g < p.c.groups; ++g)
      for (int i = 0; i < p.n_out; ++i)
        actual.push_back(out.get(r, g * p.n_out + i)), expected.push(p.expected(r, g, i));
  EXPECT_CLOSE(actual, expected.value, expected.error);
  for (int r = 0; r < full; ++r) {
    for (int i = width; i < width + p.pad(); ++i)
      EXPECT_EQ(out.get(r, i), 0.f) << "padding, row " << r << " column " << i;
    EXPECT_TRUE(out.untouched(r, width + p.pad())) << "row " << r << " written behind its padding";
  }
  EXPECT_TRUE(out.untouched(full, 0)) << "written behind the last row";

  for (const int tasks : {1, 3})
    EXPECT_TRUE(out.same_bytes(run<kOp>(machine, p, 0, full, tasks, tasks == 1 ? 1 : 2)))
        << tasks << " tasks";
  for (size_t i = 0; i < count; ++i) {
    const int m = sizes[i];
    const int first = m == full ? 0 : (full - m) / 2;  // the same rows at another place of the block
    const RowBuffer<kOp> some = run<kOp>(machine, p, first, m, 1, 1);
    for (int r = 0; r < m; ++r)
      ASSERT_TRUE(some.same_row(r, out, first + r, 0, width))
          << "row " << first + r << " differs in a step of " << m;
    EXPECT_TRUE(some.untouched(m, 0)) << "row behind a step of " << m;
  }
}

class Gemm : public KernelTest {};

TEST_P(Gemm, FormatsEpiloguesAndRowCounts) {
  uint64_t seed = 1;
  for (const GemmCase& c : cases::gemm_cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const Product p(table(), c, 100, ++seed);
    if (p.op_out())
      check<true>(machine(), p, cases::kRows, std::size(cases::kRows));
    else
      check<false>(machine(), p, cases::kRows, std::size(cases::kRows));
  }
}

// Row 0 of a step of one equals row 0 of 16 and of 64 at the widths people run, in both products.
TEST_P(Gemm, RowZeroAlone) {
  for (const WeightFormat format : cases::kFormats)
    for (const bool precise : {false, true}) {
      const GemmCase c{format, Epilogue::store_f32, 64, 2304, 1, precise};
      SCOPED_TRACE(::testing::Message() << c);
      const Product p(table(), c, 64, 77);
      const F32Rows all = run<false>(machine(), p, 0, 64, 2, 2), some = run<false>(machine(), p, 0, 16, 1, 1),
                    one = run<false>(machine(), p, 0, 1, 1, 1);
      EXPECT_TRUE(one.same_row(0, all, 0, 0, c.n));
      EXPECT_TRUE(one.same_row(0, some, 0, 0, c.n));
      std::vector<double> actual;
      BoundedVec expected;
      for (int r : {0, 63})
        for (int i = 0; i < c.n; ++i) actual.push_back(all.get(r, i)), expected.push(p.expected(r, 0, i));
      EXPECT_CLOSE(actual, expected.value, expected.error);
    }
}

// More rows, columns and k than any block holds (kernels.h names no limit, so there must be none): blocks of
// rows, of units and of k change no bit.
TEST_P(Gemm, ManyRowsColumnsAndK) {
  for (const WeightFormat format : cases::kFormats) {
    const GemmCase c{format, Epilogue::store_f32, 290, 1100};
    SCOPED_TRACE(::testing::Message() << c);
    const Product p(table(), c, 530, 5);
    const F32Rows all = run<false>(machine(), p, 0, 530, 1, 1), cut = run<false>(machine(), p, 0, 530, 7, 2);
    EXPECT_TRUE(all.same_bytes(cut));
    std::vector<double> actual;
    BoundedVec expected;
    for (int r : {0, 511, 512, 529}) {
      const F32Rows one = run<false>(machine(), p, r, 1, 1, 1);
      EXPECT_TRUE(one.same_row(0, all, r, 0, c.n)) << "row " << r;
      for (int i = 0; i < c.n; ++i) actual.push_back(all.get(r, i)), expected.push(p.expected(r, 0, i));
    }
    EXPECT_CLOSE(actual, expected.value, expected.error);
  }
}

TEST_P(Gemm, NoRows) {
  const GemmCase c{WeightFormat::bf16, Epilogue::store_op, 40, 40};
  const Product p(table(), c, 16, 5);
  OpRows out(table(), 16, 64), fresh(table(), 16, 64);
  const GemmArgs args = p.args(0, out.data(), out.ld());
  EXPECT_EQ(units(args, plain_step(0)), 0);
  machine().run(table().gemm, args, plain_step(0), 1, 1);
  EXPECT_TRUE(out.same_bytes(fresh));
}

// Rows::compact counts logit rows, not tokens.
TEST_P(Gemm, CompactRows) {
  const GemmCase c{WeightFormat::bf16, Epilogue::store_f32, 40, 40};
  const Product p(table(), c, 16, 6);
  F32Rows out(table(), 16, 64);
  GemmArgs args = p.args(0, out.data(), out.ld());
  args.rows = Rows::compact;
  StepHeader step = plain_step(9);
  step.logit_rows = 2;
  machine().run(table().gemm, args, step);
  EXPECT_TRUE(out.same_row(1, run<false>(machine(), p, 0, 16, 1, 1), 1, 0, c.n));
  EXPECT_TRUE(out.untouched(2, 0));
}

// Groups whose outputs lie apart (absorbed queries): each group's own columns, and between them nothing.
TEST_P(Gemm, GroupsApart) {
  const GemmCase c{WeightFormat::bf16, Epilogue::store_op, 24, 33, 3};
  const Product p(table(), c, 5, 8);
  OpRows apart(table(), 5, 128);
  GemmArgs args = p.args(0, apart.data(), apart.ld());
  args.out_group = 40, args.out_pad = 0;
  machine().run(table().gemm, args, plain_step(5));
  const OpRows together = run<true>(machine(), p, 0, 5, 1, 1);
  for (int r = 0; r < 5; ++r)
    for (int g = 0; g < 3; ++g) {
      EXPECT_TRUE(apart.same_row(r, together, r, 40 * g, 0));
      for (int i = 0; i < 24; ++i) EXPECT_EQ(apart.get(r, 40 * g + i), together.get(r, 24 * g + i));
      for (int i = 24; i < 40; ++i) EXPECT_TRUE(apart.untouched(r, 40 * g + i));
    }
}

// All 256 E4M3 codes and all 16 nibbles under extreme MX exponents go through the product exactly: an
// identity picks every weight out.
TEST_P(Gemm, EveryCode) {
  const int k = 256;
  Buffer codes(k * 16 * 2), scales(1024);
  OpRows identity(table(), k, k);
  for (int r = 0; r < k; ++r)
    for (int i = 0; i < k; ++i) identity.set(r, i, r == i);
  F32Rows out(table(), k, 16);
  GemmArgs g{};
  g.a = identity.data(), g.ld_a = k, g.epilogue = Epilogue::store_f32, g.groups = 1, g.out = out.data(),
  g.ld_out = 16;
  g.w.n = 16, g.w.k = k, g.w.codes = codes.as<std::byte>(), g.w.scales = scales.as<std::byte>();

  g.w.format = WeightFormat::e4m3;
  const float block_scale[2] = {1, 0.5f};
  std::memcpy(scales.data(), block_scale, 8);
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < k; ++i) {  // code i + c in column c: each column sees all codes but the NaNs
      const auto code = static_cast<uint8_t>(i + c);
      codes.data()[i / 4 * 64 + 2 * (2 * c + i % 2) + i % 4 / 2] = (code & 0x7F) == 0x7F ? 0 : code;
    }
  machine().run(table().gemm, g, plain_step(k));
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < k; ++i) {
      const auto code = static_cast<uint8_t>(i + c);
      const float value = (code & 0x7F) == 0x7F ? 0.f : e4m3_to_float(code);
      ASSERT_EQ(out.get(i, c), value * block_scale[i / 128]) << "code " << int{code};
    }

  g.w.format = WeightFormat::mxfp4;
  std::memset(codes.data(), 0, codes.size());
  constexpr uint8_t kExponents[] = {2, 3, 60, 126, 127, 128, 134, 191};
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < k; ++i) {
      scales.data()[i / 32 * 16 + c] = kExponents[(i / 32 + c) % 8];
      const int nibble = (i + c) % 16 == 8 ? 0 : (i + c) % 16;
      codes.data()[i / 8 * 64 + 2 * (2 * c + i % 2) + i % 8 / 4] |=
          static_cast<uint8_t>(nibble << (i % 8 / 2 % 2 * 4));
    }
  machine().run(table().gemm, g, plain_step(k));
  for (int c = 0; c < 16; ++c)
    for (int i = 0; i < k; ++i)
      ASSERT_EQ(out.get(i, c), std::ldexp(e2m1_to_float(static_cast<uint8_t>((i + c) % 16)),
                                          kExponents[(i / 32 + c) % 8] - 127))
          << "k " << i << " column " << c;

  // byte codes: mxfp8 under the extremes its scales may have, int8 of every magnitude and sign
  constexpr uint8_t kMxfp8Exponents[] = {10, 11, 60, 126, 127, 128, 134, 191};
  for (const WeightFormat format : {WeightFormat::mxfp8, WeightFormat::int8}) {
    g.w.format = format;
    const bool mx = format == WeightFormat::mxfp8;
    const auto code_of = [&](int i, int c) {
      const auto code = static_cast<uint8_t>(i + c);
      return code == 0x80 || (mx && (code & 0x7F) == 0x7F) ? uint8_t{0} : code;
    };
    for (int c = 0; c < 16; ++c) {
      const float column = std::ldexp(1.5f, c - 8);
      if (!mx) std::memcpy(scales.data() + 4 * c, &column, 4);
      for (int i = 0; i < k; ++i) {
        if (mx) scales.data()[i / 32 * 16 + c] = kMxfp8Exponents[(i / 32 + c) % 8];
        codes.data()[i / 4 * 64 + 2 * (2 * c + i % 2) + i % 4 / 2] = code_of(i, c);
      }
    }
    machine().run(table().gemm, g, plain_step(k));
    for (int c = 0; c < 16; ++c)
      for (int i = 0; i < k; ++i) {
        const int code = code_of(i, c), magnitude = code & 0x7F;
        const float expected =
            mx ? std::ldexp(e4m3_to_float(static_cast<uint8_t>(code)),
                            kMxfp8Exponents[(i / 32 + c) % 8] - 127)
               : std::ldexp(1.5f, c - 8) * static_cast<float>(code & 0x80 ? -magnitude : magnitude);
        ASSERT_EQ(out.get(i, c), expected) << format_name(format) << " k " << i << " column " << c;
      }
  }
}

WEFT_KERNEL_TESTS(Gemm);

// What a waiting thread fetches: the panels that the task's slice of (group, pair of panels) begins with.
TEST(FirstWeights, AreThoseOfTheTasksFirstPanels) {
  const std::byte codes[1] = {};
  GemmArgs a{};
  a.w = {codes, nullptr, 9 * kPanel, 64, WeightFormat::bf16};
  a.groups = 2, a.rows = Rows::tokens;
  StepHeader step{};
  step.tokens = 1;
  const struct {
    int task, group, panel;
  } expected[] = {{0, 0, 0}, {1, 0, 4}, {2, 1, 0}, {3, 1, 4}};  // ten units in four tasks: 0, 2, 5, 7
  for (const auto& e : expected) {
    const FirstWeights first = first_weights(a, step, e.task, 4);
    EXPECT_EQ(first.at, codes + e.group * a.w.code_bytes() + e.panel * a.w.panel_bytes()) << e.task;
    EXPECT_EQ(first.stride, a.w.panel_bytes());
    EXPECT_EQ(first.pieces, std::min(8, 9 - e.panel)) << e.task;
  }
  EXPECT_EQ(first_weights(NormArgs{}, step, 0, 1).pieces, 0);
}

}  // namespace
}  // namespace weft::test
