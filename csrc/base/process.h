// Handles forks and signals. A forked child (a DataLoader worker) has copies of our objects but not our
// threads, and not the memory marked MADV_DONTFORK: destroying those objects there would join a thread that
// does not exist, or unmap memory of another owner. `Creator` remembers which process made an object, so that
// its destructor can leak instead. `SignalsBlocked` keeps signals away from threads started in its scope:
// Python handles them.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

namespace swapper {

class Creator {
 public:
  bool is_this_process() const { return ::getpid() == pid_; }

 private:
  pid_t pid_ = ::getpid();
};

class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace swapper
