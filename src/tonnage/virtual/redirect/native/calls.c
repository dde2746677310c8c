// The functions of the C library that take a path, redirected. Reads that the program's changes do not concern pass through.
#include "redirect.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <sys/vfs.h>
#include <sys/xattr.h>
#include <unistd.h>
#include <utime.h>

#define REAL(name) ((__typeof__(&name))tr_real(#name))

void *tr_real(const char *name);
static char library[PATH_MAX];   // this one, for children
static char redirect_setting[PATH_MAX + 32];

void *tr_real(const char *name) { return dlsym(RTLD_NEXT, name); }

// Where to read: 0 the path as it is, 1 in `physical`, -1 nowhere (errno is set).
static int to_read(int at, const char *path, int follow, Path physical) {
  if (!tr_enabled() || !tr_has_changes()) return 0;
  Path canonical;
  Place place;
  if (!tr_locate(at, path, follow, canonical, &place)) return 0;
  switch (place) {
    case HIDDEN:
      errno = ENOENT;
      return -1;
    case CHANGED:
      return tr_changed_path(canonical, physical) ? -1 : 1;
    default:
      strcpy(physical, canonical);
      return 1;
  }
}

#define READ(at, path, follow, plain, changed)            \
  do {                                                    \
    Path physical;                                        \
    switch (to_read(at, path, follow, physical)) {        \
      case 0: return (__typeof__(plain))(plain);          \
      case 1: return (__typeof__(plain))(changed);        \
      default: return (__typeof__(plain)) - 1;            \
    }                                                     \
  } while (0)

// Opening

static long sys_open(int at, const char *path, int flags, mode_t mode) { return syscall(SYS_openat, at, path, flags, mode); }

static int is_special(const char *canonical, Place place) {
  struct stat status;
  return place == ORIGINAL && syscall(SYS_newfstatat, AT_FDCWD, canonical, &status, 0) == 0 &&
         !S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode);
}

static int open_at(int at, const char *path, int flags, mode_t mode) {
  int writes = (flags & O_ACCMODE) != O_RDONLY || flags & (O_CREAT | O_TRUNC);
  Path canonical, physical;
  if (flags & O_PATH || !writes) {
    int place = to_read(at, path, !(flags & O_NOFOLLOW), physical);
    if (place < 0) return -1;
    if (!place) return (int)sys_open(at, path, flags, mode);
    return (int)sys_open(AT_FDCWD, physical, flags & O_NOFOLLOW && tr_is_borrowed(physical) ? flags & ~O_NOFOLLOW : flags, mode);
  }
  Place place;
  int is_new = (flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL);
  if (!tr_locate(at, path, !(flags & O_NOFOLLOW) && !is_new, canonical, &place)) return (int)sys_open(at, path, flags, mode);
  if ((flags & O_TMPFILE) == O_TMPFILE) return (int)sys_open(AT_FDCWD, tr_folder(), flags, mode);
  if (is_special(canonical, place)) return (int)sys_open(at, path, flags, mode);
  if (tr_make_writable(canonical, flags, mode, physical)) return -1;
  return (int)sys_open(AT_FDCWD, physical, flags, mode);
}

#define MODE(flags, last)                                       \
  mode_t mode = 0;                                              \
  if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) {         \
    va_list rest;                                               \
    va_start(rest, last);                                       \
    mode = va_arg(rest, mode_t);                                \
    va_end(rest);                                               \
  }

