/* PyTorch's caching allocator, replaying the memory events of a whole training.

   The same as `tonnage.allocator.caching` without what only statistics, captures and other streams' events need, a hundred times as
   fast: a training of 100,000 steps makes some hundred million requests. A test holds the two together. What the numbers of a
   program mean is told in `program.py`. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define MIB (1ull << 20)
#define SMALL MIB
#define SMALL_SEGMENT (2 * MIB)
#define MIN_LARGE_SEGMENT (10 * MIB)
#define SEGMENT_UNIT (2 * MIB)
#define DRIVER_RESERVE (2 * MIB)
#define MIN_BLOCK 512ull
#define RANGE (32 * MIB)
#define TOP 0x7f8000000000ull

typedef uint64_t u64;
typedef int64_t i64;
enum { ALLOCATED, FREE, UNMAPPED };

typedef struct Segment { u64 address, size, page; } Segment;

typedef struct Block {
  u64 address, size, gc_base;
  i64 stream;
  int state, small;
  Segment *segment;
  struct Block *previous, *next;
} Block;

typedef struct { Block **at; size_t count, room; } Blocks;            /* sorted */
typedef struct { i64 stream; Blocks free, unmapped; } Stream;         /* by size and address; by address */
typedef struct { Stream *streams; size_t count; u64 searches, least; int small; } Pool;

typedef struct { u64 start, stop; } Stretch;
typedef struct { Stretch *at; size_t count, room; } Stretches;
typedef struct { u64 start, stop; Stretches holes; } Range;

typedef struct { Block **slots; i64 count, live; } Instance;
typedef struct { const i64 *events; i64 count, slots; } Template;

typedef struct {
  u64 capacity, outside, allowed, max_split, max_rounding, large_segment;
  double threshold;
  int expandable;
  Pool pools[2]; /* large, small */
  Range *ranges;
  size_t range_count, range_room;
  Stretches gaps;
  u64 bottom;
  u64 allocated, reserved, peak_allocated, peak_reserved;
  Block **blocks;
  i64 block_room;
  Instance *instances;
  i64 instance_room;
  Template *templates;
  i64 template_room;
  i64 unknown_frees, retries;
  u64 failed_request, failed_segment, failed_free;
  Block *spare;
} Machine;

/* -- memory of our own */

static Block *new_block(Machine *m, u64 address, u64 size, i64 stream, int small, Segment *segment, int state) {
  Block *block = m->spare;
  if (block) m->spare = block->next;
  else block = malloc(sizeof *block);
  *block = (Block){.address = address, .size = size, .stream = stream, .state = state, .small = small, .segment = segment};
  return block;
}

/* The array, with room for an index and zeros where it grew. */
static void *grown(void *array, i64 *room, i64 index, size_t size) {
  if (index < *room) return array;
  size_t before = (size_t)*room * size, after = (size_t)(2 * index + 1024) * size;
  *room = 2 * index + 1024;
  array = realloc(array, after);
  memset((char *)array + before, 0, after - before);
  return array;
}

static void drop_block(Machine *m, Block *block) {
  block->next = m->spare;
  m->spare = block;
}

/* -- addresses: as AddressSpace of allocator/segments.py */

static void insert_stretch(Stretches *s, size_t at, Stretch value) {
  if (s->count == s->room) s->at = realloc(s->at, (s->room = s->room ? 2 * s->room : 4) * sizeof *s->at);
  memmove(s->at + at + 1, s->at + at, (s->count - at) * sizeof *s->at);
  s->at[at] = value;
  s->count++;
}

static void remove_stretch(Stretches *s, size_t at) {
  memmove(s->at + at, s->at + at + 1, (s->count - at - 1) * sizeof *s->at);
  s->count--;
}

static void merge_stretch(Stretches *s, u64 start, u64 stop) {
  size_t at = 0;
  while (at < s->count && s->at[at].start < start) at++;
  insert_stretch(s, at, (Stretch){start, stop});
  if (at + 1 < s->count && s->at[at].stop == s->at[at + 1].start) {
    s->at[at].stop = s->at[at + 1].stop;
    remove_stretch(s, at + 1);
  }
  if (at && s->at[at - 1].stop == s->at[at].start) {
    s->at[at - 1].stop = s->at[at].stop;
    remove_stretch(s, at);
  }
}

