// libcudart: the runtime of a card that is not there.
#define _GNU_SOURCE
#include "cuda_abi.h"
#include "host.h"
#include "kernels.h"
#include "streams.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int Error;
#define API TN_EXPORT
static __thread Error last_error;
static Error result(int error) { return error ? (last_error = error) : 0; }

// Devices

API Error cudaGetDeviceCount(int *count) { return *count = tn_card.devices, 0; }
API Error cudaGetDevice(int *device) { return *device = tn_current_device(), 0; }
API Error cudaSetDevice(int device) {
  if (device < 0 || device >= tn_card.devices) return result(cudaErrorInvalidDevice);
  tn_set_current_device(device);
  return 0;
}
API Error cudaInitDevice(int device, unsigned flags, unsigned more) { return result(device < tn_card.devices ? 0 : cudaErrorInvalidDevice); }
API Error cudaDriverGetVersion(int *version) { return *version = tn_card.driver_version, 0; }
API Error cudaRuntimeGetVersion(int *version) { return *version = tn_card.runtime_version, 0; }
API Error cudaGetDeviceFlags(unsigned *flags) { return *flags = 0, 0; }
API Error cudaDeviceSynchronize(void) { return result(tn_device_synchronize()); }
API Error cudaDeviceCanAccessPeer(int *can, int from, int to) { return *can = from != to, 0; }
API Error cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
API Error cudaDeviceGetPCIBusId(char *text, int room, int device) { return snprintf(text, (size_t)room, "0000:%02X:00.0", device + 1), 0; }
API Error cudaDeviceGetByPCIBusId(int *device, const char *text) {
  unsigned domain = 0, bus = 1;
  sscanf(text, "%x:%x", &domain, &bus);
  return *device = (int)bus - 1, 0;
}
API Error cudaDeviceGetLimit(size_t *value, int limit) { return *value = limit == 0 ? 1024 : limit == 2 ? 8 << 20 : 0, 0; }

API Error cudaDeviceGetAttribute(int *value, int attribute, int device) { return *value = tn_device_attribute(attribute, device), 0; }

static Error properties(struct cudaDeviceProp *to, int device) {
  if (device < 0 || device >= tn_card.devices) return result(cudaErrorInvalidDevice);
  memset(to, 0, sizeof *to);
  memcpy(to->name, tn_card.name, sizeof to->name);
  memcpy(to->uuid, tn_card.uuid, sizeof to->uuid);
  to->uuid[15] = (uint8_t)(to->uuid[15] + device);
  to->totalGlobalMem = (size_t)tn_card.memory_bytes;
  to->sharedMemPerBlock = (size_t)tn_card.shared_per_block, to->sharedMemPerBlockOptin = (size_t)tn_card.shared_per_block_optin;
  to->sharedMemPerMultiprocessor = (size_t)tn_card.shared_per_sm, to->reservedSharedMemPerBlock = tn_card.major >= 8 ? 1024 : 0;
  to->regsPerBlock = to->regsPerMultiprocessor = tn_card.registers_per_sm;
  to->warpSize = 32, to->memPitch = 2147483647, to->totalConstMem = 65536;
  to->maxThreadsPerBlock = tn_card.threads_per_block, to->maxThreadsPerMultiProcessor = tn_card.threads_per_sm;
  to->maxThreadsDim[0] = to->maxThreadsDim[1] = 1024, to->maxThreadsDim[2] = 64;
  to->maxGridSize[0] = 2147483647, to->maxGridSize[1] = to->maxGridSize[2] = 65535;
  to->major = tn_card.major, to->minor = tn_card.minor, to->multiProcessorCount = tn_card.sm_count;
  to->textureAlignment = 512, to->texturePitchAlignment = 32, to->surfaceAlignment = 512;
  to->canMapHostMemory = to->concurrentKernels = to->unifiedAddressing = to->managedMemory = to->concurrentManagedAccess = 1;
  to->streamPrioritiesSupported = to->globalL1CacheSupported = to->localL1CacheSupported = to->cooperativeLaunch = 1;
  to->computePreemptionSupported = to->canUseHostPointerForRegisteredMem = to->hostRegisterSupported = to->memoryPoolsSupported = 1;
  to->asyncEngineCount = 3, to->pciBusID = device + 1, to->clusterLaunch = tn_card.major >= 9, to->unifiedFunctionPointers = 1;
  to->memoryBusWidth = tn_card.memory_bus_bits, to->l2CacheSize = tn_card.l2_bytes, to->maxBlocksPerMultiProcessor = tn_card.blocks_per_sm;
#if CUDA_MAJOR == 12
  to->clockRate = tn_card.clock_khz, to->memoryClockRate = tn_card.memory_clock_khz, to->deviceOverlap = 1;
#endif
  return 0;
}
API Error cudaGetDeviceProperties(struct cudaDeviceProp *to, int device) { return properties(to, device); }
#if CUDA_MAJOR == 12
API Error cudaGetDeviceProperties_v2(struct cudaDeviceProp *to, int device) { return properties(to, device); }
#endif

