// Binds Engine and Ticket to Python. Waiting releases the GIL and checks for signals between slices; the I/O
// thread never needs the GIL. Owns the list of live engines, which are drained before the interpreter
// destroys the memory they transfer, and the owners of memory whose tickets were dropped.
//
// [Note: who keeps the memory] Memory must outlive its transfer, whatever becomes of the caller: an error of
// another transfer, Ctrl-C between two lines, the garbage collector. The operation itself shares ownership of
// an arena or a window (OwnedRange). Any other memory is owned by a Python object, which the I/O thread
// cannot release without the GIL: the ticket's handle holds it (`keep`) and releases it once the ticket is
// done. A handle that is destroyed earlier leaves both in a list, which each submission cleans up. Memory of
// neither kind is refused.
#include "io/engine.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <mutex>
#include <vector>

#include "bindings/handles.h"
#include "io/backend_chaos.h"
#include "memory/owned.h"

using namespace nanobind::literals;

namespace swapper {
namespace {

// See [Note: who keeps the memory]. Accessed with the GIL only; never destroyed, as the interpreter may be
// gone.
struct Kept {
  std::shared_ptr<Ticket> ticket;
  nb::object owner;
};

std::vector<Kept>& kept() {
  static std::vector<Kept>* all = new std::vector<Kept>;
  return *all;
}

// Releases the memory of dropped tickets whose transfers are over. This may run any Python code, itself
// included.
void release_kept() {
  std::vector<Kept>& all = kept();
  if (all.empty()) return;
  const auto over =
      std::partition(all.begin(), all.end(), [](const Kept& each) { return !each.ticket->finished(); });
  const std::vector<Kept> gone(std::make_move_iterator(over), std::make_move_iterator(all.end()));
  all.erase(over, all.end());
}

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
  {
    const nb::gil_scoped_release released;
    engine.close();
  }
  release_kept();
}

// Runs at exit (atexit), before modules and their tensors are destroyed.
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
    } catch (nb::python_error&) {  // a second Ctrl-C: the user wants to leave
      engine->abandon();
      throw;
    }
  }
}

TicketHandle submit(const EngineHandle& self, Request request, nb::object keep) {
  Engine& engine = *self.engine;
  const std::shared_ptr<Op> op = engine.prepare(std::move(request));
  TicketHandle ticket(op->ticket);  // before the I/O thread has the operation
  if (!engine.enqueue(op, Clock::duration::zero())) {
    wait_in_slices([&](Clock::duration patience) { return engine.enqueue(op, patience); });
  }
  if (!keep.is_none()) ticket.keep = std::move(keep);
  release_kept();
  return ticket;
}

void check_owner(const Request& request, const nb::object& keep) {
  if (!keep.is_none() || request.nbytes == 0 || owner_of(request.address, request.nbytes)) return;
  throw ConfigError("memory outside of arenas and windows needs its owner: pass it as keep=");
}

TicketHandle submit_transfer(Direction direction, const EngineHandle& self, const FileHandle& file,
                             std::uint64_t offset, std::uintptr_t address, std::uint64_t nbytes,
                             nb::object keep, const TicketHandle* after, bool checksum,
                             std::optional<std::uint32_t> expected) {
  Request request{.direction = direction,
                  .file = file.get(name_of(direction)),
                  .offset = offset,
                  .address = reinterpret_cast<std::byte*>(address),
                  .nbytes = nbytes,
                  .checksum = checksum || expected,
                  .after = after == nullptr ? nullptr : after->ticket,
                  .expected = expected};
  self.engine->check_process(name_of(direction));  // a forked child does not have the arena's memory either
  check_owner(request, keep);
  return submit(self, std::move(request), std::move(keep));
}

TicketHandle submit_read(const EngineHandle& self, const FileHandle& file, std::uint64_t offset,
                         std::uintptr_t address, std::uint64_t nbytes, nb::object keep,
                         const TicketHandle* after, bool checksum, std::optional<std::uint32_t> expected) {
  return submit_transfer(Direction::read, self, file, offset, address, nbytes, std::move(keep), after,
                         checksum, expected);
}

TicketHandle submit_write(const EngineHandle& self, const FileHandle& file, std::uint64_t offset,
                          std::uintptr_t address, std::uint64_t nbytes, nb::object keep,
                          const TicketHandle* after, bool checksum) {
  return submit_transfer(Direction::write, self, file, offset, address, nbytes, std::move(keep), after,
                         checksum, std::nullopt);
}

void check_ticket(const TicketHandle& self, const char* op) {
  const Ticket& ticket = *self.ticket;
  if (!ticket.is_usable()) throw IoError(op, "", 0, ticket.nbytes(), 0, "used in a forked child");
}

bool wait_ticket(TicketHandle& self, std::optional<double> timeout_s) {
  Ticket& ticket = *self.ticket;
  if (!ticket.finished()) {
    check_ticket(self, "wait");
    const auto attempt = [&](Clock::duration patience) { return ticket.wait_for(patience); };
    if (!wait_in_slices(attempt, timeout_s)) return false;
  }
  self.is_over();
  if (ticket.error()) throw IoError(*ticket.error());
  return true;
}

nb::object ticket_error(const TicketHandle& self) {
  if (!self.ticket->finished() || !self.ticket->error()) return nb::none();
  return to_python_error(*self.ticket->error());
}

