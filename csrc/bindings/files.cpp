// Binds File to Python. Owns nothing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "bindings/handles.h"
#include "io/file.h"

using namespace nanobind::literals;

namespace swapper {

void bind_file(nb::module_& module) {
  nb::class_<FileHandle>(module, "File")
      .def(
          "__init__",
          [](FileHandle* self, nb::handle path, bool create, bool read_only, std::optional<bool> direct,
             int at) {
            std::string name = from_python_path(path);
            const nb::gil_scoped_release released;
            auto file = std::make_shared<File>(
                name, FileOptions{.create = create, .read_only = read_only, .direct = direct, .at = at});
            new (self) FileHandle{.path = std::move(name), .file = std::move(file)};
          },
          "path"_a, nb::kw_only(), "create"_a = false, "read_only"_a = false, "direct"_a = nb::none(),
          "at"_a = -1)
      .def_prop_ro("path", [](const FileHandle& self) { return to_python_path(self.path); })
      .def_prop_ro("direct", [](const FileHandle& self) { return self.get("direct")->direct(); })
      .def_prop_ro("alignment", [](const FileHandle& self) { return self.get("alignment")->alignment(); })
      .def_prop_ro("memory_alignment",
                   [](const FileHandle& self) { return self.get("memory_alignment")->memory_alignment(); })
      .def_prop_ro("reason", [](const FileHandle& self) { return self.get("reason")->reason(); })
      .def_prop_ro("nbytes", [](const FileHandle& self) { return self.get("stat")->nbytes(); })
      .def(
          "allocate",
          [](const FileHandle& self, std::uint64_t nbytes, std::uint64_t offset) {
            const auto file = self.get("allocate");
            const nb::gil_scoped_release released;
            file->allocate(nbytes, offset);
          },
          "nbytes"_a, nb::kw_only(), "offset"_a = 0)
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

}  // namespace swapper
