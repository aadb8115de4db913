// Writing into files that lie in memory (tmpfs), past the lock that lets one write at a time into a file.
// Belongs to one thread. Owns a userfaultfd.
//
// [Note: filling] A write to a file in memory takes pages for it and copies, both under the file's lock, so
// that a second thread only waits. UFFDIO_COPY does the same to a mapping of the file, page by page, and
// takes no lock of the file: while one thread writes, others fill, and two together are 1.6 times as fast as
// one. It fills pages that are absent and leaves those that are there, so it serves files that were made long
// enough (truncated up) and never written. Whatever it does not do, for whatever reason (a page is there, the
// file is too short, no memory, not permitted), is left for an ordinary write, which succeeds or says why.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/fd.h"

namespace swapper {

class Filler {
 public:
  Filler();

  bool is_permitted() const { return static_cast<bool>(faults_); }

  // Puts bytes into absent pages of the file at `offset`; gives how many, from the first one on.
  std::uint64_t fill(int fd, std::uint64_t offset, const std::byte* address, std::uint64_t nbytes);

 private:
  UniqueFd faults_;  // empty: the kernel permits none
};

}  // namespace swapper
