/* A program that knows nothing of tegrad: what it finds under `tegrad board exec` is told line by line.
 *
 * rows.h, made by the test from tegrad's tables, has REQ_X for each request and AT_X_field for each field.
 */
#define _GNU_SOURCE
#include "rows.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/dma-buf.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#define FIELD(type, block, place) (*(type *)((char *)(block) + (place)))
#define U32(block, place) FIELD(uint32_t, block, place)
#define U64(block, place) FIELD(uint64_t, block, place)
#define SAY(...) (printf(__VA_ARGS__), fflush(stdout))
enum { PAGE = 4096, DOORBELL = 0x90, GP_PUT = 0x8c, PUSHES = 64 };

static const char *outcome(long result) { return result < 0 ? strerrorname_np(errno) : "ok"; }

static void need(long result, const char *what) {
  if (result >= 0) return;
  SAY("failed %s %s\n", what, strerrorname_np(errno));
  exit(9);
}

static int nvmap, ctrl;

static int buffer(size_t size, uint32_t *handle) {
  uint32_t create[2] = {size}, alloc[16] = {0}, get[2];
  need(ioctl(nvmap, REQ_NVMAP_CREATE, create), "create");
  *handle = U32(create, AT_NVMAP_CREATE_handle);
  U32(alloc, AT_NVMAP_ALLOC_handle) = *handle;
  U32(alloc, AT_NVMAP_ALLOC_heap_mask) = 1u << 30;
  U32(alloc, AT_NVMAP_ALLOC_flags) = 0x9000002; /* with a tag */
  U32(alloc, AT_NVMAP_ALLOC_align) = PAGE;
  U32(alloc, AT_NVMAP_ALLOC_numa_nid) = -1;
  need(ioctl(nvmap, REQ_NVMAP_ALLOC, alloc), "alloc");
  U32(get, AT_NVMAP_GET_FD_handle) = *handle;
  need(ioctl(nvmap, REQ_NVMAP_GET_FD, get), "get_fd");
  return U32(get, AT_NVMAP_GET_FD_fd);
}

static void *shared(int fd, size_t size) {
  void *at = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  need(at == MAP_FAILED ? -1 : 0, "mmap");
  return at;
}

static void files(void) {
  struct stat s;
  need(nvmap = open("/dev/nvmap", O_RDWR | O_CLOEXEC), "nvmap");
  need(ctrl = open("/dev/nvgpu/igpu0/ctrl", O_RDWR), "ctrl");
  SAY("fds %d %d, cloexec %d %d\n", nvmap, ctrl, fcntl(nvmap, F_GETFD), fcntl(ctrl, F_GETFD));
  SAY("node %d, folder %d, access %s\n", !stat("/dev/nvmap", &s) && S_ISCHR(s.st_mode),
      !stat("/dev/nvgpu/igpu0", &s) && S_ISDIR(s.st_mode), outcome(access("/dev/host1x-fence", R_OK | W_OK)));
  SAY("an open one %d, another file %d\n", !fstat(ctrl, &s) && S_ISCHR(s.st_mode),
      !fstat(0, &s) && S_ISSOCK(s.st_mode));
  SAY("absent %s, other %s\n", outcome(open("/dev/nvgpu/igpu1/ctrl", O_RDWR)), outcome(open("/dev/null", O_RDWR)));
}

