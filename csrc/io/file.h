// An open file as the engine sees it: a descriptor, whether it is direct, and the alignment that direct
// transfers need. Open decides once whether it is direct, and keeps the reason for the user. A direct file
// gets a second, buffered descriptor at the first write with an edge ([Note: three ways] in plan.h). The
// Python handle and every operation in flight share the file, so that closing the handle never closes a
// descriptor in use. Owns the descriptors.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <string>

#include "base/fd.h"
#include "io/plan.h"

namespace swapper {

// The identity of a file, whatever descriptor or name leads to it.
struct FileIdentity {
  dev_t device = 0;
  ino_t inode = 0;
  bool operator==(const FileIdentity&) const = default;
};

struct FileOptions {
  bool create = false;  // O_CREAT | O_EXCL, mode 0600
  bool read_only = false;
  std::optional<bool> direct;  // none: try, and fall back to buffered
  int at = -1;  // a directory's descriptor: open the last part of the path in it; links are refused
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

  // True if the kernel copies, on whatever thread submits: the file is buffered, or lies in memory.
  bool is_copied() const { return !direct_ || in_memory_; }
  bool in_memory() const { return in_memory_; }

  std::uint32_t granule() const { return granule_; }  // of direct writes, if direct
  Demands demands() const;                            // on transfers by the descriptor `fd`
  const FileIdentity& identity() const { return identity_; }

  // The buffered descriptor. Requires ready_edges first. Throws IoError.
  void ready_edges();
  int edge_fd() const { return edge_fd_.get(); }

  std::uint64_t nbytes() const;
  void allocate(std::uint64_t nbytes, std::uint64_t offset = 0);  // reserves space for a range of the file
  void truncate(std::uint64_t nbytes);
  void sync();

 private:
  void identify();
  void choose_direct(std::optional<bool> wish);
  std::string refusal_of_direct();
  void choose_granule();

  std::string path_;
  bool read_only_;
  UniqueFd fd_;
  bool direct_ = false;
  bool in_memory_ = false;
  std::string reason_;
  std::uint32_t alignment_ = 4096;
  std::uint32_t memory_alignment_ = 4096;
  std::uint32_t granule_ = 4096;
  FileIdentity identity_;
  std::once_flag edges_once_;
  UniqueFd edge_fd_;
};

}  // namespace swapper
