// Decides everything on the engine's I/O thread: keeps the ready operations, cuts them into pieces, shares
// the depth between reads and writes, judges results, copies, checksums, and finishes tickets. Runs on one
// thread and takes no lock but the inbox's. Owns the operations between the inbox and their end, and the
// slots of staged pieces.
//
// [Note: sharing the depth] A drive reads and writes at once, but a queue filled with reads makes writes wait
// for all of them. So while both directions have work, each may have at most half of the depth in flight;
// alone, a direction may use all of it. Within a direction pieces go in the order of submission, and each
// result frees a slot for the next piece at once.
//
// [Note: a short start] Submitting memory that is not registered costs the kernel some 80 us a megabyte, so
// that filling the whole depth takes this thread milliseconds. It may share a processor with the submitter,
// who would wait for that. So after a rest it begins with kStartBytes in flight, and sleeps between results,
// until kEarlyBytes are through.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "io/backend.h"
#include "io/inbox.h"
#include "io/op.h"
#include "io/piece_state.h"
#include "io/plan.h"
#include "io/progress.h"
#include "io/staging.h"

namespace swapper {

// Bytes transferred so far, by direction; readable from any thread.
using Totals = std::array<std::atomic<std::uint64_t>, kDirections>;

class Scheduler {
 public:
  Scheduler(Backend& backend, std::shared_ptr<Inbox> inbox, Totals& totals, Staging& staging,
            std::uint32_t depth);

  // Takes over operations that are new, or whose dependency has finished.
  void accept(std::vector<std::shared_ptr<Op>>& ops);
  // Fails all that is ready, now and later; pieces at the backend are still waited for.
  void abandon();
  // Submits pieces to the backend until the depth is used up.
  void fill();
  // Takes the results of pieces.
  void complete(std::span<const Completion> completions);
  // Copies or checksums about one piece, so that the caller can check the backend in between. Copies come
  // first: the drive waits for them.
  void work();
  bool has_work() const { return !copies_.empty() || !checksums_.empty(); }
  // True if nothing new can begin before a piece has ended.
  bool is_full() const { return free_slots_.empty(); }

 private:
  using OpPtr = std::shared_ptr<Op>;

  // A piece from its cut to its end. Distinct from the slots of the staging ring, of which a staged piece
  // holds one.
  struct Slot {
    PieceState state = PieceState::idle;  // changed by move_to
    OpPtr op;
    Piece piece;
    std::uint32_t index = 0;  // of the piece among the operation's checksums
    PieceProgress progress;
    std::uint64_t offset = 0;      // of the transfer in the file
    std::byte* address = nullptr;  // of the transfer in memory
    std::byte* stage = nullptr;
  };

  // What remains to be read of a piece that has ended, or of memory that is being written: it needs no slot.
  struct Checksum {
    OpPtr op;
    Piece piece;
    std::uint32_t index;
  };

  void accept_one(OpPtr op);
  void drop_cancelled(Op& op);
  bool has_room(Direction direction) const;
  bool can_start(Direction direction) const;
  bool meets_an_edge(const Op& op, const Piece& piece) const;
  void start_piece(Direction direction);
  void place(Slot& slot);
  void hand_over(std::uint32_t slot, PieceState state);
  void complete_one(const Completion& completion);
  void copy_one();
  void copy_out(Slot& slot);
  void checksum_one();
  void end_piece(std::uint32_t slot, Step step);
  void release(std::uint32_t slot);
  void fail(Op& op, IoError error);
  void note_started(Op& op);
  void finish_if_done(Op& op);
  void finish(Op& op);

  Backend& backend_;
  std::shared_ptr<Inbox> inbox_;
  Totals& totals_;
  Staging& staging_;
  const std::uint32_t depth_;

  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_slots_;
  std::array<std::map<std::uint64_t, OpPtr>, kDirections> ready_;  // by order of submission
  std::array<std::uint32_t, kDirections> in_flight_{};             // pieces
  std::array<std::uint32_t, kDirections> staged_{};                // of these, staged ones
  std::uint32_t edges_ = 0;                                        // of these, edges
  Direction turn_ = Direction::read;                               // the direction that is asked first
  std::deque<std::uint32_t> copies_;                               // pieces to be copied in or out
  std::deque<Checksum> checksums_;
  // See [Note: a short start].
  static constexpr std::uint64_t kStartBytes = std::uint64_t{4} << 20;
  static constexpr std::uint64_t kEarlyBytes = std::uint64_t{24} << 20;
  static constexpr std::uint64_t kUnlimited = std::uint64_t{1} << 62;
  std::uint64_t start_bytes_ = kStartBytes;  // bytes that may be started now
  std::uint64_t rested_bytes_ = 0;           // bytes finished since the last rest
  bool abandoned_ = false;
};

}  // namespace swapper
