// Threads go from slab to slab. What is taken is always told as a first part of the arena, since frames are
// handed out in that order. Owns nothing beyond taking.h.
#include "memory/taking.h"

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
constexpr std::uint64_t kLateSlabBytes = std::uint64_t{4} << 20;
constexpr int kLateNice = 19;
constexpr std::uint64_t kMostThreads = 8;
constexpr std::uint64_t kStepBytes = std::uint64_t{1} << 20;
constexpr double kDearNsPerByte = 0.3;  // of processor time, which is CPU seconds a GB

std::int64_t thread_cpu_ns() {
  timespec now{};
  ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

std::uint64_t threads_for(std::uint64_t nbytes) {
  const std::uint64_t processors = std::max(1u, std::thread::hardware_concurrency());
  return std::min({kMostThreads, processors, align_up(nbytes, kSlabBytes) / kSlabBytes});
}

}  // namespace

Taking::Taking(std::byte* address, std::uint64_t nbytes, int memfd, TakingOptions options)
    : address_(address), nbytes_(nbytes), memfd_(memfd), options_(options), slab_bytes_(kSlabBytes) {}

void Taking::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  if (rest_.joinable()) rest_.join();
}

void Taking::take(std::uint64_t nbytes) {
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
    while (others.size() + 1 < count) others.emplace_back([this] { take_slabs(); });
  } catch (const std::system_error&) {  // no more threads to be had: fewer will do
  }
  take_slabs();
  for (std::thread& other : others) other.join();
  wait_for(nbytes, {});
}

// [Note: taking beside computing] What is taken while a first pass computes must not delay that: where huge
// pages are dear, two threads that took 264 MB for frames made a pass of 0.8 s one of 1.3. So it is one
// thread, which runs when nobody else wants its processor. Whoever has to wait for memory does not compute:
// it takes along.
void Taking::take_the_rest() {
  {
    const std::lock_guard lock(mutex_);
    end_ = nbytes_;
    slab_bytes_ = kLateSlabBytes;
  }
  try {
    const SignalsBlocked blocked;
    rest_ = std::thread([this] {
      static_cast<void>(::setpriority(PRIO_PROCESS, 0, kLateNice));  // of this thread
      take_slabs();
    });
  } catch (const std::system_error&) {  // whoever waits takes all of it
  }
}

bool Taking::wait_for(std::uint64_t nbytes, std::chrono::nanoseconds patience) {
  nbytes = std::min(nbytes, nbytes_);
  const auto until = std::chrono::steady_clock::now() + patience;
  std::unique_lock lock(mutex_);
  while (first_missing() < nbytes && may_take() && std::chrono::steady_clock::now() < until) take_one(lock);
  changed_.wait_until(lock, until, [&] { return refusal_.has_value() || first_missing() >= nbytes; });
  if (first_missing() >= nbytes) return true;
  if (refusal_.has_value()) throw IoError(*refusal_);
  return false;
}

std::uint64_t Taking::first_missing() const {
  return begun_.empty() ? next_ : *begun_.begin();
}

std::uint64_t Taking::taken_bytes() const {
  const std::lock_guard lock(mutex_);
  return first_missing();
}

std::uint64_t Taking::huge_bytes() const {
  const std::lock_guard lock(mutex_);
  return huge_bytes_;
}

void Taking::take_slabs() {
  std::unique_lock lock(mutex_);
  while (may_take()) take_one(lock);
}

bool Taking::may_take() const {
  return !stopping_ && !refusal_.has_value() && next_ < end_;
}

void Taking::take_one(std::unique_lock<std::mutex>& lock) {
  const std::uint64_t begin = next_;
  const std::uint64_t end = std::min(end_, begin + slab_bytes_);
  begun_.insert(begin);
  next_ = end;
  lock.unlock();
  const std::uint64_t collapsed = take_slab(begin, end);
  lock.lock();
  huge_bytes_ += collapsed;
  if (!refusal_.has_value()) begun_.erase(begin);
  changed_.notify_all();
}

