// See streams.h. Work never runs, and still takes its time: whether a block that another stream uses is free again depends on
// how far the card is behind the host. The clock is the host's, counts what it does, and so tells the same time in every run.
#define _GNU_SOURCE
#include "host.h"
#include "streams.h"

#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

static Stream defaults[3];  // the null stream, cudaStreamLegacy (1), cudaStreamPerThread (2)
static unsigned long long stream_ids = 16, capture_ids;
static int captures;
static Stream *all[65536];
static int all_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

TN_EXPORT Stream *tn_stream(void *handle) { return (uintptr_t)handle < 3 ? &defaults[(uintptr_t)handle] : handle; }

TN_EXPORT void *tn_new_stream(unsigned flags, int priority) {
  Stream *stream = calloc(1, sizeof *stream);
  stream->device = tn_current_device(), stream->flags = flags, stream->priority = priority;
  pthread_mutex_lock(&lock);
  stream->id = stream_ids++;
  if (all_count < 65536) all[all_count++] = stream;
  pthread_mutex_unlock(&lock);
  return stream;
}

TN_EXPORT void tn_drop_stream(void *handle) { tn_stream(handle)->capture = NULL; }  // events may still point to it

// In nanoseconds: what eager PyTorch spends on an operator with its kernel, what it takes to ask for an event and to load a
// kernel, and how long the shortest kernel runs.
enum { HOST_NS = 25000, QUERY_NS = 500, LOAD_NS = 500000, KERNEL_NS = 2000 };
enum { BYTES_OF_A_THREAD = 64 };  // a thread of an elementwise kernel handles a few elements of each operand
static int64_t host_ns, device_busy_until;

static int64_t advance(int64_t by) { return __atomic_add_fetch(&host_ns, by, __ATOMIC_RELAXED); }

