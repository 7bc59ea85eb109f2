/* The board that this process uses, and what is its. TEGRAD_EXEC has the driver's pid, the board's address in hex and
 * the name of its buffers; without it the library does nothing.
 */
#include "board.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static struct {
  int pid;
  struct sockaddr_un address;
  socklen_t length;
  char buffers[64]; /* what /proc tells of a buffer: "/memfd:NAME" */
} board;

/* This process: a forked child is another one, with a session of its own. */
static struct {
  pid_t pid;
  int sock;
  pthread_mutex_t lock;
} me = {.sock = -1, .lock = PTHREAD_MUTEX_INITIALIZER};

static void forked(void) {
  pthread_mutex_init(&me.lock, NULL);
  if (me.sock >= 0) real_close(me.sock);
  me.sock = -1;
  me.pid = getpid();
  doorbells_forked();
}

static void set_up(void) {
  const char *text = getenv("TEGRAD_EXEC");
  char hex[2 * sizeof board.address.sun_path + 1];
  int pid;
  me.pid = getpid();
  if (!text || sscanf(text, "%d:%216[0-9a-f]:%50s", &pid, hex, board.buffers + 7) != 3) return;
  memcpy(board.buffers, "/memfd:", 7);
  unsigned n = strlen(hex) / 2;
  if (n > sizeof board.address.sun_path) return;
  for (unsigned i = 0; i < n; i++) {
    unsigned byte;
    sscanf(hex + 2 * i, "%2x", &byte);
    board.address.sun_path[i] = byte;
  }
  board.address.sun_family = AF_UNIX;
  board.length = offsetof(struct sockaddr_un, sun_path) + n;
  pthread_atfork(NULL, NULL, forked);
  board.pid = pid;
}

/* Whether there is a board to use. */
int active(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, set_up);
  return board.pid != 0;
}

/* Whether this is the process whose state we are: false between vfork and exec, where nothing may be changed. */
int mine(void) { return me.pid == getpid(); }

/* Which of the board's nodes a path is, from 1 on; 0: none. */
int is_node(const char *path) {
  if (!path || strncmp(path, "/dev/", 5)) return 0;
  for (unsigned i = 0; i < sizeof NODES / sizeof *NODES; i++)
    if (!strcmp(path, NODES[i])) return active() ? (int)i + 1 : 0;
  return 0;
}

/* Whether a path is a folder of such nodes. */
int is_folder(const char *path) {
  if (!path || strncmp(path, "/dev/", 5)) return 0;
  size_t n = strlen(path);
  while (n > 5 && path[n - 1] == '/') n--;
  for (unsigned i = 0; i < sizeof FOLDERS / sizeof *FOLDERS; i++)
    if (strlen(FOLDERS[i]) == n && !strncmp(path, FOLDERS[i], n)) return active();
  return 0;
}

/* Whether an fd is a device fd of the board: a socket that its driver made. */
int is_device(int fd) {
  struct ucred peer = {0};
  socklen_t size = sizeof peer;
  int saved = errno;
  int is = active() && fd >= 0 && !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) && peer.pid == board.pid;
  errno = saved;
  return is;
}

/* Whether what /proc calls a file is a buffer of the board. */
int is_buffer_name(const char *path) {
  size_t n = strlen(board.buffers);
  return active() && !strncmp(path, board.buffers, n) && (!path[n] || path[n] == ' ');
}

/* Whether an fd is a buffer of the board: a memfd with the board's name. */
int is_buffer(int fd) {
  char link[40], path[128];
  int saved = errno, is = 0;
  if (active() && fd >= 0 && fcntl(fd, F_GET_SEALS) >= 0) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    path[n < 0 ? 0 : n] = 0;
    is = is_buffer_name(path);
  }
  errno = saved;
  return is;
}

/* ---- our own fds: out of the program's way, and not its to close ------------------------------------------------- */

/* The same file under a high number. */
int keep_high(int fd) {
  struct rlimit limit;
  int low = !getrlimit(RLIMIT_NOFILE, &limit) && limit.rlim_cur < 1024 ? (int)limit.rlim_cur - 64 : 960;
  int moved = fcntl(fd, F_DUPFD_CLOEXEC, low > 3 ? low : 3);
  if (moved < 0) return fd;
  real_close(fd);
  return moved;
}

static unsigned own_slots(int **into, unsigned room) {
  into[0] = &me.sock;
  return 1 + doorbell_fds(into + 1, room - 1);
}

/* Our fds; their count. */
unsigned own_fds(int *into, unsigned room) {
  int *slots[MAX_OWN];
  unsigned n = own_slots(slots, MAX_OWN), k = 0;
  for (unsigned i = 0; i < n && k < room; i++)
    if (*slots[i] >= 0) into[k++] = *slots[i];
  return k;
}

/* Whether an fd of this process is ours. */
int is_own(int fd) {
  int *slots[MAX_OWN];
  if (fd < 0 || !mine()) return 0;
  unsigned n = own_slots(slots, MAX_OWN);
  while (n)
    if (*slots[--n] == fd) return 1;
  return 0;
}

/* Make room for the program at a number of ours. */
void vacate(int fd) {
  int *slots[MAX_OWN];
  unsigned n = fd >= 0 && mine() ? own_slots(slots, MAX_OWN) : 0;
  while (n--)
    if (*slots[n] == fd) *slots[n] = fcntl(fd, F_DUPFD_CLOEXEC, fd + 1);
}

