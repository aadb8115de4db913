// Implements the rules of progress.h. The subtle one: a direct transfer may end between two sectors (at the
// end of a file whose size is no multiple of a sector, or when a drive gives up half-way). It cannot continue
// from there, so it returns to the sector boundary below and transfers those bytes again; the file has ended
// only if that transfers nothing new.
#include "io/progress.h"

#include <cerrno>

#include "base/align.h"

namespace swapper {

Step PieceProgress::fail(int error_number, const char* detail) {
  error_number_ = error_number;
  detail_ = detail;
  return Step::failed;
}

Step PieceProgress::interrupted(int error_number) {
  if (++retries_ < kPatience) return Step::again;
  return fail(error_number, "the kernel kept asking to try again");
}

Step PieceProgress::stalled() {
  if (direction_ == Direction::read) return fail(0, "unexpected end of file");
  return fail(EIO, "the file accepts no more bytes, and the kernel gives no reason");
}

Step PieceProgress::advance(std::int64_t result) {
  if (result == -EINTR || result == -EAGAIN) return interrupted(static_cast<int>(-result));
  if (result < 0) return fail(static_cast<int>(-result), "");
  const auto count = static_cast<std::uint64_t>(result);
  if (count > remaining()) return fail(EIO, "the kernel says it transferred more than it was asked to");
  const std::uint64_t reached = begin_ + count;
  if (reached <= transferred_) return stalled();
  retries_ = 0;
  transferred_ = reached;
  if (reached >= needed_) return Step::finished;
  begin_ = align_down(reached, alignment_);
  return Step::again;
}

}  // namespace swapper
