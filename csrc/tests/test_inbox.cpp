// Tests that the inbox wakes the I/O thread only for operations that can begin or that change waiting ones.
// Owns nothing.
#include <memory>
#include <utility>

#include "io/inbox.h"
#include "tests/testing.h"

namespace swapper {
namespace {

constexpr auto kNow = Clock::duration::zero();

std::shared_ptr<Op> some_op() {
  return std::make_shared<Op>(Request{}, std::make_shared<Ticket>(0, false), Plan{});
}

struct Rung {
  Inbox inbox{8};
  int count = 0;
  Inbox::Ops ops;

  Rung() {
    inbox.set_bell([this] { ++count; });
  }

  // What the I/O thread does before it sleeps.
  bool sleeps(bool full) {
    inbox.take(ops);
    return inbox.may_sleep(full);
  }
};

TEST(a_sleeping_thread_is_woken_once_for_what_arrives) {
  Rung rung;
  EXPECT(rung.sleeps(false));
  EXPECT(rung.inbox.push(some_op(), kNow) == Inbox::Push::taken);
  EXPECT(rung.inbox.push(some_op(), kNow) == Inbox::Push::taken);
  EXPECT(rung.count == 1);
  EXPECT(!rung.inbox.may_sleep(false));
  EXPECT(rung.sleeps(false));
  EXPECT(rung.ops.size() == 2);
}

TEST(what_cannot_begin_before_a_result_comes_wakes_nobody) {
  Rung rung;
  EXPECT(rung.sleeps(true));
  EXPECT(rung.inbox.push(some_op(), kNow) == Inbox::Push::taken);
  EXPECT(rung.count == 0);
  EXPECT(!rung.inbox.may_sleep(true));  // it is there all the same
  EXPECT(rung.sleeps(false));
  EXPECT(rung.inbox.push(some_op(), kNow) == Inbox::Push::taken);
  EXPECT(rung.count == 1);
}

TEST(what_is_called_off_released_or_to_end_wakes_a_full_engine_too) {
  for (int way = 0; way < 3; ++way) {
    Rung rung;
    EXPECT(rung.sleeps(true));
    EXPECT(rung.inbox.push(some_op(), kNow) == Inbox::Push::taken);
    if (way == 0) rung.inbox.release(some_op());
    if (way == 1) rung.inbox.abandon();
    if (way == 2) rung.inbox.stop();
    EXPECT(rung.count == 1);
  }
}

}  // namespace
}  // namespace swapper
