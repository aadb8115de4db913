// The Python module swapper._C, and the only file of the data plane that knows Python. Each class here is a
// thin handle: a shared pointer to the real object, so that memory, files and engines live as long as
// anything uses them. Waiting releases the GIL and looks at signals between slices; the I/O thread never
// needs the GIL. What the functions promise is written in swapper/_C.pyi. Owns the list of live engines,
// which are closed before the interpreter takes apart the memory they transfer.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/align.h"
#include "base/crc32.h"
#include "base/error.h"
#include "io/engine.h"
#include "io/file.h"
#include "memory/arena.h"
#include "memory/window.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swapper {
namespace {

constexpr auto kSlice = std::chrono::milliseconds(50);  // between two looks at signals

// ---- paths and errors
// -------------------------------------------------------------------------------------------

nb::object to_python_path(const std::string& path) {
  PyObject* text = PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size()));
  if (text == nullptr) throw nb::python_error();
  return nb::steal(text);
}

std::string from_python_path(nb::handle path) {
  PyObject* encoded = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &encoded) == 0) throw nb::python_error();
  const nb::object owner = nb::steal(encoded);
  return {PyBytes_AsString(encoded), static_cast<std::size_t>(PyBytes_Size(encoded))};
}

nb::object to_python_error(const IoError& error) {
  return nb::module_::import_("swapper.errors")
      .attr("IoError")(error.op, to_python_path(error.path), error.offset, error.nbytes, error.code,
                       error.detail);
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const IoError& error) {
    const nb::object exception = to_python_error(error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  } catch (const ConfigError& error) {
    PyErr_SetString(nb::module_::import_("swapper.errors").attr("ConfigError").ptr(), error.what());
  }
}

// ---- waiting
// ----------------------------------------------------------------------------------------------------

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

// ---- memory
// -----------------------------------------------------------------------------------------------------

struct View {
  std::shared_ptr<Arena> arena;
  std::byte* address;
  std::uint64_t nbytes;
};

struct WindowHandle {
  std::shared_ptr<Window> window;
};

struct ArenaHandle {
  std::shared_ptr<Arena> arena;  // empty once closed

  const std::shared_ptr<Arena>& get(const char* op) const {
    if (!arena) throw IoError(op, "", 0, 0, EBADF, "the arena is closed");
    if (!arena->is_usable())
      throw IoError(op, "", 0, 0, 0, "used in a forked child, which has not this memory");
    return arena;
  }
};

int fill_buffer(PyObject* self, Py_buffer* buffer, int flags, bool usable, std::byte* address,
                std::uint64_t nbytes) {
  if (!usable) {
    PyErr_SetString(PyExc_BufferError, "used in a forked child, which has not this memory");
    return -1;
  }
  return PyBuffer_FillInfo(buffer, self, address, static_cast<Py_ssize_t>(nbytes), /*readonly=*/0, flags);
}

int view_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  const View& view = *nb::inst_ptr<View>(nb::handle(self));
  return fill_buffer(self, buffer, flags, view.arena->is_usable(), view.address, view.nbytes);
}

int window_buffer(PyObject* self, Py_buffer* buffer, int flags) {
  const Window& window = *nb::inst_ptr<WindowHandle>(nb::handle(self))->window;
  return fill_buffer(self, buffer, flags, window.is_usable(), window.address(), window.nbytes());
}

PyType_Slot view_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(view_buffer)}, {0, nullptr}};
PyType_Slot window_slots[] = {{Py_bf_getbuffer, reinterpret_cast<void*>(window_buffer)}, {0, nullptr}};

View make_view(const ArenaHandle& self, std::uint64_t offset, std::uint64_t nbytes) {
  const auto& arena = self.get("view");
  if (!in_range(offset, nbytes, arena->nbytes())) {
    throw ConfigError(std::to_string(nbytes) + " bytes at " + std::to_string(offset) +
                      " do not fit in an arena of " + std::to_string(arena->nbytes()));
  }
  return {arena, arena->address() + offset, nbytes};
}

Window& usable(const WindowHandle& self, const char* op) {
  if (!self.window->is_usable())
    throw IoError(op, "", 0, 0, 0, "used in a forked child, which has not this memory");
  return *self.window;
}

