#include "app/eval.h"

namespace weft {

void add_eval(CLI::App& app) {
  CLI::App* sub = app.add_subcommand(
      "eval", "Measure quality: perplexity, divergence from a reference run, facts found in long texts");
  sub->require_subcommand(1);
  add_eval_ppl(*sub);
  add_eval_kld(*sub);
  add_eval_needle(*sub);
  add_eval_overlap(*sub);
  add_eval_tiers(*sub);
}

}  // namespace weft
