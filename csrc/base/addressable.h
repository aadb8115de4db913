// Under AddressSanitizer, checks that memory handed to the kernel is allocated. A sanitizer sees the accesses
// of instrumented code and of the C library, but not those that the kernel makes for io_uring and libaio: a
// transfer into freed memory would go unnoticed. In any other build this is a no-op. Owns nothing.
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

// Ends the process with the sanitizer's report if a byte of the range is freed or was never allocated.
inline void check_addressable([[maybe_unused]] std::byte* address, [[maybe_unused]] std::uint64_t nbytes) {
#ifdef __SANITIZE_ADDRESS__
  if (void* bad = __asan_region_is_poisoned(address, nbytes)) {
    // An instrumented access: its report names the allocation and the release of the memory.
    static_cast<void>(*static_cast<volatile char*>(bad));
  }
#endif
}

}  // namespace swapper
