// An operation: one requested transfer between a range of a file and a range of memory. The submitting thread
// makes it and hands it over through the inbox; from then on only the engine's I/O thread touches it, and
// others see its ticket. Shares ownership of its file, so that the descriptor outlives the transfer, and of
// its memory, if that is an arena or a window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "io/file.h"
#include "io/plan.h"
#include "io/progress.h"

namespace swapper {

class OwnedRange;
class Ticket;

struct Request {
  Direction direction = Direction::read;
  std::shared_ptr<File> file;
  std::uint64_t offset = 0;
  std::byte* address = nullptr;
  std::uint64_t nbytes = 0;
  bool checksum = false;
  std::shared_ptr<Ticket> after = nullptr;               // may be empty
  std::shared_ptr<const OwnedRange> owner = nullptr;     // of memory that is swapper's own: held to the end
  std::optional<std::uint32_t> expected = std::nullopt;  // CRC-32 that a read must have
};

struct PieceChecksum {
  std::uint32_t crc = 0;
  std::uint64_t nbytes = 0;
};

// What debug mode records about an operation's memory; see watch.h.
struct Watch {
  bool wanted = false;
  bool begun = false;
  std::uint32_t crc = 0;  // of a write's memory when it began
};

struct Op {
  Op(Request request_, std::shared_ptr<Ticket> ticket_, const Plan& plan)
      : request(std::move(request_)), ticket(std::move(ticket_)), cutter(plan) {}

  [[nodiscard]] IoError error_at(std::uint64_t position, int code, std::string detail) const {
    return IoError(name_of(request.direction), request.file->path(), request.offset + position,
                   request.nbytes, code, std::move(detail));
  }

  // True once nothing more will be handed to the backend.
  bool is_spent() const { return error.has_value() || cutter.finished(); }
  bool wants_checksums() const {
    return request.checksum || request.expected || (watch.wanted && request.direction == Direction::read);
  }

  Request request;
  std::shared_ptr<Ticket> ticket;
  std::uint64_t sequence = 0;  // order of submission, assigned by the inbox

  Cutter cutter;
  Watch watch;
  bool started = false;
  bool finished = false;
  std::uint32_t outstanding = 0;  // pieces in flight, and pieces still to be checksummed
  std::optional<IoError> error;   // the first one
  std::vector<PieceChecksum> checksums;
};

}  // namespace swapper