int call_open(const char *path, int flags, ...) {
  MODE(flags, flags)
  return open_at(AT_FDCWD, path, flags, mode);
}
int call_openat(int at, const char *path, int flags, ...) {
  MODE(flags, flags)
  return open_at(at, path, flags, mode);
}
int call_open_2(const char *path, int flags) { return open_at(AT_FDCWD, path, flags, 0); }
int call_openat_2(int at, const char *path, int flags) { return open_at(at, path, flags, 0); }
int call_creat(const char *path, mode_t mode) { return open_at(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }

static int flags_of(const char *mode) {
  int flags = mode[0] == 'r' ? O_RDONLY : O_WRONLY | O_CREAT | (mode[0] == 'a' ? O_APPEND : O_TRUNC);
  for (const char *c = mode + 1; *c && *c != ','; c++) {
    if (*c == '+') flags = (flags & ~O_ACCMODE) | O_RDWR;
    if (*c == 'x') flags |= O_EXCL;
    if (*c == 'e') flags |= O_CLOEXEC;
  }
  return flags;
}

FILE *call_fopen(const char *path, const char *mode) {
  int fd = open_at(AT_FDCWD, path, flags_of(mode), 0666);
  if (fd < 0) return NULL;
  FILE *file = fdopen(fd, mode);
  if (!file) close(fd);
  return file;
}

FILE *call_freopen(const char *path, const char *mode, FILE *file) {
  if (!path || !tr_enabled()) return REAL(freopen)(path, mode, file);
  Path physical;
  int flags = flags_of(mode), is_redirected;
  if ((flags & O_ACCMODE) == O_RDONLY) {
    is_redirected = to_read(AT_FDCWD, path, 1, physical);
  } else {
    Path canonical;
    Place place;
    is_redirected = tr_locate(AT_FDCWD, path, 1, canonical, &place) && !is_special(canonical, place);
    if (is_redirected && tr_make_writable(canonical, flags, 0666, physical)) return NULL;
  }
  return is_redirected < 0 ? NULL : REAL(freopen)(is_redirected ? physical : path, mode, file);
}

static int make_temporary(char *pattern, int suffix, int flags, int is_folder) {
  static const char LETTERS[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789";
  size_t length = strlen(pattern);
  if (length < 6 + (size_t)suffix || strncmp(pattern + length - 6 - (size_t)suffix, "XXXXXX", 6)) {
    errno = EINVAL;
    return -1;
  }
  extern int call_mkdir(const char *, mode_t);
  for (int attempt = 0; attempt < 1000; attempt++) {
    unsigned char random[6];
    if (syscall(SYS_getrandom, random, sizeof random, 0) != sizeof random) return -1;
    for (int i = 0; i < 6; i++) pattern[length - 6 - (size_t)suffix + (size_t)i] = LETTERS[random[i] % 62];
    int result = is_folder ? call_mkdir(pattern, 0700) : open_at(AT_FDCWD, pattern, flags | O_CREAT | O_EXCL | O_RDWR, 0600);
    if (result >= 0 || errno != EEXIST) return result;
  }
  return -1;
}
int call_mkstemp(char *pattern) { return make_temporary(pattern, 0, 0, 0); }
int call_mkostemp(char *pattern, int flags) { return make_temporary(pattern, 0, flags, 0); }
int call_mkstemps(char *pattern, int suffix) { return make_temporary(pattern, suffix, 0, 0); }
int call_mkostemps(char *pattern, int suffix, int flags) { return make_temporary(pattern, suffix, flags, 0); }
char *call_mkdtemp(char *pattern) { return make_temporary(pattern, 0, 0, 1) < 0 ? NULL : pattern; }

// Reading what a path is

static int stat_at(int at, const char *path, struct stat *status, int flags) {
  READ(at, path, !(flags & AT_SYMLINK_NOFOLLOW), (int)syscall(SYS_newfstatat, at, path, status, flags),
       (int)syscall(SYS_newfstatat, AT_FDCWD, physical, status, tr_is_borrowed(physical) ? flags & ~AT_SYMLINK_NOFOLLOW : flags));
}
int call_stat(const char *path, struct stat *status) { return stat_at(AT_FDCWD, path, status, 0); }
int call_lstat(const char *path, struct stat *status) { return stat_at(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW); }
int call_fstatat(int at, const char *path, struct stat *status, int flags) { return stat_at(at, path, status, flags); }
// What programs call that were built with a C library before 2.33.
int call_xstat(int version, const char *path, struct stat *status) { return (void)version, call_stat(path, status); }
int call_lxstat(int version, const char *path, struct stat *status) { return (void)version, call_lstat(path, status); }
int call_fxstatat(int version, int at, const char *path, struct stat *status, int flags) {
  return (void)version, stat_at(at, path, status, flags);
}
int call_statx(int at, const char *path, int flags, unsigned mask, void *status) {
  READ(at, path, !(flags & AT_SYMLINK_NOFOLLOW), (int)syscall(SYS_statx, at, path, flags, mask, status),
       (int)syscall(SYS_statx, AT_FDCWD, physical, tr_is_borrowed(physical) ? flags & ~AT_SYMLINK_NOFOLLOW : flags, mask, status));
}
int call_faccessat(int at, const char *path, int mode, int flags) {
  (void)flags;
  READ(at, path, 1, (int)syscall(SYS_faccessat, at, path, mode), (int)syscall(SYS_faccessat, AT_FDCWD, physical, mode));
}
int call_access(const char *path, int mode) { return call_faccessat(AT_FDCWD, path, mode, 0); }
ssize_t call_readlinkat(int at, const char *path, char *target, size_t size) {
  Path physical;
  switch (to_read(at, path, 0, physical)) {
    case 0:
      return syscall(SYS_readlinkat, at, path, target, size);
    case 1:
      if (!tr_is_borrowed(physical)) return syscall(SYS_readlinkat, AT_FDCWD, physical, target, size);
      errno = EINVAL;
      return -1;
    default:
      return -1;
  }
}
ssize_t call_readlink(const char *path, char *target, size_t size) { return call_readlinkat(AT_FDCWD, path, target, size); }
ssize_t call_readlink_chk(const char *path, char *target, size_t size, size_t room) {
  return (void)room, call_readlink(path, target, size);
}
ssize_t call_readlinkat_chk(int at, const char *path, char *target, size_t size, size_t room) {
  return (void)room, call_readlinkat(at, path, target, size);
}
char *call_realpath(const char *path, char *resolved) {
  Path canonical;
  Place place;
  struct stat status;
  if (!tr_enabled() || !tr_has_changes() || !tr_locate(AT_FDCWD, path, 1, canonical, &place)) return REAL(realpath)(path, resolved);
  if (tr_stat(canonical, &status)) return NULL;
  return resolved ? strcpy(resolved, canonical) : strdup(canonical);
}
char *call_realpath_chk(const char *path, char *resolved, size_t room) { return (void)room, call_realpath(path, resolved); }
char *call_canonicalize_file_name(const char *path) { return call_realpath(path, NULL); }

// The disk of a changed path is that of the nearest original folder.
static void on_disk(const char *path, Path folder) {
  Path canonical;
  Place place;
  if (!tr_enabled() || !tr_has_changes() || !tr_locate(AT_FDCWD, path, 1, canonical, &place)) {
    tr_join(folder, "", path);
    return;
  }
  struct stat status;
  strcpy(folder, canonical);
  while (strcmp(folder, "/") && syscall(SYS_newfstatat, AT_FDCWD, folder, &status, 0)) {
    char *slash = strrchr(folder, '/');
    slash[slash == folder] = 0;
  }
}
int call_statfs(const char *path, struct statfs *disk) {
  Path folder;
  on_disk(path, folder);
  return (int)syscall(SYS_statfs, folder, disk);
}
int call_statvfs(const char *path, struct statvfs *disk) {
  Path folder;
  on_disk(path, folder);
  return REAL(statvfs)(folder, disk);
}
ssize_t call_getxattr(const char *path, const char *name, void *value, size_t size) {
  READ(AT_FDCWD, path, 1, syscall(SYS_getxattr, path, name, value, size), syscall(SYS_getxattr, physical, name, value, size));
}
ssize_t call_lgetxattr(const char *path, const char *name, void *value, size_t size) {
  READ(AT_FDCWD, path, 0, syscall(SYS_lgetxattr, path, name, value, size), syscall(SYS_lgetxattr, physical, name, value, size));
}
ssize_t call_listxattr(const char *path, char *names, size_t size) {
  READ(AT_FDCWD, path, 1, syscall(SYS_listxattr, path, names, size), syscall(SYS_listxattr, physical, names, size));
}
ssize_t call_llistxattr(const char *path, char *names, size_t size) {
  READ(AT_FDCWD, path, 0, syscall(SYS_llistxattr, path, names, size), syscall(SYS_llistxattr, physical, names, size));
}

// Folders

DIR *call_fdopendir(int fd) {
  Path link, logical, canonical, listing;
  Place place;
  if (tr_enabled() && tr_has_changes()) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, logical, PATH_MAX - 1);
    if (size > 0) {
      logical[size] = 0;
      tr_logical(logical, logical);
      if (tr_locate(AT_FDCWD, logical, 1, canonical, &place) && place == CHANGED && !tr_listing(canonical, listing)) {
        int merged = (int)sys_open(AT_FDCWD, listing, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
        if (merged >= 0) {
          syscall(SYS_dup3, merged, fd, fcntl(fd, F_GETFD) & FD_CLOEXEC ? O_CLOEXEC : 0);
          syscall(SYS_close, merged);
        }
      }
    }
  }
  return REAL(fdopendir)(fd);
}
DIR *call_opendir(const char *path) {
  int fd = open_at(AT_FDCWD, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC | O_NONBLOCK, 0);
  if (fd < 0) return NULL;
  DIR *folder = call_fdopendir(fd);
  if (!folder) close(fd);
  return folder;
}
int call_chdir(const char *path) {
  Path canonical;
  Place place;
  if (!tr_enabled() || !tr_has_changes() || !tr_locate(AT_FDCWD, path, 1, canonical, &place)) return (int)syscall(SYS_chdir, path);
  // To the original where there is one, so that the process is not left in the scratch folder at the end.
  READ(AT_FDCWD, path, 1, -1, (int)(tr_is_hidden(canonical) || syscall(SYS_chdir, canonical) ? syscall(SYS_chdir, physical) : 0));
}
char *call_getcwd(char *buffer, size_t size) {
  Path folder;
  if (syscall(SYS_getcwd, folder, sizeof folder) < 0) return NULL;
  if (tr_enabled()) tr_logical(folder, folder);
  if (!buffer) return strdup(folder);
  if (strlen(folder) >= size) {
    errno = ERANGE;
    return NULL;
  }
  return strcpy(buffer, folder);
}
char *call_getcwd_chk(char *buffer, size_t size, size_t room) { return (void)room, call_getcwd(buffer, size); }
char *call_get_current_dir_name(void) { return call_getcwd(NULL, 0); }

// Changes

#define CHANGE(at, path, follow, plain, redirected)                        \
  do {                                                                     \
    Path canonical;                                                        \
    Place place;                                                           \
    if (!tr_locate(at, path, follow, canonical, &place)) return (int)(plain); \
    return redirected;                                                     \
  } while (0)

int call_mkdirat(int at, const char *path, mode_t mode) {
  CHANGE(at, path, 0, syscall(SYS_mkdirat, at, path, mode), tr_mkdir(canonical, mode));
}
int call_mkdir(const char *path, mode_t mode) { return call_mkdirat(AT_FDCWD, path, mode); }
int call_unlinkat(int at, const char *path, int flags) {
  CHANGE(at, path, 0, syscall(SYS_unlinkat, at, path, flags), flags & AT_REMOVEDIR ? tr_rmdir(canonical) : tr_unlink(canonical));
}
int call_unlink(const char *path) { return call_unlinkat(AT_FDCWD, path, 0); }
int call_rmdir(const char *path) { return call_unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }
int call_remove(const char *path) {
  struct stat status;
  if (call_lstat(path, &status)) return -1;
  return call_unlinkat(AT_FDCWD, path, S_ISDIR(status.st_mode) ? AT_REMOVEDIR : 0);
}

int call_renameat2(int from_at, const char *from, int to_at, const char *to, unsigned flags) {
  Path source, target, physical;
  Place source_place, target_place;
  int redirects_source = tr_locate(from_at, from, 0, source, &source_place);
  int redirects_target = tr_locate(to_at, to, 0, target, &target_place);
  if (redirects_source && redirects_target) return tr_rename(source, target, flags);
  if (!redirects_source && !redirects_target) return (int)syscall(SYS_renameat2, from_at, from, to_at, to, flags);
  // Between a redirected folder and one that is left alone, as between two disks, unless it is a file of the program's own.
  if (redirects_source && source_place == CHANGED && !tr_changed_path(source, physical) && !tr_is_borrowed(physical))
    return (int)syscall(SYS_renameat2, AT_FDCWD, physical, to_at, to, flags);
  errno = EXDEV;
  return -1;
}
int call_renameat(int from_at, const char *from, int to_at, const char *to) { return call_renameat2(from_at, from, to_at, to, 0); }
int call_rename(const char *from, const char *to) { return call_renameat2(AT_FDCWD, from, AT_FDCWD, to, 0); }

int call_linkat(int from_at, const char *from, int to_at, const char *to, int flags) {
  Path source, target;
  Place source_place, target_place;
  int redirects_source = tr_locate(from_at, from, flags & AT_SYMLINK_FOLLOW, source, &source_place);
  int redirects_target = tr_locate(to_at, to, 0, target, &target_place);
  if (!redirects_target && !redirects_source) return (int)syscall(SYS_linkat, from_at, from, to_at, to, flags);
  if (!redirects_target || !redirects_source) {
    errno = EXDEV;
    return -1;
  }
  return tr_link(source, target);
}
int call_link(const char *from, const char *to) { return call_linkat(AT_FDCWD, from, AT_FDCWD, to, 0); }

int call_symlinkat(const char *target, int at, const char *path) {
  Path canonical, physical;
  Place place;
  if (!tr_locate(at, path, 0, canonical, &place)) return (int)syscall(SYS_symlinkat, target, at, path);
  if (tr_new_name(canonical, physical) || syscall(SYS_symlinkat, target, AT_FDCWD, physical)) return -1;
  tr_note(canonical);
  return 0;
}
int call_symlink(const char *target, const char *path) { return call_symlinkat(target, AT_FDCWD, path); }

int call_mknodat(int at, const char *path, mode_t mode, dev_t device) {
  Path canonical, physical;
  Place place;
  if (!tr_locate(at, path, 0, canonical, &place)) return (int)syscall(SYS_mknodat, at, path, mode, device);
  if (tr_new_name(canonical, physical) || syscall(SYS_mknodat, AT_FDCWD, physical, mode, device)) return -1;
  tr_note(canonical);
  return 0;
}
int call_mknod(const char *path, mode_t mode, dev_t device) { return call_mknodat(AT_FDCWD, path, mode, device); }
int call_mkfifo(const char *path, mode_t mode) { return call_mknodat(AT_FDCWD, path, S_IFIFO | (mode & 07777), 0); }
int call_mkfifoat(int at, const char *path, mode_t mode) { return call_mknodat(at, path, S_IFIFO | (mode & 07777), 0); }

int call_truncate(const char *path, off_t size) {
  Path canonical, physical;
  Place place;
  if (!tr_locate(AT_FDCWD, path, 1, canonical, &place)) return (int)syscall(SYS_truncate, path, size);
  if (tr_make_writable(canonical, size ? O_WRONLY : O_WRONLY | O_TRUNC, 0, physical)) return -1;
  return (int)syscall(SYS_truncate, physical, size);
}

// Attributes: those of a changed path are set, those of an original are left as they are.

static int changes_attributes(int at, const char *path, int follow, Path physical) {
  Path canonical;
  Place place;
  if (!tr_locate(at, path, follow, canonical, &place)) return 0;
  struct stat status;
  if (tr_stat(canonical, &status)) return -1;
  if (place != CHANGED || tr_changed_path(canonical, physical) || tr_is_borrowed(physical)) return 2;
  return 1;
}
#define ATTRIBUTES(at, path, follow, plain, changed)                 \
  do {                                                               \
    Path physical;                                                   \
    switch (changes_attributes(at, path, follow, physical)) {        \
      case 0: return (int)(plain);                                   \
      case 1: return (int)(changed);                                 \
      case 2: return 0;                                              \
      default: return -1;                                            \
    }                                                                \
  } while (0)

int call_fchmodat(int at, const char *path, mode_t mode, int flags) {
  (void)flags;
  ATTRIBUTES(at, path, 1, syscall(SYS_fchmodat, at, path, mode), syscall(SYS_fchmodat, AT_FDCWD, physical, mode));
}
int call_chmod(const char *path, mode_t mode) { return call_fchmodat(AT_FDCWD, path, mode, 0); }
int call_lchmod(const char *path, mode_t mode) { return call_fchmodat(AT_FDCWD, path, mode, 0); }
int call_fchownat(int at, const char *path, uid_t user, gid_t group, int flags) {
  ATTRIBUTES(at, path, !(flags & AT_SYMLINK_NOFOLLOW), syscall(SYS_fchownat, at, path, user, group, flags),
             syscall(SYS_fchownat, AT_FDCWD, physical, user, group, flags));
}
int call_chown(const char *path, uid_t user, gid_t group) { return call_fchownat(AT_FDCWD, path, user, group, 0); }
int call_lchown(const char *path, uid_t user, gid_t group) {
  return call_fchownat(AT_FDCWD, path, user, group, AT_SYMLINK_NOFOLLOW);
}
int call_setxattr(const char *path, const char *name, const void *value, size_t size, int flags) {
  ATTRIBUTES(AT_FDCWD, path, 1, syscall(SYS_setxattr, path, name, value, size, flags),
             syscall(SYS_setxattr, physical, name, value, size, flags));
}
int call_lsetxattr(const char *path, const char *name, const void *value, size_t size, int flags) {
  ATTRIBUTES(AT_FDCWD, path, 0, syscall(SYS_lsetxattr, path, name, value, size, flags),
             syscall(SYS_lsetxattr, physical, name, value, size, flags));
}
int call_removexattr(const char *path, const char *name) {
  ATTRIBUTES(AT_FDCWD, path, 1, syscall(SYS_removexattr, path, name), syscall(SYS_removexattr, physical, name));
}

// Whether the descriptor is of an original, which stays as it is.
static int is_original(int fd) {
  Path link, path, canonical;
  Place place;
  struct stat status;
  if (!tr_enabled() || fstat(fd, &status) || (!S_ISREG(status.st_mode) && !S_ISDIR(status.st_mode))) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, link, path, PATH_MAX - 1);
  if (size <= 0) return 0;
  path[size] = 0;
  return tr_locate(AT_FDCWD, path, 0, canonical, &place);
}
int call_utimensat(int at, const char *path, const struct timespec times[2], int flags) {
  if (!path) return is_original(at) ? 0 : (int)syscall(SYS_utimensat, at, NULL, times, flags);
  ATTRIBUTES(at, path, !(flags & AT_SYMLINK_NOFOLLOW), syscall(SYS_utimensat, at, path, times, flags),
             syscall(SYS_utimensat, AT_FDCWD, physical, times, flags));
}
int call_futimens(int fd, const struct timespec times[2]) { return call_utimensat(fd, NULL, times, 0); }
static int set_times(int at, const char *path, const struct timeval times[2], int flags) {
  if (!times) return call_utimensat(at, path, NULL, flags);
  struct timespec exact[2] = {{times[0].tv_sec, times[0].tv_usec * 1000}, {times[1].tv_sec, times[1].tv_usec * 1000}};
  return call_utimensat(at, path, exact, flags);
}
int call_utimes(const char *path, const struct timeval times[2]) { return set_times(AT_FDCWD, path, times, 0); }
int call_lutimes(const char *path, const struct timeval times[2]) { return set_times(AT_FDCWD, path, times, AT_SYMLINK_NOFOLLOW); }
int call_futimesat(int at, const char *path, const struct timeval times[2]) { return set_times(at, path, times, 0); }
int call_utime(const char *path, const struct utimbuf *times) {
  if (!times) return call_utimensat(AT_FDCWD, path, NULL, 0);
  struct timespec exact[2] = {{times->actime, 0}, {times->modtime, 0}};
  return call_utimensat(AT_FDCWD, path, exact, 0);
}
int call_fchmod(int fd, mode_t mode) { return is_original(fd) ? 0 : (int)syscall(SYS_fchmod, fd, mode); }
int call_fchown(int fd, uid_t user, gid_t group) { return is_original(fd) ? 0 : (int)syscall(SYS_fchown, fd, user, group); }
int call_fsetxattr(int fd, const char *name, const void *value, size_t size, int flags) {
  return is_original(fd) ? 0 : (int)syscall(SYS_fsetxattr, fd, name, value, size, flags);
}

