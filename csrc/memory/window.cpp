// Maps and unmaps parts of the arena at a window's addresses. Every mapping is replaced in place with
// MAP_FIXED, never removed first, so that no other thread's mmap can take the addresses in between. Owns
// nothing beyond window.h.
#include "memory/window.h"

#include <sys/mman.h>

#include <cerrno>
#include <string>
#include <utility>

#include "base/align.h"
#include "base/error.h"

#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22  // Linux 5.14
#endif

namespace swapper {
namespace {

IoError map_failure(const char* op, std::uint64_t offset, std::uint64_t nbytes, int code) {
  return IoError(op, "", offset, nbytes, code,
                 code == ENOMEM ? "out of memory, or of mappings (sysctl vm.max_map_count)" : "");
}

}  // namespace

Window::Window(std::shared_ptr<Arena> arena, std::uint64_t nbytes)
    : arena_(std::move(arena)), nbytes_(align_up(nbytes, kPageBytes)) {
  if (nbytes == 0) throw ConfigError("a window needs at least one byte");
  range_ = OwnedRange::reserve(nbytes_);
  advise_transfer_memory(address(), nbytes_, false);
}

Window::~Window() {
  if (creator_.is_this_process()) forget_range(address(), nbytes_);
}

void Window::check_range(std::uint64_t offset, std::uint64_t nbytes) const {
  if (!is_aligned(offset, kPageBytes) || !is_aligned(nbytes, kPageBytes)) {
    throw ConfigError("window offsets and sizes are multiples of 4096, not " + std::to_string(offset) +
                      " and " + std::to_string(nbytes));
  }
  if (!in_range(offset, nbytes, nbytes_)) {
    throw ConfigError(std::to_string(nbytes) + " bytes at " + std::to_string(offset) +
                      " do not fit in a window of " + std::to_string(nbytes_));
  }
}

void Window::check_arena(std::uint64_t arena_offset, std::uint64_t nbytes) const {
  if (!is_aligned(arena_offset, kPageBytes) || !in_range(arena_offset, nbytes, arena_->nbytes())) {
    throw ConfigError(std::to_string(nbytes) + " bytes at " + std::to_string(arena_offset) +
                      " are not a page-aligned part of an arena of " + std::to_string(arena_->nbytes()));
  }
}

bool Window::map(std::uint64_t window_offset, std::uint64_t arena_offset, std::uint64_t nbytes,
                 bool guarded) {
  check_range(window_offset, nbytes);
  check_arena(arena_offset, nbytes);
  if (nbytes == 0) return false;
  std::byte* place = address() + window_offset;
  bool merged = false;
  const Shown memory{.fd = arena_->memfd(),
                     .offset = arena_offset,
                     .address = arena_->address() + arena_offset,
                     .watched = guarded};
  if (const int code = show_range(place, nbytes, memory, merged)) {
    throw map_failure("map", window_offset, nbytes, code);
  }
  advise_transfer_memory(place, nbytes, arena_->huge_pages());
  // Fills the page table now: 0.09 CPU seconds a GB, against 0.30 for single faults. Populating for reads is
  // intended: it maps sixteen pages a fault, writable all the same because nothing tracks writes to a memfd;
  // populating for writes maps single pages (0.23). Old kernels (EINVAL) leave it to the faults.
  if (::madvise(place, nbytes, MADV_POPULATE_READ) != 0 && errno != EINVAL) {
    const int code = errno;
    unmap(window_offset, nbytes);
    throw map_failure("map", window_offset, nbytes, code);
  }
  return merged;
}

void Window::guard(std::uint64_t window_offset, std::uint64_t nbytes) {
  check_range(window_offset, nbytes);
  if (nbytes == 0) return;
  if (const int code = watch_range(address() + window_offset, nbytes)) {
    throw map_failure("mprotect", window_offset, nbytes, code);
  }
}

std::int64_t Window::written_at(std::uint64_t window_offset) const {
  check_range(window_offset, 0);
  const std::byte* first = swapper::written_at(address() + window_offset);
  return first == nullptr ? -1 : first - address();
}

void Window::copy_out(std::uint64_t window_offset, std::uint64_t arena_offset, std::uint64_t nbytes) {
  check_range(window_offset, nbytes);
  forget_range(address() + window_offset, nbytes);
  arena_->copy_out(address() + window_offset, arena_offset, nbytes);
}

bool Window::fill(std::uint64_t window_offset, std::uint64_t nbytes) {
  check_range(window_offset, nbytes);
  const int code = fill_range(address() + window_offset, nbytes);
  if (code != 0 && code != ENODATA) throw map_failure("fill", window_offset, nbytes, code);
  return code == 0;
}

void Window::unmap(std::uint64_t window_offset, std::uint64_t nbytes, Backing backing) {
  hide(window_offset, nbytes, std::move(backing), {});
}

void Window::promise(std::uint64_t window_offset, std::uint64_t nbytes, std::uint64_t arena_offset,
                     std::shared_ptr<std::atomic<Outcome>> write, Backing backing) {
  check_arena(arena_offset, nbytes);
  hide(window_offset, nbytes, std::move(backing),
       {.write = std::move(write), .fd = arena_->memfd(), .offset = arena_offset});
}

void Window::hide(std::uint64_t window_offset, std::uint64_t nbytes, Backing backing, Departing departing) {
  check_range(window_offset, nbytes);
  if (nbytes == 0) return;
  std::byte* place = address() + window_offset;
  if (const int code = hide_range(place, nbytes, std::move(backing), std::move(departing))) {
    throw map_failure("unmap", window_offset, nbytes, code);
  }
  advise_transfer_memory(place, nbytes, false);
}

}  // namespace swapper
