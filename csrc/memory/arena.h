// The arena: all host memory that swapper transfers from and into, allocated once. It is one shared mapping
// of a memfd, for three reasons: open(2) forbids direct I/O into private mappings while the process may fork;
// the same pages can be mapped a second time into a window (window.h), so that a read goes from the drive
// straight to the memory of the tensors; and a fixed mapping can be locked and registered once. Owns the
// memfd and the mapping; the mapping stays until transfers in flight are done with it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

#include "base/fd.h"
#include "base/process.h"
#include "memory/owned.h"
#include "memory/prefault.h"

namespace swapper {

struct ArenaOptions {
  std::uint64_t nbytes = 0;
  std::uint64_t head_bytes =
      std::numeric_limits<std::uint64_t>::max();  // populated at once; prefault_rest populates the others
  bool lock = true;
  bool huge_pages = true;    // wherever a whole one fits; see [Note: huge pages by collapse]
  bool filled_once = false;  // skip huge pages where they are expensive; see [Note: expensive huge pages]
  int node = -1;             // the NUMA node that memory is taken from first; -1: as the system decides
};

class Arena {
 public:
  explicit Arena(const ArenaOptions& options);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* address() const { return range_->address(); }
  std::uint64_t nbytes() const { return nbytes_; }
  bool huge_pages() const { return huge_pages_; }
  std::uint64_t huge_bytes() const { return prefault_->huge_bytes(); }  // bytes that lie in huge pages
  bool locked() const;
  std::string lock_reason() const;
  int node() const { return node_; }  // -1 also if the system refused it
  int memfd() const { return memfd_.get(); }

  // Starts a thread that populates the memory beyond the head. Memory may be used before: a touch populates
  // it.
  void prefault_rest();
  std::uint64_t populated_bytes() const { return prefault_->populated_bytes(); }
  // Waits until the first `nbytes` bytes are populated: false if they are not in time. Throws IoError if the
  // system refused some of them.
  [[nodiscard]] bool wait_populated(std::uint64_t nbytes, std::chrono::nanoseconds patience) {
    return prefault_->wait_for(nbytes, patience);
  }

  // Moves the arena's whole pages [offset, offset + nbytes) into ordinary memory, mapped at `place`. The
  // arena loses them. Throws IoError; what was not yet copied is unchanged.
  void copy_out(std::byte* place, std::uint64_t offset, std::uint64_t nbytes);

  // Returns all memory to the system, even if others still hold the arena. Requires that what is needed was
  // copied out, and that no transfer is in flight. A later touch ends the process.
  void retire();

  // False in a forked child, where the mapping does not exist.
  bool is_usable() const { return creator_.is_this_process(); }

 private:
  void map();
  void unlock(int code);

  Creator creator_;
  std::uint64_t nbytes_;
  bool huge_pages_;
  int node_ = -1;
  UniqueFd memfd_;
  std::shared_ptr<OwnedRange> range_;  // shared with transfers
  mutable std::mutex mutex_;
  std::string lock_reason_;
  std::unique_ptr<Prefault> prefault_;  // destroyed before the memory
};

// Returns the memory mapped at [address, address + nbytes) to the system, and keeps the addresses.
void release_memory(std::byte* address, std::uint64_t nbytes);

// Marks [address, address + nbytes) as not inherited by forked children and, if requested, for huge pages.
void advise_transfer_memory(std::byte* address, std::uint64_t nbytes, bool huge_pages);

}  // namespace swapper
