// How the tools print.
#pragma once

#include <string>

#include "base/json.h"

namespace weft {

std::string human_bytes(size_t bytes);  // "1.23 GiB", "45.6 MiB", "789 bytes"
void print_json(const Json& json);      // to stdout, indented

}  // namespace weft
