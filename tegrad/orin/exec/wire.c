/* One request and its answer: the client's side of tegrad/orin/wire.py. */
#include "board.h"
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

/* As struct.pack("<HHQQ"). */
struct header {
  uint16_t op, slots;
  uint64_t code, value;
} __attribute__((packed));

union fd_space {
  char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))];
  struct cmsghdr align;
};

/* Send one message; `reply` (or -1) goes first. 0 or an errno. */
int send_message(int sock, const struct message *message, int reply) {
  struct header head = {message->op, message->count, message->code, message->value};
  uint8_t slots[MAX_FDS];
  int passed[MAX_FDS], n = 0;
  if (reply >= 0) passed[n++] = reply;
  for (unsigned i = 0; i < message->count; i++) {
    slots[i] = message->fds[i] < 0 ? ABSENT : n;
    if (message->fds[i] >= 0) passed[n++] = message->fds[i];
  }
  struct iovec parts[] = {{&head, sizeof head}, {slots, message->count}, {(void *)message->payload, message->length}};
  struct msghdr msg = {.msg_iov = parts, .msg_iovlen = 3};
  union fd_space space;
  if (n) {
    memset(&space, 0, sizeof space);
    msg.msg_control = space.bytes;
    msg.msg_controllen = CMSG_SPACE(n * sizeof(int));
    struct cmsghdr *rights = CMSG_FIRSTHDR(&msg);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(n * sizeof(int));
    memcpy(CMSG_DATA(rights), passed, n * sizeof(int));
  }
  while (sendmsg(sock, &msg, MSG_NOSIGNAL) < 0)
    if (errno != EINTR) return errno;
  return 0;
}

/* The next message. 0 or an errno: EPIPE when the board has hung up. */
static int receive(int sock, struct message *into, int interruptible) {
  union fd_space space;
  struct iovec part = {into->buffer, MAX_MESSAGE};
  struct msghdr msg = {
      .msg_iov = &part, .msg_iovlen = 1, .msg_control = space.bytes, .msg_controllen = sizeof space.bytes};
  ssize_t got;
  while ((got = recvmsg(sock, &msg, MSG_CMSG_CLOEXEC)) < 0)
    if (errno != EINTR || interruptible) return errno;
  int passed[MAX_FDS];
  unsigned n = 0;
  for (struct cmsghdr *c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
    if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
    unsigned here = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    memcpy(passed + n, CMSG_DATA(c), here * sizeof(int));
    n += here;
  }
  const struct header *head = into->buffer;
  int bad = !got ? EPIPE : msg.msg_flags & MSG_CTRUNC ? EMFILE : (size_t)got < sizeof *head ? EPROTO : 0;
  if (!bad && (head->slots > MAX_FDS || sizeof *head + head->slots > (size_t)got)) bad = EPROTO;
  if (bad) {
    while (n) real_close(passed[--n]);
    return bad;
  }
  const uint8_t *slots = (const uint8_t *)(head + 1);
  into->op = head->op;
  into->code = head->code;
  into->value = head->value;
  into->count = head->slots;
  for (unsigned i = 0; i < into->count; i++) into->fds[i] = slots[i] < n ? passed[slots[i]] : -1;
  into->payload = slots + into->count;
  into->length = got - sizeof *head - into->count;
  return 0;
}

static int exchange(int fd, const struct message *request, struct message *answer, int interruptible) {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends)) return errno;
  int error = send_message(fd, request, ends[1]);
  real_close(ends[1]);
  while (!error && !(error = receive(ends[0], answer, interruptible)) && answer->op != OP_DONE)
    error = serve(answer, ends[0]);
  real_close(ends[0]);
  return error;
}

/* Send a request on a socket and serve the board until the answer is there; `finish` it. 0 or an errno. */
int call(int fd, const struct message *request, struct message *answer, int interruptible) {
  int cancel, error = ENOMEM;
  memset(answer, 0, sizeof *answer);
  pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
  if ((answer->buffer = malloc(MAX_MESSAGE))) error = exchange(fd, request, answer, interruptible);
  if (error == EPIPE || error == ECONNRESET) error = ENODEV;
  if (error) finish(answer);
  pthread_setcancelstate(cancel, NULL);
  return error;
}

/* Let go of an answer, and of its fds that nobody has taken (set to -1). */
void finish(struct message *answer) {
  for (unsigned i = 0; i < answer->count; i++)
    if (answer->fds[i] >= 0) real_close(answer->fds[i]);
  answer->count = 0;
  free(answer->buffer);
  answer->buffer = NULL;
}
