// Timed cases of the row-wise kernels: norms, Attention Residuals, hyper-connections, weighted sums. All of
// them only move rows, so their bound is bandwidth.
#include <fmt/core.h>

#include <algorithm>

#include "app/bench_lab.h"
#include "kernels/cases.h"

namespace weft {
namespace {

// One kernel over buffers of its own per copy: args[copy].
template <class Args>
Timed each_copy(Lab& lab, KernelFn<Args> kernel, const StepHeader& step, std::vector<Args> args) {
  Timed timed;
  timed.copies = static_cast<int>(args.size());
  timed.cost = cost(args[0], step);
  timed.peak = Peak::fma;
  timed.run = [&lab, &step, kernel, args = std::move(args)](int copy) {
    lab.launch(kernel, args[copy], step);
  };
  return timed;
}
// `make()` builds the arguments of one copy; they are made until the copies are beyond the caches.
template <class Args, class Make>
Timed rotate(Lab& lab, KernelFn<Args> kernel, const StepHeader& step, const Make& make) {
  std::vector<Args> args = {make()};
  for (int copies = lab.copies(cost(args[0], step).bytes);
       static_cast<int>(args.size()) < std::min(copies, 16384);)
    args.push_back(make());
  return each_copy(lab, kernel, step, std::move(args));
}

Timed make_norm(Lab& lab, const cases::RowsCase& c) {
  const StepHeader& step = lab.rows(c.tokens);
  return rotate(lab, lab.kernels.norm, step, [&] {
    NormArgs n{};
    n.ld_x = n.ld_op = round_up(c.width, kStep) + kStep, n.width = c.width, n.eps = 1e-6f,
    n.rows = Rows::tokens;
    n.x = lab.f32(static_cast<size_t>(c.tokens) * n.ld_x), n.weight = lab.f32(c.width);
    n.out_op = lab.operand_room(c.tokens, n.ld_op);
    return n;
  });
}

Timed make_mix(Lab& lab, const cases::RowsCase& c) {
  const StepHeader& step = lab.rows(c.tokens);
  return rotate(lab, lab.kernels.mix, step, [&] {
    MixArgs m{};
    m.sources = c.parts, m.ld = m.ld_op = round_up(c.width, kStep) + kStep, m.width = c.width;
    for (int i = 0; i < c.parts; ++i) m.source[i] = lab.f32(static_cast<size_t>(c.tokens) * m.ld);
    m.query = lab.f32(c.width), m.norm = lab.f32(c.width), m.mix_eps = m.eps = 1e-6f, m.rows = Rows::tokens;
    m.out_op = lab.operand_room(c.tokens, m.ld_op);
    return m;
  });
}

// The first stage for kMaxBankSites sub-layers, and the second of one of them.
Timed make_mix_bank(Lab& lab, const cases::RowsCase& c) {
  const StepHeader& step = lab.rows(c.tokens);
  return rotate(lab, lab.kernels.mix_bank, step, [&] {
    MixBankArgs m{};
    m.sources = c.parts, m.ld = round_up(c.width, kStep) + kStep, m.width = c.width, m.mix_eps = 1e-6f;
    m.sites = kMaxBankSites, m.row = round_up(c.width, 16) + 16, m.ld_out = m.sites * m.row;
    for (int i = 0; i < c.parts; ++i) m.source[i] = lab.f32(static_cast<size_t>(c.tokens) * m.ld);
    for (int i = 0; i < m.sites; ++i) m.query[i] = lab.f32(c.width);
    m.out = lab.f32_room(static_cast<size_t>(c.tokens) * m.ld_out);
    return m;
  });
}
Timed make_mix_fold(Lab& lab, const cases::RowsCase& c) {
  const StepHeader& step = lab.rows(c.tokens);
  return rotate(lab, lab.kernels.mix, step, [&] {
    MixArgs m{};
    m.sources = 1, m.ld = m.ld_op = round_up(c.width, kStep) + kStep, m.width = c.width;
    m.ld_bank = round_up(c.width, 16) + 16;
    m.source[0] = lab.f32(static_cast<size_t>(c.tokens) * m.ld);
    m.bank = lab.f32(static_cast<size_t>(c.tokens) * m.ld_bank);
    m.query = lab.f32(c.width), m.norm = lab.f32(c.width), m.mix_eps = m.eps = 1e-6f, m.rows = Rows::tokens;
    m.out_op = lab.operand_room(c.tokens, m.ld_op);
    return m;
  });
}

Timed make_hc_pre(Lab& lab, const cases::RowsCase& c) {
  const StepHeader& step = lab.rows(c.tokens);
  return rotate(lab, lab.kernels.hc_pre, step, [&] {
    HcPreArgs h{};
    h.ld_x = c.parts * c.width + kStep, h.ld_op = c.width + kStep, h.ld_map = 32, h.streams = c.parts;
    h.width = c.width, h.iterations = 20, h.eps = 1e-6f, h.hc_eps = 1e-6f;
    h.x = lab.f32(static_cast<size_t>(c.tokens) * h.ld_x),
    h.map = lab.f32(static_cast<size_t>(c.tokens) * 32);
    h.scale = lab.f32(16), h.base = lab.f32(32), h.norm = lab.f32(c.width);
    h.keep = lab.f32_room(static_cast<size_t>(c.tokens) * 32), h.out_op = lab.operand_room(c.tokens, h.ld_op);
    return h;
  });
}

Timed make_hc_post(Lab& lab, const cases::RowsCase& c) {
  const StepHeader& step = lab.rows(c.tokens);
  return rotate(lab, lab.kernels.hc_post, step, [&] {
    HcPostArgs h{};
    h.ld_x = c.parts * c.width + kStep, h.ld_y = c.width + kStep, h.streams = c.parts, h.width = c.width;
    h.x = lab.f32(static_cast<size_t>(c.tokens) * h.ld_x),
    h.y = lab.f32(static_cast<size_t>(c.tokens) * h.ld_y);
    // post 0, C the mean: applied in place again and again, the streams stay what they are
    float* keep = lab.f32_room(static_cast<size_t>(c.tokens) * 32);
    for (int t = 0; t < c.tokens; ++t)
      for (int i = 0; i < c.parts * c.parts; ++i) keep[32 * t + 8 + i] = 1.f / static_cast<float>(c.parts);
    h.keep = keep;
    return h;
  });
}

}  // namespace

void add_row_cases(std::vector<KernelCase>& all) {
  const auto add = [&](const char* kernel, const cases::RowsCase& c,
                       Timed (*make)(Lab&, const cases::RowsCase&)) {
    const std::string parts = c.parts > 1 ? fmt::format(" of {}", c.parts) : "";
    all.push_back({kernel, fmt::format("width {}{} tokens {}", c.width, parts, c.tokens),
                   [c, make](Lab& lab) { return make(lab, c); }});
  };
  for (const int tokens : {1, 512}) {
    add("norm", {7168, 1, tokens}, make_norm);
    for (const int finished : {1, 4, 8}) {
      add("mix", {7168, finished + 1, tokens}, make_mix);
      add("mix_bank", {7168, finished, tokens}, make_mix_bank);
    }
    add("mix_fold", {7168, 1, tokens}, make_mix_fold);
    add("hc_pre", {4096, 4, tokens}, make_hc_pre);
    add("hc_post", {4096, 4, tokens}, make_hc_post);
  }
}

}  // namespace weft
