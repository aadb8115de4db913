// The ring of slots for transfers that a file does not accept as they are ([Note: three ways]). Bounded, so
// that its memory does not grow with requests; allocated at the first such transfer, since most engines have
// none. It is an arena: shared memory that forked children do not inherit. Lives on the I/O thread; other
// threads may only read `nbytes`. Owns the memory.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "io/backend.h"
#include "io/plan.h"
#include "memory/arena.h"

namespace swapper {

struct StagingOptions {
  std::uint64_t slot_bytes = kSlotUnitBytes;
  std::uint32_t slots = 2;
};

// The slots for an engine of `depth` pieces of `piece_bytes`, limited to `nbytes` of memory.
[[nodiscard]] StagingOptions choose_staging(std::uint64_t nbytes, std::uint64_t piece_bytes,
                                            std::uint32_t depth);

class Staging {
 public:
  Staging(const StagingOptions& options, Backend& backend, std::atomic<std::uint64_t>& nbytes)
      : options_(options), backend_(backend), nbytes_(nbytes), free_(options.slots) {}

  bool has_free() const { return free_ > 0; }
  std::uint32_t slots() const { return options_.slots; }
  [[nodiscard]] std::byte* take();  // throws IoError if there is no memory
  void give_back(std::byte* slot);

 private:
  void make();

  const StagingOptions options_;
  Backend& backend_;
  std::atomic<std::uint64_t>& nbytes_;
  std::uint32_t free_;
  std::unique_ptr<Arena> memory_;
  // Empty until the memory is allocated; last in, first out, as it is in the cache.
  std::vector<std::byte*> idle_;
};

}  // namespace swapper
