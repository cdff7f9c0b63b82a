// Which form of MLA computes a prompt's rows: expanded (keys and values rebuilt per head) or absorbed (dsa.md 1.4).
#pragma once

#include <string>

#include "model/builder.h"

namespace weft {

// First position whose prompts are computed absorbed; selects: the layer attends to a selection. A matter of the row's
// position alone.
int expand_below(MlaForm form, const ModelConfig& config, bool selects);

// The choice in words, and why: "expanded below position 3904: ...". Empty without MLA layers.
std::string explain_mla(const BuildOptions& options, const ModelConfig& config);

}  // namespace weft
