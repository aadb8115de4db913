// Uses libaio's system calls, without libaio, on machines that forbid io_uring but allow O_DIRECT. Only
// direct transfers are asynchronous; the kernel does buffered ones, and flushes, during submission. Every
// result signals an eventfd, which `wake` signals too, so that one poll waits for both. Owns the context and
// the eventfd.
#include <linux/aio_abi.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "io/backend.h"

namespace swapper {
namespace {

class AioBackend final : public Backend {
 public:
  explicit AioBackend(const BackendOptions& options) : blocks_(options.depth), events_(options.depth) {
    bell_ = UniqueFd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (!bell_) throw BackendUnavailable("eventfd: " + errno_text(errno));
    if (::syscall(SYS_io_setup, options.depth, &context_) != 0) {
      throw BackendUnavailable("io_setup: " + errno_text(errno) +
                               (errno == EAGAIN ? " (sysctl fs.aio-max-nr)" : ""));
    }
  }

  ~AioBackend() override { ::syscall(SYS_io_destroy, context_); }

  std::string describe() const override { return "Linux asynchronous I/O"; }

  void submit(const Transfer& transfer) override {
    if (transfer.command == Command::flush) {
      ready_.push_back({.slot = transfer.slot, .result = flush_range(transfer)});
      return;
    }
    iocb& block = blocks_[transfer.slot];
    block = iocb{};
    block.aio_data = transfer.slot;
    block.aio_lio_opcode = transfer.command == Command::read ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
    block.aio_fildes = static_cast<std::uint32_t>(transfer.fd);
    block.aio_buf = reinterpret_cast<std::uint64_t>(transfer.address);
    block.aio_nbytes = transfer.nbytes;
    block.aio_offset = static_cast<std::int64_t>(transfer.offset);
    block.aio_flags = IOCB_FLAG_RESFD;
    block.aio_resfd = static_cast<std::uint32_t>(bell_.get());
    unsubmitted_.push_back(&block);
  }

  std::size_t reap(std::span<Completion> results, bool wait) override {
    begin();
    std::size_t count = take(results);
    if (wait && count == 0) {
      sleep();
      count = take(results);
    }
    return count;
  }

  void wake() noexcept override {
    const std::uint64_t one = 1;
    const ssize_t written = ::write(bell_.get(), &one, sizeof one);
    static_cast<void>(written);  // fails only if it is signaled already
  }

 private:
  // The kernel takes requests up to one that it refuses, and reports that refusal at the next call.
  void begin() {
    auto first = unsubmitted_.begin();
    while (first != unsubmitted_.end()) {
      const long taken = ::syscall(SYS_io_submit, context_, unsubmitted_.end() - first, &*first);
      if (taken > 0) {
        first += taken;
      } else {
        const int code = taken < 0 ? errno : EAGAIN;
        ready_.push_back({.slot = static_cast<std::uint32_t>((*first)->aio_data), .result = -code});
        ++first;
      }
    }
    unsubmitted_.clear();
  }

  // Sleeps until a result or a wake(), unless a result is here already.
  void sleep() {
    if (!ready_.empty()) return;
    pollfd bell{.fd = bell_.get(), .events = POLLIN, .revents = 0};
    if (::poll(&bell, 1, -1) <= 0) return;
    std::uint64_t rings = 0;
    const ssize_t taken = ::read(bell_.get(), &rings, sizeof rings);
    static_cast<void>(taken);
  }

  std::size_t take(std::span<Completion> results) {
    std::size_t count = std::min(ready_.size(), results.size());
    std::copy_n(ready_.begin(), count, results.begin());
    ready_.erase(ready_.begin(), ready_.begin() + static_cast<std::ptrdiff_t>(count));
    const std::size_t room = std::min(results.size() - count, events_.size());
    if (room == 0) return count;
    timespec now{};
    const long got = ::syscall(SYS_io_getevents, context_, 0l, room, events_.data(), &now);
    for (long n = 0; n < got; ++n) {
      const io_event& event = events_[static_cast<std::size_t>(n)];
      results[count++] = {.slot = static_cast<std::uint32_t>(event.data), .result = event.res};
    }
    return count;
  }

  UniqueFd bell_;
  aio_context_t context_ = 0;
  std::vector<iocb> blocks_;  // by slot
  std::vector<io_event> events_;
  std::vector<iocb*> unsubmitted_;
  std::vector<Completion> ready_;  // results of transfers that never entered the kernel's queue
};

}  // namespace

std::unique_ptr<Backend> make_aio_backend(const BackendOptions& options) {
  return std::make_unique<AioBackend>(options);
}

}  // namespace swapper
