// The two errors that the data plane raises. `IoError` says which transfer failed and why; it mirrors
// swapper.errors.IoError field by field, and bindings/module.cpp translates it. A ticket stores it as a
// value. `ConfigError` is for options that cannot be met.
#pragma once

#include <cerrno>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>

namespace swapper {

// A thread-safe strerror.
[[nodiscard]] inline std::string errno_text(int code) {
  return std::generic_category().message(code);
}

struct IoError : std::exception {
  IoError(std::string op_, std::string path_, std::uint64_t offset_, std::uint64_t nbytes_, int code_,
          std::string detail_ = "")
      : op(std::move(op_)),
        path(std::move(path_)),
        offset(offset_),
        nbytes(nbytes_),
        code(code_),
        detail(std::move(detail_)) {}

  const char* what() const noexcept override { return detail.c_str(); }

  std::string op;
  std::string path;
  std::uint64_t offset;
  std::uint64_t nbytes;
  int code;  // errno; 0 for an unexpected end of file or a cancelled operation
  std::string detail;
};

struct ConfigError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

}  // namespace swapper
