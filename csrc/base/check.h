// Checks the engine's own invariants, in release builds too: code that hands addresses to the kernel must
// stop the process before it writes wrong bytes to a checkpoint. Errors of the caller and of the system are
// exceptions instead (error.h).
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