// Gives the number of bytes that lie in huge pages now.
std::uint64_t Taking::take_slab(std::uint64_t begin, std::uint64_t end) {
  const std::uint64_t collapsed = options_.huge_pages ? gather(begin, end) : 0;
  if (options_.everything || options_.filled_once) populate(begin, end - begin, !options_.filled_once);
  return collapsed;
}

// [Note: dear huge pages] Where a hypervisor takes back memory that its guest has freed, it takes it in whole
// blocks, and a huge page of such memory has cost 1.9 CPU seconds a GB, a small one 0.6. A frame that is read
// into again and again is worth that: transfers into it are twice as fast. One that is filled once is not.
std::uint64_t Taking::gather(std::uint64_t begin, std::uint64_t end) {
  if (!options_.filled_once) return collapse(begin, end);
  if (huge_pages_are_dear_) return 0;
  const std::int64_t before_ns = thread_cpu_ns();
  const std::uint64_t collapsed = collapse(begin, end);
  const auto spent_ns = static_cast<double>(thread_cpu_ns() - before_ns);
  if (spent_ns > kDearNsPerByte * static_cast<double>(end - begin)) huge_pages_are_dear_ = true;
  return collapsed;
}

// [Note: huge pages by collapse] A transfer is cut where its memory is not contiguous: a drive takes so many
// segments at a time, and looks after each of them. Into pages of 4 KiB the drive on which this was measured
// reads 1.2 GB/s, into pages of 2 MiB 3.6, for a sixth of the processor time. Most systems have huge pages of
// shared memory switched off (shmem_enabled), and this is the one way that asks nobody: a page at the head of
// each 2 MiB, and then collapsing the memory around it, which also clears ten times faster. Where it is
// refused (before Linux 6.1, or no contiguous memory is left) pages stay small. Only whole 2 MiB within the
// arena: it takes no more memory than it is large.
std::uint64_t Taking::collapse(std::uint64_t begin, std::uint64_t end) {
  std::byte* address = address_ + begin;
  const std::uint64_t whole = align_down(end - begin, kHugePageBytes);
  for (std::uint64_t at = 0; at < whole; at += kHugePageBytes) {
    if (!populate(begin + at, kPageBytes, true)) return 0;
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

// [Note: taking beside mapping] The memory is asked of the memfd, where a refusal is an error and no signal,
// and its pages are then touched, but for those that a transfer touches soon and only once.
// madvise(MADV_POPULATE_READ) does both, but holds the lock of the process's map of addresses: whoever maps a
// window meanwhile, as each page of the first pass is, waited until all was taken, and taking stood still in
// turn.
bool Taking::populate(std::uint64_t begin, std::uint64_t nbytes, bool touch) {
  for (std::uint64_t at = begin; at < begin + nbytes; at += kStepBytes) {
    const std::uint64_t step = std::min(begin + nbytes - at, kStepBytes);
    if (!allocate(at, step)) return false;
    for (std::uint64_t page = at; touch && page < at + step; page += kPageBytes) {
      static_cast<void>(*static_cast<const volatile std::byte*>(address_ + page));
    }
  }
  return true;
}

bool Taking::allocate(std::uint64_t begin, std::uint64_t nbytes) {
  int result = 0;
  do {
    result = ::fallocate(memfd_, 0, static_cast<off_t>(begin), static_cast<off_t>(nbytes));
  } while (result != 0 && errno == EINTR);
  if (result == 0) return true;
  const int code = errno;
  const std::lock_guard lock(mutex_);
  if (!refusal_.has_value()) {
    refusal_ =
        IoError("take memory", "memfd:swapper-arena", begin, nbytes, code,
                "the system gives less memory than the budget says: lower the budget (host_memory=), or "
                "free memory");
  }
  return false;
}

}  // namespace swapper
