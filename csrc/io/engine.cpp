// Starts, runs and stops the I/O thread. Its loop is Engine::serve; scheduler.cpp makes its decisions. Owns
// nothing beyond engine.h.
#include "io/engine.h"

#include <pthread.h>
#include <sys/mman.h>

#include <exception>
#include <future>
#include <limits>
#include <utility>
#include <vector>

#include "base/align.h"
#include "base/error.h"
#include "io/watch.h"
#include "memory/owned.h"

namespace swapper {
namespace {

// Number of operations that may wait before submitters are blocked.
constexpr std::size_t kInboxOps = 4096;
constexpr std::uint32_t kMaxDepth = 4096;
constexpr std::uint64_t kMinStagingBytes = 4 * kSlotUnitBytes;
constexpr std::uint64_t kMaxPieceBytes = std::uint64_t{1} << 30;  // a kernel call's result is an int

void check_options(const EngineOptions& options) {
  if (options.depth == 0 || options.depth > kMaxDepth) {
    throw ConfigError("depth must be from 1 to 4096, not " + std::to_string(options.depth));
  }
  if (options.piece_bytes == 0 || options.piece_bytes > kMaxPieceBytes ||
      !is_aligned(options.piece_bytes, kPageBytes)) {
    throw ConfigError("piece_bytes must be a multiple of 4096 up to 1 GiB, not " +
                      std::to_string(options.piece_bytes));
  }
  if (options.staging_bytes < kMinStagingBytes) {
    throw ConfigError("staging_bytes must be at least 262144, not " + std::to_string(options.staging_bytes));
  }
}

[[noreturn]] void refuse(const Request& request, int code, std::string detail) {
  throw IoError(name_of(request.direction), request.file->path(), request.offset, request.nbytes, code,
                std::move(detail));
}

void check_request(const Request& request) {
  if (request.direction == Direction::write && request.file->read_only()) {
    refuse(request, EBADF, "the file was opened read-only");
  }
  if (!in_range(request.offset, request.nbytes, std::numeric_limits<std::int64_t>::max())) {
    refuse(request, EINVAL, "the range ends beyond what a file can hold");
  }
}

// Asks for huge pages in the target of a large read before its first touch: clearing them and transferring
// into them is several times faster ([Note: huge pages by collapse]). The kernel may ignore the hint. The
// read fills all of the memory, so that the hint costs none.
void hint_huge_pages(const Request& request) {
  const auto address = reinterpret_cast<std::uint64_t>(request.address);
  const std::uint64_t begin = align_up(address, kHugePageBytes);
  const std::uint64_t end = align_down(address + request.nbytes, kHugePageBytes);
  if (request.direction == Direction::write || end <= begin || request.owner) return;
  static_cast<void>(::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
}

}  // namespace

struct Engine::Start {
  std::promise<void> result;
};

Engine::Engine(const EngineOptions& options)
    : depth_(options.depth),
      piece_bytes_(options.piece_bytes),
      stage_(options.stage),
      debug_(options.debug),
      inbox_(std::make_shared<Inbox>(kInboxOps)) {
  check_options(options);
  staging_ = choose_staging(options.staging_bytes, piece_bytes_, depth_);
  Start start;
  std::future<void> result = start.result.get_future();
  {
    const SignalsBlocked blocked;
    thread_ = std::make_unique<std::thread>([this, options, &start] { run(options, start); });
  }
  try {
    result.get();
  } catch (...) {
    thread_->join();
    throw;
  }
}

Engine::~Engine() {
  if (creator_.is_this_process()) {
    close();
  } else {
    // In a forked child the thread does not exist, and the holder of the inbox's mutex may not either.
    static_cast<void>(thread_.release());
    static_cast<void>(new std::shared_ptr<Inbox>(inbox_));
  }
}

void Engine::run(const EngineOptions& options, Start& start) {
  pthread_setname_np(pthread_self(), "swapper-io");
  ChosenBackend chosen;
  try {
    chosen = choose_backend(options.backend, {.depth = options.depth, .arena = options.arena}, options.chaos);
    backend_ = chosen.name;
    reason_ = chosen.reason;
    inbox_->set_bell([backend = chosen.backend.get()] { backend->wake(); });
  } catch (...) {
    start.result.set_exception(std::current_exception());
    return;
  }
  start.result.set_value();  // `start` is destroyed from here on
  serve(*chosen.backend);
  inbox_->set_bell(nullptr);
}

// The order matters: new pieces reach the drive (reap begins them) before this thread spends time on a copy
// or a checksum. Those run a little at a time and hide behind transfers.
void Engine::serve(Backend& backend) {
  Staging staging(staging_, backend, staging_bytes_);
  Scheduler scheduler(backend, inbox_, totals_, staging, depth_);
  std::vector<std::shared_ptr<Op>> ops;
  std::vector<Completion> completions(depth_);
  while (!inbox_->may_leave()) {
    inbox_->take(ops);
    if (inbox_->is_abandoned()) scheduler.abandon();
    scheduler.accept(ops);
    scheduler.fill();
    const bool wait = !scheduler.has_work() && inbox_->may_sleep(scheduler.is_full());
    const std::size_t count = backend.reap(completions, wait);
    scheduler.complete(std::span<const Completion>(completions).first(count));
    scheduler.fill();
    scheduler.work();
  }
}

// Stages transfers whose alignment does not need it: all reads in debug mode (see watch.h), transfers into
// memory that a fork may take away, and in tests all others.
bool Engine::must_stage(const Request& request) const {
  const bool reading = request.direction == Direction::read;
  if (debug_ && reading) return true;
  if (!request.file->direct() || request.owner) return false;
  return stage_ || (reading && !kernel_keeps_memory_at_fork());
}

std::shared_ptr<Op> Engine::prepare(Request request) {
  check_process(name_of(request.direction));
  check_request(request);
  request.owner = owner_of(request.address, request.nbytes);
  const Plan plan = make_plan(
      request.direction, request.offset, reinterpret_cast<std::uint64_t>(request.address), request.nbytes,
      request.file->demands(), {.plain = piece_bytes_, .staged = staging_.slot_bytes}, must_stage(request));
  if (plan.has_edges()) request.file->ready_edges();
  hint_huge_pages(request);
  auto ticket = std::make_shared<Ticket>(request.nbytes, request.checksum);
  auto op = std::make_shared<Op>(std::move(request), std::move(ticket), plan);
  op->ticket->attach(inbox_, op);
  op->watch.wanted = debug_ && op->request.nbytes > 0;
  if (!op->request.after) begin_watch(*op);
  return op;
}

bool Engine::enqueue(const std::shared_ptr<Op>& op, Clock::duration patience) {
  if (op->request.nbytes == 0 && !op->request.after && !inbox_->is_closed()) {
    op->ticket->finish(std::nullopt, 0);
    return true;
  }
  const Inbox::Push push = inbox_->push(op, patience);
  if (push == Inbox::Push::closed) refuse(op->request, EBADF, "the engine is closed");
  return push == Inbox::Push::taken;
}

std::uint64_t Engine::bytes(Direction direction) const {
  return totals_[static_cast<std::size_t>(index_of(direction))].load(std::memory_order_relaxed);
}

std::uint64_t Engine::in_flight() const {
  return inbox_->in_flight();
}

bool Engine::wait_until_drained(Clock::duration patience) {
  return inbox_->wait_until_drained(patience);
}

void Engine::refuse_submissions() {
  inbox_->close();
}

void Engine::abandon() {
  inbox_->abandon();
}

void Engine::close() {
  inbox_->stop();
  std::lock_guard lock(join_mutex_);
  if (thread_ && thread_->joinable()) thread_->join();
}

void Engine::check_process(const char* op) const {
  if (!creator_.is_this_process()) {
    throw IoError(op, "", 0, 0, 0, "used in a forked child; make a new engine there");
  }
}

}  // namespace swapper
