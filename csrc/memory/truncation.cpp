// Keeps the table of watched ranges, which do not overlap, and answers SIGBUS with it. The lock is held for
// moments, and never while watched memory is touched. A forked child has the mappings, and the table.
#include "memory/truncation.h"

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <map>

#include "base/align.h"
#include "base/process.h"
#include "memory/signal_slot.h"

namespace swapper {
namespace {

struct Watched {
  std::uint64_t nbytes = 0;
  bool lost = false;
};

std::map<std::byte*, Watched> g_watched;  // by first address; never destroyed
std::atomic_flag g_lock = ATOMIC_FLAG_INIT;
std::atomic<std::uint64_t> g_lost{0};

void lock() {
  while (g_lock.test_and_set(std::memory_order_acquire)) ::sched_yield();
}

void unlock() {
  g_lock.clear(std::memory_order_release);
}

bool serve(std::byte* address) {
  auto after = g_watched.upper_bound(address);
  if (after == g_watched.begin()) return false;
  auto& [begin, range] = *std::prev(after);
  const auto at = align_down(static_cast<std::uint64_t>(address - begin), kPageBytes);
  if (at >= range.nbytes) return false;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (::mmap(begin + at, range.nbytes - at, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED) return false;
  range.lost = true;
  g_lost.fetch_add(1, std::memory_order_release);
  return true;
}

void on_bus_error(int signal, siginfo_t* info, void* context);

SignalSlot g_slot(SIGBUS, is_off("sigbus"), on_bus_error);

void on_bus_error(int, siginfo_t* info, void* context) {
  const int saved = errno;
  bool is_served = false;
  if (info->si_code == BUS_ADRERR) {
    lock();
    is_served = serve(static_cast<std::byte*>(info->si_addr));
    unlock();
  }
  if (!is_served) g_slot.pass_on(info, context);
  errno = saved;
}

}  // namespace

TruncationWatch::TruncationWatch(std::byte* begin, std::uint64_t nbytes) : begin_(begin) {
  static const int at_fork = is_off("fork") ? 0 : ::pthread_atfork(lock, unlock, unlock);
  static_cast<void>(at_fork);
  std::map<std::byte*, Watched> made;
  made.emplace(begin, Watched{nbytes});
  auto fresh = made.extract(made.begin());
  lock();
  g_slot.keep_installed();
  g_watched.insert(std::move(fresh));
  unlock();
}

TruncationWatch::~TruncationWatch() {
  lock();
  const auto gone = g_watched.extract(begin_);  // freed after the lock is released
  unlock();
}

bool TruncationWatch::is_lost() const {
  lock();
  const auto found = g_watched.find(begin_);
  const bool lost = found != g_watched.end() && found->second.lost;
  unlock();
  return lost;
}

std::uint64_t ranges_lost() {
  return g_lost.load(std::memory_order_acquire);
}

}  // namespace swapper
