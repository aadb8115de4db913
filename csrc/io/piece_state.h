// The states of a piece on the I/O thread, and the moves between them. Any other move is a bug: it ends the
// process before wrong bytes reach a file. Pure; owns nothing.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace swapper {

enum class PieceState : std::uint8_t {
  idle,          // no piece: the slot is free
  placing,       // cut; its range in the file and its memory are being chosen
  copying_in,    // a staged write, waiting for the copy into its stage
  transferring,  // at the backend
  flushing,      // at the backend: an edge that is written, flushed from the page cache
  copying_out,   // a staged read that has arrived, waiting for the copy out of its stage
};
inline constexpr std::size_t kPieceStates = 6;

constexpr std::uint8_t bit_of(PieceState state) {
  return static_cast<std::uint8_t>(1u << static_cast<unsigned>(state));
}

template <typename... States>
constexpr std::uint8_t any_of(States... states) {
  return static_cast<std::uint8_t>((bit_of(states) | ...));
}

// For each state those that may follow it.
inline constexpr std::array<std::uint8_t, kPieceStates> kLegalMoves = [] {
  using enum PieceState;
  std::array<std::uint8_t, kPieceStates> moves{};
  const auto from = [&](PieceState state) -> std::uint8_t& { return moves[static_cast<std::size_t>(state)]; };
  from(idle) = any_of(placing);
  from(placing) = any_of(copying_in, transferring, idle);  // idle: there is no memory for a stage
  from(copying_in) = any_of(transferring, idle);           // idle: the operation has failed
  // transferring again: what remains of a short transfer. idle: it has ended, or failed.
  from(transferring) = any_of(transferring, flushing, copying_out, idle);
  from(flushing) = any_of(flushing, idle);  // flushing again: it was interrupted
  from(copying_out) = any_of(idle);
  return moves;
}();

constexpr bool is_legal(PieceState from, PieceState to) {
  return (kLegalMoves[static_cast<std::size_t>(from)] & bit_of(to)) != 0;
}

constexpr bool is_at_backend(PieceState state) {
  return state == PieceState::transferring || state == PieceState::flushing;
}

constexpr const char* name_of(PieceState state) {
  constexpr std::array<const char*, kPieceStates> kNames = {"idle",         "placing",  "copying_in",
                                                            "transferring", "flushing", "copying_out"};
  return kNames[static_cast<std::size_t>(state)];
}

[[noreturn]] inline void illegal_move(PieceState from, PieceState to) {
  std::fprintf(stderr, "swapper: broken invariant: a piece: %s -> %s is not a legal move\n", name_of(from),
               name_of(to));
  std::abort();
}

inline void move_to(PieceState& state, PieceState next) {
  if (!is_legal(state, next)) illegal_move(state, next);
  state = next;
}

}  // namespace swapper
