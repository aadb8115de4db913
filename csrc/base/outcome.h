// How an operation ended, for those who ask and must not wait, as the handler of a fault. Owns nothing.
#pragma once

#include <cstdint>

namespace swapper {

enum class Outcome : std::uint8_t { pending, succeeded, failed };

}  // namespace swapper
