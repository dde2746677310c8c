// libcuda: the driver of a card that is not there. What the runtime offers too is the same object behind both.
#define _GNU_SOURCE
#include "cuda_abi.h"
#include "host.h"
#include "kernels.h"
#include "streams.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef unsigned long long Address;
#define API TN_EXPORT

// Devices and contexts: one context a device, handles are 0x100 and up.

API Result cuDriverGetVersion(int *version) { return *version = tn_card.driver_version, 0; }
API Result cuDeviceGet(int *device, int ordinal) { return *device = ordinal, ordinal < tn_card.devices ? 0 : 101; }
API Result cuDeviceGetCount(int *count) { return *count = tn_card.devices, 0; }
API Result cuDeviceGetName(char *name, int room, int device) { return snprintf(name, (size_t)room, "%s", tn_card.name), 0; }
API Result cuDeviceGetUuid(uint8_t *uuid, int device) { return memcpy(uuid, tn_card.uuid, 16), uuid[15] = (uint8_t)(uuid[15] + device), 0; }
API Result cuDeviceGetUuid_v2(uint8_t *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
API Result cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = tn_device_attribute(attribute, device), 0; }
API Result cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = (size_t)tn_card.memory_bytes, 0; }
API Result cuDeviceComputeCapability(int *major, int *minor, int device) { return *major = tn_card.major, *minor = tn_card.minor, 0; }
API Result cuDeviceCanAccessPeer(int *can, int from, int to) { return *can = from != to, 0; }
API Result cuDeviceGetPCIBusId(char *text, int room, int device) { return snprintf(text, (size_t)room, "0000:%02X:00.0", device + 1), 0; }
API Result cuDevicePrimaryCtxRetain(void **context, int device) { return *context = (void *)(uintptr_t)(0x100 + device), 0; }
API Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
API Result cuCtxGetCurrent(void **context) { return *context = (void *)(uintptr_t)(0x100 + tn_current_device()), 0; }
API Result cuCtxSetCurrent(void *context) { return context ? tn_set_current_device((int)((uintptr_t)context - 0x100)) : (void)0, 0; }
API Result cuCtxGetDevice(int *device) { return *device = tn_current_device(), 0; }
API Result cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
API Result cuCtxPopCurrent_v2(void **context) { return context ? cuCtxGetCurrent(context) : 0; }
API Result cuCtxSynchronize(void) { return tn_device_synchronize(); }
API Result cuCtxCreate_v2(void **context, unsigned flags, int device) { return *context = (void *)(uintptr_t)(0x100 + device), 0; }
API Result cuCtxGetApiVersion(void *context, unsigned *version) { return *version = (unsigned)tn_card.driver_version, 0; }
API Result cuCtxGetStreamPriorityRange(int *least, int *greatest) { return *least = 0, *greatest = -5, 0; }
API Result cuCtxGetLimit(size_t *value, int limit) { return *value = 1024, 0; }
API Result cuGetErrorName(Result error, const char **text) { return *text = tn_error_name(error), 0; }
API Result cuGetErrorString(Result error, const char **text) { return *text = tn_error_text(error), 0; }

API Result cuGetProcAddress(const char *name, void **function, int version, uint64_t flags) { return tn_entry_point(name, function, NULL); }
API Result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) { return tn_entry_point(name, function, status); }

// Memory

API Result cuMemAlloc_v2(Address *address, size_t size) {
  *address = tn_take_memory(tn_current_device(), (int64_t)size);
  if (!*address) return 2;
  tn_log(TN_SEGMENT_ALLOC, tn_current_device(), *address, (int64_t)size);
  return 0;
}
API Result cuMemFree_v2(Address address) {
  int device = tn_is_device((void *)address) - 1;
  int64_t size = tn_give_memory(address);
  if (size) tn_log(TN_SEGMENT_FREE, device, address, size);
  return size ? 0 : 1;
}
API Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) { return *free_bytes = (size_t)tn_free_bytes(tn_current_device()), *total = (size_t)tn_card.memory_bytes, 0; }
API Result cuMemGetAddressRange_v2(Address *start, size_t *size, Address address) {
  uint64_t found = 0;
  int64_t bytes = tn_size_at(address, &found);
  if (start) *start = found;
  if (size) *size = (size_t)bytes;
  return bytes ? 0 : 1;
}
API Result cuMemAllocManaged(Address *address, size_t size, unsigned flags) { return (*address = (Address)tn_host_alloc(size, TN_MANAGED)) ? 0 : 2; }
API Result cuMemAllocHost_v2(void **pointer, size_t size) { return (*pointer = tn_host_alloc(size, TN_PINNED)) ? 0 : 2; }
API Result cuMemHostAlloc(void **pointer, size_t size, unsigned flags) { return cuMemAllocHost_v2(pointer, size); }
API Result cuMemFreeHost(void *pointer) { return tn_host_free(pointer) ? 0 : 1; }
API Result cuMemHostRegister_v2(void *pointer, size_t size, unsigned flags) { return tn_host_register(pointer, size), 0; }
API Result cuMemHostUnregister(void *pointer) { return tn_host_unregister(pointer), 0; }
API Result cuMemHostGetDevicePointer_v2(Address *address, void *pointer, unsigned flags) { return *address = (Address)pointer, 0; }

