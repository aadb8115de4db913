// A stand-in for CUDA's driver library (libcuda.so.1): torch asks it only which devices have a context.
extern int stand_in_has_context(int device);

enum { NOT_SUPPORTED = 801 };
int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = stand_in_has_context(device);
  return 0;
}
int cuDevicePrimaryCtxGetState_v2(int device, unsigned* flags, int* is_active) {
  return cuDevicePrimaryCtxGetState(device, flags, is_active);
}
int cuInit(unsigned flags) {
  return flags;
}
int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

#define REFUSED(name) \
  int name(void) { return NOT_SUPPORTED; }

REFUSED(cuCtxGetCurrent)
REFUSED(cuCtxSetCurrent)
REFUSED(cuDeviceGet)
REFUSED(cuDeviceGetAttribute)
REFUSED(cuDevicePrimaryCtxRetain)
REFUSED(cuFuncGetAttribute)
REFUSED(cuFuncSetAttribute)
REFUSED(cuFuncSetCacheConfig)
REFUSED(cuGetErrorString)
REFUSED(cuLaunchCooperativeKernel)
REFUSED(cuLaunchKernel)
REFUSED(cuLinkAddData_v2)
REFUSED(cuLinkComplete)
REFUSED(cuLinkCreate_v2)
REFUSED(cuModuleGetFunction)
REFUSED(cuModuleLoad)
REFUSED(cuModuleLoadData)
REFUSED(cuModuleLoadDataEx)
REFUSED(cuModuleUnload)
REFUSED(cuOccupancyMaxActiveBlocksPerMultiprocessor)
REFUSED(cuPointerGetAttribute)
REFUSED(cuTensorMapEncodeTiled)
