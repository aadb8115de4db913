// What happens when code touches a window past Python's guard: torch's own C++ can, by a graph whose saved
// tensors are aliases, by torch.tensor(p), by an alias that was kept.
//
// Where nothing is mapped a read is answered here, in the handler of the fault: the bytes come from the file
// that has them, into private memory at that place, until the window is mapped or unmapped there again. A
// write goes to that memory too, and is noted. When the window is mapped the next time, what was written is
// put into the memory that is mapped there first.
//
// The memory of such answers is beside any budget, so it is bounded: 256 MiB, process-wide. Then the oldest
// chunk goes, and is brought in again if need be; one that was written stays.
//
// A parameter that was leased for reading is mapped read-only. Code that changes it all the same
// (weight.data.clamp_(), which torch's version counter does not see) faults once: the range becomes writable,
// and where it was written first is noted for whoever takes the lease back. If nobody does, and the memory is
// taken away, the range keeps what it has, as private memory that was written while it was away.
//
// [Note: bytes on their way out] Memory that is being written to a file may be promised to a read that
// begins, in the engine, as soon as the write is over. So it is taken away from the window before that read
// is submitted, and until somebody says otherwise an access copies the bytes: from the memory, and if the
// write has succeeded by then, from the file instead. Nobody waits. What was copied from memory is what was
// written: nobody changes memory under a write, and the ticket has its outcome before what waits for it is
// let go (Ticket::finish), so that an outcome that is still pending after the copying was pending all
// through it, and the read had not begun. Where the write failed, what waits for it is called off: the memory
// has the bytes until it is mapped again.
//
// [Note: one lock] What is mapped and what the table says of it change under one lock, and a fault is
// answered under it: no fault finds the one without the other. A fault of before such a change finds memory
// that can be used by now: its instruction is run again, but once for each change. What faults on the same
// state a second time is a write, or somebody else's affair.
//
// The handler makes system calls and takes that lock, nothing else: it may run in any thread at any load
// instruction, the GIL held or not. Owns the table of places and the process's SIGSEGV handler, which passes
// on what is not for it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/outcome.h"

namespace swapper {

// Where the bytes of a range of addresses are: `nbytes` of `fd` from `offset`. The owner keeps fd open.
struct Backing {
  std::shared_ptr<void> owner;
  int fd = -1;
  std::uint64_t offset = 0;
};

// Until `write` is over they are in memory, `fd` from `offset`, which outlives the range. Without `write`
// they are not. [Note: bytes on their way out]
struct Departing {
  std::shared_ptr<std::atomic<Outcome>> write;
  int fd = -1;
  std::uint64_t offset = 0;
};

// Memory as it can be mapped, and as it lies at an address already.
struct Shown {
  int fd = -1;
  std::uint64_t offset = 0;
  std::byte* address = nullptr;
  bool watched = false;  // as watch_range has it, from the first instant
};

// All of these give 0 or an errno, and then have changed nothing. What was told of any part of the range
// before is forgotten. The first call installs the handler.

// Maps `memory` at [begin, begin + nbytes). What was written there while the very same range was away is put
// into it; then the range is as one that is watched and was written, and `merged` is true.
int show_range(std::byte* begin, std::uint64_t nbytes, const Shown& memory, bool& merged);

// Makes the mapped range read-only. The first write makes all of it writable and is noted.
int watch_range(std::byte* begin, std::uint64_t nbytes);

// Takes the memory away. Without an owner of `backing` every access is a fault from then on; with one, what
// was written in the very same range while it was watched stays.
int hide_range(std::byte* begin, std::uint64_t nbytes, Backing backing, Departing departing);

// Forgets the range; what is mapped stays.
void forget_range(std::byte* begin, std::uint64_t nbytes);

// The address of the first write that was noted in the range which begins there, or nullptr.
std::byte* written_at(std::byte* begin);

// So many writes were noted so far, in all ranges.
std::uint64_t writes_noted();

}  // namespace swapper
