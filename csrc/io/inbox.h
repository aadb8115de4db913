// Connects the submitting threads to the one I/O thread: a bounded queue, the count of unfinished operations,
// and the call that wakes the I/O thread. Bounded, because a submitter that never waits must not fill the
// memory. One mutex, held for moments; the backend is woken under it, so that it cannot be destroyed
// meanwhile. Owns the operations until the I/O thread takes them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "io/op.h"
#include "io/ticket.h"

namespace swapper {

class Inbox {
 public:
  using Ops = std::vector<std::shared_ptr<Op>>;

  explicit Inbox(std::size_t capacity) : capacity_(capacity) {}

  enum class [[nodiscard]] Push : std::uint8_t { taken, full, closed };

  // For submitting threads.
  Push push(const std::shared_ptr<Op>& op, Clock::duration patience);  // full: no space within that time
  [[nodiscard]] bool wait_until_drained(Clock::duration patience);
  std::uint64_t in_flight() const { return in_flight_.load(std::memory_order_acquire); }
  void close();    // later pushes are refused
  void stop();     // the I/O thread may exit once all is finished
  void abandon();  // fails what has not been handed to the backend
  [[nodiscard]] bool is_closed();

  // For any thread that finishes a ticket for which an operation here waited.
  void release(std::shared_ptr<Op> op);

  // For the I/O thread.
  void set_bell(std::function<void()> bell);
  void take(Ops& ops);  // appends all that arrived
  // True: nothing arrived, and the next arrival wakes the thread. `full`: no new operation could begin before
  // a result arrives, which ends the sleep anyway; then new operations wake nobody.
  [[nodiscard]] bool may_sleep(bool full);
  void note_started();  // an operation no longer waits
  void note_finishing() { in_flight_.fetch_sub(1, std::memory_order_acq_rel); }  // before its ticket finishes
  void note_finished();                                                          // after
  [[nodiscard]] bool may_leave();
  [[nodiscard]] bool is_abandoned();

 private:
  void ring();  // with the mutex held

  const std::size_t capacity_;
  std::atomic<std::uint64_t> in_flight_{0};

  std::mutex mutex_;
  std::condition_variable room_;
  std::condition_variable drained_;
  std::function<void()> bell_;
  Ops arrived_;
  std::uint64_t next_sequence_ = 0;
  std::size_t waiting_ = 0;     // pushed, not started
  std::size_t unfinished_ = 0;  // pushed, ticket not finished
  bool sleeping_ = false;
  bool full_ = false;  // while sleeping
  bool closed_ = false;
  bool stopping_ = false;
  bool abandoned_ = false;
};

}  // namespace swapper
