// Redirects what a program writes into a scratch folder, below Python: an overlay over the file system, at the level of
// the C library's functions. Written files are copies under FOLDER/files; a deleted file is recorded under FOLDER/gone;
// the originals are never changed. The folder is the whole state, so forked and executed children share it.
//
//   files/PATH     a file, folder or symbolic link that the program made or changed, at its canonical path
//   gone/HASH      a path that the program deleted; whatever the user has there, and below, is hidden
//   views/NAME     the merged listing of a folder, as empty entries; NAME.of is a link to the folder that it lists
//   through        folders that are written in place, one a line
//   state          `State`, mapped by every process
//
// A path has one of three places: CHANGED (under files/), HIDDEN (deleted) or ORIGINAL (whatever the user has there).
#pragma once
#define _GNU_SOURCE
#include <dirent.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/stat.h>

#define EXPORT __attribute__((visibility("default")))
enum { BLOOM_BITS = 1 << 20 };

typedef struct {
  volatile uint64_t changes;               // structural changes so far; 0: every read goes straight through
  volatile uint8_t bloom[BLOOM_BITS / 8];  // of paths under files/ and gone/: most lookups end here
} State;

typedef char Path[PATH_MAX];
typedef enum { ORIGINAL, CHANGED, HIDDEN } Place;

// paths.c
extern State *tr_state;
extern __thread int tr_off;  // this thread's calls go straight through
int tr_enabled(void);
int tr_open_folder(const char *folder);
void tr_close_folder(void);
const char *tr_folder(void);
int tr_has_changes(void);
// Make the path absolute and canonical, and tell its place. Return 1 if it is redirected, 0 if it is left alone (or wrong: the
// plain call then fails with the error).
int tr_locate(int at, const char *path, int follow, Path canonical, Place *place);
Place tr_place(const char *canonical);
int tr_is_hidden(const char *canonical);                    // whether the original is
int tr_join(Path target, const char *folder, const char *path);  // 0, or -1 with ENAMETOOLONG
int tr_changed_path(const char *canonical, Path target);   // its path under files/
int tr_is_borrowed(const char *changed);                   // a link that stands for an original that was renamed
int tr_logical(const char *physical, Path logical);        // 1 if it was a path under files/ or views/
void tr_note(const char *canonical);                       // makes a path known to the filter
void tr_gone_path(const char *canonical, Path target);

// overlay.c: these return 0, or -1 with errno set
int tr_stat(const char *canonical, struct stat *status);   // of the merged file system, without following
int tr_shadow_parent(const char *canonical);
int tr_make_writable(const char *canonical, int flags, mode_t mode, Path target);  // for open(2)
int tr_unlink(const char *canonical);
int tr_rmdir(const char *canonical);
int tr_mkdir(const char *canonical, mode_t mode);
int tr_rename(const char *from, const char *to, unsigned flags);
int tr_link(const char *from, const char *to);
int tr_new_name(const char *canonical, Path target);       // of a node that must not exist yet
int tr_listing(const char *canonical, Path target);        // the folder whose entries are the merged ones

// sparse.c
ssize_t tr_write(int fd, const void *data, size_t size, int64_t offset);  // offset -1: at the file's position

// rebind.c
typedef struct { const char *name; void *function; } Wrapper;
extern const Wrapper tr_wrappers[];
extern const unsigned tr_wrapper_count;
void tr_rebind(void);