// Errors

API Error cudaGetLastError(void) { Error error = last_error; last_error = 0; return error; }
API Error cudaPeekAtLastError(void) { return last_error; }
API const char *cudaGetErrorName(Error error) { return tn_error_name(error); }
API const char *cudaGetErrorString(Error error) { return tn_error_text(error); }

// Memory

API Error cudaMalloc(void **pointer, size_t size) {
  *pointer = NULL;
  if (!size) return 0;
  uint64_t address = tn_take_memory(tn_current_device(), (int64_t)size);
  if (!address) return result(cudaErrorMemoryAllocation);
  *pointer = (void *)address;
  tn_log(TN_SEGMENT_ALLOC, tn_current_device(), address, (int64_t)size);
  return 0;
}

API Error cudaFree(void *pointer) {
  if (!pointer) return 0;
  if (tn_host_kind(pointer) == TN_MANAGED) return tn_host_free(pointer), 0;
  int device = tn_is_device(pointer) - 1;
  int64_t size = tn_give_memory((uint64_t)pointer);
  if (!size) return result(cudaErrorInvalidValue);
  tn_device_synchronize();  // cudaFree waits for the device
  tn_log(TN_SEGMENT_FREE, device, (uint64_t)pointer, size);
  return 0;
}

API Error cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  *free_bytes = (size_t)tn_free_bytes(tn_current_device()), *total = (size_t)tn_card.memory_bytes;
  return 0;
}

API Error cudaHostAlloc(void **pointer, size_t size, unsigned flags) { return result((*pointer = tn_host_alloc(size, TN_PINNED)) ? 0 : cudaErrorMemoryAllocation); }
API Error cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
API Error cudaFreeHost(void *pointer) { return result(!pointer || tn_host_free(pointer) ? 0 : cudaErrorInvalidValue); }
API Error cudaHostRegister(void *pointer, size_t size, unsigned flags) { return tn_host_register(pointer, size), 0; }
API Error cudaHostUnregister(void *pointer) { return tn_host_unregister(pointer), 0; }
API Error cudaHostGetDevicePointer(void **device, void *host, unsigned flags) { return *device = host, 0; }
API Error cudaHostGetFlags(unsigned *flags, void *host) { return *flags = 0, 0; }
API Error cudaMallocManaged(void **pointer, size_t size, unsigned flags) { return result((*pointer = tn_host_alloc(size, TN_MANAGED)) ? 0 : cudaErrorMemoryAllocation); }
API Error cudaMemPrefetchAsync(const void *pointer, size_t size, int device, void *stream) { return tn_queue(stream), 0; }

API Error cudaPointerGetAttributes(struct cudaPointerAttributes *to, const void *pointer) {
  memset(to, 0, sizeof *to);
  int device = tn_is_device(pointer), kind = device ? 0 : tn_host_kind(pointer);
  to->type = device ? cudaMemoryTypeDevice : kind == TN_MANAGED ? cudaMemoryTypeManaged : kind ? cudaMemoryTypeHost : cudaMemoryTypeUnregistered;
  to->device = device ? device - 1 : kind ? tn_current_device() : -2;
  to->devicePointer = to->type ? (void *)pointer : NULL;
  to->hostPointer = device ? NULL : kind ? (void *)pointer : NULL;
  return 0;
}

// Memory in the order of a stream: pools grow by what is asked for and keep it until they are trimmed.

