// The outcome of an operation, for readers that must not wait, such as the fault handler. Owns nothing.
#pragma once

#include <cstdint>

namespace swapper {

enum class Outcome : std::uint8_t { pending, succeeded, failed };

}  // namespace swapper