// Sockets with a name

static int socket_call(long number, int fd, const struct sockaddr *address, socklen_t size, int creates) {
  const struct sockaddr_un *named = (const struct sockaddr_un *)address;
  Path canonical, physical;
  Place place;
  struct sockaddr_un redirected = {.sun_family = AF_UNIX};
  if (!tr_enabled() || !address || address->sa_family != AF_UNIX || size <= sizeof(sa_family_t) || !named->sun_path[0] ||
      !tr_locate(AT_FDCWD, named->sun_path, !creates, canonical, &place))
    return (int)syscall(number, fd, address, size);
  if (creates ? tr_new_name(canonical, physical) : place != CHANGED || tr_changed_path(canonical, physical))
    return creates ? -1 : (int)syscall(number, fd, address, size);
  int folder = -1, result = -1;
  if (strlen(physical) < sizeof redirected.sun_path) {
    strcpy(redirected.sun_path, physical);
  } else {
    // Names of sockets are short; the folder's descriptor makes this one so.
    char *name = strrchr(physical, '/');
    *name = 0;
    folder = (int)sys_open(AT_FDCWD, physical, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    snprintf(redirected.sun_path, sizeof redirected.sun_path, "/proc/self/fd/%d/%.60s", folder, name + 1);
  }
  result = (int)syscall(number, fd, &redirected, sizeof redirected);
  if (folder >= 0) syscall(SYS_close, folder);
  if (!result && creates) tr_note(canonical);
  return result;
}
int call_bind(int fd, const struct sockaddr *address, socklen_t size) { return socket_call(SYS_bind, fd, address, size, 1); }
int call_connect(int fd, const struct sockaddr *address, socklen_t size) { return socket_call(SYS_connect, fd, address, size, 0); }

// Children: programs started with an environment of their own are redirected too.

enum { MOST_VARIABLES = 4096 };

static void with_redirection(char *const given[], char *extended[MOST_VARIABLES], char preload[2 * PATH_MAX]) {
  int count = 0, has_setting = 0;
  snprintf(preload, 2 * PATH_MAX, "LD_PRELOAD=%s", library);
  for (; given && given[count] && count < MOST_VARIABLES - 3; count++) {
    extended[count] = given[count];
    has_setting |= !strncmp(given[count], "TONNAGE_REDIRECT=", 17);
    if (strncmp(given[count], "LD_PRELOAD=", 11)) continue;
    if (!strstr(given[count], library)) snprintf(preload, 2 * PATH_MAX, "LD_PRELOAD=%s:%s", library, given[count] + 11);
    else snprintf(preload, 2 * PATH_MAX, "%s", given[count]);
    extended[count] = preload;
    preload = NULL;
  }
  if (preload) extended[count++] = preload;
  if (!has_setting) extended[count++] = redirect_setting;
  extended[count] = NULL;
}

static const char *program_path(const char *path, Path physical) {
  return to_read(AT_FDCWD, path, 1, physical) == 1 ? physical : path;
}
int call_execve(const char *path, char *const arguments[], char *const environment[]) {
  if (!tr_enabled()) return (int)syscall(SYS_execve, path, arguments, environment);
  char *extended[MOST_VARIABLES], preload[2 * PATH_MAX];
  Path physical;
  with_redirection(environment, extended, preload);
  return (int)syscall(SYS_execve, program_path(path, physical), arguments, extended);
}
int call_execvpe(const char *name, char *const arguments[], char *const environment[]) {
  char *extended[MOST_VARIABLES], preload[2 * PATH_MAX];
  if (!tr_enabled()) return REAL(execvpe)(name, arguments, environment);
  with_redirection(environment, extended, preload);
  return REAL(execvpe)(name, arguments, extended);
}
int call_posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                     char *const arguments[], char *const environment[]) {
  char *extended[MOST_VARIABLES], preload[2 * PATH_MAX];
  Path physical;
  if (!tr_enabled()) return REAL(posix_spawn)(pid, path, actions, attributes, arguments, environment);
  with_redirection(environment, extended, preload);
  return REAL(posix_spawn)(pid, program_path(path, physical), actions, attributes, arguments, extended);
}
int call_posix_spawnp(pid_t *pid, const char *name, const posix_spawn_file_actions_t *actions, const posix_spawnattr_t *attributes,
                      char *const arguments[], char *const environment[]) {
  char *extended[MOST_VARIABLES], preload[2 * PATH_MAX];
  if (!tr_enabled()) return REAL(posix_spawnp)(pid, name, actions, attributes, arguments, environment);
  with_redirection(environment, extended, preload);
  return REAL(posix_spawnp)(pid, name, actions, attributes, arguments, extended);
}
int call_posix_spawn_file_actions_addopen(posix_spawn_file_actions_t *actions, int fd, const char *path, int flags, mode_t mode) {
  Path canonical, physical;
  Place place;
  int writes = (flags & O_ACCMODE) != O_RDONLY || flags & O_CREAT;
  if (writes && tr_locate(AT_FDCWD, path, 1, canonical, &place) && !is_special(canonical, place)) {
    if (tr_make_writable(canonical, flags, mode, physical)) return errno;
    return REAL(posix_spawn_file_actions_addopen)(actions, fd, physical, flags, mode);
  }
  return REAL(posix_spawn_file_actions_addopen)(actions, fd, writes ? path : program_path(path, physical), flags, mode);
}

