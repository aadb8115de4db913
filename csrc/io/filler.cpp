// Fills absent pages of files in memory. Owns nothing beyond filler.h.
#include "io/filler.h"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>

#include <algorithm>
#include <cerrno>

#include "base/align.h"

namespace swapper {
namespace {

constexpr std::uint64_t kMinBytes = std::uint64_t{64} << 10;  // below this, mapping costs more than it saves
constexpr int kUserModeOnly = 1;  // UFFD_USER_MODE_ONLY, Linux 5.11: needs no privilege

// A mapping of a range of a file, unmapped by its destructor.
class Mapping {
 public:
  Mapping(int fd, std::uint64_t offset, std::uint64_t nbytes)
      : nbytes_(nbytes),
        address_(
            ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset))) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    if (address_ != MAP_FAILED) ::munmap(address_, nbytes_);
  }

  explicit operator bool() const { return address_ != MAP_FAILED; }
  std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(address_); }

 private:
  std::uint64_t nbytes_;
  void* address_;
};

}  // namespace

Filler::Filler() : faults_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | kUserModeOnly))) {
  uffdio_api api{};
  api.api = UFFD_API;
  if (faults_ && ::ioctl(faults_.get(), UFFDIO_API, &api) != 0) faults_.reset();
}

std::uint64_t Filler::fill(int fd, std::uint64_t offset, const std::byte* address, std::uint64_t nbytes) {
  const std::uint64_t whole = align_down(nbytes, kPageBytes);
  if (!faults_ || whole < kMinBytes || !is_aligned(offset, kPageBytes)) return 0;
  const Mapping mapping(fd, offset, whole);
  if (!mapping) return 0;
  uffdio_register range{};
  range.range = {.start = mapping.address(), .len = whole};
  range.mode = UFFDIO_REGISTER_MODE_MISSING;
  if (::ioctl(faults_.get(), UFFDIO_REGISTER, &range) != 0) return 0;
  uffdio_copy copy{};
  copy.dst = mapping.address();
  copy.src = reinterpret_cast<std::uint64_t>(address);
  copy.len = whole;
  copy.mode = UFFDIO_COPY_MODE_DONTWAKE;
  if (::ioctl(faults_.get(), UFFDIO_COPY, &copy) == 0) return whole;
  return static_cast<std::uint64_t>(std::max<std::int64_t>(copy.copy, 0));
}

}  // namespace swapper
