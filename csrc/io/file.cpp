// Opens files and decides whether they are direct. Owns nothing beyond file.h.
#include "io/file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <utility>

#include "base/align.h"
#include "base/error.h"

namespace swapper {
namespace {

// The answer of statx about direct I/O, read by offset from its fixed 256-byte layout, so that building needs
// neither headers nor a C library with STATX_DIOALIGN (Linux 6.1).
struct DirectAlignment {
  bool known = false;
  std::uint32_t memory = 0;
  std::uint32_t offset = 0;  // 0: this file supports no direct I/O
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

bool is_memory(decltype(statfs::f_type) type) {
  return type == TMPFS_MAGIC || type == RAMFS_MAGIC;
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
  // O_NONBLOCK: opening a FIFO to read would wait for a writer.
  int flags = O_CLOEXEC | O_NONBLOCK | (options.read_only ? O_RDONLY : O_RDWR);
  if (options.create) flags |= O_CREAT | O_EXCL;
  const bool is_beneath = options.at >= 0;
  const std::string name = is_beneath ? path_.substr(path_.rfind('/') + 1) : path_;
  if (is_beneath) flags |= O_NOFOLLOW;
  fd_ = UniqueFd(::openat(is_beneath ? options.at : AT_FDCWD, name.c_str(), flags, 0600));
  if (!fd_) throw IoError("open", path_, 0, 0, errno);
  identify();
  choose_direct(options.direct);
  choose_granule();
}

void File::identify() {
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) throw IoError("open", path_, 0, 0, errno);
  if (S_ISDIR(status.st_mode)) throw IoError("open", path_, 0, 0, EISDIR);
  if (!S_ISREG(status.st_mode) && !S_ISBLK(status.st_mode)) {
    throw IoError("open", path_, 0, 0, EINVAL, "neither a regular file nor a block device");
  }
  identity_ = {.device = status.st_dev, .inode = status.st_ino};
  struct statfs filesystem{};
  in_memory_ = ::fstatfs(fd_.get(), &filesystem) == 0 && is_memory(filesystem.f_type);
  // With O_NONBLOCK, io_uring would return EAGAIN instead of waiting.
  const int flags = ::fcntl(fd_.get(), F_GETFL);
  if (flags < 0 || ::fcntl(fd_.get(), F_SETFL, flags & ~O_NONBLOCK) != 0) {
    throw IoError("open", path_, 0, 0, errno);
  }
}

void File::choose_direct(std::optional<bool> wish) {
  if (wish.has_value() && !*wish) {
    reason_ = "buffered: requested";
    return;
  }
  const std::string refusal = refusal_of_direct();
  if (refusal.empty()) {
    direct_ = true;
    reason_ = wish.has_value() ? "direct: requested" : "direct: the filesystem supports it";
  } else if (wish.has_value()) {
    throw IoError("open", path_, 0, 0, EINVAL, refusal);
  } else {
    reason_ = "buffered: " + refusal;
  }
}

// Switches the descriptor to direct and reads the alignments; otherwise returns the reason. The switch comes
// after the open, because open(O_CREAT | O_DIRECT) on a filesystem that refuses leaves the new file behind.
std::string File::refusal_of_direct() {
  const DirectAlignment alignment = ask_alignment(fd_.get());
  if (alignment.known && alignment.offset == 0) return "the filesystem supports no direct I/O on this file";
  if (alignment.known && alignment.offset > kSlotUnitBytes) {
    return "direct I/O on this file needs multiples of " + std::to_string(alignment.offset);
  }
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

// The unit in which the page cache writes back: whole pages, or whole blocks of the filesystem.
void File::choose_granule() {
  struct statvfs filesystem{};
  std::uint64_t block = ::fstatvfs(fd_.get(), &filesystem) == 0 ? filesystem.f_frsize : kPageBytes;
  block = std::min<std::uint64_t>(std::bit_ceil(block), kSlotUnitBytes);
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  granule_ = static_cast<std::uint32_t>(std::max({block, page, std::uint64_t{alignment_}}));
}

Demands File::demands() const {
  if (!direct_) return {};
  return {.sector = alignment_, .granule = granule_, .memory = memory_alignment_};
}

// Opens by way of /proc, which leads to the same file even after its name is gone.
void File::ready_edges() {
  std::call_once(edges_once_, [this] {
    const std::string self = "/proc/self/fd/" + std::to_string(fd_.get());
    UniqueFd fd(::open(self.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd) fd = UniqueFd(::open(path_.c_str(), O_RDWR | O_CLOEXEC));
    if (!fd) throw IoError("open", path_, 0, 0, errno, "a second time, for the edges of writes");
    struct stat status{};
    if (::fstat(fd.get(), &status) != 0) throw IoError("open", path_, 0, 0, errno);
    if (FileIdentity{status.st_dev, status.st_ino} != identity_) {
      throw IoError("open", path_, 0, 0, ESTALE, "the name now belongs to another file");
    }
    edge_fd_ = std::move(fd);
  });
}

std::uint64_t File::nbytes() const {
  struct stat status{};
  if (::fstat(fd_.get(), &status) != 0) throw IoError("stat", path_, 0, 0, errno);
  return static_cast<std::uint64_t>(status.st_size);
}

void File::allocate(std::uint64_t nbytes, std::uint64_t offset) {
  if (nbytes == 0) return;
  if (!in_range(offset, nbytes, std::numeric_limits<off_t>::max())) {
    throw IoError("allocate", path_, offset, nbytes, EFBIG);
  }
  const auto begin = static_cast<off_t>(offset), length = static_cast<off_t>(nbytes);
  if (retry_interrupted([&] { return ::fallocate(fd_.get(), 0, begin, length); }) == 0) return;
  if (errno != EOPNOTSUPP) throw IoError("allocate", path_, offset, nbytes, errno);
  // sets the size at least; the space may still run out later
  if (this->nbytes() < offset + nbytes) truncate(offset + nbytes);
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