// Writing: see sparse.c

ssize_t call_write(int fd, const void *data, size_t size) { return tr_write(fd, data, size, -1); }
ssize_t call_pwrite(int fd, const void *data, size_t size, off_t offset) { return tr_write(fd, data, size, offset); }
ssize_t call_writev(int fd, const struct iovec *pieces, int count) {
  // The large piece, if there is one, is the last: a stream writes what it has buffered and then what it was given.
  if (count < 2 || pieces[count - 1].iov_len < 1 << 22) return syscall(SYS_writev, fd, pieces, count);
  size_t before = 0;
  for (int i = 0; i < count - 1; i++) before += pieces[i].iov_len;
  ssize_t first = syscall(SYS_writev, fd, pieces, count - 1);
  if (first < 0 || (size_t)first < before) return first;
  ssize_t last = tr_write(fd, pieces[count - 1].iov_base, pieces[count - 1].iov_len, -1);
  return last < 0 ? first : first + last;
}

// Libraries that are loaded later

static const char *own_folders(const void *caller, const char *name, Path target);

void *call_dlopen(const char *name, int mode) {
  const void *caller = __builtin_return_address(0);
  if (!tr_enabled() || !name) return REAL(dlopen)(name, mode);
  Path physical;
  if (strchr(name, '/')) name = program_path(name, physical);
  else if (!REAL(dlopen)(name, mode | RTLD_NOLOAD)) name = own_folders(caller, name, physical);
  void *loaded = REAL(dlopen)(name, mode);
  if (loaded) tr_rebind();
  return loaded;
}

