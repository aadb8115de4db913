// Compiles the arithmetic of the codecs for what every processor of the architecture has: SSE2, or NEON;
// CMakeLists.txt has the options. Owns nothing.
#include "codecs/arithmetic.h"

namespace swapper {

extern const Kernels kBaselineKernels = kernels_of("baseline");

}  // namespace swapper