void bind_memory(nb::module_& module) {
  nb::class_<View>(module, "View", nb::type_slots(view_slots))
      .def_prop_ro("address", [](const View& self) { return reinterpret_cast<std::uintptr_t>(self.address); })
      .def_ro("nbytes", &View::nbytes);

  nb::class_<WindowHandle>(module, "Window", nb::type_slots(window_slots))
      .def_prop_ro(
          "address",
          [](const WindowHandle& self) { return reinterpret_cast<std::uintptr_t>(self.window->address()); })
      .def_prop_ro("nbytes", [](const WindowHandle& self) { return self.window->nbytes(); })
      .def(
          "map",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t arena_offset,
             std::uint64_t nbytes) {
            Window& window = usable(self, "map");
            const nb::gil_scoped_release released;
            window.map(window_offset, arena_offset, nbytes);
          },
          "window_offset"_a, "arena_offset"_a, "nbytes"_a)
      .def(
          "unmap",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t nbytes) {
            Window& window = usable(self, "unmap");
            const nb::gil_scoped_release released;
            window.unmap(window_offset, nbytes);
          },
          "window_offset"_a, "nbytes"_a);

  nb::class_<ArenaHandle>(module, "Arena")
      .def(
          "__init__",
          [](ArenaHandle* self, std::uint64_t nbytes, bool lock, bool huge_pages) {
            const nb::gil_scoped_release released;  // locking touches every page
            new (self) ArenaHandle{std::make_shared<Arena>(ArenaOptions{nbytes, lock, huge_pages})};
          },
          "nbytes"_a, nb::kw_only(), "lock"_a = true, "huge_pages"_a = true)
      .def_prop_ro("nbytes", [](const ArenaHandle& self) { return self.get("nbytes")->nbytes(); })
      .def_prop_ro("address",
                   [](const ArenaHandle& self) {
                     return reinterpret_cast<std::uintptr_t>(self.get("address")->address());
                   })
      .def_prop_ro("locked", [](const ArenaHandle& self) { return self.get("locked")->locked(); })
      .def_prop_ro("lock_reason",
                   [](const ArenaHandle& self) { return self.get("lock_reason")->lock_reason(); })
      .def("view", &make_view, "offset"_a, "nbytes"_a)
      .def(
          "window",
          [](const ArenaHandle& self, std::uint64_t nbytes) {
            return WindowHandle{std::make_shared<Window>(self.get("window"), nbytes)};
          },
          "nbytes"_a)
      .def("close", [](ArenaHandle& self) { self.arena.reset(); });
}

// ---- files
// ------------------------------------------------------------------------------------------------------

struct FileHandle {
  std::string path;
  std::shared_ptr<File> file;  // empty once closed

  const std::shared_ptr<File>& get(const char* op) const {
    if (!file) throw IoError(op, path, 0, 0, EBADF, "the file is closed");
    return file;
  }
};

void bind_file(nb::module_& module) {
  nb::class_<FileHandle>(module, "File")
      .def(
          "__init__",
          [](FileHandle* self, nb::handle path, bool create, bool read_only, std::optional<bool> direct) {
            std::string name = from_python_path(path);
            const nb::gil_scoped_release released;
            auto file = std::make_shared<File>(name, FileOptions{create, read_only, direct});
            new (self) FileHandle{std::move(name), std::move(file)};
          },
          "path"_a, nb::kw_only(), "create"_a = false, "read_only"_a = false, "direct"_a = nb::none())
      .def_prop_ro("path", [](const FileHandle& self) { return to_python_path(self.path); })
      .def_prop_ro("direct", [](const FileHandle& self) { return self.get("direct")->direct(); })
      .def_prop_ro("alignment", [](const FileHandle& self) { return self.get("alignment")->alignment(); })
      .def_prop_ro("memory_alignment",
                   [](const FileHandle& self) { return self.get("memory_alignment")->memory_alignment(); })
      .def_prop_ro("reason", [](const FileHandle& self) { return self.get("reason")->reason(); })
      .def_prop_ro("nbytes", [](const FileHandle& self) { return self.get("stat")->nbytes(); })
      .def(
          "allocate",
          [](const FileHandle& self, std::uint64_t nbytes) {
            const auto file = self.get("allocate");
            const nb::gil_scoped_release released;
            file->allocate(nbytes);
          },
          "nbytes"_a)
      .def(
          "truncate",
          [](const FileHandle& self, std::uint64_t nbytes) {
            const auto file = self.get("truncate");
            const nb::gil_scoped_release released;
            file->truncate(nbytes);
          },
          "nbytes"_a)
      .def("sync",
           [](const FileHandle& self) {
             const auto file = self.get("sync");
             const nb::gil_scoped_release released;
             file->sync();
           })
      .def("close", [](FileHandle& self) { self.file.reset(); });
}

