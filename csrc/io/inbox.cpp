// Implements the inbox's few critical sections. Owns nothing beyond inbox.h.
#include "io/inbox.h"

#include <iterator>
#include <utility>

namespace swapper {

Inbox::Push Inbox::push(const std::shared_ptr<Op>& op, Clock::duration patience) {
  std::unique_lock lock(mutex_);
  room_.wait_for(lock, patience, [&] { return closed_ || waiting_ < capacity_; });
  if (closed_) return Push::closed;
  if (waiting_ >= capacity_) return Push::full;
  op->sequence = next_sequence_++;
  ++waiting_;
  ++unfinished_;
  in_flight_.fetch_add(1, std::memory_order_acq_rel);
  arrived_.push_back(op);
  if (!full_) ring();
  return Push::taken;
}

bool Inbox::wait_until_drained(Clock::duration patience) {
  std::unique_lock lock(mutex_);
  return drained_.wait_for(lock, patience, [&] { return unfinished_ == 0; });
}

void Inbox::close() {
  std::lock_guard lock(mutex_);
  closed_ = true;
  room_.notify_all();
}

void Inbox::stop() {
  std::lock_guard lock(mutex_);
  closed_ = stopping_ = true;
  room_.notify_all();
  ring();
}

void Inbox::abandon() {
  std::lock_guard lock(mutex_);
  closed_ = abandoned_ = true;
  room_.notify_all();
  ring();
}

bool Inbox::is_abandoned() {
  std::lock_guard lock(mutex_);
  return abandoned_;
}

bool Inbox::is_closed() {
  std::lock_guard lock(mutex_);
  return closed_;
}

void Inbox::release(std::shared_ptr<Op> op) {
  std::lock_guard lock(mutex_);
  arrived_.push_back(std::move(op));
  ring();
}

void Inbox::ring() {
  if (sleeping_ && bell_) bell_();
  sleeping_ = full_ = false;
}

void Inbox::set_bell(std::function<void()> bell) {
  std::lock_guard lock(mutex_);
  bell_ = std::move(bell);
}

void Inbox::take(Ops& ops) {
  std::lock_guard lock(mutex_);
  sleeping_ = full_ = false;
  ops.insert(ops.end(), std::make_move_iterator(arrived_.begin()), std::make_move_iterator(arrived_.end()));
  arrived_.clear();
}

bool Inbox::may_sleep(bool full) {
  std::lock_guard lock(mutex_);
  sleeping_ = arrived_.empty() && !(stopping_ && unfinished_ == 0);
  full_ = sleeping_ && full;
  return sleeping_;
}

void Inbox::note_started() {
  std::lock_guard lock(mutex_);
  if (waiting_-- == capacity_) room_.notify_all();
}

void Inbox::note_finished() {
  std::lock_guard lock(mutex_);
  if (--unfinished_ == 0) drained_.notify_all();
}

bool Inbox::may_leave() {
  std::lock_guard lock(mutex_);
  return stopping_ && unfinished_ == 0;
}

}  // namespace swapper
