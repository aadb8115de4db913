// Under AddressSanitizer: whether memory that the kernel is to transfer from or into is somebody's. A
// sanitizer sees what instrumented code and the C library touch, and nothing of what the kernel does on its
// own for io_uring and libaio: a transfer into memory that was freed would go unnoticed there, and be found
// when something else breaks. In any other build this is nothing. Owns nothing.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__has_feature)
#if __has_feature(address_sanitizer) && !defined(__SANITIZE_ADDRESS__)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace swapper {

// Ends the process with the sanitizer's report if a byte of the range was freed, or was never given out.
inline void check_addressable([[maybe_unused]] std::byte* address, [[maybe_unused]] std::uint64_t nbytes) {
#ifdef __SANITIZE_ADDRESS__
  if (void* bad = __asan_region_is_poisoned(address, nbytes)) {
    // An access that is instrumented: its report says who took the memory and who freed it.
    static_cast<void>(*static_cast<volatile char*>(bad));
  }
#endif
}

}  // namespace swapper
