// Sets up, enters and reads an io_uring. Only the ends of the rings are shared with the kernel: its writes
// are read with acquire, ours are published with release. Owns nothing beyond uring_ring.h.
#include "io/uring_ring.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>

#include "base/check.h"
#include "base/error.h"
#include "io/backend.h"

namespace swapper::uring {
namespace {

using Word = std::atomic_ref<std::uint32_t>;

std::uint32_t& word_at(std::byte* rings, std::uint32_t offset) {
  return *reinterpret_cast<std::uint32_t*>(rings + offset);
}

// Best first: completions run when we ask for them (6.1), at the next system call (5.19), or at once.
constexpr std::uint32_t kFlagChoices[] = {kSetupSingleIssuer | kSetupDeferTaskrun | kSetupSubmitAll,
                                          kSetupCoopTaskrun | kSetupSubmitAll, 0};

std::string refusal(int code) {
  std::string text = "io_uring_setup: " + errno_text(code);
  if (code == EPERM || code == EACCES) text += " (seccomp, or sysctl kernel.io_uring_disabled)";
  if (code == ENOSYS) text += " (the kernel has none)";
  return text;
}

}  // namespace

Ring::Ring(std::uint32_t entries) {
  set_up(entries);
  constexpr std::uint32_t kNeeded = kFeatureSingleMmap | kFeatureNoDrop;
  if ((params_.features & kNeeded) != kNeeded) throw BackendUnavailable("the kernel's io_uring is too old");
  map();
}

void Ring::set_up(std::uint32_t entries) {
  for (const std::uint32_t flags : kFlagChoices) {
    params_ = Params{};
    params_.flags = flags | kSetupClamp;
    const long fd = ::syscall(kSysSetup, entries, &params_);
    if (fd >= 0) {
      fd_ = UniqueFd(static_cast<int>(fd));
      setup_flags_ = flags;
      return;
    }
    if (errno != EINVAL) throw BackendUnavailable(refusal(errno));
  }
  throw BackendUnavailable(refusal(EINVAL));
}

void Ring::map() {
  const auto map_one = [&](std::size_t nbytes, std::uint64_t offset) {
    void* mapped = ::mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_.get(),
                          static_cast<off_t>(offset));
    if (mapped == MAP_FAILED) throw BackendUnavailable("mapping the rings: " + errno_text(errno));
    static_cast<void>(::madvise(mapped, nbytes, MADV_DONTFORK));
    return static_cast<std::byte*>(mapped);
  };
  rings_bytes_ = std::max(params_.sq.array + params_.sq_entries * sizeof(std::uint32_t),
                          params_.cq.entries + params_.cq_entries * sizeof(CompletionEntry));
  submissions_bytes_ = params_.sq_entries * sizeof(Submission);
  rings_ = map_one(rings_bytes_, kOffSqRing);
  try {
    submissions_ = reinterpret_cast<Submission*>(map_one(submissions_bytes_, kOffSqes));
  } catch (...) {
    ::munmap(rings_, rings_bytes_);
    throw;
  }
  // The kernel's index array stays the identity: slot n of the ring is always submission n.
  auto* array = reinterpret_cast<std::uint32_t*>(rings_ + params_.sq.array);
  for (std::uint32_t n = 0; n < params_.sq_entries; ++n) array[n] = n;
}

Ring::~Ring() {
  ::munmap(submissions_, submissions_bytes_);
  ::munmap(rings_, rings_bytes_);
}

bool Ring::supports(std::span<const Opcode> opcodes) const {
  Probe probe{};
  if (::syscall(kSysRegister, fd_.get(), kRegisterProbe, &probe, 256) != 0) return false;
  return std::all_of(opcodes.begin(), opcodes.end(), [&](Opcode opcode) {
    return opcode <= probe.last_opcode && (probe.ops[opcode].flags & 1) != 0;
  });
}

int Ring::register_with(std::uint32_t opcode, const void* argument, std::uint32_t count) {
  return ::syscall(kSysRegister, fd_.get(), opcode, argument, count) >= 0 ? 0 : -errno;
}

void Ring::push(const Submission& submission) {
  const std::uint32_t tail = word_at(rings_, params_.sq.tail);  // written by this thread only
  const std::uint32_t head = Word(word_at(rings_, params_.sq.head)).load(std::memory_order_acquire);
  SWAPPER_CHECK(tail - head < params_.sq_entries, "the submission ring is full");
  submissions_[tail & (params_.sq_entries - 1)] = submission;
  Word(word_at(rings_, params_.sq.tail)).store(tail + 1, std::memory_order_release);
  ++unsubmitted_;
}

void Ring::enter(bool wait) {
  const long taken =
      ::syscall(kSysEnter, fd_.get(), unsubmitted_, wait ? 1u : 0u, kEnterGetEvents, nullptr, 0);
  if (taken >= 0) {
    unsubmitted_ -= static_cast<std::uint32_t>(taken);
    return;
  }
  // No memory for a request now, or completions must be taken first: the caller reaps and enters again.
  if (errno == EINTR || errno == EAGAIN || errno == EBUSY) return;
  throw IoError("io_uring_enter", "", 0, 0, errno);
}

bool Ring::pop(CompletionEntry& entry) {
  const std::uint32_t head = word_at(rings_, params_.cq.head);  // written by this thread only
  if (head == Word(word_at(rings_, params_.cq.tail)).load(std::memory_order_acquire)) return false;
  const auto* entries = reinterpret_cast<const CompletionEntry*>(rings_ + params_.cq.entries);
  entry = entries[head & (params_.cq_entries - 1)];
  Word(word_at(rings_, params_.cq.head)).store(head + 1, std::memory_order_release);
  return true;
}

}  // namespace swapper::uring