static u64 take_from(Range *range, u64 size) {
  for (size_t i = 0; i < range->holes.count; i++) {
    Stretch *hole = range->holes.at + i;
    if (hole->stop - hole->start < size) continue;
    u64 start = hole->start;
    hole->start += size;
    if (hole->start == hole->stop) remove_stretch(&range->holes, i);
    return start;
  }
  return 0;
}

static u64 reserve_range(Machine *m, u64 length) {
  for (size_t i = m->gaps.count; i-- > 0;) {
    Stretch *gap = m->gaps.at + i;
    if (gap->stop - gap->start < length) continue;
    gap->stop -= length;
    u64 start = gap->stop;
    if (gap->start == gap->stop) remove_stretch(&m->gaps, i);
    return start;
  }
  return m->bottom -= length;
}

static u64 take_address(Machine *m, u64 size) {
  for (size_t i = m->range_count; i-- > 0;) {
    u64 address = take_from(m->ranges + i, size);
    if (address) return address;
  }
  u64 length = (size + RANGE - 1) / RANGE * RANGE, start = reserve_range(m, length);
  if (m->range_count == m->range_room)
    m->ranges = realloc(m->ranges, (m->range_room = m->range_room ? 2 * m->range_room : 64) * sizeof *m->ranges);
  Range *range = m->ranges + m->range_count++;
  *range = (Range){.start = start, .stop = start + length};
  insert_stretch(&range->holes, 0, (Stretch){start, start + length});
  take_from(range, size);
  return start;
}

static void give_address_back(Machine *m, u64 address, u64 size) {
  size_t i = 0;
  while (address < m->ranges[i].start || address >= m->ranges[i].stop) i++;
  Range *range = m->ranges + i;
  merge_stretch(&range->holes, address, address + size);
  Stretch *first = range->holes.at;
  if (range->holes.count == 1 && first->start == range->start && first->stop == range->stop) {
    merge_stretch(&m->gaps, range->start, range->stop);
    free(range->holes.at);
    memmove(range, range + 1, (m->range_count - i - 1) * sizeof *range);
    m->range_count--;
  }
}

/* -- sorted sets of blocks: as blocks.py */

static Stream *stream_of(Pool *pool, i64 stream) {
  for (size_t i = 0; i < pool->count; i++)
    if (pool->streams[i].stream == stream) return pool->streams + i;
  /* by stream, since releases go through them in that order */
  pool->streams = realloc(pool->streams, (pool->count + 1) * sizeof *pool->streams);
  size_t at = pool->count++;
  while (at && pool->streams[at - 1].stream > stream) {
    pool->streams[at] = pool->streams[at - 1];
    at--;
  }
  pool->streams[at] = (Stream){.stream = stream};
  return pool->streams + at;
}

static size_t first_free(const Blocks *set, u64 size, u64 address) {
  size_t low = 0, high = set->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    Block *block = set->at[middle];
    if (block->size < size || (block->size == size && block->address < address)) low = middle + 1;
    else high = middle;
  }
  return low;
}

static size_t first_at(const Blocks *set, u64 address) {
  size_t low = 0, high = set->count;
  while (low < high) {
    size_t middle = (low + high) / 2;
    if (set->at[middle]->address < address) low = middle + 1;
    else high = middle;
  }
  return low;
}

static void insert_block(Blocks *set, size_t at, Block *block) {
  if (set->count == set->room) set->at = realloc(set->at, (set->room = set->room ? 2 * set->room : 64) * sizeof *set->at);
  memmove(set->at + at + 1, set->at + at, (set->count - at) * sizeof *set->at);
  set->at[at] = block;
  set->count++;
}

static void remove_block(Blocks *set, size_t at) {
  memmove(set->at + at, set->at + at + 1, (set->count - at - 1) * sizeof *set->at);
  set->count--;
}

static void add_free(Pool *pool, Block *block) {
  Blocks *set = &stream_of(pool, block->stream)->free;
  block->state = FREE;
  block->gc_base = pool->searches;
  insert_block(set, first_free(set, block->size, block->address), block);
}

static void remove_free(Pool *pool, Block *block) {
  Blocks *set = &stream_of(pool, block->stream)->free;
  remove_block(set, first_free(set, block->size, block->address));
}

static void add_unmapped(Pool *pool, Block *block) {
  Blocks *set = &stream_of(pool, block->stream)->unmapped;
  block->state = UNMAPPED;
  insert_block(set, first_at(set, block->address), block);
}

