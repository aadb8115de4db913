// Makes and frees the arena's mapping. Huge pages and locking are asked for and not insisted on: an ordinary
// user may lock 8 MiB by default, and many systems have shared-memory huge pages switched off. Owns nothing
// beyond arena.h.
#include "memory/arena.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <thread>
#include <vector>

#include "base/align.h"
#include "base/check.h"
#include "base/error.h"
#include "memory/owned.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace swapper {
namespace {

constexpr std::uint64_t kSlabBytes = std::uint64_t{64} << 20;
constexpr unsigned kMostThreads = 8;

// Takes all of the memory now, on several threads: one clears about 1.5 GB/s. Gives 0 or an errno.
int populate(std::byte* address, std::uint64_t nbytes) {
  std::atomic<std::uint64_t> next{0};
  std::atomic<int> code{0};
  const auto work = [&] {
    for (std::uint64_t begin; code == 0 && (begin = next.fetch_add(kSlabBytes)) < nbytes;) {
      const std::uint64_t slab_bytes = std::min(kSlabBytes, nbytes - begin);
      if (::madvise(address + begin, slab_bytes, MADV_POPULATE_READ) != 0) code = errno;
    }
  };
  const std::uint64_t slabs = align_up(nbytes, kSlabBytes) / kSlabBytes;
  const auto most =
      std::min<std::uint64_t>(slabs, std::min(kMostThreads, std::thread::hardware_concurrency()));
  std::vector<std::thread> others;
  try {
    const SignalsBlocked blocked;
    while (others.size() + 1 < most) others.emplace_back(work);
  } catch (const std::system_error&) {  // no more threads to be had: fewer will do
  }
  work();
  for (std::thread& other : others) other.join();
  return code;
}

// Gives 0 or an errno. Locking on fault first asks whether it is permitted at all, before any memory is
// taken.
int lock_and_populate(std::byte* address, std::uint64_t nbytes) {
  if (::mlock2(address, nbytes, MLOCK_ONFAULT) != 0 && errno != ENOSYS) return errno;
  const int code = populate(address, nbytes);
  if (code != EINVAL) return code;
  return ::mlock(address, nbytes) == 0 ? 0 : errno;  // an older kernel
}

}  // namespace

std::byte* reserve_addresses(std::uint64_t nbytes) {
  const std::uint64_t padded = nbytes + kHugePageBytes;
  void* raw = ::mmap(nullptr, padded, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw IoError("reserve", "", 0, nbytes, errno, "no address space");
  const auto begin = reinterpret_cast<std::uint64_t>(raw);
  const std::uint64_t aligned = align_up(begin, kHugePageBytes);
  if (aligned > begin) ::munmap(raw, aligned - begin);
  const std::uint64_t end = aligned + nbytes;
  if (begin + padded > end) ::munmap(reinterpret_cast<void*>(end), begin + padded - end);
  return reinterpret_cast<std::byte*>(aligned);
}

void advise_transfer_memory(std::byte* address, std::uint64_t nbytes, bool huge_pages) {
  const int result = ::madvise(address, nbytes, MADV_DONTFORK);
  SWAPPER_CHECK(result == 0, "MADV_DONTFORK on our own mapping failed");
  if (huge_pages) static_cast<void>(::madvise(address, nbytes, MADV_HUGEPAGE));  // refused where switched off
}

Arena::Arena(const ArenaOptions& options)
    : nbytes_(align_up(options.nbytes, options.huge_pages ? kHugePageBytes : kPageBytes)),
      huge_pages_(options.huge_pages) {
  if (options.nbytes == 0) throw ConfigError("an arena needs at least one byte");
  if (nbytes_ < options.nbytes || nbytes_ > (std::uint64_t{1} << 46)) {
    throw ConfigError("an arena of " + std::to_string(options.nbytes) + " bytes is beyond any machine");
  }
  map();
  if (options.lock) {
    lock();
  } else {
    lock_reason_ = "locking was not asked for";
  }
}

void Arena::map() {
  memfd_ = UniqueFd(::memfd_create("swapper-arena", MFD_CLOEXEC));
  if (!memfd_) throw IoError("memfd_create", "", 0, nbytes_, errno);
  if (::ftruncate(memfd_.get(), static_cast<off_t>(nbytes_)) != 0) {
    throw IoError("ftruncate", "memfd:swapper-arena", 0, nbytes_, errno);
  }
  std::byte* place = reserve_addresses(nbytes_);
  void* mapped = ::mmap(place, nbytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, memfd_.get(), 0);
  if (mapped == MAP_FAILED) {
    const int code = errno;
    ::munmap(place, nbytes_);
    throw IoError("mmap", "memfd:swapper-arena", 0, nbytes_, code);
  }
  address_ = place;
  advise_transfer_memory(address_, nbytes_, huge_pages_);
  note_owned(address_, nbytes_);
}

void Arena::lock() {
  const int code = lock_and_populate(address_, nbytes_);
  if (code == 0) return;
  static_cast<void>(::munlock(address_, nbytes_));
  rlimit limit{};
  ::getrlimit(RLIMIT_MEMLOCK, &limit);
  lock_reason_ = "mlock of " + std::to_string(nbytes_) + " bytes: " + errno_text(code) +
                 "; the locked-memory limit is " +
                 (limit.rlim_cur == RLIM_INFINITY ? "unlimited" : std::to_string(limit.rlim_cur) + " bytes") +
                 " (ulimit -l)";
}

Arena::~Arena() {
  // In a forked child these addresses may by now be somebody else's. See Creator.
  if (!creator_.is_this_process()) return;
  forget_owned(address_);
  ::munmap(address_, nbytes_);
}

}  // namespace swapper
