// A window: a fixed range of addresses into which pieces of the arena are mapped and unmapped. A group of
// tensors lives at one place for its whole life, while the frames that hold its bytes come and go; copying
// them there would cost more CPU time than the drive takes to read them. Owns the range; keeps the arena
// alive.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/outcome.h"
#include "base/process.h"
#include "memory/arena.h"
#include "memory/fault.h"
#include "memory/owned.h"

namespace swapper {

class Window {
 public:
  Window(std::shared_ptr<Arena> arena, std::uint64_t nbytes);
  ~Window();
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  std::byte* address() const { return range_->address(); }
  std::uint64_t nbytes() const { return nbytes_; }
  bool is_usable() const { return creator_.is_this_process(); }

  // Shows [arena_offset, arena_offset + nbytes) of the arena at window_offset, with its page table entries
  // filled in. What was written there since the same range was unmapped is put into that memory first: true
  // where there is any, and then the range is as one that is guarded and was written. `guarded`: as if
  // guard() had been called before anybody could write.
  bool map(std::uint64_t window_offset, std::uint64_t arena_offset, std::uint64_t nbytes,
           bool guarded = false);

  // Makes what is mapped there read-only until the next map(); a write is let through all the same, and
  // noted: `written_at` gives its offset, or -1 (memory/fault.h).
  void guard(std::uint64_t window_offset, std::uint64_t nbytes);
  std::int64_t written_at(std::uint64_t window_offset) const;

  // Puts bytes that are mapped there, [arena_offset, arena_offset + nbytes) of the arena, into ordinary
  // memory at the same addresses (Arena::copy_out).
  void copy_out(std::uint64_t window_offset, std::uint64_t arena_offset, std::uint64_t nbytes);

  // Takes the memory away again. Until the next map(), reading it gives the bytes of `backing`, if there is
  // one, and writing is noted; what was written since guard() is still there. Without `backing` each access
  // is a segmentation fault (memory/fault.h).
  void unmap(std::uint64_t window_offset, std::uint64_t nbytes, Backing backing = {});

  // The same of memory that is mapped there and is being written to where `backing` is: as soon as that is
  // over, as `write` tells, the memory may be used for something else. [Note: bytes on their way out]
  void promise(std::uint64_t window_offset, std::uint64_t nbytes, std::uint64_t arena_offset,
               std::shared_ptr<std::atomic<Outcome>> write, Backing backing);

 private:
  void check_range(std::uint64_t offset, std::uint64_t nbytes) const;
  void check_arena(std::uint64_t arena_offset, std::uint64_t nbytes) const;
  void hide(std::uint64_t window_offset, std::uint64_t nbytes, Backing backing, Departing departing);

  Creator creator_;
  std::shared_ptr<Arena> arena_;
  std::uint64_t nbytes_;
  std::shared_ptr<OwnedRange> range_;
};

}  // namespace swapper