API Result cuPointerGetAttribute(void *value, int attribute, Address address) {
  int device = tn_is_device((void *)address), kind = tn_host_kind((void *)address);
  if (!device && !kind) return 1;
  switch (attribute) {
    case 1: *(void **)value = (void *)(uintptr_t)(0x100 + (device ? device - 1 : 0)); return 0;
    case 2: *(unsigned *)value = device ? 2 : 1; return 0;
    case 3: *(Address *)value = address; return 0;
    case 4: *(void **)value = device ? NULL : (void *)address; return device ? 1 : 0;
    case 8: *(unsigned *)value = kind == TN_MANAGED; return 0;
    case 9: *(int *)value = device ? device - 1 : 0; return 0;
    case 11: { uint64_t start = address; tn_size_at(address, &start); *(Address *)value = start; return 0; }
    case 12: *(size_t *)value = (size_t)tn_size_at(address, NULL); return 0;
    default: return 801;
  }
}

// Virtual memory: reserved addresses, physical pieces, and one mapped onto the other.

typedef struct { int64_t size; int device; } Physical;
API Result cuMemGetAllocationGranularity(size_t *bytes, const struct CUmemAllocationProp *of, int option) { return *bytes = 2u << 20, 0; }
API Result cuMemCreate(Address *handle, size_t size, const struct CUmemAllocationProp *of, unsigned long long flags) {
  int device = of && of->location.type == 1 ? of->location.id : tn_current_device();
  if (!tn_hold(device, (int64_t)size)) return 2;
  Physical *made = malloc(sizeof *made);
  *made = (Physical){(int64_t)size, device};
  return *handle = (Address)made, 0;
}
API Result cuMemRelease(Address handle) {
  Physical *gone = (Physical *)handle;
  tn_release(gone->device, gone->size);
  return free(gone), 0;
}
API Result cuMemAddressReserve(Address *address, size_t size, size_t alignment, Address wanted, unsigned long long flags) { return *address = tn_reserve_addresses((int64_t)size), 0; }
API Result cuMemAddressFree(Address address, size_t size) { return tn_give_memory(address), 0; }
API Result cuMemMap(Address address, size_t size, size_t offset, Address handle, unsigned long long flags) {
  tn_log(TN_SEGMENT_MAP, ((Physical *)handle)->device, address, (int64_t)size);
  return 0;
}
API Result cuMemUnmap(Address address, size_t size) { return tn_log(TN_SEGMENT_UNMAP, tn_current_device(), address, (int64_t)size), 0; }

// Copies, fills, streams, events

API Result cuMemcpy(Address to, Address from, size_t size) { return tn_copy((void *)to, (void *)from, size), 0; }
API Result cuMemcpyAsync(Address to, Address from, size_t size, void *stream) { return tn_queue_copy(stream, (void *)to, (void *)from, size), tn_copy((void *)to, (void *)from, size), 0; }
API Result cuMemcpyHtoD_v2(Address to, const void *from, size_t size) { return tn_copy((void *)to, from, size), 0; }
API Result cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t size, void *stream) { return tn_queue_copy(stream, (void *)to, from, size), tn_copy((void *)to, from, size), 0; }
API Result cuMemcpyDtoH_v2(void *to, Address from, size_t size) { return tn_copy(to, (void *)from, size), tn_queue_copy(NULL, to, (void *)from, size), tn_stream_synchronize(NULL), 0; }
API Result cuMemcpyDtoHAsync_v2(void *to, Address from, size_t size, void *stream) { return tn_queue_copy(stream, to, (void *)from, size), tn_copy(to, (void *)from, size), 0; }
API Result cuMemcpyDtoDAsync_v2(Address to, Address from, size_t size, void *stream) { return tn_queue_copy(stream, (void *)to, (void *)from, size), tn_copy((void *)to, (void *)from, size), 0; }
API Result cuMemsetD8Async(Address to, unsigned char value, size_t count, void *stream) { return tn_queue(stream), tn_fill((void *)to, value, count), 0; }
API Result cuMemsetD32Async(Address to, unsigned value, size_t count, void *stream) { return tn_queue(stream), 0; }
API Result cuMemsetD8_v2(Address to, unsigned char value, size_t count) { return tn_fill((void *)to, value, count), 0; }
API Result cuStreamCreate(void **stream, unsigned flags) { return *stream = tn_new_stream(flags, 0), 0; }
API Result cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return *stream = tn_new_stream(flags, priority), 0; }
API Result cuStreamDestroy_v2(void *stream) { return tn_drop_stream(stream), 0; }
API Result cuStreamSynchronize(void *stream) { return tn_stream_synchronize(stream); }
API Result cuStreamQuery(void *stream) { return tn_stream_query(stream); }
API Result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return tn_stream_wait(stream, event); }
API Result cuStreamGetCtx(void *stream, void **context) { return *context = (void *)(uintptr_t)(0x100 + tn_stream(stream)->device), 0; }
API Result cuStreamIsCapturing(void *stream, int *status) { return *status = tn_capture_status(stream, NULL, NULL), 0; }
API Result cuStreamGetCaptureInfo_v2(void *stream, int *status, unsigned long long *id, void **graph, const void ***nodes, size_t *count) {
  *status = tn_capture_status(stream, id, graph);
  if (nodes) *nodes = NULL;
  if (count) *count = 0;
  return 0;
}
API Result cuStreamWriteValue32_v2(void *stream, Address to, unsigned value, unsigned flags) { return tn_queue(stream), 0; }
API Result cuEventCreate(void **event, unsigned flags) { return *event = tn_new_event(flags), 0; }
API Result cuEventRecord(void *event, void *stream) { return tn_event_record(event, stream); }
API Result cuEventQuery(void *event) { return tn_event_query(event); }
API Result cuEventSynchronize(void *event) { return tn_event_synchronize(event); }
API Result cuEventElapsedTime(float *ms, void *from, void *to) { return *ms = tn_event_elapsed_ms(from, to), 0; }
API Result cuLaunchHostFunc(void *stream, void (*function)(void *), void *data) { return tn_queue(stream), function(data), 0; }