static void memory(void) {
  uint32_t handle, info[2] = {0}, masks[8] = {0};
  uint32_t *bad = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  bad[0] = PAGE;
  mprotect(bad, PAGE, PROT_READ);
  int fd = buffer(2 * PAGE, &handle);
  uint32_t *one = shared(fd, 2 * PAGE), *two = one + 1024;
  void *place = mmap(NULL, 4 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  void *fixed = mmap((char *)place + PAGE, 2 * PAGE, PROT_READ, MAP_PRIVATE | MAP_FIXED, fd, 0);
  two[0] = 77;
  SAY("fixed %d, same memory %d\n", fixed == (char *)place + PAGE, ((uint32_t *)fixed)[1024] == 77);
  SAY("msync %s\n", outcome(msync(one, PAGE, MS_SYNC)));

  U64(masks, AT_GPU_GET_TPC_MASKS_mask_buf_addr) = (uintptr_t)info;
  U32(masks, AT_GPU_GET_TPC_MASKS_mask_buf_size) = sizeof info;
  need(ioctl(ctrl, REQ_GPU_GET_TPC_MASKS, masks), "masks");
  SAY("masks %x %x\n", info[0], info[1]);
  U64(masks, AT_GPU_GET_TPC_MASKS_mask_buf_addr) = (uintptr_t)bad;
  SAY("masks to a page that is read-only: %d\n", ioctl(ctrl, REQ_GPU_GET_TPC_MASKS, masks));
  SAY("block nowhere: %s\n", outcome(ioctl(nvmap, REQ_NVMAP_CREATE, (void *)8)));
  SAY("block read-only: %s\n", outcome(ioctl(nvmap, REQ_NVMAP_CREATE, bad)));
  SAY("unknown request: %s %s\n", outcome(ioctl(nvmap, _IO('N', 99), 0)), outcome(ioctl(ctrl, 0x5401, info)));
  struct dma_buf_sync begin = {DMA_BUF_SYNC_START | DMA_BUF_SYNC_RW}, nothing = {DMA_BUF_SYNC_START};
  SAY("sync %s, ", outcome(ioctl(fd, DMA_BUF_IOCTL_SYNC, &begin)));
  SAY("without a direction %s, ", outcome(ioctl(fd, DMA_BUF_IOCTL_SYNC, &nothing)));
  SAY("of another file %s\n", outcome(ioctl(1, DMA_BUF_IOCTL_SYNC, &begin)));
  SAY("a pipe: %s, no fd: %s\n", outcome(ioctl(1, REQ_NVMAP_FREE, handle)), outcome(ioctl(999, REQ_NVMAP_FREE, 1)));
  int (*asked)(int, unsigned long, ...) = dlsym(dlopen("libc.so.6", RTLD_LAZY), "ioctl");
  SAY("by dlsym: %s\n", outcome(asked(nvmap, REQ_NVMAP_FREE, (unsigned long)handle)));
  SAY("the next after us: %d\n", dlsym(RTLD_NEXT, "ioctl") == (void *)asked && (void *)ioctl == (void *)asked);
}

/* A channel whose pushes each write the next number; what rings is the caller's. */
struct channel {
  int fd, done_fd;
  uint32_t token, put, *userd, *push, *done;
  uint64_t *ring, push_va, done_va;
};

static uint64_t gpu(int as, int fd) {
  uint32_t map[10] = {0};
  U32(map, AT_AS_MAP_BUFFER_EX_compr_kind) = 0xffff; /* none; kind 0 */
  U32(map, AT_AS_MAP_BUFFER_EX_dmabuf_fd) = fd;
  need(ioctl(as, REQ_AS_MAP_BUFFER_EX, map), "map");
  return U64(map, AT_AS_MAP_BUFFER_EX_offset);
}

static struct channel set_up(int as, int tsg) {
  struct channel c = {0};
  uint32_t word[1] = {-1}, bind[26] = {0}, handle, wdt[2] = {1};
  need(ioctl(ctrl, REQ_GPU_OPEN_CHANNEL, word), "open channel");
  int fd = word[0], ring = buffer(PAGE, &handle), userd = buffer(PAGE, &handle), push = buffer(PAGE, &handle);
  int done = buffer(PAGE, &handle);
  need(ioctl(as, REQ_AS_BIND_CHANNEL, word), "bind to as");
  need(ioctl(tsg, REQ_TSG_BIND_CHANNEL, word), "bind to tsg");
  need(ioctl(fd, REQ_CHANNEL_WDT, wdt), "wdt");
  U32(bind, AT_CHANNEL_SETUP_BIND_num_gpfifo_entries) = 128;
  U32(bind, AT_CHANNEL_SETUP_BIND_flags) = 1u << 1 | 1u << 3; /* deterministic, usermode */
  U32(bind, AT_CHANNEL_SETUP_BIND_userd_dmabuf_fd) = userd;
  U32(bind, AT_CHANNEL_SETUP_BIND_gpfifo_dmabuf_fd) = ring;
  need(ioctl(fd, REQ_CHANNEL_SETUP_BIND, bind), "setup");
  c.token = U32(bind, AT_CHANNEL_SETUP_BIND_work_submit_token);
  c.fd = fd;
  c.done_fd = done;
  c.ring = shared(ring, PAGE);
  c.userd = shared(userd, PAGE);
  c.push = shared(push, PAGE);
  c.done = shared(done, PAGE);
  c.push_va = gpu(as, push);
  c.done_va = gpu(as, done);
  return c;
}

/* Release the number of this push at done[number]: SEM_ADDR_LO (0x5c), 5 words, 32-bit payload. */
static void queue(struct channel *c) {
  uint32_t i = c->put, *w = c->push + 8 * i;
  uint64_t va = c->done_va + 4 * i;
  uint32_t words[] = {1u << 29 | 5 << 16 | 0x5c / 4, va, va >> 32, i + 1, 0, 1};
  memcpy(w, words, sizeof words);
  c->ring[i] = (c->push_va + 32 * i) | (uint64_t)6 << 42;
  c->put++;
  atomic_thread_fence(memory_order_seq_cst);
  *(volatile uint32_t *)((char *)c->userd + GP_PUT) = c->put;
  atomic_thread_fence(memory_order_seq_cst);
}

static int finished(struct channel *c) {
  for (int ms = 0; ms < 20000; ms++) {
    unsigned n = 0;
    while (n < c->put && ((volatile uint32_t *)c->done)[n] == n + 1) n++;
    if (n == c->put) return 1;
    usleep(1000);
  }
  return 0;
}

/* Every way in which compilers store a word. */
static void ring(char *page, uint32_t token, int way) {
  volatile uint32_t *bell = (volatile uint32_t *)(page + DOORBELL);
  switch (way) {
#if defined(__x86_64__)
    case 1: _mm_stream_si32((int *)bell, token); return;
    case 2: __asm__ volatile("movd %0, %%xmm9; movd %%xmm9, (%1)" ::"r"(token), "r"(bell) : "xmm9", "memory"); return;
    case 3: __asm__ volatile("movl %0, (%1,%2,4)" ::"r"(token), "r"(page), "r"((long)DOORBELL / 4) : "memory"); return;
#elif defined(__aarch64__)
    case 1: __asm__ volatile("str %w0, [%1, %2]" ::"r"(token), "r"(page), "r"((long)DOORBELL) : "memory"); return;
    case 2: __asm__ volatile("fmov s9, %w0; str s9, [%1]" ::"r"(token), "r"(bell) : "v9", "memory"); return;
    case 3: {
      char *moved = page;
      __asm__ volatile("str %w1, [%0, #144]!" : "+r"(moved) : "r"(token) : "memory");
      if (moved != (char *)bell) exit(8);
      return;
    }
#endif
    case 4: __atomic_store_n(bell, token, __ATOMIC_SEQ_CST); return;
    case 5:
      __atomic_exchange_n((uint32_t *)page, 0, __ATOMIC_SEQ_CST);
      *bell = token;
      return;
    default: *bell = token;
  }
}

static char *page;

static void on_alarm(int sig) { (void)sig; }

/* A wait of 20 s for a value that never comes, and a signal every 0.1 s: the first may come before it sleeps. */
static const char *interrupted(struct channel *c) {
  struct sigaction act = {.sa_handler = on_alarm}; /* without SA_RESTART */
  uint32_t wait[6] = {0};
  sigaction(SIGALRM, &act, NULL);
  U32(wait, AT_CHANNEL_WAIT_type) = 1;
  U32(wait, AT_CHANNEL_WAIT_timeout) = 20000;
  U32(wait, AT_CHANNEL_WAIT_condition_semaphore_dmabuf_fd) = c->done_fd;
  U32(wait, AT_CHANNEL_WAIT_condition_semaphore_payload) = 1234567;
  setitimer(ITIMER_REAL, &(struct itimerval){{.tv_usec = 100000}, {.tv_usec = 100000}}, NULL);
  const char *said = outcome(ioctl(c->fd, REQ_CHANNEL_WAIT, wait));
  setitimer(ITIMER_REAL, &(struct itimerval){0}, NULL);
  return said;
}

static void *ring_blocked(void *token) {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, NULL);
  ring(page, (uintptr_t)token, 0);
  return NULL;
}

