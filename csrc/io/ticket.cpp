// Waiting for tickets and finishing them. Owns nothing beyond ticket.h.
#include "io/ticket.h"

#include <utility>

#include "base/check.h"
#include "io/inbox.h"

namespace swapper {

bool Ticket::wait_for(Clock::duration patience) {
  if (finished()) return true;
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return finished(); });
}

bool Ticket::subscribe(std::shared_ptr<Inbox> inbox, std::shared_ptr<Op> op) {
  std::lock_guard lock(mutex_);
  if (finished()) return false;
  subscriptions_.push_back({std::move(inbox), std::move(op)});
  return true;
}

void Ticket::finish(std::optional<IoError> error, std::uint32_t crc32) {
  std::vector<Subscription> subscriptions;
  {
    std::lock_guard lock(mutex_);
    SWAPPER_CHECK(!finished(), "a ticket finishes once");
    error_ = std::move(error);
    crc32_ = crc32;
    completed_ = Clock::now();
    finished_.store(true, std::memory_order_release);
    subscriptions.swap(subscriptions_);
    changed_.notify_all();
  }
  for (Subscription& each : subscriptions) each.inbox->release(std::move(each.op));
}

}  // namespace swapper
