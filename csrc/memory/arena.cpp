// Makes and frees the arena's mapping. Huge pages and locking are optional: an ordinary user may lock only 8
// MiB by default, and a machine may have no contiguous memory left. Owns nothing beyond arena.h.
#include "memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <limits>

#include "base/align.h"
#include "base/check.h"
#include "base/error.h"
#include "base/process.h"

namespace swapper {

void advise_transfer_memory(std::byte* address, std::uint64_t nbytes, bool huge_pages) {
  const int result = ::madvise(address, nbytes, MADV_DONTFORK);
  SWAPPER_CHECK(result == 0, "MADV_DONTFORK on our own mapping failed");
  // Fails where huge pages are switched off.
  if (huge_pages) static_cast<void>(::madvise(address, nbytes, MADV_HUGEPAGE));
}

void release_memory(std::byte* address, std::uint64_t nbytes) {
  // Fails for lack of mappings: then it is released with the arena.
  static_cast<void>(
      ::mmap(address, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0));
}

namespace {

// Has the memory be taken from `node` as long as that has some. False if the system refuses, as some
// containers do. A policy of a memfd's mapping is one of its memory, wherever it is mapped.
bool prefer_node(std::byte* address, std::uint64_t nbytes, int node) {
  constexpr int kBits = std::numeric_limits<unsigned long>::digits;
  constexpr int kPreferred = 1;  // MPOL_PREFERRED of <linux/mempolicy.h>
  std::array<unsigned long, 16> mask{};
  if (node < 0 || node >= kBits * static_cast<int>(mask.size())) return false;
  mask.at(static_cast<std::size_t>(node / kBits)) = 1UL << (node % kBits);
  return ::syscall(SYS_mbind, address, nbytes, kPreferred, mask.data(), kBits * mask.size() + 1, 0) == 0;
}

}  // namespace

Arena::Arena(const ArenaOptions& options)
    : nbytes_(align_up(options.nbytes, kPageBytes)), huge_pages_(options.huge_pages) {
  if (options.nbytes == 0) throw ConfigError("an arena needs at least one byte");
  if (nbytes_ < options.nbytes || nbytes_ > (std::uint64_t{1} << 46)) {
    throw ConfigError("an arena of " + std::to_string(options.nbytes) + " bytes is beyond any machine");
  }
  map();
  if (prefer_node(address(), nbytes_, options.node)) node_ = options.node;  // before any of it is populated
  if (!options.lock || is_off("mlock")) {
    lock_reason_ = options.lock ? "locking is off (SWAPPER_OFF=mlock)" : "locking was not requested";
  } else if (::mlock2(address(), nbytes_, MLOCK_ONFAULT) != 0) {
    unlock(errno);  // known before any memory is taken
  }
  prefault_ = std::make_unique<Prefault>(
      address(), nbytes_, memfd_.get(),
      PrefaultOptions{.huge_pages = huge_pages_, .everything = locked(), .filled_once = options.filled_once});
  prefault_->prefault(options.head_bytes);
}

void Arena::prefault_rest() {
  if (populated_bytes() < nbytes_) prefault_->prefault_rest();
}

bool Arena::locked() const {
  return lock_reason().empty();
}

std::string Arena::lock_reason() const {
  const std::lock_guard lock(mutex_);
  return lock_reason_;
}

void Arena::map() {
  memfd_ = UniqueFd(::memfd_create("swapper-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memfd_) throw IoError("memfd_create", "", 0, nbytes_, errno);
  if (::ftruncate(memfd_.get(), static_cast<off_t>(nbytes_)) != 0) {
    throw IoError("ftruncate", "memfd:swapper-arena", 0, nbytes_, errno);
  }
  static_cast<void>(::fcntl(memfd_.get(), F_ADD_SEALS, F_SEAL_GROW));  // it never needs to grow
  range_ = OwnedRange::reserve(nbytes_);
  void* mapped = ::mmap(address(), nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd_.get(), 0);
  if (mapped == MAP_FAILED) throw IoError("mmap", "memfd:swapper-arena", 0, nbytes_, errno);
  advise_transfer_memory(address(), nbytes_, huge_pages_);
}

void Arena::unlock(int code) {
  static_cast<void>(::munlock(address(), nbytes_));
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  const std::lock_guard lock(mutex_);
  lock_reason_ = "mlock of " + std::to_string(nbytes_) + " bytes: " + errno_text(code) +
                 "; the locked-memory limit is " +
                 (limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur) + " bytes") +
                 " (ulimit -l)";
}

void Arena::copy_out(std::byte* place, std::uint64_t offset, std::uint64_t nbytes) {
  constexpr std::uint64_t kStepBytes = 4 << 20;  // bytes; the extra memory in use while copying
  for (std::uint64_t done = 0; done < nbytes; done += kStepBytes) {
    const std::uint64_t step = std::min(kStepBytes, nbytes - done);
    const std::uint64_t at = offset + done;
    void* made = ::mmap(nullptr, step, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) throw IoError("mmap", "", at, step, errno);
    std::memcpy(made, address() + at, step);
    if (::mremap(made, step, step, MREMAP_MAYMOVE | MREMAP_FIXED, place + done) == MAP_FAILED) {
      const int code = errno;
      ::munmap(made, step);
      throw IoError("mremap", "", at, step, code);
    }
    static_cast<void>(::fallocate(memfd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                                  static_cast<off_t>(at), static_cast<off_t>(step)));  // else at the end
  }
}

void Arena::retire() {
  prefault_->stop();
  if (::ftruncate(memfd_.get(), 0) != 0) {
    throw IoError("ftruncate", "memfd:swapper-arena", 0, nbytes_, errno);
  }
}

Arena::~Arena() {
  // In a forked child the threads do not exist. See Creator.
  if (!creator_.is_this_process()) static_cast<void>(prefault_.release());
}

}  // namespace swapper
