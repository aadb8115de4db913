// Makes and frees the arena's mapping. Huge pages and locking are asked for and not insisted on: an ordinary
// user may lock 8 MiB by default, and a machine may have no contiguous memory left. Owns nothing beyond
// arena.h.
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
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace swapper {
namespace {

constexpr std::uint64_t kSlabBytes = std::uint64_t{64} << 20;
constexpr unsigned kMostThreads = 8;

// Does work(begin, nbytes) for each slab of `nbytes` bytes, on several threads: one clears about 1.5 GB/s of
// small pages.
template <typename Work>
void for_each_slab(std::uint64_t nbytes, Work work) {
  std::atomic<std::uint64_t> next{0};
  const auto take = [&] {
    for (std::uint64_t begin; (begin = next.fetch_add(kSlabBytes)) < nbytes;) {
      work(begin, std::min(kSlabBytes, nbytes - begin));
    }
  };
  const std::uint64_t slabs = align_up(nbytes, kSlabBytes) / kSlabBytes;
  const auto most =
      std::min<std::uint64_t>(slabs, std::min(kMostThreads, std::thread::hardware_concurrency()));
  std::vector<std::thread> others;
  try {
    const SignalsBlocked blocked;
    while (others.size() + 1 < most) others.emplace_back(take);
  } catch (const std::system_error&) {  // no more threads to be had: fewer will do
  }
  take();
  for (std::thread& other : others) other.join();
}

// [Note: huge pages by collapse] A transfer is cut where its memory is not contiguous: a drive takes so many
// segments at a time, and looks after each of them. Into pages of 4 KiB the drive on which this was measured
// reads 1.2 GB/s, into pages of 2 MiB 3.6, for a sixth of the processor time. Most systems have huge pages of
// shared memory switched off (shmem_enabled), and this is the one way that asks nobody: a page at the head of
// each 2 MiB, and then collapsing the memory around it, which also clears ten times faster. Where it is
// refused (before Linux 6.1, or no contiguous memory is left) pages stay small. Only whole 2 MiB within the
// arena: it takes no more memory than it is large.
//
// Gives the number of bytes that lie in huge pages now.
std::uint64_t collapse(std::byte* address, std::uint64_t nbytes) {
  const std::uint64_t whole = align_down(nbytes, kHugePageBytes);
  for (std::uint64_t at = 0; at < whole; at += kHugePageBytes) {
    if (::madvise(address + at, kPageBytes, MADV_POPULATE_READ) != 0) return 0;
  }
  if (whole == 0 || ::madvise(address, whole, MADV_COLLAPSE) == 0) return whole;
  if (errno == EINVAL) return 0;  // the kernel does not know it
  std::uint64_t collapsed = 0;
  for (std::uint64_t at = 0; at < whole; at += kHugePageBytes) {
    if (::madvise(address + at, kHugePageBytes, MADV_COLLAPSE) != 0) break;
    collapsed += kHugePageBytes;
  }
  return collapsed;
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
    : nbytes_(align_up(options.nbytes, kPageBytes)), huge_pages_(options.huge_pages) {
  if (options.nbytes == 0) throw ConfigError("an arena needs at least one byte");
  if (nbytes_ < options.nbytes || nbytes_ > (std::uint64_t{1} << 46)) {
    throw ConfigError("an arena of " + std::to_string(options.nbytes) + " bytes is beyond any machine");
  }
  map();
  if (!options.lock) {
    lock_reason_ = "locking was not asked for";
  } else if (::mlock2(address_, nbytes_, MLOCK_ONFAULT) != 0 && errno != ENOSYS) {
    unlock(errno);  // said before any memory is taken
  }
  take_huge_pages();
  if (locked()) take_the_rest();
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

void Arena::take_huge_pages() {
  if (!huge_pages_) return;
  std::atomic<std::uint64_t> collapsed{0};
  for_each_slab(nbytes_, [&](std::uint64_t begin, std::uint64_t slab_bytes) {
    collapsed += collapse(address_ + begin, slab_bytes);
  });
  huge_bytes_ = collapsed;
}

// What is locked is taken now, all of it.
void Arena::take_the_rest() {
  std::atomic<int> code{0};
  for_each_slab(nbytes_, [&](std::uint64_t begin, std::uint64_t slab_bytes) {
    if (code == 0 && ::madvise(address_ + begin, slab_bytes, MADV_POPULATE_READ) != 0) code = errno;
  });
  if (code == EINVAL) code = ::mlock(address_, nbytes_) == 0 ? 0 : errno;  // an older kernel
  if (code != 0) unlock(code);
}

void Arena::unlock(int code) {
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
