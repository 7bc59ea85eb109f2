/*
 * Asks NVIDIA's own nvgpu code, built for user space, how it behaves: reads cases as lines, prints one answer per step.
 *
 *     case KIND        begins a case: a child process with fresh objects takes the lines up to `end`
 *     OP NUMBER...     a step; `$3` is the address that step 3 answered (or 0), `$3+4096` one after it
 *     end
 *
 * A case that ends the child (an assertion of the driver) is answered with `crash` for the steps that are left.
 */
#include "oracle.h"

#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nvgpu/enabled.h>
#include <nvgpu/posix/io.h>
#include <nvgpu/posix/posix-fault-injection.h>
#include <nvgpu/posix/probe.h>

#define BOOT_0 0x0u
#define GA10B_BOOT_0 0x17b000a1u

FILE *answers;
long long result;

/* ---- registers: read by the driver through this pair of functions of its POSIX port, which are replaced here ---- */

#define SLOTS (1u << 14)
static struct { uint32_t address, value; bool used; } registers[SLOTS];

static uint32_t slot_of(uint32_t address)
{
	uint32_t at = (address * 2654435761u) % SLOTS;

	while (registers[at].used && registers[at].address != address)
		at = (at + 1) % SLOTS;
	return at;
}

uint32_t reg_read(uint32_t address)
{
	uint32_t at = slot_of(address);

	return registers[at].used ? registers[at].value : 0;
}

void reg_write(uint32_t address, uint32_t value)
{
	uint32_t at = slot_of(address);

	registers[at].address = address;
	registers[at].value = value;
	registers[at].used = true;
}

u32 nvgpu_posix_io_readl_reg_space(struct gk20a *g, u32 address)
{
	return reg_read(address);
}

void nvgpu_posix_io_writel_reg_space(struct gk20a *g, u32 address, u32 value)
{
	reg_write(address, value);
}

/* ---- what the POSIX port lacks in the full profile ---- */

int nvgpu_cic_mon_init_epl(struct gk20a *g) { return 0; }
u64 nvgpu_current_unix_time_us(void) { return 0; }
uintptr_t nvgpu_io_map(struct gk20a *g, uintptr_t address, size_t size) { return 0; }
void nvgpu_io_unmap(struct gk20a *g, uintptr_t address, size_t size) { }
int nvgpu_get_mock_reglist_gv11b(struct gk20a *g, u32 r, struct nvgpu_mock_iospace *s) { return -ENOENT; }
int nvgpu_get_mock_reglist_ga10b(struct gk20a *g, u32 r, struct nvgpu_mock_iospace *s) { return -ENOENT; }

/* ---- cases ---- */

#define MAX_STEPS 512
#define MAX_LINE 512
static char lines[MAX_STEPS][MAX_LINE];

static const struct kind *find(const char *name)
{
	const struct kind *tables[] = { vm_kinds, fifo_kinds, gr_kinds };
	size_t t;

	for (t = 0; t < sizeof(tables) / sizeof(*tables); t++) {
		const struct kind *k;

		for (k = tables[t]; k->name != NULL; k++)
			if (strcmp(k->name, name) == 0)
				return k;
	}
	return NULL;
}

static long long results[MAX_STEPS];

static long long number(const char *word)
{
	char *rest;
	unsigned long long value;

	if (*word != '$')
		return (long long)strtoull(word, NULL, 0);
	value = (unsigned long long)results[strtoul(word + 1, &rest, 10) % MAX_STEPS];
	return (long long)(*rest == '+' ? value + strtoull(rest + 1, NULL, 0) : value);
}

static void take_apart(char *line, struct step *s)
{
	char *rest, *word = strtok_r(line, " \n", &rest);

	s->op = word;
	s->n = 0;
	while (s->n < MAX_ARGS && (word = strtok_r(NULL, " \n", &rest)) != NULL)
		s->v[s->n++] = number(word);
	memset(&s->v[s->n], 0, sizeof(s->v[0]) * (MAX_ARGS - s->n));
}

static void run(struct gk20a *g, const struct kind *k, int steps)
{
	int i, status = 0, made = 0;
	int ends[2];
	char buffer[1 << 16];
	ssize_t got;
	pid_t child;

	if (pipe(ends) != 0)
		exit(2);
	child = fork();
	if (child == 0) {
		close(ends[0]);
		answers = fdopen(ends[1], "w");
		setvbuf(answers, NULL, _IOLBF, 0);
		if (k->start != NULL)
			k->start(g);
		for (i = 0; i < steps; i++) {
			struct step s;

			take_apart(lines[i], &s);
			result = 0;
			k->answer(g, &s);
			results[i] = result;
		}
		fflush(answers);
		_exit(0);
	}
	close(ends[1]);
	while ((got = read(ends[0], buffer, sizeof(buffer))) > 0) {
		for (i = 0; i < got; i++)
			made += buffer[i] == '\n';
		fwrite(buffer, 1, got, answers);
	}
	close(ends[0]);
	waitpid(child, &status, 0);
	for (i = made; i < steps; i++)
		fprintf(answers, "crash\n");
	fprintf(answers, "end %d\n", status);
	fflush(answers);
}

int main(void)
{
	char line[MAX_LINE];
	const struct kind *k = NULL;
	static struct nvgpu_posix_fault_inj_container faults; /* of this thread; none is ever injected */
	struct gk20a *g;
	int steps = 0, out = dup(1), silence = open("/dev/null", O_WRONLY);

	answers = fdopen(out, "w");
	if (getenv("ORACLE_LOG") == NULL) {
		dup2(silence, 1);
		dup2(silence, 2);
	}
	nvgpu_posix_init_fault_injection(&faults);
	reg_write(BOOT_0, GA10B_BOOT_0);
	g = nvgpu_posix_probe();
	if (g == NULL)
		return 2;
	vm_boot(g);
	fifo_boot(g);
	gr_boot(g);
	fprintf(answers, "ready %s\n", g->name);
	fflush(answers);
	while (fgets(line, sizeof(line), stdin) != NULL) {
		if (strncmp(line, "case ", 5) == 0) {
			line[strcspn(line, "\n")] = 0;
			k = find(line + 5);
			if (k == NULL)
				return 3;
			steps = 0;
		} else if (strcmp(line, "end\n") == 0) {
			run(g, k, steps);
		} else if (steps < MAX_STEPS) {
			strcpy(lines[steps++], line);
		} else {
			return 4;
		}
	}
	fflush(answers);
	_exit(0); /* not exit: the coverage counters of the library would be written */
}
