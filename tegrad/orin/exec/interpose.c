/* The functions of libc that a program reaches here instead. What is not the board's goes on to libc's own, at the cost
 * of a comparison (paths) or of one system call (fds).
 */
#include "board.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/dma-buf.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PUBLIC __attribute__((visibility("default")))
#define PAGE 4096
#ifndef CLOSE_RANGE_CLOEXEC /* libc before 2.34 */
#define CLOSE_RANGE_CLOEXEC 4
#endif
#ifndef SYS_close_range
#define SYS_close_range 436
#endif

/* Every function that is replaced. */
#define REPLACED(X)                                                                                                \
  X(open)                                                                                                          \
  X(open64)                                                                                                        \
  X(openat) X(openat64) X(__open_2) X(__open64_2) X(__openat_2) X(__openat64_2) X(fopen) X(fopen64) X(access)      \
      X(faccessat) X(eaccess) X(euidaccess) X(stat) X(stat64) X(lstat) X(lstat64) X(fstatat) X(fstatat64) X(fstat) \
          X(fstat64) X(__fxstat) X(__fxstat64) X(__xstat) X(__xstat64) X(__lxstat) X(__lxstat64) X(__fxstatat)     \
              X(__fxstatat64) X(statx) X(ioctl) X(mmap) X(mmap64) X(munmap) X(msync) X(close) X(close_range)       \
                  X(closefrom) X(dup2) X(dup3) X(sigaction) X(signal) X(sigprocmask) X(pthread_sigmask)

enum replaced {
#define X(name) R_##name,
  REPLACED(X)
#undef X
      REPLACED_COUNT
};

static struct {
  const char *name;
  void *real;
} functions[REPLACED_COUNT] = {
#define X(name) {#name, NULL},
    REPLACED(X)
#undef X
};

typedef void *(*dlsym_function)(void *, const char *);
typedef void *(*dlvsym_function)(void *, const char *, const char *);

static dlsym_function real_dlsym(void) {
  static dlsym_function found;
  static const char *const versions[] = {"GLIBC_2.34", "GLIBC_2.2.5", "GLIBC_2.17"};
  for (int i = 0; i < 3 && !found; i++) found = (dlsym_function)dlvsym(RTLD_NEXT, "dlsym", versions[i]);
  return found;
}

/* libc's own; NULL where it has none. */
static void *next(enum replaced which) {
  if (!functions[which].real) functions[which].real = real_dlsym()(RTLD_NEXT, functions[which].name);
  return functions[which].real;
}

#define NEXT(name, result, ...) ((result (*)(__VA_ARGS__))next(R_##name))

__attribute__((constructor)) static void look_up(void) {
  for (int i = 0; i < REPLACED_COUNT; i++) next(i);
}

/* ---- libc's own, for the other parts ----------------------------------------------------------------------------- */

int real_open(const char *path, int flags, mode_t mode) {
  return NEXT(open, int, const char *, int, ...)(path, flags, mode);
}
int real_close(int fd) { return NEXT(close, int, int)(fd); }
int real_ioctl(int fd, unsigned long request, void *argument) {
  return NEXT(ioctl, int, int, unsigned long, ...)(fd, request, argument);
}
void *real_mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset) {
  return NEXT(mmap, void *, void *, size_t, int, int, int, off_t)(addr, length, prot, flags, fd, offset);
}
int real_munmap(void *addr, size_t length) { return NEXT(munmap, int, void *, size_t)(addr, length); }
int real_sigaction(int sig, const struct sigaction *act, struct sigaction *old) {
  return NEXT(sigaction, int, int, const struct sigaction *, struct sigaction *)(sig, act, old);
}
int real_sigmask(int how, const void *set, void *old) {
  return NEXT(pthread_sigmask, int, int, const sigset_t *, sigset_t *)(how, set, old);
}

/* ---- open -------------------------------------------------------------------------------------------------------- */

/* Whether an open is the board's, and then its fd or -1 in `fd`. */
static int opened(const char *path, int flags, int *fd) {
  if (is_node(path))
    *fd = open_node(path, flags);
  else if (path && !strcmp(path, "/dev/kmsg") && (flags & O_ACCMODE) == O_RDONLY && active())
    *fd = open_log(flags);
  else
    return 0;
  return 1;
}

