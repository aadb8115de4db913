// Handles accesses to a window that bypass Python's guard. torch's own C++ makes them: a graph whose saved
// tensors are aliases, torch.tensor(p), an alias that was kept.
//
// An absent range is filled in the SIGSEGV handler: the bytes come from the backing file into private memory
// at that address, and stay until the window is mapped or unmapped there again. A write goes to that memory
// too, and is noted. The next map of the window first copies what was written into the mapped memory.
//
// The memory of such answers is outside of any budget, so it is bounded: 256 MiB for the process. Beyond that
// the oldest chunk is dropped, and read again if needed; a written chunk stays.
//
// A parameter that was leased for reading is mapped read-only. Code that changes it anyway
// (weight.data.clamp_(), which torch's version counter does not see) faults once: the range becomes writable,
// and the address of the first write is noted for the end of the lease. If nobody collects it before the
// memory is unmapped, the range keeps its bytes as private memory that was written while absent.
//
// Memory that a commit writes from, and that its owner may change at any time, is watched until that write is
// over: a thread that changes it sleeps so long. The drive has what the commit captured.
//
// [Note: bytes on their way out] A read that begins, in the engine, as soon as a write is over may reuse the
// memory of that write. So the memory is unmapped from the window before that read is submitted, and an
// access meanwhile copies the bytes: from the memory or, if the write has succeeded by then, from the file.
// Nobody waits. The memory holds what was written, as nobody changes memory under a write. The ticket has its
// outcome before its dependents begin (Ticket::finish): an outcome that is still pending after the copy was
// pending throughout it, and the read had not begun. If the write failed, its dependents are called off, and
// the memory keeps the bytes until it is mapped again.
//
// [Note: one lock] Mappings and the table change together under one lock, and a fault is handled under it: no
// fault sees one without the other. A fault from before such a change may find memory that is accessible by
// now: its instruction runs again, but once for each change. A second fault on the same state is a write, or
// belongs to another handler.
//
// The handler makes system calls and takes that lock, nothing else: it may run in any thread at any load
// instruction, with or without the GIL. Owns the table of ranges and the process's SIGSEGV handler, which
// forwards faults on other memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/outcome.h"

namespace swapper {

// The file range that backs a range of addresses: `nbytes` of `fd` from `offset`. The owner keeps fd open.
struct Backing {
  std::shared_ptr<void> owner;
  int fd = -1;
  std::uint64_t offset = 0;
};

// Until `write` is over the bytes are in memory, `fd` from `offset`, which outlives the range. Without
// `write` they are not. See [Note: bytes on their way out].
struct Departing {
  std::shared_ptr<std::atomic<Outcome>> write;
  int fd = -1;
  std::uint64_t offset = 0;
};

// Memory to map, and the address where it is mapped already.
struct Shown {
  int fd = -1;
  std::uint64_t offset = 0;
  std::byte* address = nullptr;
  bool watched = false;  // watched (watch_range) from the start
};

// All of these return 0 or an errno, and change nothing on an error. They replace any earlier entry for a
// part of the range. The first call installs the handler, and a later one again if the signal was reset.

// Maps `memory` at [begin, begin + nbytes). What was written there while the very same range was absent is
// copied into it; then the range is watched and counts as written, and `merged` is true.
[[nodiscard]] int show_range(std::byte* begin, std::uint64_t nbytes, const Shown& memory, bool& merged);

// Makes the mapped range read-only. The first write makes all of it writable and is noted; with `until`, once
// that is not pending any more.
[[nodiscard]] int watch_range(std::byte* begin, std::uint64_t nbytes,
                              std::shared_ptr<std::atomic<Outcome>> until = nullptr);

// Makes the watched range writable. It stays in the table: a write may have faulted before.
[[nodiscard]] int unwatch_range(std::byte* begin, std::uint64_t nbytes);

// Unmaps the memory. Without a `backing` owner every later access is a fault; with one, what was written in
// the very same range while it was watched, or absent, is kept.
[[nodiscard]] int hide_range(std::byte* begin, std::uint64_t nbytes, Backing backing, Departing departing);

// Gives the absent range ordinary memory with the bytes that an access would find, for good, and removes it
// from the table. ENODATA: there is no such range.
[[nodiscard]] int fill_range(std::byte* begin, std::uint64_t nbytes);

// Removes the range from the table; what is mapped stays.
void forget_range(std::byte* begin, std::uint64_t nbytes);

// The address of the first noted write in the range that begins there, or nullptr.
[[nodiscard]] std::byte* written_at(std::byte* begin);

// The number of writes noted so far, in all ranges.
std::uint64_t writes_noted();

}  // namespace swapper
