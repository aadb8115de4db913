// Rounds to alignments, which are powers of two: sectors, pages, huge pages. All rounding in the data plane
// goes through these functions. Owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swapper {

inline constexpr std::size_t kPageBytes = 4096;
inline constexpr std::size_t kHugePageBytes = std::size_t{2} << 20;

constexpr std::uint64_t align_down(std::uint64_t value, std::uint64_t alignment) {
  return value - value % alignment;
}

constexpr std::uint64_t align_up(std::uint64_t value, std::uint64_t alignment) {
  return align_down(value + alignment - 1, alignment);
}

constexpr bool is_aligned(std::uint64_t value, std::uint64_t alignment) {
  return value % alignment == 0;
}

// True if [offset, offset + nbytes) lies in [0, limit); computed without overflow.
constexpr bool in_range(std::uint64_t offset, std::uint64_t nbytes, std::uint64_t limit) {
  return offset <= limit && nbytes <= limit - offset;
}

}  // namespace swapper
