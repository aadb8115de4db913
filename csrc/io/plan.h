// Cuts a request into pieces, and chooses a way for each. Pure functions of numbers. Owns nothing.
//
// [Note: three ways] A direct file transfers whole sectors, from and into aligned memory. What fits goes that
// way, plain. A read that does not fit is rounded out to sectors and staged in a slot (staging.h); so is the
// middle of a write whose memory is not aligned. The edges of a write remain: bytes that share a sector with
// others. Reading that sector, patching it and writing it back would lose what another operation, engine or
// process writes there meanwhile, and would leave the wrong size at the end of the file. So edges go through
// a second, buffered descriptor: the kernel patches under its own lock and sets the exact size. The page
// cache and direct I/O must then never overlap: the cache writes whole blocks back, and would overwrite new
// direct bytes with old ones. Therefore a direct write consists of whole granules (a page or a block of the
// filesystem, whichever is larger), and edges are everything outside of them; the scheduler never has a
// direct write and an edge in one granule at the same time; and an edge is flushed to the drive before its
// piece finishes, which also reports the drive's errors. See docs/decisions/edges-of-writes.md.
#pragma once

#include <cstdint>

#include "io/progress.h"

namespace swapper {

// The unit of a slot's size; no direct file's sector or granule is larger.
inline constexpr std::uint64_t kSlotUnitBytes = std::uint64_t{64} << 10;

enum class Way : std::uint8_t { plain, staged, edge };

// A part of an operation, in bytes from the operation's beginning.
struct Piece {
  std::uint64_t begin = 0;
  std::uint64_t nbytes = 0;
  Way way = Way::plain;
};

// A file's requirements on transfers. All are powers of two, and 1 for a buffered file.
struct Demands {
  std::uint32_t sector = 1;   // offsets and lengths
  std::uint32_t granule = 1;  // offsets and lengths of direct writes: whole sectors
  std::uint32_t memory = 1;   // addresses
};

struct PieceSizes {
  std::uint64_t plain = 0;
  std::uint64_t staged = 0;  // what fits into a slot: whole sectors
};

// An operation as it will be cut. [0, head) and [body_end, nbytes) are one piece each, unless empty; the body
// between is cut into steps, the first of them shorter by `phase`.
struct Plan {
  std::uint64_t nbytes = 0;
  std::uint64_t head = 0;
  std::uint64_t body_end = 0;
  std::uint64_t step = 0;
  std::uint64_t phase = 0;
  Way body_way = Way::plain;
  Way edge_way = Way::edge;

  bool has_edges() const { return edge_way == Way::edge && (head > 0 || body_end < nbytes); }
};

// `stage`: no plain pieces, even where the alignments allow them.
[[nodiscard]] Plan make_plan(Direction direction, std::uint64_t offset, std::uint64_t address,
                             std::uint64_t nbytes, const Demands& demands, const PieceSizes& sizes,
                             bool stage);

class Cutter {
 public:
  explicit Cutter(const Plan& plan) : plan_(plan) {}
  bool finished() const { return next_ == plan_.nbytes; }
  [[nodiscard]] Piece peek() const;  // the next piece
  [[nodiscard]] Piece cut();

 private:
  Plan plan_;
  std::uint64_t next_ = 0;
};

}  // namespace swapper
