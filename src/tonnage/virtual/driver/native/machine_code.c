// See machine_code.h. It is read here and not in Python: host code asks while it holds locks of its own, which a thread with the
// GIL may wait for. NVIDIA does not document the format; this is what the wheels of torch 2.6 to 2.12 have. CUDA 12 packs with
// LZ4, CUDA 13 with Zstandard.
#define _GNU_SOURCE
#include "machine_code.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PTX = 1, MACHINE_CODE = 2, LZ4 = 0x2000, ZSTANDARD = 0x8000 };
enum { ONE_CARD = 0x100000, FAMILY = 0x200000 };  // sm_90a runs on 9.0 alone, sm_100f on its whole family
#define MOST_BYTES (1ll << 30)
typedef struct { uint32_t magic, version; const char *header; } Wrapper;  // what is registered: 0x466243B1
typedef struct { uint32_t magic; uint16_t version, header_size; uint64_t size; } Header;  // 0xBA55ED50
typedef struct {
  uint16_t kind, version; uint32_t header_size; uint64_t size; uint32_t packed_size, options; uint16_t minor, major;
  uint32_t architecture, name, name_size; uint64_t flags, zero, unpacked_size;
} Entry;

// Bytes of this process. An address where nothing lies is an answer and not a crash.
static int read_memory(const void *from, void *to, int64_t size) {
  int file = open("/proc/self/mem", O_RDONLY | O_CLOEXEC);
  int64_t done = 0, more = 1;
  while (file >= 0 && done < size && more > 0)
    done += more = pread(file, (char *)to + done, (size_t)(size - done), (off_t)(uintptr_t)from + done);
  if (file >= 0) close(file);
  return done == size;
}

static uint8_t *copy_memory(const void *from, int64_t size) {
  uint8_t *made = size > 0 && size <= MOST_BYTES ? malloc((size_t)size) : NULL;
  if (made && !read_memory(from, made, size)) free(made), made = NULL;
  return made;
}

// How much the driver prefers an entry: machine code to PTX, newer to older, special to plain. 0: it does not fit.
static int64_t rank(const Entry *entry) {
  int64_t card = tn_card.major * 10 + tn_card.minor, of = entry->architecture;
  int fits = entry->kind == PTX ? of <= card : entry->kind == MACHINE_CODE && of <= card && of / 10 == card / 10;
  if (!fits || (entry->flags & ONE_CARD && of != card)) return 0;
  return entry->kind * 100000 + of * 4 + (entry->flags & ONE_CARD ? 2 : entry->flags & FAMILY ? 1 : 0);
}

// The entry that the driver takes and where its code lies; NULL: none, or the fat binary is broken.
static const char *choose(const char *header, Entry *best) {
  Header top;
  if (!read_memory(header, &top, sizeof top) || top.magic != 0xBA55ED50 || top.size > MOST_BYTES) return NULL;
  const char *at = header + top.header_size, *end = at + top.size, *code = NULL;
  while (at < end) {
    Entry entry;
    if (!read_memory(at, &entry, sizeof entry) || entry.header_size < sizeof entry) return NULL;
    if (entry.header_size > end - at || entry.size > (uint64_t)(end - at) - entry.header_size) return NULL;
    if (rank(&entry) > rank(best)) *best = entry, code = at + entry.header_size;
    at += entry.header_size + entry.size;
  }
  return code;
}

// A block of LZ4, which CUDA 12 packs machine code with: literal bytes and copies of earlier ones, in turn. The result
// is the size of what was packed, or -1. https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md

static const uint8_t *add_length(const uint8_t *from, const uint8_t *end, int64_t *length) {
  if (*length < 15) return from;
  for (int more = 255; more == 255 && from < end; *length += more) more = *from++;
  return from;
}

static int64_t unpack_lz4(const uint8_t *from, int64_t size, uint8_t *to, int64_t room) {
  const uint8_t *end = from + size;
  int64_t made = 0;
  while (from < end) {
    int token = *from++;
    int64_t literals = token >> 4, copied = token & 15;
    from = add_length(from, end, &literals);
    if (literals > end - from || literals > room - made) return -1;
    memcpy(to + made, from, (size_t)literals);
    from += literals, made += literals;
    if (from == end) return made;
    if (end - from < 2) return -1;
    int64_t distance = from[0] | from[1] << 8;
    from = add_length(from + 2, end, &copied);
    copied += 4;
    if (!distance || distance > made || copied > room - made) return -1;
    for (; copied; copied--, made++) to[made] = to[made - distance];  // the two may overlap
  }
  return made;
}