// Find a library in the folders that its caller names (its RUNPATH), which the loader would look at for that caller, not for us.
#include <link.h>
static const char *own_folders(const void *caller, const char *name, Path target) {
  Dl_info info;
  struct link_map *map = NULL;
  if (!dladdr1(caller, &info, (void **)&map, RTLD_DL_LINKMAP) || !map || !map->l_ld) return name;
  const char *strings = NULL;
  size_t folders = 0;
  for (const ElfW(Dyn) *entry = map->l_ld; entry->d_tag != DT_NULL; entry++) {
    if (entry->d_tag == DT_STRTAB) strings = (const char *)entry->d_un.d_ptr;
    if (entry->d_tag == DT_RUNPATH || (entry->d_tag == DT_RPATH && !folders)) folders = entry->d_un.d_val;
  }
  if (!strings || !folders) return name;
  Path origin;
  if (tr_join(origin, "", map->l_name)) return name;
  char *slash = strrchr(origin, '/');
  if (slash) *slash = 0;
  for (const char *folder = strings + folders; *folder;) {
    const char *end = strchrnul(folder, ':');
    int length = (int)(end - folder);
    if (!strncmp(folder, "$ORIGIN", 7)) snprintf(target, PATH_MAX, "%s%.*s/%s", origin, length - 7, folder + 7, name);
    else snprintf(target, PATH_MAX, "%.*s/%s", length, folder, name);
    if (syscall(SYS_faccessat, AT_FDCWD, target, R_OK) == 0) return target;
    folder = *end ? end + 1 : end;
  }
  return name;
}

