// Runs the real scheduler on a simulated drive: results arrive in any order, short, interrupted or as errors,
// from a seed. The drive checks what is submitted; the tests check tickets and bytes. Owns a temporary file,
// which is only needed for its path.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include "base/crc32.h"
#include "io/scheduler.h"
#include "tests/testing.h"

namespace swapper {
namespace {

class SimulatedDrive final : public Backend {
 public:
  SimulatedDrive(std::uint32_t seed, std::uint32_t depth) : random_(seed), depth_(depth) {}

  std::string describe() const override { return "simulated"; }
  void wake() noexcept override {}

  static Direction direction_of(const Transfer& transfer) {
    return transfer.command == Command::read ? Direction::read : Direction::write;
  }

  void submit(const Transfer& transfer) override {
    EXPECT(transfer.nbytes > 0);
    EXPECT(transfer.offset + transfer.nbytes <= content.size());
    queue_.push_back(transfer);
    ++in_flight[static_cast<std::size_t>(index_of(direction_of(transfer)))];
    EXPECT(queue_.size() <= depth_);
    most_shared = std::max(most_shared, std::min(in_flight[0], in_flight[1]));
    started.push_back(transfer);
  }

  std::size_t reap(std::span<Completion> results, bool) override {
    if (queue_.empty() || results.empty()) return 0;
    const auto chosen =
        queue_.begin() + static_cast<std::ptrdiff_t>(in_order ? 0 : random_() % queue_.size());
    const Transfer transfer = *chosen;
    queue_.erase(chosen);
    --in_flight[static_cast<std::size_t>(index_of(direction_of(transfer)))];
    results[0] = {.slot = transfer.slot, .result = perform(transfer)};
    return 1;
  }

  std::vector<std::byte> content = std::vector<std::byte>(1 << 20);
  std::array<std::size_t, kDirections> in_flight{};
  std::size_t most_shared = 0;
  std::vector<Transfer> started;
  bool in_order = false;
  std::uint32_t fault_percent = 0;
  std::uint64_t broken_offset = ~std::uint64_t{0};  // transfers that touch it fail

 private:
  std::int64_t perform(const Transfer& transfer) {
    if (transfer.command == Command::flush) return random_() % 100 < fault_percent ? -EINTR : 0;
    if (transfer.offset <= broken_offset && broken_offset < transfer.offset + transfer.nbytes) return -EIO;
    std::uint32_t nbytes = transfer.nbytes;
    if (random_() % 100 < fault_percent) {
      if (random_() % 2) return random_() % 2 ? -EINTR : -EAGAIN;
      nbytes = 1 + random_() % nbytes;
    }
    std::byte* place = content.data() + transfer.offset;
    if (transfer.command == Command::read) {
      std::memcpy(transfer.address, place, nbytes);
    } else {
      std::memcpy(place, transfer.address, nbytes);
    }
    return nbytes;
  }

  std::mt19937 random_;
  std::uint32_t depth_;
  std::vector<Transfer> queue_;
};

// A scheduler with everything around it, driven by hand.
struct Rig {
  Rig(std::uint32_t seed, std::uint32_t depth)
      : drive(seed, depth),
        staging({.slot_bytes = kSlotUnitBytes, .slots = 2}, drive, staging_bytes),
        scheduler(drive, inbox, totals, staging, depth),
        random(seed) {
    char path[] = "/tmp/swapper-test-XXXXXX";
    const int fd = ::mkstemp(path);
    ::close(fd);
    FileOptions options;
    options.direct = false;
    file = std::make_shared<File>(path, options);
    ::unlink(path);
    for (auto& byte : memory) byte = static_cast<std::byte>(random());
  }

  std::shared_ptr<Ticket> push(Direction direction, std::uint64_t offset, std::uint64_t nbytes,
                               std::shared_ptr<Ticket> after = nullptr) {
    Request request{.direction = direction,
                    .file = file,
                    .offset = offset,
                    .address = memory.data() + offset,
                    .nbytes = nbytes,
                    .checksum = true,
                    .after = std::move(after)};
    auto ticket = std::make_shared<Ticket>(nbytes, true);
    const auto address = reinterpret_cast<std::uint64_t>(request.address);
    const Plan plan = make_plan(direction, offset, address, nbytes, demands,
                                {.plain = 4096, .staged = kSlotUnitBytes}, stage);
    const auto op = std::make_shared<Op>(std::move(request), ticket, plan);
    ticket->attach(inbox, op);
    EXPECT(inbox->push(op, Clock::duration::zero()) == Inbox::Push::taken);
    return ticket;
  }

  void step() {
    std::vector<std::shared_ptr<Op>> ops;
    inbox->take(ops);
    scheduler.accept(ops);
    scheduler.fill();
    std::array<Completion, 4> completions;
    scheduler.complete(std::span(completions).first(drive.reap(completions, false)));
    scheduler.work();
  }

