// Tests the filling of absent pages of files in memory: what it fills is right, and the rest is untouched.
// Owns nothing.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <vector>

#include "base/align.h"
#include "base/fd.h"
#include "io/filler.h"
#include "tests/testing.h"

namespace swapper {
namespace {

constexpr std::uint64_t kBytes = 100 * kPageBytes;

UniqueFd file_in_memory(std::uint64_t nbytes) {
  UniqueFd fd(::memfd_create("filled", MFD_CLOEXEC));
  EXPECT(fd && ::ftruncate(fd.get(), static_cast<off_t>(nbytes)) == 0);
  return fd;
}

std::vector<std::byte> noise(std::uint64_t nbytes, unsigned seed) {
  std::vector<std::byte> bytes(nbytes);
  for (std::uint64_t n = 0; n < nbytes; ++n) bytes[n] = static_cast<std::byte>(n * 131 + n / 4096 + seed);
  return bytes;
}

std::vector<std::byte> content(int fd, std::uint64_t nbytes) {
  std::vector<std::byte> bytes(nbytes);
  EXPECT(::pread(fd, bytes.data(), nbytes, 0) == static_cast<ssize_t>(nbytes));
  return bytes;
}

bool is_permitted() {
  const bool permitted = Filler().is_permitted();
  if (!permitted) std::fprintf(stderr, "not run: userfaultfd is refused here\n");
  return permitted;
}

TEST(absent_pages_are_filled_from_any_address) {
  if (!is_permitted()) return;
  Filler filler;
  for (const std::uint64_t shift : {0, 1, 64, 4095}) {
    const UniqueFd file = file_in_memory(kBytes);
    const auto data = noise(kBytes + shift, 7);
    EXPECT(filler.fill(file.get(), 0, data.data() + shift, kBytes) == kBytes);
    EXPECT(content(file.get(), kBytes) ==
           std::vector<std::byte>(data.begin() + static_cast<long>(shift), data.end()));
  }
}

TEST(only_whole_pages_are_filled) {
  if (!is_permitted()) return;
  Filler filler;
  const UniqueFd file = file_in_memory(kBytes);
  const auto data = noise(kBytes, 3);
  EXPECT(filler.fill(file.get(), 10 * kPageBytes, data.data(), 40 * kPageBytes + 5) == 40 * kPageBytes);
  std::vector<std::byte> expected(kBytes);
  std::copy_n(data.begin(), 40 * kPageBytes, expected.begin() + 10 * kPageBytes);
  EXPECT(content(file.get(), kBytes) == expected);
  EXPECT(filler.fill(file.get(), 1, data.data(), 40 * kPageBytes) == 0);
  EXPECT(content(file.get(), kBytes) == expected);
}

TEST(pages_that_are_there_stay) {
  if (!is_permitted()) return;
  Filler filler;
  const UniqueFd file = file_in_memory(kBytes);
  const auto old_page = noise(kPageBytes, 1), data = noise(kBytes, 2);
  EXPECT(::pwrite(file.get(), old_page.data(), kPageBytes, 50 * kPageBytes) == kPageBytes);
  const std::uint64_t filled = filler.fill(file.get(), 0, data.data(), kBytes);
  EXPECT(filled <= 50 * kPageBytes);
  std::vector<std::byte> expected(kBytes);
  std::copy_n(data.begin(), filled, expected.begin());
  std::copy_n(old_page.begin(), kPageBytes, expected.begin() + 50 * kPageBytes);
  EXPECT(content(file.get(), kBytes) == expected);
}

TEST(a_file_that_is_too_short_is_left_alone) {
  Filler filler;
  const UniqueFd file = file_in_memory(0);
  const auto data = noise(kBytes, 2);
  EXPECT(filler.fill(file.get(), 0, data.data(), kBytes) == 0);
  EXPECT(::lseek(file.get(), 0, SEEK_END) == 0);
}

TEST(what_is_no_file_in_memory_is_left_alone) {
  Filler filler;
  char name[] = "/var/tmp/swapper-filler-XXXXXX";
  const UniqueFd file(::mkstemp(name));
  EXPECT(file && ::unlink(name) == 0 && ::ftruncate(file.get(), kBytes) == 0);
  const auto data = noise(kBytes, 2);
  EXPECT(filler.fill(file.get(), 0, data.data(), kBytes) == 0);
  EXPECT(filler.fill(-1, 0, data.data(), kBytes) == 0);
  EXPECT(content(file.get(), kBytes) == std::vector<std::byte>(kBytes));
}

}  // namespace
}  // namespace swapper