// Systems have Zstandard's library, as their package managers need it. A failure is a number that is no size.
static int64_t unpack_zstandard(const uint8_t *from, int64_t size, uint8_t *to, int64_t room) {
  void *library = dlopen("libzstd.so.1", RTLD_LAZY);
  size_t (*decompress)(void *, size_t, const void *, size_t) = library ? dlsym(library, "ZSTD_decompress") : NULL;
  return decompress ? (int64_t)decompress(to, (size_t)room, from, (size_t)size) : -1;
}

static uint8_t *unpack(const Entry *entry, const char *code, int64_t *size) {
  int is_packed = (entry->flags & (LZ4 | ZSTANDARD)) != 0;
  int64_t packed_size = is_packed ? entry->packed_size : (int64_t)entry->size;
  uint8_t *packed = copy_memory(code, packed_size);
  *size = packed_size;
  if (!packed || !is_packed) return packed;
  *size = (int64_t)entry->unpacked_size;
  uint8_t *made = *size > 0 && *size <= MOST_BYTES ? malloc((size_t)*size) : NULL;
  int64_t (*with)(const uint8_t *, int64_t, uint8_t *, int64_t) = entry->flags & LZ4 ? unpack_lz4 : unpack_zstandard;
  if (made && with(packed, packed_size, made, *size) != *size) free(made), made = NULL;
  free(packed);
  return made;
}

// A cubin is an ELF file. Names of attributes are those of `cuobjdump -elf`, figures those of `cuobjdump -res-usage`:
//   .text.NAME       a kernel; the low 24 bits of the header's `info` number its symbol
//   .nv.info         EIATTR_REGCOUNT (0x2F) and EIATTR_FRAME_SIZE (0x11) of every symbol
//   .nv.info.NAME    EIATTR_MAX_THREADS (0x05): the launch bounds
//   .nv.shared.NAME  its size: static shared memory, and from 9.0 on the 1024 bytes that the driver reserves
//   .nv.constant3    its size: the constants that the source declares
//   .note.nv.cuinfo  the virtual architecture that it was compiled from; before CUDA 13 the flags have it

typedef struct {
  uint32_t name, type; uint64_t flags, address, offset, size; uint32_t link, info; uint64_t alignment, entry_size;
} Section;
enum { NOBITS = 8 };  // a section without bytes in the file

static uint64_t hash(const char *name) {  // FNV-1a
  uint64_t found = 0xcbf29ce484222325ull;
  while (*name) found = (found ^ (uint8_t)*name++) * 0x100000001b3ull;
  return found;
}

static int by_name(const void *a, const void *b) {
  uint64_t left = ((const Known *)a)->name, right = ((const Known *)b)->name;
  return left < right ? -1 : left > right;
}

TnKernel *tn_known_kernel(const Code *code, const char *name) {
  Known wanted = {.name = hash(name)};
  Known *found = code->count ? bsearch(&wanted, code->kernels, (size_t)code->count, sizeof(Known), by_name) : NULL;
  return found ? &found->needs : NULL;
}

static uint32_t u32(const uint8_t *at) { return at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24; }

// The next value of an attribute in a section, or NULL. Attributes of form 4 have a size and a value after them.
static const uint8_t *next_value(const uint8_t **at, const uint8_t *end, int attribute, int length) {
  while (end - *at >= 4) {
    const uint8_t *head = *at;
    int size = head[0] == 4 ? head[2] | head[3] << 8 : 0;
    *at += 4;
    if (size > end - *at) return NULL;
    *at += size;
    if (head[0] == 4 && head[1] == attribute && size >= length) return head + 4;
  }
  return NULL;
}

static const char *after(const char *name, const char *start) {
  return strncmp(name, start, strlen(start)) ? NULL : name + strlen(start);
}

static void read_symbols(Code *code, const uint8_t *at, const uint8_t *end, int attribute) {
  for (const uint8_t *value; (value = next_value(&at, end, attribute, 8));)
    for (int i = 0; i < code->count; i++)
      if (code->kernels[i].symbol == u32(value)) {
        TnKernel *needs = &code->kernels[i].needs;
        *(attribute == 0x2F ? &needs->registers : &needs->local_bytes) = (int)u32(value + 4);
      }
}