static void remove_unmapped(Pool *pool, Block *block) {
  Blocks *set = &stream_of(pool, block->stream)->unmapped;
  remove_block(set, first_at(set, block->address));
}

/* -- segments: as segments.py */

static int fits(Machine *m, u64 size) {
  i64 left = (i64)(m->capacity - m->outside) - (i64)m->reserved - (i64)DRIVER_RESERVE;
  return (i64)size <= left;
}

static void reserve(Machine *m, u64 size) {
  m->reserved += size;
  if (m->reserved > m->peak_reserved) m->peak_reserved = m->reserved;
}

static Block *allocate_segment(Machine *m, Pool *pool, u64 size, i64 stream) {
  if (!fits(m, size)) return NULL;
  Block *block = new_block(m, take_address(m, size), size, stream, pool->small, NULL, ALLOCATED);
  reserve(m, size);
  return block;
}

static void release(Machine *m, Pool *pool, Block *block) {
  remove_free(pool, block);
  m->reserved -= block->size;
  give_address_back(m, block->address, block->size);
  drop_block(m, block);
}

static void insert_between(Block *block, Block *previous, Block *next) {
  block->previous = previous;
  block->next = next;
  if (previous) previous->next = block;
  if (next) next->previous = block;
}

static void absorb_previous(Machine *m, Block *block) {
  Block *gone = block->previous;
  block->address = gone->address;
  block->size += gone->size;
  if ((block->previous = gone->previous)) block->previous->next = block;
  drop_block(m, gone);
}

static void absorb_next(Machine *m, Block *block) {
  Block *gone = block->next;
  block->size += gone->size;
  if ((block->next = gone->next)) block->next->previous = block;
  drop_block(m, gone);
}

static void merge_same(Machine *m, Pool *pool, Block *block, int state) {
  void (*take)(Pool *, Block *) = state == FREE ? remove_free : remove_unmapped;
  if (block->previous && block->previous->state == state) {
    take(pool, block->previous);
    absorb_previous(m, block);
  }
  if (block->next && block->next->state == state) {
    take(pool, block->next);
    absorb_next(m, block);
  }
}

static int map_pages(Machine *m, Pool *pool, Block *block, u64 size) {
  Segment *segment = block->segment;
  u64 page = segment->page, base = segment->address;
  u64 start = base + (block->address - base) / page * page;
  u64 stop = base + (block->address + size - base + page - 1) / page * page;
  if (!fits(m, stop - start)) return 0;
  remove_unmapped(pool, block);
  if (stop - start < block->size) {
    Block *rest = new_block(m, stop, block->size - (stop - start), block->stream, pool->small, segment, UNMAPPED);
    insert_between(rest, block, block->next);
    block->size = stop - start;
    add_unmapped(pool, rest);
  }
  merge_same(m, pool, block, FREE);
  add_free(pool, block);
  reserve(m, stop - start);
  return 1;
}

static Block *growable(Pool *pool, u64 size, i64 stream) {
  Blocks *unmapped = &stream_of(pool, stream)->unmapped;
  for (size_t i = 0; i < unmapped->count; i++) {
    Block *one = unmapped->at[i], *previous = one->previous;
    Block *start = previous && previous->state == FREE ? previous : one;
    u64 room = 0;
    for (Block *block = start; block && room < size && block->state != ALLOCATED; block = block->next) room += block->size;
    if (room >= size) return start;
  }
  return NULL;
}

static Block *grow(Machine *m, Pool *pool, u64 size, i64 stream) {
  Block *block = growable(pool, size, stream);
  if (!block) {
    u64 page = pool->small ? SMALL_SEGMENT : m->large_segment;
    u64 length = (m->capacity + m->capacity / 8 + page - 1) / page * page;
    Segment *segment = malloc(sizeof *segment);
    *segment = (Segment){take_address(m, length), length, page};
    block = new_block(m, segment->address, length, stream, pool->small, segment, UNMAPPED);
    add_unmapped(pool, block);
  }
  if (block->state == UNMAPPED && !map_pages(m, pool, block, block->size < size ? block->size : size)) return NULL;
  while (block->size < size) {
    Block *next = block->next;
    u64 missing = size - block->size;
    if (!map_pages(m, pool, next, next->size < missing ? next->size : missing)) return NULL;
    block = next;
  }
  remove_free(pool, block);
  return block;
}