// ---- engine and tickets
// -----------------------------------------------------------------------------------------

struct TicketHandle {
  explicit TicketHandle(std::shared_ptr<Ticket> ticket_) : ticket(std::move(ticket_)) {}
  TicketHandle(TicketHandle&&) = default;
  // In a forked child somebody may have been waiting on it when the fork came, and its condition variable
  // would wait for them in turn: leak it there.
  ~TicketHandle() {
    if (ticket && !ticket->is_usable()) static_cast<void>(new std::shared_ptr<Ticket>(std::move(ticket)));
  }

  std::shared_ptr<Ticket> ticket;
};

struct EngineHandle {
  std::shared_ptr<Engine> engine;
  ~EngineHandle() {
    if (!engine || !engine->is_usable()) return;  // a forked child: Engine's destructor leaks what it must
    const nb::gil_scoped_release released;        // draining takes time
    engine.reset();
  }
};

// Never destroyed: the interpreter may end while other threads still run.
struct LiveEngines {
  std::mutex mutex;
  std::vector<std::weak_ptr<Engine>> engines;
  Creator creator;
};

LiveEngines& live_engines() {
  static LiveEngines* live = new LiveEngines;
  return *live;
}

void remember(const std::shared_ptr<Engine>& engine) {
  LiveEngines& live = live_engines();
  if (!live.creator.is_this_process())
    return;  // a forked child's own engines are closed by their destructors
  const std::lock_guard lock(live.mutex);
  std::erase_if(live.engines, [](const auto& each) { return each.expired(); });
  live.engines.push_back(engine);
}

void close_engine(Engine& engine) {
  engine.refuse_submissions();
  wait_in_slices([&](Clock::duration patience) { return engine.wait_until_drained(patience); });
  const nb::gil_scoped_release released;
  engine.close();
}

// Run by atexit, before modules and their tensors go.
void close_live_engines() {
  LiveEngines& live = live_engines();
  if (!live.creator.is_this_process()) return;
  std::vector<std::weak_ptr<Engine>> engines;
  {
    const std::lock_guard lock(live.mutex);
    engines = live.engines;
  }
  for (const auto& each : engines) {
    const auto engine = each.lock();
    if (!engine) continue;
    try {
      close_engine(*engine);
    } catch (nb::python_error&) {  // a second Ctrl-C: whoever presses it wants to leave
      engine->abandon();
      throw;
    }
  }
}

TicketHandle submit(const EngineHandle& self, Request request) {
  Engine& engine = *self.engine;
  const std::shared_ptr<Op> op = engine.prepare(std::move(request));
  TicketHandle ticket(op->ticket);  // before the I/O thread has the operation
  if (!engine.enqueue(op, Clock::duration::zero())) {
    wait_in_slices([&](Clock::duration patience) { return engine.enqueue(op, patience); });
  }
  return ticket;
}

template <Direction direction>
TicketHandle submit_transfer(const EngineHandle& self, const FileHandle& file, std::uint64_t offset,
                             std::uintptr_t address, std::uint64_t nbytes, const TicketHandle* after,
                             bool checksum) {
  Request request;
  request.direction = direction;
  request.file = file.get(name_of(direction));
  request.offset = offset;
  request.address = reinterpret_cast<std::byte*>(address);
  request.nbytes = nbytes;
  request.checksum = checksum;
  if (after != nullptr) request.after = after->ticket;
  return submit(self, std::move(request));
}

bool wait_ticket(const TicketHandle& self, std::optional<double> timeout_s) {
  Ticket& ticket = *self.ticket;
  if (!ticket.finished()) {
    if (!ticket.is_usable()) throw IoError("wait", "", 0, ticket.nbytes(), 0, "used in a forked child");
    const auto attempt = [&](Clock::duration patience) { return ticket.wait_for(patience); };
    if (!wait_in_slices(attempt, timeout_s)) return false;
  }
  if (ticket.error()) throw IoError(*ticket.error());
  return true;
}

std::uint32_t ticket_crc32(const TicketHandle& self) {
  const Ticket& ticket = *self.ticket;
  if (!ticket.has_checksum()) throw nb::value_error("no checksum was asked for (checksum=True)");
  if (!ticket.finished()) throw nb::value_error("not finished yet: wait() first");
  if (ticket.error()) throw IoError(*ticket.error());
  return ticket.crc32();
}

nb::object ticket_error(const TicketHandle& self) {
  if (!self.ticket->finished() || !self.ticket->error()) return nb::none();
  return to_python_error(*self.ticket->error());
}