static void wait_until(int64_t *clock, int64_t time) {
  int64_t now = __atomic_load_n(clock, __ATOMIC_RELAXED);
  while (now < time && !__atomic_compare_exchange_n(clock, &now, time, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
}

static void queue_for(void *handle, double ns) {
  Stream *stream = tn_stream(handle);
  if (stream->capture) stream->capture->graph->nodes++;
  int64_t now = advance(HOST_NS);
  if (stream->capture) return;
  wait_until(&stream->busy_until, now);
  int64_t until = __atomic_add_fetch(&stream->busy_until, (int64_t)(ns > KERNEL_NS ? ns : KERNEL_NS), __ATOMIC_RELAXED);
  wait_until(&device_busy_until, until);
}

static double ns_of(double amount, int64_t rate) { return rate > 0 ? amount / (double)rate * 1e9 : 0; }

TN_EXPORT void tn_queue(void *stream) { queue_for(stream, 0); }

// CUDA loads a kernel when it is first launched, and the host waits.
static int is_new(const void *function) {
  static const void *seen[1 << 14];
  size_t at = ((uintptr_t)function >> 4) % (1 << 14);
  for (int tries = 0; tries < 64; tries++, at = (at + 1) % (1 << 14)) {
    const void *there = NULL;
    if (__atomic_compare_exchange_n(&seen[at], &there, function, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) return 1;
    if (there == function) return 0;
  }
  return 0;
}

TN_EXPORT void tn_queue_kernel(void *stream, const void *function, int64_t threads) {
  if (is_new(function)) advance(LOAD_NS);
  queue_for(stream, ns_of((double)threads * BYTES_OF_A_THREAD, tn_card.memory_rate));
}
TN_EXPORT void tn_queue_product(void *stream, double operations) { queue_for(stream, ns_of(operations, tn_card.matrix_rate)); }
TN_EXPORT void tn_queue_copy(void *stream, const void *to, const void *from, size_t size) {
  int to_device = tn_is_device(to), from_device = tn_is_device(from), stays = to_device && from_device;
  queue_for(stream, stays ? ns_of(2.0 * (double)size, tn_card.memory_rate) : ns_of((double)size, tn_card.link_rate));
  // CUDA copies to memory that is not pinned through a buffer of its own, and the host waits, whatever the copy is called.
  int waits = from_device && !to_device && !tn_host_kind(to) && !tn_stream(stream)->capture;
  if (waits) wait_until(&host_ns, __atomic_load_n(&tn_stream(stream)->busy_until, __ATOMIC_RELAXED));
}

// torch keeps the tensors of a collective until its watchdog, a thread that looks every 100 ms, has seen that it is done. On a card
// the first steps take longer than that. Here they may not, so the host lets it look when it waits, the first times.
enum { WATCHDOG_US = 150000, WATCHDOG_LOOKS = 12 };
static int64_t collectives;

TN_EXPORT void tn_collective(void) { __atomic_add_fetch(&collectives, 1, __ATOMIC_RELAXED); }

static void let_watchdog_look(void) {
  static int64_t seen;
  static int looks;
  int64_t now = __atomic_load_n(&collectives, __ATOMIC_RELAXED);
  if (now == __atomic_exchange_n(&seen, now, __ATOMIC_RELAXED)) return;
  if (__atomic_fetch_add(&looks, 1, __ATOMIC_RELAXED) < WATCHDOG_LOOKS) usleep(WATCHDOG_US);
}

static int forbidden(Stream *stream) {
  if (stream->capture) stream->capture->is_broken = 1;
  return TN_CAPTURE_UNSUPPORTED;
}

TN_EXPORT int tn_stream_synchronize(void *handle) {
  Stream *stream = tn_stream(handle);
  if (stream->capture) return forbidden(stream);
  wait_until(&host_ns, __atomic_load_n(&stream->busy_until, __ATOMIC_RELAXED));
  let_watchdog_look();
  return TN_OK;
}

TN_EXPORT int tn_device_synchronize(void) {
  if (captures) return TN_CAPTURE_UNSUPPORTED;
  wait_until(&host_ns, __atomic_load_n(&device_busy_until, __ATOMIC_RELAXED));
  let_watchdog_look();
  return TN_OK;
}

TN_EXPORT void tn_finish_stream(void *handle) { tn_stream(handle)->is_finished = 1; }

TN_EXPORT int tn_stream_query(void *handle) {
  Stream *stream = tn_stream(handle);
  if (stream->capture) return forbidden(stream);
  return advance(QUERY_NS) >= stream->busy_until ? TN_OK : TN_NOT_READY;
}

TN_EXPORT int tn_stream_wait(void *handle, void *event) {
  Event *waited = event;
  if (waited && waited->capture && !tn_stream(handle)->capture) tn_stream(handle)->capture = waited->capture;
  if (waited) wait_until(&tn_stream(handle)->busy_until, waited->done_at);
  return TN_OK;
}

TN_EXPORT void *tn_new_event(unsigned flags) {
  Event *event = calloc(1, sizeof *event);
  event->flags = flags;
  return event;
}

TN_EXPORT int tn_event_record(void *event, void *stream) {
  Event *recorded = event;
  recorded->stream = tn_stream(stream);
  recorded->capture = recorded->stream->capture;
  wait_until(&recorded->stream->busy_until, advance(0));
  recorded->done_at = recorded->stream->busy_until;
  return TN_OK;
}

// Asking takes time too, or a script that asks until the work is done would ask forever.
TN_EXPORT int tn_event_query(void *event) {
  Event *asked = event;
  if (asked->capture) return TN_CAPTURE_UNSUPPORTED;
  return (asked->stream && asked->stream->is_finished) || advance(QUERY_NS) >= asked->done_at ? TN_OK : TN_NOT_READY;
}

TN_EXPORT int tn_event_synchronize(void *event) {
  Event *awaited = event;
  if (awaited->capture) return TN_CAPTURE_UNSUPPORTED;
  wait_until(&host_ns, awaited->done_at);
  let_watchdog_look();
  return TN_OK;
}

TN_EXPORT float tn_event_elapsed_ms(void *from, void *to) {
  double elapsed = (double)(((Event *)to)->done_at - ((Event *)from)->done_at) * 1e-6;
  return elapsed > 1e-3 ? (float)elapsed : 1e-3f;  // scripts divide by it
}

TN_EXPORT int tn_begin_capture(void *handle, int mode) {
  Stream *stream = tn_stream(handle);
  if (stream->capture || (uintptr_t)handle < 2) return TN_CAPTURE_UNSUPPORTED;
  Capture *capture = calloc(1, sizeof *capture);
  capture->graph = calloc(1, sizeof(Graph));
  capture->id = ++capture_ids, capture->origin = stream, capture->mode = mode;
  stream->capture = capture;
  __atomic_add_fetch(&captures, 1, __ATOMIC_RELAXED);
  return TN_OK;
}

TN_EXPORT int tn_end_capture(void *handle, void **graph) {
  Capture *capture = tn_stream(handle)->capture;
  *graph = NULL;
  if (!capture) return TN_INVALID_VALUE;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < all_count; i++)
    if (all[i]->capture == capture) all[i]->capture = NULL;
  pthread_mutex_unlock(&lock);
  __atomic_sub_fetch(&captures, 1, __ATOMIC_RELAXED);
  if (capture->is_broken) return TN_CAPTURE_INVALIDATED;
  *graph = capture->graph;
  return TN_OK;
}

TN_EXPORT int tn_capture_status(void *handle, unsigned long long *id, void **graph) {
  Capture *capture = tn_stream(handle)->capture;
  if (!capture) return CAPTURE_NONE;
  if (id) *id = capture->id;
  if (graph) *graph = capture->graph;
  return capture->is_broken ? CAPTURE_INVALIDATED : CAPTURE_ACTIVE;
}

