/* What every part of the oracle shares: the device without hardware, and the reading of a case's steps. */
#ifndef ORACLE_H
#define ORACLE_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <errno.h>

#include <nvgpu/gk20a.h>
#include <nvgpu/types.h>

#define MAX_ARGS 16

/* One step of a case: its name and its numbers. */
struct step {
	const char *op;
	int n;
	long long v[MAX_ARGS];
};

/* A kind of behaviour: `start` prepares fresh objects, `answer` carries out one step and prints one line. */
struct kind {
	const char *name;
	void (*start)(struct gk20a *g);
	void (*answer)(struct gk20a *g, const struct step *s);
};

extern FILE *answers;
extern long long result; /* what later steps of the case mean by `$N`, of step N */
extern const struct kind vm_kinds[], fifo_kinds[], gr_kinds[];

/* The registers, all zero until written. */
uint32_t reg_read(uint32_t address);
void reg_write(uint32_t address, uint32_t value);

/* fifo.c: channels and groups without engines behind them. */
void fifo_boot(struct gk20a *g);

/* Objects of a case, which the steps of `answer_group` make and name by their order. */
extern struct nvgpu_tsg *tsgs[];
extern struct nvgpu_channel *channels[];
void start_group(struct gk20a *g);
void answer_group(struct gk20a *g, const struct step *s);

/* gr.c: a graphics engine without hardware. */
void gr_boot(struct gk20a *g);

/* vm.c: what any address space needs. */
void vm_boot(struct gk20a *g);
struct vm_gk20a *new_vm(struct gk20a *g, u64 start, u64 end);

#define OP(name) (strcmp(s->op, name) == 0)
#define UNKNOWN() do { fprintf(answers, "unknown %s\n", s->op); } while (0)

#endif
