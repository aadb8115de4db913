// The backend that works everywhere: a few threads, each doing one blocking pread or pwrite at a time, or
// filling pages of a file in memory ([Note: filling]). The fallback where io_uring is forbidden (containers'
// seccomp filters) or missing, and the backend for files in memory. Owns its threads.
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/process.h"
#include "io/backend.h"
#include "io/filler.h"

namespace swapper {
namespace {

constexpr std::uint32_t kMaxThreads = 8;

class ThreadsBackend final : public Backend {
 public:
  explicit ThreadsBackend(const BackendOptions& options) {
    const std::uint32_t count = std::min(options.depth, kMaxThreads);
    try {
      for (std::uint32_t n = 0; n < count; ++n) start_one();
    } catch (const std::system_error& error) {
      if (threads_.empty())
        throw BackendUnavailable(std::string("no thread can be started: ") + error.what());
    }
  }

  ~ThreadsBackend() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  std::string describe() const override {
    const bool fills = Filler().is_permitted();
    return std::to_string(threads_.size()) + " threads of pread and pwrite" +
           (fills ? "; new files in memory are filled"
                  : "; userfaultfd is refused, so files in memory are written");
  }

  void submit(const Transfer& transfer) override {
    {
      std::lock_guard lock(mutex_);
      waiting_.push_back(transfer);
    }
    work_.notify_one();
  }

  std::size_t reap(std::span<Completion> results, bool wait) override {
    std::unique_lock lock(mutex_);
    if (wait) news_.wait(lock, [&] { return woken_ || !completed_.empty(); });
    woken_ = false;
    const std::size_t count = std::min(results.size(), completed_.size());
    std::copy_n(completed_.begin(), count, results.begin());
    completed_.erase(completed_.begin(), completed_.begin() + static_cast<std::ptrdiff_t>(count));
    return count;
  }

  void wake() noexcept override {
    std::lock_guard lock(mutex_);
    woken_ = true;
    news_.notify_one();
  }

 private:
  void start_one() {
    const SignalsBlocked blocked;
    threads_.emplace_back([this] { work(); });
    // Here, not in the thread: until that runs it would have the name of the engine's thread.
    pthread_setname_np(threads_.back().native_handle(), "swapper-rw");
  }

  void work() {
    Filler filler;
    std::unique_lock lock(mutex_);
    for (;;) {
      work_.wait(lock, [&] { return stopping_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const Transfer transfer = waiting_.front();
      waiting_.pop_front();
      lock.unlock();
      const Completion completion{.slot = transfer.slot, .result = perform(transfer, filler)};
      lock.lock();
      completed_.push_back(completion);
      news_.notify_one();
    }
  }

  std::int64_t perform(const Transfer& transfer, Filler& filler) {
    if (transfer.command == Command::flush) return flush_range(transfer);
    if (transfer.command == Command::read || !transfer.in_memory) return read_or_write(transfer);
    if (is_writing_.exchange(true)) {
      const std::uint64_t filled =
          filler.fill(transfer.fd, transfer.offset, transfer.address, transfer.nbytes);
      return filled > 0 ? static_cast<std::int64_t>(filled) : read_or_write(transfer);
    }
    const std::int64_t result = read_or_write(transfer);
    is_writing_ = false;
    return result;
  }

  static std::int64_t read_or_write(const Transfer& transfer) {
    const auto offset = static_cast<off_t>(transfer.offset);
    const ssize_t count = transfer.command == Command::read
                              ? ::pread(transfer.fd, transfer.address, transfer.nbytes, offset)
                              : ::pwrite(transfer.fd, transfer.address, transfer.nbytes, offset);
    return count >= 0 ? count : -errno;
  }

  std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable news_;
  std::deque<Transfer> waiting_;
  std::vector<Completion> completed_;
  std::atomic<bool> is_writing_ = false;  // a thread is writing into a file in memory. See [Note: filling]
  bool woken_ = false;
  bool stopping_ = false;
  std::vector<std::thread> threads_;  // last: the threads use the members above
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(const BackendOptions& options) {
  return std::make_unique<ThreadsBackend>(options);
}

}  // namespace swapper
