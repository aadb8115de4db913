// Injects faults, each decided at random when a transfer is submitted or its result arrives. A transfer that
// is to fail never reaches the inner backend. A short read leaves junk behind the bytes that it reports, as a
// kernel may. Owns nothing beyond backend_chaos.h.
#include "io/backend_chaos.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/fd.h"

namespace swapper {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::byte kJunk{0xEE};
constexpr std::uint64_t kMaxDelayUs = 2000;
constexpr auto kNap = std::chrono::microseconds(100);

// Duplicates the gate's descriptor, since the number may soon be another file's; empty if there is no gate.
UniqueFd duplicate(int fd) {
  if (fd < 0) return {};
  UniqueFd gate(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
  if (!gate) throw ConfigError("chaos: \"until\" is an open descriptor: " + errno_text(errno));
  return gate;
}

class ChaosBackend final : public Backend {
 public:
  ChaosBackend(std::unique_ptr<Backend> inner, const ChaosOptions& options)
      : inner_(std::move(inner)), options_(options), random_(options.seed), gate_(duplicate(options.until)) {}

  std::string describe() const override {
    return inner_->describe() + ", with faults from seed " + std::to_string(options_.seed);
  }

  void submit(const Transfer& transfer) override {
    if (const int code = failure(transfer.command)) {
      hold({.slot = transfer.slot, .result = -code});
      return;
    }
    if (transfer.slot >= open_.size()) open_.resize(transfer.slot + 1);
    open_[transfer.slot] = transfer;
    inner_->submit(transfer);
  }

  // Holds everything that has arrived, and releases some of it.
  std::size_t reap(std::span<Completion> results, bool wait) override {
    for (;;) {
      take_in(results, wait && held_.empty() && !woken_);
      const std::size_t count = release_due(results);
      if (count > 0 || !wait || woken_.exchange(false)) return count;
      if (!held_.empty()) std::this_thread::sleep_for(kNap);
    }
  }

  void expect_memory(std::byte* address, std::uint64_t nbytes) override {
    inner_->expect_memory(address, nbytes);
  }

  void wake() noexcept override {
    woken_ = true;
    inner_->wake();
  }

 private:
  struct Held {
    Completion completion;
    Clock::time_point until;
  };

  bool strikes(double rate) { return rate > 0 && std::uniform_real_distribution<>(0, 1)(random_) < rate; }
  std::uint64_t below(std::uint64_t limit) {
    return std::uniform_int_distribution<std::uint64_t>(0, limit - 1)(random_);
  }

  int failure(Command command) {
    if (strikes(options_.interrupt)) return EINTR;
    if (strikes(options_.again)) return EAGAIN;
    if (strikes(options_.eio)) return EIO;
    if (command == Command::write && strikes(options_.enospc)) return ENOSPC;
    return 0;
  }

  void take_in(std::span<Completion> buffer, bool wait) {
    const std::size_t count = inner_->reap(buffer, wait);
    for (const Completion& completion : buffer.first(count)) {
      hold({.slot = completion.slot, .result = shortened(open_[completion.slot], completion.result)});
    }
  }

  // At least one sector is left: a direct transfer that moves less has reached the end of the file.
  std::int64_t shortened(const Transfer& transfer, std::int64_t result) {
    const auto units = static_cast<std::uint64_t>(std::max<std::int64_t>(result, 0)) / transfer.alignment;
    if (transfer.command == Command::flush || units < 2 || !strikes(options_.brief)) return result;
    const auto nbytes = (1 + below(units - 1)) * transfer.alignment;
    if (transfer.command == Command::read) {
      std::memset(transfer.address + nbytes, static_cast<int>(kJunk),
                  static_cast<std::uint64_t>(result) - nbytes);
    }
    return static_cast<std::int64_t>(nbytes);
  }

  void hold(const Completion& completion) {
    auto until = Clock::now();
    if (strikes(options_.delay)) until += std::chrono::microseconds(below(kMaxDelayUs));
    const bool jumps = strikes(options_.reorder) && !held_.empty();
    held_.insert(jumps ? held_.begin() : held_.end(), {.completion = completion, .until = until});
  }

  // A pipe whose other end is closed counts as open too.
  bool is_gate_open() const {
    pollfd gate{.fd = gate_.get(), .events = POLLIN, .revents = 0};
    return !gate_ || ::poll(&gate, 1, 0) > 0;
  }

  std::size_t release_due(std::span<Completion> results) {
    if (held_.empty() || !is_gate_open()) return 0;
    const auto now = Clock::now();
    std::size_t count = 0;
    std::erase_if(held_, [&](const Held& each) {
      if (count == results.size() || each.until > now) return false;
      results[count++] = each.completion;
      return true;
    });
    return count;
  }

  std::unique_ptr<Backend> inner_;
  const ChaosOptions options_;
  std::mt19937_64 random_;
  const UniqueFd gate_;
  std::vector<Transfer> open_;  // by slot
  std::vector<Held> held_;
  std::atomic<bool> woken_{false};
};

}  // namespace

std::unique_ptr<Backend> make_chaos_backend(std::unique_ptr<Backend> inner, const ChaosOptions& options) {
  return std::make_unique<ChaosBackend>(std::move(inner), options);
}

ChaosOptions parse_chaos(const std::map<std::string, double>& options) {
  ChaosOptions chaos{.brief = 0, .interrupt = 0, .again = 0, .delay = 0, .reorder = 0};
  const std::map<std::string, double*> rates = {{"short", &chaos.brief},     {"interrupt", &chaos.interrupt},
                                                {"again", &chaos.again},     {"delay", &chaos.delay},
                                                {"reorder", &chaos.reorder}, {"eio", &chaos.eio},
                                                {"enospc", &chaos.enospc}};
  for (const auto& [name, value] : options) {
    if (name == "seed") {
      if (!(value >= 0 && value < 0x1p53)) throw ConfigError("chaos: the seed is from 0 to 2**53");
      chaos.seed = static_cast<std::uint64_t>(value);
      continue;
    }
    if (name == "until") {
      if (!(value >= 0 && value <= std::numeric_limits<int>::max() && value == std::floor(value))) {
        throw ConfigError("chaos: \"until\" is the number of an open descriptor");
      }
      chaos.until = static_cast<int>(value);
      continue;
    }
    const auto rate = rates.find(name);
    if (rate == rates.end()) {
      throw ConfigError("chaos: unknown fault \"" + name +
                        "\"; there are seed, until, short, interrupt, again, delay, reorder, eio, enospc");
    }
    if (!(value >= 0 && value <= 1)) throw ConfigError("chaos: the rate of \"" + name + "\" is from 0 to 1");
    *rate->second = value;
  }
  return chaos;
}

}  // namespace swapper
