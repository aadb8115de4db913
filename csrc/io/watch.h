// Debug mode: detects accesses to an operation's memory while it is in flight, the typical mistake with
// asynchronous I/O. A write's memory is checksummed when it begins and when it ends. A read is staged; its
// memory is filled with a pattern when it begins, so that an early reader sees the pattern and not, by
// chance, the right bytes. The pattern must be whole when the bytes arrive, and the bytes must be whole at
// the end. "Begins" means at submission, or when the dependency of the operation finishes: until then the
// memory may belong to another. Owns nothing; its records are in Op::watch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swapper {

struct Op;

// Does nothing if the operation is not watched, or is so already. Not thread-safe.
void begin_watch(Op& op);

// For a read, before its bytes go to [address, address + nbytes): false if the memory was written to.
[[nodiscard]] bool is_untouched(const std::byte* address, std::uint64_t nbytes);

// At the end: false if the memory has changed. `crc32` is that of the bytes that were read.
[[nodiscard]] bool is_as_expected(const Op& op, std::uint32_t crc32);

}  // namespace swapper
