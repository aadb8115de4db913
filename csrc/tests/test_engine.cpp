// Tests the engine with its threads, mainly for the thread sanitizer: several submitters, chains across
// engines, waiting, draining and closing at the same time. Owns a temporary file.
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <thread>
#include <vector>

#include "base/error.h"
#include "io/engine.h"
#include "tests/testing.h"

namespace swapper {
namespace {

constexpr const char* kBackends[] = {"uring", "aio", "threads", "chaos:threads", "chaos"};

std::shared_ptr<File> scratch_file(std::uint64_t nbytes, std::optional<bool> direct = false) {
  char path[] = "/tmp/swapper-test-XXXXXX";
  const int fd = ::mkstemp(path);
  ::close(fd);
  FileOptions options;
  options.direct = direct;
  auto file = std::make_shared<File>(path, options);
  ::unlink(path);
  file->truncate(nbytes);
  return file;
}

void submit_many(Engine& engine, Engine& other, const std::shared_ptr<File>& file, std::byte* memory) {
  std::shared_ptr<Ticket> last;
  for (std::uint64_t n = 0; n < 300; ++n) {
    const auto direction = n % 3 ? Direction::read : Direction::write;
    const auto op = (n % 2 ? engine : other)
                        .prepare({.direction = direction,
                                  .file = file,
                                  .offset = n % 8 * 4096,
                                  .address = memory,
                                  .nbytes = 3 * 4096,
                                  .checksum = true,
                                  .after = last});
    last = op->ticket;
    while (!(n % 2 ? engine : other).enqueue(op, std::chrono::milliseconds(1))) continue;
  }
  while (!last->wait_for(std::chrono::milliseconds(10))) continue;
  EXPECT(!last->error());
}

TEST(engines_serve_many_threads) {
  for (const char* backend : kBackends) {
    EngineOptions options;
    options.backend = backend;
    options.piece_bytes = 4096;
    options.depth = 5;
    try {
      Engine one(options), other(options);
      const auto file = scratch_file(1 << 20);
      std::vector<std::byte> memory(4 << 16);
      std::vector<std::thread> threads;
      for (int n = 0; n < 4; ++n) {
        threads.emplace_back([&, n] { submit_many(one, other, file, memory.data() + (n << 16)); });
      }
      threads.emplace_back([&] { static_cast<void>(one.wait_until_drained(std::chrono::milliseconds(5))); });
      for (std::thread& thread : threads) thread.join();
      EXPECT(one.in_flight() == 0 && other.in_flight() == 0);
      std::thread closer([&] { one.close(); });
      one.close();
      closer.join();
    } catch (const ConfigError& refusal) {
      std::printf("  skipped: %s\n", refusal.what());
    }
  }
}

// Each thread writes tensors of odd sizes next to those of other threads, and reads them back.
void write_and_read(Engine& engine, const std::shared_ptr<File>& file, std::uint64_t thread) {
  constexpr std::uint64_t kBytes = 30'011, kThreads = 3;
  std::vector<std::byte> out(kBytes + 1, static_cast<std::byte>(thread + 1)), in(kBytes + 1);
  for (std::uint64_t n = 0; n < 20; ++n) {
    const std::uint64_t offset = (n * kThreads + thread) * kBytes;
    const auto write = engine.prepare({.direction = Direction::write,
                                       .file = file,
                                       .offset = offset,
                                       .address = out.data() + 1,
                                       .nbytes = kBytes,
                                       .checksum = true});
    const Request back{.direction = Direction::read,
                       .file = file,
                       .offset = offset,
                       .address = in.data() + 1,
                       .nbytes = kBytes,
                       .checksum = true,
                       .after = write->ticket};
    const auto read = engine.prepare(back), unwanted = engine.prepare(back);
    const std::shared_ptr<Ticket> ticket = read->ticket, called_off = unwanted->ticket;
    while (!engine.enqueue(write, std::chrono::milliseconds(1))) continue;
    while (!engine.enqueue(unwanted, std::chrono::milliseconds(1))) continue;
    while (!engine.enqueue(read, std::chrono::milliseconds(1))) continue;
    called_off->cancel();
    while (!ticket->wait_for(std::chrono::milliseconds(10))) continue;
    while (!called_off->wait_for(std::chrono::milliseconds(10))) continue;
    EXPECT(!ticket->error() && called_off->cancelled() == called_off->error().has_value());
    EXPECT(std::equal(in.begin() + 1, in.end(), out.begin() + 1));
  }
}

TEST(odd_neighbours_are_served_side_by_side) {
  for (const char* backend : kBackends) {
    EngineOptions options;
    options.backend = backend;
    options.depth = 6;
    options.piece_bytes = 8192;
    try {
      Engine engine(options);
      const auto file = scratch_file(0, std::nullopt);
      std::vector<std::thread> threads;
      for (std::uint64_t n = 0; n < 3; ++n) threads.emplace_back([&, n] { write_and_read(engine, file, n); });
      for (std::thread& thread : threads) thread.join();
      engine.close();
      EXPECT(file->nbytes() == 60 * 30'011);
    } catch (const ConfigError& refusal) {
      std::printf("  skipped: %s\n", refusal.what());
    }
  }
}

TEST(an_arena_is_populated_by_several_threads) {
  ArenaOptions options;
  options.nbytes = std::uint64_t{300} << 20;
  const Arena arena(options);
  EXPECT(arena.nbytes() == options.nbytes);
  EXPECT(arena.address()[arena.nbytes() - 1] == std::byte{0});
}

}  // namespace
}  // namespace swapper
