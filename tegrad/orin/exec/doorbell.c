/* The page of usermode registers: every access faults, and the handler carries it out.
 *
 * Nothing else keeps stores of different tokens apart and in order: a page that is looked at now and then shows the
 * last one only. Plain loads and stores of 32 and 64 bits are known (decode_*); a load of another kind makes the page
 * readable, with the timer standing still from then on, and a store of another kind is told and ends as a fault.
 */
#include "board.h"
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#define DOORBELLS 32
#define PAGE 4096
enum { CLASS = 0x00, TIME_0 = 0x80, TIME_1 = 0x84 };

static struct doorbell {
  _Atomic uintptr_t start;
  size_t length;
  uint32_t *shadow; /* the page's memory, for loads that must find some */
  int prot, pipe, lease;
  uint32_t class_id;
} doorbells[DOORBELLS];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct sigaction theirs; /* the program's own action for SIGSEGV, once ours is in its place */
static int installed;

/* ---- registers --------------------------------------------------------------------------------------------------- */

static uint32_t load(const struct doorbell *bell, uintptr_t at) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  uint64_t ns = ((uint64_t)now.tv_sec * 1000000000 + now.tv_nsec) & ~31ull;
  switch (at - bell->start) {
    case CLASS: return bell->class_id;
    case TIME_0: return ns;
    case TIME_1: return ns >> 32;
    default: return 0;
  }
}

/* One record in the GPU's pipe; nothing answers, as on hardware, not even when the GPU is gone. */
static void store(const struct doorbell *bell, uintptr_t at, uint32_t value) {
  uint32_t record[2] = {at - bell->start, value};
  uint64_t start = trace_start();
  while (write(bell->pipe, record, sizeof record) < 0 && errno == EINTR) {}
  trace_store(start, record[0], value);
}

/* 4 or 8 bytes at a register. */
static uint64_t load_wide(const struct doorbell *bell, uintptr_t at, unsigned bytes) {
  uint64_t value = load(bell, at);
  return bytes == 8 ? value | (uint64_t)load(bell, at + 4) << 32 : value;
}

static void store_wide(const struct doorbell *bell, uintptr_t at, unsigned bytes, const void *from) {
  for (unsigned i = 0; i < bytes / 4; i++) {
    uint32_t word;
    memcpy(&word, (const char *)from + 4 * i, 4);
    store(bell, at + 4 * i, word);
  }
}

/* ---- instructions ------------------------------------------------------------------------------------------------ */

#if defined(__x86_64__)
static const int REGISTERS[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};

static const uint8_t *code_at(ucontext_t *uc) { return (const uint8_t *)uc->uc_mcontext.gregs[REG_RIP]; }

/* Intel SDM volume 2, chapter 2: prefixes, REX, opcode, ModRM, SIB, displacement, immediate. 0: unknown. */
static int decode(const struct doorbell *bell, uintptr_t at, ucontext_t *uc) {
  const uint8_t *p = code_at(uc);
  int size16 = 0, rep = 0, rex = 0;
  for (;; p++) {
    if (*p == 0x66)
      size16 = 1;
    else if (*p == 0xf3 || *p == 0xf2)
      rep = *p;
    else if (*p != 0x67 && *p != 0x2e && *p != 0x36 && *p != 0x3e && *p != 0x26 && *p != 0x64 && *p != 0x65)
      break;
  }
  if ((*p & 0xf0) == 0x40) rex = *p++;
  unsigned opcode = *p++;
  if (opcode == 0x0f) opcode = 0x0f00 | *p++;
  unsigned modrm = *p++, mod = modrm >> 6, rm = modrm & 7, reg = (modrm >> 3 & 7) | (rex & 4) << 1;
  if (mod == 3) return 0;
  unsigned base = rm == 4 ? *p++ & 7 : rm;
  p += mod == 1 ? 1 : mod == 2 || (mod == 0 && base == 5) ? 4 : 0;
  unsigned bytes = rex & 8 ? 8 : 4;
  greg_t *gregs = uc->uc_mcontext.gregs, *named = &gregs[REGISTERS[reg]];
  const void *vector = &uc->uc_mcontext.fpregs->_xmm[reg];
  if ((opcode == 0x89 && !size16) || (opcode == 0x0fc3 && !size16 && !rep)) { /* MOV, MOVNTI: from a register */
    store_wide(bell, at, bytes, named);
  } else if (opcode == 0xc7 && !size16 && (reg & 7) == 0) { /* MOV of a constant, sign-extended */
    int32_t constant;
    memcpy(&constant, p, sizeof constant);
    int64_t wide = constant;
    p += 4;
    store_wide(bell, at, bytes, &wide);
  } else if (opcode == 0x87 && !size16) { /* XCHG: what a sequentially consistent store becomes */
    uint64_t value = *named;
    *named = load_wide(bell, at, bytes);
    store_wide(bell, at, bytes, &value);
  } else if (opcode == 0x8b && !size16) { /* MOV to a register */
    *named = load_wide(bell, at, bytes);
  } else if ((opcode == 0x0f7e && size16) || (opcode == 0x0f11 && rep == 0xf3)) { /* MOVD, MOVQ; MOVSS */
    store_wide(bell, at, opcode == 0x0f7e ? bytes : 4, vector);
  } else if ((opcode == 0x0fd6 && size16) || (opcode == 0x0f11 && rep == 0xf2)) { /* MOVQ; MOVSD */
    store_wide(bell, at, 8, vector);
  } else {
    return 0;
  }
  gregs[REG_RIP] = (greg_t)p;
  return 1;
}

