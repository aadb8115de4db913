// Tests how requests are cut: every byte once, in order, and each way only where it is allowed. Owns nothing.
#include <random>

#include "base/align.h"
#include "io/plan.h"
#include "tests/testing.h"

namespace swapper {
namespace {

constexpr PieceSizes kMebibytes{.plain = 1 << 20, .staged = 1 << 20};

// Cuts the whole request and checks each piece against the rules of [Note: three ways].
void check_pieces(Direction direction, std::uint64_t offset, std::uint64_t address, std::uint64_t nbytes,
                  const Demands& demands, const PieceSizes& sizes, bool stage) {
  const bool writing = direction == Direction::write;
  const std::uint32_t unit = writing ? demands.granule : demands.sector;
  Cutter cutter(make_plan(direction, offset, address, nbytes, demands, sizes, stage));
  std::uint64_t covered = 0;
  while (!cutter.finished()) {
    const Piece piece = cutter.cut();
    EXPECT(piece.begin == covered && piece.nbytes > 0);
    covered += piece.nbytes;
    const std::uint64_t begin = offset + piece.begin, end = begin + piece.nbytes;
    switch (piece.way) {
      case Way::plain:
        EXPECT(!stage);
        EXPECT(is_aligned(begin, demands.sector) && is_aligned(end, demands.sector));
        EXPECT(is_aligned(address + piece.begin, demands.memory));
        EXPECT(piece.nbytes <= align_up(sizes.plain, demands.sector));
        break;
      case Way::staged:
        EXPECT(align_up(end, demands.sector) - align_down(begin, demands.sector) <= sizes.staged);
        break;
      case Way::edge:
        EXPECT(writing && piece.nbytes < 2 * std::uint64_t{unit});
        EXPECT(piece.begin == 0 || end == offset + nbytes);
        break;
    }
    if (writing && piece.way != Way::edge) {  // whole granules, considered as one
      EXPECT(begin >= align_up(offset, unit) && end <= align_down(offset + nbytes, unit));
      EXPECT(is_aligned(begin, demands.sector) && is_aligned(end, demands.sector));
    }
  }
  EXPECT(covered == nbytes);
}

TEST(pieces_cover_the_operation_once_and_keep_to_the_rules) {
  std::mt19937_64 random(1);
  const auto below = [&](std::uint64_t limit) { return random() % limit; };
  for (int n = 0; n < 200'000; ++n) {
    Demands demands;
    if (below(4) != 0) {
      demands.sector = 512u << below(8);
      demands.granule = std::max(4096u << below(5), demands.sector);
      demands.memory = 1u << below(13);
    }
    const std::uint64_t grain = below(2) ? 1 : 512u << below(5);
    const std::uint64_t offset = below(1 << 20) / grain * grain + (below(50) ? 0 : std::uint64_t{1} << 40);
    const std::uint64_t nbytes = below(1 << 19) / grain * grain;
    const std::uint64_t address = (1 << 20) + below(2) * below(5000);
    const PieceSizes sizes{.plain = 4096 * (1 + below(64)), .staged = kSlotUnitBytes * (1 + below(3))};
    check_pieces(below(2) ? Direction::read : Direction::write, offset, address, nbytes, demands, sizes,
                 below(4) == 0);
  }
}

TEST(what_fits_goes_plain_in_whole_pieces) {
  const Demands demands{.sector = 512, .granule = 4096, .memory = 512};
  Cutter cutter(make_plan(Direction::write, 8192, 4096, 3 << 20, demands, kMebibytes, false));
  for (int n = 0; n < 3; ++n) {
    const Piece piece = cutter.cut();
    EXPECT(piece.way == Way::plain && piece.nbytes == 1 << 20);
  }
  EXPECT(cutter.finished());
}

TEST(a_read_whose_middle_fits_goes_plain_there) {
  const Demands demands{.sector = 512, .granule = 4096, .memory = 4};
  Cutter cutter(make_plan(Direction::read, 100, 100, 1000, demands, kMebibytes, false));
  const Piece head = cutter.cut(), middle = cutter.cut(), tail = cutter.cut();
  EXPECT(head.way == Way::staged && head.nbytes == 412);
  EXPECT(middle.way == Way::plain && middle.nbytes == 512);
  EXPECT(tail.way == Way::staged && tail.nbytes == 76);
  EXPECT(cutter.finished());
}

}  // namespace
}  // namespace swapper
