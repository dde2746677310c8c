// Where a path is: canonical paths in the merged file system, and their place in the overlay.
#include "redirect.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { MOST_THROUGH = 64, MOST_LINKS = 40 };
static const char *const SYSTEM_FOLDERS[] = {"/dev", "/proc", "/sys"};
static const char BORROWED[] = "/proc/self/root";

State *tr_state;
__thread int tr_off;
static Path scratch;
static size_t scratch_length;
static Path through[MOST_THROUGH];   // folders that are written in place
static Path compiled[MOST_THROUGH];  // folders whose __pycache__ is
static int through_count, compiled_count;
static volatile int enabled;

int tr_enabled(void) { return enabled && !tr_off; }
const char *tr_folder(void) { return scratch; }
int tr_has_changes(void) { return tr_state->changes != 0; }

static long raw_open(const char *path, int flags, int mode) { return syscall(SYS_openat, AT_FDCWD, path, flags, mode); }

static void read_settings(void) {
  Path name;
  if (tr_join(name, scratch, "/through")) return;
  int fd = (int)raw_open(name, O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return;
  static char text[MOST_THROUGH * 1024];
  ssize_t size = syscall(SYS_read, fd, text, sizeof text - 1);
  syscall(SYS_close, fd);
  text[size > 0 ? size : 0] = 0;
  char *rest = NULL;
  for (char *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest)) {
    int is_compiled = line[0] == '*';  // "*/usr/lib/python3": only the __pycache__ folders below it
    if (is_compiled && compiled_count < MOST_THROUGH) strncpy(compiled[compiled_count++], line + 1, PATH_MAX - 1);
    if (!is_compiled && through_count < MOST_THROUGH) strncpy(through[through_count++], line, PATH_MAX - 1);
  }
}

// Redirect to a folder that is gone, after the run that a process belonged to: it reads originals, and may write nothing.
static State no_changes;

int tr_open_folder(const char *folder) {
  through_count = compiled_count = 0;
  scratch_length = strlen(folder);
  if (scratch_length + 32 >= PATH_MAX) return -1;
  memcpy(scratch, folder, scratch_length + 1);
  tr_state = &no_changes;
  enabled = 1;
  Path name;
  if (tr_join(name, scratch, "/state")) return -1;
  int fd = (int)raw_open(name, O_RDWR | O_CLOEXEC, 0);
  if (fd < 0) return -1;
  void *mapped = mmap(NULL, sizeof(State), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  syscall(SYS_close, fd);
  if (mapped == MAP_FAILED) return -1;
  tr_state = mapped;
  read_settings();
  enabled = 1;
  return 0;
}

void tr_close_folder(void) { enabled = 0; }

// Filter

static const uint64_t FIRST = 14695981039346656037ull, SECOND = 14695981039346656037ull ^ 0x9e3779b97f4a7c15ull;

static uint64_t extend(uint64_t hash, const char *text, size_t size) {
  for (size_t i = 0; i < size; i++) hash = (hash ^ (uint8_t)text[i]) * 1099511628211ull;
  return hash;
}
static uint64_t mixed(uint64_t hash) { return hash ^ hash >> 29; }

static int may_be_known(uint64_t hash) {
  hash = mixed(hash);
  for (int part = 0; part < 3; part++, hash >>= 20)
    if (!(tr_state->bloom[(hash & (BLOOM_BITS - 1)) >> 3] & 1 << (hash & 7))) return 0;
  return 1;
}

void tr_note(const char *path) {
  uint64_t hash = mixed(extend(FIRST, path, strlen(path)));
  for (int part = 0; part < 3; part++, hash >>= 20)
    __atomic_fetch_or(&tr_state->bloom[(hash & (BLOOM_BITS - 1)) >> 3], (uint8_t)(1 << (hash & 7)), __ATOMIC_SEQ_CST);
  __atomic_add_fetch(&tr_state->changes, 1, __ATOMIC_SEQ_CST);
}

// Paths

int tr_join(Path target, const char *folder, const char *path) {
  size_t first = strlen(folder), second = strlen(path);
  if (first + second >= PATH_MAX) {
    errno = ENAMETOOLONG;
    return -1;
  }
  memmove(target + first, path, second + 1);
  memmove(target, folder, first);
  return 0;
}

static int is_below(const char *path, const char *folder) {
  size_t length = strlen(folder);
  return !strncmp(path, folder, length) && (!path[length] || path[length] == '/');
}

static int is_system(const char *path) {
  for (unsigned i = 0; i < sizeof SYSTEM_FOLDERS / sizeof *SYSTEM_FOLDERS; i++)
    if (is_below(path, SYSTEM_FOLDERS[i])) return 1;
  return is_below(path, scratch);
}

static int is_left_alone(const char *path) {
  if (is_system(path)) return 1;
  for (int i = 0; i < through_count; i++)
    if (is_below(path, through[i])) return 1;
  for (int i = 0; i < compiled_count; i++)
    if (is_below(path, compiled[i])) {
      const char *cache = strstr(path, "/__pycache__");
      if (cache && (!cache[12] || cache[12] == '/')) return 1;
    }
  return 0;
}

static int read_link(const char *path, Path target) {
  ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, path, target, PATH_MAX - 1);
  if (size < 0) return -1;
  target[size] = 0;
  return (int)size;
}

