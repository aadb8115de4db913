// Populates an arena's memory from its first byte on: at once as far as a caller needs, and the rest by a
// thread of low priority while the first part is in use. Populating costs from 0.1 to 2.3 CPU seconds a GB,
// depending on how scattered free memory is, and a model's first pass need not wait for it. Owns the thread;
// the memory belongs to the arena, which outlives this.
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

struct PrefaultOptions {
  bool huge_pages = true;    // gather whole 2 MiB; see [Note: huge pages by collapse]
  bool everything = true;    // populate the remainder in small pages too, as locking requires
  bool filled_once = false;  // no more huge pages once they prove expensive; see [Note: expensive huge pages]
};

class Prefault {
 public:
  Prefault(std::byte* address, std::uint64_t nbytes, int memfd, PrefaultOptions options);
  ~Prefault() { stop(); }
  Prefault(const Prefault&) = delete;
  Prefault& operator=(const Prefault&) = delete;

  // Populates the first `nbytes` bytes before it returns. Throws IoError if the system refuses.
  void prefault(std::uint64_t nbytes);

  // Starts a thread that populates the rest. See [Note: prefault during compute].
  void prefault_rest();

  // Waits until the first `nbytes` bytes are populated, and helps meanwhile: false if they are not in time.
  // Throws IoError if the system refused some of them.
  [[nodiscard]] bool wait_for(std::uint64_t nbytes, std::chrono::nanoseconds patience);

  // Stops populating, and joins the thread.
  void stop();

  std::uint64_t populated_bytes() const;  // all bytes before this offset are populated
  std::uint64_t huge_bytes() const;       // of these, bytes in huge pages

 private:
  void populate_slabs();
  bool may_continue() const;                               // requires mutex_
  void populate_next(std::unique_lock<std::mutex>& lock);  // the next slab; releases the lock meanwhile
  std::uint64_t populate_slab(std::uint64_t begin, std::uint64_t end);
  std::uint64_t gather(std::uint64_t begin, std::uint64_t end);
  std::uint64_t collapse(std::uint64_t begin, std::uint64_t end);
  bool populate(std::uint64_t begin, std::uint64_t nbytes, bool touch);
  [[nodiscard]] bool allocate(std::uint64_t begin, std::uint64_t nbytes);
  std::uint64_t first_missing() const;  // requires mutex_

  std::byte* address_;
  std::uint64_t nbytes_;
  int memfd_;
  PrefaultOptions options_;
  std::atomic<bool> huge_pages_are_expensive_ = false;
  std::thread rest_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t end_ = 0;          // offset up to which to populate now
  std::uint64_t next_ = 0;         // the first byte that no thread has begun with
  std::set<std::uint64_t> begun_;  // first bytes of slabs in progress or refused
  std::uint64_t slab_bytes_;
  std::uint64_t huge_bytes_ = 0;
  bool stopping_ = false;
  std::optional<IoError> refusal_;
};

}  // namespace swapper