static struct { int64_t used, used_high, reserved, reserved_high; uint64_t threshold; } pools[TN_DEVICES];

API Error cudaDeviceGetDefaultMemPool(void **pool, int device) { return *pool = &pools[device], 0; }
API Error cudaDeviceGetMemPool(void **pool, int device) { return *pool = &pools[device], 0; }
API Error cudaMemPoolSetAttribute(void *pool, int attribute, void *value) {
  int device = (int)(((char *)pool - (char *)pools) / (long)sizeof pools[0]);
  if (attribute == 4) pools[device].threshold = *(uint64_t *)value;
  if (attribute == 6) pools[device].reserved_high = pools[device].reserved;
  if (attribute == 8) pools[device].used_high = pools[device].used;
  return 0;
}
API Error cudaMemPoolGetAttribute(void *pool, int attribute, void *value) {
  int device = (int)(((char *)pool - (char *)pools) / (long)sizeof pools[0]);
  int64_t found[] = {0, 1, 1, 1, (int64_t)pools[device].threshold, pools[device].reserved, pools[device].reserved_high, pools[device].used, pools[device].used_high};
  if (attribute < 4) *(int *)value = 1;
  else if (attribute < 9) *(int64_t *)value = found[attribute];
  else return result(cudaErrorInvalidValue);
  return 0;
}
API Error cudaMallocAsync(void **pointer, size_t size, void *stream) {
  int device = tn_current_device();
  Error error = cudaMalloc(pointer, size);
  if (error) return error;
  tn_queue(stream);
  int64_t taken = tn_size_at((uint64_t)*pointer, NULL);
  pools[device].used += taken, pools[device].reserved += taken;
  if (pools[device].used > pools[device].used_high) pools[device].used_high = pools[device].used;
  if (pools[device].reserved > pools[device].reserved_high) pools[device].reserved_high = pools[device].reserved;
  return 0;
}
API Error cudaMallocFromPoolAsync(void **pointer, size_t size, void *pool, void *stream) { return cudaMallocAsync(pointer, size, stream); }
API Error cudaFreeAsync(void *pointer, void *stream) {
  int device = tn_is_device(pointer) - 1;
  if (device < 0) return result(cudaErrorInvalidValue);
  int64_t size = tn_size_at((uint64_t)pointer, NULL);
  pools[device].used -= size, pools[device].reserved -= size;
  tn_queue(stream);
  tn_give_memory((uint64_t)pointer);
  tn_log(TN_SEGMENT_FREE, device, (uint64_t)pointer, size);
  return 0;
}

// Memory shared between processes: a handle names its size, and whoever opens it gets addresses for it.

typedef struct { int64_t size; uint64_t address; char rest[48]; } IpcHandle;
API Error cudaIpcGetMemHandle(IpcHandle *handle, void *pointer) {
  memset(handle, 0, sizeof *handle);
  handle->size = tn_size_at((uint64_t)pointer, &handle->address);
  return result(handle->size ? 0 : cudaErrorInvalidValue);
}
API Error cudaIpcOpenMemHandle(void **pointer, IpcHandle handle, unsigned flags) { return *pointer = (void *)tn_reserve_addresses(handle.size), 0; }
API Error cudaIpcCloseMemHandle(void *pointer) { return tn_give_memory((uint64_t)pointer), 0; }
API Error cudaIpcGetEventHandle(IpcHandle *handle, void *event) { return memset(handle, 0, sizeof *handle), 0; }
API Error cudaIpcOpenEventHandle(void **event, IpcHandle handle) { return *event = tn_new_event(0), 0; }

// Copies and fills

