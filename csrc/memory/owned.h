// Lists swapper's own addresses: those of arenas and windows, which forked children do not inherit. A
// transfer shares ownership of its range (engine.h), so that no arena disappears under it. And kernels before
// 6.5 lose the bytes of a direct read into private memory if the process forks meanwhile. Owns the list of
// ranges.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/process.h"

namespace swapper {

// A range of addresses that begins on a huge-page boundary, listed as long as it lives. Its last holder
// unmaps what is mapped there.
class OwnedRange {
 public:
  // Reserves addresses without memory behind them. Throws IoError.
  [[nodiscard]] static std::shared_ptr<OwnedRange> reserve(std::uint64_t nbytes);

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

// The range that contains [address, address + nbytes); empty if that is not swapper's own memory.
[[nodiscard]] std::shared_ptr<const OwnedRange> owner_of(const std::byte* address, std::uint64_t nbytes);

// True if the kernel keeps memory under direct I/O in place when the process forks.
bool kernel_keeps_memory_at_fork();

}  // namespace swapper
