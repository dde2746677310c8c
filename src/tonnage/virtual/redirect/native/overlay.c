// Changes to the merged file system: copies, deletions, new names.
#include "redirect.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/fs.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

static int sys_stat(const char *path, struct stat *status, int flags) {
  return (int)syscall(SYS_newfstatat, AT_FDCWD, path, status, flags);
}
static int sys_open(const char *path, int flags, mode_t mode) { return (int)syscall(SYS_openat, AT_FDCWD, path, flags, mode); }
static int sys_mkdir(const char *path, mode_t mode) { return (int)syscall(SYS_mkdirat, AT_FDCWD, path, mode); }
static int sys_remove(const char *path, int flags) { return (int)syscall(SYS_unlinkat, AT_FDCWD, path, flags); }
static int sys_rename(const char *from, const char *to) {
  return (int)syscall(SYS_renameat2, AT_FDCWD, from, AT_FDCWD, to, 0);
}
static void sys_close(int fd) { syscall(SYS_close, fd); }

static const off_t LARGEST_COPY = 64 << 20;

static int fail(int code) {
  errno = code;
  return -1;
}

int tr_stat(const char *canonical, struct stat *status) {
  Path changed;
  switch (tr_place(canonical)) {
    case HIDDEN:
      return fail(ENOENT);
    case CHANGED:
      if (tr_changed_path(canonical, changed)) return -1;
      return sys_stat(changed, status, tr_is_borrowed(changed) ? 0 : AT_SYMLINK_NOFOLLOW);
    default:
      return sys_stat(canonical, status, AT_SYMLINK_NOFOLLOW);
  }
}

static void parent_of(const char *canonical, Path parent) {
  strcpy(parent, canonical);
  char *slash = strrchr(parent, '/');
  if (slash) slash[slash == parent] = 0;
}

static int original_exists(const char *canonical) {
  struct stat status;
  return !tr_is_hidden(canonical) && sys_stat(canonical, &status, AT_SYMLINK_NOFOLLOW) == 0;
}

static int hide(const char *canonical) {
  Path gone;
  tr_gone_path(canonical, gone);
  int fd = sys_open(gone, O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0) return -1;
  ssize_t size = (ssize_t)strlen(canonical);
  int failed = syscall(SYS_write, fd, canonical, size) != size;
  sys_close(fd);
  tr_note(canonical);
  return failed ? fail(ENOSPC) : 0;
}

// Make the folder, and those above it, under files/.
static int shadow(const char *folder) {
  Path changed;
  struct stat status;
  if (tr_changed_path(folder, changed)) return -1;
  if (sys_stat(changed, &status, AT_SYMLINK_NOFOLLOW) == 0) return S_ISDIR(status.st_mode) ? 0 : fail(ENOTDIR);
  if (tr_is_hidden(folder)) return fail(ENOENT);
  if (sys_stat(folder, &status, 0)) return -1;
  if (!S_ISDIR(status.st_mode)) return fail(ENOTDIR);
  if (strcmp(folder, "/")) {
    Path parent;
    parent_of(folder, parent);
    if (shadow(parent)) return -1;
  }
  if (sys_mkdir(changed, 0700) && errno != EEXIST) return -1;
  syscall(SYS_fchmodat, AT_FDCWD, changed, (status.st_mode & 07777) | 0700);
  tr_note(folder);
  return 0;
}

int tr_shadow_parent(const char *canonical) {
  Path parent, changed;
  parent_of(canonical, parent);
  struct stat status;
  if (tr_changed_path(parent, changed)) return -1;
  int is_new = sys_stat(changed, &status, AT_SYMLINK_NOFOLLOW) != 0;
  // Where the user may not write, neither may the program.
  int is_folder = is_new && !tr_is_hidden(parent) && sys_stat(parent, &status, 0) == 0 && S_ISDIR(status.st_mode);
  if (is_folder && syscall(SYS_faccessat, AT_FDCWD, parent, W_OK | X_OK)) return -1;
  return shadow(parent);
}

