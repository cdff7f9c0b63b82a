// weft eval: what a model's numbers are worth. One subcommand per file.
#pragma once

#include "app/cli.h"

namespace weft {

void add_eval_ppl(CLI::App& eval);
void add_eval_kld(CLI::App& eval);
void add_eval_needle(CLI::App& eval);
void add_eval_overlap(CLI::App& eval);
void add_eval_tiers(CLI::App& eval);

}  // namespace weft
