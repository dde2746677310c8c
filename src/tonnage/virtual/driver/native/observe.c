// What torch itself tells: which operator runs, which block was made or dropped, and the tensor that it is for.
//
// Nothing here is compiled against torch. Four of its exported functions are found by name and called or stood before:
//   at::addGlobalCallback(RecordFunctionCallback)      the begin and end of every operator
//   c10::reportMemoryUsageToProfiler(...)              every block that the caching allocator hands out or takes back
//   c10::memoryProfilingEnabled()                      torch's allocator of the host tells of its blocks only where this says yes
//   at::detail::empty_generic, empty_strided_generic   the shape and type of the tensor that asks for a block
// This library is loaded before torch with global symbols, so torch's own calls of the latter arrive here first.
#define _GNU_SOURCE
#include "core.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define DEPTH 256
#define CPU_DEVICE 0  // c10::DeviceType
#define CUDA_DEVICE 1

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void (*on_events)(void);

// Torch's own function of this name. Its libraries are not among the global symbols, so they are asked themselves.
static void *own(const char *library, const char *name) {
  void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD);
  return handle ? dlsym(handle, name) : NULL;
}
static int is_open;

// Names of operators, numbered in the order in which they first came. Torch keeps a schema's name for good.

#define NAMES 4096
static const char *names[NAMES] = {""};
static int name_count = 1;
static struct { const char *pointer; int number; } by_pointer[2 * NAMES];

static int number_of(const char *name) {
  size_t slot = ((uintptr_t)name >> 4) * 2654435761u % (2 * NAMES);
  while (by_pointer[slot].pointer && by_pointer[slot].pointer != name) slot = (slot + 1) % (2 * NAMES);
  if (by_pointer[slot].pointer) return by_pointer[slot].number;
  int number = 0;
  pthread_mutex_lock(&lock);
  if (name_count < NAMES - 1) {
    names[number = name_count++] = strdup(name);
    by_pointer[slot].number = number;
    by_pointer[slot].pointer = name;
  }
  pthread_mutex_unlock(&lock);
  return number;
}

TN_EXPORT const char *tn_name(int number) { return number > 0 && number < name_count ? names[number] : ""; }

// The operators that run on this thread, outermost first, and the tensor that is being made.

static __thread const char *stack[DEPTH];
static __thread int depth;
static __thread int64_t serial;
static __thread int has_pending;
static __thread struct { int32_t dtype, dims; int64_t shape[TN_DIMENSIONS]; } tensor = {.dtype = -1};
static int64_t serials;

// Operators that only make a tensor for the one that called them.
static int only_makes(const char *name) {
  return !strncmp(name, "aten::empty", 11) || !strncmp(name, "aten::resize", 12) || !strcmp(name, "aten::new_empty");
}

static const char *operator_at_work(void) {
  int at = depth < DEPTH ? depth - 1 : DEPTH - 1;
  while (at > 0 && (!stack[at] || only_makes(stack[at]))) at--;
  return at >= 0 && stack[at] ? stack[at] : "";
}

static const char *(*name_of)(const void *);

// Where a C++ function returns an object, the caller passes a place for it: x86-64 as a first argument, AArch64 in the
// register x8, which C cannot name, so small stubs stand before the functions there.
#if defined(__aarch64__)
__asm__(
    "tn_begin:\n"
    "  mov x1, x0\n"
    "  mov x0, x8\n"
    "  b tn_begin_at\n");
#define BEGIN tn_begin
void *tn_begin(void **, const void *) __attribute__((visibility("hidden")));
#else
#define BEGIN tn_begin_at
#endif

void *tn_begin_at(void **context, const void *function) __attribute__((visibility("hidden")));
void *tn_begin_at(void **context, const void *function) {
  *context = NULL;
  if (is_open) {
    const char *name = name_of(function);
    // Names of autograd's nodes live no longer than their call: they are no operators, and are left out.
    if (depth < DEPTH) stack[depth] = name && strstr(name, "::") && strncmp(name, "autograd::", 10) ? name : NULL;
    if (!depth++) serial = __atomic_add_fetch(&serials, 1, __ATOMIC_RELAXED);
  }
  return context;
}

// Whether Python is on its way out of an error here. A callback would lose it, so the log waits.
static int is_failing(void) {
  static int (*holds_lock)(void);
  static void *(*error)(void);
  if (!error) {
    holds_lock = (int (*)(void))dlsym(RTLD_DEFAULT, "PyGILState_Check");
    error = (void *(*)(void))dlsym(RTLD_DEFAULT, "PyErr_Occurred");
  }
  return error && holds_lock && holds_lock() && error();
}

