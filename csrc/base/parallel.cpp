#include "base/parallel.h"

#include <dlfcn.h>

#include <system_error>
#include <thread>
#include <vector>

namespace swapper {
namespace {

// Of GNU's libgomp, which Intel's and LLVM's libraries have too: function, its argument, threads, flags.
using OpenMpParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

OpenMpParallel find_openmp() {
  void* torch = dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY);  // never closed, as torch never is
  // Looks in libraries that torch depends on: programs may have several libgomp, each with threads of its
  // own.
  return torch == nullptr ? nullptr : reinterpret_cast<OpenMpParallel>(dlsym(torch, "GOMP_parallel"));
}

void call(void* work) {
  (*static_cast<const std::function<void()>*>(work))();
}

}  // namespace

void run_parallel(std::size_t threads, const std::function<void()>& work) {
  static const OpenMpParallel openmp = find_openmp();
  if (threads <= 1) {
    work();
  } else if (openmp != nullptr) {
    openmp(call, const_cast<std::function<void()>*>(&work), static_cast<unsigned>(threads), 0);
  } else {
    std::vector<std::jthread> others;
    try {
      while (others.size() + 1 < threads) others.emplace_back(work);
    } catch (const std::system_error&) {  // the system refuses one: fewer do it all
    }
    work();
  }
}

}  // namespace swapper