void bind_engine(nb::module_& module) {
  nb::class_<TicketHandle>(module, "Ticket")
      .def_prop_ro("done", [](const TicketHandle& self) { return self.ticket->finished(); })
      .def_prop_ro("nbytes", [](const TicketHandle& self) { return self.ticket->nbytes(); })
      .def_prop_ro("crc32", &ticket_crc32)
      .def_prop_ro("error", &ticket_error)
      .def_prop_ro("submitted_s", [](const TicketHandle& self) { return seconds(self.ticket->submitted()); })
      .def_prop_ro("completed_s",
                   [](const TicketHandle& self) {
                     if (!self.ticket->finished()) throw nb::value_error("not finished yet: wait() first");
                     return seconds(self.ticket->completed());
                   })
      .def("wait", &wait_ticket, "timeout_s"_a = nb::none());

  nb::class_<EngineHandle>(module, "Engine")
      .def(
          "__init__",
          [](EngineHandle* self, const std::string& backend, std::uint32_t depth, std::uint64_t piece_bytes,
             const ArenaHandle* arena) {
            EngineOptions options{backend, depth, piece_bytes, nullptr};
            if (arena != nullptr) options.arena = arena->get("engine");
            const nb::gil_scoped_release released;  // registering the arena takes time
            auto engine = std::make_shared<Engine>(options);
            remember(engine);
            new (self) EngineHandle{std::move(engine)};
          },
          nb::kw_only(), "backend"_a = "auto", "depth"_a = 32, "piece_bytes"_a = std::uint64_t{1} << 20,
          "arena"_a = nb::none())
      .def_prop_ro("backend", [](const EngineHandle& self) { return self.engine->backend(); })
      .def_prop_ro("reason", [](const EngineHandle& self) { return self.engine->reason(); })
      .def("read", &submit_transfer<Direction::read>, "file"_a, "offset"_a, "address"_a, "nbytes"_a,
           nb::kw_only(), "after"_a = nb::none(), "checksum"_a = false)
      .def("write", &submit_transfer<Direction::write>, "file"_a, "offset"_a, "address"_a, "nbytes"_a,
           nb::kw_only(), "after"_a = nb::none(), "checksum"_a = false)
      .def_prop_ro("bytes_read", [](const EngineHandle& self) { return self.engine->bytes(Direction::read); })
      .def_prop_ro("bytes_written",
                   [](const EngineHandle& self) { return self.engine->bytes(Direction::write); })
      .def_prop_ro("in_flight",
                   [](const EngineHandle& self) {
                     self.engine->check_process("in_flight");
                     return self.engine->in_flight();
                   })
      .def("drain",
           [](const EngineHandle& self) {
             self.engine->check_process("drain");
             wait_in_slices(
                 [&](Clock::duration patience) { return self.engine->wait_until_drained(patience); });
           })
      .def("close", [](const EngineHandle& self) {
        self.engine->check_process("close");
        close_engine(*self.engine);
      });
}

// ---- checksums
// --------------------------------------------------------------------------------------------------

std::uint32_t crc32_of_buffer(nb::handle buffer, std::uint32_t value) {
  Py_buffer view;
  if (PyObject_GetBuffer(buffer.ptr(), &view, PyBUF_SIMPLE) != 0) throw nb::python_error();
  {
    const nb::gil_scoped_release released;
    value = crc32(view.buf, static_cast<std::size_t>(view.len), value);
  }
  PyBuffer_Release(&view);
  return value;
}

std::uint32_t crc32_of_address(std::uintptr_t address, std::uint64_t nbytes, std::uint32_t value) {
  const nb::gil_scoped_release released;
  return crc32(reinterpret_cast<const void*>(address), nbytes, value);
}

}  // namespace
}  // namespace swapper

NB_MODULE(_C, module) {
  using namespace swapper;
  module.doc() = "swapper's data plane: memory, files and the engine that moves bytes between them.";
  nb::set_leak_warnings(false);  // tensors in globals keep views alive to the very end, and that is in order
  nb::register_exception_translator(&translate);
  bind_memory(module);
  bind_file(module);
  bind_engine(module);
  module.def("crc32", &crc32_of_buffer, "buffer"_a, "value"_a = 0);
  module.def("crc32_address", &crc32_of_address, "address"_a, "nbytes"_a, "value"_a = 0);
  module.def("crc32_combine", &crc32_combine, "a"_a, "b"_a, "nbytes_b"_a);
  nb::module_::import_("atexit").attr("register")(nb::cpp_function(&close_live_engines));
}
