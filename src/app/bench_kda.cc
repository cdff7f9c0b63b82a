// Timed cases of the recurrence, decode and prefill.
#include <fmt/core.h>

#include "app/bench_lab.h"

namespace weft {
namespace {

size_t rows_of(int tokens, int ld) {
  return static_cast<size_t>(round_up(tokens, 16)) * ld;
}

// `batch` sequences of `length` tokens each behind a prompt. Cold: states and projections from memory.
Timed make_kda(Lab& lab, int heads, int batch, int length) {
  constexpr int kDim = 128, kTaps = 4;
  const int tokens = batch * length, width = heads * kDim;
  StepHeader& step = lab.sequences(std::vector<Lab::Sequence>(batch, {kPageTokens, length}));
  KdaArgs a{};
  a.heads = heads, a.key_dim = a.value_dim = a.v_stride = kDim, a.taps = kTaps;
  a.conv_stride = 3 * width, a.k_offset = width, a.v_offset = 2 * width;
  a.tail_offset = static_cast<size_t>(heads) * kDim * kDim * 4;
  step.state_stride = a.tail_offset + static_cast<size_t>(kTaps - 1) * a.conv_stride * 4;
  a.ld_qkv = 3 * width + kStep, a.ld_decay = a.ld_gate = width + kStep, a.ld_beta = heads,
  a.ld_out = width + kStep;
  a.conv = lab.f32(static_cast<size_t>(kTaps) * a.conv_stride), a.slope = lab.f32(heads),
  a.bias = lab.f32(width);
  a.norm = lab.f32(kDim), a.bounded = 1, a.lower_bound = -5, a.norm_eps = 1e-5f;
  Timed timed;
  timed.cost = cost(a, step);
  timed.copies = lab.copies(timed.cost.bytes);
  const size_t qkv = rows_of(tokens, a.ld_qkv), wide = rows_of(tokens, a.ld_gate),
               beta = rows_of(tokens, a.ld_beta);
  const size_t states = step.state_stride * batch;
  const int rows = round_up(tokens, 16) * timed.copies;
  const auto* q = static_cast<const std::byte*>(lab.operand(rows, a.ld_qkv));
  const auto* d = static_cast<const std::byte*>(lab.operand(rows, a.ld_decay));
  const auto* g = static_cast<const std::byte*>(lab.operand(rows, a.ld_gate));
  const auto* b = static_cast<const std::byte*>(lab.operand(rows, a.ld_beta));
  const size_t size = lab.kernels.operand_bytes();
  a.state = reinterpret_cast<std::byte*>(lab.f32(states / 4 * timed.copies));
  a.out = lab.operand_room(tokens, a.ld_out);
  timed.run = [=, &lab, &step](int copy) {
    KdaArgs args = a;
    args.qkv = q + qkv * size * copy, args.decay = d + wide * size * copy, args.gate = g + wide * size * copy;
    args.beta = b + beta * size * copy;
    args.state += states * copy;
    lab.launch(lab.kernels.kda, args, step);
  };
  return timed;
}

}  // namespace

void add_kda_cases(std::vector<KernelCase>& all) {
  for (const int heads : {8, 96})
    for (const auto& [batch, length] : {std::pair{1, 1}, {8, 1}, {1, 64}, {1, 512}, {4, 128}})
      all.push_back({"kda", fmt::format("heads {} batch {} tokens {}", heads, batch, length),
                     [heads, batch, length](Lab& lab) { return make_kda(lab, heads, batch, length); }});
}

}  // namespace weft