// The names under which a program finds them: exported, for one that is started with LD_PRELOAD, and as a table for `tr_rebind`.

#define NAMES(X)                                                                                                             \
  X(open, open) X(open64, open) X(openat, openat) X(openat64, openat) X(__open_2, open_2) X(__open64_2, open_2)              \
  X(__openat_2, openat_2) X(__openat64_2, openat_2) X(creat, creat) X(creat64, creat) X(fopen, fopen) X(fopen64, fopen)      \
  X(freopen, freopen) X(freopen64, freopen) X(mkstemp, mkstemp) X(mkstemp64, mkstemp) X(mkostemp, mkostemp)                  \
  X(mkostemp64, mkostemp) X(mkstemps, mkstemps) X(mkstemps64, mkstemps) X(mkostemps, mkostemps) X(mkostemps64, mkostemps)    \
  X(mkdtemp, mkdtemp) X(stat, stat) X(stat64, stat) X(lstat, lstat) X(lstat64, lstat) X(fstatat, fstatat)                    \
  X(fstatat64, fstatat) X(__xstat, xstat) X(__xstat64, xstat) X(__lxstat, lxstat) X(__lxstat64, lxstat)                      \
  X(__fxstatat, fxstatat) X(__fxstatat64, fxstatat) X(statx, statx) X(access, access) X(eaccess, access)                     \
  X(euidaccess, access) X(faccessat, faccessat) X(readlink, readlink) X(readlinkat, readlinkat)                              \
  X(__readlink_chk, readlink_chk) X(__readlinkat_chk, readlinkat_chk) X(realpath, realpath) X(__realpath_chk, realpath_chk)  \
  X(canonicalize_file_name, canonicalize_file_name) X(statfs, statfs) X(statfs64, statfs) X(statvfs, statvfs)                \
  X(statvfs64, statvfs) X(getxattr, getxattr) X(lgetxattr, lgetxattr) X(listxattr, listxattr) X(llistxattr, llistxattr)      \
  X(opendir, opendir) X(fdopendir, fdopendir) X(chdir, chdir) X(getcwd, getcwd) X(__getcwd_chk, getcwd_chk)                  \
  X(get_current_dir_name, get_current_dir_name) X(mkdir, mkdir) X(mkdirat, mkdirat) X(unlink, unlink)                        \
  X(unlinkat, unlinkat) X(rmdir, rmdir) X(remove, remove) X(rename, rename) X(renameat, renameat) X(renameat2, renameat2)    \
  X(link, link) X(linkat, linkat) X(symlink, symlink) X(symlinkat, symlinkat) X(mknod, mknod) X(mknodat, mknodat)            \
  X(mkfifo, mkfifo) X(mkfifoat, mkfifoat) X(truncate, truncate) X(truncate64, truncate) X(chmod, chmod) X(lchmod, lchmod)    \
  X(fchmodat, fchmodat) X(chown, chown) X(lchown, lchown) X(fchownat, fchownat) X(setxattr, setxattr)                        \
  X(lsetxattr, lsetxattr) X(removexattr, removexattr) X(utimensat, utimensat) X(futimens, futimens) X(utimes, utimes)        \
  X(lutimes, lutimes) X(futimesat, futimesat) X(utime, utime) X(fchmod, fchmod) X(fchown, fchown) X(fsetxattr, fsetxattr)    \
  X(bind, bind) X(connect, connect) X(execve, execve) X(execvpe, execvpe) X(posix_spawn, posix_spawn)                        \
  X(posix_spawnp, posix_spawnp) X(posix_spawn_file_actions_addopen, posix_spawn_file_actions_addopen) X(write, write)        \
  X(pwrite, pwrite) X(pwrite64, pwrite) X(writev, writev) X(dlopen, dlopen)

