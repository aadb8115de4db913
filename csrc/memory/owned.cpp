// Keeps the list of ranges, and asks the kernel's version. A forked child begins with an empty list and a
// free lock, because the memory does not exist there; its copies of ranges unmap nothing, since the addresses
// may have other owners by now. Owns nothing beyond owned.h.
#include "memory/owned.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/utsname.h>

#include <cerrno>
#include <cstdio>
#include <map>
#include <mutex>
#include <new>

#include "base/align.h"
#include "base/error.h"

namespace swapper {
namespace {

struct Known {
  std::uint64_t nbytes;
  std::weak_ptr<const OwnedRange> range;
};

struct Ranges {
  std::mutex mutex;
  std::map<std::uintptr_t, Known> by_begin;
};

alignas(Ranges) std::byte ranges_memory[sizeof(Ranges)];

Ranges& ranges() {
  static Ranges* made = [] {
    if (!is_off("fork")) pthread_atfork(nullptr, nullptr, [] { new (ranges_memory) Ranges; });
    return new (ranges_memory) Ranges;
  }();
  return *made;
}

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

}  // namespace

OwnedRange::OwnedRange(std::uint64_t nbytes) : nbytes_(nbytes), address_(reserve_addresses(nbytes)) {}

std::shared_ptr<OwnedRange> OwnedRange::reserve(std::uint64_t nbytes) {
  const std::shared_ptr<OwnedRange> range(new OwnedRange(nbytes));
  Ranges& all = ranges();
  const std::lock_guard lock(all.mutex);
  all.by_begin[reinterpret_cast<std::uintptr_t>(range->address())] = {nbytes, range};
  return range;
}

OwnedRange::~OwnedRange() {
  if (!creator_.is_this_process()) return;
  {
    Ranges& all = ranges();
    const std::lock_guard lock(all.mutex);
    all.by_begin.erase(reinterpret_cast<std::uintptr_t>(address_));
  }
  ::munmap(address_, nbytes_);
}

std::shared_ptr<const OwnedRange> owner_of(const std::byte* address, std::uint64_t nbytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  Ranges& all = ranges();
  const std::lock_guard lock(all.mutex);
  auto after = all.by_begin.upper_bound(begin);
  if (after == all.by_begin.begin()) return nullptr;
  const auto& [first, known] = *--after;
  const bool has_all = nbytes <= known.nbytes && begin - first <= known.nbytes - nbytes;
  return has_all ? known.range.lock() : nullptr;
}

bool kernel_keeps_memory_at_fork() {
  static const bool keeps = [] {
    utsname name{};
    int major = 0, minor = 0;
    if (::uname(&name) != 0 || std::sscanf(name.release, "%d.%d", &major, &minor) != 2) return false;
    return major > 6 || (major == 6 && minor >= 5);
  }();
  return keeps;
}

}  // namespace swapper
