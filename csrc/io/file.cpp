// Opens files and settles whether they are direct. Owns nothing beyond file.h.
#include "io/file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include <cstring>
#include <utility>

#include "base/error.h"

namespace swapper {
namespace {

// What statx says about direct I/O, read by offset from its fixed 256-byte answer, so that building needs
// neither headers nor a C library that know STATX_DIOALIGN (Linux 6.1).
struct DirectAlignment {
  bool known = false;
  std::uint32_t memory = 0;
  std::uint32_t offset = 0;  // 0: this file takes no direct I/O
};

DirectAlignment ask_alignment(int fd) {
  constexpr unsigned kDioAlign = 0x2000;
  constexpr std::size_t kMemoryAt = 152, kOffsetAt = 156;
  unsigned char answer[256] = {};
  DirectAlignment found;
  if (::syscall(SYS_statx, fd, "", AT_EMPTY_PATH, kDioAlign, answer) != 0) return found;
  std::uint32_t mask = 0;
  std::memcpy(&mask, answer, sizeof mask);
  if ((mask & kDioAlign) == 0) return found;
  found.known = true;
  std::memcpy(&found.memory, answer + kMemoryAt, sizeof found.memory);
  std::memcpy(&found.offset, answer + kOffsetAt, sizeof found.offset);
  return found;
}

template <typename Call>
int retry_interrupted(Call call) {
  int result;
  do {
    result = call();
  } while (result != 0 && errno == EINTR);
  return result;
}

}  // namespace

File::File(std::string path, const FileOptions& options)
    : path_(std::move(path)), read_only_(options.read_only) {
  if (options.create && options.read_only) throw ConfigError("create and read_only exclude each other");
  int flags = O_CLOEXEC | (options.read_only ? O_RDONLY : O_RDWR);
  if (options.create) flags |= O_CREAT | O_EXCL;
  fd_ = UniqueFd(::open(path_.c_str(), flags, 0600));
  if (!fd_) throw IoError("open", path_, 0, 0, errno);
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) throw IoError("open", path_, 0, 0, errno);
  if (S_ISDIR(status.st_mode)) throw IoError("open", path_, 0, 0, EISDIR);
  choose_direct(options.direct);
}

void File::choose_direct(std::optional<bool> wish) {
  if (wish.has_value() && !*wish) {
    reason_ = "buffered: asked for";
    return;
  }
  const std::string refusal = refusal_of_direct();
  if (refusal.empty()) {
    direct_ = true;
    reason_ = wish.has_value() ? "direct: asked for" : "direct: the filesystem takes it";
  } else if (wish.has_value()) {
    throw IoError("open", path_, 0, 0, EINVAL, refusal);
  } else {
    reason_ = "buffered: " + refusal;
  }
}

// Switches the descriptor to direct and learns the alignments; says why not otherwise. The switch comes after
// the open, because open(O_CREAT | O_DIRECT) on a filesystem that refuses leaves the new file behind.
std::string File::refusal_of_direct() {
  const DirectAlignment alignment = ask_alignment(fd_.get());
  if (alignment.known && alignment.offset == 0) return "the filesystem takes no direct I/O on this file";
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd_.get(), F_SETFL, flags | O_DIRECT) != 0) {
    return "the filesystem refuses O_DIRECT: " + errno_text(errno);
  }
  if (alignment.known) {
    alignment_ = alignment.offset;
    memory_alignment_ = alignment.memory;
  }
  return "";
}

std::uint64_t File::nbytes() const {
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) throw IoError("stat", path_, 0, 0, errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void File::allocate(std::uint64_t nbytes) {
  if (nbytes == 0) return;
  const auto length = static_cast<off_t>(nbytes);
  if (retry_interrupted([&] { return ::fallocate(fd_.get(), 0, 0, length); }) == 0) return;
  if (errno != EOPNOTSUPP) throw IoError("allocate", path_, 0, nbytes, errno);
  if (this->nbytes() < nbytes) truncate(nbytes);  // the size at least; the space may still run out later
}

void File::truncate(std::uint64_t nbytes) {
  if (retry_interrupted([&] { return ::ftruncate(fd_.get(), static_cast<off_t>(nbytes)); }) != 0) {
    throw IoError("truncate", path_, 0, nbytes, errno);
  }
}

void File::sync() {
  if (retry_interrupted([&] { return ::fdatasync(fd_.get()); }) != 0)
    throw IoError("sync", path_, 0, 0, errno);
}

}  // namespace swapper