int tr_new_name(const char *canonical, Path target) {
  struct stat status;
  if (tr_stat(canonical, &status) == 0) return fail(EEXIST);
  if (tr_shadow_parent(canonical)) return -1;
  return tr_changed_path(canonical, target);
}

// Copies

static int copy_data(int from, int to, off_t size) {
  if (ioctl(to, FICLONE, from) == 0) return 0;
  if (ftruncate(to, size)) return -1;
  for (off_t at = 0; at < size;) {
    off_t start = lseek(from, at, SEEK_DATA);
    if (start < 0) {
      if (errno == ENXIO) break;  // the rest is a hole
      start = at;
    }
    off_t end = lseek(from, start, SEEK_HOLE);
    if (end < 0) end = size;
    loff_t in = start, out = start;
    while (in < end) {
      ssize_t copied = syscall(SYS_copy_file_range, from, &in, to, &out, (size_t)(end - in), 0);
      if (copied > 0) continue;
      if (copied == 0) break;
      char piece[1 << 16];
      ssize_t got = syscall(SYS_pread64, from, piece, end - in < (off_t)sizeof piece ? (size_t)(end - in) : sizeof piece, in);
      if (got <= 0) return got < 0 ? -1 : 0;
      if (syscall(SYS_pwrite64, to, piece, got, out) != got) return fail(ENOSPC);
      in += got, out += got;
    }
    at = end;
  }
  return 0;
}

// Refuse a copy that would fill the disk of the scratch folder.
static int has_room(off_t size) {
  struct statvfs disk;
  return statvfs(tr_folder(), &disk) || (uint64_t)size < (uint64_t)disk.f_bavail * disk.f_frsize * 9 / 10;
}

static int copy_file(const char *source, const char *target, int with_data, int is_replacing) {
  struct stat status;
  int from = sys_open(source, O_RDONLY | O_CLOEXEC, 0);
  if (from < 0) return -1;
  int failed = fstat(from, &status);
  if (!failed && with_data && !has_room(status.st_blocks * 512)) {
    dprintf(2, "tonnage: %s (%.1f GiB) is changed by the script, and there is no room for its scratch copy in %s; set TMPDIR\n",
            source, (double)status.st_size / (1 << 30), tr_folder());
    failed = fail(ENOSPC);
  }
  // Others may copy the same file at the same time: each copy is complete when it gets its name, and the first one stays.
  static volatile unsigned serial;
  Path name, copy;
  snprintf(name, sizeof name, "/views/copy-%ld-%u", (long)syscall(SYS_gettid), __atomic_add_fetch(&serial, 1, __ATOMIC_SEQ_CST));
  failed = failed || tr_join(copy, tr_folder(), name);
  int to = failed ? -1 : sys_open(copy, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (to >= 0) {
    failed = with_data && copy_data(from, to, status.st_size);
    fchmod(to, status.st_mode & 07777);
    struct timespec times[2] = {status.st_atim, status.st_mtim};
    syscall(SYS_utimensat, to, NULL, times, 0);
    sys_close(to);
    unsigned flags = is_replacing ? 0 : RENAME_NOREPLACE;
    if (!failed && syscall(SYS_renameat2, AT_FDCWD, copy, AT_FDCWD, target, flags)) failed = errno != EEXIST;
    int code = errno;
    sys_remove(copy, 0);
    errno = code;
  }
  int code = errno;
  sys_close(from);
  errno = code;
  return to < 0 || failed ? -1 : 0;
}

int tr_make_writable(const char *canonical, int flags, mode_t mode, Path target) {
  struct stat status;
  int with_data = !(flags & O_TRUNC);
  if (tr_changed_path(canonical, target)) return -1;
  Place place = tr_place(canonical);
  if (place == CHANGED && !tr_is_borrowed(target)) return 0;  // open(2) itself tells what is wrong
  if (place == CHANGED) {
    if ((flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL)) return fail(EEXIST);
    Path original;
    ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, target, original, PATH_MAX - 1);
    if (size < 0) return -1;
    original[size] = 0;
    return copy_file(original, target, with_data, 1);
  }
  int is_exclusive = (flags & (O_CREAT | O_EXCL)) == (O_CREAT | O_EXCL);
  if (place == ORIGINAL && sys_stat(canonical, &status, is_exclusive ? AT_SYMLINK_NOFOLLOW : 0) == 0) {
    if (is_exclusive) return fail(EEXIST);
    if (S_ISDIR(status.st_mode)) return fail(EISDIR);
    if (syscall(SYS_faccessat, AT_FDCWD, canonical, W_OK)) return -1;
    Path parent;
    parent_of(canonical, parent);
    if (shadow(parent) || copy_file(canonical, target, with_data, 0)) return -1;
    tr_note(canonical);
    return 0;
  }
  if (!(flags & O_CREAT)) return fail(ENOENT);
  if (tr_shadow_parent(canonical)) return -1;
  tr_note(canonical);
  (void)mode;
  return 0;
}