  void run() {
    for (int n = 0; inbox->in_flight() > 0 && n < 1'000'000; ++n) step();
    EXPECT(inbox->in_flight() == 0);
  }

  SimulatedDrive drive;
  std::shared_ptr<Inbox> inbox = std::make_shared<Inbox>(1 << 20);
  Totals totals{};
  std::atomic<std::uint64_t> staging_bytes{0};
  Staging staging;
  Scheduler scheduler;
  std::mt19937 random;
  std::shared_ptr<File> file;
  Demands demands;  // as if the file were direct
  bool stage = false;
  std::vector<std::byte> memory = std::vector<std::byte>(1 << 20);
};

TEST(bytes_arrive_whatever_the_drive_does) {
  for (std::uint32_t seed = 0; seed < 200; ++seed) {
    Rig rig(seed, 1 + seed % 9);
    rig.drive.fault_percent = seed % 60;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (std::uint64_t n = 0; n < 16; ++n) {
      const auto begin = n << 16, nbytes = std::uint64_t{1} + rig.random() % (1 << 16);
      const auto direction = n % 2 ? Direction::read : Direction::write;
      const bool chained = !tickets.empty() && rig.random() % 3 == 0;
      tickets.push_back(rig.push(direction, begin, nbytes, chained ? tickets.back() : nullptr));
    }
    rig.run();
    std::uint64_t total = 0;
    for (std::uint64_t n = 0; n < 16; ++n) {
      const auto begin = n << 16, nbytes = tickets[n]->nbytes();
      EXPECT(tickets[n]->finished() && !tickets[n]->error());
      EXPECT(std::memcmp(&rig.memory[begin], &rig.drive.content[begin], nbytes) == 0);
      EXPECT(tickets[n]->crc32() == crc32(&rig.memory[begin], nbytes));
      total += nbytes;
    }
    EXPECT(rig.totals[0] + rig.totals[1] == total);
  }
}

TEST(the_depth_is_shared_while_there_is_work_both_ways) {
  Rig rig(1, 8);
  rig.drive.in_order = true;
  for (int n = 0; n < 4; ++n) rig.push(Direction::read, 0, 1 << 18);
  rig.step();
  EXPECT(rig.drive.in_flight[0] == 7 || rig.drive.in_flight[0] == 8);  // alone it has all
  rig.push(Direction::write, 1 << 19, 1 << 18);
  for (int n = 0; n < 8; ++n) rig.step();
  for (int n = 0; n < 40; ++n) {
    rig.step();
    EXPECT(rig.drive.in_flight[0] <= 4 && rig.drive.in_flight[1] <= 4);
    EXPECT(rig.drive.in_flight[0] >= 3 && rig.drive.in_flight[1] >= 3);
  }
  rig.run();
}

TEST(after_a_rest_4_MiB_are_in_flight_until_24_are_through) {
  Rig rig(5, 4096);
  for (int round = 0; round < 2; ++round) {
    for (int n = 0; n < 48; ++n) rig.push(Direction::read, 0, 1 << 20);
    for (int n = 0; n < 6144; ++n) {
      rig.step();
      EXPECT(rig.drive.in_flight[0] == 1024 - 1);
    }
    rig.step();
    EXPECT(rig.drive.in_flight[0] == 4096 - 1);
    rig.run();
  }
}

TEST(pieces_of_one_direction_go_in_the_order_of_submission) {
  Rig rig(2, 4);
  for (std::uint64_t n = 0; n < 8; ++n) rig.push(Direction::read, n << 14, 1 << 14);
  rig.run();
  EXPECT(std::is_sorted(rig.drive.started.begin(), rig.drive.started.end(),
                        [](const Transfer& a, const Transfer& b) { return a.offset < b.offset; }));
}

TEST(after_a_failure_nothing_more_is_handed_over_and_followers_are_cancelled) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Rig rig(seed, 1 + seed % 7);
    rig.drive.broken_offset = 5 * 4096 + 17;
    const auto failing = rig.push(Direction::write, 0, 1 << 18);
    const auto follower = rig.push(Direction::write, 1 << 19, 1 << 16, failing);
    const auto bystander = rig.push(Direction::write, 3 << 18, 1 << 16);
    rig.run();
    EXPECT(failing->error() && failing->error()->code == EIO && failing->error()->offset == 5 * 4096);
    EXPECT(failing->error()->nbytes == 1 << 18 && failing->error()->op == "write");
    EXPECT(follower->error() && follower->error()->code == 0);
    EXPECT(!bystander->error());
    const auto handed = std::count_if(rig.drive.started.begin(), rig.drive.started.end(),
                                      [](const Transfer& each) { return each.offset < 1 << 18; });
    EXPECT(handed < 64);
    for (const Transfer& each : rig.drive.started) EXPECT(each.offset < 1 << 19 || each.offset >= 3 << 18);
  }
}

