// See kernels.h.
#define _GNU_SOURCE
#include "kernels.h"
#include "machine_code.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

// Registered kernels and variables. A library registers tens of thousands at its start and few are ever asked for, so they
// are kept as they come and sorted at the first question.

typedef struct { const void *host; const char *name; void *binary; } Registered;
static Registered *registered;
static int count, room, sorted;

TN_EXPORT void **tn_register_binary(void *binary) {
  void **handle = calloc(2, sizeof(void *));
  handle[0] = binary;
  return handle;
}

TN_EXPORT void tn_register_kernel(void **binary, const void *host, const char *name) {
  pthread_mutex_lock(&lock);
  if (count == room) registered = realloc(registered, sizeof(Registered) * (size_t)(room = room * 2 + 4096));
  registered[count++] = (Registered){host, name, binary ? binary[0] : NULL};
  pthread_mutex_unlock(&lock);
}

static int by_host(const void *a, const void *b) {
  uintptr_t left = (uintptr_t)((const Registered *)a)->host, right = (uintptr_t)((const Registered *)b)->host;
  return left < right ? -1 : left > right;
}

static Registered *find(const void *host) {  // with the lock held
  if (sorted != count) qsort(registered, (size_t)count, sizeof(Registered), by_host), sorted = count;
  Registered wanted = {.host = host};
  return count ? bsearch(&wanted, registered, (size_t)count, sizeof(Registered), by_host) : NULL;
}

// Device variables lie apart from what is allocated, so that they do not change the order of addresses.

static struct { const void *host; uint64_t address; } variables[65536];
static int variable_count;
static uint64_t next_variable = 0x200000000000ull;

TN_EXPORT void tn_register_variable(const void *host, size_t size) {
  pthread_mutex_lock(&lock);
  if (variable_count < 65536) {
    variables[variable_count].host = host;
    variables[variable_count++].address = next_variable;
    next_variable += (size + 511) / 512 * 512;
  }
  pthread_mutex_unlock(&lock);
}

TN_EXPORT void *tn_variable(const void *host) {
  for (int i = 0; i < variable_count; i++)
    if (variables[i].host == host) return (void *)variables[i].address;
  return (void *)0x200000000000ull;
}

// What a kernel needs. Code is read at the first question about a fat binary; what was read is kept without its bytes.

static pthread_mutex_t code_lock = PTHREAD_MUTEX_INITIALIZER;
static Code *codes;
static int code_count;
static int64_t assumed;

// How many questions were answered with an assumption since somebody asked this.
TN_EXPORT int64_t tn_assumed_kernels(void) { return __atomic_exchange_n(&assumed, 0, __ATOMIC_RELAXED); }

static const Code *code_of(const void *binary) {  // with the lock held
  for (int i = 0; i < code_count; i++)
    if (codes[i].binary == binary) return &codes[i];
  codes = realloc(codes, sizeof(Code) * (size_t)(code_count + 1));
  codes[code_count] = tn_read_code(binary);
  return &codes[code_count++];
}

static int64_t rounded(int64_t value, int64_t step) { return (value + step - 1) / step * step; }

// Warps get registers in units of 256, and each of the four partitions of a multiprocessor has a quarter of them.
static int64_t warps_by_registers(int registers) {
  int64_t warp_registers = rounded((int64_t)registers * 32, 256);
  return warp_registers ? tn_card.registers_per_sm / 4 / warp_registers * 4 : tn_card.threads_per_sm / 32;
}

TN_EXPORT TnKernel tn_kernel_of(const void *binary, const char *name, int is_registered) {
  int version = tn_card.binary_version;
  TnKernel kernel = {.registers = 32, .binary_version = version, .ptx_version = version};
  pthread_mutex_lock(&code_lock);
  // A library keeps what it registers; a module may be gone at any time, and another one lie in its place.
  Code module = is_registered ? (Code){0} : tn_read_code(binary);
  const Code *code = is_registered ? code_of(binary) : &module;
  TnKernel *found = tn_known_kernel(code, name);
  if (found) kernel = *found;
  if (!found && code->ptx_version && !code->count) {  // the driver compiles it for the card
    kernel.ptx_version = code->ptx_version, kernel.binary_version = tn_card.major * 10 + tn_card.minor;
  }
  free(module.kernels);
  pthread_mutex_unlock(&code_lock);
  if (!found) __atomic_add_fetch(&assumed, 1, __ATOMIC_RELAXED);
  int64_t threads = warps_by_registers(kernel.registers) * 32;
  if (threads > tn_card.threads_per_block) threads = tn_card.threads_per_block;
  if (!kernel.threads || kernel.threads > threads) kernel.threads = (int)threads;
  return kernel;
}

