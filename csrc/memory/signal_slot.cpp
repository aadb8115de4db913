// Installs a handler and passes signals on. Owns what was installed before it.
#include "memory/signal_slot.h"

namespace swapper {

void SignalSlot::set_handler(struct sigaction* previous) const {
  struct sigaction action{};
  action.sa_sigaction = handler_;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  sigemptyset(&action.sa_mask);
  ::sigaction(signal_, &action, previous);
}

void SignalSlot::keep_installed() {
  if (is_off_) return;
  if (!is_installed_) set_handler(&previous_);
  is_installed_ = true;
  struct sigaction now{};
  const bool is_reset = ::sigaction(signal_, nullptr, &now) == 0 && (now.sa_flags & SA_SIGINFO) == 0 &&
                        now.sa_handler == SIG_DFL;
  if (is_reset) set_handler(nullptr);
}

void SignalSlot::pass_on(siginfo_t* info, void* context) const {
  if ((previous_.sa_flags & SA_SIGINFO) != 0 && previous_.sa_sigaction != nullptr) {
    previous_.sa_sigaction(signal_, info, context);
  } else if (previous_.sa_handler != SIG_DFL && previous_.sa_handler != SIG_IGN) {
    previous_.sa_handler(signal_);
  } else {
    ::sigaction(signal_, &previous_, nullptr);
  }
}

}  // namespace swapper