TEST(abandoned_operations_fail_and_those_in_flight_are_waited_for) {
  Rig rig(3, 4);
  const auto first = rig.push(Direction::write, 0, 1 << 18);
  const auto second = rig.push(Direction::read, 1 << 18, 1 << 18);
  const auto third = rig.push(Direction::read, 1 << 18, 4096, second);
  rig.step();
  EXPECT(!first->finished());
  rig.scheduler.abandon();
  rig.run();
  EXPECT(first->error() && second->error() && third->error());
  EXPECT(rig.drive.in_flight[0] == 0 && rig.drive.in_flight[1] == 0);
}

TEST(staged_bytes_arrive_whatever_the_drive_does) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Rig rig(seed, 1 + seed % 9);
    rig.stage = true;
    rig.drive.fault_percent = seed % 60;
    std::vector<std::shared_ptr<Ticket>> tickets;
    for (std::uint64_t n = 0; n < 8; ++n) {
      const auto nbytes = std::uint64_t{1} + rig.random() % (1 << 17);
      tickets.push_back(rig.push(Direction::read, n << 17, nbytes));
    }
    rig.run();
    for (std::uint64_t n = 0; n < 8; ++n) {
      EXPECT(!tickets[n]->error());
      EXPECT(std::memcmp(&rig.memory[n << 17], &rig.drive.content[n << 17], tickets[n]->nbytes()) == 0);
      EXPECT(tickets[n]->crc32() == crc32(&rig.memory[n << 17], tickets[n]->nbytes()));
    }
    EXPECT(rig.staging_bytes == 2 * kSlotUnitBytes);
    EXPECT(rig.staging.has_free());
  }
}

TEST(an_edge_is_flushed_once_it_is_written) {
  for (std::uint32_t seed = 0; seed < 100; ++seed) {
    Rig rig(seed, 1 + seed % 9);
    rig.demands = {.sector = 512, .granule = 4096, .memory = 512};
    rig.drive.fault_percent = seed % 60;
    const auto ticket = rig.push(Direction::write, 5000, 50'000);
    rig.run();
    EXPECT(ticket->finished() && !ticket->error());
    EXPECT(std::memcmp(&rig.memory[5000], &rig.drive.content[5000], 50'000) == 0);
    std::vector<std::uint64_t> flushed;
    for (const Transfer& each : rig.drive.started) {
      if (each.command == Command::flush) flushed.push_back(each.offset);
    }
    std::sort(flushed.begin(), flushed.end());
    flushed.erase(std::unique(flushed.begin(), flushed.end()), flushed.end());
    EXPECT((flushed == std::vector<std::uint64_t>{4096, 53'248}));
    EXPECT(rig.totals[1] == 50'000);
  }
}

TEST(a_piece_makes_no_move_but_those_of_the_table) {
  using enum PieceState;
  const auto try_move = [](PieceState from, PieceState to) {
    return testing::last_words([&] { move_to(from, to); });
  };
  EXPECT(try_move(copying_out, idle).empty());
  EXPECT(try_move(copying_out, transferring) ==
         "swapper: broken invariant: a piece: copying_out -> transferring is not a legal move\n");
  EXPECT(!is_legal(idle, transferring) && !is_legal(copying_in, copying_out) && !is_legal(flushing, placing));
}

TEST(a_second_result_for_a_piece_ends_the_process) {
  Rig rig(6, 4);
  rig.stage = true;
  rig.push(Direction::read, 0, 4096);
  std::vector<std::shared_ptr<Op>> ops;
  rig.inbox->take(ops);
  rig.scheduler.accept(ops);
  rig.scheduler.fill();
  std::array<Completion, 1> result;
  rig.scheduler.complete(std::span(result).first(rig.drive.reap(result, false)));
  EXPECT(testing::last_words([&] { rig.scheduler.complete(result); }).find("a result for no transfer") !=
         std::string::npos);
  rig.run();
}

TEST(operations_are_called_off_before_they_begin_and_not_after) {
  Rig rig(4, 1);
  const auto first = rig.push(Direction::read, 0, 1 << 16);
  const auto second = rig.push(Direction::read, 1 << 16, 1 << 16);
  const auto behind = rig.push(Direction::read, 2 << 16, 1 << 16, first);
  const auto follower = rig.push(Direction::write, 3 << 16, 1 << 16, behind);
  rig.step();
  EXPECT(!first->cancel() && second->cancel() && behind->cancel() && second->cancel());
  rig.step();
  EXPECT(second->finished() && behind->finished() && !first->finished());
  rig.run();
  EXPECT(!first->error() && !first->cancelled() && !first->cancel());
  EXPECT(second->error() && behind->error() && behind->cancelled());
  EXPECT(follower->error() && !follower->cancelled());
  EXPECT(rig.totals[0] == 1 << 16 && rig.totals[1] == 0);
}

}  // namespace
}  // namespace swapper
