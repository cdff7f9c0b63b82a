#include "kernels/dispatch.h"

#include <cstdlib>
#include <cstring>

#include "base/check.h"

namespace weft {
#include "isa_list.inc"

std::vector<IsaChoice> isa_choices(const CpuFeatures& features) {
  std::vector<IsaChoice> choices;
  for (const IsaEntry& entry : kIsas) {
    const std::string needs = entry.needs;
    std::string missing;
    if (needs == "avx2") missing = features.no_avx2;
    else if (needs == "avx512") missing = features.no_avx512;
    else if (needs == "amx") missing = features.no_amx;
    else WEFT_CHECK(needs.empty(), "unknown feature tier {}", needs);
    choices.push_back({entry.table, entry.table->isa, missing});
  }
  return choices;
}

const KernelTable& choose_kernels(const std::string& wanted, const CpuFeatures& features) {
  const char* variable = std::getenv("WEFT_ISA");
  const std::string name = !wanted.empty() ? wanted : variable ? variable : "";
  std::string usable;
  for (const IsaChoice& choice : isa_choices(features)) {
    if (choice.missing.empty()) usable += usable.empty() ? choice.name : ", " + choice.name;
    if (name.empty() ? choice.missing.empty() : choice.name == name) {
      if (choice.missing.empty()) return *choice.table;
      usage("{}={}: this machine cannot run it: {}", wanted.empty() ? "WEFT_ISA" : "--isa", name, choice.missing);
    }
  }
  usage("{}={}: unknown instruction set; usable here: {}", wanted.empty() ? "WEFT_ISA" : "--isa", name, usable);
}

std::string explain_isas(const CpuFeatures& features) {
  std::string text;
  for (const IsaChoice& choice : isa_choices(features))
    text += fmt::format("{:<9} {}\n", choice.name, choice.missing.empty() ? "usable" : choice.missing);
  return text;
}

}  // namespace weft
