// Compiles the arithmetic of the codecs for AVX2; CMakeLists.txt has the options. Owns
// nothing.
#include "codecs/arithmetic.h"

namespace swapper {

#if defined(__x86_64__)
extern const Kernels kAvx2Kernels = kernels_of("avx2");
#endif

}  // namespace swapper
