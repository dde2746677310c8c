// See streams.h. Work never runs, so it is done when somebody waits for it: an event that nobody waited for stays "not ready",
// which is how the caching allocator keeps blocks that another stream uses.
#define _GNU_SOURCE
#include "streams.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

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

TN_EXPORT void tn_queue(void *handle) {
  Stream *stream = tn_stream(handle);
  tn_tick();
  if (stream->capture) stream->capture->graph->nodes++;
}

static int forbidden(Stream *stream) {
  if (stream->capture) stream->capture->is_broken = 1;
  return TN_CAPTURE_UNSUPPORTED;
}

TN_EXPORT int tn_stream_synchronize(void *handle) {
  Stream *stream = tn_stream(handle);
  if (stream->capture) return forbidden(stream);
  tn_catch_up(tn_now());
  return TN_OK;
}

TN_EXPORT int tn_device_synchronize(void) {
  if (captures) return TN_CAPTURE_UNSUPPORTED;
  tn_catch_up(tn_now());
  return TN_OK;
}

TN_EXPORT void tn_finish_stream(void *handle) { tn_stream(handle)->done_until = INT64_MAX; }

TN_EXPORT int tn_stream_query(void *handle) { return tn_stream(handle)->capture ? forbidden(tn_stream(handle)) : TN_OK; }

TN_EXPORT int tn_stream_wait(void *handle, void *event) {
  Event *waited = event;
  if (waited && waited->capture && !tn_stream(handle)->capture) tn_stream(handle)->capture = waited->capture;
  return TN_OK;
}

TN_EXPORT void *tn_new_event(unsigned flags) {
  Event *event = calloc(1, sizeof *event);
  event->flags = flags;
  return event;
}

static double now_ms(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

TN_EXPORT int tn_event_record(void *event, void *stream) {
  Event *recorded = event;
  recorded->stream = tn_stream(stream);
  recorded->capture = recorded->stream->capture;
  recorded->tick = tn_tick();
  recorded->time_ms = now_ms();
  return TN_OK;
}

TN_EXPORT int tn_event_query(void *event) {
  Event *asked = event;
  if (asked->capture) return TN_CAPTURE_UNSUPPORTED;
  if (!asked->tick || tn_is_done(asked->tick) || asked->tick <= asked->stream->done_until) return TN_OK;
  return TN_NOT_READY;
}

TN_EXPORT int tn_event_synchronize(void *event) {
  Event *awaited = event;
  if (awaited->capture) return TN_CAPTURE_UNSUPPORTED;
  tn_catch_up(awaited->tick);
  return TN_OK;
}

TN_EXPORT float tn_event_elapsed_ms(void *from, void *to) {
  double elapsed = ((Event *)to)->time_ms - ((Event *)from)->time_ms;
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

TN_EXPORT int tn_any_capture(void) { return captures; }
