// Populates memory slab by slab, with several threads. Reports a prefix of the arena as populated, since
// frames are handed out in that order. Owns nothing beyond prefault.h.
#include "memory/prefault.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <vector>

#include "base/align.h"
#include "base/process.h"

#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace swapper {
namespace {

constexpr std::uint64_t kSlabBytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kRestSlabBytes = std::uint64_t{4} << 20;
constexpr int kRestNice = 19;
constexpr std::uint64_t kMaxThreads = 8;
constexpr std::uint64_t kStepBytes = std::uint64_t{1} << 20;
// CPU time. Measured: 0.1 where memory is free, 1.9 where a hypervisor provides it.
constexpr double kExpensiveNsPerByte = 0.3;

std::int64_t thread_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

std::uint64_t threads_for(std::uint64_t nbytes) {
  const std::uint64_t processors = std::max(1u, std::thread::hardware_concurrency());
  return std::min({kMaxThreads, processors, align_up(nbytes, kSlabBytes) / kSlabBytes});
}

}  // namespace

Prefault::Prefault(std::byte* address, std::uint64_t nbytes, int memfd, PrefaultOptions options)
    : address_(address), nbytes_(nbytes), memfd_(memfd), options_(options), slab_bytes_(kSlabBytes) {}

void Prefault::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  if (rest_.joinable()) rest_.join();
}

void Prefault::prefault(std::uint64_t nbytes) {
  std::uint64_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    end_ =
        std::min(align_up(std::min(nbytes, nbytes_), kHugePageBytes), nbytes_);  // slabs begin at huge pages
    count = threads_for(end_ - std::min(next_, end_));
  }
  std::vector<std::thread> others;
  try {
    const SignalsBlocked blocked;
    while (others.size() + 1 < count) others.emplace_back([this] { populate_slabs(); });
  } catch (const std::system_error&) {  // fewer threads will do
  }
  populate_slabs();
  for (std::thread& other : others) other.join();
  static_cast<void>(wait_for(nbytes, {}));  // raises what the system refused
}

// [Note: prefault during compute] Populating during a first pass must not delay it: where huge pages are
// expensive, two threads that populated 264 MB of frames slowed a pass from 0.8 s to 1.3 s. So one thread
// does it, and runs only when no other wants its processor. A thread that waits for memory does not compute:
// it helps to populate.
void Prefault::prefault_rest() {
  {
    const std::lock_guard lock(mutex_);
    end_ = nbytes_;
    slab_bytes_ = kRestSlabBytes;
  }
  try {
    const SignalsBlocked blocked;
    rest_ = std::thread([this] {
      static_cast<void>(::setpriority(PRIO_PROCESS, 0, kRestNice));  // of this thread
      populate_slabs();
    });
  } catch (const std::system_error&) {  // threads that wait populate all of it
  }
}

bool Prefault::wait_for(std::uint64_t nbytes, std::chrono::nanoseconds patience) {
  nbytes = std::min(nbytes, nbytes_);
  const auto until = std::chrono::steady_clock::now() + patience;
  std::unique_lock lock(mutex_);
  while (first_missing() < nbytes && may_continue() && std::chrono::steady_clock::now() < until)
    populate_next(lock);
  changed_.wait_until(lock, until, [&] { return refusal_.has_value() || first_missing() >= nbytes; });
  if (first_missing() >= nbytes) return true;
  if (refusal_.has_value()) throw IoError(*refusal_);
  return false;
}

std::uint64_t Prefault::first_missing() const {
  return begun_.empty() ? next_ : *begun_.begin();
}

std::uint64_t Prefault::populated_bytes() const {
  const std::lock_guard lock(mutex_);
  return first_missing();
}

std::uint64_t Prefault::huge_bytes() const {
  const std::lock_guard lock(mutex_);
  return huge_bytes_;
}

void Prefault::populate_slabs() {
  std::unique_lock lock(mutex_);
  while (may_continue()) populate_next(lock);
}

bool Prefault::may_continue() const {
  return !stopping_ && !refusal_.has_value() && next_ < end_;
}

void Prefault::populate_next(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t begin = next_;
  const std::uint64_t end = std::min(end_, begin + slab_bytes_);
  begun_.insert(begin);
  next_ = end;
  lock.unlock();
  const std::uint64_t collapsed = populate_slab(begin, end);
  lock.lock();
  huge_bytes_ += collapsed;
  if (!refusal_.has_value()) begun_.erase(begin);
  changed_.notify_all();
}