/* ---- the session ------------------------------------------------------------------------------------------------- */

static int start_session(void) {
  uint8_t random[8];
  char token[17], comm[17] = "?", hello[128];
  int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  if (sock < 0) return -errno;
  sock = keep_high(sock);
  if (connect(sock, (struct sockaddr *)&board.address, board.length)) {
    real_close(sock);
    return -ENODEV;
  }
  if (getrandom(random, sizeof random, 0) != sizeof random) memcpy(random, &me.pid, sizeof me.pid);
  for (int i = 0; i < 8; i++) sprintf(token + 2 * i, "%02x", random[i]);
  int file = real_open("/proc/self/comm", O_RDONLY | O_CLOEXEC, 0);
  ssize_t n = file < 0 ? 0 : read(file, comm, sizeof comm - 1);
  if (file >= 0) real_close(file);
  comm[n > 0 ? n : 1] = 0;
  for (char *c = comm; *c; c++)
    if (*c == '\n')
      *c = 0;
    else if (*c < ' ' || *c > '~' || *c == '"' || *c == '\\')
      *c = '?';
  n = snprintf(hello, sizeof hello, "{\"token\": \"%s\", \"pid\": %d, \"comm\": \"%s\"}", token, me.pid, comm);
  struct message request = {.op = OP_HELLO, .payload = hello, .length = n}, answer;
  int error = call(sock, &request, &answer, 0);
  if (error) {
    real_close(sock);
    return -error;
  }
  finish(&answer);
  return sock;
}

/* A request to the board itself. 0, with an answer to `finish`, or an errno. */
int board_call(const struct message *request, struct message *answer) {
  pthread_mutex_lock(&me.lock);
  if (!mine()) { /* a child that was not made by fork() */
    if (me.sock >= 0) real_close(me.sock);
    me.sock = -1;
    me.pid = getpid();
  }
  if (me.sock < 0) me.sock = start_session();
  int sock = me.sock;
  if (sock < 0) me.sock = -1;
  pthread_mutex_unlock(&me.lock);
  if (sock < 0) return -sock;
  int error = call(sock, request, answer, 0);
  if (error || !answer->code) return error;
  error = answer->code;
  finish(answer);
  return error;
}

/* Wait until the board has seen everything that we closed. */
void sync_board(void) {
  struct message request = {.op = OP_SYNC}, answer;
  int saved = errno;
  if (mine() && me.sock >= 0 && !call(me.sock, &request, &answer, 0)) finish(&answer);
  errno = saved;
}

/* Hand the only fd of an answer to the program; -1 with errno. */
static int hand_over(int error, struct message *answer, int flags) {
  if (!error && (answer->count != 1 || answer->fds[0] < 0)) error = EPROTO;
  if (error) {
    errno = error;
    return -1;
  }
  int fd = lowest(answer->fds[0]);
  answer->fds[0] = -1;
  if (!(flags & O_CLOEXEC)) fcntl(fd, F_SETFD, 0);
  finish(answer);
  return fd;
}

/* Open a device node. */
int open_node(const char *path, int flags) {
  struct message request = {.op = OP_OPEN, .payload = path, .length = strlen(path)}, answer;
  return hand_over(board_call(&request, &answer), &answer, flags);
}

/* Open the board's kernel log: a file with its records as they are now. */
int open_log(int flags) {
  struct message request = {.op = OP_LOG, .code = 1}, answer;
  int fd = hand_over(board_call(&request, &answer), &answer, flags);
  if (fd >= 0) lseek(fd, 0, SEEK_SET);
  return fd;
}

/* ---- ioctls ------------------------------------------------------------------------------------------------------ */

static const struct row *find_row(uint32_t request) {
  for (unsigned i = 0; i < sizeof ROWS / sizeof *ROWS; i++)
    if (ROWS[i].request == request) return &ROWS[i];
  return NULL;
}

/* One ioctl on a device fd. What cannot be read or stored at the argument's address is the driver's to answer. */
int board_ioctl(int fd, unsigned number, uintptr_t argument) {
  const struct row *row = find_row(number);
  size_t size = number >> 16 & 0x3fff, left = 0;
  uint8_t block[size + 1];
  struct message request = {.op = OP_IOCTL, .code = number, .payload = block}, answer;
  if (size)
    request.length = read_memory(argument, block, size);
  else
    request.value = argument;
  if (row && request.length == size)
    for (int i = 0; i < 2 && row->in[i] >= 0; i++) {
      int32_t named;
      memcpy(&named, block + row->in[i], sizeof named);
      request.fds[request.count++] = named >= 0 && !is_own(named) && fcntl(named, F_GETFD) >= 0 ? named : -1;
    }
  int error = call(fd, &request, &answer, row && row->sleeps);
  if (error) {
    errno = error;
    return -1;
  }
  if (answer.length && size) {
    size_t n = answer.length < size ? answer.length : size;
    memcpy(block, answer.payload, n);
    if (row && row->out >= 0 && answer.count && answer.fds[0] >= 0) {
      int32_t made = lowest(answer.fds[0]);
      answer.fds[0] = -1;
      memcpy(block + row->out, &made, sizeof made);
    }
    left = write_memory(argument, block, n);
  }
  int result = left ? (int)left : (int)answer.value;
  error = answer.code ? (int)answer.code : left && row && row->efault ? EFAULT : 0;
  finish(&answer);
  if (!error) return result;
  errno = error;
  return -1;
}
