// Shared by the files of the binding: the handles, the translation of paths and errors to Python, and waits
// that a signal can end. Only csrc/bindings/ knows Python. Each class of swapper._C is a thin handle: a
// shared pointer to the real object, so that memory, files and engines live as long as anything uses them.
// Owns nothing.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "io/file.h"
#include "io/ticket.h"
#include "memory/arena.h"

namespace swapper {

namespace nb = nanobind;

struct ArenaHandle {
  std::shared_ptr<Arena> arena;  // empty once closed

  const std::shared_ptr<Arena>& get(const char* op) const {
    if (!arena) throw IoError(op, "", 0, 0, EBADF, "the arena is closed");
    if (!arena->is_usable())
      throw IoError(op, "", 0, 0, 0, "used in a forked child, which does not have this memory");
    return arena;
  }
};

struct FileHandle {
  std::string path;
  std::shared_ptr<File> file;  // empty once closed

  const std::shared_ptr<File>& get(const char* op) const {
    if (!file) throw IoError(op, path, 0, 0, EBADF, "the file is closed");
    return file;
  }
};

struct TicketHandle {
  explicit TicketHandle(std::shared_ptr<Ticket> ticket_) : ticket(std::move(ticket_)) {}
  TicketHandle(TicketHandle&&) = default;
  ~TicketHandle();  // engine.cpp

  // Releases the memory and returns its owner, if the transfer is over.
  bool is_over() {
    if (!ticket->finished()) return false;
    const nb::object gone = std::move(keep);
    return true;
  }

  std::shared_ptr<Ticket> ticket;
  nb::object keep;  // the owner of the memory, if it is a Python object
};

nb::object to_python_path(const std::string& path);
std::string from_python_path(nb::handle path);
nb::object to_python_error(const IoError& error);
void translate_errors(const std::exception_ptr& pointer, void*);

constexpr auto kSlice = std::chrono::milliseconds(50);  // between two checks for signals

// Repeats attempt(patience) without the GIL until it is true, Python has a signal to handle, or time is up.
template <typename Attempt>
bool wait_in_slices(Attempt attempt, std::optional<double> timeout_s = std::nullopt) {
  const auto begin = Clock::now();
  for (;;) {
    Clock::duration patience = kSlice;
    if (timeout_s) {
      const std::chrono::duration<double> left =
          std::chrono::duration<double>(*timeout_s) - (Clock::now() - begin);
      if (left.count() < 0.05) {
        patience = std::max(Clock::duration::zero(), std::chrono::duration_cast<Clock::duration>(left));
      }
    }
    bool done = false;
    {
      const nb::gil_scoped_release released;
      done = attempt(patience);
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (timeout_s && std::chrono::duration<double>(Clock::now() - begin).count() >= *timeout_s) return false;
  }
}

void bind_memory(nb::module_& module);
void bind_file(nb::module_& module);
void bind_engine(nb::module_& module);
void bind_codecs(nb::module_& module);
void bind_signals(nb::module_& module);

}  // namespace swapper
