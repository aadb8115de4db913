// What torch's libraries name of CUDA's runtime and the stand-in does not have: refused, or of no effect.
// Apart from cudart.cpp, because CUDA's header declares them with other types.
#include <stddef.h>

extern void stand_in_name_kernel(const void* function, const char* name);
extern int stand_in_launch(const void* function, void** arguments, void* stream);

typedef struct {
  unsigned x, y, z;
} Extent;
typedef struct {  // the head of CUDA's cudaLaunchConfig_t
  Extent grid, block;
  size_t shared;
  void* stream;
} Configuration;

enum { NOT_SUPPORTED = 801 };
#define REFUSED(name) \
  int name(void) { return NOT_SUPPORTED; }
#define ACCEPTED(name) \
  int name(void) { return 0; }

REFUSED(cudaDeviceEnablePeerAccess)
REFUSED(cudaDeviceGetDefaultMemPool)
REFUSED(cudaFreeAsync)
REFUSED(cudaGetSymbolAddress)
REFUSED(cudaGraphDebugDotPrint)
REFUSED(cudaGraphDestroy)
REFUSED(cudaGraphExecDestroy)
REFUSED(cudaGraphGetNodes)
REFUSED(cudaGraphInstantiateWithFlags)
REFUSED(cudaGraphLaunch)
REFUSED(cudaGraphNodeGetDependencies)
REFUSED(cudaIpcCloseMemHandle)
REFUSED(cudaIpcGetEventHandle)
REFUSED(cudaIpcGetMemHandle)
REFUSED(cudaIpcOpenEventHandle)
REFUSED(cudaIpcOpenMemHandle)
REFUSED(cudaMallocAsync)
REFUSED(cudaMemPoolGetAttribute)
REFUSED(cudaMemPoolSetAccess)
REFUSED(cudaMemPoolSetAttribute)
REFUSED(cudaMemPoolTrimTo)
REFUSED(cudaMemcpyToSymbol)
REFUSED(cudaFuncGetAttributes)
REFUSED(cudaFuncSetAttribute)
REFUSED(cudaOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags)
REFUSED(cudaStreamBeginCapture)
REFUSED(cudaStreamEndCapture)
ACCEPTED(cudaProfilerStart)
ACCEPTED(cudaProfilerStop)

void** __cudaRegisterFatBinary(void* binary) {
  static void* handle;
  (void)binary;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void** handle) {
  (void)handle;
}
void __cudaUnregisterFatBinary(void** handle) {
  (void)handle;
}
char __cudaInitModule(void** handle) {
  return handle != NULL;
}
void __cudaRegisterFunction(void** handle, const char* function, char* stub, const char* name) {
  (void)handle, (void)stub;
  stand_in_name_kernel(function, name);
}
void __cudaRegisterVar(void) {}

// What a launch as `kernel<<<grid, block, shared, stream>>>()` has in its brackets, on its way to
// cudaLaunchKernel.
static _Thread_local Configuration pushed;
unsigned __cudaPushCallConfiguration(Extent grid, Extent block, size_t shared, void* stream) {
  pushed = (Configuration){grid, block, shared, stream};
  return 0;
}
int __cudaPopCallConfiguration(Extent* grid, Extent* block, size_t* shared, void** stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
  return 0;
}
int __cudaGetKernel(const void** kernel, const void* function) {
  *kernel = function;
  return 0;
}
#define LAUNCH(name)                                                                                         \
  int name(const void* function, Extent grid, Extent block, void** arguments, size_t shared, void* stream) { \
    (void)grid, (void)block, (void)shared;                                                                   \
    return stand_in_launch(function, arguments, stream);                                                     \
  }
LAUNCH(__cudaLaunchKernel)
LAUNCH(cudaLaunchKernel)
LAUNCH(cudaLaunchCooperativeKernel)
int cudaLaunchKernelExC(const Configuration* configuration, const void* function, void** arguments) {
  return stand_in_launch(function, arguments, configuration->stream);
}
