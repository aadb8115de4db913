// What the engine's I/O thread does, apart from being a thread: it keeps the operations that are ready, cuts
// them into pieces, shares the depth between reads and writes, judges every result, checksums, and finishes
// tickets. Lives on one thread and takes no lock but the inbox's. Owns the operations between the inbox and
// their end.
//
// [Note: sharing the depth] A drive reads and writes at once, but a queue filled with reads makes writes wait
// for all of them. So while there is work in both directions, each may have at most half of the depth in
// flight; alone, a direction may have all of it. Within a direction pieces go in the order of submission, and
// each result makes room for the next piece at once.
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
#include "io/progress.h"

namespace swapper {

// Bytes transferred so far, by direction; read by anybody.
using Totals = std::array<std::atomic<std::uint64_t>, kDirections>;

class Scheduler {
 public:
  Scheduler(Backend& backend, std::shared_ptr<Inbox> inbox, Totals& totals, std::uint32_t depth);

  // Takes over operations that are new, or released because what they waited for has finished.
  void accept(std::vector<std::shared_ptr<Op>>& ops);
  // Fails all that is ready, now and later; pieces at the backend are still waited for.
  void abandon();
  // Hands pieces to the backend until the depth is used up.
  void fill();
  // Takes the results of pieces.
  void complete(std::span<const Completion> completions);
  // Checksums one piece; false if there is none to do.
  bool checksum_one();
  bool has_checksums() const { return !checksums_.empty(); }

 private:
  using OpPtr = std::shared_ptr<Op>;

  struct Slot {
    OpPtr op;
    Piece piece;
    std::uint32_t index = 0;  // of the piece in its operation
    PieceProgress progress;
  };

  struct Checksum {
    OpPtr op;
    Piece piece;
    std::uint32_t index;
  };

  void accept_one(OpPtr op);
  bool has_room(Direction direction) const;
  void start_piece(Direction direction);
  void hand_over(std::uint32_t slot);
  void complete_one(const Completion& completion);
  void end_piece(Slot& slot, Step step);
  void fail(Op& op, IoError error);
  void note_started(Op& op);
  void finish_if_done(Op& op);
  void finish(Op& op);

  Backend& backend_;
  std::shared_ptr<Inbox> inbox_;
  Totals& totals_;
  const std::uint32_t depth_;

  std::vector<Slot> slots_;
  std::vector<std::uint32_t> free_slots_;
  std::array<std::map<std::uint64_t, OpPtr>, kDirections> ready_;  // by order of submission
  std::array<std::uint32_t, kDirections> in_flight_{};             // pieces
  Direction turn_ = Direction::read;                               // who is asked first
  std::deque<Checksum> checksums_;
  bool abandoned_ = false;
};

}  // namespace swapper