static void unmap(Machine *m, Pool *pool, Block *block) {
  Segment *segment = block->segment;
  u64 page = segment->page, base = segment->address, end = block->address + block->size;
  u64 start = base + (block->address - base + page - 1) / page * page, stop = base + (end - base) / page * page;
  if (start >= stop) return;
  remove_free(pool, block);
  if (start > block->address) {
    Block *rest = new_block(m, block->address, start - block->address, block->stream, pool->small, segment, FREE);
    insert_between(rest, block->previous, block);
    add_free(pool, rest);
  }
  if (end > stop) {
    Block *rest = new_block(m, stop, end - stop, block->stream, pool->small, segment, FREE);
    insert_between(rest, block, block->next);
    add_free(pool, rest);
  }
  block->address = start;
  block->size = stop - start;
  merge_same(m, pool, block, UNMAPPED);
  add_unmapped(pool, block);
  m->reserved -= stop - start;
  if (!block->previous && !block->next) {
    remove_unmapped(pool, block);
    give_address_back(m, segment->address, segment->size);
    free(segment);
    drop_block(m, block);
  }
}

static void release_pool(Machine *m, Pool *pool) {
  size_t total = 0;
  for (size_t i = 0; i < pool->count; i++) total += pool->streams[i].free.count;
  Block **all = malloc((total + 1) * sizeof *all);
  size_t count = 0;
  for (size_t i = 0; i < pool->count; i++) {
    Blocks *set = &pool->streams[i].free;
    memcpy(all + count, set->at, set->count * sizeof *all);
    count += set->count;
  }
  size_t growing = 0;
  for (size_t i = 0; i < total; i++) {
    if (all[i]->segment) all[growing++] = all[i];
    else if (!all[i]->previous && !all[i]->next) release(m, pool, all[i]);
  }
  for (size_t i = 0; i < growing; i++) unmap(m, pool, all[i]);
  free(all);
}

static void empty_cache(Machine *m) {
  release_pool(m, &m->pools[0]);
  release_pool(m, &m->pools[1]);
}

/* -- the allocator: as caching.py and reclaim.py */

static void collect_garbage(Machine *m, Pool *pool) {
  u64 limit = (u64)(m->threshold * (double)m->allowed);
  i64 excess = (i64)m->reserved - (i64)limit;
  size_t total = 0, count = 0;
  for (size_t i = 0; i < pool->count; i++) total += pool->streams[i].free.count;
  Block **old = malloc((total + 1) * sizeof *old);
  for (size_t i = 0; i < pool->count; i++)
    for (size_t j = 0; j < pool->streams[i].free.count; j++) {
      Block *block = pool->streams[i].free.at[j];
      if (!block->previous && !block->next) old[count++] = block;
    }
  int progressed = 1;
  while (excess > 0 && progressed && count) {
    double ages = 0;
    for (size_t i = 0; i < count; i++) ages += (double)(pool->searches - old[i]->gc_base);
    double average = ages / (double)count;
    size_t kept = 0;
    progressed = 0;
    for (size_t i = 0; i < count; i++) {
      if ((double)(pool->searches - old[i]->gc_base) >= average && !old[i]->segment) {
        excess -= (i64)old[i]->size;
        progressed = 1;
        release(m, pool, old[i]);
      } else old[kept++] = old[i];
    }
    count = kept;
  }
  free(old);
}

static int release_oversize(Machine *m, Pool *pool, u64 size, i64 stream) {
  if (m->max_split == UINT64_MAX) return 0;
  Blocks *set = &stream_of(pool, stream)->free;
  u64 wanted = size > m->max_split ? size : m->max_split, released = 0;
  size_t index = first_free(set, wanted, 0);
  if (index < set->count && !set->at[index]->segment) {
    release(m, pool, set->at[index]);
    return 1;
  }
  while (index-- > 0 && released < wanted && set->at[index]->size >= m->max_split) {
    if (set->at[index]->segment) continue;
    released += set->at[index]->size;
    release(m, pool, set->at[index]);
  }
  return released >= wanted;
}

static u64 reach(Block *block) {
  return block->size + (block->next && block->next->state == UNMAPPED ? block->next->size : 0);
}

