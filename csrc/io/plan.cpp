// Implements the arithmetic of plan.h. Owns nothing.
#include "io/plan.h"

#include <algorithm>

#include "base/align.h"
#include "base/check.h"

namespace swapper {
namespace {

Plan all_staged(std::uint64_t offset, std::uint64_t nbytes, const Demands& demands, const PieceSizes& sizes) {
  Plan plan;
  plan.nbytes = plan.body_end = nbytes;
  plan.step = sizes.staged;
  plan.phase = offset % demands.sector;
  plan.body_way = Way::staged;
  return plan;
}

}  // namespace

Plan make_plan(Direction direction, std::uint64_t offset, std::uint64_t address, std::uint64_t nbytes,
               const Demands& demands, const PieceSizes& sizes, bool stage) {
  const bool writing = direction == Direction::write;
  const std::uint64_t unit = writing ? demands.granule : demands.sector;
  const std::uint64_t body_begin = align_up(offset, unit), body_end = align_down(offset + nbytes, unit);
  const bool has_body = body_begin < body_end;
  const bool plain = !stage && has_body && is_aligned(address + (body_begin - offset), demands.memory);
  if (!writing && !plain) return all_staged(offset, nbytes, demands, sizes);
  Plan plan;
  plan.nbytes = nbytes;
  plan.head = has_body ? body_begin - offset : nbytes;
  plan.body_end = has_body ? body_end - offset : nbytes;
  plan.step = plain ? align_up(sizes.plain, demands.sector) : sizes.staged;
  plan.body_way = plain ? Way::plain : Way::staged;
  plan.edge_way = writing ? Way::edge : Way::staged;
  return plan;
}

Piece Cutter::peek() const {
  SWAPPER_CHECK(!finished(), "nothing is left to cut");
  if (next_ < plan_.head) return {.begin = next_, .nbytes = plan_.head - next_, .way = plan_.edge_way};
  if (next_ >= plan_.body_end) return {.begin = next_, .nbytes = plan_.nbytes - next_, .way = plan_.edge_way};
  const std::uint64_t step = next_ == plan_.head ? plan_.step - plan_.phase : plan_.step;
  return {.begin = next_, .nbytes = std::min(step, plan_.body_end - next_), .way = plan_.body_way};
}

Piece Cutter::cut() {
  const Piece piece = peek();
  next_ += piece.nbytes;
  return piece;
}

}  // namespace swapper
