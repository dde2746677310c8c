// The card's memory, the log, and the way to Python. See core.h.
#define _GNU_SOURCE
#include "core.h"

#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

TN_EXPORT TnCard tn_card;
TN_EXPORT int tn_cuda_major = 13;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
#define LOCKED for (int once_ = (pthread_mutex_lock(&lock), 1); once_; once_ = (pthread_mutex_unlock(&lock), 0))

// Addresses. The order of addresses decides which of two equally large free blocks torch takes, so stretches are placed as
// NVIDIA's driver on Linux was seen to: in ranges of a multiple of 32 MiB, from a top down, the rest of a range serving later and
// smaller requests, newest range first (tonnage/allocator/segments.py tells the same in Python). The driver's top is where the
// host's own mappings begin, at a place drawn for each process. Nothing is mapped here, so these addresses lie where neither
// Linux's mmap, 47 TiB above, nor a program, above 0x5555..., ever comes.

#define RANGE (32ull << 20)
#define PAGE (2ull << 20)
#define TOP 0x500000000000ull
#define BOTTOM 0x200000000000ull

typedef struct { uint64_t start, stop; } Stretch;
typedef struct { Stretch *items; int count, room; } Stretches;
typedef struct { Stretch whole; Stretches holes; } Range;

static Range *ranges;
static int range_count, range_room;
static Stretches gaps;
static uint64_t bottom = TOP;

static void insert_at(Stretches *list, int at, Stretch item) {
  if (list->count == list->room) list->items = realloc(list->items, sizeof(Stretch) * (list->room = list->room * 2 + 8));
  memmove(list->items + at + 1, list->items + at, sizeof(Stretch) * (size_t)(list->count++ - at));
  list->items[at] = item;
}

static void remove_at(Stretches *list, int at) {
  memmove(list->items + at, list->items + at + 1, sizeof(Stretch) * (size_t)(--list->count - at));
}

// Adds a stretch in its place and joins it with its neighbours.
static void join(Stretches *list, Stretch item) {
  int at = 0;
  while (at < list->count && list->items[at].start < item.start) at++;
  insert_at(list, at, item);
  if (at + 1 < list->count && list->items[at].stop == list->items[at + 1].start) {
    list->items[at].stop = list->items[at + 1].stop;
    remove_at(list, at + 1);
  }
  if (at && list->items[at - 1].stop == list->items[at].start) {
    list->items[at - 1].stop = list->items[at].stop;
    remove_at(list, at);
  }
}

static uint64_t take_hole(Range *range, uint64_t size) {
  for (int i = 0; i < range->holes.count; i++) {
    Stretch *hole = &range->holes.items[i];
    if (hole->stop - hole->start < size) continue;
    uint64_t start = hole->start;
    if (hole->stop - hole->start > size) hole->start += size;
    else remove_at(&range->holes, i);
    return start;
  }
  return 0;
}

static uint64_t new_range(uint64_t length) {
  for (int i = gaps.count - 1; i >= 0; i--) {
    Stretch *gap = &gaps.items[i];
    if (gap->stop - gap->start < length) continue;
    gap->stop -= length;
    uint64_t start = gap->stop;
    if (gap->stop == gap->start) remove_at(&gaps, i);
    return start;
  }
  return bottom -= length;
}

static uint64_t take_addresses(uint64_t size) {
  for (int i = range_count - 1; i >= 0; i--) {
    uint64_t address = take_hole(&ranges[i], size);
    if (address) return address;
  }
  uint64_t length = (size + RANGE - 1) / RANGE * RANGE, start = new_range(length);
  if (range_count == range_room) ranges = realloc(ranges, sizeof(Range) * (size_t)(range_room = range_room * 2 + 16));
  Range *fresh = &ranges[range_count++];
  *fresh = (Range){{start, start + length}, {0}};
  insert_at(&fresh->holes, 0, fresh->whole);
  return take_hole(fresh, size);
}

static void give_addresses(uint64_t address, uint64_t size) {
  for (int i = 0; i < range_count; i++) {
    Range *range = &ranges[i];
    if (address < range->whole.start || address >= range->whole.stop) continue;
    join(&range->holes, (Stretch){address, address + size});
    if (range->holes.items[0].start != range->whole.start || range->holes.items[0].stop != range->whole.stop) return;
    join(&gaps, range->whole);
    free(range->holes.items);
    memmove(range, range + 1, sizeof(Range) * (size_t)(--range_count - i));
    return;
  }
}

// Allocations, sorted by address.

typedef struct { uint64_t address; int64_t size; int device; int physical; } Held;
static Held *held;
static int held_count, held_room;
static int64_t segment_bytes[TN_DEVICES];

