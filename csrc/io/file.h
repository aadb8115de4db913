// An open file as the engine sees it: a descriptor, whether it is direct, and the alignment that direct
// transfers need. Which of the two it is, is decided once, at open, and the reason is kept for the user to
// read. Shared by the handle in Python and by every operation in flight, so that closing the handle never
// pulls a descriptor from under the kernel. Owns the descriptor.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "base/fd.h"

namespace swapper {

struct FileOptions {
  bool create = false;  // O_CREAT | O_EXCL, mode 0600
  bool read_only = false;
  std::optional<bool> direct;  // none: try, and fall back to buffered
};

class File {
 public:
  File(std::string path, const FileOptions& options);

  const std::string& path() const { return path_; }
  int fd() const { return fd_.get(); }
  bool direct() const { return direct_; }
  bool read_only() const { return read_only_; }
  const std::string& reason() const { return reason_; }
  std::uint32_t alignment() const { return alignment_; }                // of offsets and lengths, if direct
  std::uint32_t memory_alignment() const { return memory_alignment_; }  // of addresses, if direct

  std::uint64_t nbytes() const;
  void allocate(std::uint64_t nbytes);
  void truncate(std::uint64_t nbytes);
  void sync();

 private:
  void choose_direct(std::optional<bool> wish);
  std::string refusal_of_direct();

  std::string path_;
  bool read_only_;
  UniqueFd fd_;
  bool direct_ = false;
  std::string reason_;
  std::uint32_t alignment_ = 4096;
  std::uint32_t memory_alignment_ = 4096;
};

}  // namespace swapper
