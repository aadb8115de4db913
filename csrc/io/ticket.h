// A ticket: the completion of one operation, seen from outside. The I/O thread writes it once; any thread
// reads it. `finished()` takes no lock, because the pager calls it all the time. Operations that wait for
// this one (after=), which may belong to another engine, and event loops (notify) register here. A ticket
// also decides whether the operation begins or is called off, whichever comes first. Owns the error, if there
// is one.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "base/outcome.h"
#include "base/process.h"

namespace swapper {

struct Op;
class Inbox;

using Clock = std::chrono::steady_clock;  // CLOCK_MONOTONIC, as time.monotonic() in Python

inline double seconds(Clock::time_point time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

class Ticket {
 public:
  Ticket(std::uint64_t nbytes, bool checksum) : nbytes_(nbytes), checksum_(checksum) {}

  bool finished() const { return outcome_.load(std::memory_order_acquire) != Outcome::pending; }
  [[nodiscard]] bool wait_for(Clock::duration patience);  // false if it is not finished by then

  std::uint64_t nbytes() const { return nbytes_; }
  bool has_checksum() const { return checksum_; }
  Clock::time_point submitted() const { return submitted_; }

  // False in a forked child, where no thread will finish it.
  bool is_usable() const { return creator_.is_this_process(); }

  // Only for a finished ticket.
  const std::optional<IoError>& error() const { return error_; }
  std::uint32_t crc32() const { return crc32_; }
  Clock::time_point completed() const { return completed_; }

  // The outcome of `ticket`, which it keeps alive. It is set before anything that waits for the ticket
  // begins.
  static std::shared_ptr<std::atomic<Outcome>> outcome_of(const std::shared_ptr<Ticket>& ticket) {
    return {ticket, &ticket->outcome_};
  }

  // Hands `op` back to `inbox` when this ticket finishes. Returns false, and keeps nothing, if it has
  // finished.
  [[nodiscard]] bool subscribe(std::shared_ptr<Inbox> inbox, std::shared_ptr<Op> op);

  // Calls the operation off if it has not begun; true if it is called off. It finishes a little later.
  bool cancel();
  bool cancelled() const { return claim_.load(std::memory_order_acquire) == Claim::cancelled; }

  // Writes 1 into the eventfd `fd`, by a duplicate of its own, when this ticket finishes, or now if it has.
  // Throws IoError.
  void notify(int fd);

  // Called by the engine before the operation is enqueued: the inbox to notify when it is called off.
  void attach(std::weak_ptr<Inbox> inbox, std::weak_ptr<Op> op);

  // Called by the I/O thread before it begins: false if the operation is called off.
  [[nodiscard]] bool claim();

  // Called once, by the I/O thread that did the work.
  void finish(std::optional<IoError> error, std::uint32_t crc32);

 private:
  struct Subscription {
    std::shared_ptr<Inbox> inbox;
    std::shared_ptr<Op> op;
  };

  const Creator creator_;
  const std::uint64_t nbytes_;
  const bool checksum_;
  const Clock::time_point submitted_ = Clock::now();

  std::atomic<Outcome> outcome_{Outcome::pending};
  std::optional<IoError> error_;
  std::uint32_t crc32_ = 0;
  Clock::time_point completed_{};

  enum class Claim : std::uint8_t { waiting, begun, cancelled };
  std::atomic<Claim> claim_{Claim::waiting};
  std::weak_ptr<Inbox> inbox_;
  std::weak_ptr<Op> op_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Subscription> subscriptions_;
  std::vector<UniqueFd> listeners_;
};

}  // namespace swapper
