// weft plan: the memory a run will take, before anything is loaded. The engine refuses by the same numbers.
#include <memory>

#include "app/cli.h"
#include "app/explain.h"
#include "app/report.h"
#include "base/check.h"
#include "base/cpu.h"
#include "base/memory.h"
#include "kernels/dispatch.h"
#include "model/mla_form.h"
#include "model/model.h"

namespace weft {
namespace {

struct PlanFlags {
  CommonFlags common;
  int sequences = 1, checkpoints = EngineOptions{}.checkpoints;
  bool json = false, explain = false;
  int depth = 0;
};

struct Plan {
  std::string model, family, isa, tier, mla, index_cache, latent_cache;
  int context = 0, sequences = 0, checkpoints = 0, chunk = 0, threads = 0;
  MemoryPlan memory;
  size_t state_per_sequence = 0, available = 0, experts = 0;
  std::string expert_format;
};

Model plan_model(const PlanFlags& flags) {
  const EngineOptions options = engine_options(flags.common);
  BuildOptions build = build_options(options);
  build.max_logits = std::max(build.max_logits, flags.sequences);
  return {options.model, choose_kernels(options.isa, cpu_features()), build};
}

Plan make_plan(const PlanFlags& flags, const Model& model) {
  const EngineOptions options = engine_options(flags.common);
  Plan plan;
  plan.model = model.checkpoint().path();
  plan.family = model.config().family;
  plan.isa = model.kernels().isa;
  plan.tier = options.tier.name;
  plan.chunk = options.chunk;
  plan.sequences = flags.sequences;
  plan.checkpoints = model.cache_shape().slot_bytes ? flags.checkpoints : 0;
  plan.threads = options.threads > 0 ? options.threads : default_threads().threads;
  const CacheLimits limits = cache_limits(model.config(), options.context, flags.sequences, plan.checkpoints);
  plan.context = limits.max_tokens;
  plan.memory = model.memory(limits, plan.threads);
  plan.state_per_sequence = model.cache_shape().slot_bytes;
  plan.mla = explain_mla(build_options(options), model.config());
  plan.index_cache = flags.common.index_cache, plan.latent_cache = flags.common.latent_cache;
  plan.available = available_memory();
  for (const Matrix& m : model.parts().weights.matrices)
    if (is_routed_expert(m.sources[0]->name)) {
      plan.experts += m.bytes();
      plan.expert_format = format_name(m.w.format);
    }
  return plan;
}

bool fits(const Plan& plan) {
  return plan.available == 0 || plan.memory.total() <= plan.available;
}

Json plan_json(const Plan& p) {
  Json out = {{"model", p.model},
              {"family", p.family},
              {"isa", p.isa},
              {"tier", p.tier},
              {"mla", p.mla},
              {"index_cache", p.index_cache},
              {"latent_cache", p.latent_cache},
              {"context", p.context},
              {"sequences", p.sequences},
              {"checkpoints", p.checkpoints},
              {"chunk", p.chunk},
              {"threads", p.threads},
              {"weights_bytes", p.memory.weights},
              {"expert_bytes", p.experts},
              {"latent_bytes", p.memory.latent},
              {"index_bytes", p.memory.index},
              {"state_bytes", p.memory.state},
              {"state_bytes_per_sequence", p.state_per_sequence},
              {"scratch_bytes", p.memory.scratch},
              {"total_bytes", p.memory.total()},
              {"fits", fits(p)}};
  out["expert_format"] = p.experts ? Json(p.expert_format) : Json();
  out["available_bytes"] = p.available ? Json(p.available) : Json();  // null: the system does not say
  return out;
}

void print_plan(const Plan& p) {
  fmt::print("{}: {}, context {} x {} sequence{}, {} threads, {}\n", p.model, p.family, p.context,
             p.sequences, p.sequences == 1 ? "" : "s", p.threads, p.isa);
  const auto line = [](const char* what, size_t bytes, const std::string& note) {
    fmt::print("  {:<9} {:>16} bytes {:>11}  {}\n", what, bytes, human_bytes(bytes), note);
  };
  line("weights", p.memory.weights, "packed");
  if (p.experts) line(" experts", p.experts, fmt::format("of them, {}", p.expert_format));
  line("latent", p.memory.latent, "MLA cache, " + p.latent_cache);
  line("index", p.memory.index, "indexer keys, " + p.index_cache);
  line("state", p.memory.state,
       fmt::format("{} per sequence, {} saved", human_bytes(p.state_per_sequence), p.checkpoints));
  line("scratch", p.memory.scratch, fmt::format("steps of {} tokens", p.chunk));
  line("total", p.memory.total(), "");
  if (!p.mla.empty()) fmt::print("prompts   MLA {}\n", p.mla);
  if (p.available == 0)
    fmt::print("the system does not say how much memory is available\n");
  else if (fits(p))
    fmt::print("fits: {} available, {} to spare\n", human_bytes(p.available),
               human_bytes(p.available - p.memory.total()));
  else
    fmt::print("does not fit: {} available, {} missing\n", human_bytes(p.available),
               human_bytes(p.memory.total() - p.available));
}

}  // namespace

void add_plan(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("plan", "Show the memory a run takes, without reading the weights");
  auto flags = std::make_shared<PlanFlags>();
  add_engine_flags(*sub, flags->common);
  sub->add_option("--sequences", flags->sequences, "Sequences at once (default: 1)")
      ->type_name("N")
      ->check(CLI::Range(1, 65536));
  sub->add_option(
         "--checkpoints", flags->checkpoints,
         fmt::format("Saved states, for conversations that go back (default: {})", flags->checkpoints))
      ->type_name("N")
      ->check(CLI::Range(0, 65536));
  sub->add_flag("--explain", flags->explain,
                "Also every node of a step: stage, stream, tasks, bytes, what it waits for");
  sub->add_option("--depth", flags->depth, "Context the explained steps lie behind (default: 0)")
      ->type_name("N")
      ->check(CLI::Range(0, 1 << 24));
  sub->add_flag("--json", flags->json, "As JSON");
  sub->callback([flags] {
    if (flags->json && flags->explain) usage("--json and --explain: choose one");
    const Model model = plan_model(*flags);
    const Plan plan = make_plan(*flags, model);
    if (flags->json)
      print_json(plan_json(plan));
    else
      print_plan(plan);
    if (flags->explain) explain_steps(model, plan.threads, flags->depth);
  });
}

}  // namespace weft
