// One io_uring by raw system calls: the two rings shared with the kernel, and no policy. Used by one thread.
// Owns the ring's descriptor and its mappings.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/fd.h"
#include "io/uring_abi.h"

namespace swapper::uring {

class Ring {
 public:
  // Makes space for `entries` requests in flight. Throws BackendUnavailable if the kernel refuses.
  explicit Ring(std::uint32_t entries);
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  std::uint32_t setup_flags() const { return setup_flags_; }
  bool supports(std::span<const Opcode> opcodes) const;
  [[nodiscard]] int register_with(std::uint32_t opcode, const void* argument,
                                  std::uint32_t count);  // 0 or a negative errno

  // Adds a request. There is space as long as at most `entries` are open.
  void push(const Submission& submission);

  // Submits what was pushed and, with `wait`, sleeps until there is a completion. Throws IoError.
  void enter(bool wait);

  // Takes the next completion; false if there is none.
  [[nodiscard]] bool pop(CompletionEntry& entry);

 private:
  void set_up(std::uint32_t entries);
  void map();

  UniqueFd fd_;
  Params params_{};
  std::uint32_t setup_flags_ = 0;
  std::byte* rings_ = nullptr;
  std::size_t rings_bytes_ = 0;
  Submission* submissions_ = nullptr;
  std::size_t submissions_bytes_ = 0;
  std::uint32_t unsubmitted_ = 0;
};

}  // namespace swapper::uring