// Returns the number of bytes that lie in huge pages now.
std::uint64_t Prefault::populate_slab(std::uint64_t begin, std::uint64_t end) {
  const std::uint64_t collapsed = options_.huge_pages ? gather(begin, end) : 0;
  if (options_.everything || options_.filled_once) populate(begin, end - begin, !options_.filled_once);
  return collapsed;
}

// [Note: expensive huge pages] A hypervisor that reclaims free memory of its guest reclaims whole blocks. A
// huge page of such memory cost 1.9 CPU seconds a GB, a small page 0.6. A frame that is read into again and
// again is worth that: transfers into it are twice as fast. A frame that is filled once is not.
std::uint64_t Prefault::gather(std::uint64_t begin, std::uint64_t end) {
  if (!options_.filled_once) return collapse(begin, end);
  if (huge_pages_are_expensive_) return 0;
  const std::int64_t before_ns = thread_cpu_ns();
  const std::uint64_t collapsed = collapse(begin, end);
  const auto spent_ns = static_cast<double>(thread_cpu_ns() - before_ns);
  if (spent_ns > kExpensiveNsPerByte * static_cast<double>(end - begin)) huge_pages_are_expensive_ = true;
  return collapsed;
}

// [Note: huge pages by collapse] A transfer is split where its memory is not contiguous: a drive accepts a
// limited number of segments at a time, and handles each. Into pages of 4 KiB the drive of this measurement
// reads 1.2 GB/s, into pages of 2 MiB 3.6, for a sixth of the CPU time. Most systems switch huge pages of
// shared memory off (shmem_enabled), and this way needs no permission: touch one page at the head of each 2
// MiB, then collapse the memory around it, which also clears it ten times faster. Where that is refused
// (before Linux 6.1, or with no contiguous memory left) pages stay small. Only whole 2 MiB within the arena:
// it uses no more memory than its size.
std::uint64_t Prefault::collapse(std::uint64_t begin, std::uint64_t end) {
  std::byte* address = address_ + begin;
  const std::uint64_t whole = align_down(end - begin, kHugePageBytes);
  for (std::uint64_t at = 0; at < whole; at += kHugePageBytes) {
    if (!populate(begin + at, kPageBytes, true)) return 0;
  }
  if (whole == 0 || ::madvise(address, whole, MADV_COLLAPSE) == 0) return whole;
  if (errno == EINVAL) return 0;  // the kernel does not implement it
  std::uint64_t collapsed = 0;
  for (std::uint64_t at = 0; at < whole; at += kHugePageBytes) {
    if (::madvise(address + at, kHugePageBytes, MADV_COLLAPSE) != 0) break;
    collapsed += kHugePageBytes;
  }
  return collapsed;
}

// [Note: prefault without the map lock] The memory is requested from the memfd, where a refusal is an error
// and not a signal; then its pages are touched, except those that a transfer touches soon and only once.
// madvise(MADV_POPULATE_READ) does both, but holds the lock of the process's address map: mapping a window,
// as each page of the first pass does, waited until all was populated, and delayed populating in turn.
bool Prefault::populate(std::uint64_t begin, std::uint64_t nbytes, bool touch) {
  for (std::uint64_t at = begin; at < begin + nbytes; at += kStepBytes) {
    const std::uint64_t step = std::min(begin + nbytes - at, kStepBytes);
    if (!allocate(at, step)) return false;
    for (std::uint64_t page = at; touch && page < at + step; page += kPageBytes) {
      static_cast<void>(*static_cast<const volatile std::byte*>(address_ + page));
    }
  }
  return true;
}

bool Prefault::allocate(std::uint64_t begin, std::uint64_t nbytes) {
  int result = 0;
  do {
    result = ::fallocate(memfd_, 0, static_cast<off_t>(begin), static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  const int code = errno;
  const std::lock_guard lock(mutex_);
  if (!refusal_.has_value()) {
    refusal_ = IoError("populate memory", "memfd:swapper-arena", begin, nbytes, code,
                       "the system provides less memory than the budget: lower the budget (host_memory=), or "
                       "free memory");
  }
  return false;
}

}  // namespace swapper
