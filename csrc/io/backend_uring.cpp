// The preferred backend: one io_uring. The arena is registered with the kernel, in slabs, and so are staging
// slots once they exist, so that transfers of their memory skip looking up and pinning pages. Where that is
// refused, or for other memory, plain reads and writes serve. Files are not registered: that would save tens
// of nanoseconds on a transfer of a megabyte, and would keep closed files open until this thread releases
// them. Owns the ring and its wake-up eventfd.
#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "base/error.h"
#include "io/backend.h"
#include "io/uring_ring.h"

namespace swapper {
namespace {

constexpr std::uint64_t kSlabBytes = std::uint64_t{1} << 30;  // the kernel's limit for one registered buffer
// Bytes from which a copy is left to the kernel's threads, so that several run in parallel.
constexpr std::uint32_t kMinSharedBytes = std::uint32_t{64} << 10;
constexpr std::uint64_t kBellData = ~std::uint64_t{0};

class UringBackend final : public Backend {
 public:
  explicit UringBackend(const BackendOptions& options) : arena_(options.arena), ring_(options.depth + 1) {
    constexpr uring::Opcode kNeeded[] = {uring::kReadFixed, uring::kWriteFixed, uring::kPollAdd,
                                         uring::kRead,      uring::kWrite,      uring::kSyncFileRange};
    if (!ring_.supports(kNeeded))
      throw BackendUnavailable("the kernel's io_uring lacks plain reads and writes");
    bell_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!bell_) throw BackendUnavailable("eventfd: " + errno_text(errno));
    try_it();
    register_arena();
    listen();
  }

  ~UringBackend() override {
    // Closing a ring unpins the pages some time later; this unpins them now.
    if (registered_) static_cast<void>(ring_.register_with(uring::kUnregisterBuffers, nullptr, 0));
  }

  std::string describe() const override {
    std::string text = "io_uring";
    if (ring_.setup_flags() & uring::kSetupDeferTaskrun) text += " with deferred task work";
    return text + arena_note_;
  }

  void submit(const Transfer& transfer) override {
    const bool reading = transfer.command == Command::read;
    uring::Submission request{};
    request.opcode = reading ? uring::kRead : uring::kWrite;
    request.fd = transfer.fd;
    request.offset = transfer.offset;
    request.address = reinterpret_cast<std::uint64_t>(transfer.address);
    request.nbytes = transfer.nbytes;
    request.user_data = transfer.slot;
    if (transfer.is_copy && transfer.nbytes >= kMinSharedBytes) request.flags = uring::kAsync;
    if (transfer.command == Command::flush) {
      request.opcode = uring::kSyncFileRange;
      request.address = 0;
      request.op_flags = SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER;
    } else if (const int slab = slab_of(transfer); slab >= 0) {
      request.opcode = reading ? uring::kReadFixed : uring::kWriteFixed;
      request.buffer_index = static_cast<std::uint16_t>(slab);
    }
    ring_.push(request);
  }

  std::size_t reap(std::span<Completion> results, bool wait) override {
    std::size_t count = take(results);
    ring_.enter(wait && count == 0 && !woken_);
    count += take(results.subspan(count));
    woken_ = false;
    return count;
  }

  // Uses the slot that was kept free for it.
  void expect_memory(std::byte* address, std::uint64_t nbytes) override {
    if (!spare_ || nbytes > kSlabBytes) return;
    const iovec vector{.iov_base = address, .iov_len = nbytes};
    uring::BuffersUpdate update{};
    update.first = *spare_;
    update.vectors = reinterpret_cast<std::uint64_t>(&vector);
    update.count = 1;
    if (ring_.register_with(uring::kRegisterBuffersUpdate, &update, sizeof update) >= 0) {
      extra_ = {.address = address, .nbytes = nbytes};
    }
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    const ssize_t written = ::write(bell_.get(), &one, sizeof one);
    static_cast<void>(written);  // fails only if it is signaled already
  }

 private:
  // A seccomp filter may allow setting up a ring and forbid using it.
  void try_it() {
    uring::Submission nop{};
    nop.opcode = uring::kNop;
    uring::CompletionEntry entry{};
    try {
      ring_.push(nop);
      ring_.enter(true);
    } catch (const IoError& error) {
      throw BackendUnavailable("io_uring_enter: " + errno_text(error.code));
    }
    if (!ring_.pop(entry) || entry.result != 0)
      throw BackendUnavailable("io_uring does not complete a no-op");
  }

  void register_arena() {
    std::vector<iovec> slabs;
    // Registering takes memory, so only populated memory is registered; without it huge pages lose little.
    arena_bytes_ = arena_ ? arena_->populated_bytes() : 0;
    for (std::uint64_t begin = 0; begin < arena_bytes_; begin += kSlabBytes) {
      slabs.push_back(
          {.iov_base = arena_->address() + begin, .iov_len = std::min(kSlabBytes, arena_bytes_ - begin)});
    }
    const auto count = static_cast<std::uint32_t>(slabs.size());
    slabs.push_back({.iov_base = nullptr, .iov_len = 0});  // kept free for expect_memory; needs Linux 5.13
    int result = ring_.register_with(uring::kRegisterBuffers, slabs.data(), count + 1);
    if (result == 0) {
      spare_ = count;
    } else if (arena_) {
      result = ring_.register_with(uring::kRegisterBuffers, slabs.data(), count);
    }
    registered_ = result == 0;
    if (!arena_) return;
    arena_note_ = registered_ ? ", arena registered" : ", arena not registered: " + errno_text(-result);
  }

  // Returns the registered slab that holds the whole transfer, or -1.
  int slab_of(const Transfer& transfer) const {
    if (transfer.address >= extra_.address && transfer.address < extra_.address + extra_.nbytes) {
      return static_cast<int>(*spare_);
    }
    if (!registered_ || !arena_ || transfer.address < arena_->address()) return -1;
    const auto begin = static_cast<std::uint64_t>(transfer.address - arena_->address());
    if (begin >= arena_bytes_ || transfer.nbytes > arena_bytes_ - begin) return -1;
    const std::uint64_t slab = begin / kSlabBytes;
    return (begin + transfer.nbytes - 1) / kSlabBytes == slab ? static_cast<int>(slab) : -1;
  }

  void listen() {
    uring::Submission request{};
    request.opcode = uring::kPollAdd;
    request.fd = bell_.get();
    request.op_flags = POLLIN;
    request.user_data = kBellData;
    ring_.push(request);
  }

  std::size_t take(std::span<Completion> results) {
    std::size_t count = 0;
    uring::CompletionEntry entry{};
    while (count < results.size() && ring_.pop(entry)) {
      if (entry.user_data == kBellData) {
        std::uint64_t rings = 0;
        const ssize_t taken = ::read(bell_.get(), &rings, sizeof rings);
        static_cast<void>(taken);
        woken_ = true;
        listen();
      } else {
        results[count++] = {.slot = static_cast<std::uint32_t>(entry.user_data), .result = entry.result};
      }
    }
    return count;
  }

  std::shared_ptr<Arena> arena_;
  UniqueFd bell_;
  uring::Ring ring_;  // after the eventfd, which it polls
  struct {
    std::byte* address = nullptr;
    std::uint64_t nbytes = 0;
  } extra_;
  bool registered_ = false;
  std::uint64_t arena_bytes_ = 0;       // registered bytes of the arena, from its first byte on
  std::optional<std::uint32_t> spare_;  // the free slot among the registered slabs
  bool woken_ = false;
  std::string arena_note_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(const BackendOptions& options) {
  return std::make_unique<UringBackend>(options);
}

}  // namespace swapper
