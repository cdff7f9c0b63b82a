#include "model/arch.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <string_view>
#include <vector>

#include "base/check.h"

namespace weft {
namespace {

// A function's static, because registrations of other files may run before this file's own statics.
std::vector<const Arch*>& registry() {
  static std::vector<const Arch*> archs;
  return archs;
}

std::string text_of(const Json& json, const char* key) {
  const auto entry = json.is_object() ? json.find(key) : json.end();
  if (!json.is_object() || entry == json.end()) return "missing";
  return printable(entry->dump(-1, ' ', false, Json::error_handler_t::replace), 80);
}

}  // namespace

std::span<const Arch* const> all_archs() {
  return registry();
}

ArchRegistration::ArchRegistration(const Arch& arch) {
  // Sorted: the order of static initialisation across files is the linker's, and error messages list the
  // families.
  auto& archs = registry();
  const auto by_name = [](const Arch* a, const Arch* b) { return std::string_view(a->family) < b->family; };
  archs.insert(std::upper_bound(archs.begin(), archs.end(), &arch, by_name), &arch);
}

const Arch& find_arch(const Json& json, const std::string& where, const Checkpoint* checkpoint) {
  const Arch* chosen = nullptr;
  std::vector<const char*> known;
  for (const Arch* arch : all_archs()) {
    known.push_back(arch->family);
    if (!arch->matches(json, checkpoint)) continue;
    WEFT_CHECK(chosen == nullptr, "both {} and {} match {}", chosen->family, arch->family, where);
    chosen = arch;
  }
  if (chosen == nullptr) {
    fail("{}: architectures is {} and model_type is {}, expected one of the families {}",
         printable(where, 300), text_of(json, "architectures"), text_of(json, "model_type"),
         fmt::join(known, ", "));
  }
  return *chosen;
}

}  // namespace weft