#define OPEN(name)                                                                                  \
  PUBLIC int name(const char *path, int flags, ...) {                                               \
    int fd;                                                                                         \
    va_list rest;                                                                                   \
    va_start(rest, flags);                                                                          \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                         \
    va_end(rest);                                                                                   \
    uint64_t start = trace_start();                                                                 \
    if (!opened(path, flags, &fd)) fd = NEXT(name, int, const char *, int, ...)(path, flags, mode); \
    return trace_open(start, path, flags, fd);                                                      \
  }
#define OPENAT(name)                                                                                             \
  PUBLIC int name(int folder, const char *path, int flags, ...) {                                                \
    int fd;                                                                                                      \
    va_list rest;                                                                                                \
    va_start(rest, flags);                                                                                       \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                      \
    va_end(rest);                                                                                                \
    uint64_t start = trace_start();                                                                              \
    if (!opened(path, flags, &fd)) fd = NEXT(name, int, int, const char *, int, ...)(folder, path, flags, mode); \
    return trace_open(start, path, flags, fd);                                                                   \
  }
#define OPEN_2(name)                                                                     \
  int name(const char *path, int flags);                                                 \
  PUBLIC int name(const char *path, int flags) {                                         \
    int fd;                                                                              \
    uint64_t start = trace_start();                                                      \
    if (!opened(path, flags, &fd)) fd = NEXT(name, int, const char *, int)(path, flags); \
    return trace_open(start, path, flags, fd);                                           \
  }
#define OPENAT_2(name)                                                                                \
  int name(int folder, const char *path, int flags);                                                  \
  PUBLIC int name(int folder, const char *path, int flags) {                                          \
    int fd;                                                                                           \
    uint64_t start = trace_start();                                                                   \
    if (!opened(path, flags, &fd)) fd = NEXT(name, int, int, const char *, int)(folder, path, flags); \
    return trace_open(start, path, flags, fd);                                                        \
  }
#define FOPEN(name)                                                                  \
  PUBLIC FILE *name(const char *path, const char *mode) {                            \
    int fd, flags = strchr(mode, '+') ? O_RDWR : *mode == 'r' ? O_RDONLY : O_WRONLY; \
    uint64_t start = trace_start();                                                  \
    if (opened(path, flags | (strchr(mode, 'e') ? O_CLOEXEC : 0), &fd))              \
      return trace_open(start, path, flags, fd) < 0 ? NULL : fdopen(fd, mode);       \
    FILE *file = NEXT(name, FILE *, const char *, const char *)(path, mode);         \
    trace_open(start, path, flags, file ? fileno(file) : -1);                        \
    return file;                                                                     \
  }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
OPEN_2(__open_2)
OPEN_2(__open64_2)
OPENAT_2(__openat_2)
OPENAT_2(__openat64_2)
FOPEN(fopen)
FOPEN(fopen64)

/* ---- whether a node is there ------------------------------------------------------------------------------------- */

/* access() of a path of the board's: -1 if it is none, 0, or an errno. */
static int accessed(const char *path, int mode) {
  if (is_folder(path)) return mode & W_OK ? EACCES : 0;
  if (!is_node(path)) return -1;
  return mode & X_OK ? EACCES : 0;
}

#define ACCESS(name)                                                      \
  PUBLIC int name(const char *path, int mode) {                           \
    int found = accessed(path, mode);                                     \
    if (found < 0) return NEXT(name, int, const char *, int)(path, mode); \
    errno = found ? found : errno;                                        \
    return found ? -1 : 0;                                                \
  }
ACCESS(access)
ACCESS(eaccess)
ACCESS(euidaccess)

PUBLIC int faccessat(int folder, const char *path, int mode, int flags) {
  int found = accessed(path, mode);
  if (found < 0) return NEXT(faccessat, int, int, const char *, int, int)(folder, path, mode, flags);
  errno = found ? found : errno;
  return found ? -1 : 0;
}

/* stat() of a path of the board's: a character device that anybody may use, or a folder. */
static int described(const char *path, void *into) {
  struct stat *s = into;
  int folder = is_folder(path), node = is_node(path);
  if (!folder && !node) return 0;
  memset(s, 0, sizeof *s);
  s->st_mode = folder ? S_IFDIR | 0755 : S_IFCHR | 0666;
  s->st_nlink = folder ? 2 : 1;
  s->st_ino = node + 1;
  s->st_blksize = PAGE;
  return 1;
}