nb::object ticket_exception(TicketHandle& self, std::optional<double> timeout_s) {
  try {
    if (wait_ticket(self, timeout_s)) return nb::none();
  } catch (const IoError&) {
    if (!self.ticket->finished()) throw;  // a forked child
    return ticket_error(self);
  }
  PyErr_SetString(PyExc_TimeoutError, "the transfer is still under way");
  throw nb::python_error();
}

std::uint32_t ticket_crc32(const TicketHandle& self) {
  const Ticket& ticket = *self.ticket;
  if (!ticket.has_checksum()) throw nb::value_error("no checksum was requested (checksum=True)");
  if (!ticket.finished()) throw nb::value_error("not finished yet: wait() first");
  if (ticket.error()) throw IoError(*ticket.error());
  return ticket.crc32();
}

EngineOptions engine_options(const std::string& backend, std::uint32_t depth, std::uint64_t piece_bytes,
                             const ArenaHandle* arena, std::uint64_t staging_bytes, bool stage,
                             const std::optional<std::map<std::string, double>>& chaos, bool debug) {
  return {.backend = backend,
          .depth = depth,
          .piece_bytes = piece_bytes,
          .arena = arena == nullptr ? nullptr : arena->get("engine"),
          .staging_bytes = staging_bytes,
          .stage = stage,
          .chaos = chaos ? std::optional(parse_chaos(*chaos)) : std::nullopt,
          .debug = debug};
}

}  // namespace

// In a forked child, somebody may have been waiting on the ticket at the fork, and the destructor of its
// condition variable would wait for them: leak it there.
TicketHandle::~TicketHandle() {
  if (!ticket) return;
  if (!ticket->is_usable()) {
    static_cast<void>(new std::shared_ptr<Ticket>(std::move(ticket)));
  } else if (keep && !ticket->finished()) {
    kept().push_back({.ticket = std::move(ticket), .owner = std::move(keep)});
  }
}

void bind_engine(nb::module_& module) {
  nb::class_<TicketHandle>(module, "Ticket")
      .def_prop_ro("done", &TicketHandle::is_over)
      .def_prop_ro("nbytes", [](const TicketHandle& self) { return self.ticket->nbytes(); })
      .def_prop_ro("crc32", &ticket_crc32)
      .def_prop_ro("error", &ticket_error)
      .def_prop_ro("submitted_s", [](const TicketHandle& self) { return seconds(self.ticket->submitted()); })
      .def_prop_ro("completed_s",
                   [](const TicketHandle& self) {
                     if (!self.ticket->finished()) throw nb::value_error("not finished yet: wait() first");
                     return seconds(self.ticket->completed());
                   })
      .def("wait", &wait_ticket, "timeout_s"_a = nb::none())
      .def("exception", &ticket_exception, "timeout_s"_a = nb::none())
      .def_prop_ro("cancelled", [](const TicketHandle& self) { return self.ticket->cancelled(); })
      .def("cancel",
           [](const TicketHandle& self) {
             check_ticket(self, "cancel");
             return self.ticket->cancel();
           })
      .def(
          "notify",
          [](const TicketHandle& self, int fd) {
            check_ticket(self, "notify");
            self.ticket->notify(fd);
          },
          "fd"_a);

  nb::class_<EngineHandle>(module, "Engine")
      .def(
          "__init__",
          [](EngineHandle* self, const std::string& backend, std::uint32_t depth, std::uint64_t piece_bytes,
             const ArenaHandle* arena, std::uint64_t staging_bytes, bool stage,
             const std::optional<std::map<std::string, double>>& chaos, bool debug) {
            const EngineOptions options =
                engine_options(backend, depth, piece_bytes, arena, staging_bytes, stage, chaos, debug);
            const nb::gil_scoped_release released;  // registering the arena takes time
            auto engine = std::make_shared<Engine>(options);
            remember(engine);
            new (self) EngineHandle{std::move(engine)};
          },
          nb::kw_only(), "backend"_a = "auto", "depth"_a = 32, "piece_bytes"_a = std::uint64_t{1} << 20,
          "arena"_a = nb::none(), "staging_bytes"_a = std::uint64_t{32} << 20, "stage"_a = false,
          "chaos"_a = nb::none(), "debug"_a = false)
      .def_prop_ro("staging_bytes", [](const EngineHandle& self) { return self.engine->staging_bytes(); })
      .def_prop_ro("backend", [](const EngineHandle& self) { return self.engine->backend(); })
      .def_prop_ro("reason", [](const EngineHandle& self) { return self.engine->reason(); })
      .def_prop_ro("depth", [](const EngineHandle& self) { return self.engine->depth(); })
      .def_prop_ro("piece_bytes", [](const EngineHandle& self) { return self.engine->piece_bytes(); })
      .def("read", &submit_read, "file"_a, "offset"_a, "address"_a, "nbytes"_a, nb::kw_only(),
           "keep"_a = nb::none(), "after"_a = nb::none(), "checksum"_a = false, "expected"_a = nb::none())
      .def("write", &submit_write, "file"_a, "offset"_a, "address"_a, "nbytes"_a, nb::kw_only(),
           "keep"_a = nb::none(), "after"_a = nb::none(), "checksum"_a = false)
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
             release_kept();
           })
      .def("close", [](const EngineHandle& self) {
        self.engine->check_process("close");
        close_engine(*self.engine);
      });

  if (!is_off("atexit")) {
    nb::module_::import_("atexit").attr("register")(nb::cpp_function(&close_live_engines));
  }
}

}  // namespace swapper
