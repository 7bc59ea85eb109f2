/* What a program asks of the drivers, written down: a JSON object for each call, as it was made and as it came back.
 *
 * TEGRAD_TRACE_PRELOAD names the file, which must be there. tegrad/diag/trace/raw.py decodes the numbers. No fd is kept,
 * nothing is allocated and only system calls are made, so that a record may come from anywhere: a handler of a signal,
 * a child between vfork and exec. What fails here the program does not see.
 */
#include "board.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define LINE (4 * TRACED_BYTES + 1024)

static char file[512];
static pid_t told; /* the process whose name was written */

static void set_up(void) {
  const char *name = getenv("TEGRAD_TRACE_PRELOAD");
  if (name && strlen(name) < sizeof file) strcpy(file, name);
}

/* When a call begins, in nanoseconds since 1970; 0 if nothing is traced. */
uint64_t trace_start(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  struct timespec now;
  pthread_once(&once, set_up);
  if (!*file) return 0;
  clock_gettime(CLOCK_REALTIME, &now);
  return now.tv_sec * 1000000000ull + now.tv_nsec;
}

/* ---- which files are the drivers' -------------------------------------------------------------------------------- */

static int begins_with(const char *path, const char *const *starts, unsigned n) {
  while (n--)
    if (!strncmp(path, starts[n], strlen(starts[n]))) return 1;
  return 0;
}

/* Whether a path is one of the drivers' nodes. */
static int is_driver_path(const char *path) {
  return path && begins_with(path, DRIVER_FILES, sizeof DRIVER_FILES / sizeof *DRIVER_FILES);
}

/* Whether an fd is a driver's, and then what /proc calls it (nothing of a board's). */
int trace_is_driver(int fd, char *path) {
  static const char *const made[] = {"anon_inode:", "/dmabuf", "dmabuf"};
  char link[32];
  int saved = errno, is = is_device(fd) || is_buffer(fd);
  *path = 0;
  if (!is && fd >= 0) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = syscall(SYS_readlinkat, AT_FDCWD, link, path, TRACED_PATH - 1);
    path[n < 0 ? 0 : n] = 0;
    is = is_driver_path(path) || begins_with(path, made, 3);
  }
  errno = saved;
  return is;
}

/* ---- a line ------------------------------------------------------------------------------------------------------ */

struct line {
  char text[LINE];
  size_t n;
};

__attribute__((format(printf, 2, 3))) static void say(struct line *line, const char *format, ...) {
  va_list rest;
  va_start(rest, format);
  int n = vsnprintf(line->text + line->n, sizeof line->text - line->n, format, rest);
  va_end(rest);
  if (n > 0) line->n += n;
  if (line->n >= sizeof line->text) line->n = sizeof line->text - 1;
}

/* A string as it is, up to a character that JSON would escape. */
static void quote(struct line *line, const char *name, const char *value) {
  int n = 0;
  while (value[n] >= ' ' && value[n] <= '~' && value[n] != '"' && value[n] != '\\') n++;
  say(line, ", \"%s\": \"%.*s\"", name, n, value);
}

static void hex(struct line *line, const char *name, const uint8_t *bytes, size_t n) {
  static const char digits[] = "0123456789abcdef";
  say(line, ", \"%s\": \"", name);
  for (size_t i = 0; i < n && line->n + 2 < sizeof line->text; i++) {
    line->text[line->n++] = digits[bytes[i] >> 4];
    line->text[line->n++] = digits[bytes[i] & 15];
  }
  say(line, "\"");
}

static void append(const struct line *line) {
  int fd = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_APPEND | O_CLOEXEC);
  if (fd < 0) return;
  if (syscall(SYS_write, fd, line->text, line->n) < 0) {}
  syscall(SYS_close, fd);
}

/* Begin a call's line. */
static void begin(struct line *line, const char *name, uint64_t start) {
  uint64_t took = trace_start() - start;
  pid_t pid = getpid();
  line->n = 0;
  if (told != pid) {
    told = pid;
    say(line, "{\"process\": %d, \"parent\": %d", pid, getppid());
    quote(line, "command", program_invocation_short_name);
    say(line, "}\n");
    append(line);
    line->n = 0;
  }
  say(line, "{\"call\": \"%s\", \"pid\": %d, \"thread\": %d", name, pid, (int)syscall(SYS_gettid));
  say(line, ", \"start\": %llu.%09llu, \"seconds\": %llu.%09llu", start / 1000000000ull, start % 1000000000ull,
      took / 1000000000ull, took % 1000000000ull);
}

