/* What the driver may ask of this process during a call: its memory, its fds, its map. See tegrad/orin/caller.py. */
#include "board.h"
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define PAGE 4096

/* Copy between memory of ours and any address, page by page through a pipe: the kernel says EFAULT where a page is bad.
 * How many bytes were copied. */
static size_t copy(uintptr_t address, char *ours, size_t size, int into_address) {
  int ends[2];
  size_t done = 0;
  if (!size || pipe2(ends, O_CLOEXEC)) return 0;
  while (done < size) {
    size_t room = PAGE - (address + done) % PAGE, part = room < size - done ? room : size - done;
    const void *from = into_address ? ours + done : (void *)(address + done);
    void *into = into_address ? (void *)(address + done) : ours + done;
    if (write(ends[1], from, part) != (ssize_t)part || read(ends[0], into, part) != (ssize_t)part) break;
    done += part;
  }
  real_close(ends[0]);
  real_close(ends[1]);
  return done;
}

/* As many bytes from an address on as are readable; their count. */
size_t read_memory(uintptr_t address, void *into, size_t size) { return copy(address, into, size, 0); }

/* Store bytes at an address; how many could not be. */
size_t write_memory(uintptr_t address, const void *from, size_t size) {
  return size - copy(address, (char *)from, size, 1);
}

/* The same file under the lowest free number, as the kernel hands out fds. */
int lowest(int fd) {
  int copy = fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) return fd;
  real_close(copy < fd ? fd : copy);
  return copy < fd ? copy : fd;
}

/* The area of our memory map that holds an address, as the JSON that the board takes; its length, 0 if none does. */
int find_area(uintptr_t address, char *json, size_t size, int *buffer) {
  FILE *maps = fopen("/proc/self/maps", "re");
  char line[4608];
  int length = 0;
  *buffer = 0;
  while (maps && fgets(line, sizeof line, maps)) {
    unsigned long low, high, offset, inode;
    int at = 0;
    if (sscanf(line, "%lx-%lx %*s %lx %*s %lu %n", &low, &high, &offset, &inode, &at) < 4) continue;
    if (address < low || address >= high) continue;
    char *path = line + at;
    path[strcspn(path, "\n\"\\")] = 0; /* no buffer's name has such characters */
    *buffer = is_buffer_name(path);
    length = snprintf(json, size, "{\"start\": %lu, \"end\": %lu, \"offset\": %lu, \"inode\": %lu, \"path\": \"%s\"}",
                      low, high, offset, inode, path);
    break;
  }
  if (maps) fclose(maps);
  return length < (int)size ? length : 0;
}

/* Do for the driver what only this process can, and tell it. 0 or an errno. */
int serve(const struct message *question, int sock) {
  struct message told = {.op = OP_COPIED};
  char *data = question->buffer; /* room for a whole message; what came in it is only used to write from */
  int buffer;
  switch (question->op) {
    case OP_COPY_IN:
      if (question->code > CHUNK) return EPROTO;
      told.length = read_memory(question->value, data, question->code);
      break;
    case OP_COPY_OUT: told.code = write_memory(question->value, question->payload, question->length); break;
    case OP_GET_FILE:
      told.count = 1;
      told.fds[0] = fcntl(question->value, F_GETFD) < 0 || is_own(question->value) ? -1 : (int)question->value;
      break;
    case OP_CLOSE_FD:
      if (!is_own(question->value)) real_close(question->value);
      break;
    case OP_FIND_VMA: told.length = find_area(question->value, data, CHUNK, &buffer); break;
    default: return EPROTO;
  }
  told.payload = data;
  return send_message(sock, &told, -1);
}
