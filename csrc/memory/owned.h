// Which addresses are swapper's own: arenas and windows, which forked children do not inherit. Exists for
// kernels before 6.5, where a read from a direct file into private memory loses its bytes if the process
// forks while it is under way. Owns the list of ranges.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swapper {

void note_owned(const std::byte* address, std::uint64_t nbytes);
void forget_owned(const std::byte* address);
bool is_owned(const std::byte* address, std::uint64_t nbytes);

// True where the kernel keeps memory under direct I/O in place when the process forks.
bool kernel_keeps_memory_at_fork();

}  // namespace swapper
