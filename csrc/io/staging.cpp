// Makes slots as large as pieces, but small enough that a copy stays in the cache until the kernel reads it.
// Owns nothing beyond staging.h.
#include "io/staging.h"

#include <algorithm>

#include "base/align.h"
#include "base/check.h"

namespace swapper {

StagingOptions choose_staging(std::uint64_t nbytes, std::uint64_t piece_bytes, std::uint32_t depth) {
  constexpr std::uint64_t kMaxSlotBytes = std::uint64_t{1} << 20;
  StagingOptions options;
  options.slot_bytes = std::min(align_up(piece_bytes, kSlotUnitBytes), kMaxSlotBytes);
  options.slot_bytes = std::min(options.slot_bytes, align_down(nbytes / 2, kSlotUnitBytes));
  const std::uint64_t most = std::min<std::uint64_t>(nbytes / options.slot_bytes, depth);
  options.slots = static_cast<std::uint32_t>(std::max<std::uint64_t>(most, 2));
  return options;
}

void Staging::make() {
  ArenaOptions options;
  options.nbytes = options_.slot_bytes * options_.slots;
  options.lock = false;
  memory_ = std::make_unique<Arena>(options);
  backend_.expect_memory(memory_->address(), memory_->nbytes());
  nbytes_.store(memory_->nbytes(), std::memory_order_relaxed);
  for (std::uint32_t n = options_.slots; n-- > 0;) {
    idle_.push_back(memory_->address() + n * options_.slot_bytes);
  }
}

std::byte* Staging::take() {
  SWAPPER_CHECK(has_free(), "no slot is free");
  if (!memory_) make();
  --free_;
  std::byte* slot = idle_.back();
  idle_.pop_back();
  return slot;
}

void Staging::give_back(std::byte* slot) {
  idle_.push_back(slot);
  ++free_;
}

}  // namespace swapper
