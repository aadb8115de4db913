// Tests the judging of results with numbers alone. Owns nothing.
#include <cerrno>
#include <cstring>

#include "io/progress.h"
#include "tests/testing.h"

namespace swapper {
namespace {

TEST(a_whole_transfer_finishes) {
  PieceProgress progress(Direction::read, 8192, 512);
  EXPECT(progress.advance(8192) == Step::finished);
  EXPECT(progress.transferred() == 8192);
}

TEST(a_short_transfer_goes_on_where_it_ended) {
  PieceProgress progress(Direction::write, 8192, 1);
  EXPECT(progress.advance(1000) == Step::again);
  EXPECT(progress.begin() == 1000 && progress.remaining() == 7192);
  EXPECT(progress.advance(7192) == Step::finished);
}

TEST(a_short_direct_transfer_goes_back_to_the_sector) {
  PieceProgress progress(Direction::read, 8192, 512);
  EXPECT(progress.advance(1000) == Step::again);
  EXPECT(progress.begin() == 512 && progress.remaining() == 7680 && progress.transferred() == 1000);
  EXPECT(progress.advance(1024) == Step::again);
  EXPECT(progress.begin() == 1536);
  EXPECT(progress.advance(6656) == Step::finished);
}

TEST(a_file_that_ends_between_sectors_has_ended) {
  PieceProgress progress(Direction::read, 8192, 512);
  EXPECT(progress.advance(5000) == Step::again);
  EXPECT(progress.begin() == 4608);
  EXPECT(progress.advance(392) == Step::failed);  // the same 5000 bytes again
  EXPECT(progress.error_number() == 0 && progress.transferred() == 5000);
  EXPECT(std::strstr(progress.detail(), "unexpected end of file") != nullptr);
}

TEST(what_was_read_only_to_round_out_may_be_missing) {
  PieceProgress progress(Direction::read, 8192, 512, 5000);
  EXPECT(progress.advance(4000) == Step::again);
  EXPECT(progress.begin() == 3584 && progress.remaining() == 4608);
  EXPECT(progress.advance(1416) == Step::finished);
  PieceProgress missing(Direction::read, 8192, 512, 5000);
  EXPECT(missing.advance(4999) == Step::again);
  EXPECT(missing.advance(391) == Step::failed);
  EXPECT(missing.transferred() == 4999);
}

TEST(nothing_read_is_the_end_and_nothing_written_is_an_error) {
  PieceProgress reading(Direction::read, 4096, 1);
  EXPECT(reading.advance(0) == Step::failed);
  EXPECT(reading.error_number() == 0);
  PieceProgress writing(Direction::write, 4096, 1);
  EXPECT(writing.advance(0) == Step::failed);
  EXPECT(writing.error_number() == EIO);
}

TEST(errors_are_kept) {
  PieceProgress progress(Direction::write, 4096, 1);
  EXPECT(progress.advance(100) == Step::again);
  EXPECT(progress.advance(-ENOSPC) == Step::failed);
  EXPECT(progress.error_number() == ENOSPC && progress.transferred() == 100);
}

TEST(interruptions_are_repeated_with_patience_that_ends) {
  PieceProgress progress(Direction::read, 8192, 1);
  for (int n = 0; n < 999; ++n) EXPECT(progress.advance(n % 2 ? -EINTR : -EAGAIN) == Step::again);
  EXPECT(progress.advance(4096) == Step::again);
  for (int n = 0; n < 999; ++n) EXPECT(progress.advance(-EAGAIN) == Step::again);
  EXPECT(progress.advance(-EAGAIN) == Step::failed);
  EXPECT(progress.error_number() == EAGAIN);
}

TEST(more_than_was_asked_for_is_an_error) {
  PieceProgress progress(Direction::read, 4096, 1);
  EXPECT(progress.advance(4097) == Step::failed);
  EXPECT(progress.error_number() == EIO);
}

}  // namespace
}  // namespace swapper
