// Implements the checks of debug mode. Owns nothing.
#include "io/watch.h"

#include <cstring>

#include "base/crc32.h"
#include "io/op.h"

namespace swapper {
namespace {

constexpr int kPattern = 0xA5;

}  // namespace

void begin_watch(Op& op) {
  if (!op.watch.wanted || op.watch.begun) return;
  op.watch.begun = true;
  const Request& request = op.request;
  if (request.direction == Direction::write) {
    op.watch.crc = crc32(request.address, request.nbytes);
  } else {
    std::memset(request.address, kPattern, request.nbytes);
  }
}

// True if the first byte is the pattern's and each byte equals the next.
bool is_untouched(const std::byte* address, std::uint64_t nbytes) {
  return nbytes == 0 ||
         (address[0] == std::byte{kPattern} && std::memcmp(address, address + 1, nbytes - 1) == 0);
}

bool is_as_expected(const Op& op, std::uint32_t crc) {
  const std::uint32_t now = crc32(op.request.address, op.request.nbytes);
  return now == (op.request.direction == Direction::write ? op.watch.crc : crc);
}

}  // namespace swapper