// Deletions

int tr_unlink(const char *canonical) {
  struct stat status;
  if (tr_stat(canonical, &status)) return -1;
  if (S_ISDIR(status.st_mode)) return fail(EISDIR);
  if (tr_shadow_parent(canonical)) return -1;
  Path changed;
  if (tr_changed_path(canonical, changed)) return -1;
  if (sys_remove(changed, 0) && errno != ENOENT) return -1;
  tr_note(canonical);
  return original_exists(canonical) ? hide(canonical) : 0;
}

static int is_empty(const char *canonical) {
  Path listing;
  if (tr_listing(canonical, listing)) return 0;
  int fd = sys_open(listing, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0), entries = 0;
  if (fd < 0) return 0;
  char buffer[1024];
  for (long size; entries <= 2 && (size = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0;)
    for (long at = 0; at < size; at += *(unsigned short *)(buffer + at + 16)) entries++;
  sys_close(fd);
  return entries <= 2;
}

int tr_rmdir(const char *canonical) {
  struct stat status;
  if (tr_stat(canonical, &status)) return -1;
  if (!S_ISDIR(status.st_mode)) return fail(ENOTDIR);
  if (!is_empty(canonical)) return fail(ENOTEMPTY);
  if (tr_shadow_parent(canonical)) return -1;
  Path changed;
  if (tr_changed_path(canonical, changed)) return -1;
  if (sys_remove(changed, AT_REMOVEDIR) && errno != ENOENT) return -1;
  tr_note(canonical);
  return original_exists(canonical) ? hide(canonical) : 0;
}

int tr_mkdir(const char *canonical, mode_t mode) {
  Path changed;
  if (tr_new_name(canonical, changed) || sys_mkdir(changed, mode)) return -1;
  tr_note(canonical);
  return 0;
}

// New names

static int borrow(const char *original, const char *to) {
  Path target, changed;
  ssize_t size = syscall(SYS_readlinkat, AT_FDCWD, original, target, PATH_MAX - 1);
  if (size >= 0) target[size] = 0;  // a symbolic link is made anew
  else if (tr_join(target, "/proc/self/root", original)) return -1;
  if (tr_changed_path(to, changed)) return -1;
  if (syscall(SYS_symlinkat, target, AT_FDCWD, changed)) return -1;
  tr_note(to);
  return 0;
}

// A hard link. A large original is borrowed: its copy would take the disk, and programs link finished checkpoints.
int tr_link(const char *from, const char *to) {
  struct stat status;
  Path source, target;
  if (tr_stat(from, &status)) return -1;
  if (tr_new_name(to, target)) return -1;
  if (S_ISDIR(status.st_mode)) return fail(EPERM);
  if (tr_place(from) == ORIGINAL) {
    if (!S_ISREG(status.st_mode) || status.st_size > LARGEST_COPY) return borrow(from, to);
    if (tr_make_writable(from, O_WRONLY, 0, source)) return -1;
  }
  if (tr_changed_path(from, source) || syscall(SYS_linkat, AT_FDCWD, source, AT_FDCWD, target, 0)) return -1;
  tr_note(to);
  return 0;
}

static int move(const char *from, const char *to);

static int move_entries(const char *from, const char *to) {
  Path listing;
  if (tr_listing(from, listing)) return -1;
  int fd = sys_open(listing, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0), failed = 0;
  if (fd < 0) return -1;
  char buffer[4096];
  // Read all first in pieces: a listing under files/ itself loses the entries that are moved, which getdents allows.
  for (long size; !failed && (size = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0;)
    for (long at = 0; !failed && at < size; at += *(unsigned short *)(buffer + at + 16)) {
      const char *name = buffer + at + 19;
      if (!strcmp(name, ".") || !strcmp(name, "..")) continue;
      char *paths = malloc(2 * PATH_MAX);
      if (!paths) failed = fail(ENOMEM);
      char *source = paths, *target = paths ? paths + PATH_MAX : NULL;
      if (paths)
        failed = tr_join(source, from, "/") || tr_join(source, source, name) || tr_join(target, to, "/") ||
                 tr_join(target, target, name) || move(source, target);
      free(paths);
    }
  sys_close(fd);
  return failed;
}

// Move a file or folder to a free name.
static int move(const char *from, const char *to) {
  struct stat status;
  Path source, target;
  if (tr_stat(from, &status) || tr_changed_path(from, source) || tr_changed_path(to, target)) return -1;
  int is_changed = tr_place(from) == CHANGED;
  if (!S_ISDIR(status.st_mode)) {
    if (is_changed ? sys_rename(source, target) : borrow(from, to)) return -1;
    tr_note(to);
  } else {
    if (sys_mkdir(target, (status.st_mode & 07777) | 0700)) return -1;
    tr_note(to);
    if (move_entries(from, to)) return -1;
    if (is_changed && sys_remove(source, AT_REMOVEDIR)) return -1;
  }
  tr_note(from);
  return original_exists(from) ? hide(from) : 0;
}

int tr_rename(const char *from, const char *to, unsigned flags) {
  struct stat old, existing;
  if (flags & ~(unsigned)RENAME_NOREPLACE) return fail(EINVAL);
  if (tr_stat(from, &old)) return -1;
  if (!strcmp(from, to)) return flags ? fail(EEXIST) : 0;
  size_t length = strlen(from), target_length = strlen(to);
  if (!strncmp(from, to, length) && to[length] == '/') return fail(S_ISDIR(old.st_mode) ? EINVAL : ENOTDIR);
  if (!strncmp(from, to, target_length) && from[target_length] == '/') return fail(ENOTEMPTY);
  if (tr_stat(to, &existing) == 0) {
    if (flags) return fail(EEXIST);
    if (S_ISDIR(existing.st_mode) && !S_ISDIR(old.st_mode)) return fail(EISDIR);
    if (!S_ISDIR(existing.st_mode) && S_ISDIR(old.st_mode)) return fail(ENOTDIR);
  } else {
    existing.st_mode = 0;
  }
  if (tr_shadow_parent(from) || tr_shadow_parent(to)) return -1;
  Path source, target;
  if (tr_changed_path(from, source) || tr_changed_path(to, target)) return -1;
  if (existing.st_mode && !S_ISDIR(old.st_mode) && tr_place(from) == CHANGED) {
    // In one step, as programs that write a file next to the old one expect.
    if (sys_rename(source, target)) return -1;
    tr_note(to);
    tr_note(from);
    return original_exists(from) ? hide(from) : 0;
  }
  if (existing.st_mode && (S_ISDIR(existing.st_mode) ? tr_rmdir(to) : tr_unlink(to))) return -1;
  return move(from, to);
}

// Listings

static int add_entry(const char *view, const char *name, unsigned char type) {
  Path entry;
  if (tr_join(entry, view, "/") || tr_join(entry, entry, name)) return -1;
  if (type == DT_DIR) return sys_mkdir(entry, 0700);
  if (type == DT_LNK) return (int)syscall(SYS_symlinkat, "tonnage", AT_FDCWD, entry);
  int fd = sys_open(entry, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
  if (fd < 0) return -1;
  sys_close(fd);
  return 0;
}

static unsigned char type_of(const char *path) {
  struct stat status;
  if (sys_stat(path, &status, AT_SYMLINK_NOFOLLOW)) return DT_REG;
  return S_ISDIR(status.st_mode) ? DT_DIR : S_ISLNK(status.st_mode) && !tr_is_borrowed(path) ? DT_LNK : DT_REG;
}

static int add_entries(const char *view, const char *folder, const char *canonical) {
  int fd = sys_open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  if (fd < 0) return -1;
  char buffer[4096];
  int is_original = canonical != NULL;
  for (long size; (size = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0;)
    for (long at = 0; at < size; at += *(unsigned short *)(buffer + at + 16)) {
      const char *name = buffer + at + 19;
      if (!strcmp(name, ".") || !strcmp(name, "..")) continue;
      Path entry;
      if (tr_join(entry, is_original ? canonical : folder, "/") || tr_join(entry, entry, name)) continue;
      if (!is_original || !tr_is_hidden(entry)) add_entry(view, name, type_of(entry));  // what is there already stays
    }
  sys_close(fd);
  return 0;
}

static void remove_view(const char *view) {
  int fd = sys_open(view, O_RDONLY | O_DIRECTORY | O_CLOEXEC, 0);
  char buffer[4096];
  for (long size; fd >= 0 && (size = syscall(SYS_getdents64, fd, buffer, sizeof buffer)) > 0;)
    for (long at = 0; at < size; at += *(unsigned short *)(buffer + at + 16)) {
      const char *name = buffer + at + 19;
      if (strcmp(name, ".") && strcmp(name, "..") && syscall(SYS_unlinkat, fd, name, 0)) syscall(SYS_unlinkat, fd, name, AT_REMOVEDIR);
    }
  if (fd >= 0) sys_close(fd);
  sys_remove(view, AT_REMOVEDIR);
}

int tr_listing(const char *canonical, Path target) {
  struct stat status;
  Path changed;
  if (tr_changed_path(canonical, changed)) return -1;
  Place place = tr_place(canonical);
  if (place == HIDDEN) return fail(ENOENT);
  if (place == ORIGINAL) {
    strcpy(target, canonical);
    return 0;
  }
  int has_original = !tr_is_hidden(canonical) && sys_stat(canonical, &status, 0) == 0 && S_ISDIR(status.st_mode);
  if (!has_original) {
    strcpy(target, changed);
    return 0;
  }
  // A view is named after the folder and the changes so far, so one that exists is up to date.
  Path name, gone, view;
  tr_gone_path(canonical, gone);
  const char *hash = strrchr(gone, '/') + 1;
  struct stat original = status;
  int length = snprintf(name, sizeof name, "/views/%s-%llu-%lld", hash, (unsigned long long)tr_state->changes,
                        (long long)original.st_mtim.tv_sec * 1000000000 + original.st_mtim.tv_nsec);
  if (length < 0 || tr_join(target, tr_folder(), name)) return -1;
  if (sys_stat(target, &status, AT_SYMLINK_NOFOLLOW) == 0) return 0;
  static volatile unsigned serial;
  snprintf(name, sizeof name, "/views/new-%ld-%u", (long)syscall(SYS_gettid), __atomic_add_fetch(&serial, 1, __ATOMIC_SEQ_CST));
  Path of;
  if (tr_join(view, tr_folder(), name) || sys_mkdir(view, 0700) || tr_join(of, target, ".of")) return -1;
  add_entries(view, changed, NULL);
  add_entries(view, canonical, canonical);
  syscall(SYS_symlinkat, canonical, AT_FDCWD, of);
  if (sys_rename(view, target)) {
    remove_view(view);  // another process was faster
    if (sys_stat(target, &status, AT_SYMLINK_NOFOLLOW)) return -1;
  }
  return 0;
}