static Block *cached(Machine *m, Pool *pool, u64 size, i64 stream) {
  if (m->allowed != UINT64_MAX && m->threshold > 0) pool->searches++;
  Blocks *set = &stream_of(pool, stream)->free;
  size_t index = first_free(set, size, 0);
  if (index == set->count) return NULL;
  if (set->at[index]->segment && m->expandable) {
    u64 best = reach(set->at[index]);
    while (index + 1 < set->count && set->at[index]->segment) {
      u64 next = reach(set->at[index + 1]);
      if (next >= best) break;
      index++;
      best = next;
    }
  } else while (index < set->count && set->at[index]->segment) index++;
  if (index == set->count) return NULL;
  Block *block = set->at[index];
  if (block->size >= m->max_split && (size < m->max_split || block->size - size >= m->max_rounding)) return NULL;
  remove_block(set, index);
  return block;
}

static Block *from_device(Machine *m, Pool *pool, u64 size, u64 segment, i64 stream) {
  if (m->allowed != UINT64_MAX && m->reserved + segment > m->allowed) return NULL;
  return m->expandable ? grow(m, pool, size, stream) : allocate_segment(m, pool, segment, stream);
}

static Block *take(Machine *m, u64 size, i64 stream) {
  Pool *pool = &m->pools[size <= SMALL];
  Block *block = cached(m, pool, size, stream);
  if (!block) {
    if (m->allowed != UINT64_MAX && m->threshold > 0) collect_garbage(m, &m->pools[0]);
    u64 segment = size <= SMALL ? SMALL_SEGMENT
                  : size < MIN_LARGE_SEGMENT ? m->large_segment : (size + SEGMENT_UNIT - 1) / SEGMENT_UNIT * SEGMENT_UNIT;
    block = from_device(m, pool, size, segment, stream);
    if (!block && release_oversize(m, pool, size, stream)) block = from_device(m, pool, size, segment, stream);
    if (!block) {
      empty_cache(m);
      m->retries++;
      block = from_device(m, pool, size, segment, stream);
    }
    if (!block) {
      i64 left = (i64)(m->capacity - m->outside) - (i64)m->reserved;
      m->failed_request = size;
      m->failed_segment = segment;
      m->failed_free = left > 0 ? (u64)left : 0;
      return NULL;
    }
  }
  u64 left = block->size - size;
  if (left >= pool->least && (size < m->max_split || pool->least == MIN_BLOCK)) {
    Block *rest = block;
    block = new_block(m, rest->address, size, stream, pool->small, rest->segment, ALLOCATED);
    block->previous = rest->previous;
    block->next = rest;
    if (rest->previous) rest->previous->next = block;
    rest->previous = block;
    rest->address += size;
    rest->size = left;
    add_free(pool, rest);
  }
  block->state = ALLOCATED;
  m->allocated += block->size;
  if (m->allocated > m->peak_allocated) m->peak_allocated = m->allocated;
  return block;
}

static void give_back(Machine *m, Block *block) {
  Pool *pool = &m->pools[block->small];
  m->allocated -= block->size;
  merge_same(m, pool, block, FREE);
  add_free(pool, block);
}

/* -- programs */

EXPORT Machine *tn_new(u64 capacity, u64 max_split, u64 max_rounding, u64 large_segment, double threshold, int expandable) {
  Machine *m = calloc(1, sizeof *m);
  *m = (Machine){.capacity = capacity, .allowed = UINT64_MAX, .max_split = max_split, .max_rounding = max_rounding,
                 .large_segment = large_segment, .threshold = threshold, .expandable = expandable, .bottom = TOP};
  m->pools[0].least = expandable ? MIN_BLOCK : SMALL + 1;
  m->pools[1].least = MIN_BLOCK;
  m->pools[1].small = 1;
  return m;
}

EXPORT void tn_template(Machine *m, i64 number, const i64 *events, i64 count, i64 slots) {
  m->templates = grown(m->templates, &m->template_room, number, sizeof *m->templates);
  m->templates[number] = (Template){events, count, slots};
}

static void free_slot(Machine *m, i64 number, i64 slot) {
  Instance *one = number >= 0 && number < m->instance_room ? m->instances + number : NULL;
  if (!one || !one->slots || slot >= one->count || !one->slots[slot]) {
    m->unknown_frees++;
    return;
  }
  give_back(m, one->slots[slot]);
  one->slots[slot] = NULL;
  if (!--one->live) {
    free(one->slots);
    one->slots = NULL;
  }
}

