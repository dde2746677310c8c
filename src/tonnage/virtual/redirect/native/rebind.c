// Points the import tables of all loaded objects at our functions, for a process that runs already: LD_PRELOAD does this for one
// that starts. Only entries that lead to the C library, or are not bound yet, are changed.
#include "redirect.h"

#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

void *tr_real(const char *name);

#if defined(__x86_64__)
enum { JUMP_SLOT = R_X86_64_JUMP_SLOT, GLOBAL_DATA = R_X86_64_GLOB_DAT, ABSOLUTE = R_X86_64_64 };
#elif defined(__aarch64__)
enum { JUMP_SLOT = R_AARCH64_JUMP_SLOT, GLOBAL_DATA = R_AARCH64_GLOB_DAT, ABSOLUTE = R_AARCH64_ABS64 };
#endif
enum { MOST_OBJECTS = 4096 };

static ElfW(Addr) rebound[MOST_OBJECTS];  // the objects that were done
static unsigned rebound_count;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static void *originals[256];

static int compare_names(const void *a, const void *b) {
  return strcmp(tr_wrappers[*(const unsigned char *)a].name, tr_wrappers[*(const unsigned char *)b].name);
}
static unsigned char order[256];

static int wrapper_of(const char *name) {
  int low = 0, high = (int)tr_wrapper_count - 1;
  while (low <= high) {
    int middle = (low + high) / 2, compared = strcmp(name, tr_wrappers[order[middle]].name);
    if (!compared) return order[middle];
    if (compared < 0) high = middle - 1;
    else low = middle + 1;
  }
  return -1;
}

typedef struct {
  const struct dl_phdr_info *info;
  ElfW(Addr) start, end, relro_start, relro_end;
} Object;

static void write_slot(const Object *object, void **slot, void *function) {
  uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)slot & ~(page - 1);
  if (mprotect((void *)start, page, PROT_READ | PROT_WRITE)) return;
  __atomic_store_n(slot, function, __ATOMIC_SEQ_CST);
  if (start >= (object->relro_start & ~(page - 1)) && start < object->relro_end) mprotect((void *)start, page, PROT_READ);
}

static void rebind_table(const Object *object, const ElfW(Rela) *table, size_t count, const ElfW(Sym) *symbols, const char *strings) {
  for (size_t i = 0; i < count; i++) {
    unsigned type = (unsigned)ELF64_R_TYPE(table[i].r_info), symbol = (unsigned)ELF64_R_SYM(table[i].r_info);
    if (!symbol || (type != JUMP_SLOT && type != GLOBAL_DATA && !(type == ABSOLUTE && !table[i].r_addend))) continue;
    if (symbols[symbol].st_shndx != SHN_UNDEF) continue;
    int wrapper = wrapper_of(strings + symbols[symbol].st_name);
    if (wrapper < 0) continue;
    void **slot = (void **)(object->info->dlpi_addr + table[i].r_offset);
    uintptr_t value = (uintptr_t)*slot;
    int is_unbound = value >= object->start && value < object->end;
    if (is_unbound || *slot == originals[wrapper]) write_slot(object, slot, tr_wrappers[wrapper].function);
  }
}

static int rebind_object(struct dl_phdr_info *info, size_t size, void *unused) {
  (void)size, (void)unused;
  const ElfW(Dyn) *dynamic = NULL;
  Object object = {.info = info, .start = (ElfW(Addr)) - 1};
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const ElfW(Phdr) *header = &info->dlpi_phdr[i];
    ElfW(Addr) start = info->dlpi_addr + header->p_vaddr;
    if (header->p_type == PT_DYNAMIC) dynamic = (const void *)start;
    if (header->p_type == PT_LOAD && start < object.start) object.start = start;
    if (header->p_type == PT_LOAD && start + header->p_memsz > object.end) object.end = start + header->p_memsz;
    if (header->p_type == PT_GNU_RELRO) object.relro_start = start, object.relro_end = start + header->p_memsz;
  }
  const char *name = info->dlpi_name ? strrchr(info->dlpi_name, '/') : NULL;
  name = name ? name + 1 : "";
  int is_ours = (uintptr_t)tr_rebind >= object.start && (uintptr_t)tr_rebind < object.end;
  if (!dynamic || is_ours || !strncmp(name, "libc.so", 7) || !strncmp(name, "ld-linux", 8) || !strncmp(name, "libpthread", 10)) return 0;
  for (unsigned i = 0; i < rebound_count; i++)
    if (rebound[i] == (ElfW(Addr))dynamic) return 0;
  if (rebound_count < MOST_OBJECTS) rebound[rebound_count++] = (ElfW(Addr))dynamic;
  const ElfW(Sym) *symbols = NULL;
  const char *strings = NULL;
  const ElfW(Rela) *tables[2] = {NULL, NULL};
  size_t sizes[2] = {0, 0}, relative = 0;
  for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++) switch (entry->d_tag) {
      case DT_SYMTAB: symbols = (const void *)entry->d_un.d_ptr; break;
      case DT_STRTAB: strings = (const void *)entry->d_un.d_ptr; break;
      case DT_RELA: tables[0] = (const void *)entry->d_un.d_ptr; break;
      case DT_RELASZ: sizes[0] = entry->d_un.d_val / sizeof(ElfW(Rela)); break;
      case DT_RELACOUNT: relative = entry->d_un.d_val; break;
      case DT_JMPREL: tables[1] = (const void *)entry->d_un.d_ptr; break;
      case DT_PLTRELSZ: sizes[1] = entry->d_un.d_val / sizeof(ElfW(Rela)); break;
    }
  if ((uintptr_t)symbols < object.start || !strings) return 0;  // the kernel's own object, which is not relocated
  if (tables[0] && sizes[0] > relative) rebind_table(&object, tables[0] + relative, sizes[0] - relative, symbols, strings);
  if (tables[1]) rebind_table(&object, tables[1], sizes[1], symbols, strings);
  return 0;
}

static void lock_table(void) { pthread_mutex_lock(&lock); }
static void unlock_table(void) { pthread_mutex_unlock(&lock); }

void tr_rebind(void) {
  pthread_mutex_lock(&lock);
  if (!originals[0]) {
    pthread_atfork(lock_table, unlock_table, unlock_table);  // a fork must not inherit a locked table
    for (unsigned i = 0; i < tr_wrapper_count; i++) order[i] = (unsigned char)i;
    qsort(order, tr_wrapper_count, 1, compare_names);
    for (unsigned i = 0; i < tr_wrapper_count; i++) originals[i] = tr_real(tr_wrappers[i].name);
  }
  dl_iterate_phdr(rebind_object, NULL);
  pthread_mutex_unlock(&lock);
}
