// How far an operation has come: cutting it into pieces, and judging what the kernel says about each. Pure:
// no system calls, no threads, no clocks, so that short transfers, ends of files and error numbers can be
// tested by feeding numbers in. Owns nothing.
#pragma once

#include <cstdint>

namespace swapper {

enum class Direction : std::uint8_t { read = 0, write = 1 };
inline constexpr int kDirections = 2;

constexpr Direction opposite(Direction direction) {
  return direction == Direction::read ? Direction::write : Direction::read;
}
constexpr int index_of(Direction direction) {
  return static_cast<int>(direction);
}
constexpr const char* name_of(Direction direction) {
  return direction == Direction::read ? "read" : "write";
}

// A part of an operation, in bytes from the operation's beginning.
struct Piece {
  std::uint64_t begin = 0;
  std::uint64_t nbytes = 0;
};

// Cuts [0, nbytes) into pieces of piece_bytes, the last one shorter.
class Cutter {
 public:
  Cutter(std::uint64_t nbytes, std::uint64_t piece_bytes) : nbytes_(nbytes), piece_bytes_(piece_bytes) {}
  bool finished() const { return next_ == nbytes_; }
  std::uint64_t piece_bytes() const { return piece_bytes_; }
  Piece cut();

 private:
  std::uint64_t nbytes_;
  std::uint64_t piece_bytes_;
  std::uint64_t next_ = 0;
};

enum class Step : std::uint8_t {
  again,     // transfer what remains (see PieceProgress::begin and remaining)
  finished,  // every byte of the piece is where it belongs
  failed,    // see error_number and detail
};

// One piece between its first submission and its end.
class PieceProgress {
 public:
  PieceProgress() = default;
  // `alignment` is what the file's offsets need: 1 for a buffered file.
  PieceProgress(Direction direction, std::uint64_t nbytes, std::uint32_t alignment)
      : direction_(direction), alignment_(alignment), nbytes_(nbytes) {}

  // Takes the result of transferring [begin(), begin() + remaining()): a byte count or a negative errno.
  Step advance(std::int64_t result);

  std::uint64_t begin() const { return begin_; }
  std::uint64_t remaining() const { return nbytes_ - begin_; }
  std::uint64_t transferred() const { return transferred_; }
  int error_number() const { return error_number_; }
  const char* detail() const { return detail_; }

 private:
  Step fail(int error_number, const char* detail);
  Step interrupted(int error_number);
  Step stalled();

  // A result of "try again" repeated this often, with no byte moved in between, is an error.
  static constexpr int kPatience = 1000;

  Direction direction_ = Direction::read;
  std::uint32_t alignment_ = 1;
  int retries_ = 0;
  int error_number_ = 0;
  const char* detail_ = "";
  std::uint64_t nbytes_ = 0;
  std::uint64_t begin_ = 0;        // where the next transfer starts: aligned
  std::uint64_t transferred_ = 0;  // the furthest byte reached: may lie up to an alignment beyond begin_
};

}  // namespace swapper