/* fstat() of a device fd: what is a socket is a character device there. */
static int described_fd(int error, int fd, void *into) {
  struct stat *s = into;
  if (!error && S_ISSOCK(s->st_mode) && is_device(fd)) s->st_mode = S_IFCHR | 0666;
  return error;
}

static int kernel_stat(int folder, const char *path, void *into, int flags) {
  return syscall(SYS_newfstatat, folder, path, into, flags);
}

/* Of some names only old or only new versions of libc have one: the kernel fills the same struct. */
#define STAT(name, type, fallback)                                                \
  PUBLIC int name(const char *path, struct type *into) {                          \
    if (described(path, into)) return 0;                                          \
    int (*real)(const char *, struct type *) = next(R_##name);                    \
    return real ? real(path, into) : kernel_stat(AT_FDCWD, path, into, fallback); \
  }
#define XSTAT(name, fallback)                                                              \
  int name(int version, const char *path, void *into);                                     \
  PUBLIC int name(int version, const char *path, void *into) {                             \
    if (described(path, into)) return 0;                                                   \
    int (*real)(int, const char *, void *) = next(R_##name);                               \
    return real ? real(version, path, into) : kernel_stat(AT_FDCWD, path, into, fallback); \
  }
#define STATAT(name, type)                                                                  \
  PUBLIC int name(int folder, const char *path, struct type *into, int flags) {             \
    if (described(path, into)) return 0;                                                    \
    int (*real)(int, const char *, struct type *, int) = next(R_##name);                    \
    return real ? real(folder, path, into, flags) : kernel_stat(folder, path, into, flags); \
  }
#define XSTATAT(name)                                                                                \
  int name(int version, int folder, const char *path, void *into, int flags);                        \
  PUBLIC int name(int version, int folder, const char *path, void *into, int flags) {                \
    if (described(path, into)) return 0;                                                             \
    int (*real)(int, int, const char *, void *, int) = next(R_##name);                               \
    return real ? real(version, folder, path, into, flags) : kernel_stat(folder, path, into, flags); \
  }
#define FSTAT(name, type)                                                                            \
  PUBLIC int name(int fd, struct type *into) {                                                       \
    int (*real)(int, struct type *) = next(R_##name);                                                \
    return described_fd(real ? real(fd, into) : kernel_stat(fd, "", into, AT_EMPTY_PATH), fd, into); \
  }
#define XFSTAT(name)                                                                                          \
  int name(int version, int fd, void *into);                                                                  \
  PUBLIC int name(int version, int fd, void *into) {                                                          \
    int (*real)(int, int, void *) = next(R_##name);                                                           \
    return described_fd(real ? real(version, fd, into) : kernel_stat(fd, "", into, AT_EMPTY_PATH), fd, into); \
  }
FSTAT(fstat, stat)
FSTAT(fstat64, stat64)
XFSTAT(__fxstat)
XFSTAT(__fxstat64)
STAT(stat, stat, 0)
STAT(stat64, stat64, 0)
STAT(lstat, stat, AT_SYMLINK_NOFOLLOW)
STAT(lstat64, stat64, AT_SYMLINK_NOFOLLOW)
STATAT(fstatat, stat)
STATAT(fstatat64, stat64)
XSTAT(__xstat, 0)
XSTAT(__xstat64, 0)
XSTAT(__lxstat, AT_SYMLINK_NOFOLLOW)
XSTAT(__lxstat64, AT_SYMLINK_NOFOLLOW)
XSTATAT(__fxstatat)
XSTATAT(__fxstatat64)

PUBLIC int statx(int folder, const char *restrict path, int flags, unsigned mask, struct statx *restrict into) {
  struct stat s;
  if (!described(path, &s))
    return NEXT(statx, int, int, const char *, int, unsigned, struct statx *)(folder, path, flags, mask, into);
  memset(into, 0, sizeof *into);
  into->stx_mask = STATX_TYPE | STATX_MODE | STATX_NLINK | STATX_INO;
  into->stx_mode = s.st_mode;
  into->stx_nlink = s.st_nlink;
  into->stx_ino = s.st_ino;
  into->stx_blksize = PAGE;
  return 0;
}

/* ---- ioctl, mmap ------------------------------------------------------------------------------------------------- */

/* A dmabuf's own ioctl: the CPU's caches of a buffer are coherent here. */
static int dmabuf_sync(const struct dma_buf_sync *argument) {
  struct dma_buf_sync sync;
  errno = EFAULT;
  if (read_memory((uintptr_t)argument, &sync, sizeof sync) != sizeof sync) return -1;
  errno = EINVAL;
  return sync.flags & ~(uint64_t)DMA_BUF_SYNC_VALID_FLAGS_MASK || !(sync.flags & DMA_BUF_SYNC_RW) ? -1 : 0;
}

PUBLIC int ioctl(int fd, unsigned long request, ...) {
  va_list rest;
  va_start(rest, request);
  void *argument = va_arg(rest, void *);
  va_end(rest);
  struct traced call;
  int result;
  trace_ioctl_begin(&call, fd, request, (uintptr_t)argument);
  if (is_device(fd))
    result = board_ioctl(fd, request, (uintptr_t)argument);
  else if (request == DMA_BUF_IOCTL_SYNC && is_buffer(fd))
    result = dmabuf_sync(argument);
  else
    result = real_ioctl(fd, request, argument);
  return trace_ioctl_end(&call, fd, request, (uintptr_t)argument, result);
}

/* Map a buffer. The driver shares the memory whatever is asked for, and fork does not inherit it. */
static void *map_buffer(void *addr, size_t length, int prot, int flags, int fd, off_t offset) {
  struct message answer, request = {.op = OP_MMAP_CHECK,
                                    .code = length,
                                    .value = offset,
                                    .payload = "w",
                                    .length = prot & PROT_WRITE ? 1 : 0,
                                    .count = 1,
                                    .fds = {fd}};
  int error = board_call(&request, &answer);
  if (error) {
    errno = error;
    return MAP_FAILED;
  }
  finish(&answer);
  void *at = real_mmap(addr, length, prot, (flags & ~MAP_TYPE) | MAP_SHARED, fd, offset);
  if (at != MAP_FAILED) madvise(at, length, MADV_DONTFORK);
  return at;
}

static void *map(void *addr, size_t length, int prot, int flags, int fd, off_t offset) {
  int lent = !(flags & MAP_ANONYMOUS) && fd >= 0, device = lent && is_device(fd);
  uint64_t start = lent ? trace_start() : 0;
  void *at;
  if (device)
    at = map_registers(addr, length, prot, flags, fd, offset);
  else if (lent && is_buffer(fd))
    at = map_buffer(addr, length, prot, flags, fd, offset);
  else
    at = real_mmap(addr, length, prot, flags, fd, offset);
  if (!device && at != MAP_FAILED && flags & MAP_FIXED && forget_registers((uintptr_t)at, (uintptr_t)at + length))
    sync_board();
  return trace_mmap(start, addr, length, prot, flags, fd, offset, at);
}

PUBLIC void *mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset) {
  return map(addr, length, prot, flags, fd, offset);
}
PUBLIC void *mmap64(void *addr, size_t length, int prot, int flags, int fd, off64_t offset) {
  return map(addr, length, prot, flags, fd, offset);
}

PUBLIC int munmap(void *addr, size_t length) {
  uintptr_t first = (uintptr_t)addr;
  uint64_t start = trace_start();
  int registers = first % PAGE == 0 && length && forget_registers(first, first + length);
  int error = real_munmap(addr, length);
  if (registers) sync_board();
  return trace_munmap(start, addr, length, error);
}

PUBLIC int msync(void *addr, size_t length, int flags) {
  char json[PATH_MAX];
  int buffer = 0;
  if (active()) find_area((uintptr_t)addr, json, sizeof json, &buffer);
  if (!buffer) return NEXT(msync, int, void *, size_t, int)(addr, length, flags);
  errno = EINVAL; /* a dmabuf cannot be synced */
  return -1;
}

/* ---- close ------------------------------------------------------------------------------------------------------- */

PUBLIC int close(int fd) {
  char path[TRACED_PATH];
  uint64_t start = trace_start();
  if (start && !trace_is_driver(fd, path)) start = 0;
  if (!active()) {
    int error = real_close(fd);
    return start ? trace_close(start, fd, path, error) : error;
  }
  if (is_own(fd)) {
    errno = EBADF;
    return -1;
  }
  int device = is_device(fd), error = real_close(fd);
  if (device) sync_board(); /* its release is over when this returns */
  return start ? trace_close(start, fd, path, error) : error;
}

static int lower(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

PUBLIC int close_range(unsigned first, unsigned last, int flags) {
  int own[MAX_OWN];
  unsigned n = active() && mine() && !(flags & CLOSE_RANGE_CLOEXEC) ? own_fds(own, MAX_OWN) : 0;
  qsort(own, n, sizeof *own, lower);
  for (unsigned i = 0; i < n && first <= last; i++) {
    if ((unsigned)own[i] < first || (unsigned)own[i] > last) continue;
    if ((unsigned)own[i] > first && syscall(SYS_close_range, first, own[i] - 1, flags)) return -1;
    first = own[i] + 1;
  }
  int error = first > last ? 0 : (int)syscall(SYS_close_range, first, last, flags);
  if (n) sync_board();
  return error;
}

PUBLIC void closefrom(int low) {
  int saved = errno;
  if (close_range(low < 0 ? 0 : low, ~0u, 0))
    for (int fd = low, end = sysconf(_SC_OPEN_MAX); fd < end; fd++) close(fd);
  errno = saved;
}

PUBLIC int dup2(int from, int into) {
  if (active() && from != into) vacate(into);
  return NEXT(dup2, int, int, int)(from, into);
}
PUBLIC int dup3(int from, int into, int flags) {
  if (active() && from != into) vacate(into);
  return NEXT(dup3, int, int, int, int)(from, into, flags);
}

/* ---- signals: the doorbell's faults must arrive ------------------------------------------------------------------ */

PUBLIC int sigaction(int sig, const struct sigaction *restrict act, struct sigaction *restrict old) {
  return sig == SIGSEGV && active() ? segv_action(act, old) : real_sigaction(sig, act, old);
}

PUBLIC sighandler_t signal(int sig, sighandler_t handler) {
  if (sig != SIGSEGV || !active()) return NEXT(signal, sighandler_t, int, sighandler_t)(sig, handler);
  struct sigaction act = {.sa_handler = handler, .sa_flags = SA_RESTART}, old;
  sigemptyset(&act.sa_mask);
  sigaddset(&act.sa_mask, sig);
  return segv_action(&act, &old) ? SIG_ERR : old.sa_handler;
}

/* What may be blocked of a set: a fault of a thread that blocks it ends the process. */
static const sigset_t *without_segv(int how, const sigset_t *set, sigset_t *copy) {
  if (!set || how == SIG_UNBLOCK || !active()) return set;
  *copy = *set;
  sigdelset(copy, SIGSEGV);
  return copy;
}

PUBLIC int pthread_sigmask(int how, const sigset_t *set, sigset_t *old) {
  sigset_t copy;
  return real_sigmask(how, without_segv(how, set, &copy), old);
}
PUBLIC int sigprocmask(int how, const sigset_t *restrict set, sigset_t *restrict old) {
  sigset_t copy;
  return NEXT(sigprocmask, int, int, const sigset_t *, sigset_t *)(how, without_segv(how, set, &copy), old);
}

/* ---- dlsym: who asks libc for one of these by name --------------------------------------------------------------- */

/* Ours for libc's own. */
static void *replacement(void *found) {
  static void *const ours[REPLACED_COUNT] = {
#define X(name) (void *)name,
      REPLACED(X)
#undef X
  };
  for (int i = 0; found && i < REPLACED_COUNT; i++)
    if (functions[i].real == found) return ours[i];
  return found;
}

/* RTLD_NEXT and RTLD_DEFAULT depend on who calls, so those calls are left to libc in place of ours (a tail call). */
PUBLIC void *dlsym(void *restrict handle, const char *restrict name) {
  dlsym_function real = real_dlsym();
  if (handle == RTLD_NEXT || handle == RTLD_DEFAULT) return real(handle, name);
  return replacement(real(handle, name));
}