static void read_section(Code *code, const char *name, const uint8_t *elf, const Section *section) {
  const uint8_t *at = elf + section->offset, *end = at + section->size, *value;
  const char *of = after(name, ".nv.info.");
  TnKernel *needs = of ? tn_known_kernel(code, of) : NULL;
  if (needs && (value = next_value(&at, end, 0x05, 12)))
    needs->threads = (int)(u32(value) * u32(value + 4) * u32(value + 8));
  if (!strcmp(name, ".nv.info")) read_symbols(code, at, end, 0x2F), read_symbols(code, at, end, 0x11);
  if (!strcmp(name, ".note.nv.cuinfo") && section->size >= 28) code->ptx_version = at[26] | at[27] << 8;
}

// Reads every kernel of a cubin. 0: it is none, or broken.
static int read_cubin(const uint8_t *elf, int64_t size, Code *code) {
  if (size < 64 || u32(elf) != 0x464C457F) return 0;
  int64_t table = (int64_t)(u32(elf + 0x28) | (uint64_t)u32(elf + 0x2C) << 32);
  int count = elf[0x3C] | elf[0x3D] << 8, names_at = elf[0x3E] | elf[0x3F] << 8;
  if (table < 0 || table % 8 || table > size - count * 64 || names_at >= count || elf[0x3A] != 64) return 0;
  const Section *sections = (const Section *)(elf + table), *names = sections + names_at;
  for (int i = 0; i < count; i++) {
    uint64_t bytes = sections[i].type == NOBITS ? 0 : sections[i].size;
    if (bytes > (uint64_t)size || sections[i].offset > (uint64_t)size - bytes) return 0;
    if (sections[i].name >= names->size) return 0;
  }
  const char *text = (const char *)elf + names->offset;
  if (names->type == NOBITS || text[names->size - 1]) return 0;
  // Interface 8 of CUDA moved the architectures in the flags.
  uint32_t flags = u32(elf + 0x30), architecture = elf[8] >= 8 ? flags >> 8 & 0xFFFF : flags & 0xFF;
  code->ptx_version = elf[8] >= 8 ? (int)architecture : (int)(flags >> 16 & 0xFF);
  code->kernels = calloc((size_t)count + 1, sizeof(Known));
  for (int i = 0; i < count; i++) {
    const char *of = after(text + sections[i].name, ".text.");
    if (of) code->kernels[code->count++] = (Known){.name = hash(of), .symbol = sections[i].info & 0xFFFFFF};
  }
  qsort(code->kernels, (size_t)code->count, sizeof(Known), by_name);
  int64_t reserved = architecture >= 90 ? 1024 : 0, constant_bytes = 0;
  for (int i = 0; i < count; i++) {
    const char *name = text + sections[i].name, *of = after(name, ".nv.shared.");
    TnKernel *needs = of ? tn_known_kernel(code, of) : NULL;
    int64_t bytes = (int64_t)sections[i].size;
    if (needs && bytes > reserved) needs->shared_bytes = (int)(bytes - reserved);
    if (!strcmp(name, ".nv.constant3")) constant_bytes = bytes;
    if (sections[i].type != NOBITS) read_section(code, name, elf, &sections[i]);
  }
  for (int i = 0; i < code->count; i++) {
    TnKernel *needs = &code->kernels[i].needs;
    needs->constant_bytes = (int)constant_bytes;
    needs->binary_version = (int)architecture, needs->ptx_version = code->ptx_version;
  }
  return 1;
}

// The code that is registered with a wrapper, or a module that was loaded by hand: a fat binary or one cubin.
Code tn_read_code(const void *binary) {
  Code code = {.binary = binary};
  Wrapper top;
  if (!read_memory(binary, &top, sizeof top)) return code;
  Entry best = {0};
  uint8_t *cubin = NULL;
  int64_t size = 0;
  if (top.magic == 0x464C457F) {
    uint8_t head[64];
    if (!read_memory(binary, head, sizeof head)) return code;
    size = (int64_t)u32(head + 0x28) + (head[0x3C] | head[0x3D] << 8) * 64;  // the table of sections ends the file
    cubin = copy_memory(binary, size);
  } else {
    const char *at = choose(top.magic == 0x466243B1 ? top.header : binary, &best);
    if (at && best.kind == MACHINE_CODE) cubin = unpack(&best, at, &size);
    if (at && best.kind == PTX) code.ptx_version = (int)best.architecture;
  }
  if (cubin && !read_cubin(cubin, size, &code)) free(code.kernels), code = (Code){.binary = binary};
  free(cubin);
  return code;
}

