// The life of an operation on the I/O thread: accepted, ready, cut and handed over, completed, checksummed,
// finished. Owns nothing beyond scheduler.h.
#include "io/scheduler.h"

#include <algorithm>
#include <utility>

#include "base/check.h"
#include "base/crc32.h"

namespace swapper {
namespace {

constexpr char kAbandoned[] = "cancelled: the program ended";

std::uint32_t combined_checksum(const Op& op, std::uint64_t piece_bytes) {
  std::uint32_t crc = 0;
  std::uint64_t begin = 0;
  for (const std::uint32_t piece : op.checksums) {
    const std::uint64_t nbytes = std::min(piece_bytes, op.request.nbytes - begin);
    crc = crc32_combine(crc, piece, nbytes);
    begin += nbytes;
  }
  return crc;
}

}  // namespace

Scheduler::Scheduler(Backend& backend, std::shared_ptr<Inbox> inbox, Totals& totals, std::uint32_t depth)
    : backend_(backend), inbox_(std::move(inbox)), totals_(totals), depth_(depth), slots_(depth) {
  for (std::uint32_t slot = depth; slot-- > 0;) free_slots_.push_back(slot);
}

void Scheduler::accept(std::vector<OpPtr>& ops) {
  for (OpPtr& op : ops) accept_one(std::move(op));
  ops.clear();
}

void Scheduler::accept_one(OpPtr op) {
  if (op->request.after) {
    if (op->request.after->subscribe(inbox_, op)) return;  // it comes back through the inbox
    const bool failed = op->request.after->error().has_value();
    op->request.after.reset();
    if (failed) fail(*op, op->error_at(0, 0, "cancelled: the operation it waited for failed"));
  }
  if (abandoned_) fail(*op, op->error_at(0, 0, kAbandoned));
  if (op->is_spent()) {
    finish_if_done(*op);
  } else {
    ready_[index_of(op->request.direction)].emplace(op->sequence, std::move(op));
  }
}

void Scheduler::abandon() {
  if (std::exchange(abandoned_, true)) return;
  for (auto& ready : ready_) {
    while (!ready.empty()) {
      const OpPtr op = ready.begin()->second;
      fail(*op, op->error_at(0, 0, kAbandoned));
      finish_if_done(*op);
    }
  }
}

// See [Note: sharing the depth].
bool Scheduler::has_room(Direction direction) const {
  const int other = index_of(opposite(direction));
  const bool shared = !ready_[other].empty() || in_flight_[other] > 0;
  const std::uint32_t limit = shared ? std::max(1u, depth_ / 2) : depth_;
  return !ready_[index_of(direction)].empty() && in_flight_[index_of(direction)] < limit;
}

void Scheduler::fill() {
  while (!free_slots_.empty()) {
    if (!has_room(turn_)) turn_ = opposite(turn_);
    if (!has_room(turn_)) return;
    start_piece(turn_);
    turn_ = opposite(turn_);
  }
}

void Scheduler::start_piece(Direction direction) {
  auto& ready = ready_[index_of(direction)];
  const OpPtr op = ready.begin()->second;
  note_started(*op);
  const std::uint32_t number = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[number];
  slot.op = op;
  slot.piece = op->cutter.cut();
  slot.index = static_cast<std::uint32_t>(op->checksums.size());
  slot.progress = PieceProgress(direction, slot.piece.nbytes,
                                op->request.file->direct() ? op->request.file->alignment() : 1);
  if (op->is_spent()) ready.erase(ready.begin());
  ++op->outstanding;
  ++in_flight_[index_of(direction)];
  if (op->request.checksum) op->checksums.push_back(0);
  hand_over(number);
  if (op->request.checksum && direction == Direction::write) {
    ++op->outstanding;
    checksums_.push_back({op, slot.piece, slot.index});
  }
}

void Scheduler::hand_over(std::uint32_t number) {
  const Slot& slot = slots_[number];
  const Request& request = slot.op->request;
  const std::uint64_t position = slot.piece.begin + slot.progress.begin();
  backend_.submit({request.direction, request.file->fd(), request.offset + position,
                   request.address + position, static_cast<std::uint32_t>(slot.progress.remaining()),
                   number});
}

void Scheduler::complete(std::span<const Completion> completions) {
  for (const Completion& completion : completions) complete_one(completion);
}

void Scheduler::complete_one(const Completion& completion) {
  SWAPPER_CHECK(completion.slot < slots_.size() && slots_[completion.slot].op, "a result for no piece");
  Slot& slot = slots_[completion.slot];
  const Step step = slot.progress.advance(completion.result);
  if (step == Step::again && !slot.op->error) {
    hand_over(completion.slot);
    return;
  }
  end_piece(slot, step);
  --in_flight_[index_of(slot.op->request.direction)];
  const OpPtr op = std::move(slot.op);
  slot = Slot{};
  free_slots_.push_back(completion.slot);
  --op->outstanding;
  finish_if_done(*op);
}

void Scheduler::end_piece(Slot& slot, Step step) {
  Op& op = *slot.op;
  const Direction direction = op.request.direction;
  if (step == Step::failed) {
    fail(op, op.error_at(slot.piece.begin + slot.progress.transferred(), slot.progress.error_number(),
                         slot.progress.detail()));
  } else if (step == Step::finished) {
    totals_[index_of(direction)].fetch_add(slot.piece.nbytes, std::memory_order_relaxed);
    if (op.request.checksum && direction == Direction::read) {
      ++op.outstanding;
      checksums_.push_back({slot.op, slot.piece, slot.index});
    }
  }
}

// The first error stays; pieces not yet handed over never will be, those at the backend are waited for.
void Scheduler::fail(Op& op, IoError error) {
  if (!op.error) op.error = std::move(error);
  ready_[index_of(op.request.direction)].erase(op.sequence);
}

bool Scheduler::checksum_one() {
  if (checksums_.empty()) return false;
  const Checksum task = std::move(checksums_.front());
  checksums_.pop_front();
  Op& op = *task.op;
  if (!op.error) op.checksums[task.index] = crc32(op.request.address + task.piece.begin, task.piece.nbytes);
  --op.outstanding;
  finish_if_done(op);
  return true;
}

void Scheduler::note_started(Op& op) {
  if (!std::exchange(op.started, true)) inbox_->note_started();
}

void Scheduler::finish_if_done(Op& op) {
  if (op.is_spent() && op.outstanding == 0) finish(op);
}

void Scheduler::finish(Op& op) {
  note_started(op);
  const std::uint32_t crc = op.error ? 0 : combined_checksum(op, op.cutter.piece_bytes());
  inbox_->note_finishing();
  op.request.file.reset();
  const std::shared_ptr<Ticket> ticket = std::move(op.ticket);
  ticket->finish(std::move(op.error), crc);
  inbox_->note_finished();
}

}  // namespace swapper
