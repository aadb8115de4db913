// The list, and the question to the kernel. A forked child begins with an empty list, because the memory is
// not there, and with a lock that nobody holds. Owns nothing beyond owned.h.
#include "memory/owned.h"

#include <pthread.h>
#include <sys/utsname.h>

#include <cstdio>
#include <map>
#include <mutex>
#include <new>

namespace swapper {
namespace {

struct Ranges {
  std::mutex mutex;
  std::map<std::uintptr_t, std::uint64_t> nbytes_by_begin;
};

alignas(Ranges) std::byte ranges_memory[sizeof(Ranges)];

Ranges& ranges() {
  static Ranges* made = [] {
    pthread_atfork(nullptr, nullptr, [] { new (ranges_memory) Ranges; });
    return new (ranges_memory) Ranges;
  }();
  return *made;
}

}  // namespace

void note_owned(const std::byte* address, std::uint64_t nbytes) {
  Ranges& all = ranges();
  const std::lock_guard lock(all.mutex);
  all.nbytes_by_begin[reinterpret_cast<std::uintptr_t>(address)] = nbytes;
}

void forget_owned(const std::byte* address) {
  Ranges& all = ranges();
  const std::lock_guard lock(all.mutex);
  all.nbytes_by_begin.erase(reinterpret_cast<std::uintptr_t>(address));
}

bool is_owned(const std::byte* address, std::uint64_t nbytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(address);
  Ranges& all = ranges();
  const std::lock_guard lock(all.mutex);
  auto after = all.nbytes_by_begin.upper_bound(begin);
  if (after == all.nbytes_by_begin.begin()) return false;
  --after;
  return nbytes <= after->second && begin - after->first <= after->second - nbytes;
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
