/* Inertial odometry driven from C: samples go to run.py --page, and poses come back, through one shared page.
 *
 *   cc -O2 -o driver examples/odometry/driver.c
 *   ./driver PAGE SAMPLES [PERIOD_US]
 *
 * PAGE is the file that run.py makes; SAMPLES has 6 floats a sample (motion.py). A sample goes out each PERIOD_US (1000),
 * or when the pose of the one before it has come, whichever is later. The page's layout is shared_page.py's, too.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>

enum { PAGE_SIZE = 4096, VALUES = 6 };
#define SECOND 1000000000ull
static const uint64_t READY_NS = 600 * SECOND, POSE_NS = 120 * SECOND, SPIN_NS = 2000000;

struct page {
  _Alignas(64) _Atomic uint64_t ready; /* written by Python */
  _Alignas(64) _Atomic uint64_t sample; /* written by C, this one last */
  uint64_t sample_ns;
  float imu[VALUES];
  _Atomic uint64_t stop;
  _Alignas(64) _Atomic uint64_t pose; /* written by Python, this one last */
  uint64_t pose_ns;
  double x, y, heading, speed, turn;
};
_Static_assert(offsetof(struct page, sample) == 64 && offsetof(struct page, stop) == 104, "shared_page.py");
_Static_assert(offsetof(struct page, pose) == 128 && sizeof(struct page) <= PAGE_SIZE, "shared_page.py");

static uint64_t now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_nsec;
}

static void sleep_until(uint64_t ns) {
  struct timespec t = {(time_t)(ns / SECOND), (long)(ns % SECOND)};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL) != 0)
    ;
}

static void fail(const char *why) {
  fprintf(stderr, "driver: %s\n", why);
  exit(1);
}

/* The page, when Python has made it and is ready. */
static struct page *attach(const char *name) {
  uint64_t until = now_ns() + READY_NS;
  struct page *page = NULL;
  while (now_ns() < until) {
    int fd = page ? -1 : open(name, O_RDWR);
    struct stat status;
    if (fd >= 0 && fstat(fd, &status) == 0 && status.st_size >= PAGE_SIZE) {
      void *memory = mmap(NULL, PAGE_SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
      page = memory == MAP_FAILED ? NULL : memory;
    }
    if (page && atomic_load_explicit(&page->ready, memory_order_acquire)) return page;
    sleep_until(now_ns() + 10000000);
  }
  fail("run.py --page did not get ready");
  return NULL;
}

/* Wait for the pose of a sample: a core burns for 2 ms, then this sleeps. */
static void await(struct page *page, uint64_t sample) {
  uint64_t begun = now_ns();
  while (atomic_load_explicit(&page->pose, memory_order_acquire) != sample) {
    uint64_t waited = now_ns() - begun;
    if (waited > POSE_NS) fail("no pose came");
    if (waited > SPIN_NS) sleep_until(now_ns() + 50000);
  }
}

static int ascending(const void *a, const void *b) {
  uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
  return (x > y) - (x < y);
}

int main(int argc, char **argv) {
  if (argc < 3) fail("usage: driver PAGE SAMPLES [PERIOD_US]");
  uint64_t period = (argc > 3 ? strtoull(argv[3], NULL, 10) : 1000) * 1000;
  FILE *file = fopen(argv[2], "rb");
  struct stat status;
  if (!file || fstat(fileno(file), &status)) fail("cannot read SAMPLES");
  size_t count = (size_t)status.st_size / (VALUES * sizeof(float)), late = 0;
  uint64_t *took = malloc(count * sizeof *took + 1);
  if (!took || !count) fail("SAMPLES is empty");

  struct page *page = attach(argv[1]);
  uint64_t due = now_ns();
  for (size_t i = 0; i < count; i++) {
    float sample[VALUES];
    if (fread(sample, sizeof *sample, VALUES, file) != VALUES) fail("SAMPLES ended");
    sleep_until(due);
    for (int k = 0; k < VALUES; k++) page->imu[k] = sample[k];
    uint64_t sent = page->sample_ns = now_ns();
    atomic_store_explicit(&page->sample, i + 1, memory_order_release);
    await(page, i + 1);
    uint64_t back = now_ns();
    took[i] = back - sent;
    late += took[i] > period;
    due = due + period > back ? due + period : back;
  }
  atomic_store_explicit(&page->stop, 1, memory_order_release);

  qsort(took, count, sizeof *took, ascending);
  printf("%zu samples from C and back: %.0f us at the median, %.0f at p99, %.0f at worst; %zu took longer than %.0f us\n",
         count, took[count / 2] * 1e-3, took[count * 99 / 100] * 1e-3, took[count - 1] * 1e-3, late, period * 1e-3);
  printf("at (%.3f, %.3f) m in the end\n", page->x, page->y);
  free(took);
  return 0;
}
