// Keeps the table of ranges and handles faults with it. Ranges do not overlap. An absent range is faulted in
// by chunks; each chunk is filled elsewhere and moved into place. Owns nothing beyond fault.h.
#include "memory/fault.h"

#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/process.h"
#include "memory/signal_slot.h"

namespace swapper {
namespace {

constexpr std::uint64_t kChunkBytes = 256 << 10;
constexpr std::size_t kMaxChunks = 1024;  // see "The memory of such answers" in fault.h

// A part of an absent range.
struct Chunk {
  std::uint64_t change = 0;  // number of the change that faulted it in or made it writable; 0: it is absent
  bool written = false;
};

struct Range {
  std::uint64_t nbytes = 0;
  bool watched = false;                         // mapped read-only: the first write is to be noted
  std::shared_ptr<std::atomic<Outcome>> until;  // of a watched range: writes wait for it
  std::vector<Chunk> chunks;                    // of an absent range; empty if the range is mapped
  Backing backing;                              // of an absent range
  Departing departing;
  std::byte* written_at = nullptr;  // address of the first write
  std::uint64_t change = 0;         // number of the last change

  bool is_absent() const { return !chunks.empty(); }
};

using Ranges = std::map<std::byte*, Range>;

Ranges g_ranges;  // by first address; never destroyed: threads may fault until the process ends
std::atomic_flag g_lock = ATOMIC_FLAG_INIT;
std::uint64_t g_changes = 0;  // numbers the changes of ranges and chunks
std::atomic<std::uint64_t> g_writes{0};
std::array<std::byte*, kMaxChunks> g_faulted_in{};  // a ring of chunks that were faulted in
std::size_t g_oldest = 0;                           // of these
pid_t g_owner = 0;                                  // a forked child does not have this memory

class SpinLock {
 public:
  SpinLock() {
    while (g_lock.test_and_set(std::memory_order_acquire)) ::sched_yield();
  }
  ~SpinLock() { g_lock.clear(std::memory_order_release); }
  SpinLock(const SpinLock&) = delete;
  SpinLock& operator=(const SpinLock&) = delete;
};

bool read_all(int fd, std::byte* into, std::uint64_t nbytes, std::uint64_t offset) {
  while (nbytes > 0) {
    const ssize_t got = ::pread(fd, into, nbytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got == 0) return nbytes < kPageBytes;  // the file ends within its last page: zeros, as with mmap
    if (got < 0) return false;
    into += got;
    offset += static_cast<std::uint64_t>(got);
    nbytes -= static_cast<std::uint64_t>(got);
  }
  return true;
}

// See [Note: bytes on their way out].
bool read_bytes(const Range& range, std::uint64_t from, std::byte* into, std::uint64_t nbytes) {
  const Departing& leaving = range.departing;
  if (leaving.write && leaving.write->load(std::memory_order_acquire) != Outcome::succeeded) {
    if (!read_all(leaving.fd, into, nbytes, leaving.offset + from)) return false;
    // Changes nothing, but orders the read of the bytes before the read of the outcome.
    Outcome outcome = Outcome::pending;
    leaving.write->compare_exchange_strong(outcome, Outcome::pending, std::memory_order_acq_rel);
    if (outcome != Outcome::succeeded) return true;
  }
  return read_all(range.backing.fd, into, nbytes, range.backing.offset + from);
}

// Replaces what is mapped at `place` by addresses without memory. Gives 0 or an errno.
int reserve(std::byte* place, std::uint64_t nbytes) {
  void* reserved =
      ::mmap(place, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return reserved == MAP_FAILED ? errno : 0;
}

std::byte* take_memory(std::uint64_t nbytes) {
  void* made = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return made == MAP_FAILED ? nullptr : static_cast<std::byte*>(made);
}

// Moves memory to `place` as a whole, replacing the mapping there: no thread sees it half-filled.
bool move_memory(std::byte* made, std::uint64_t nbytes, std::byte* place) {
  if (::mremap(made, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, place) == MAP_FAILED) return false;
  ::madvise(place, nbytes, MADV_DONTFORK);
  return true;
}

// Gives back the memory of the chunk at `place`, if it is there still and nobody has written to it.
void drop_chunk(std::byte* place) {
  auto after = g_ranges.upper_bound(place);
  if (place == nullptr || after == g_ranges.begin()) return;
  auto& [begin, range] = *std::prev(after);
  const auto at = static_cast<std::uint64_t>(place - begin);
  if (at >= range.nbytes || !range.is_absent() || at % kChunkBytes != 0) return;
  Chunk& chunk = range.chunks[at / kChunkBytes];
  if (chunk.change == 0 || chunk.written) return;
  if (reserve(place, std::min(kChunkBytes, range.nbytes - at)) == 0) chunk.change = 0;
}

bool fault_in_chunk(const Range& range, std::uint64_t from, std::byte* place, std::uint64_t nbytes) {
  std::byte* made = take_memory(nbytes);
  if (made == nullptr) return false;
  if (read_bytes(range, from, made, nbytes) && ::mprotect(made, nbytes, PROT_READ) == 0 &&
      move_memory(made, nbytes, place)) {
    return true;
  }
  ::munmap(made, nbytes);
  return false;
}

void note_write(Range& range, std::byte* address) {
  if (range.written_at == nullptr) range.written_at = address;
  g_writes.fetch_add(1, std::memory_order_release);
}

// See [Note: one lock].
thread_local std::uint64_t t_last_change = 0;

bool may_try_again(std::uint64_t change) {
  return std::exchange(t_last_change, change) != change;
}

enum class Answer { kServed, kWait, kRefused, kNotOurs };

Answer serve_absent(std::byte* begin, Range& range, std::uint64_t at) {
  Chunk& chunk = range.chunks[at / kChunkBytes];
  const std::uint64_t from = at / kChunkBytes * kChunkBytes;
  const std::uint64_t nbytes = std::min(kChunkBytes, range.nbytes - from);
  if (chunk.change == 0) {
    if (!fault_in_chunk(range, from, begin + from, nbytes)) return Answer::kRefused;
    drop_chunk(std::exchange(g_faulted_in[g_oldest], begin + from));
    g_oldest = (g_oldest + 1) % kMaxChunks;
  } else if (may_try_again(chunk.change)) {
    return Answer::kServed;
  } else {
    if (chunk.written || ::mprotect(begin + from, nbytes, PROT_READ | PROT_WRITE) != 0)
      return Answer::kRefused;
    chunk.written = true;
    note_write(range, begin + at);
  }
  chunk.change = ++g_changes;
  return Answer::kServed;
}

Answer serve(std::byte* address) {
  if (::getpid() != g_owner) return Answer::kNotOurs;
  const SpinLock lock;
  auto after = g_ranges.upper_bound(address);
  if (after == g_ranges.begin()) return Answer::kNotOurs;
  auto& [begin, range] = *std::prev(after);
  const auto at = static_cast<std::uint64_t>(address - begin);
  if (at >= range.nbytes) return Answer::kNotOurs;
  if (range.is_absent()) return serve_absent(begin, range, at);
  if (may_try_again(range.change)) return Answer::kServed;
  if (!range.watched || range.written_at != nullptr) return Answer::kNotOurs;
  if (range.until && range.until->load(std::memory_order_acquire) == Outcome::pending) return Answer::kWait;
  if (::mprotect(begin, range.nbytes, PROT_READ | PROT_WRITE) != 0) return Answer::kRefused;
  note_write(range, address);
  range.change = ++g_changes;
  return Answer::kServed;
}

void say(const char* text) {
  // Ignored: there is no way to report that this failed.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text, std::strlen(text));
}

void on_fault(int signal, siginfo_t* info, void* context);

// Without it an access to absent memory ends the process, and watched memory stays read-only.
SignalSlot g_slot(SIGSEGV, is_off("sigsegv"), on_fault);

void on_fault(int, siginfo_t* info, void* context) {
  const int saved = errno;
  auto* address = static_cast<std::byte*>(info->si_addr);
  Answer answer = serve(address);
  for (; answer == Answer::kWait; answer = serve(address)) {
    constexpr timespec kPause{.tv_sec = 0, .tv_nsec = 100'000};
    ::nanosleep(&kPause, nullptr);
  }
  switch (answer) {
    case Answer::kServed:
    case Answer::kWait:
      break;
    case Answer::kRefused:
      say("swapper: code past the guard of a parameter used it while its bytes were absent, and they could "
          "not be read. Use parameters inside `with manager.gather(...):`\n");
      g_slot.pass_on(info, context);
      break;
    case Answer::kNotOurs:
      g_slot.pass_on(info, context);
      break;
  }
  errno = saved;
}

// Replaces the entry of `range` in the table if `remap` succeeds (returns 0, not an errno). `remap` gets the
// old entry of the very same range, if any, and `range`. An empty range is only forgotten.
template <typename Remap>
int exchange_range(std::byte* begin, std::uint64_t nbytes, bool is_known, Range range, Remap remap) {
  if (::getpid() != g_owner) {  // a forked process with windows of its own: the parent's do not exist here
    g_owner = ::getpid();
    g_ranges.clear();
  }
  Ranges made;
  made.emplace(begin, std::move(range));
  auto fresh = made.extract(made.begin());
  std::vector<Range> forgotten;  // freed after the lock is released
  const SpinLock lock;
  g_slot.keep_installed();
  const auto same = g_ranges.find(begin);
  Range* before = same != g_ranges.end() && same->second.nbytes == nbytes ? &same->second : nullptr;
  if (const int code = remap(before, fresh.mapped())) return code;
  fresh.mapped().change = ++g_changes;
  for (auto it = g_ranges.lower_bound(begin); it != g_ranges.end() && it->first < begin + nbytes;) {
    forgotten.push_back(std::move(it->second));
    it = g_ranges.erase(it);
  }
  if (is_known) g_ranges.insert(std::move(fresh));
  return 0;
}

int protect_written(std::byte* begin, const Range& range, int protection) {
  for (std::uint64_t at = 0; at < range.nbytes; at += kChunkBytes) {
    const std::uint64_t nbytes = std::min(kChunkBytes, range.nbytes - at);
    if (range.chunks[at / kChunkBytes].written && ::mprotect(begin + at, nbytes, protection) != 0)
      return errno;
  }
  return 0;
}

// Copies what was written while the range was absent into the memory that will be mapped there. Other writers
// wait for the lock.
int merge_written(std::byte* begin, const Range& before, std::byte* memory) {
  if (const int code = protect_written(begin, before, PROT_READ)) return code;
  for (std::uint64_t at = 0; at < before.nbytes; at += kChunkBytes) {
    if (!before.chunks[at / kChunkBytes].written) continue;
    std::memcpy(memory + at, begin + at, std::min(kChunkBytes, before.nbytes - at));
  }
  return 0;
}

// Keeps what was written into mapped memory as private memory. Other writers wait for the lock.
int keep_written(std::byte* begin, const Range& before, Range& range) {
  std::byte* kept = take_memory(before.nbytes);
  if (kept == nullptr) return errno;
  int code = ::mprotect(begin, before.nbytes, PROT_READ) == 0 ? 0 : errno;
  if (code == 0) {
    std::memcpy(kept, begin, before.nbytes);
    if (!move_memory(kept, before.nbytes, begin)) code = errno;
  }
  if (code != 0) {
    ::munmap(kept, before.nbytes);
    ::mprotect(begin, before.nbytes, PROT_READ | PROT_WRITE);
    return code;
  }
  for (Chunk& chunk : range.chunks) chunk = {.change = ++g_changes, .written = true};
  range.written_at = before.written_at;
  return 0;
}

// Keeps what was written while the range was absent, and drops the rest.
int keep_chunks(std::byte* begin, Range& before, Range& range) {
  for (std::uint64_t at = 0; at < before.nbytes; at += kChunkBytes) {
    Chunk& chunk = before.chunks[at / kChunkBytes];
    if (chunk.written) {
      range.chunks[at / kChunkBytes] = chunk;
    } else if (chunk.change != 0) {
      if (const int code = reserve(begin + at, std::min(kChunkBytes, before.nbytes - at))) return code;
      chunk.change = 0;
    }
  }
  range.written_at = before.written_at;
  return 0;
}

// Copies what an access to an absent range would find. Gives 0 or an errno.
int copy_absent(std::byte* begin, const Range& range, std::byte* into) {
  for (std::uint64_t at = 0; at < range.nbytes; at += kChunkBytes) {
    const std::uint64_t nbytes = std::min(kChunkBytes, range.nbytes - at);
    errno = 0;
    if (range.chunks[at / kChunkBytes].change != 0) {
      std::memcpy(into + at, begin + at, nbytes);
    } else if (!read_bytes(range, at, into + at, nbytes)) {
      return errno != 0 ? errno : EIO;
    }
  }
  return 0;
}

}  // namespace

int show_range(std::byte* begin, std::uint64_t nbytes, const Shown& memory, bool& merged) {
  Range range;
  range.nbytes = nbytes;
  range.watched = memory.watched;
  merged = false;
  return exchange_range(begin, nbytes, true, std::move(range), [&](const Range* before, Range& now) {
    const bool has_more = before != nullptr && before->is_absent() && before->written_at != nullptr;
    if (has_more) {
      if (const int code = merge_written(begin, *before, memory.address)) return code;
    }
    const int protection = memory.watched && !has_more ? PROT_READ : PROT_READ | PROT_WRITE;
    if (::mmap(begin, nbytes, protection, MAP_SHARED | MAP_FIXED, memory.fd,
               static_cast<off_t>(memory.offset)) == MAP_FAILED) {
      const int code = errno;
      if (has_more) protect_written(begin, *before, PROT_READ | PROT_WRITE);
      return code;
    }
    if (has_more) {
      merged = now.watched = true;
      now.written_at = before->written_at;
    }
    return 0;
  });
}

int watch_range(std::byte* begin, std::uint64_t nbytes, std::shared_ptr<std::atomic<Outcome>> until) {
  Range range;
  range.nbytes = nbytes;
  range.watched = true;
  range.until = std::move(until);
  return exchange_range(begin, nbytes, true, std::move(range), [&](const Range*, Range&) {
    return ::mprotect(begin, nbytes, PROT_READ) == 0 ? 0 : errno;
  });
}

int unwatch_range(std::byte* begin, std::uint64_t nbytes) {
  Range range;
  range.nbytes = nbytes;
  return exchange_range(begin, nbytes, true, std::move(range), [&](const Range*, Range&) {
    return ::mprotect(begin, nbytes, PROT_READ | PROT_WRITE) == 0 ? 0 : errno;
  });
}

int hide_range(std::byte* begin, std::uint64_t nbytes, Backing backing, Departing departing) {
  Range range;
  range.nbytes = nbytes;
  const bool is_backed = backing.owner != nullptr;
  if (is_backed) range.chunks.resize((nbytes + kChunkBytes - 1) / kChunkBytes);
  range.backing = std::move(backing);
  range.departing = std::move(departing);
  return exchange_range(begin, nbytes, is_backed, std::move(range), [&](Range* before, Range& now) {
    if (is_backed && before != nullptr && before->watched && before->written_at != nullptr) {
      return keep_written(begin, *before, now);
    }
    if (is_backed && before != nullptr && before->is_absent() && before->written_at != nullptr) {
      return keep_chunks(begin, *before, now);
    }
    return reserve(begin, nbytes);
  });
}

int fill_range(std::byte* begin, std::uint64_t nbytes) {
  return exchange_range(begin, nbytes, false, {}, [&](const Range* before, Range&) {
    if (before == nullptr || !before->is_absent()) return ENODATA;
    std::byte* made = take_memory(nbytes);
    if (made == nullptr) return errno;
    int code = copy_absent(begin, *before, made);
    if (code == 0 && ::mremap(made, nbytes, nbytes, MREMAP_MAYMOVE | MREMAP_FIXED, begin) == MAP_FAILED)
      code = errno;
    if (code != 0) ::munmap(made, nbytes);
    return code;
  });
}

void forget_range(std::byte* begin, std::uint64_t nbytes) {
  exchange_range(begin, nbytes, false, {}, [](const Range*, Range&) { return 0; });
}

std::byte* written_at(std::byte* begin) {
  const SpinLock lock;
  const auto found = g_ranges.find(begin);
  return found == g_ranges.end() ? nullptr : found->second.written_at;
}

std::uint64_t writes_noted() {
  return g_writes.load(std::memory_order_acquire);
}

}  // namespace swapper