static void doorbell(void) {
  uint32_t as[16] = {0}, tsg[6] = {0};
  U64(as, AT_GPU_ALLOC_AS_va_range_start) = 2 << 20;
  U64(as, AT_GPU_ALLOC_AS_va_range_end) = 0xff00000000;
  U32(as, AT_GPU_ALLOC_AS_flags) = 2;
  need(ioctl(ctrl, REQ_GPU_ALLOC_AS, as), "as");
  need(ioctl(ctrl, REQ_GPU_OPEN_TSG, tsg), "tsg");
  int as_fd = U32(as, AT_GPU_ALLOC_AS_as_fd), tsg_fd = U32(tsg, AT_GPU_OPEN_TSG_tsg_fd);
  SAY("made %d cloexec %d\n", as_fd, fcntl(as_fd, F_GETFD));
  struct channel c[2] = {set_up(as_fd, tsg_fd), set_up(as_fd, tsg_fd)};
  page = shared(ctrl, 0x10000);
  SAY("registers %s, class %x\n",
      mmap(NULL, PAGE, PROT_READ, MAP_SHARED, ctrl, 0) == MAP_FAILED ? outcome(-1) : "twice",
      *(volatile uint32_t *)page & 0xffff);
  uint64_t before = *(volatile uint64_t *)(page + 0x80), after = *(volatile uint64_t *)(page + 0x80);
  SAY("time %d, nothing %u\n", after >= before && before > 0, *(volatile uint32_t *)(page + 0x1230));
  SAY("a wait ends by a signal: %s\n", interrupted(&c[0]));
  for (int i = 0; i < PUSHES - 1; i++) { /* two tokens one right after the other, each way */
    for (int k = 0; k < 2; k++) queue(&c[k]);
    for (int k = 0; k < 2; k++) ring(page, c[k].token, i % 7);
  }
  pthread_t thread;
  queue(&c[0]);
  pthread_create(&thread, NULL, ring_blocked, (void *)(uintptr_t)c[0].token);
  pthread_join(thread, NULL);
  SAY("rung %d %d\n", finished(&c[0]), finished(&c[1]));
  closefrom(200);
  queue(&c[1]);
  ring(page, c[1].token, 0);
  SAY("after closefrom %d\n", finished(&c[1]));
  char bytes[64];
  memcpy(bytes, page, sizeof bytes); /* by whatever loads */
  queue(&c[0]);
  ring(page, c[0].token, 0);
  SAY("after a long load %d\n", finished(&c[0]));
  if (!fork()) {
    uint32_t handle;
    int fd = open("/dev/nvmap", O_RDWR);
    need(fd, "nvmap in the child");
    SAY("child: %s\n", outcome(buffer(PAGE, &handle)));
    close(fd);
    *(volatile uint32_t *)(page + DOORBELL) = c[0].token; /* not inherited */
    _exit(7);
  }
  int status;
  wait(&status);
  SAY("child ended by %d\n", WTERMSIG(status));
  munmap(page, 0x10000);
  page = shared(ctrl, PAGE);
  SAY("mapped again %d\n", page != MAP_FAILED);
}