API Error cudaMemcpy(void *to, const void *from, size_t size, int kind) { return tn_copy(to, from, size), tn_queue_copy(NULL, to, from, size), tn_stream_synchronize(NULL), 0; }
API Error cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return tn_queue_copy(stream, to, from, size), tn_copy(to, from, size), 0; }
API Error cudaMemcpyPeer(void *to, int there, const void *from, int here, size_t size) { return tn_copy(to, from, size), 0; }
API Error cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t size, void *stream) { return tn_queue_copy(stream, to, from, size), tn_copy(to, from, size), 0; }
API Error cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind, void *stream) {
  tn_queue_copy(stream, to, from, width * height);
  for (size_t row = 0; row < height; row++) tn_copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
  return 0;
}
API Error cudaMemcpy2D(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height, int kind) { return cudaMemcpy2DAsync(to, to_pitch, from, from_pitch, width, height, kind, NULL); }
API Error cudaMemset(void *to, int value, size_t size) { return tn_fill(to, value, size), 0; }
API Error cudaMemsetAsync(void *to, int value, size_t size, void *stream) { return tn_queue(stream), tn_fill(to, value, size), 0; }
API Error cudaMemset2DAsync(void *to, size_t pitch, int value, size_t width, size_t height, void *stream) {
  tn_queue(stream);
  for (size_t row = 0; row < height; row++) tn_fill((char *)to + row * pitch, value, width);
  return 0;
}
API Error cudaMemcpyToSymbolAsync(const void *symbol, const void *from, size_t size, size_t offset, int kind, void *stream) { return tn_queue(stream), 0; }
API Error cudaGetSymbolAddress(void **address, const void *symbol) { return *address = tn_variable(symbol), 0; }

// Streams and events

API Error cudaStreamCreate(void **stream) { return *stream = tn_new_stream(0, 0), 0; }
API Error cudaStreamCreateWithFlags(void **stream, unsigned flags) { return *stream = tn_new_stream(flags, 0), 0; }
API Error cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return *stream = tn_new_stream(flags, priority), 0; }
API Error cudaStreamDestroy(void *stream) { return tn_drop_stream(stream), 0; }
API Error cudaStreamGetPriority(void *stream, int *priority) { return *priority = tn_stream(stream)->priority, 0; }
API Error cudaStreamGetFlags(void *stream, unsigned *flags) { return *flags = tn_stream(stream)->flags, 0; }
API Error cudaStreamGetId(void *stream, unsigned long long *id) { return *id = tn_stream(stream)->id, 0; }
API Error cudaStreamGetDevice(void *stream, int *device) { return *device = tn_stream(stream)->device, 0; }
API Error cudaStreamSynchronize(void *stream) { return result(tn_stream_synchronize(stream)); }
API Error cudaStreamQuery(void *stream) { return result(tn_stream_query(stream)); }
API Error cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return result(tn_stream_wait(stream, event)); }
API Error cudaStreamAddCallback(void *stream, void (*callback)(void *, Error, void *), void *data, unsigned flags) {
  if (!tn_stream(stream)->capture) callback(stream, 0, data);  // everything before it is as good as done
  return 0;
}
API Error cudaLaunchHostFunc(void *stream, void (*function)(void *), void *data) {
  tn_queue(stream);
  if (!tn_stream(stream)->capture) function(data);
  return 0;
}
API Error cudaEventCreate(void **event) { return *event = tn_new_event(0), 0; }
API Error cudaEventCreateWithFlags(void **event, unsigned flags) { return *event = tn_new_event(flags), 0; }
API Error cudaEventRecord(void *event, void *stream) { return result(tn_event_record(event, stream)); }
API Error cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return result(tn_event_record(event, stream)); }
API Error cudaEventQuery(void *event) { return tn_event_query(event); }  // "not ready" is an answer, no error
API Error cudaEventSynchronize(void *event) { return result(tn_event_synchronize(event)); }
API Error cudaEventElapsedTime(float *ms, void *from, void *to) { return *ms = tn_event_elapsed_ms(from, to), 0; }

// Capture and graphs

