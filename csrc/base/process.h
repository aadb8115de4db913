// Handles forks, signals and SWAPPER_OFF. A forked child (a DataLoader worker) has copies of our objects but
// not our threads, and not the memory marked MADV_DONTFORK: destroying those objects there would join a
// thread that does not exist, or unmap memory of another owner. `Creator` remembers which process made an
// object, so that its destructor can leak instead. `SignalsBlocked` keeps signals away from threads started
// in its scope: Python handles them. `is_off` tells which changes of the process are switched off.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <string_view>

namespace swapper {

// True if SWAPPER_OFF in the environment names this change of the process, to switch it off.
// swapper/runtime/process.py lists the words, and refuses others.
inline bool is_off(std::string_view change) {
  static const std::string said = [] {
    const char* value = std::getenv("SWAPPER_OFF");
    return std::string(",") + (value == nullptr ? "" : value) + ",";
  }();
  constexpr std::string_view kBetween = ", \t\n";
  for (std::size_t at = said.find(change); at != std::string::npos; at = said.find(change, at + 1)) {
    const char before = said[at - 1], after = said[at + change.size()];
    if (kBetween.find(before) != kBetween.npos && kBetween.find(after) != kBetween.npos) return true;
  }
  return false;
}

class Creator {
 public:
  bool is_this_process() const { return ::getpid() == pid_; }

 private:
  pid_t pid_ = ::getpid();
};

class [[nodiscard]] SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    // What an instruction causes is of its own thread, and kills the process where it is blocked.
    for (const int caused : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, caused);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace swapper
