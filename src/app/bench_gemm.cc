// Timed cases of the packed product and of the routed experts.
#include <fmt/core.h>
#include <algorithm>

#include "app/bench_lab.h"
#include "kernels/cases.h"

namespace weft {
namespace {

// `copy` of weights that lie behind one another.
PackedWeight copy_of(PackedWeight w, int copy) {
  w.codes += w.code_bytes() * copy;
  if (w.scales) w.scales += w.scale_bytes() * copy;
  return w;
}

Timed make_gemm(Lab& lab, const cases::GemmCase& c, int m) {
  const int pad = 32;  // rows 64 bytes longer than a power of two, as the builder lays them
  const int n_out = c.epilogue == Epilogue::activate ? c.n / 2 : c.n;
  const bool op_out = c.epilogue != Epilogue::store_f32 && c.epilogue != Epilogue::add_f32;
  PackedWeight w;
  w.format = c.format, w.n = c.n, w.k = c.k;
  Timed timed;
  timed.copies = lab.copies(static_cast<double>(w.code_bytes() + w.scale_bytes()));
  w = lab.weight(c.format, c.n, c.k, timed.copies);
  GemmArgs g{};
  g.ld_a = w.k_padded() + pad;
  g.a = c.precise ? static_cast<const void*>(lab.f32(static_cast<size_t>(round_up(m, 16)) * g.ld_a))
                  : lab.operand(m, g.ld_a);
  g.precise = c.precise, g.epilogue = c.epilogue, g.rows = Rows::tokens, g.groups = 1, g.w = w;
  g.ld_out = round_up(n_out, kStep) + pad;
  g.out = op_out ? lab.operand_room(m, g.ld_out)
                 : static_cast<void*>(lab.f32_room(static_cast<size_t>(round_up(m, 16)) * g.ld_out));
  g.act = c.act;
  if (c.epilogue == Epilogue::gate_op)
    g.gate = lab.f32(static_cast<size_t>(m) * g.ld_out), g.ld_gate = g.ld_out;
  const StepHeader& step = lab.rows(m);
  timed.cost = cost(g, step);
  if (c.precise) timed.peak = Peak::fma;
  timed.run = [&lab, &step, g](int copy) {
    GemmArgs args = g;
    args.w = copy_of(g.w, copy);
    lab.launch(lab.kernels.gemm, args, step);
  };
  return timed;
}

// Experts of one layer; cold: as many layers as it takes. Tokens spread evenly, each over top_k neighbours.
Timed make_moe(Lab& lab, const cases::MoeCase& c) {
  Timed timed;
  PackedWeight up, down;
  up.format = down.format = c.format;
  up.n = 2 * c.intermediate, up.k = c.width, down.n = c.width, down.k = c.intermediate;
  const double all =
      static_cast<double>(up.code_bytes() + up.scale_bytes() + down.code_bytes() + down.scale_bytes()) *
      c.experts;
  timed.copies = lab.copies(all);
  up = lab.weight(c.format, up.n, up.k, c.experts * timed.copies);
  down = lab.weight(c.format, down.n, down.k, c.experts * timed.copies);
  const StepHeader& step = lab.rows(c.tokens);
  const int slots = c.tokens * c.top_k;
  std::vector<int32_t> expert;
  for (int t = 0; t < c.tokens; ++t) {
    std::vector<int32_t> chosen;
    for (int j = 0; j < c.top_k; ++j)
      chosen.push_back((t * 5 + j * (c.experts / c.top_k) + t / c.experts) % c.experts);
    std::sort(chosen.begin(), chosen.end());
    expert.insert(expert.end(), chosen.begin(), chosen.end());
  }
  const auto zeros = [&](int n) { return lab.ints(std::vector<int32_t>(n)); };
  ExpertSortArgs sort{lab.ints(expert),     c.experts,    c.top_k,     zeros(c.experts + 1),
                      zeros(c.experts + 1), zeros(slots), zeros(slots)};
  ExpertUpArgs u{};
  u.ld_x = up.k_padded() + kStep, u.x = lab.operand(c.tokens, u.ld_x), u.w = up;
  u.expert_codes = up.code_bytes(), u.expert_scales = up.scale_bytes();
  u.active = sort.active, u.start = sort.start, u.slot_token = sort.slot_token;
  u.experts = c.experts, u.top_k = c.top_k, u.intermediate = c.intermediate, u.act = c.act;
  u.ld_h = down.k_padded() + kStep, u.h = lab.operand_room(slots, u.ld_h);
  ExpertDownArgs d{};
  d.h = u.h, d.ld_h = u.ld_h, d.w = down, d.expert_codes = down.code_bytes(),
  d.expert_scales = down.scale_bytes();
  d.active = sort.active, d.start = sort.start, d.experts = c.experts, d.top_k = c.top_k, d.width = c.width;
  d.ld_y = round_up(c.width, kStep) + kStep,
  d.y = lab.f32_room(static_cast<size_t>(round_up(slots, 16)) * d.ld_y);
  CombineArgs m{d.y, d.ld_y, lab.f32(slots), sort.slot_of, c.top_k, c.width, 1, nullptr, d.ld_y};
  m.out = lab.f32(static_cast<size_t>(c.tokens) * m.ld_out);
  const Cost parts[] = {cost(u, step), cost(d, step)};
  for (const Cost& part : parts) timed.cost.bytes += part.bytes, timed.cost.flops += part.flops;
  timed.run = [=, &lab, &step, experts = c.experts](int copy) {
    ExpertUpArgs up_args = u;
    ExpertDownArgs down_args = d;
    up_args.w = copy_of(u.w, copy * experts), down_args.w = copy_of(d.w, copy * experts);
    lab.launch(lab.kernels.expert_sort, sort, step);
    lab.launch(lab.kernels.expert_up, up_args, step);
    lab.launch(lab.kernels.expert_down, down_args, step);
    lab.launch(lab.kernels.combine, m, step);
  };
  return timed;
}

}  // namespace

void add_gemm_cases(std::vector<KernelCase>& all) {
  for (const cases::GemmCase& c : cases::real_gemm_cases())
    for (const int m : cases::kRealRows)
      all.push_back({"gemm",
                     fmt::format("{} {} {}x{} m {}{}", cases::name(c.format), cases::name(c.epilogue), c.n,
                                 c.k, m, c.precise ? " precise" : ""),
                     [c, m](Lab& lab) { return make_gemm(lab, c, m); }});
}

void add_moe_cases(std::vector<KernelCase>& all) {
  for (const cases::MoeCase& c : cases::real_moe_cases())
    all.push_back({"moe",
                   fmt::format("{} {}x{} {} experts top-{} tokens {}", cases::name(c.format), c.width,
                               c.intermediate, c.experts, c.top_k, c.tokens),
                   [c](Lab& lab) { return make_moe(lab, c); }});
}

}  // namespace weft