API Error cudaStreamBeginCapture(void *stream, int mode) { return result(tn_begin_capture(stream, mode)); }
API Error cudaStreamEndCapture(void *stream, void **graph) { return result(tn_end_capture(stream, graph)); }
API Error cudaStreamIsCapturing(void *stream, int *status) { return *status = tn_capture_status(stream, NULL, NULL), 0; }
API Error cudaThreadExchangeStreamCaptureMode(int *mode) {
  static __thread int current;
  int before = current;
  current = *mode, *mode = before;
  return 0;
}
static Error capture_info(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes, size_t *count) {
  if (graph) *graph = NULL;
  *status = tn_capture_status(stream, id, graph);
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return 0;
}
#if CUDA_MAJOR == 12
API Error cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id) { return capture_info(stream, status, id, NULL, NULL, NULL); }
API Error cudaStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes, size_t *count) { return capture_info(stream, status, id, graph, nodes, count); }
API Error cudaStreamGetCaptureInfo_v3(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes, const void **edges, size_t *count) { return capture_info(stream, status, id, graph, nodes, count); }
#else
API Error cudaStreamGetCaptureInfo(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes, const void **edges, size_t *count) { return capture_info(stream, status, id, graph, nodes, count); }
#endif
API Error cudaGraphCreate(void **graph, unsigned flags) { return *graph = calloc(1, sizeof(Graph)), 0; }
API Error cudaGraphGetNodes(void *graph, void **nodes, size_t *count) {
  // Nodes are counted and not kept: a caller who asks for them gets their numbers as handles.
  for (size_t i = 0; nodes && i < *count; i++) nodes[i] = (void *)(i + 1);
  if (!nodes) *count = (size_t)((Graph *)graph)->nodes;
  return 0;
}
API Error cudaGraphInstantiate(void **exec, void *graph, unsigned long long flags) {
  GraphExec *made = calloc(1, sizeof *made);
  made->nodes = ((Graph *)graph)->nodes;
  return *exec = made, 0;
}
API Error cudaGraphInstantiateWithFlags(void **exec, void *graph, unsigned long long flags) { return cudaGraphInstantiate(exec, graph, flags); }
API Error cudaGraphLaunch(void *exec, void *stream) { return tn_queue(stream), tn_launch(), 0; }

// Kernels

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration;
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
  configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
  return 0;
}
API Error __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared, *(void **)stream = configuration.stream;
  return 0;
}
API void **__cudaRegisterFatBinary(void *binary) { return tn_register_binary(binary); }
API char __cudaInitModule(void **handle) { return 1; }
API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int threads, void *a, void *b, void *c, void *d, int *e) {
  tn_register_kernel(handle, host, name);
}
API void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int external, size_t size, int constant, int global) {
  tn_register_variable(host, size);
}
API Error __cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, 0; }
static Error launch(const void *function, dim3 grid, dim3 block, void *stream) {
  tn_queue_kernel(stream, function, (int64_t)grid.x * grid.y * grid.z * block.x * block.y * block.z);
  return tn_launch(), 0;
}
API Error __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launch(kernel, grid, block, stream); }
API Error cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launch(function, grid, block, stream); }
API Error cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launch(function, grid, block, stream); }
API Error cudaLaunchKernelExC(const struct cudaLaunchConfig *config, const void *function, void **arguments) { return launch(function, config->gridDim, config->blockDim, config->stream); }
API Error cudaGetKernel(void **kernel, const void *function) { return *kernel = (void *)function, 0; }
API Error cudaGetFuncBySymbol(void **function, const void *symbol) { return *function = (void *)symbol, 0; }
API Error cudaFuncGetAttributes(struct cudaFuncAttributes *to, const void *function) {
  TnKernel kernel = tn_kernel(function);
  memset(to, 0, sizeof *to);
  to->sharedSizeBytes = (size_t)kernel.shared_bytes, to->localSizeBytes = (size_t)kernel.local_bytes, to->constSizeBytes = (size_t)kernel.constant_bytes;
  to->maxThreadsPerBlock = kernel.threads, to->numRegs = kernel.registers;
  to->ptxVersion = kernel.ptx_version, to->binaryVersion = kernel.binary_version;
  to->maxDynamicSharedSizeBytes = (int)tn_card.shared_per_block - kernel.shared_bytes;
  return 0;
}
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *function, int threads, size_t shared) { return *blocks = tn_occupancy(tn_kernel(function), threads, (int64_t)shared), 0; }
API Error cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *function, int threads, size_t shared, unsigned flags) { return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared); }
API Error cudaOccupancyMaxActiveClusters(int *clusters, const void *function, const struct cudaLaunchConfig *config) { return *clusters = tn_card.sm_count, 0; }

// The driver behind the runtime

API Error cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, int *found) { return tn_entry_point(name, function, found); }
API Error cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags, int *found) { return tn_entry_point(name, function, found); }
