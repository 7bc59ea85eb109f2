/* What the parts of the preload library share. docs/board.md, "Any program on a board", tells what it is for.
 *
 * The library stands between a program and its libc. A device fd of the emulated board is one end of a socket pair and
 * a dmabuf is a memfd, so closing, duplicating, passing on and inheriting them need nothing here: what is left is to
 * open nodes, carry ioctls as messages (tegrad/orin/wire.py), map memory, and turn stores to the doorbell page into
 * records of the GPU's pipe.
 */
#pragma once
#define _GNU_SOURCE
#include <stdint.h>
#include <stddef.h>
#include <sys/types.h>

#pragma GCC visibility push(hidden)

/* One ioctl of the drivers; table.h has all of them, made from tegrad.uapi.ioctls. */
struct row {
  uint32_t request;
  uint8_t sleeps; /* waits for something that may take long: a signal ends it */
  uint8_t efault; /* a block that cannot be stored is EFAULT; else the count of bytes that could not */
  int16_t in[2];  /* offsets of the fds that the caller's block names; -1: none */
  int16_t out;    /* offset of the fd that the driver makes; -1: none */
};

#include "table.h"

/* A message. Of one that was received, `fds` are owned by the receiver (-1: none was sent) and `payload` by `free`. */
struct message {
  unsigned op;
  uint64_t code, value;
  const void *payload;
  size_t length;
  unsigned count;
  int fds[MAX_FDS];
  void *buffer;
};

enum { TRACED_BYTES = 1024, TRACED_PATH = 256 };

/* An ioctl that is traced: when it began (0: it is not), its file, its block as it was then. */
struct traced {
  uint64_t start;
  size_t length;
  char path[TRACED_PATH];
  uint8_t block[TRACED_BYTES];
};

/* wire.c */
int call(int fd, const struct message *request, struct message *answer, int interruptible);
int send_message(int sock, const struct message *message, int reply);
void finish(struct message *answer);

/* caller.c */
size_t read_memory(uintptr_t address, void *into, size_t size);
size_t write_memory(uintptr_t address, const void *from, size_t size);
int serve(const struct message *question, int sock);
int find_area(uintptr_t address, char *json, size_t size, int *is_buffer);
int lowest(int fd);

/* session.c */
int active(void);
int is_node(const char *path);
int is_folder(const char *path);
int is_device(int fd);
int is_buffer(int fd);
int is_own(int fd);
int mine(void);
int is_buffer_name(const char *path);
int board_call(const struct message *request, struct message *answer);
int open_node(const char *path, int flags);
int open_log(int flags);
int board_ioctl(int fd, unsigned request, uintptr_t argument);
void sync_board(void);
int keep_high(int fd);
void vacate(int fd);
unsigned own_fds(int *into, unsigned room);

/* doorbell.c */
void *map_registers(void *addr, size_t length, int prot, int flags, int fd, off_t offset);
int forget_registers(uintptr_t start, uintptr_t end);
unsigned doorbell_fds(int **into, unsigned room);
void doorbells_forked(void);
struct sigaction;
int segv_action(const struct sigaction *act, struct sigaction *old);

/* trace.c */
uint64_t trace_start(void);
int trace_is_driver(int fd, char *path);
int trace_open(uint64_t start, const char *path, int flags, int fd);
void trace_ioctl_begin(struct traced *call, int fd, unsigned request, uintptr_t argument);
int trace_ioctl_end(const struct traced *call, int fd, unsigned request, uintptr_t argument, int result);
void *trace_mmap(uint64_t start, void *addr, size_t length, int prot, int flags, int fd, off_t offset, void *at);
int trace_munmap(uint64_t start, void *addr, size_t length, int result);
int trace_close(uint64_t start, int fd, const char *path, int result);
void trace_store(uint64_t start, unsigned offset, uint32_t value);

/* interpose.c: libc's own functions */
int real_open(const char *path, int flags, mode_t mode);
int real_close(int fd);
int real_ioctl(int fd, unsigned long request, void *argument);
void *real_mmap(void *addr, size_t length, int prot, int flags, int fd, off_t offset);
int real_munmap(void *addr, size_t length);
int real_sigaction(int sig, const struct sigaction *act, struct sigaction *old);
int real_sigmask(int how, const void *set, void *old);
#pragma GCC visibility pop
