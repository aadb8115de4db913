// The table of backed ranges and the handler that answers from it. Ranges do not overlap; each is brought in
// by chunks, a chunk being made elsewhere and moved into place, so that no other thread sees it half-filled.
#include "memory/fault.h"

#include <signal.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "base/align.h"

namespace swapper {
namespace {

constexpr std::uint64_t kChunkBytes = 256 << 10;

struct Range {
  std::uint64_t nbytes;
  Backing backing;
  std::vector<std::uint64_t> arrivals;  // by chunk: which of all arrivals brought it in; 0 while it is absent
  bool watched = false;                 // mapped read-only: a write is to be noted
  std::byte* written_at = nullptr;      // the first one
};

std::map<std::byte*, Range> g_ranges;  // by begin; never destroyed: threads may fault until the process ends
std::atomic_flag g_lock = ATOMIC_FLAG_INIT;
std::uint64_t g_arrivals = 0;  // so many chunks were brought in
pid_t g_owner = 0;             // a forked child has not this memory
struct sigaction g_previous;

class SpinLock {
 public:
  SpinLock() {
    while (g_lock.test_and_set(std::memory_order_acquire)) {
    }
  }
  ~SpinLock() { g_lock.clear(std::memory_order_release); }
  SpinLock(const SpinLock&) = delete;
  SpinLock& operator=(const SpinLock&) = delete;
};

bool read_all(int fd, std::byte* into, std::uint64_t nbytes, std::uint64_t offset) {
  while (nbytes > 0) {
    const ssize_t got = ::pread(fd, into, nbytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) return nbytes < kPageBytes;  // the file ends within its last page: zeros, as mmap has it
    if (got < 0) return false;
    into += got;
    offset += static_cast<std::uint64_t>(got);
    nbytes -= static_cast<std::uint64_t>(got);
  }
  return true;
}

// Puts the bytes of one chunk at `place`. The memory is moved there whole, replacing the reservation.
bool bring_chunk(std::byte* place, std::uint64_t nbytes, int fd, std::uint64_t offset) {
  void* made = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (made == MAP_FAILED) return false;
  if (!read_all(fd, static_cast<std::byte*>(made), nbytes, offset) ||
      ::mprotect(made, nbytes, PROT_READ) != 0 ||
      ::mremap(made, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED) {
    ::munmap(made, nbytes);
    return false;
  }
  ::madvise(place, nbytes, MADV_DONTFORK);
  return true;
}

// Two threads may fault on one chunk: the second finds it present though its own access was a read, which
// cannot be told from a write everywhere. Its instruction is run again then, but once for each arrival: what
// faults on the same arrival a second time is a write.
thread_local std::uint64_t t_last_arrival = 0;

enum class Answer { kServed, kRefused, kNotOurs };

Answer serve(std::byte* address) {
  if (::getpid() != g_owner) return Answer::kNotOurs;
  const SpinLock lock;
  auto after = g_ranges.upper_bound(address);
  if (after == g_ranges.begin()) return Answer::kNotOurs;
  auto& [begin, range] = *std::prev(after);
  const auto at = static_cast<std::uint64_t>(address - begin);
  if (at >= range.nbytes) return Answer::kNotOurs;
  if (range.watched) {
    if (range.written_at == nullptr) {
      if (::mprotect(begin, range.nbytes, PROT_READ | PROT_WRITE) != 0) return Answer::kRefused;
      range.written_at = address;
    }
    return Answer::kServed;  // or another thread was faster
  }
  const std::uint64_t chunk = at / kChunkBytes;
  const std::uint64_t from = chunk * kChunkBytes;
  std::uint64_t& arrival = range.arrivals[chunk];
  if (arrival != 0) {
    return std::exchange(t_last_arrival, arrival) == arrival ? Answer::kRefused : Answer::kServed;
  }
  const std::uint64_t nbytes = std::min(kChunkBytes, range.nbytes - from);
  if (!bring_chunk(begin + from, nbytes, range.backing.fd, range.backing.offset + from))
    return Answer::kRefused;
  arrival = ++g_arrivals;
  return Answer::kServed;
}

void say(const char* text) {
  // Nothing can be done where even this fails.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

void pass_on(int signal, siginfo_t* info, void* context) {
  if ((g_previous.sa_flags & SA_SIGINFO) != 0 && g_previous.sa_sigaction != nullptr) {
    g_previous.sa_sigaction(signal, info, context);
  } else if (g_previous.sa_handler != SIG_DFL && g_previous.sa_handler != SIG_IGN) {
    g_previous.sa_handler(signal);
  } else {
    ::sigaction(signal, &g_previous, nullptr);  // the instruction is run again, and ends the process
  }
}

void on_fault(int signal, siginfo_t* info, void* context) {
  const int saved = errno;
  auto* address = static_cast<std::byte*>(info->si_addr);
  switch (serve(address)) {
    case Answer::kServed:
      break;
    case Answer::kRefused:
      say("swapper: a parameter that is away was changed by code that goes past its guard, or could not be "
          "read. "
          "Change parameters inside `with manager.gather(..., write=True):`\n");
      pass_on(signal, info, context);
      break;
    case Answer::kNotOurs:
      pass_on(signal, info, context);
      break;
  }
  errno = saved;
}

void install() {
  struct sigaction action{};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  ::sigaction(SIGSEGV, &action, &g_previous);
  g_owner = ::getpid();
}

}  // namespace

namespace {

// Puts `range` into the table in place of what was there; none if it has neither backing nor watch.
void replace_ranges(std::byte* begin, Range range) {
  static const bool installed = (install(), true);
  (void)installed;
  if (::getpid() != g_owner) {  // a forked process that makes windows of its own: the parent's are not there
    g_owner = ::getpid();
    g_ranges.clear();
  }
  const std::uint64_t nbytes = range.nbytes;
  std::vector<Range> forgotten;  // freed when the lock is no more held
  std::map<std::byte*, Range>::node_type fresh;
  if (range.backing.owner || range.watched) {
    std::map<std::byte*, Range> made;
    made.emplace(begin, std::move(range));
    fresh = made.extract(made.begin());
  }
  const SpinLock lock;
  for (auto it = g_ranges.lower_bound(begin); it != g_ranges.end() && it->first < begin + nbytes;) {
    forgotten.push_back(std::move(it->second));
    it = g_ranges.erase(it);
  }
  if (fresh) g_ranges.insert(std::move(fresh));
}

}  // namespace

void back_range(std::byte* begin, std::uint64_t nbytes, Backing backing) {
  std::vector<std::uint64_t> arrivals((nbytes + kChunkBytes - 1) / kChunkBytes);
  replace_ranges(begin, Range{nbytes, std::move(backing), std::move(arrivals)});
}

void watch_range(std::byte* begin, std::uint64_t nbytes) {
  Range range{nbytes, {}, {}};
  range.watched = true;
  replace_ranges(begin, std::move(range));
}

std::byte* written_at(std::byte* begin) {
  const SpinLock lock;
  const auto found = g_ranges.find(begin);
  return found == g_ranges.end() ? nullptr : found->second.written_at;
}

}  // namespace swapper
