// Streams, events, captures and graphs: one kind of object behind the runtime's and the driver's handles.
#pragma once
#include "core.h"

typedef struct Capture Capture;
typedef struct { int nodes; } Graph;
typedef struct { int nodes; } GraphExec;
typedef struct { int device, priority; unsigned flags; unsigned long long id; Capture *capture; int64_t busy_until; int is_finished; } Stream;
typedef struct { unsigned flags; int64_t done_at; Capture *capture; Stream *stream; } Event;
struct Capture { unsigned long long id; Graph *graph; Stream *origin; int mode, is_broken; };

enum { CAPTURE_NONE = 0, CAPTURE_ACTIVE = 1, CAPTURE_INVALIDATED = 2 };
enum { TN_OK = 0, TN_INVALID_VALUE = 1, TN_NOT_READY = 600, TN_CAPTURE_UNSUPPORTED = 900, TN_CAPTURE_INVALIDATED = 901 };

Stream *tn_stream(void *handle);  // the object behind a handle; the default streams have one each
void *tn_new_stream(unsigned flags, int priority);
void tn_drop_stream(void *handle);
int tn_stream_synchronize(void *handle);
int tn_device_synchronize(void);
void tn_finish_stream(void *handle);  // this stream is done with everything and gets nothing more
int tn_stream_query(void *handle);
int tn_stream_wait(void *handle, void *event);

// Something is launched or copied: a node of the graph where one is captured. The stream is busy for as long as a kernel of so
// many threads, a product of so many operations or a copy of so many bytes takes on this card, roughly.
void tn_queue(void *stream);
void tn_queue_kernel(void *stream, const void *function, int64_t threads);
void tn_queue_product(void *stream, double operations);
void tn_queue_copy(void *stream, const void *to, const void *from, size_t size);

void tn_collective(void);  // a collective of NCCL is launched

void *tn_new_event(unsigned flags);
int tn_event_record(void *event, void *stream);
int tn_event_query(void *event);
int tn_event_synchronize(void *event);
float tn_event_elapsed_ms(void *from, void *to);

int tn_begin_capture(void *stream, int mode);
int tn_end_capture(void *stream, void **graph);
int tn_capture_status(void *stream, unsigned long long *id, void **graph);