static int place_of(uint64_t address) {  // the last one that starts at or before the address
  int low = 0, high = held_count;
  while (low < high) {
    int middle = (low + high) / 2;
    if (held[middle].address <= address) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

static void keep(Held item) {
  int at = place_of(item.address) + 1;
  if (held_count == held_room) held = realloc(held, sizeof(Held) * (size_t)(held_room = held_room * 2 + 64));
  memmove(held + at + 1, held + at, sizeof(Held) * (size_t)(held_count++ - at));
  held[at] = item;
}

// What libraries hold on the card beside allocations: the context, loaded kernels, handles. Figures come from the catalogue.

#define PARTS 64
static struct { char name[48]; int64_t bytes; int uses; } parts[PARTS];
static int part_count;
static int64_t outside_bytes[TN_DEVICES];

TN_EXPORT void tn_set_part(const char *name, int64_t bytes) {
  LOCKED {
    if (part_count < PARTS) {
      snprintf(parts[part_count].name, sizeof parts[0].name, "%s", name);
      parts[part_count++].bytes = bytes;
    }
  }
}

TN_EXPORT int tn_part_uses(const char *name) {
  for (int i = 0; i < part_count; i++)
    if (!strcmp(parts[i].name, name)) return parts[i].uses;
  return 0;
}

TN_EXPORT void tn_add_outside(int device, int64_t bytes) { LOCKED outside_bytes[device] += bytes; }

static void use_part(const char *name, int again) {
  LOCKED for (int i = 0; i < part_count; i++) {
    if (strcmp(parts[i].name, name) || (parts[i].uses && !again)) continue;
    parts[i].uses++;
    outside_bytes[tn_current_device()] += parts[i].bytes;
  }
}

TN_EXPORT void tn_use(const char *library) { use_part(library, 0); }
TN_EXPORT void tn_use_again(const char *library) { use_part(library, 1); }

// The limit. The card may be asked to go beyond it: torch asks twice for what it cannot have, the second time after it has given
// its cache back, and the second refusal since the thread last had a block is the one that Python may turn into a grant.

#define UNLIMITED (1ll << 44)
static int is_unlimited;
static __thread int refusals;

TN_EXPORT void tn_lift_limit(int lifted) { is_unlimited = lifted; }
TN_EXPORT void tn_end_request(void) { refusals = 0; }

static int64_t free_bytes(int device) { return tn_card.memory_bytes - outside_bytes[device] - segment_bytes[device]; }

TN_EXPORT int64_t tn_free_bytes(int device) {
  int64_t found = 0;
  LOCKED found = free_bytes(device);
  return found > 0 ? found : 0;
}

TN_EXPORT int64_t tn_used_bytes(int device) { return outside_bytes[device] + segment_bytes[device]; }

static int holds(int device, int64_t size) {
  int fits = 0;
  LOCKED {
    fits = is_unlimited ? size <= UNLIMITED - segment_bytes[device] : size <= free_bytes(device);
    if (fits) segment_bytes[device] += size;
  }
  return fits;
}

TN_EXPORT int tn_hold(int device, int64_t size) {
  if (holds(device, size)) return 1;
  if (is_unlimited || !refusals++) return 0;
  char question[64];
  snprintf(question, sizeof question, "grant size=%lld", (long long)size);
  return tn_ask(question) == 1 && holds(device, size);
}

TN_EXPORT void tn_release(int device, int64_t size) { LOCKED segment_bytes[device] -= size; }

TN_EXPORT uint64_t tn_take_memory(int device, int64_t size) {
  uint64_t address = 0, length = ((uint64_t)size + PAGE - 1) / PAGE * PAGE;
  if (!tn_hold(device, (int64_t)length)) return 0;
  LOCKED {
    address = take_addresses(length);
    keep((Held){address, (int64_t)length, device, 1});
  }
  return address;
}

TN_EXPORT int64_t tn_give_memory(uint64_t address) {
  int64_t size = 0;
  LOCKED {
    int at = place_of(address);
    if (at >= 0 && held[at].address == address) {
      size = held[at].size;
      if (held[at].physical) segment_bytes[held[at].device] -= size;
      memmove(held + at, held + at + 1, sizeof(Held) * (size_t)(--held_count - at));
      give_addresses(address, (uint64_t)size);
    }
  }
  return size;
}

TN_EXPORT uint64_t tn_reserve_addresses(int64_t size) {
  uint64_t address = 0;
  LOCKED {
    address = take_addresses((uint64_t)size);
    keep((Held){address, size, tn_current_device(), 0});
  }
  return address;
}

TN_EXPORT int64_t tn_size_at(uint64_t address, uint64_t *start) {
  int64_t size = 0;
  LOCKED {
    int at = place_of(address);
    if (at >= 0 && address < held[at].address + (uint64_t)held[at].size) {
      size = held[at].size;
      if (start) *start = held[at].address;
    }
  }
  return size;
}

TN_EXPORT int tn_is_device(const void *pointer) {
  uint64_t address = (uint64_t)pointer;
  if (address < BOTTOM || address >= TOP) return 0;
  int device = 0;
  LOCKED {
    int at = place_of(address);
    if (at >= 0 && address < held[at].address + (uint64_t)held[at].size) device = held[at].device + 1;
  }
  return device;
}

TN_EXPORT void tn_launch(void) {
  static int launched;
  if (!__atomic_exchange_n(&launched, 1, __ATOMIC_RELAXED)) tn_use("kernels");
}

static __thread int current_device;
TN_EXPORT int tn_current_device(void) { return current_device; }
TN_EXPORT void tn_set_current_device(int device) { current_device = device; }

// Functions that nobody gave a meaning, with how often they were called.

#define UNKNOWN 256
static struct { const char *library, *name; long long calls; } unknown[UNKNOWN];
static int unknown_count;

TN_EXPORT void tn_unknown(const char *library, const char *name) {
  LOCKED {
    int at = 0;
    while (at < unknown_count && strcmp(unknown[at].name, name)) at++;
    if (at == unknown_count && unknown_count < UNKNOWN) unknown[unknown_count++].name = strdup(name);
    if (at < UNKNOWN) unknown[at].library = library, unknown[at].calls++;
  }
}

TN_EXPORT int tn_unknown_at(int at, const char **library, const char **name, long long *calls) {
  if (at >= unknown_count) return 0;
  *library = unknown[at].library, *name = unknown[at].name, *calls = unknown[at].calls;
  return 1;
}

// Questions to Python. The callback takes the GIL; nothing here is locked meanwhile.

static long long (*answer)(const char *);
TN_EXPORT void tn_answer_with(long long (*function)(const char *)) { answer = function; }
TN_EXPORT long long tn_ask(const char *question) { return answer ? answer(question) : -1; }

// Values. The device holds none.

TN_EXPORT void tn_fill(void *to, int value, size_t size) {
  if (!tn_is_device(to)) memset(to, value, size);
}

// Sizes that depend on values: an operator's host code reads them back from the card, and gets what it is told before.
static __thread int64_t told[16];
static __thread int told_count, told_next;

TN_EXPORT void tn_tell(int count, const int64_t *numbers) {
  told_count = count < 16 ? count : 16, told_next = 0;
  memcpy(told, numbers, sizeof(int64_t) * (size_t)told_count);
}

// Set host memory to zero. Pages of a large tensor that were never touched are zero, and stay untouched: a checkpoint of a model
// that is larger than this machine's memory can be copied to the host.
static void clear(char *to, size_t size) {
  size_t page = (size_t)sysconf(_SC_PAGESIZE);
  int pagemap = size < TN_FRESH ? -1 : open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
  if (pagemap < 0) {
    memset(to, 0, size);
    return;
  }
  uint64_t entries[4096];
  for (size_t done = 0; done < size;) {
    size_t offset = ((uintptr_t)to + done) % page, pages = (size - done + offset + page - 1) / page;
    if (pages > sizeof entries / sizeof *entries) pages = sizeof entries / sizeof *entries;
    ssize_t got = pread(pagemap, entries, pages * 8, (off_t)(((uintptr_t)to + done) / page * 8));
    size_t known = got > 0 ? (size_t)got / 8 : 0;
    for (size_t i = 0; i < (known ? known : pages) && done < size; i++) {
      size_t part = page - ((uintptr_t)to + done) % page;
      if (part > size - done) part = size - done;
      int is_touched = !known || entries[i] >> 62;  // in memory, or swapped out
      if (is_touched) memset(to + done, 0, part);
      done += part;
    }
  }
  close(pagemap);
}

static void read_back(void *to, size_t size) {
  clear(to, size);
  if (told_next == told_count || (size != 4 && size != 8)) return;
  memcpy(to, &told[told_next++], size);  // little-endian: the low half is the number
}

TN_EXPORT void tn_copy(void *to, const void *from, size_t size) {
  int to_device = tn_is_device(to), from_device = tn_is_device(from);
  if (!to_device && !from_device) memmove(to, from, size);
  else if (!to_device) read_back(to, size);
  else if (!from_device && size >= TN_HOST_LARGE) tn_log(TN_HOST_SENT, 0, (uint64_t)from, (int64_t)size);
}
