// Binds Arena, View and Window to Python. Views and windows are buffers: tensors made of them share their
// memory. Owns nothing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "base/align.h"
#include "base/error.h"
#include "base/process.h"
#include "bindings/handles.h"
#include "memory/arena.h"
#include "memory/fault.h"
#include "memory/truncation.h"
#include "memory/window.h"

using namespace nanobind::literals;

namespace swapper {
namespace {

// A part of an arena. Memory copied out of an arena lives as long as its last holder, even if the arena is
// gone.
struct View {
  View(std::shared_ptr<Arena> of, std::byte* begin, std::uint64_t size)
      : arena(std::move(of)), address(begin), nbytes(size) {}
  View(View&&) = default;
  ~View() {
    if (is_watched && arena->is_usable()) forget_range(address, align_up(nbytes, kPageBytes));
    if (is_copied_out && arena->is_usable()) release_memory(address, align_up(nbytes, kPageBytes));
  }

  std::shared_ptr<Arena> arena;
  std::byte* address;
  std::uint64_t nbytes;
  bool is_copied_out = false;
  bool is_watched = false;  // or was
};

struct WindowHandle {
  std::shared_ptr<Window> window;
};

int fill_buffer(PyObject* self, Py_buffer* buffer, int flags, bool usable, std::byte* address,
                std::uint64_t nbytes) {
  if (!usable) {
    PyErr_SetString(PyExc_BufferError, "used in a forked child, which does not have this memory");
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

PyType_Slot view_slots[] = {{.slot = Py_bf_getbuffer, .pfunc = reinterpret_cast<void*>(view_buffer)}, {}};
PyType_Slot window_slots[] = {{.slot = Py_bf_getbuffer, .pfunc = reinterpret_cast<void*>(window_buffer)}, {}};

View make_view(const ArenaHandle& self, std::uint64_t offset, std::uint64_t nbytes) {
  const auto& arena = self.get("view");
  if (!in_range(offset, nbytes, arena->nbytes())) {
    throw ConfigError(std::to_string(nbytes) + " bytes at " + std::to_string(offset) +
                      " do not fit in an arena of " + std::to_string(arena->nbytes()));
  }
  return {arena, arena->address() + offset, nbytes};
}

void copy_view_out(View& self) {
  const std::uint64_t offset = static_cast<std::uint64_t>(self.address - self.arena->address());
  if (!is_aligned(offset, kPageBytes))
    throw ConfigError("only a view that begins on a page can be copied out");
  self.arena->copy_out(self.address, offset, align_up(self.nbytes, kPageBytes));
  self.is_copied_out = true;
}

void check_watch(const View& self, int code) {
  if (code != 0) throw IoError("mprotect", "", 0, self.nbytes, code);
}

// Has a thread that changes the view wait until the write is over. Without the handler it would not end.
void watch_view(View& self, const TicketHandle& write) {
  if (is_off("sigsegv")) return;
  const std::uint64_t nbytes = align_up(self.nbytes, kPageBytes);
  auto outcome = Ticket::outcome_of(write.ticket);
  const nb::gil_scoped_release released;
  check_watch(self, watch_range(self.address, nbytes, std::move(outcome)));
  self.is_watched = true;
}

void unwatch_view(View& self) {
  if (self.is_watched) check_watch(self, unwatch_range(self.address, align_up(self.nbytes, kPageBytes)));
}

Window& usable(const WindowHandle& self, const char* op) {
  if (!self.window->is_usable())
    throw IoError(op, "", 0, 0, 0, "used in a forked child, which does not have this memory");
  return *self.window;
}

}  // namespace

void bind_memory(nb::module_& module) {
  nb::class_<View>(module, "View", nb::type_slots(view_slots), nb::is_weak_referenceable())
      .def_prop_ro("address", [](const View& self) { return reinterpret_cast<std::uintptr_t>(self.address); })
      .def_ro("nbytes", &View::nbytes)
      .def("watch", &watch_view, "write"_a)
      .def("unwatch", &unwatch_view, nb::call_guard<nb::gil_scoped_release>())
      .def("copy_out", &copy_view_out, nb::call_guard<nb::gil_scoped_release>());

  nb::class_<WindowHandle>(module, "Window", nb::type_slots(window_slots), nb::is_weak_referenceable())
      .def_prop_ro(
          "address",
          [](const WindowHandle& self) { return reinterpret_cast<std::uintptr_t>(self.window->address()); })
      .def_prop_ro("nbytes", [](const WindowHandle& self) { return self.window->nbytes(); })
      .def(
          "map",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t arena_offset,
             std::uint64_t nbytes, bool guarded) {
            Window& window = usable(self, "map");
            const nb::gil_scoped_release released;
            return window.map(window_offset, arena_offset, nbytes, guarded);
          },
          "window_offset"_a, "arena_offset"_a, "nbytes"_a, "guarded"_a = false)
      .def(
          "copy_out",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t arena_offset,
             std::uint64_t nbytes) {
            Window& window = usable(self, "copy_out");
            const nb::gil_scoped_release released;
            window.copy_out(window_offset, arena_offset, nbytes);
          },
          "window_offset"_a, "arena_offset"_a, "nbytes"_a)
      .def(
          "fill",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t nbytes) {
            Window& window = usable(self, "fill");
            const nb::gil_scoped_release released;
            return window.fill(window_offset, nbytes);
          },
          "window_offset"_a, "nbytes"_a)
      .def(
          "guard",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t nbytes) {
            Window& window = usable(self, "guard");
            const nb::gil_scoped_release released;
            window.guard(window_offset, nbytes);
          },
          "window_offset"_a, "nbytes"_a)
      .def(
          "written_at",
          [](const WindowHandle& self, std::uint64_t window_offset) {
            return usable(self, "written_at").written_at(window_offset);
          },
          "window_offset"_a)
      .def(
          "unmap",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t nbytes,
             const FileHandle* source, std::uint64_t source_offset) {
            Window& window = usable(self, "unmap");
            Backing backing;
            if (source != nullptr) {
              const std::shared_ptr<File>& open = source->get("unmap");
              backing = {.owner = open, .fd = open->fd(), .offset = source_offset};
            }
            const nb::gil_scoped_release released;
            window.unmap(window_offset, nbytes, std::move(backing));
          },
          "window_offset"_a, "nbytes"_a, "source"_a.none() = nb::none(), "source_offset"_a = 0)
      .def(
          "unmap",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t nbytes, const View& source,
             std::uint64_t source_offset) {
            Window& window = usable(self, "unmap");
            const auto begin = static_cast<std::uint64_t>(source.address - source.arena->address());
            const nb::gil_scoped_release released;
            window.unmap(
                window_offset, nbytes,
                {.owner = source.arena, .fd = source.arena->memfd(), .offset = begin + source_offset});
          },
          "window_offset"_a, "nbytes"_a, "source"_a, "source_offset"_a = 0)
      .def(
          "promise",
          [](const WindowHandle& self, std::uint64_t window_offset, std::uint64_t nbytes,
             std::uint64_t arena_offset, const TicketHandle& write, const FileHandle& source,
             std::uint64_t source_offset) {
            Window& window = usable(self, "promise");
            const std::shared_ptr<File>& open = source.get("promise");
            auto outcome = Ticket::outcome_of(write.ticket);
            const nb::gil_scoped_release released;
            window.promise(window_offset, nbytes, arena_offset, std::move(outcome),
                           {.owner = open, .fd = open->fd(), .offset = source_offset});
          },
          "window_offset"_a, "nbytes"_a, "arena_offset"_a, "write"_a, "source"_a, "source_offset"_a = 0);
  module.def("writes_noted", &writes_noted);

  nb::class_<TruncationWatch>(module, "TruncationWatch")
      .def(
          "__init__",
          [](TruncationWatch* self, std::uintptr_t address, std::uint64_t nbytes) {
            new (self) TruncationWatch(reinterpret_cast<std::byte*>(address), nbytes);
          },
          "address"_a, "nbytes"_a)
      .def_prop_ro("is_lost", &TruncationWatch::is_lost);
  module.def("ranges_lost", &ranges_lost);

  nb::class_<ArenaHandle>(module, "Arena")
      .def(
          "__init__",
          [](ArenaHandle* self, std::uint64_t nbytes, std::optional<std::uint64_t> head_bytes, bool lock,
             bool huge_pages, bool filled_once, std::optional<int> node) {
            const nb::gil_scoped_release released;  // locking touches every page
            ArenaOptions options{.nbytes = nbytes,
                                 .lock = lock,
                                 .huge_pages = huge_pages,
                                 .filled_once = filled_once,
                                 .node = node.value_or(-1)};
            if (head_bytes) options.head_bytes = *head_bytes;
            new (self) ArenaHandle{std::make_shared<Arena>(options)};
          },
          "nbytes"_a, nb::kw_only(), "head_bytes"_a = nb::none(), "lock"_a = true, "huge_pages"_a = true,
          "filled_once"_a = false, "node"_a = nb::none())
      .def("prefault_rest", [](const ArenaHandle& self) { self.get("prefault_rest")->prefault_rest(); })
      .def_prop_ro("populated_bytes",
                   [](const ArenaHandle& self) { return self.get("populated_bytes")->populated_bytes(); })
      .def(
          "wait_populated",
          [](const ArenaHandle& self, std::uint64_t nbytes) {
            const auto arena = self.get("wait_populated");
            wait_in_slices([&](Clock::duration patience) { return arena->wait_populated(nbytes, patience); });
          },
          "nbytes"_a)
      .def_prop_ro("nbytes", [](const ArenaHandle& self) { return self.get("nbytes")->nbytes(); })
      .def_prop_ro("address",
                   [](const ArenaHandle& self) {
                     return reinterpret_cast<std::uintptr_t>(self.get("address")->address());
                   })
      .def_prop_ro("node",
                   [](const ArenaHandle& self) -> std::optional<int> {
                     const int node = self.get("node")->node();
                     return node < 0 ? std::nullopt : std::optional(node);
                   })
      .def_prop_ro("locked", [](const ArenaHandle& self) { return self.get("locked")->locked(); })
      .def_prop_ro("huge_bytes", [](const ArenaHandle& self) { return self.get("huge_bytes")->huge_bytes(); })
      .def_prop_ro("lock_reason",
                   [](const ArenaHandle& self) { return self.get("lock_reason")->lock_reason(); })
      .def("view", &make_view, "offset"_a, "nbytes"_a)
      .def(
          "window",
          [](const ArenaHandle& self, std::uint64_t nbytes) {
            return WindowHandle{std::make_shared<Window>(self.get("window"), nbytes)};
          },
          "nbytes"_a)
      .def("close", [](ArenaHandle& self) { self.arena.reset(); })
      .def("retire", [](ArenaHandle& self) {
        self.get("retire")->retire();
        self.arena.reset();
      });
}

}  // namespace swapper
