// Threads go from slab to slab. What is taken is always told as a first part of the arena, since frames are
// handed out in that order. Owns nothing beyond taking.h.
#include "memory/taking.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/process.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace swapper {
namespace {

constexpr std::uint64_t kSlabBytes = std::uint64_t{16} << 20;
constexpr std::uint64_t kMostThreads = 8;

std::uint64_t threads_for(std::uint64_t nbytes) {
  const std::uint64_t processors = std::max(1u, std::thread::hardware_concurrency());
  return std::min({kMostThreads, processors, align_up(nbytes, kSlabBytes) / kSlabBytes});
}

}  // namespace

Taking::Taking(std::byte* address, std::uint64_t nbytes, TakingOptions options)
    : address_(address), nbytes_(nbytes), options_(options) {}

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

void Taking::take_the_rest(std::function<void()> done) {
  const auto work = [this, done = std::move(done)] {
    try {
      take(nbytes_);
    } catch (const IoError&) {  // whoever waits for it is told
    }
    done();
  };
  try {
    const SignalsBlocked blocked;
    rest_ = std::thread(work);
  } catch (const std::system_error&) {
    work();
  }
}

bool Taking::wait_for(std::uint64_t nbytes, std::chrono::nanoseconds patience) {
  nbytes = std::min(nbytes, nbytes_);
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, patience, [&] { return refusal_.has_value() || first_missing() >= nbytes; });
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

bool Taking::is_old_kernel() const {
  const std::lock_guard lock(mutex_);
  return is_old_kernel_;
}

void Taking::take_slabs() {
  std::unique_lock lock(mutex_);
  while (!stopping_ && !refusal_.has_value() && next_ < end_) {
    const std::uint64_t begin = next_;
    const std::uint64_t end = std::min(end_, begin + kSlabBytes);
    begun_.insert(begin);
    next_ = end;
    lock.unlock();
    const std::uint64_t collapsed = take_slab(begin, end);
    lock.lock();
    huge_bytes_ += collapsed;
    if (!refusal_.has_value()) begun_.erase(begin);
    changed_.notify_all();
  }
}

// Gives the number of bytes that lie in huge pages now.
std::uint64_t Taking::take_slab(std::uint64_t begin, std::uint64_t end) {
  const std::uint64_t collapsed = options_.huge_pages ? collapse(begin, end) : 0;
  if (options_.everything) populate(begin, end - begin);
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
    if (!populate(begin + at, kPageBytes)) return 0;
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

bool Taking::populate(std::uint64_t begin, std::uint64_t nbytes) {
  if (::madvise(address_ + begin, nbytes, MADV_POPULATE_READ) == 0) return true;
  const int code = errno;
  const std::lock_guard lock(mutex_);
  if (code == EINVAL) {
    is_old_kernel_ = true;
  } else if (!refusal_.has_value()) {
    refusal_ =
        IoError("take memory", "memfd:swapper-arena", begin, nbytes, code,
                "the system gives less memory than the budget says: lower the budget (host_memory=), or "
                "free memory");
  }
  return false;
}

}  // namespace swapper