static int is_store(ucontext_t *uc) { return uc->uc_mcontext.gregs[REG_ERR] >> 1 & 1; }

#elif defined(__aarch64__)
#include <asm/sigcontext.h>

static const uint8_t *code_at(ucontext_t *uc) { return (const uint8_t *)uc->uc_mcontext.pc; }

/* A record of the signal frame. */
static void *frame_record(ucontext_t *uc, uint32_t magic) {
  char *p = (char *)uc->uc_mcontext.__reserved, *end = p + sizeof uc->uc_mcontext.__reserved;
  while (p < end && ((struct _aarch64_ctx *)p)->magic && ((struct _aarch64_ctx *)p)->size) {
    if (((struct _aarch64_ctx *)p)->magic == magic) return p;
    p += ((struct _aarch64_ctx *)p)->size;
  }
  return NULL;
}

/* One register of an access: general, or the low bytes of a vector. */
static int transfer(const struct doorbell *bell, uintptr_t at, ucontext_t *uc, int n, int vector, unsigned bytes,
                    int is_load) {
  static const uint64_t zero;
  const void *from = n == 31 ? &zero : (void *)&uc->uc_mcontext.regs[n & 31];
  if (vector) {
    struct fpsimd_context *simd = frame_record(uc, FPSIMD_MAGIC);
    if (!simd || is_load) return 0;
    from = &simd->vregs[n];
  }
  if (!is_load)
    store_wide(bell, at, bytes, from);
  else if (n != 31)
    uc->uc_mcontext.regs[n] = load_wide(bell, at, bytes);
  return 1;
}

/* Arm ARM, C4.1.94, loads and stores: single registers in all addressings, pairs, load-acquire, store-release, SWP. */
static int decode(const struct doorbell *bell, uintptr_t at, ucontext_t *uc) {
  uint32_t code;
  memcpy(&code, code_at(uc), sizeof code);
  int rt = code & 31, rn = code >> 5 & 31, rt2 = code >> 10 & 31, vector = code >> 26 & 1, is_load;
  unsigned size = code >> 30, bytes = 4u << (size & 1), registers = 1;
  int64_t back = 0;                                     /* what writing back adds to the base */
  if ((code & 0x3f20fc00) == 0x38208000 && size >= 2) { /* SWP: the register rs goes out, the old value into rt */
    uint64_t old = load_wide(bell, at, bytes);
    transfer(bell, at, uc, code >> 16 & 31, 0, bytes, 0);
    if (rt != 31) uc->uc_mcontext.regs[rt] = old;
    uc->uc_mcontext.pc += 4;
    return 1;
  }
  if ((code & 0x3b000000) == 0x39000000 || (code & 0x3b000000) == 0x38000000) { /* LDR, STR */
    unsigned opc = code >> 22 & 3;
    is_load = opc & 1;
    if (vector && size == 0 && opc == 2)
      bytes = 16; /* STR of a whole vector */
    else if (size < 2 || opc > 1)
      return 0;
    if (!(code & 0x01000000)) {
      unsigned form = code >> 10 & 3;
      if (code & 0x00200000 ? form != 2 : 0) return 0; /* atomics; else an offset in a register */
      if (!(code & 0x00200000) && (form & 1)) back = (int64_t)((uint64_t)code << 43) >> 55; /* post- and pre-indexed */
    }
  } else if ((code & 0x3a000000) == 0x28000000) { /* LDP, STP */
    is_load = code >> 22 & 1;
    bytes = vector ? 4u << size : size == 0 ? 4 : 8;
    if (size == 3 || (!vector && size == 1)) return 0;
    registers = 2;
    if (code >> 23 & 1) back = ((int64_t)((uint64_t)code << 42) >> 57) * (int64_t)bytes;
  } else if ((code & 0x3fa08000) == 0x08808000 && size >= 2) { /* LDAR, STLR */
    is_load = code >> 22 & 1;
  } else {
    return 0;
  }
  for (unsigned i = 0; i < registers; i++)
    if (!transfer(bell, at + i * bytes, uc, i ? rt2 : rt, vector, bytes, is_load)) return 0;
  if (rn == 31)
    uc->uc_mcontext.sp += back;
  else
    uc->uc_mcontext.regs[rn] += back;
  uc->uc_mcontext.pc += 4;
  return 1;
}