// Whether so much time has passed that whoever looks at this process from time to time should do so.
static int is_time(void) {
  static int64_t next;
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  int64_t milliseconds = (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
  if (milliseconds < next) return 0;
  next = milliseconds + 20;
  return 1;
}

static void end(const void *function, void *context) {
  if (!is_open || !depth) return;
  if (--depth) return;
  serial = 0;
  if (on_events && (has_pending || is_time()) && !is_failing()) has_pending = 0, on_events();
}

// The log.

static TnEvent *events;
static int64_t event_count, event_room, taken;

TN_EXPORT void tn_log(int kind, int device, uint64_t address, int64_t size) {
  if (!is_open) return;
  const char *name = operator_at_work();
  TnEvent event = {.kind = kind, .device = device, .address = address, .size = size, .serial = serial, .dtype = -1};
  event.thread = (uint64_t)pthread_self();
  event.operation = *name ? number_of(name) : 0;
  if (kind == TN_ALLOC || kind == TN_OOM) {
    event.dtype = tensor.dtype, event.dims = tensor.dims;
    memcpy(event.shape, tensor.shape, sizeof tensor.shape);
    tensor.dtype = -1;
  }
  pthread_mutex_lock(&lock);
  if (taken && taken == event_count) taken = event_count = 0;
  if (event_count == event_room) events = realloc(events, sizeof(TnEvent) * (size_t)(event_room = event_room * 2 + 4096));
  events[event_count++] = event;
  pthread_mutex_unlock(&lock);
  has_pending = 1;
}

TN_EXPORT void tn_log_workspace(const void *address, size_t size) {
  if (address && size) tn_log(TN_WORKSPACE, tn_current_device(), (uint64_t)address, (int64_t)size);
}

TN_EXPORT int64_t tn_take_events(TnEvent *to, int64_t most) {
  pthread_mutex_lock(&lock);
  int64_t count = event_count - taken < most ? event_count - taken : most;
  memcpy(to, events + taken, sizeof(TnEvent) * (size_t)count);
  taken += count;
  pthread_mutex_unlock(&lock);
  return count;
}

// In torch's place. `device` is a c10::Device: a type and an index, a byte each.

typedef void Report(void *, int64_t, size_t, size_t, uint16_t);

TN_EXPORT void report_memory(void *, int64_t, size_t, size_t, uint16_t) __asm__("_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
void report_memory(void *pointer, int64_t size, size_t allocated, size_t reserved, uint16_t device) {
  static Report *plain;
  if ((device & 0xff) == CUDA_DEVICE) {
    if (size > 0) tn_end_request();
    tn_log(size > 0 ? TN_ALLOC : TN_FREE, device >> 8, (uint64_t)pointer, size);
  } else if ((device & 0xff) == CPU_DEVICE && (size >= TN_HOST_LARGE || size <= -TN_HOST_LARGE)) {
    tn_log(size > 0 ? TN_HOST_ALLOC : TN_HOST_FREE, 0, (uint64_t)pointer, size);
  }
  if (!plain) plain = (Report *)own("libc10.so", "_ZN3c1027reportMemoryUsageToProfilerEPvlmmNS_6DeviceE");
  if (plain) plain(pointer, size, allocated, reserved, device);
}

TN_EXPORT unsigned char profiles_memory(void) __asm__("_ZN3c1022memoryProfilingEnabledEv");
unsigned char profiles_memory(void) {
  static unsigned char (*plain)(void);
  if (is_open) return 1;
  if (!plain) plain = (unsigned char (*)(void))own("libc10.so", "_ZN3c1022memoryProfilingEnabledEv");
  return plain ? plain() : 0;
}

typedef void OutOfMemory(int64_t, size_t, size_t, uint16_t);

TN_EXPORT void report_oom(int64_t, size_t, size_t, uint16_t) __asm__("_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE");
void report_oom(int64_t size, size_t allocated, size_t reserved, uint16_t device) {
  static OutOfMemory *plain;
  if ((device & 0xff) == CUDA_DEVICE) {
    // The allocator's figures of the moment travel in the place of a shape.
    tensor.dtype = -1, tensor.dims = 2, tensor.shape[0] = (int64_t)allocated, tensor.shape[1] = (int64_t)reserved;
    tn_log(TN_OOM, device >> 8, 0, size);
    tn_end_request();
  }
  if (!plain) plain = (OutOfMemory *)own("libc10.so", "_ZN3c1027reportOutOfMemoryToProfilerElmmNS_6DeviceE");
  if (plain) plain(size, allocated, reserved, device);
}

#define EMPTY "_ZN2at6detail13empty_genericEN3c108ArrayRefIlEEPNS1_9AllocatorENS1_14DispatchKeySetENS1_10ScalarTypeESt8optionalINS1_12MemoryFormatEE"
#define EMPTY_STRIDED "_ZN2at6detail21empty_strided_genericEN3c108ArrayRefIlEES3_PNS1_9AllocatorENS1_14DispatchKeySetENS1_10ScalarTypeE"

static void about_to_make(const int64_t *shape, size_t dims, int8_t dtype) {
  if (!is_open) return;
  tensor.dtype = dtype;
  tensor.dims = dims <= TN_DIMENSIONS ? (int32_t)dims : TN_DIMENSIONS;
  memcpy(tensor.shape, shape, sizeof(int64_t) * (size_t)tensor.dims);
}

#if defined(__aarch64__)
// Each stub keeps the arguments, notes the shape, and goes on to torch's function with the arguments as they came.
void *tn_before_empty(const int64_t *, size_t, void *, uint64_t, int8_t) __attribute__((visibility("hidden")));
void *tn_before_empty(const int64_t *shape, size_t dims, void *allocator, uint64_t keys, int8_t dtype) {
  static void *plain;
  about_to_make(shape, dims, dtype);
  return plain ? plain : (plain = own("libtorch_cpu.so", EMPTY));
}

void *tn_before_empty_strided(const int64_t *, size_t, const int64_t *, size_t, void *, uint64_t, int8_t) __attribute__((visibility("hidden")));
void *tn_before_empty_strided(const int64_t *shape, size_t dims, const int64_t *strides, size_t stride_count, void *allocator, uint64_t keys, int8_t dtype) {
  static void *plain;
  about_to_make(shape, dims, dtype);
  return plain ? plain : (plain = own("libtorch_cpu.so", EMPTY_STRIDED));
}

#define STUB(name, before) \
  __asm__(".globl " name "\n.type " name ", %function\n" name ":\n" \
          "  stp x29, x30, [sp, #-96]!\n  mov x29, sp\n" \
          "  stp x0, x1, [sp, #16]\n  stp x2, x3, [sp, #32]\n  stp x4, x5, [sp, #48]\n  stp x6, x7, [sp, #64]\n" \
          "  str x8, [sp, #80]\n" \
          "  bl " before "\n  mov x16, x0\n" \
          "  ldp x0, x1, [sp, #16]\n  ldp x2, x3, [sp, #32]\n  ldp x4, x5, [sp, #48]\n  ldp x6, x7, [sp, #64]\n" \
          "  ldr x8, [sp, #80]\n" \
          "  ldp x29, x30, [sp], #96\n  br x16\n")
STUB(EMPTY, "tn_before_empty");
STUB(EMPTY_STRIDED, "tn_before_empty_strided");
#else
typedef void *Empty(void *, const int64_t *, size_t, void *, uint64_t, int8_t, uint32_t);
TN_EXPORT void *empty_generic(void *, const int64_t *, size_t, void *, uint64_t, int8_t, uint32_t) __asm__(EMPTY);
void *empty_generic(void *made, const int64_t *shape, size_t dims, void *allocator, uint64_t keys, int8_t dtype, uint32_t format) {
  static Empty *plain;
  if (!plain) plain = (Empty *)own("libtorch_cpu.so", EMPTY);
  about_to_make(shape, dims, dtype);
  return plain(made, shape, dims, allocator, keys, dtype, format);
}

typedef void *EmptyStrided(void *, const int64_t *, size_t, const int64_t *, size_t, void *, uint64_t, int8_t);
TN_EXPORT void *empty_strided(void *, const int64_t *, size_t, const int64_t *, size_t, void *, uint64_t, int8_t) __asm__(EMPTY_STRIDED);
void *empty_strided(void *made, const int64_t *shape, size_t dims, const int64_t *strides, size_t stride_count, void *allocator, uint64_t keys, int8_t dtype) {
  static EmptyStrided *plain;
  if (!plain) plain = (EmptyStrided *)own("libtorch_cpu.so", EMPTY_STRIDED);
  about_to_make(shape, dims, dtype);
  return plain(made, shape, dims, strides, stride_count, allocator, keys, dtype);
}
#endif

// at::RecordFunctionCallback. It is passed by value, in memory.
typedef struct {
  void *(*begin)(void **, const void *);
  void (*end)(const void *, void *);
  double probability;
  uint8_t scopes[10];
  uint8_t needs_inputs, needs_outputs, needs_ids;
} Callback;

static void listen_to_operators(void) {
  void (*add)(Callback) = (void (*)(Callback))own("libtorch_cpu.so", "_ZN2at17addGlobalCallbackENS_22RecordFunctionCallbackE");
  name_of = (const char *(*)(const void *))own("libtorch_cpu.so", "_ZNK2at14RecordFunction4nameEv");
  if (!add || !name_of) return;
  Callback callback = {BEGIN, end, 1.0, {1}, 0, 0, 0};  // the scope FUNCTION alone
  add(callback);
}

TN_EXPORT void tn_open(void (*events_waiting)(void)) {
  static int listening;
  on_events = events_waiting;
  is_open = 1;
  if (!listening++) listen_to_operators();
}

TN_EXPORT void tn_close(void) {
  is_open = 0;
  on_events = NULL;
}
