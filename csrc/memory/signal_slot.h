// One handler of this process for a signal that an instruction causes (SIGSEGV, SIGBUS). What it does not
// serve goes to the handler before it.
#pragma once

#include <signal.h>

namespace swapper {

class SignalSlot {
 public:
  using Handler = void (*)(int, siginfo_t*, void*);

  // `is_off`: it is never installed.
  constexpr SignalSlot(int signal, bool is_off, Handler handler)
      : signal_(signal), is_off_(is_off), handler_(handler) {}

  // Installs it at the first call, and again if somebody has reset the signal: code that saves and restores
  // what Python says of it, where a handler that is not Python's counts as none (Lightning's Trainer). Calls
  // do not overlap.
  void keep_installed();

  // Lets the handler before it have the signal; without one the instruction runs again, and ends the process.
  void pass_on(siginfo_t* info, void* context) const;

 private:
  void set_handler(struct sigaction* previous) const;

  int signal_;
  bool is_off_;
  Handler handler_;
  bool is_installed_ = false;
  struct sigaction previous_{};
};

}  // namespace swapper
