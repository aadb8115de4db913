// A backend is one way to do I/O: it takes transfers, each small enough for one kernel call, and returns
// results. The scheduler does everything else (cutting, order, fairness, errors, tickets), the same for all
// backends. A backend is made, used and destroyed on the engine's I/O thread; only `wake` may be called from
// elsewhere. To add one, write backend_<name>.cpp with its `make_<name>_backend` and name it in the list
// below. Owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>

#include "io/progress.h"
#include "memory/arena.h"

namespace swapper {

// All backends, in the order in which "auto" tries them.
#define SWAPPER_BACKENDS(X) \
  X(uring)                  \
  X(aio)                    \
  X(threads)

enum class Command : std::uint8_t {
  read,
  write,
  flush,  // write the page cache's dirty bytes in the range to the drive; the result is 0 or a negative errno
};

struct Transfer {
  Command command;
  int fd;
  std::uint64_t offset;
  std::byte* address;
  std::uint32_t nbytes;
  std::uint32_t slot;       // returned with the result
  std::uint32_t alignment;  // of the offset: a sector, or 1
  bool is_copy = false;     // see File::is_copied
  bool in_memory = false;   // the file has no drive behind it
};

// Implements Command::flush for every backend without an asynchronous one. Returns 0 or a negative errno.
[[nodiscard]] std::int64_t flush_range(const Transfer& transfer);

struct Completion {
  std::uint32_t slot;
  std::int64_t result;  // bytes transferred, or a negative errno
};

class Backend {
 public:
  virtual ~Backend() = default;

  // Describes the backend on this machine, for people: flags, and what was refused.
  virtual std::string describe() const = 0;

  // Takes a transfer; it may begin now or at the next reap(). At most `depth` are open at any time.
  virtual void submit(const Transfer& transfer) = 0;

  // Begins what was submitted, stores results and returns their number. With `wait` it sleeps until there is
  // a result or a wake(), and may then return none.
  [[nodiscard]] virtual std::size_t reap(std::span<Completion> results, bool wait) = 0;

  // Announces that many transfers will use this memory, which outlives the backend's last reap(). Called at
  // most once.
  virtual void expect_memory(std::byte*, std::uint64_t) {}

  // Ends a sleep in reap(), the current one or the next. From any thread.
  virtual void wake() noexcept = 0;
};

struct BackendOptions {
  std::uint32_t depth = 32;
  std::shared_ptr<Arena> arena;  // may be empty; memory worth registering with the kernel
};

// Thrown by a backend's maker if this machine does not support it, with the reason.
struct BackendUnavailable : std::runtime_error {
  using std::runtime_error::runtime_error;
};

#define SWAPPER_DECLARE(name) \
  [[nodiscard]] std::unique_ptr<Backend> make_##name##_backend(const BackendOptions& options);
SWAPPER_BACKENDS(SWAPPER_DECLARE)
#undef SWAPPER_DECLARE

struct ChosenBackend {
  std::unique_ptr<Backend> backend;
  std::string name;
  std::string reason;
};

// Options of the chaos backend (backend_chaos.h): its seed, the rates of its faults, from 0 to 1, and its
// gate.
struct ChaosOptions {
  std::uint64_t seed = 0;
  double brief = 0.1;  // short transfers
  double interrupt = 0.1;
  double again = 0.1;
  double delay = 0.1;
  double reorder = 0.1;
  double eio = 0;
  double enospc = 0;
  int until = -1;  // a descriptor: no result arrives while it is not readable
};

// Makes the backend called `name`, or for "auto" the first that works. With "chaos", "chaos:<name>" or
// `chaos`, wraps it in the chaos backend. Throws ConfigError with the reason.
[[nodiscard]] ChosenBackend choose_backend(const std::string& name, const BackendOptions& options,
                                           const std::optional<ChaosOptions>& chaos = std::nullopt);

}  // namespace swapper
