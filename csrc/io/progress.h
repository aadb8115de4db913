// Judges the results of a piece's transfers and tracks how far it is. Pure: no system calls, no threads, no
// clocks, so that tests feed it numbers for short transfers, ends of files and errors. Owns nothing.
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

enum class [[nodiscard]] Step : std::uint8_t {
  again,     // transfer what remains (see PieceProgress::begin and remaining)
  finished,  // every byte that is needed is where it belongs
  failed,    // see error_number and detail
};

// One piece between its first submission and its end.
class PieceProgress {
 public:
  PieceProgress() = default;
  // `alignment` is what the file's offsets need: 1 for a buffered file. Of a read that was rounded out to
  // sectors only the first `needed` bytes must arrive: the file may end behind them.
  PieceProgress(Direction direction, std::uint64_t nbytes, std::uint32_t alignment, std::uint64_t needed)
      : direction_(direction), alignment_(alignment), nbytes_(nbytes), needed_(needed) {}
  PieceProgress(Direction direction, std::uint64_t nbytes, std::uint32_t alignment)
      : PieceProgress(direction, nbytes, alignment, nbytes) {}

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

  // Repeats of "try again", with no byte transferred in between, after which it is an error.
  static constexpr int kPatience = 1000;

  Direction direction_ = Direction::read;
  std::uint32_t alignment_ = 1;
  int retries_ = 0;
  int error_number_ = 0;
  const char* detail_ = "";
  std::uint64_t nbytes_ = 0;
  std::uint64_t needed_ = 0;
  std::uint64_t begin_ = 0;        // aligned start of the next transfer
  std::uint64_t transferred_ = 0;  // the furthest byte reached; may lie up to an alignment beyond begin_
};

}  // namespace swapper
