// Wraps another backend and injects faults from a seed: results that are short, interrupted, late, out of
// order, or errors. For tests: everything above a backend must still account for every byte. It does nothing
// that a kernel may not do. With `until`, results arrive only while that descriptor is readable, so that a
// test knows what is in flight; closing or draining an engine waits for it as for a slow drive. Owns the
// inner backend, the results it holds, and a duplicate of the descriptor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "io/backend.h"

namespace swapper {

// Throws ConfigError if `until` is not an open descriptor.
[[nodiscard]] std::unique_ptr<Backend> make_chaos_backend(std::unique_ptr<Backend> inner,
                                                          const ChaosOptions& options);

// Throws ConfigError for an unknown name or a number out of range.
[[nodiscard]] ChaosOptions parse_chaos(const std::map<std::string, double>& options);

}  // namespace swapper
