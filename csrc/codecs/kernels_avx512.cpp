// Compiles the arithmetic of the codecs for AVX-512 (F, BW, DQ, VL); CMakeLists.txt has the options. Owns
// nothing.
#include "codecs/arithmetic.h"

namespace swapper {

#if defined(__x86_64__)
extern const Kernels kAvx512Kernels = kernels_of("avx512");
#endif

}  // namespace swapper