static int is_store(ucontext_t *uc) {
  struct esr_context *record = frame_record(uc, ESR_MAGIC);
  return record ? record->esr >> 6 & 1 : 1;
}
#else
#error "the doorbell page is known on x86-64 and aarch64 only"
#endif

/* ---- the handler ------------------------------------------------------------------------------------------------- */

static struct doorbell *find(uintptr_t at) {
  for (int i = 0; i < DOORBELLS; i++) {
    uintptr_t start = doorbells[i].start;
    if (start && at >= start && at < start + doorbells[i].length) return &doorbells[i];
  }
  return NULL;
}

static void tell_unknown(ucontext_t *uc) {
  char text[160];
  const uint8_t *code = code_at(uc);
  int n = snprintf(text, sizeof text, "tegrad: a store to the doorbell page by an unknown instruction (");
  for (int i = 0; i < 8; i++) n += snprintf(text + n, sizeof text - n, "%02x", code[i]);
  n += snprintf(text + n, sizeof text - n, "): store aligned 32-bit words there\n");
  if (write(2, text, n) < 0) {}
}

/* Carry an access out. Whether that could be done. */
static int carry_out(struct doorbell *bell, uintptr_t at, ucontext_t *uc) {
  int writes = is_store(uc);
  if (!(bell->prot & (writes ? PROT_WRITE : PROT_READ))) return 0;
  if (at % 4 == 0 && decode(bell, at, uc)) return 1;
  if (writes) {
    tell_unknown(uc);
    return 0;
  }
  bell->shadow[CLASS / 4] = bell->class_id;
  for (int i = TIME_0; i <= TIME_1; i += 4) bell->shadow[i / 4] = load(bell, bell->start + i);
  return !mprotect((void *)bell->start, bell->length, PROT_READ);
}

/* A fault that is the program's: its own action, in its own way. */
static void pass_on(int sig, siginfo_t *info, void *context) {
  struct sigaction action = theirs;
  sigset_t mask = action.sa_mask;
  int sent = info->si_code <= 0; /* by kill, not by an access */
  if (action.sa_handler == SIG_IGN && sent) return;
  if (action.sa_handler == SIG_DFL || action.sa_handler == SIG_IGN) {
    action.sa_handler = SIG_DFL;
    real_sigaction(sig, &action, NULL);
    if (sent) syscall(SYS_tgkill, getpid(), (pid_t)syscall(SYS_gettid), sig);
    return; /* the access faults once more, and ends as it would have */
  }
  if (action.sa_flags & SA_RESETHAND) theirs.sa_handler = SIG_DFL;
  if (!(action.sa_flags & SA_NODEFER)) sigaddset(&mask, sig);
  real_sigmask(SIG_BLOCK, &mask, NULL);
  if (action.sa_flags & SA_NODEFER) {
    sigset_t own;
    sigemptyset(&own);
    sigaddset(&own, sig);
    real_sigmask(SIG_UNBLOCK, &own, NULL);
  }
  if (action.sa_flags & SA_SIGINFO)
    action.sa_sigaction(sig, info, context);
  else
    action.sa_handler(sig);
}

static void on_fault(int sig, siginfo_t *info, void *context) {
  int saved = errno;
  uintptr_t at = (uintptr_t)info->si_addr;
  struct doorbell *bell = info->si_code > 0 ? find(at) : NULL;
  int done = 0;
  if (bell) {
    sigset_t pending, pipe_signal;
    sigemptyset(&pipe_signal);
    sigaddset(&pipe_signal, SIGPIPE); /* blocked here: a GPU that is gone is no signal of the program's */
    sigpending(&pending);
    done = carry_out(bell, at, context);
    if (!sigismember(&pending, SIGPIPE)) sigtimedwait(&pipe_signal, NULL, &(struct timespec){0});
  }
  errno = saved;
  if (!done) pass_on(sig, info, context);
}

static void install(void) {
  struct sigaction ours = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART};
  sigset_t open;
  sigemptyset(&ours.sa_mask);
  sigaddset(&ours.sa_mask, SIGPIPE);
  if (!installed && !real_sigaction(SIGSEGV, &ours, &theirs)) installed = 1;
  sigemptyset(&open);
  sigaddset(&open, SIGSEGV);
  real_sigmask(SIG_UNBLOCK, &open, NULL);
}

