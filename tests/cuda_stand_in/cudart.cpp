// A stand-in for CUDA's runtime library (libcudart), so that torch built for CUDA runs on a machine without a
// GPU: devices, memory, streams, events and copies, as CUDA's documentation has them, as late and as strict
// as it allows. No kernel runs: kernels.cpp has torch's operators computed by the CPU. What torch asks for
// and is not here is in refused.c.
//
// A device's memory is host memory. A stream is a thread with a queue. A copy sleeps for up to
// STAND_IN_DELAY_US first, and what it is to fill has poison until then, so that whoever does not wait for it
// is seen. Stricter than CUDA: a copy that leaves its allocation or its registration, memory that is freed or
// unregistered while a copy of it is queued, and host memory that is registered twice are refused, and said
// on stderr.
//
// STAND_IN_DEVICES (1), STAND_IN_MEMORY in bytes, for each (4 GiB), STAND_IN_DELAY_US (500).
#include "machine.h"

extern "C" {

// --- how it is to behave: for tests ---

// After so many copies more, the device fails with an error that stays.
void stand_in_lose_device_at_copy(int count) {
  Lock lock(world);
  copies_until_lost = count;
}
int stand_in_has_context(int device) {
  Lock lock(world);
  return has_context[device];
}
void stand_in_name_kernel(const void* function, const char* name) {
  Lock lock(world);
  kernel_names[function] = name;
}
int stand_in_launch(const void* function, void** arguments, void* stream) {
  Lock lock(world);
  auto found = kernel_names.find(function);
  if (found != kernel_names.end() &&
      std::strstr(found->second, "spin_kernel") != nullptr) {  // torch.cuda._sleep
    auto cycles = *static_cast<int64_t*>(arguments[0]);
    add(stream_of(static_cast<cudaStream_t>(stream)),
        [=] { std::this_thread::sleep_for(std::chrono::nanoseconds(cycles / 2)); });
    return result(cudaSuccess);
  }
  std::fprintf(stderr, "stand-in for CUDA: kernel %s\n", found == kernel_names.end() ? "?" : found->second);
  return result(cudaErrorInvalidDeviceFunction);
}

// --- devices ---

cudaError_t cudaGetDeviceCount(int* count) {
  *count = device_count;
  return result(device_count > 0 ? cudaSuccess : cudaErrorNoDevice);
}
cudaError_t cudaGetDevice(int* device) {
  *device = current;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= device_count) return result(cudaErrorInvalidDevice);
  Lock lock(world);
  current = device;
  has_context[device] = true;
  return result(cudaSuccess);
}
cudaError_t cudaDeviceSynchronize() {
  Lock lock(world);
  drain_device(lock, current);
  return result(cudaSuccess);
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  std::memset(properties, 0, sizeof *properties);
  std::strcpy(properties->name, "stand-in for CUDA");
  properties->totalGlobalMem = memory_bytes;
  properties->major = 9;
  properties->multiProcessorCount = 4;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = properties->maxThreadsDim[0] = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  properties->maxGridSize[0] = properties->maxGridSize[1] = properties->maxGridSize[2] = 1 << 30;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerMultiprocessor = properties->sharedMemPerBlockOptin = 228 << 10;
  properties->l2CacheSize = 50 << 20;
  properties->unifiedAddressing = properties->canMapHostMemory = properties->asyncEngineCount = 1;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? 9
           : attribute == cudaDevAttrMultiProcessorCount  ? 4
                                                          : 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int, int) {
  *can = 0;
  return cudaSuccess;
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, length, "0000:%02x:00.0", device);
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPointByVersion(const char*, void** function, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult* status) {
  *function = reinterpret_cast<void*>(+[]() -> int { return 801; });  // CUDA_ERROR_NOT_SUPPORTED
  if (status != nullptr) *status = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}

// --- errors ---

cudaError_t cudaGetLastError() {
  cudaError_t error = last;
  last = static_cast<cudaError_t>(lost);
  return error;
}
cudaError_t cudaPeekAtLastError() {
  return last;
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation"
         : error == cudaErrorLaunchFailure  ? "cudaErrorLaunchFailure"
                                            : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "no error";
    case cudaErrorMemoryAllocation:
      return "out of memory";
    case cudaErrorNotReady:
      return "device not ready";
    case cudaErrorInvalidValue:
      return "invalid argument";
    case cudaErrorLaunchFailure:
      return "unspecified launch failure";
    case cudaErrorInvalidDeviceFunction:
      return "invalid device function";
    case cudaErrorNotSupported:
      return "operation not supported";
    default:
      return "an error of the stand-in";
  }
}

