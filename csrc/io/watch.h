// Debug mode: finds out that somebody touched an operation's memory while it was in flight, the mistake that
// asynchronous I/O invites. A write's memory is checksummed when it begins and when it is over. A read goes
// by way of slots; its memory is filled with a pattern when it begins, so that whoever reads too early gets
// the pattern and not by chance the right bytes; the pattern must be whole when the bytes come, and the
// bytes must be whole at the end. "Begins" is at submission, or when what the operation waits for is over:
// until then the memory may be somebody else's. Owns nothing; what it remembers is in Op::watch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swapper {

struct Op;

// Does nothing if the operation is not watched or is so already. Not from two threads at once.
void begin_watch(Op& op);

// Of a read, before its bytes go to [address, address + nbytes): false if somebody wrote there.
bool is_untouched(const std::byte* address, std::uint64_t nbytes);

// At the end: false if the memory is not what it must be. `crc32` is that of the bytes that were read.
bool is_as_expected(const Op& op, std::uint32_t crc32);

}  // namespace swapper
