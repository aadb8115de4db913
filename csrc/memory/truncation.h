// Mappings of files that somebody else may truncate. An access beyond the end of such a file is a SIGBUS,
// which would end the process. Its handler maps zeros there, up to the end of the range, and the range counts
// as lost: a reader asks for that afterwards.
#pragma once

#include <cstddef>
#include <cstdint>

namespace swapper {

// Watches one mapped range, that is no part of another one. Goes before the mapping does.
class TruncationWatch {
 public:
  TruncationWatch(std::byte* begin, std::uint64_t nbytes);
  ~TruncationWatch();
  TruncationWatch(const TruncationWatch&) = delete;
  TruncationWatch& operator=(const TruncationWatch&) = delete;

  bool is_lost() const;

 private:
  std::byte* begin_;
};

// The number of ranges lost so far.
std::uint64_t ranges_lost();

}  // namespace swapper