// --- memory ---

cudaError_t cudaMalloc(void** address, size_t nbytes) {
  Lock lock(world);
  if (lost != 0) return result(cudaSuccess);
  has_context[current] = true;
  char* memory = used_bytes[current] + nbytes > memory_bytes ? nullptr : map_memory(nbytes);
  if (memory == nullptr) return result(cudaErrorMemoryAllocation);
  std::memset(memory, POISON, nbytes);
  used_bytes[current] += nbytes;
  blocks[memory] = {nbytes, current, false};
  *address = memory;
  return cudaSuccess;
}
cudaError_t cudaFree(void* address) {
  if (address == nullptr) return result(cudaSuccess);
  Lock lock(world);
  auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end() || found->second.device < 0)
    return complain(cudaErrorInvalidValue, "memory is freed that was not allocated");
  int device = found->second.device;
  drain_device(lock, device);
  if (is_in_use({found->first, found->first + found->second.nbytes}))
    return complain(cudaErrorInvalidValue, "memory is freed that a copy uses");
  munmap(address, found->second.nbytes);
  used_bytes[device] -= found->second.nbytes;
  blocks.erase(found);
  return result(cudaSuccess);
}
cudaError_t cudaMemGetInfo(size_t* free_bytes, size_t* total) {
  Lock lock(world);
  *total = memory_bytes;
  *free_bytes = memory_bytes - used_bytes[current];
  return result(cudaSuccess);
}
cudaError_t cudaHostAlloc(void** address, size_t nbytes, unsigned) {
  Lock lock(world);
  if (lost != 0) return result(cudaSuccess);
  has_context[current] = true;
  char* memory = map_memory(nbytes);
  if (memory == nullptr) return result(cudaErrorMemoryAllocation);
  std::memset(memory, POISON, nbytes);
  blocks[memory] = {nbytes, -1, false};
  *address = memory;
  return cudaSuccess;
}
cudaError_t cudaFreeHost(void* address) {
  Lock lock(world);
  auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end())
    return complain(cudaErrorInvalidValue, "host memory is freed that was not allocated");
  for (int device = 0; device < device_count; device++) drain_device(lock, device);
  munmap(address, found->second.nbytes);
  blocks.erase(found);
  return result(cudaSuccess);
}
cudaError_t cudaHostRegister(void* address, size_t nbytes, unsigned) {
  Lock lock(world);
  if (lost != 0) return result(cudaSuccess);
  has_context[current] = true;
  auto* begin = static_cast<char*>(address);
  unsigned char resident;
  if (mincore(reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(begin) & ~uintptr_t{4095}), 1, &resident) !=
      0)
    return result(cudaErrorInvalidValue);  // there is no memory
  const auto* other = block_at(begin + nbytes - 1);
  if (block_at(begin) != nullptr || other != nullptr)
    return complain(cudaErrorHostMemoryAlreadyRegistered, "host memory is registered twice");
  blocks[begin] = {nbytes, -1, true};
  return cudaSuccess;
}
cudaError_t cudaHostUnregister(void* address) {
  Lock lock(world);
  auto found = blocks.find(static_cast<char*>(address));
  if (found == blocks.end() || !found->second.is_registered)
    return complain(cudaErrorHostMemoryNotRegistered, "host memory is unregistered that is not registered");
  if (is_in_use({found->first, found->first + found->second.nbytes}))
    return complain(cudaErrorInvalidValue, "host memory is unregistered that a copy uses");
  blocks.erase(found);
  return result(cudaSuccess);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  Lock lock(world);
  std::memset(attributes, 0, sizeof *attributes);
  const auto* block = block_at(address);
  if (block == nullptr) return result(cudaSuccess);
  attributes->type = block->second.device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  attributes->device = block->second.device < 0 ? 0 : block->second.device;
  attributes->hostPointer = block->second.device < 0 ? const_cast<void*>(address) : nullptr;
  attributes->devicePointer = const_cast<void*>(address);
  return result(cudaSuccess);
}

