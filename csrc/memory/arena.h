// The arena: all host memory that swapper transfers from and into, taken once. It is one shared mapping of a
// memfd, for three reasons: open(2) forbids direct I/O into private mappings while the process may fork; the
// same pages can be mapped a second time into a window (window.h), so that a read goes from the drive
// straight to where the kernels of torch look; and a fixed mapping can be locked and registered once. Owns
// the memfd and the mapping, both freed with the last reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/fd.h"
#include "base/process.h"

namespace swapper {

struct ArenaOptions {
  std::uint64_t nbytes = 0;
  bool lock = true;
  bool huge_pages = true;  // for as much of it as is a whole one; see [Note: huge pages by collapse]
};

class Arena {
 public:
  explicit Arena(const ArenaOptions& options);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  std::byte* address() const { return address_; }
  std::uint64_t nbytes() const { return nbytes_; }
  bool huge_pages() const { return huge_pages_; }
  std::uint64_t huge_bytes() const { return huge_bytes_; }  // of nbytes, those that got huge pages
  bool locked() const { return lock_reason_.empty(); }
  const std::string& lock_reason() const { return lock_reason_; }
  int memfd() const { return memfd_.get(); }

  // False in a forked child, where the mapping does not exist.
  bool is_usable() const { return creator_.is_this_process(); }

 private:
  void map();
  void take_huge_pages();
  void take_the_rest();
  void unlock(int code);

  Creator creator_;
  std::uint64_t nbytes_;
  bool huge_pages_;
  std::uint64_t huge_bytes_ = 0;
  UniqueFd memfd_;
  std::byte* address_ = nullptr;
  std::string lock_reason_;
};

// Reserves `nbytes` of addresses without memory behind them, beginning on a huge-page boundary.
std::byte* reserve_addresses(std::uint64_t nbytes);

// Marks [address, address + nbytes) as not inherited by forked children and, if asked, as good for huge
// pages.
void advise_transfer_memory(std::byte* address, std::uint64_t nbytes, bool huge_pages);

}  // namespace swapper
