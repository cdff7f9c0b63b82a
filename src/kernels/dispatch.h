// Which ISA's kernel table this process runs.
#pragma once

#include <string>
#include <vector>

#include "base/cpu.h"
#include "kernels/kernels.h"

namespace weft {

struct IsaChoice {
  const KernelTable* table;
  std::string name;
  std::string missing;  // empty: usable here; else what the machine or the system lacks
};

// Best first.
std::vector<IsaChoice> isa_choices(const CpuFeatures& features);

// `wanted` (--isa) wins over $WEFT_ISA; empty takes the best usable one.
// error (usage): unknown name; usable names are listed; wanted but unusable: what is missing.
const KernelTable& choose_kernels(const std::string& wanted, const CpuFeatures& features);

// One line per ISA: taken, or why not.
std::string explain_isas(const CpuFeatures& features);

}  // namespace weft