cudaError_t cudaMemcpy(void* target, const void* source, size_t nbytes, cudaMemcpyKind) {
  return copy(target, nbytes, source, nbytes, nbytes, 1, nullptr, true);
}
cudaError_t cudaMemcpyAsync(void* target, const void* source, size_t nbytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  return copy(target, nbytes, source, nbytes, nbytes, 1, stream, false);
}
cudaError_t cudaMemcpyPeerAsync(void* target, int, const void* source, int, size_t nbytes,
                                cudaStream_t stream) {
  return copy(target, nbytes, source, nbytes, nbytes, 1, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* target, size_t target_pitch, const void* source, size_t source_pitch,
                              size_t width, size_t height, cudaMemcpyKind, cudaStream_t stream) {
  return copy(target, target_pitch, source, source_pitch, width, height, stream, false);
}
cudaError_t cudaMemset(void* target, int value, size_t nbytes) {
  return set(target, value, nbytes, nullptr, true);
}
cudaError_t cudaMemsetAsync(void* target, int value, size_t nbytes, cudaStream_t stream) {
  return set(target, value, nbytes, stream, false);
}

// --- streams and events ---

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  Lock lock(world);
  *stream = reinterpret_cast<cudaStream_t>(make_stream(current));
  return result(cudaSuccess);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  return cudaStreamCreateWithPriority(stream, 0, 0);
}
cudaError_t cudaStreamDestroy(cudaStream_t) {
  return cudaSuccess;
}  // its thread stays
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  Lock lock(world);
  return result(stream_of(stream)->queue.empty() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  Lock lock(world);
  drain(lock, stream_of(stream));
  return result(cudaSuccess);
}
cudaError_t cudaStreamGetPriority(cudaStream_t, int* priority) {
  *priority = 0;
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t handle, cudaEvent_t event, unsigned) {
  Lock lock(world);
  auto mark = reinterpret_cast<Event*>(event)->mark;
  if (mark == nullptr) return result(cudaSuccess);
  add(stream_of(handle), [mark] {
    Lock inner(world);
    changed.wait(inner, [&] { return mark->is_done; });
  });
  return result(cudaSuccess);
}
cudaError_t cudaStreamAddCallback(cudaStream_t handle, cudaStreamCallback_t callback, void* data, unsigned) {
  Lock lock(world);
  add(stream_of(handle), [=] { callback(handle, static_cast<cudaError_t>(lost), data); });
  return result(cudaSuccess);
}
cudaError_t cudaLaunchHostFunc(cudaStream_t handle, cudaHostFn_t function, void* data) {
  Lock lock(world);
  add(stream_of(handle), [=] { function(data); });
  return result(cudaSuccess);
}
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t*, const cudaGraphNode_t**, const cudaGraphEdgeData**,
                                     size_t*) {
  *status = cudaStreamCaptureStatusNone;
  if (id != nullptr) *id = 0;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  Lock lock(world);
  has_context[current] = true;
  *event = reinterpret_cast<cudaEvent_t>(new Event{nullptr, (flags & cudaEventDisableTiming) == 0});
  return result(cudaSuccess);
}
cudaError_t cudaEventCreate(cudaEvent_t* event) {
  return cudaEventCreateWithFlags(event, 0);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  delete reinterpret_cast<Event*>(event);
  return cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t handle, unsigned) {
  Lock lock(world);
  auto mark = std::make_shared<Mark>();
  reinterpret_cast<Event*>(event)->mark = mark;
  add(stream_of(handle), [mark] {
    Lock inner(world);
    mark->is_done = true;
    mark->at = Clock::now();
  });
  return result(cudaSuccess);
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t handle) {
  return cudaEventRecordWithFlags(event, handle, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  Lock lock(world);
  auto mark = reinterpret_cast<Event*>(event)->mark;
  return result(mark == nullptr || mark->is_done ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  Lock lock(world);
  auto mark = reinterpret_cast<Event*>(event)->mark;
  if (mark != nullptr) changed.wait(lock, [&] { return mark->is_done; });
  return result(cudaSuccess);
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t end) {
  Lock lock(world);
  auto *first = reinterpret_cast<Event*>(start), *second = reinterpret_cast<Event*>(end);
  if (!first->has_time || !second->has_time || first->mark == nullptr || second->mark == nullptr)
    return result(cudaErrorInvalidResourceHandle);
  if (!first->mark->is_done || !second->mark->is_done) return result(cudaErrorNotReady);
  *milliseconds = std::chrono::duration<float, std::milli>(second->mark->at - first->mark->at).count();
  return result(cudaSuccess);
}
}
