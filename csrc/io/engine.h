// The engine, the interface of the data plane: it checks requests, hands them to its I/O thread, and can be
// drained and closed. One engine per drive. Owns the I/O thread, and through it the backend; keeps the arena
// alive while the backend may have it registered with the kernel.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "base/process.h"
#include "io/backend.h"
#include "io/inbox.h"
#include "io/op.h"
#include "io/scheduler.h"
#include "io/staging.h"
#include "io/ticket.h"

namespace swapper {

struct EngineOptions {
  std::string backend = "auto";
  std::uint32_t depth = 32;                            // pieces in flight
  std::uint64_t piece_bytes = std::uint64_t{1} << 20;  // bytes of one kernel call
  std::shared_ptr<Arena> arena = nullptr;
  std::uint64_t staging_bytes = std::uint64_t{32} << 20;
  bool stage = false;  // see must_stage in engine.cpp
  std::optional<ChaosOptions> chaos = std::nullopt;
  bool debug = false;
};

class Engine {
 public:
  explicit Engine(const EngineOptions& options);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const std::string& backend() const { return backend_; }
  const std::string& reason() const { return reason_; }
  std::uint32_t depth() const { return depth_; }
  std::uint64_t piece_bytes() const { return piece_bytes_; }

  // Submitting has two halves, so that a caller may check for signals while the inbox is full: prepare checks
  // the request and throws; enqueue waits for space for a while, and is false if there was none. If there is
  // nothing to transfer and nothing to wait for, prepare returns a finished ticket and enqueue does nothing.
  [[nodiscard]] std::shared_ptr<Op> prepare(Request request);
  [[nodiscard]] bool enqueue(const std::shared_ptr<Op>& op, Clock::duration patience);

  std::uint64_t bytes(Direction direction) const;
  std::uint64_t in_flight() const;
  std::uint64_t staging_bytes() const { return staging_bytes_.load(std::memory_order_relaxed); }
  [[nodiscard]] bool wait_until_drained(Clock::duration patience);

  void refuse_submissions();  // from now on enqueue throws
  void abandon();             // fails what has not begun, so that close is quick
  void close();               // drains and ends the I/O thread; idempotent and thread-safe

  // Throws IoError in a forked child, which has no I/O thread.
  void check_process(const char* op) const;
  bool is_usable() const { return creator_.is_this_process(); }

 private:
  struct Start;  // the I/O thread's report that its backend started, or why not
  void run(const EngineOptions& options, Start& start);
  void serve(Backend& backend);
  bool must_stage(const Request& request) const;

  Creator creator_;
  std::uint32_t depth_;
  std::uint64_t piece_bytes_;
  StagingOptions staging_;
  std::atomic<std::uint64_t> staging_bytes_{0};
  bool stage_;
  bool debug_;
  std::string backend_;
  std::string reason_;
  Totals totals_{};
  std::shared_ptr<Inbox> inbox_;
  std::mutex join_mutex_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace swapper
