// How weft says that something is wrong.
//
//  * fail(...)  throws Error: a file, a configuration, a socket, an argument. The message is one line that says
//               what is wrong, where, and what to do.
//  * CHECK(...) the impossible: prints the expression and its message, then aborts.
//  * DCHECK     the same on hot paths, gone in release builds.
#pragma once

#include <fmt/core.h>

#include <stdexcept>
#include <string>

namespace weft {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Wrong flags or arguments: exit code 2 instead of 1.
class UsageError : public Error {
 public:
  using Error::Error;
};

template <class... Args>
[[noreturn]] void fail(fmt::format_string<Args...> format, Args&&... args) {
  throw Error(fmt::format(format, std::forward<Args>(args)...));
}

template <class... Args>
[[noreturn]] void usage(fmt::format_string<Args...> format, Args&&... args) {
  throw UsageError(fmt::format(format, std::forward<Args>(args)...));
}

[[noreturn]] void check_failed(const char* file, int line, const char* expression, const std::string& message);

}  // namespace weft

#define WEFT_CHECK(condition, ...)                                                           \
  do {                                                                                       \
    if (!(condition)) [[unlikely]]                                                           \
      ::weft::check_failed(__FILE__, __LINE__, #condition, ::fmt::format("" __VA_ARGS__));   \
  } while (0)

#ifdef NDEBUG
#define WEFT_DCHECK(condition, ...) ((void)0)
#else
#define WEFT_DCHECK(condition, ...) WEFT_CHECK(condition, __VA_ARGS__)
#endif
