#include "base/check.h"

#include <cstdio>
#include <cstdlib>

namespace weft {

void check_failed(const char* file, int line, const char* expression, const std::string& message) {
  std::fprintf(stderr, "%s:%d: check failed: %s %s\n", file, line, expression, message.c_str());
  std::abort();
}

}  // namespace weft