// Modules and kernels that were compiled at run time (Triton, nvrtc): they are loaded, found and launched, and do nothing.

typedef struct { const void *module; char *name; } Function;
static TnKernel needs_of(Function *function) { return tn_kernel_of(function->module, function->name, 0); }
API Result cuModuleLoadData(void **module, const void *image) { return *module = (void *)image, tn_launch(), 0; }
API Result cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) { return cuModuleLoadData(module, image); }
API Result cuModuleLoadFatBinary(void **module, const void *image) { return cuModuleLoadData(module, image); }
API Result cuModuleGetFunction(void **function, void *module, const char *name) {
  Function *made = calloc(1, sizeof *made);
  made->module = module, made->name = strdup(name);
  return *function = made, 0;
}
API Result cuModuleGetGlobal_v2(Address *address, size_t *size, void *module, const char *name) {
  if (size) *size = 0;
  return address ? (*address = 0x200000000000ull, 0) : 0;
}
API Result cuModuleGetLoadingMode(int *mode) { return *mode = 2, 0; }  // lazy
API Result cuLibraryLoadData(void **library, const void *code, int *a, void **b, unsigned c, int *d, void **e, unsigned f) { return cuModuleLoadData(library, code); }
API Result cuLibraryGetKernel(void **kernel, void *library, const char *name) { return cuModuleGetFunction(kernel, library, name); }
API Result cuLibraryGetModule(void **module, void *library) { return *module = library, 0; }
API Result cuKernelGetFunction(void **function, void *kernel) { return *function = kernel, 0; }
API Result cuFuncGetAttribute(int *value, int attribute, void *function) {
  TnKernel needs = needs_of(function);
  int found[] = {
    needs.threads, needs.shared_bytes, needs.constant_bytes, needs.local_bytes, needs.registers, needs.ptx_version,
    needs.binary_version, 0, (int)tn_card.shared_per_block_optin, 0
  };
  return *value = attribute >= 0 && attribute < 10 ? found[attribute] : 0, 0;
}
API Result cuFuncGetName(const char **name, void *function) { return *name = ((Function *)function)->name, 0; }
API Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments, void **extra) {
  tn_queue_kernel(stream, function, (int64_t)gx * gy * gz * bx * by * bz);
  return tn_launch(), 0;
}
struct LaunchConfig { unsigned gx, gy, gz, bx, by, bz, shared; void *stream; };
API Result cuLaunchKernelEx(const struct LaunchConfig *config, void *function, void **arguments, void **extra) { return cuLaunchKernel(function, config->gx, config->gy, config->gz, config->bx, config->by, config->bz, config->shared, config->stream, arguments, extra); }
API Result cuLaunchCooperativeKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream, void **arguments) { return cuLaunchKernel(function, gx, gy, gz, bx, by, bz, shared, stream, arguments, NULL); }
API Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) { return *blocks = tn_occupancy(needs_of(function), threads, (int64_t)shared), 0; }
API Result cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, void *function, int threads, size_t shared, unsigned flags) { return cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, threads, shared); }
API Result cuOccupancyMaxActiveClusters(int *clusters, void *function, const void *config) { return *clusters = tn_card.sm_count, 0; }
API Result cuTensorMapEncodeTiled(void *map) { return memset(map, 0, 128), 0; }  // its other arguments describe data that no kernel will read
