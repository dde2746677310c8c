// See host.h. Pages are mapped and not written, so that what nobody touches costs nothing.
#define _GNU_SOURCE
#include "host.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef struct { uintptr_t start; size_t size; int kind; } Piece;
static Piece *pieces;
static int count, room;
static int64_t pinned_bytes, pinned_peak_bytes;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int place_of(uintptr_t address) {
  int low = 0, high = count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (pieces[middle].start <= address) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

static void add(Piece piece) {
  pthread_mutex_lock(&lock);
  int at = place_of(piece.start) + 1;
  if (count == room) pieces = realloc(pieces, sizeof(Piece) * (size_t)(room = room * 2 + 64));
  memmove(pieces + at + 1, pieces + at, sizeof(Piece) * (size_t)(count++ - at));
  pieces[at] = piece;
  if (piece.kind != TN_MANAGED) pinned_bytes += (int64_t)piece.size;
  if (pinned_bytes > pinned_peak_bytes) pinned_peak_bytes = pinned_bytes;
  pthread_mutex_unlock(&lock);
}

static Piece drop(uintptr_t address) {
  Piece found = {0};
  pthread_mutex_lock(&lock);
  int at = place_of(address);
  if (at >= 0 && pieces[at].start == address) {
    found = pieces[at];
    memmove(pieces + at, pieces + at + 1, sizeof(Piece) * (size_t)(--count - at));
    if (found.kind != TN_MANAGED) pinned_bytes -= (int64_t)found.size;
  }
  pthread_mutex_unlock(&lock);
  return found;
}

TN_EXPORT void *tn_host_alloc(size_t size, int kind) {
  void *pointer = mmap(NULL, size ? size : 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pointer == MAP_FAILED) return NULL;
  add((Piece){(uintptr_t)pointer, size, kind});
  if (kind != TN_MANAGED && size >= TN_HOST_LARGE) tn_log(TN_HOST_PIN, 0, (uint64_t)pointer, (int64_t)size);
  return pointer;
}

TN_EXPORT int tn_host_free(void *pointer) {
  Piece found = drop((uintptr_t)pointer);
  if (!found.start) return 0;
  munmap(pointer, found.size ? found.size : 1);
  if (found.size >= TN_HOST_LARGE) tn_log(TN_HOST_FREE, 0, (uint64_t)pointer, (int64_t)found.size);
  return 1;
}

TN_EXPORT void tn_host_register(void *pointer, size_t size) { add((Piece){(uintptr_t)pointer, size, TN_REGISTERED}); }
TN_EXPORT void tn_host_unregister(void *pointer) { drop((uintptr_t)pointer); }

TN_EXPORT int tn_host_kind(const void *pointer) {
  pthread_mutex_lock(&lock);
  int at = place_of((uintptr_t)pointer);
  int kind = at >= 0 && (uintptr_t)pointer < pieces[at].start + pieces[at].size ? pieces[at].kind : 0;
  pthread_mutex_unlock(&lock);
  return kind;
}

TN_EXPORT int64_t tn_pinned_peak_bytes(void) { return pinned_peak_bytes; }
