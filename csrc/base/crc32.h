// Computes the CRC-32 of zip and zlib, fast enough to hide behind a drive. Commits and snapshots checksum
// every page; zlib's own function (about 4 GB/s a core) is slower than the I/O that it checks. Pure
// functions; owns no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace swapper {

// CRC-32 of `nbytes` at `data`, continued from `value` (0 to begin): the same numbers as zlib.crc32.
[[nodiscard]] std::uint32_t crc32(const void* data, std::size_t nbytes, std::uint32_t value = 0);

// CRC-32 of A followed by B, given those of A and B; B is `nbytes_b` long.
[[nodiscard]] std::uint32_t crc32_combine(std::uint32_t a, std::uint32_t b, std::uint64_t nbytes_b);

// One implementation, on the bare register (no complement before or after).
struct Crc32Method {
  const char* name;
  std::uint32_t (*update)(std::uint32_t crc, const unsigned char* data, std::size_t nbytes);
};

// The implementations that this processor can run, fastest first. crc32() uses the first; all agree.
std::span<const Crc32Method> crc32_methods();

}  // namespace swapper
