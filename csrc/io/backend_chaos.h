// A backend that puts troubles in another one's way, from a seed: results that are short, interrupted, late,
// out of order, or errors. For tests: everything above a backend must come through with every byte accounted
// for. It stays within what a kernel may do. With `until` results come in only while that descriptor is
// readable, so that a test knows what is still under way; who closes or drains an engine waits for it like
// for a slow drive. Owns the other backend, what it holds back, and a duplicate of the descriptor.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "io/backend.h"

namespace swapper {

// Throws ConfigError if `until` is not an open descriptor.
std::unique_ptr<Backend> make_chaos_backend(std::unique_ptr<Backend> inner, const ChaosOptions& options);

// Throws ConfigError for an unknown name or a number out of range.
ChaosOptions parse_chaos(const std::map<std::string, double>& options);

}  // namespace swapper
