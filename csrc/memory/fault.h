// What happens when code touches a window where nothing is mapped. Python's guard stands in front of tensors
// that are away, but torch's own C++ can get past it: a graph whose saved tensors are aliases,
// torch.tensor(p). Such a read is answered here, in the handler of the fault: the bytes come from the file
// that has them, into private read-only memory at that place, until the window is mapped or unmapped there
// again. A write is refused, by a message and the death that it would have been anyway, since it could only
// be lost.
//
// It answers another kind of fault too. A parameter that was leased for reading is mapped read-only; code
// that changes it all the same (weight.data.clamp_(), which torch's version counter does not see) faults
// once: the range becomes writable, and where it was written first is noted for whoever takes the lease back.
//
// The handler makes system calls and takes one spin lock, nothing else: it may run in any thread at any load
// instruction, the GIL held or not. Owns the table of places and the process's SIGSEGV handler, which passes
// on what is not for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace swapper {

// Where the bytes of a range of addresses are: `nbytes` of `fd` from `offset`. The owner keeps fd open.
struct Backing {
  std::shared_ptr<void> owner;
  int fd = -1;
  std::uint64_t offset = 0;
};

// From now on reads of [begin, begin + nbytes) are answered from `backing`; forgets what was told of any part
// of that range. Without an owner, only forgets. Installs the handler at the first call.
void back_range(std::byte* begin, std::uint64_t nbytes, Backing backing);

// From now on the first write to the mapped range makes all of it writable and is noted. Forgets what was
// told of any part of the range. The caller has made it read-only.
void watch_range(std::byte* begin, std::uint64_t nbytes);

// The address of the first write into the range since watch_range with the same begin, or nullptr.
std::byte* written_at(std::byte* begin);

}  // namespace swapper
