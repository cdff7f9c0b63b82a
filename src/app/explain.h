// What a step consists of: nodes, stages, streams, tasks and memory, and why.
#pragma once

#include "model/model.h"

namespace weft {

// Prints the steps of one token and of a whole prompt chunk, both behind `depth` tokens of context.
void explain_steps(const Model& model, int threads, int depth);

}  // namespace weft