static void on_segv(int sig, siginfo_t *info, void *context) {
  (void)sig, (void)context;
  SAY("own handler %p\n", info->si_addr);
  _exit(5);
}

int main(int argc, char **argv) {
  struct sigaction own = {.sa_sigaction = on_segv, .sa_flags = SA_SIGINFO}, old;
  if (argc > 1) { /* after exec: an inherited fd goes on, and a new process opens its own */
    uint32_t handle;
    nvmap = open("/dev/nvmap", O_RDWR);
    SAY("exec: %s %s\n", argv[1], outcome(ioctl(atoi(argv[1]), REQ_GPU_NUM_VSMS, &handle)));
    SAY("a buffer %s\n", outcome(buffer(PAGE, &handle)));
    return 3;
  }
  files();
  memory();
  doorbell();
  sigaction(SIGSEGV, &own, NULL);
  sigaction(SIGSEGV, NULL, &old);
  SAY("its handler %d\n", old.sa_sigaction == on_segv);
  if (!fork()) *(volatile int *)0x10 = 1;
  int status;
  wait(&status);
  SAY("its handler ended it with %d\n", WEXITSTATUS(status));
  char number[8];
  snprintf(number, sizeof number, "%d", ctrl);
  fcntl(ctrl, F_SETFD, 0);
  execl(argv[0], argv[0], number, NULL);
  return 9;
}
