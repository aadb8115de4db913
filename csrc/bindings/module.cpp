// Defines the Python module swapper._C as swapper/_C.pyi declares it. Owns nothing.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "base/crc32.h"
#include "bindings/handles.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace swapper {

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

void translate_errors(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const IoError& error) {
    const nb::object exception = to_python_error(error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  } catch (const ConfigError& error) {
    PyErr_SetString(nb::module_::import_("swapper.errors").attr("ConfigError").ptr(), error.what());
  }
}

namespace {

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
  nb::set_leak_warnings(false);  // tensors in globals may keep views alive to the very end
  nb::register_exception_translator(&translate_errors);
  bind_memory(module);
  bind_file(module);
  bind_engine(module);
  bind_codecs(module);
  bind_signals(module);
  module.def("crc32", &crc32_of_buffer, "buffer"_a, "value"_a = 0);
  module.def("crc32_address", &crc32_of_address, "address"_a, "nbytes"_a, "value"_a = 0);
  module.def("crc32_combine", &crc32_combine, "a"_a, "b"_a, "nbytes_b"_a);
}