/* Events of a template: (0, slot, size, stream) take, (1, slot, 0, 0) give back, (2, argument, slot, 0) give back what an earlier
   call took, (3, 0, 0, 0) empty the cache. */
static i64 run_template(Machine *m, i64 number, i64 instance, const i64 *arguments) {
  Template *template = m->templates + number;
  m->instances = grown(m->instances, &m->instance_room, instance, sizeof *m->instances);
  Instance *own = m->instances + instance;
  *own = (Instance){calloc(template->slots + 1, sizeof(Block *)), template->slots, 1};
  const i64 *event = template->events;
  for (i64 i = 0; i < template->count; i++, event += 4) {
    if (event[0] == 0) {
      Block *block = take(m, (u64)event[2], event[3]);
      if (!block) return i;
      own->slots[event[1]] = block;
      own->live++;
    } else if (event[0] == 1) free_slot(m, instance, event[1]);
    else if (event[0] == 2) free_slot(m, arguments[event[1]], event[2]);
    else empty_cache(m);
  }
  if (!--own->live) {
    free(own->slots);
    own->slots = NULL;
  }
  return -1;
}

/* The index of the operation that failed, or `count`; the peaks of each part; figures of the end in `result`. */
EXPORT i64 tn_run(Machine *m, const i64 *p, i64 count, u64 *allocated, u64 *reserved, i64 *result) {
  i64 at = 0, step = 0, first_retry = -1;
  while (at < count) {
    i64 event = -1;
    switch (p[at]) {
    case 0: { /* take: id, size, stream */
      Block *block = take(m, (u64)p[at + 2], p[at + 3]);
      m->blocks = grown(m->blocks, &m->block_room, p[at + 1], sizeof *m->blocks);
      m->blocks[p[at + 1]] = block;
      if (block) at += 4;
      else event = 0;
      break;
    }
    case 1: { /* give back: id */
      i64 id = p[at + 1];
      if (id < m->block_room && m->blocks[id]) {
        give_back(m, m->blocks[id]);
        m->blocks[id] = NULL;
      } else m->unknown_frees++;
      at += 2;
      break;
    }
    case 2: /* call: template, instance, number of arguments, arguments */
      event = run_template(m, p[at + 1], p[at + 2], p + at + 4);
      if (event < 0) at += 4 + p[at + 3];
      break;
    case 3: /* give back a slot of a call: instance, slot */
      free_slot(m, p[at + 1], p[at + 2]);
      at += 3;
      break;
    case 4: /* the next part begins */
      allocated[step] = m->peak_allocated;
      reserved[step] = m->peak_reserved;
      step++;
      m->peak_allocated = m->allocated;
      m->peak_reserved = m->reserved;
      at += 1;
      break;
    case 5:
      empty_cache(m);
      at += 1;
      break;
    case 6: /* outside: bytes */
      m->outside = (u64)p[at + 1];
      at += 2;
      break;
    case 7: /* allowed: bytes, or -1 */
      m->allowed = (u64)p[at + 1];
      at += 2;
      break;
    default:
      event = 0;
    }
    if (m->retries && first_retry < 0) first_retry = step;
    if (event >= 0) {
      result[0] = event;
      break;
    }
  }
  allocated[step] = m->peak_allocated;
  reserved[step] = m->peak_reserved;
  result[1] = step;
  result[2] = (i64)m->failed_request;
  result[3] = (i64)m->failed_segment;
  result[4] = (i64)m->failed_free;
  result[5] = (i64)m->allocated;
  result[6] = (i64)m->reserved;
  result[7] = m->unknown_frees;
  result[8] = m->retries;
  result[9] = first_retry;
  return at;
}

EXPORT void tn_delete(Machine *m) {
  for (i64 i = 0; i < m->instance_room; i++) free(m->instances[i].slots);
  for (int k = 0; k < 2; k++) {
    for (size_t i = 0; i < m->pools[k].count; i++) {
      free(m->pools[k].streams[i].free.at);
      free(m->pools[k].streams[i].unmapped.at);
    }
    free(m->pools[k].streams);
  }
  for (size_t i = 0; i < m->range_count; i++) free(m->ranges[i].holes.at);
  while (m->spare) {
    Block *next = m->spare->next;
    free(m->spare);
    m->spare = next;
  }
  free(m->ranges);
  free(m->gaps.at);
  free(m->blocks);
  free(m->instances);
  free(m->templates);
  free(m);
}