/* End it, with what the call returned. */
static void end(struct line *line, int failed, int error, long long result) {
  say(line, failed ? ", \"errno\": %lld}\n" : ", \"result\": %lld}\n", failed ? (long long)error : result);
  append(line);
}

/* ---- the calls --------------------------------------------------------------------------------------------------- */

/* After an open that began at `start`; its fd. */
int trace_open(uint64_t start, const char *path, int flags, int fd) {
  if (!start || !is_driver_path(path)) return fd;
  int saved = errno;
  struct line line;
  begin(&line, "open", start);
  quote(&line, "path", path);
  say(&line, ", \"flags\": %d", flags);
  end(&line, fd < 0, saved, fd);
  errno = saved;
  return fd;
}

/* Bytes of an ioctl's block that are written down. UVM's requests are plain numbers, which do not tell a size. */
static size_t block_size(unsigned request) {
  size_t size = request >> 16 & 0x3fff;
  return !(request >> 8 & 0xff) ? 0 : size < TRACED_BYTES ? size : TRACED_BYTES;
}

/* Before an ioctl. */
void trace_ioctl_begin(struct traced *call, int fd, unsigned request, uintptr_t argument) {
  call->start = trace_start();
  if (!call->start) return;
  if (!trace_is_driver(fd, call->path)) {
    call->start = 0;
    return;
  }
  int saved = errno;
  call->length = read_memory(argument, call->block, block_size(request));
  errno = saved;
}

/* After it; its result. */
int trace_ioctl_end(const struct traced *call, int fd, unsigned request, uintptr_t argument, int result) {
  if (!call->start) return result;
  int saved = errno;
  uint8_t block[TRACED_BYTES];
  struct line line;
  begin(&line, "ioctl", call->start);
  say(&line, ", \"fd\": %d, \"request\": %u, \"value\": %llu", fd, request, (unsigned long long)argument);
  if (*call->path) quote(&line, "path", call->path);
  hex(&line, "before", call->block, call->length);
  if (result >= 0) hex(&line, "after", block, read_memory(argument, block, block_size(request)));
  end(&line, result < 0, saved, result);
  errno = saved;
  return result;
}

/* After an mmap; its address. */
void *trace_mmap(uint64_t start, void *addr, size_t length, int prot, int flags, int fd, off_t offset, void *at) {
  char path[TRACED_PATH];
  if (!start || !trace_is_driver(fd, path)) return at;
  int saved = errno;
  struct line line;
  begin(&line, "mmap", start);
  say(&line, ", \"fd\": %d, \"size\": %zu, \"prot\": %d, \"flags\": %d, \"addr\": %llu, \"offset\": %lld", fd, length,
      prot, flags, (unsigned long long)(uintptr_t)addr, (long long)offset);
  if (*path) quote(&line, "path", path);
  end(&line, at == (void *)-1, saved, (long long)(uintptr_t)at);
  errno = saved;
  return at;
}

/* After a munmap of any memory: the reader knows which was a driver's. */
int trace_munmap(uint64_t start, void *addr, size_t length, int result) {
  if (!start) return result;
  int saved = errno;
  struct line line;
  begin(&line, "munmap", start);
  say(&line, ", \"addr\": %llu, \"size\": %zu", (unsigned long long)(uintptr_t)addr, length);
  end(&line, result < 0, saved, result);
  errno = saved;
  return result;
}

/* After a close of a driver's fd. */
int trace_close(uint64_t start, int fd, const char *path, int result) {
  int saved = errno;
  struct line line;
  begin(&line, "close", start);
  say(&line, ", \"fd\": %d", fd);
  if (*path) quote(&line, "path", path);
  end(&line, result < 0, saved, result);
  errno = saved;
  return result;
}

/* After a store to a board's doorbell page. */
void trace_store(uint64_t start, unsigned offset, uint32_t value) {
  if (!start) return;
  int saved = errno;
  struct line line;
  begin(&line, "store32", start);
  say(&line, ", \"offset\": %u, \"value\": %u", offset, value);
  end(&line, 0, 0, 0);
  errno = saved;
}
