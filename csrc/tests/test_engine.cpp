// The engine with its threads, mainly so that the thread sanitizer sees them: several submitters, chains
// across engines, waiting, draining and closing at the same time. Owns a temporary file.
#include <unistd.h>

#include <thread>
#include <vector>

#include "io/engine.h"
#include "tests/testing.h"

namespace swapper {
namespace {

std::shared_ptr<File> scratch_file(std::uint64_t nbytes) {
  char path[] = "/tmp/swapper-test-XXXXXX";
  const int fd = ::mkstemp(path);
  ::close(fd);
  FileOptions options;
  options.direct = false;
  auto file = std::make_shared<File>(path, options);
  ::unlink(path);
  file->truncate(nbytes);
  return file;
}

void submit_many(Engine& engine, Engine& other, const std::shared_ptr<File>& file, std::byte* memory) {
  std::shared_ptr<Ticket> last;
  for (std::uint64_t n = 0; n < 300; ++n) {
    const auto direction = n % 3 ? Direction::read : Direction::write;
    const auto op =
        (n % 2 ? engine : other).prepare({direction, file, n % 8 * 4096, memory, 3 * 4096, true, last});
    last = op->ticket;
    while (!(n % 2 ? engine : other).enqueue(op, std::chrono::milliseconds(1))) continue;
  }
  while (!last->wait_for(std::chrono::milliseconds(10))) continue;
  EXPECT(!last->error());
}

TEST(engines_serve_many_threads) {
  for (const char* backend : {"uring", "threads"}) {
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
      threads.emplace_back([&] { one.wait_until_drained(std::chrono::milliseconds(5)); });
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

TEST(an_arena_is_populated_by_several_threads) {
  ArenaOptions options;
  options.nbytes = std::uint64_t{300} << 20;
  const Arena arena(options);
  EXPECT(arena.nbytes() == options.nbytes);
  EXPECT(arena.address()[arena.nbytes() - 1] == std::byte{0});
}

}  // namespace
}  // namespace swapper
