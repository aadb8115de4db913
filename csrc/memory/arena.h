// The arena: all host memory that swapper transfers from and into, taken once. It is one shared mapping of a
// memfd, for three reasons: open(2) forbids direct I/O into private mappings while the process may fork; the
// same pages can be mapped a second time into a window (window.h), so that a read goes from the drive
// straight to where the kernels of torch look; and a fixed mapping can be locked and registered once. Owns
// the memfd and the mapping; the mapping stays until transfers that are under way with it are done.
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
#include "memory/taking.h"

namespace swapper {

struct ArenaOptions {
  std::uint64_t nbytes = 0;
  std::uint64_t head_bytes =
      std::numeric_limits<std::uint64_t>::max();  // taken at once; take_the_rest for more
  bool lock = true;
  bool huge_pages = true;    // for as much of it as is a whole one; see [Note: huge pages by collapse]
  bool filled_once = false;  // but not where they are dear; see [Note: dear huge pages]
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
  std::uint64_t huge_bytes() const { return taking_->huge_bytes(); }  // of nbytes, those that got huge pages
  bool locked() const;
  std::string lock_reason() const;
  int memfd() const { return memfd_.get(); }

  // Has a thread take what is beyond the head. Memory may be used before: it is then taken as it is touched.
  void take_the_rest();
  std::uint64_t taken_bytes() const { return taking_->taken_bytes(); }
  // Waits until the first `nbytes` bytes are taken: false if they are not in time. Throws IoError if the
  // system refused some of them.
  bool wait_taken(std::uint64_t nbytes, std::chrono::nanoseconds patience) {
    return taking_->wait_for(nbytes, patience);
  }

  // Puts the arena's bytes [offset, offset + nbytes), whole pages, into ordinary memory at `place`, which
  // shows them now. The arena has them no more. Throws IoError; what was not yet copied is as it was.
  void copy_out(std::byte* place, std::uint64_t offset, std::uint64_t nbytes);

  // Gives all memory back to the system, whoever still has the arena: what somebody needs was copied out, and
  // no transfer is under way. A touch of the rest ends the process.
  void retire();

  // False in a forked child, where the mapping does not exist.
  bool is_usable() const { return creator_.is_this_process(); }

 private:
  void map();
  void unlock(int code);

  Creator creator_;
  std::uint64_t nbytes_;
  bool huge_pages_;
  UniqueFd memfd_;
  std::shared_ptr<OwnedRange> range_;  // and transfers hold it
  mutable std::mutex mutex_;
  std::string lock_reason_;
  std::unique_ptr<Taking> taking_;  // goes before the memory does
};

// Gives what is mapped at [address, address + nbytes) back to the system, and keeps the addresses.
void release_memory(std::byte* address, std::uint64_t nbytes);

// Marks [address, address + nbytes) as not inherited by forked children and, if asked, as good for huge
// pages.
void advise_transfer_memory(std::byte* address, std::uint64_t nbytes, bool huge_pages);

}  // namespace swapper
