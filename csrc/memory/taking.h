// Taking an arena's memory from the system, from its first byte on: at once as far as somebody asks, and the
// rest by a thread of low priority while the first part is in use already. Taking costs from 0.1 to 2.3 CPU
// seconds a GB, depending on how scattered free memory is, and a model's first pass need not wait for it.
// Owns the thread; the memory belongs to the arena, which outlives this.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <thread>

#include "base/error.h"

namespace swapper {

struct TakingOptions {
  bool huge_pages = true;    // gather whole 2 MiB; see [Note: huge pages by collapse]
  bool everything = true;    // and what is left in small pages too: the memory is to be locked
  bool filled_once = false;  // no more huge pages once they turn out dear; see [Note: dear huge pages]
};

class Taking {
 public:
  Taking(std::byte* address, std::uint64_t nbytes, int memfd, TakingOptions options);
  ~Taking() { stop(); }
  Taking(const Taking&) = delete;
  Taking& operator=(const Taking&) = delete;

  // Takes the first `nbytes` bytes and comes back when they are there. Throws IoError if the system refuses.
  void take(std::uint64_t nbytes);

  // Has a thread take the rest. See [Note: taking beside computing].
  void take_the_rest();

  // Waits until the first `nbytes` bytes are there, and takes what is missing meanwhile: false if they are
  // not in time. Throws IoError if the system refused some of them.
  bool wait_for(std::uint64_t nbytes, std::chrono::nanoseconds patience);

  // Takes no more, and waits for the thread.
  void stop();

  std::uint64_t taken_bytes() const;  // all before this offset is there
  std::uint64_t huge_bytes() const;   // of it, what lies in huge pages

 private:
  void take_slabs();
  bool may_take() const;                              // mutex_ is held
  void take_one(std::unique_lock<std::mutex>& lock);  // the next slab; not held meanwhile
  std::uint64_t take_slab(std::uint64_t begin, std::uint64_t end);
  std::uint64_t gather(std::uint64_t begin, std::uint64_t end);
  std::uint64_t collapse(std::uint64_t begin, std::uint64_t end);
  bool populate(std::uint64_t begin, std::uint64_t nbytes, bool touch);
  bool allocate(std::uint64_t begin, std::uint64_t nbytes);
  std::uint64_t first_missing() const;  // mutex_ is held

  std::byte* address_;
  std::uint64_t nbytes_;
  int memfd_;
  TakingOptions options_;
  std::atomic<bool> huge_pages_are_dear_ = false;
  std::thread rest_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t end_ = 0;          // how far to go now
  std::uint64_t next_ = 0;         // the first byte that no thread has begun with
  std::set<std::uint64_t> begun_;  // slabs that threads are at, or that were refused, by their first byte
  std::uint64_t slab_bytes_;
  std::uint64_t huge_bytes_ = 0;
  bool stopping_ = false;
  std::optional<IoError> refusal_;
};

}  // namespace swapper
