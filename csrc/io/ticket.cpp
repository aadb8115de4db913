// Waits for tickets and finishes them. Owns nothing beyond ticket.h.
#include "io/ticket.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <utility>

#include "base/check.h"
#include "io/inbox.h"

namespace swapper {
namespace {

// A full eventfd is signaled already, and a write to it could block forever: the I/O thread must not.
void ring(const UniqueFd& listener) {
  pollfd room{.fd = listener.get(), .events = POLLOUT, .revents = 0};
  if (::poll(&room, 1, 0) <= 0) return;
  const std::uint64_t one = 1;
  const ssize_t written = ::write(listener.get(), &one, sizeof one);
  static_cast<void>(written);  // a failure concerns only the listener
}

}  // namespace

bool Ticket::wait_for(Clock::duration patience) {
  if (finished()) return true;
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, patience, [&] { return finished(); });
}

bool Ticket::subscribe(std::shared_ptr<Inbox> inbox, std::shared_ptr<Op> op) {
  std::lock_guard lock(mutex_);
  if (finished()) return false;
  subscriptions_.push_back({.inbox = std::move(inbox), .op = std::move(op)});
  return true;
}

void Ticket::attach(std::weak_ptr<Inbox> inbox, std::weak_ptr<Op> op) {
  inbox_ = std::move(inbox);
  op_ = std::move(op);
}

bool Ticket::claim() {
  Claim expected = Claim::waiting;
  return claim_.compare_exchange_strong(expected, Claim::begun, std::memory_order_acq_rel);
}

bool Ticket::cancel() {
  if (finished()) return cancelled();
  Claim expected = Claim::waiting;
  if (!claim_.compare_exchange_strong(expected, Claim::cancelled, std::memory_order_acq_rel)) {
    return expected == Claim::cancelled;
  }
  const auto inbox = inbox_.lock();
  auto op = op_.lock();
  if (inbox && op) inbox->release(std::move(op));
  return true;
}

void Ticket::notify(int fd) {
  UniqueFd listener(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!listener) throw IoError("notify", "", 0, nbytes_, errno);
  {
    const std::lock_guard lock(mutex_);
    if (!finished()) {
      listeners_.push_back(std::move(listener));
      return;
    }
  }
  ring(listener);
}

void Ticket::finish(std::optional<IoError> error, std::uint32_t crc32) {
  std::vector<Subscription> subscriptions;
  std::vector<UniqueFd> listeners;
  {
    std::lock_guard lock(mutex_);
    SWAPPER_CHECK(!finished(), "a ticket finishes once");
    error_ = std::move(error);
    crc32_ = crc32;
    completed_ = Clock::now();
    outcome_.store(error_ ? Outcome::failed : Outcome::succeeded, std::memory_order_release);
    subscriptions.swap(subscriptions_);
    listeners.swap(listeners_);
  }
  changed_.notify_all();  // a woken thread finds the mutex free; the caller keeps the ticket alive
  for (Subscription& each : subscriptions) each.inbox->release(std::move(each.op));
  for (const UniqueFd& listener : listeners) ring(listener);
}

}  // namespace swapper