int tr_logical(const char *physical, Path logical) {
  if (!is_below(physical, scratch)) return 0;
  const char *below = physical + scratch_length;
  if (!strncmp(below, "/files", 6) && (!below[6] || below[6] == '/')) {
    Path rest;
    strcpy(rest, below[6] ? below + 6 : "/");
    strcpy(logical, rest);
    return 1;
  }
  if (strncmp(below, "/views/", 7)) return 0;
  Path view;
  if (tr_join(view, physical, ".of")) return 0;
  Path listed;
  if (read_link(view, listed) < 0) return 0;
  strcpy(logical, listed);
  return 1;
}

static int absolute(int at, const char *path, Path target) {
  if (path[0] == '/') return tr_join(target, "", path);
  Path base;
  if (at == AT_FDCWD) {
    if (syscall(SYS_getcwd, base, PATH_MAX) < 0) return -1;
  } else {
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", at);
    if (read_link(link, base) < 0 || base[0] != '/') {
      errno = EBADF;
      return -1;
    }
  }
  tr_logical(base, base);
  if (tr_join(target, base, "/")) return -1;
  return tr_join(target, target, path);
}

int tr_changed_path(const char *canonical, Path target) {
  Path files;
  if (tr_join(files, scratch, "/files")) return -1;
  return tr_join(target, files, canonical);
}

void tr_gone_path(const char *canonical, Path target) {
  snprintf(target, PATH_MAX, "%.*s/gone/%016llx%016llx", (int)scratch_length, scratch,
           (unsigned long long)extend(FIRST, canonical, strlen(canonical)),
           (unsigned long long)extend(SECOND, canonical, strlen(canonical)));
}

int tr_is_borrowed(const char *changed) {
  Path target;
  return read_link(changed, target) > 0 && !strncmp(target, BORROWED, sizeof BORROWED - 1);
}

static int exists(const char *path) {
  struct stat status;
  return syscall(SYS_newfstatat, AT_FDCWD, path, &status, AT_SYMLINK_NOFOLLOW) == 0;
}

static int is_folder(const char *path) {
  struct stat status;
  return syscall(SYS_newfstatat, AT_FDCWD, path, &status, 0) == 0 && S_ISDIR(status.st_mode);
}

static int is_gone(const char *canonical) {
  Path gone;
  tr_gone_path(canonical, gone);
  return exists(gone);
}

static int is_changed(const char *canonical) {
  Path changed;
  return !tr_changed_path(canonical, changed) && exists(changed);
}

int tr_is_hidden(const char *canonical) {
  uint64_t hash = FIRST;
  Path part;
  for (const char *next = canonical; *next;) {
    const char *end = strchrnul(next + 1, '/');
    hash = extend(hash, next, (size_t)(end - next));
    next = end;
    if (!may_be_known(hash)) continue;
    memcpy(part, canonical, (size_t)(end - canonical));
    part[end - canonical] = 0;
    if (is_gone(part)) return 1;
  }
  return 0;
}

