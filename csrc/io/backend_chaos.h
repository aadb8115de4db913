// A backend that puts troubles in another one's way, from a seed: results that are short, interrupted, late,
// out of order, or errors. For tests: everything above a backend must come through with every byte accounted
// for. It stays within what a kernel may do. Owns the other backend and what it holds back.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "io/backend.h"

namespace swapper {

std::unique_ptr<Backend> make_chaos_backend(std::unique_ptr<Backend> inner, const ChaosOptions& options);

// Throws ConfigError for an unknown name or a rate outside of [0, 1].
ChaosOptions parse_chaos(const std::map<std::string, double>& options);

}  // namespace swapper
