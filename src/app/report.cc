#include "app/report.h"

#include <fmt/core.h>

namespace weft {

std::string human_bytes(size_t bytes) {
  const double b = static_cast<double>(bytes);
  if (bytes >= size_t{1} << 30) return fmt::format("{:.2f} GiB", b / 0x1p30);
  if (bytes >= size_t{1} << 20) return fmt::format("{:.1f} MiB", b / 0x1p20);
  if (bytes >= size_t{1} << 10) return fmt::format("{:.1f} KiB", b / 0x1p10);
  return fmt::format("{} bytes", bytes);
}

// Names come from files: bytes that are no UTF-8 become U+FFFD instead of an exception.
void print_json(const Json& json) {
  fmt::print("{}\n", json.dump(2, ' ', false, Json::error_handler_t::replace));
}

}  // namespace weft