Place tr_place(const char *canonical) {
  if (!tr_has_changes()) return ORIGINAL;
  if (may_be_known(extend(FIRST, canonical, strlen(canonical))) && is_changed(canonical)) return CHANGED;
  return tr_is_hidden(canonical) ? HIDDEN : ORIGINAL;
}

// Original folders that were no symbolic links when they were last looked at, by the hash of their path.
static volatile uint64_t plain_folders[1 << 12];

// Read the symbolic link at this place; -1 if it is none.
static int link_at(const char *canonical, Place place, uint64_t hash, int is_last, Path target) {
  Path changed;
  if (place == HIDDEN) return -1;
  if (place == CHANGED) {
    if (tr_changed_path(canonical, changed) || tr_is_borrowed(changed)) return -1;
    return read_link(changed, target);
  }
  volatile uint64_t *known = &plain_folders[mixed(hash) % (sizeof plain_folders / sizeof *plain_folders)];
  if (*known == hash && !is_last) return -1;
  int size = read_link(canonical, target);
  if (size < 0 && errno == EINVAL && !is_last) *known = hash;
  return size;
}

int tr_locate(int at, const char *path, int follow, Path canonical, Place *place) {
  if (!tr_enabled() || !path || !path[0]) return 0;
  int saved = errno;
  Path rest;
  int links = 0, redirected = 0, is_hidden = 0;
  size_t length = 0;
  uint64_t hash = FIRST;
  *place = ORIGINAL;
  if (absolute(at, path, rest)) goto done;
  const char *next = rest;
  canonical[0] = 0;
  for (;;) {
    while (*next == '/') next++;
    if (!*next) break;
    const char *end = strchrnul(next, '/');
    size_t size = (size_t)(end - next);
    if (size == 1 && next[0] == '.') {
      next = end;
      continue;
    }
    if (size == 2 && next[0] == '.' && next[1] == '.') {
      Path changed;
      int is_missing = *place == HIDDEN || (*place == ORIGINAL && !exists(canonical));
      is_missing = is_missing || (*place == CHANGED && (tr_changed_path(canonical, changed) || !is_folder(changed)));
      if (length && is_missing) {
        // Above a folder that is not there, there is nothing either.
        if (tr_join(canonical, canonical, "/..")) goto done;
        length += 3;
        *place = tr_place(canonical);
        break;
      }
      while (length && canonical[--length] != '/') {}
      canonical[length] = 0;
      next = end;
      hash = extend(FIRST, canonical, length);
      *place = length ? tr_place(canonical) : ORIGINAL;
      is_hidden = length && tr_is_hidden(canonical);
      continue;
    }
    if (length + size + 2 >= PATH_MAX) goto done;
    size_t before = length;
    uint64_t hash_before = hash;
    int was_hidden = is_hidden;
    canonical[length++] = '/';
    memcpy(canonical + length, next, size);
    canonical[length += size] = 0;
    hash = extend(hash, canonical + before, length - before);
    next = end;
    if (is_system(canonical)) goto done;
    int may_be = tr_has_changes() && may_be_known(hash);
    is_hidden = is_hidden || (may_be && is_gone(canonical));
    *place = may_be && is_changed(canonical) ? CHANGED : is_hidden ? HIDDEN : ORIGINAL;
    int is_last = !next[strspn(next, "/")];
    if (is_last && !follow && !*next) break;
    Path target, joined;
    if (link_at(canonical, *place, hash, is_last, target) <= 0) continue;
    if (++links > MOST_LINKS) {  // the call itself fails at this link
      if (tr_join(canonical, canonical, next)) goto done;
      length = strlen(canonical);
      *place = tr_place(canonical);
      break;
    }
    if (tr_join(joined, target, next)) goto done;
    int is_absolute = target[0] == '/';
    length = is_absolute ? 0 : before;
    hash = is_absolute ? FIRST : hash_before;
    is_hidden = is_absolute ? 0 : was_hidden;
    canonical[length] = 0;
    strcpy(rest, joined);
    next = rest;
  }
  if (!length) strcpy(canonical, "/");
  redirected = !is_left_alone(canonical);
done:
  errno = saved;
  return redirected;
}