TN_EXPORT TnKernel tn_kernel(const void *host) {
  pthread_mutex_lock(&lock);
  Registered *at = find(host), found = at ? *at : (Registered){0};
  pthread_mutex_unlock(&lock);
  return tn_kernel_of(found.binary, found.name ? found.name : "", 1);
}

// The first registered kernel of this name; for tests.
TN_EXPORT TnKernel tn_kernel_named(const char *name) {
  const void *host = NULL;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count && !host; i++)
    if (!strcmp(registered[i].name, name)) host = registered[i].host;
  pthread_mutex_unlock(&lock);
  return tn_kernel(host);
}

TN_EXPORT int tn_occupancy(TnKernel kernel, int threads, int64_t dynamic_shared) {
  // As NVIDIA's cuda_occupancy.h computes it, for a kernel that may use all shared memory.
  if (threads <= 0 || threads > tn_card.threads_per_block) return 0;
  int64_t warps = (threads + 31) / 32, blocks = tn_card.blocks_per_sm;
  int64_t by_threads = tn_card.threads_per_sm / 32 / warps;
  int64_t by_registers = warps_by_registers(kernel.registers) / warps;
  if (by_threads < blocks) blocks = by_threads;
  if (by_registers < blocks) blocks = by_registers;
  int64_t reserved = tn_card.major >= 8 ? 1024 : 0, unit = tn_card.major >= 8 ? 128 : 256;
  int64_t shared = rounded(kernel.shared_bytes + dynamic_shared + reserved, unit);
  if (shared > 0 && tn_card.shared_per_sm / shared < blocks) blocks = tn_card.shared_per_sm / shared;
  return (int)blocks;
}

TN_EXPORT int tn_device_attribute(int attribute, int device) {
  switch (attribute) {
    case 1: return tn_card.threads_per_block;
    case 2: case 3: return 1024;
    case 4: return 64;
    case 5: return 2147483647;
    case 6: case 7: return 65535;
    case 8: return (int)tn_card.shared_per_block;
    case 9: return 65536;
    case 10: return 32;
    case 11: return 2147483647;
    case 12: case 82: return tn_card.registers_per_sm;
    case 13: return tn_card.clock_khz;
    case 14: return 512;
    case 16: return tn_card.sm_count;
    case 33: return device + 1;
    case 36: return tn_card.memory_clock_khz;
    case 37: return tn_card.memory_bus_bits;
    case 38: return tn_card.l2_bytes;
    case 39: return tn_card.threads_per_sm;
    case 40: return 3;
    case 51: return 32;
    case 75: return tn_card.major;
    case 76: return tn_card.minor;
    case 81: return (int)tn_card.shared_per_sm;
    case 97: return (int)tn_card.shared_per_block_optin;
    case 106: return tn_card.blocks_per_sm;
    case 111: return tn_card.major >= 8 ? 1024 : 0;
    case 120: case 127: return tn_card.major >= 9;  // clusters; tensor maps
    // What a card of this kind can do: map host memory, run kernels side by side, unified addresses, priorities, managed memory,
    // preemption, cooperative launches, virtual memory, pools.
    case 15: case 19: case 31: case 41: case 78: case 79: case 80: case 83: case 89: case 90: case 91: case 95: case 99: case 102: case 103: case 115: case 125:
      return 1;
    default: return 0;
  }
}

// A driver's function by its plain name: the newest version that the library has, as cuGetProcAddress finds it.
TN_EXPORT int tn_entry_point(const char *name, void **function, int *status) {
  void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  char versioned[128];
  *function = NULL;
  for (int version = 4; driver && !*function && version >= 2; version--) {
    snprintf(versioned, sizeof versioned, "%s_v%d", name, version);
    *function = dlsym(driver, versioned);
  }
  if (driver && !*function) *function = dlsym(driver, name);
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}

static const struct { int number; const char *name, *text; } errors[] = {
  {0, "cudaSuccess", "no error"},
  {1, "cudaErrorInvalidValue", "invalid argument"},
  {2, "cudaErrorMemoryAllocation", "out of memory"},
  {98, "cudaErrorInvalidDeviceFunction", "invalid device function"},
  {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
  {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
  {400, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
  {500, "cudaErrorSymbolNotFound", "named symbol not found"},
  {600, "cudaErrorNotReady", "device not ready"},
  {801, "cudaErrorNotSupported", "operation not supported"},
  {900, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
  {901, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
};

TN_EXPORT const char *tn_error_name(int error) {
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
    if (errors[i].number == error) return errors[i].name;
  return "cudaErrorUnknown";
}

TN_EXPORT const char *tn_error_text(int error) {
  for (size_t i = 0; i < sizeof errors / sizeof errors[0]; i++)
    if (errors[i].number == error) return errors[i].text;
  return "unknown error";
}
