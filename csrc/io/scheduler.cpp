// Moves an operation through its life on the I/O thread: accepted, ready, cut, copied if needed and
// submitted, completed, checksummed, finished. Owns nothing beyond scheduler.h.
#include "io/scheduler.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>

#include "base/addressable.h"
#include "base/align.h"
#include "base/check.h"
#include "base/crc32.h"
#include "io/watch.h"

namespace swapper {
namespace {

constexpr char kAbandoned[] = "cancelled: the program ended";
constexpr char kCancelled[] = "cancelled before it began";

// Bytes that work() processes before it returns to the backend.
constexpr std::uint64_t kWorkBytes = std::uint64_t{256} << 10;

std::uint32_t combined_checksum(const Op& op) {
  std::uint32_t crc = 0;
  for (const PieceChecksum& piece : op.checksums) crc = crc32_combine(crc, piece.crc, piece.nbytes);
  return crc;
}

std::string hex(std::uint32_t value) {
  std::array<char, 9> text{};
  std::snprintf(text.data(), text.size(), "%08x", value);
  return text.data();
}

// The bytes of the file before the piece that share its first sector.
std::uint64_t lead_of(const Op& op, const Piece& piece) {
  return (op.request.offset + piece.begin) % op.request.file->demands().sector;
}

// The state of a piece at the backend after a result that was judged as `step`.
PieceState state_after(PieceState state, Step step, const Piece& piece, Direction direction) {
  if (step == Step::again) return state;
  if (step == Step::failed || state == PieceState::flushing) return PieceState::idle;
  if (piece.way == Way::edge) return PieceState::flushing;
  const bool is_staged_read = piece.way == Way::staged && direction == Direction::read;
  return is_staged_read ? PieceState::copying_out : PieceState::idle;
}

// Filesystems in memory do not implement flushing.
bool is_flushed(PieceState state, std::int64_t result) {
  return state == PieceState::flushing && (result == 0 || result == -ESPIPE || result == -ENOSYS);
}

bool overlap(std::uint64_t a_begin, std::uint64_t a_end, std::uint64_t b_begin, std::uint64_t b_end) {
  return a_begin < b_end && b_begin < a_end;
}

}  // namespace

Scheduler::Scheduler(Backend& backend, std::shared_ptr<Inbox> inbox, Totals& totals, Staging& staging,
                     std::uint32_t depth)
    : backend_(backend),
      inbox_(std::move(inbox)),
      totals_(totals),
      staging_(staging),
      depth_(depth),
      slots_(depth) {
  for (std::uint32_t slot = depth; slot-- > 0;) free_slots_.push_back(slot);
}

void Scheduler::accept(std::vector<OpPtr>& ops) {
  for (OpPtr& op : ops) accept_one(std::move(op));
  ops.clear();
}

void Scheduler::accept_one(OpPtr op) {
  if (op->finished) return;  // called off before; now its dependency has finished too
  if (op->ticket->cancelled()) {
    drop_cancelled(*op);
    return;
  }
  if (op->request.after) {
    if (op->request.after->subscribe(inbox_, op)) return;  // it returns through the inbox
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

void Scheduler::drop_cancelled(Op& op) {
  fail(op, op.error_at(0, 0, kCancelled));
  finish_if_done(op);
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

bool Scheduler::can_start(Direction direction) const {
  if (!has_room(direction)) return false;
  const Op& op = *ready_[index_of(direction)].begin()->second;
  const Piece piece = op.cutter.peek();
  if (direction == Direction::write && meets_an_edge(op, piece)) return false;
  if (piece.way != Way::staged) return true;
  const bool shared = !ready_[index_of(opposite(direction))].empty();
  const std::uint32_t limit = shared ? staging_.slots() / 2 : staging_.slots();
  return staging_.has_free() && staged_[index_of(direction)] < limit;
}

// True if an edge and a direct write would be in flight in one granule. See [Note: three ways].
bool Scheduler::meets_an_edge(const Op& op, const Piece& piece) const {
  const File& file = *op.request.file;
  const bool edge = piece.way == Way::edge;
  if (!file.direct() || (!edge && edges_ == 0)) return false;
  const std::uint64_t begin = align_down(op.request.offset + piece.begin, file.granule());
  const std::uint64_t end = align_up(op.request.offset + piece.begin + piece.nbytes, file.granule());
  return std::any_of(slots_.begin(), slots_.end(), [&](const Slot& slot) {
    if (slot.state == PieceState::idle || slot.op->request.direction == Direction::read) return false;
    if ((slot.piece.way == Way::edge) == edge) return false;  // the kernel orders edges among each other
    const std::uint64_t other = slot.op->request.offset + slot.piece.begin;
    return slot.op->request.file->identity() == file.identity() &&
           overlap(begin, end, align_down(other, file.granule()),
                   align_up(other + slot.piece.nbytes, file.granule()));
  });
}

// See [Note: a short start].
void Scheduler::fill() {
  while (!free_slots_.empty() && start_bytes_ > 0) {
    if (!can_start(turn_)) turn_ = opposite(turn_);
    if (!can_start(turn_)) return;
    start_piece(turn_);
    turn_ = opposite(turn_);
  }
}

void Scheduler::start_piece(Direction direction) {
  auto& ready = ready_[index_of(direction)];
  const OpPtr op = ready.begin()->second;
  if (!op->started && !op->ticket->claim()) {
    drop_cancelled(*op);
    return;
  }
  note_started(*op);
  const std::uint32_t number = free_slots_.back();
  free_slots_.pop_back();
  Slot& slot = slots_[number];
  move_to(slot.state, PieceState::placing);
  slot.op = op;
  slot.piece = op->cutter.cut();
  slot.index = static_cast<std::uint32_t>(op->checksums.size());
  if (op->is_spent()) ready.erase(ready.begin());
  ++op->outstanding;
  ++in_flight_[index_of(direction)];
  if (op->wants_checksums()) op->checksums.push_back({.crc = 0, .nbytes = slot.piece.nbytes});
  start_bytes_ -= std::min(start_bytes_, slot.piece.nbytes);
  if (slot.piece.way == Way::edge) ++edges_;
  try {
    place(slot);
  } catch (const IoError& error) {
    fail(*op, error);
    release(number);
    return;
  }
  if (slot.stage != nullptr && direction == Direction::write) {
    move_to(slot.state, PieceState::copying_in);
    copies_.push_back(number);
    return;
  }
  hand_over(number, PieceState::transferring);
  if (op->wants_checksums() && direction == Direction::write) {
    ++op->outstanding;
    checksums_.push_back({.op = op, .piece = slot.piece, .index = slot.index});
  }
}

// The range of the transfer, in the file and in memory. A staged piece is rounded out to sectors.
void Scheduler::place(Slot& slot) {
  const Request& request = slot.op->request;
  const std::uint32_t sector = slot.piece.way == Way::edge ? 1 : request.file->demands().sector;
  const std::uint64_t lead = slot.piece.way == Way::staged ? lead_of(*slot.op, slot.piece) : 0;
  const std::uint64_t needed = lead + slot.piece.nbytes;
  const std::uint64_t nbytes = slot.piece.way == Way::staged ? align_up(needed, sector) : needed;
  slot.offset = request.offset + slot.piece.begin - lead;
  slot.address = request.address + slot.piece.begin;
  slot.progress = PieceProgress(request.direction, nbytes, sector, needed);
  if (slot.piece.way != Way::staged) return;
  slot.stage = slot.address = staging_.take();
  ++staged_[index_of(request.direction)];
}

void Scheduler::hand_over(std::uint32_t number, PieceState state) {
  Slot& slot = slots_[number];
  move_to(slot.state, state);
  const File& file = *slot.op->request.file;
  const bool edge = slot.piece.way == Way::edge;
  const std::uint64_t begin = slot.offset + slot.progress.begin();
  const std::uint64_t end = begin + slot.progress.remaining();
  Transfer transfer{.command = Command::read,
                    .fd = edge ? file.edge_fd() : file.fd(),
                    .offset = begin,
                    .address = slot.address + slot.progress.begin(),
                    .nbytes = static_cast<std::uint32_t>(end - begin),
                    .slot = number,
                    .alignment = edge ? 1 : file.demands().sector,
                    .is_copy = !edge && file.is_copied(),
                    .in_memory = !edge && file.in_memory()};
  if (slot.op->request.direction == Direction::write) transfer.command = Command::write;
  if (state == PieceState::flushing) {
    transfer.command = Command::flush;
    transfer.offset = align_down(slot.offset, file.granule());
    transfer.nbytes = static_cast<std::uint32_t>(align_up(slot.offset + slot.piece.nbytes, file.granule()) -
                                                 transfer.offset);
  }
  check_addressable(slot.address, slot.piece.nbytes);
  backend_.submit(transfer);
}

void Scheduler::complete(std::span<const Completion> completions) {
  for (const Completion& completion : completions) complete_one(completion);
}

void Scheduler::complete_one(const Completion& completion) {
  const std::uint32_t number = completion.slot;
  SWAPPER_CHECK(number < slots_.size() && is_at_backend(slots_[number].state), "a result for no transfer");
  Slot& slot = slots_[number];
  check_addressable(slot.address, slot.piece.nbytes);  // allocated until the end of the transfer
  const Step step =
      is_flushed(slot.state, completion.result) ? Step::finished : slot.progress.advance(completion.result);
  const PieceState next = state_after(slot.state, step, slot.piece, slot.op->request.direction);
  if (next == PieceState::idle) {
    end_piece(number, step);
  } else if (slot.op->error) {
    release(number);  // what remains of it is not needed
  } else if (next == PieceState::copying_out) {
    move_to(slot.state, next);
    copies_.push_back(number);
  } else {
    hand_over(number, next);
  }
}

void Scheduler::work() {
  for (std::uint64_t budget = kWorkBytes; budget > 0 && has_work();) {
    const std::uint64_t nbytes =
        copies_.empty() ? checksums_.front().piece.nbytes : slots_[copies_.front()].piece.nbytes;
    if (copies_.empty()) {
      checksum_one();
    } else {
      copy_one();
    }
    budget -= std::min(budget, nbytes);
  }
}

void Scheduler::copy_one() {
  const std::uint32_t number = copies_.front();
  copies_.pop_front();
  Slot& slot = slots_[number];
  Op& op = *slot.op;
  if (op.error) {
    release(number);
  } else if (op.request.direction == Direction::read) {
    copy_out(slot);
    end_piece(number, Step::finished);
  } else {
    std::memcpy(slot.stage, op.request.address + slot.piece.begin, slot.piece.nbytes);
    if (op.wants_checksums()) op.checksums[slot.index].crc = crc32(slot.stage, slot.piece.nbytes);
    hand_over(number, PieceState::transferring);
  }
}

void Scheduler::copy_out(Slot& slot) {
  Op& op = *slot.op;
  std::byte* target = op.request.address + slot.piece.begin;
  const std::byte* source = slot.stage + lead_of(op, slot.piece);
  if (op.watch.wanted && !is_untouched(target, slot.piece.nbytes)) {
    fail(op,
         op.error_at(slot.piece.begin, 0, "debug: the memory was written to while it was being read into"));
    return;
  }
  std::memcpy(target, source, slot.piece.nbytes);
  if (op.wants_checksums()) op.checksums[slot.index].crc = crc32(source, slot.piece.nbytes);
}

void Scheduler::end_piece(std::uint32_t number, Step step) {
  Slot& slot = slots_[number];
  Op& op = *slot.op;
  const Direction direction = op.request.direction;
  if (step == Step::failed) {
    const std::uint64_t lead = slot.stage != nullptr ? lead_of(op, slot.piece) : 0;
    const std::uint64_t done = std::max(slot.progress.transferred(), lead) - lead;
    fail(op, op.error_at(slot.piece.begin + done, slot.progress.error_number(), slot.progress.detail()));
  } else if (step == Step::finished && !(slot.stage != nullptr && op.error)) {
    totals_[index_of(direction)].fetch_add(slot.piece.nbytes, std::memory_order_relaxed);
    if (op.wants_checksums() && direction == Direction::read && slot.stage == nullptr) {
      ++op.outstanding;
      checksums_.push_back({.op = slot.op, .piece = slot.piece, .index = slot.index});
    }
  }
  release(number);
}

void Scheduler::release(std::uint32_t number) {
  Slot& slot = slots_[number];
  move_to(slot.state, PieceState::idle);
  const OpPtr op = std::move(slot.op);
  const int direction = index_of(op->request.direction);
  --in_flight_[direction];
  if (slot.piece.way == Way::edge) --edges_;
  if (slot.stage != nullptr) {
    staging_.give_back(slot.stage);
    --staged_[direction];
  }
  rested_bytes_ += slot.piece.nbytes;
  start_bytes_ = rested_bytes_ >= kEarlyBytes ? kUnlimited : start_bytes_ + slot.piece.nbytes;
  slot = Slot{};
  free_slots_.push_back(number);
  if (free_slots_.size() == slots_.size() && ready_[0].empty() && ready_[1].empty()) {
    rested_bytes_ = 0;
    start_bytes_ = kStartBytes;
  }
  --op->outstanding;
  finish_if_done(*op);
}

// Keeps the first error. Pieces not yet submitted never will be; those at the backend are waited for.
void Scheduler::fail(Op& op, IoError error) {
  if (!op.error) op.error = std::move(error);
  ready_[index_of(op.request.direction)].erase(op.sequence);
}

void Scheduler::checksum_one() {
  const Checksum task = std::move(checksums_.front());
  checksums_.pop_front();
  Op& op = *task.op;
  if (!op.error) {
    op.checksums[task.index].crc = crc32(op.request.address + task.piece.begin, task.piece.nbytes);
  }
  --op.outstanding;
  finish_if_done(op);
}

void Scheduler::note_started(Op& op) {
  if (std::exchange(op.started, true)) return;
  inbox_->note_started();
  if (!op.error) begin_watch(op);
}

void Scheduler::finish_if_done(Op& op) {
  if (op.is_spent() && op.outstanding == 0) finish(op);
}

void Scheduler::finish(Op& op) {
  note_started(op);
  op.finished = true;
  const std::uint32_t crc = op.error ? 0 : combined_checksum(op);
  if (!op.error && op.request.expected.value_or(crc) != crc) {
    fail(op, op.error_at(0, EBADMSG, "CRC-32 " + hex(crc) + " instead of " + hex(*op.request.expected)));
  }
  if (op.watch.wanted && !op.error && !is_as_expected(op, crc)) {
    const bool writing = op.request.direction == Direction::write;
    fail(op, op.error_at(0, 0,
                         writing ? "debug: the memory was changed while it was being written out"
                                 : "debug: the memory was written to while it was being read into"));
  }
  inbox_->note_finishing();
  op.request.file.reset();
  op.request.owner.reset();
  const std::shared_ptr<Ticket> ticket = std::move(op.ticket);
  ticket->finish(std::move(op.error), crc);
  inbox_->note_finished();
}

}  // namespace swapper
