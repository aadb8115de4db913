// Checks of the engine's own rules, on in release builds too: a broken invariant in code that hands addresses
// to the kernel must stop the process at once, before it writes the wrong bytes to somebody's checkpoint.
// Mistakes of the caller and failures of the system are not for these: they are exceptions (error.h).
#pragma once

#include <cstdio>
#include <cstdlib>

namespace swapper {

[[noreturn]] inline void check_failed(const char* condition, const char* why, const char* file, int line) {
  std::fprintf(stderr, "swapper: broken invariant at %s:%d: %s (%s)\n", file, line, why, condition);
  std::abort();
}

}  // namespace swapper

#define SWAPPER_CHECK(condition, why) \
  ((condition) ? static_cast<void>(0) : ::swapper::check_failed(#condition, why, __FILE__, __LINE__))
