// Sections in which Python's signal handlers are deferred, and a mutex whose holder is in one. Owns the
// numbers of the signals that came meanwhile.
//
// [Note: atomic entry] Python runs signal handlers, and raises exceptions that another thread has sent
// (PyThreadState_SetAsyncExc), between two instructions: at calls, at the begin of a Python function and
// where a loop goes back. If the entry and the exit of a `with` statement are C functions, there is no
// such place between them and its body. So each entry has its exit, whatever is raised.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <csignal>
#include <mutex>
#include <string>

#include "bindings/handles.h"

namespace swapper {
namespace {

thread_local int depth = 0;  // of sections that this thread is in

struct Deferred {  // only the main thread, where handlers run, uses it
  std::array<bool, NSIG> came{};
  bool any = false;
};
Deferred deferred;

void leave() {
  if (--depth > 0 || !deferred.any) return;
  deferred.any = false;
  for (int number = 1; number < NSIG; ++number) {
    if (std::exchange(deferred.came[number], false)) PyErr_SetInterruptEx(number);
  }
  if (PyErr_CheckSignals() != 0) throw nb::python_error();  // runs the handlers, now
}

// The context manager. `prepare` returns true once nothing is left to prepare in this thread.
class DeferredSignals {
 public:
  explicit DeferredSignals(nb::object prepare) : prepare_(std::move(prepare)) {}

  void enter() {
    if (!is_prepared_) is_prepared_ = nb::cast<bool>(prepare_());
    ++depth;
  }

 private:
  nb::object prepare_;
  bool is_prepared_ = false;
};

// What Python calls in place of the user's handler, in the main thread.
struct DeferredHandler {
  nb::object handler;

  nb::object call(int number, const nb::object& frame) const {
    const bool is_second = number == SIGINT && deferred.came[SIGINT];  // of a user who cannot wait
    if (depth == 0 || is_second) return handler(number, frame);
    deferred.came[number] = deferred.any = true;
    return nb::none();
  }
};

// See SteadyLock in _C.pyi.
class SteadyLock {
 public:
  SteadyLock(DeferredSignals& signals, nb::object expected)
      : signals_(&signals), expected_(std::move(expected)) {}

  void enter() {
    signals_->enter();
    if (!mutex_.try_lock()) {
      const nb::gil_scoped_release released;
      mutex_.lock();
    }
    is_locked_ = true;
  }

  void exit(nb::handle type, nb::handle, nb::handle) {
    if (!type.is_none() && PyErr_GivenExceptionMatches(type.ptr(), expected_.ptr()) == 0) {
      broken_by_ = nb::cast<std::string>(type.attr("__name__"));
    }
    is_locked_ = false;
    mutex_.unlock();
    leave();
  }

  bool is_locked() const { return is_locked_; }
  const std::string& broken_by() const { return broken_by_; }

 private:
  DeferredSignals* signals_;  // kept alive by Python
  nb::object expected_;
  std::mutex mutex_;
  bool is_locked_ = false;
  std::string broken_by_;
};

}  // namespace

void bind_signals(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<DeferredSignals>(module, "DeferredSignals")
      .def(nb::init<nb::object>(), "prepare"_a)
      .def("__enter__", &DeferredSignals::enter)
      .def(
          "__exit__", [](DeferredSignals&, nb::handle, nb::handle, nb::handle) { leave(); }, "type"_a.none(),
          "value"_a.none(), "traceback"_a.none());
  nb::class_<DeferredHandler>(module, "DeferredHandler")
      .def(
          "__init__",
          [](DeferredHandler* self, nb::object handler) { new (self) DeferredHandler{std::move(handler)}; },
          "handler"_a)
      .def_prop_ro("handler", [](const DeferredHandler& self) { return self.handler; })
      .def("__call__", &DeferredHandler::call, "number"_a, "frame"_a.none());
  nb::class_<SteadyLock>(module, "SteadyLock")
      .def(nb::init<DeferredSignals&, nb::object>(), "signals"_a, "expected"_a, nb::keep_alive<1, 2>())
      .def("__enter__", &SteadyLock::enter)
      .def("__exit__", &SteadyLock::exit, "type"_a.none(), "value"_a.none(), "traceback"_a.none())
      .def("locked", &SteadyLock::is_locked)
      .def_prop_ro("broken_by", &SteadyLock::broken_by);
}

}  // namespace swapper
