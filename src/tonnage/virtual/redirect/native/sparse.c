// Large writes of memory that was never touched, or is zero, become holes: a checkpoint of weights without values takes no disk.
#include "redirect.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { LARGE = 1 << 20, PIECE = 1 << 18, MOST_ENTRIES = 4096 };
#define PAGE page_bytes()
static const uint64_t PRESENT = 3ull << 62;  // in memory, or swapped out

static size_t page_bytes(void) {
  static size_t bytes;
  if (!bytes) bytes = (size_t)sysconf(_SC_PAGESIZE);
  return bytes;
}

static ssize_t plain_write(int fd, const char *data, size_t size, int64_t offset) {
  return offset < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, offset);
}

// How much of the memory from `data` on belongs to one private mapping without a file; 0 if it has one, or is unknown.
static size_t anonymous_bytes(const char *data, size_t size) {
  int fd = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC, 0);
  if (fd < 0) return 0;
  char text[1 << 14];
  size_t kept = 0, result = 0;
  uintptr_t until = (uintptr_t)data;
  for (ssize_t got; (got = syscall(SYS_read, fd, text + kept, sizeof text - 1 - kept)) > 0;) {
    kept += (size_t)got;
    text[kept] = 0;
    char *line = text;
    for (char *end; (end = strchr(line, '\n')); line = end + 1) {
      unsigned long long start, stop, inode;
      char access[8];
      if (sscanf(line, "%llx-%llx %7s %*s %*s %llu", &start, &stop, access, &inode) != 4) continue;
      if (start <= until && until < stop && !inode && access[3] == 'p') until = stop;
      else if (start > until) goto done;
    }
    kept = strlen(line);
    memmove(text, line, kept + 1);
  }
done:
  syscall(SYS_close, fd);
  result = until - (uintptr_t)data;
  return result < size ? result : size;
}

static int is_zero(const char *data, size_t size) { return !size || (!data[0] && !memcmp(data, data + 1, size - 1)); }

// How many bytes from `data` on, in whole pages, were never touched (or, where there are values, are zero).
static size_t zero_run(int pagemap, const char *data, size_t size) {
  uint64_t entries[MOST_ENTRIES];
  size_t run = 0;
  while (size - run >= PAGE) {
    size_t pages = (size - run) / PAGE;
    if (pages > sizeof entries / 8) pages = sizeof entries / 8;
    ssize_t got = syscall(SYS_pread64, pagemap, entries, pages * 8, ((uintptr_t)data + run) / PAGE * 8);
    if (got <= 0) return run;
    for (size_t i = 0; i < (size_t)got / 8; i++) {
      if (entries[i] & PRESENT && !is_zero(data + run, PAGE)) return run;
      run += PAGE;
    }
  }
  return run;
}

static size_t data_run(int pagemap, const char *data, size_t size) {
  size_t run = 0;
  while (run < size && run < 1 << 26) {
    if (size - run > PIECE && zero_run(pagemap, data + run, PIECE) == PIECE) break;
    run += size - run > PIECE ? PIECE : size - run;
  }
  return run;
}

// Make this part of the file a hole; 0, or -1 where the disk has none.
static int write_hole(int fd, size_t size, int64_t offset) {
  struct stat status;
  off_t position = lseek(fd, 0, SEEK_CUR), at = offset < 0 ? position : offset, end = at + (off_t)size;
  if (position < 0 || fstat(fd, &status)) return -1;
  if (status.st_size > at) {
    // Programs extend a file before they write it: then there is a hole already.
    off_t data = lseek(fd, at, SEEK_DATA);
    lseek(fd, position, SEEK_SET);
    if (data >= 0 && data < end && fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, (off_t)size)) return -1;
  }
  if (status.st_size < end && ftruncate(fd, end)) return -1;
  return offset < 0 && lseek(fd, end, SEEK_SET) < 0 ? -1 : 0;
}

ssize_t tr_write(int fd, const void *data, size_t size, int64_t offset) {
  struct stat status;
  if (size < LARGE || !tr_enabled()) return plain_write(fd, data, size, offset);
  int saved = errno;
  if (fstat(fd, &status) || !S_ISREG(status.st_mode) || fcntl(fd, F_GETFL) & O_APPEND) {
    errno = saved;
    return plain_write(fd, data, size, offset);
  }
  const char *bytes = data;
  size_t done = 0, checkable = anonymous_bytes(bytes, size);
  int pagemap = checkable < LARGE ? -1 : (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/pagemap", O_RDONLY | O_CLOEXEC, 0);
  errno = saved;
  if (pagemap < 0) return plain_write(fd, data, size, offset);
  while (done < size) {
    size_t left = done < checkable ? checkable - done : 0, run = 0;
    int at_page = ((uintptr_t)bytes + done) % PAGE == 0;
    if (at_page && left >= PAGE) run = zero_run(pagemap, bytes + done, left);
    if (run && !write_hole(fd, run, offset < 0 ? -1 : offset + (int64_t)done)) {
      done += run;
      continue;
    }
    if (!at_page) run = PAGE - ((uintptr_t)bytes + done) % PAGE;
    else run = left >= PAGE ? data_run(pagemap, bytes + done, left) : size - done;
    if (!run) run = PIECE;
    if (run > size - done) run = size - done;
    ssize_t written = plain_write(fd, bytes + done, run, offset < 0 ? -1 : offset + (int64_t)done);
    if (written < 0) break;
    done += (size_t)written;
    if ((size_t)written < run) break;
  }
  saved = errno;
  syscall(SYS_close, pagemap);
  errno = saved;
  return done || !size ? (ssize_t)done : -1;
}
