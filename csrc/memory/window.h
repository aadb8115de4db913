// A window: a fixed range of addresses into which parts of the arena are mapped and unmapped. A group of
// tensors keeps one address for its whole life, while the frames that hold its bytes change; copying them
// there would cost more CPU time than the drive needs to read them. Owns the range; keeps the arena alive.
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

  // Maps [arena_offset, arena_offset + nbytes) of the arena at window_offset, and fills the page table. What
  // was written there since the same range was unmapped is copied into that memory first; then it returns
  // true, and the range is guarded and counts as written. `guarded`: guarded before anybody can write.
  [[nodiscard]] bool map(std::uint64_t window_offset, std::uint64_t arena_offset, std::uint64_t nbytes,
                         bool guarded = false);

  // Makes the mapping read-only until the next map(). A write still succeeds, and is noted: `written_at`
  // returns its offset, or -1 (memory/fault.h).
  void guard(std::uint64_t window_offset, std::uint64_t nbytes);
  [[nodiscard]] std::int64_t written_at(std::uint64_t window_offset) const;

  // Moves the mapped bytes, [arena_offset, arena_offset + nbytes) of the arena, into ordinary memory at the
  // same addresses (Arena::copy_out).
  void copy_out(std::uint64_t window_offset, std::uint64_t arena_offset, std::uint64_t nbytes);

  // Gives an absent range ordinary memory for good, with the bytes that an access would find. False: it is
  // not absent, or nothing is behind it.
  [[nodiscard]] bool fill(std::uint64_t window_offset, std::uint64_t nbytes);

  // Unmaps the memory. Until the next map(), a read returns the bytes of `backing`, and a write is noted;
  // what was written since guard() is kept. Without `backing` each access is a segmentation fault
  // (memory/fault.h).
  void unmap(std::uint64_t window_offset, std::uint64_t nbytes, Backing backing = {});

  // The same for mapped memory that is being written to `backing`: as soon as `write` is over, the memory may
  // be reused. See [Note: bytes on their way out].
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