/* sigaction() of SIGSEGV by the program. */
int segv_action(const struct sigaction *act, struct sigaction *old) {
  pthread_mutex_lock(&lock);
  int error = 0;
  if (!installed) {
    error = real_sigaction(SIGSEGV, act, old);
  } else {
    struct sigaction was = theirs;
    if (act) theirs = *act;
    if (old) *old = was;
  }
  pthread_mutex_unlock(&lock);
  return error;
}

/* ---- mappings ---------------------------------------------------------------------------------------------------- */

static void *failed(int error) {
  errno = error;
  return MAP_FAILED;
}

/* Memory for the page: at `addr` as nobody may touch it, and once more for us. */
static void *place(struct doorbell *bell, void *addr, int flags) {
  size_t length = (bell->length + PAGE - 1) / PAGE * PAGE;
  int memory = memfd_create("tegrad-registers", MFD_CLOEXEC);
  void *page = MAP_FAILED;
  if (memory >= 0 && !ftruncate(memory, length)) {
    bell->shadow = real_mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
    if (bell->shadow != MAP_FAILED) {
      page = real_mmap(addr, length, PROT_NONE, MAP_SHARED | (flags & (MAP_FIXED | MAP_FIXED_NOREPLACE)), memory, 0);
      if (page == MAP_FAILED) real_munmap(bell->shadow, length);
    }
  }
  int saved = errno;
  if (memory >= 0) real_close(memory);
  errno = saved;
  if (page == MAP_FAILED) return page;
  madvise(bell->shadow, length, MADV_DONTFORK);
  madvise(page, length, MADV_DONTFORK);
  bell->length = length;
  return page;
}

/* mmap of a ctrl fd: the driver allows one per fd. MAP_FAILED with errno. */
void *map_registers(void *addr, size_t length, int prot, int flags, int fd, off_t offset) {
  struct message request = {.op = OP_MMAP_REGISTERS, .code = length, .value = offset}, answer;
  int error = call(fd, &request, &answer, 0);
  if (error) return failed(error);
  if (answer.code || answer.count != 2) {
    error = answer.code ? (int)answer.code : EPROTO;
    finish(&answer);
    return failed(error);
  }
  pthread_mutex_lock(&lock);
  int slot = 0;
  while (slot < DOORBELLS && doorbells[slot].start) slot++;
  void *page = MAP_FAILED;
  if (slot == DOORBELLS) {
    errno = ENOMEM;
  } else {
    struct doorbell *bell = &doorbells[slot];
    const char *facts = memchr(answer.payload, ':', answer.length);
    bell->length = length;
    bell->prot = prot;
    bell->class_id = facts ? strtoul(facts + 1, NULL, 10) : 0;
    page = place(bell, addr, flags);
    if (page != MAP_FAILED) {
      bell->pipe = keep_high(answer.fds[0]);
      bell->lease = keep_high(answer.fds[1]);
      answer.fds[0] = answer.fds[1] = -1;
      install();
      bell->start = (uintptr_t)page;
    }
  }
  pthread_mutex_unlock(&lock);
  int saved = errno;
  finish(&answer);
  errno = saved;
  return page;
}

static void forget(struct doorbell *bell) {
  bell->start = 0;
  real_munmap(bell->shadow, bell->length);
  real_close(bell->pipe);
  real_close(bell->lease);
  bell->pipe = bell->lease = -1;
}

/* The program unmaps a range, or maps something else there. Whether registers were in it. */
int forget_registers(uintptr_t start, uintptr_t end) {
  int found = 0;
  if (!installed) return 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < DOORBELLS; i++)
    if (doorbells[i].start && start < doorbells[i].start + doorbells[i].length && doorbells[i].start < end) {
      forget(&doorbells[i]);
      found = 1;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

/* Where our fds are kept; how many. */
unsigned doorbell_fds(int **into, unsigned room) {
  unsigned n = 0;
  for (int i = 0; i < DOORBELLS && n + 2 <= room; i++)
    if (doorbells[i].start) {
      into[n++] = &doorbells[i].pipe;
      into[n++] = &doorbells[i].lease;
    }
  return n;
}

/* Registers are not inherited by fork: a child must not hold its parent's mapping. */
void doorbells_forked(void) {
  pthread_mutex_init(&lock, NULL);
  for (int i = 0; i < DOORBELLS; i++)
    if (doorbells[i].start) {
      doorbells[i].start = 0;
      real_close(doorbells[i].pipe);
      real_close(doorbells[i].lease);
    }
}