#define EXPOSE(symbol, function) \
  extern __typeof__(call_##function) exposed_##symbol __asm__(#symbol) __attribute__((alias("call_" #function), visibility("default")));
NAMES(EXPOSE)

#define ROW(symbol, function) {#symbol, (void *)call_##function},
const Wrapper tr_wrappers[] = {NAMES(ROW)};
const unsigned tr_wrapper_count = sizeof tr_wrappers / sizeof *tr_wrappers;

// Beginning and end

static void name_library(const char *folder) {
  Dl_info info;
  if (dladdr((void *)name_library, &info)) tr_join(library, "", info.dli_fname);
  snprintf(redirect_setting, sizeof redirect_setting, "TONNAGE_REDIRECT=%s", folder);
}

// Redirect this process, into a folder that the caller has prepared.
EXPORT int tonnage_redirect_begin(const char *folder) {
  name_library(folder);
  if (tr_open_folder(folder)) {
    tr_close_folder();
    return -1;
  }
  tr_rebind();
  return 0;
}
EXPORT void tonnage_redirect_end(void) {
  Path folder;
  int is_below = syscall(SYS_getcwd, folder, sizeof folder) > 0 && tr_logical(folder, folder);
  tr_close_folder();
  while (is_below && syscall(SYS_chdir, folder) && folder[1]) {
    char *slash = strrchr(folder, '/');
    slash[slash == folder] = 0;
  }
}
EXPORT void tonnage_redirect_pause(int paused) { tr_off += paused ? 1 : -1; }

// In a child that was started with LD_PRELOAD.
__attribute__((constructor)) static void begin_in_child(void) {
  const char *folder = getenv("TONNAGE_REDIRECT");
  if (!folder || !folder[0]) return;
  name_library(folder);
  tr_open_folder(folder);
}
