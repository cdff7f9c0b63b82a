// Timed cases of the packed product and of the routed experts.
#include <fmt/core.h>

#include <dlfcn.h>
#include <algorithm>
#include <filesystem>
#include <memory>

#include "app/bench_lab.h"
#include "kernels/cases.h"

namespace weft {
namespace {

// oneDNN's product of one shape, from the module beside the program (bench/onednn.cc), if it was built.
class OneDnn {
 public:
  OneDnn(int m, int n, int k, int copies, int threads) {
    static void* const module = [] {
      std::error_code error;
      const auto program = std::filesystem::read_symlink("/proc/self/exe", error);
      return error ? nullptr
                   : dlopen((program.parent_path() / "libweft_onednn.so").c_str(), RTLD_NOW | RTLD_LOCAL);
    }();
    if (!module) return;
    const auto create =
        reinterpret_cast<void* (*)(int, int, int, int, int)>(dlsym(module, "weft_onednn_create"));
    run_ = reinterpret_cast<void (*)(void*, int)>(dlsym(module, "weft_onednn_run"));
    destroy_ = reinterpret_cast<void (*)(void*)>(dlsym(module, "weft_onednn_destroy"));
    if (create && run_ && destroy_) product_ = create(m, n, k, copies, threads);
  }
  ~OneDnn() {
    if (product_) destroy_(product_);
  }
  OneDnn(const OneDnn&) = delete;
  explicit operator bool() const { return product_ != nullptr; }
  void run(int copy) const { run_(product_, copy); }

 private:
  void* product_ = nullptr;
  void (*run_)(void*, int) = nullptr;
  void (*destroy_)(void*) = nullptr;
};

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
  if (lab.compare && c.format == WeightFormat::bf16 && c.epilogue == Epilogue::store_f32) {
    const auto other = std::make_shared<OneDnn>(m, c.n, c.k, timed.copies, lab.threads());
    // oneDNN leaves tiles released or configured its own way; ours are configured once per thread.
    const auto ours = lab.kernels.thread_init;
    if (ours) ours();
    if (*other)
      timed.others.emplace_back("oneDNN", [other, ours](int copy) {
        other->run(copy);
        if (ours) ours();
      });
  }
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
  const ExpertSortArgs sort{lab.ints(expert),     c.experts,    c.top_k,      zeros(c.experts + 1),
                            zeros(c.experts + 1), zeros(slots), zeros(slots), zeros(2 * c.experts + 1)};
  ExpertsArgs x{};
  x.ld_x = up.k_padded() + kStep, x.x = lab.operand(c.tokens, x.ld_x), x.up = up, x.down = down;
  x.up_codes = up.code_bytes(), x.up_scales = up.scale_bytes();
  x.down_codes = down.code_bytes(), x.down_scales = down.scale_bytes();
  x.active = sort.active, x.start = sort.start, x.slot_token = sort.slot_token, x.progress = sort.progress;
  x.experts = c.experts, x.top_k = c.top_k, x.intermediate = c.intermediate, x.width = c.width, x.act = c.act;
  x.ld_h = down.k_padded() + kStep, x.h = lab.operand_room(slots, x.ld_h);
  x.ld_y = round_up(c.width, kStep) + kStep,
  x.y = lab.f32_room(static_cast<size_t>(round_up(slots, 16)) * x.ld_y);
  CombineArgs m{x.y, x.ld_y, lab.f32(slots), sort.slot_of, c.top_k, c.width, 1, nullptr, x.ld_y};
  m.out = lab.f32(static_cast<size_t>(c.tokens) * m.ld_out);
  timed.cost = cost(x, step);
  timed.run = [=, &lab, &step, experts = c.experts](int copy) {
    ExpertsArgs args = x;
    args.up = copy_of(x.up, copy * experts), args.down = copy_of(x.down, copy * experts);
    lab.launch(lab.kernels.expert_sort, sort, step);
    lab.launch(lab.kernels.experts, args, step);
    lab.launch(lab.kernels.combine, m, step);
  };
  return timed;
}

}  // namespace

void add_gemm_cases(std::vector<KernelCase>& all) {
  for (const cases::GemmCase& c : cases::real_gemm_cases())
    for (const int m : cases::kRealRows)
      all.push_back({"gemm",
                     fmt::format("{} {} {}x{} m {}{}", format_name(c.format), cases::name(c.epilogue), c.n,
                                 c.k, m, c.precise ? " precise" : ""),
                     [c, m](Lab& lab) { return make_gemm(lab, c, m); }});
}

void add_moe_cases(std::vector<KernelCase>& all) {
  for (const cases::MoeCase& c : cases::real_moe_cases())
    all.push_back({"moe",
                   fmt::format("{} {}x{} {} experts top-{} tokens {}", format_name(c.format), c.width,
                               c.intermediate, c.experts, c.top_k, c.tokens),
                   [c](Lab& lab) { return make_moe(lab, c); }});
}

}  // namespace weft
