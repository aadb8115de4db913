// Writes into files that lie in memory (tmpfs) without the lock that serializes writes to a file. Belongs to
// one thread. Owns a userfaultfd.
//
// [Note: filling] A write to a file in memory allocates pages and copies, both under the file's lock, so that
// a second thread only waits. UFFDIO_COPY does the same to a mapping of the file, page by page, without that
// lock: while one thread writes, others fill, and two together are 1.6 times as fast as one. It fills absent
// pages and leaves present ones, so it serves files that were made long enough (truncated up) and never
// written. Whatever it does not fill, for whatever reason (the page is present, the file is too short, no
// memory, no permission), is left to an ordinary write, which succeeds or reports why not.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fd.h"

namespace swapper {

class Filler {
 public:
  Filler();

  bool is_permitted() const { return static_cast<bool>(faults_); }

  // Copies bytes into absent pages of the file at `offset`; returns how many, counted from the first.
  [[nodiscard]] std::uint64_t fill(int fd, std::uint64_t offset, const std::byte* address,
                                   std::uint64_t nbytes);

 private:
  UniqueFd faults_;  // empty: the kernel permits none
};

}  // namespace swapper
