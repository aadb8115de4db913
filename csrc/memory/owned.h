// Addresses that are swapper's own: those of arenas and windows, which forked children do not inherit. Two
// reasons to know them. A transfer holds the range that it moves (engine.h), so that no arena goes from under
// it. And kernels before 6.5 lose the bytes of a read from a direct file into private memory if the process
// forks while it is under way. Owns the list of ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/process.h"

namespace swapper {

// A range of addresses that begins on a huge-page boundary, in the list for as long as it lives. Whatever is
// mapped there goes with it: with the last of those who hold it.
class OwnedRange {
 public:
  // Reserves addresses without memory behind them. Throws IoError.
  static std::shared_ptr<OwnedRange> reserve(std::uint64_t nbytes);

  ~OwnedRange();
  OwnedRange(const OwnedRange&) = delete;
  OwnedRange& operator=(const OwnedRange&) = delete;

  std::byte* address() const { return address_; }

 private:
  explicit OwnedRange(std::uint64_t nbytes);

  const Creator creator_;
  const std::uint64_t nbytes_;
  std::byte* address_;
};

// The range that has all of [address, address + nbytes); empty if that is not swapper's own memory.
std::shared_ptr<const OwnedRange> owner_of(const std::byte* address, std::uint64_t nbytes);

// True where the kernel keeps memory under direct I/O in place when the process forks.
bool kernel_keeps_memory_at_fork();

}  // namespace swapper
