/* Address spaces: the allocators, areas, maps and page table entries of common/mm. */
#include "oracle.h"

#include <nvgpu/allocator.h>
#include <nvgpu/as.h>
#include <nvgpu/enabled.h>
#include <nvgpu/gmmu.h>
#include <nvgpu/kref.h>
#include <nvgpu/mm.h>
#include <nvgpu/nvgpu_mem.h>
#include <nvgpu/nvgpu_sgt.h>
#include <nvgpu/pd_cache.h>
#include <nvgpu/rbtree.h>
#include <nvgpu/vm.h>
#include <nvgpu/vm_area.h>

#define PAGE 4096ull
#define KERNEL_SIZE (1ull << 32)
#define BUFFERS 16

/* Numbers of MAP_BUFFER_EX, and what os/linux makes of them. */
#define MAP_FIXED 0x1
#define MAP_CACHEABLE 0x4
#define MAP_UNMAPPED_PTE 0x20
#define MAP_L3_ALLOC 0x80
#define MAP_COHERENT 0x200
#define MAP_ACCESS_SHIFT 10

static struct vm_gk20a *vm;
static struct { u64 size, phys; bool read_only; struct nvgpu_os_buffer os; } buffers[BUFFERS];

/* ---- the device ---- */

static int no_error(struct gk20a *g) { return 0; }
static int no_tlb(struct gk20a *g, struct nvgpu_mem *pdb) { return 0; }
static int no_flush(struct gk20a *g, bool invalidate) { return 0; }

void vm_boot(struct gk20a *g)
{
	nvgpu_ref_init(&g->refcount);
	g->mm.g = g;
	nvgpu_mutex_init(&g->mm.l2_op_lock);
	nvgpu_mutex_init(&g->mm.tlb_lock);
	g->ops.mm.get_default_va_sizes(NULL, &g->mm.channel.user_size, &g->mm.channel.kernel_size);
	g->mm.disable_bigpage = true; /* as with 4 KiB pages and no IOMMU in front of the GPU */
	g->cbc_use_raw_mode = true; /* as on every Orin, whose cache compresses by raw address */
	g->ops.fb.tlb_invalidate = no_tlb;
	g->ops.mm.cache.fb_flush = no_error;
	g->ops.mm.cache.l2_flush = no_flush;
	nvgpu_set_enabled(g, NVGPU_MM_UNIFIED_MEMORY, true);
	nvgpu_set_enabled(g, NVGPU_MM_UNIFY_ADDRESS_SPACES, true);
	nvgpu_set_enabled(g, NVGPU_HAS_SYNCPOINTS, true);
	nvgpu_set_enabled(g, NVGPU_MM_HONORS_APERTURE, true); /* os/linux's platform row of ga10b */
	if (nvgpu_pd_cache_init(g) != 0)
		exit(2);
}

/* ---- time goes by when the driver sleeps, and only then ---- */

static s64 now_ns = 1000000000;

s64 nvgpu_current_time_ns(void) { return now_ns; }
s64 nvgpu_current_time_ms(void) { return now_ns / 1000000; }
s64 nvgpu_current_time_us(void) { return now_ns / 1000; }
void nvgpu_msleep(unsigned int ms) { now_ns += ms * 1000000ll; }
void nvgpu_udelay(unsigned int us) { now_ns += us * 1000ll; }
void nvgpu_usleep_range(unsigned int least, unsigned int most) { now_ns += most * 1000ll; }

/* ---- what belongs to the operating system: which mapping is the same as one that there is (os/linux/vm.c's rule) ---- */

struct nvgpu_mapped_buf *nvgpu_vm_find_mapping(struct vm_gk20a *in, struct nvgpu_os_buffer *os, u64 address, u32 flags,
		s16 kind)
{
	struct nvgpu_mapped_buf *found = NULL;

	if (flags & NVGPU_VM_MAP_FIXED_OFFSET) {
		found = nvgpu_vm_find_mapped_buf(in, address);
		if (found != NULL && (found->os_priv.buf != os->buf || found->kind != (u8)kind))
			found = NULL;
	} else {
		struct nvgpu_rbtree_node *node = NULL;

		nvgpu_rbtree_enum_start(0, &node, in->mapped_buffers);
		while (node != NULL) {
			struct nvgpu_mapped_buf *one = mapped_buffer_from_rbtree_node(node);

			if (one->os_priv.buf == os->buf && one->kind == (u8)kind) {
				found = one;
				break;
			}
			nvgpu_rbtree_enum_next(&node, node);
		}
	}
	return found != NULL && found->flags == flags ? found : NULL;
}

void nvgpu_vm_unmap_system(struct nvgpu_mapped_buf *mapped) { }

/* ---- address spaces ---- */

struct vm_gk20a *new_vm(struct gk20a *g, u64 start, u64 end)
{
	struct gk20a_as_share *share;

	if (gk20a_as_alloc_share(g, 0, 0, start, end, 0, &share) != 0)
		return NULL;
	return share->vm;
}

static void print_address(u64 address)
{
	result = (long long)address;
	if (address == 0)
		fprintf(answers, "none\n");
	else
		fprintf(answers, "0x%llx\n", (unsigned long long)address);
}

static void answer_alloc(struct gk20a *g, const struct step *s)
{
	if (OP("space")) {
		vm = new_vm(g, s->v[0], s->v[1]);
		fprintf(answers, "%s\n", vm == NULL ? "none" : "made");
	} else if (OP("alloc")) {
		print_address(nvgpu_alloc_pte(vm->vma[GMMU_PAGE_SIZE_SMALL], s->v[0], PAGE));
	} else if (OP("fixed")) {
		print_address(nvgpu_alloc_fixed(vm->vma[GMMU_PAGE_SIZE_SMALL], s->v[0], s->v[1], PAGE));
	} else if (OP("free")) {
		nvgpu_free(vm->vma[GMMU_PAGE_SIZE_SMALL], s->v[0]);
		fprintf(answers, "0\n");
	} else if (OP("kernel")) {
		print_address(nvgpu_alloc(&vm->kernel, s->v[0]));
	} else if (OP("kfree")) {
		nvgpu_free(&vm->kernel, s->v[0]);
		fprintf(answers, "0\n");
	} else {
		UNKNOWN();
	}
}

static void answer_range(struct gk20a *g, const struct step *s)
{
	struct gk20a_as_share *share = NULL;
	int err = gk20a_as_alloc_share(g, s->v[0], 0, s->v[1], s->v[2], s->v[3], &share);

	if (err != 0)
		fprintf(answers, "%d\n", err);
	else
		fprintf(answers, "0x%llx 0x%llx 0x%llx 0x%llx\n",
			(unsigned long long)nvgpu_alloc_base(&share->vm->user),
			(unsigned long long)nvgpu_alloc_end(&share->vm->user),
			(unsigned long long)nvgpu_alloc_base(&share->vm->kernel),
			(unsigned long long)nvgpu_alloc_end(&share->vm->kernel));
}

/* ---- maps ---- */

static u32 core_flags(u32 flags)
{
	u32 core = flags & (3u << MAP_ACCESS_SHIFT);

	core |= flags & MAP_FIXED ? NVGPU_VM_MAP_FIXED_OFFSET : 0;
	core |= flags & MAP_CACHEABLE ? NVGPU_VM_MAP_CACHEABLE : 0;
	core |= flags & MAP_UNMAPPED_PTE ? NVGPU_VM_MAP_UNMAPPED_PTE : 0;
	core |= flags & MAP_L3_ALLOC ? NVGPU_VM_MAP_L3_ALLOC : 0;
	core |= flags & MAP_COHERENT ? NVGPU_VM_MAP_SYSTEM_COHERENT : 0;
	return core;
}

/* map BUFFER FLAGS ADDRESS OFFSET SIZE COMPR_KIND INCOMPR_KIND */
static void answer_map(struct gk20a *g, const struct step *s)
{
	int which = s->v[0], err;
	u32 flags = s->v[1];
	struct nvgpu_mapped_buf *made = NULL;
	struct nvgpu_mem_sgl list = { .phys = buffers[which].phys, .dma = 0, .length = buffers[which].size };
	struct nvgpu_mem memory = { };
	struct nvgpu_sgt *table;

	if (nvgpu_mem_posix_create_from_list(g, &memory, &list, 1) != 0)
		exit(2);
	table = nvgpu_sgt_create_from_mem(g, &memory);
	err = nvgpu_vm_map(vm, &buffers[which].os, table, s->v[2], s->v[4], s->v[3],
			buffers[which].read_only ? gk20a_mem_flag_read_only : gk20a_mem_flag_none,
			flags >> MAP_ACCESS_SHIFT & 3, core_flags(flags), (s16)s->v[5], (s16)s->v[6], NULL,
			flags & MAP_COHERENT ? APERTURE_SYSMEM_COH : APERTURE_SYSMEM, &made);
	if (err != 0) {
		fprintf(answers, "%d\n", err);
		return;
	}
	made->os_priv.buf = buffers[which].os.buf;
	print_address(made->addr);
}

static void answer_space(struct gk20a *g, const struct step *s)
{
	if (OP("space")) {
		answer_alloc(g, s);
	} else if (OP("buffer")) { /* number, size, read-only, physical address */
		int which = s->v[0];

		buffers[which].size = buffers[which].os.size = s->v[1];
		buffers[which].read_only = s->v[2];
		buffers[which].phys = s->v[3];
		buffers[which].os.buf = &buffers[which];
		fprintf(answers, "0\n");
	} else if (OP("area")) { /* pages, page size, flags (1 fixed, 2 sparse), address */
		u64 address = s->v[3];
		int err = nvgpu_vm_area_alloc(vm, s->v[0], s->v[1], &address, s->v[2]);

		if (err != 0)
			fprintf(answers, "%d\n", err);
		else
			print_address(address);
	} else if (OP("release")) {
		fprintf(answers, "%d\n", nvgpu_vm_area_free(vm, s->v[0]));
	} else if (OP("map")) {
		answer_map(g, s);
	} else if (OP("unmap")) {
		nvgpu_vm_unmap(vm, s->v[0], NULL);
		fprintf(answers, "0\n");
	} else if (OP("pte")) {
		u32 words[2] = { 0, 0 };
		int err = nvgpu_get_pte(g, vm, s->v[0], words);

		if (err != 0 || (words[0] | words[1]) == 0) /* no table, or nothing in it */
			fprintf(answers, "none\n");
		else
			fprintf(answers, "0x%llx\n", (unsigned long long)words[1] << 32 | words[0]);
	} else if (OP("mappings")) {
		struct nvgpu_rbtree_node *node = NULL;

		nvgpu_rbtree_enum_start(0, &node, vm->mapped_buffers);
		while (node != NULL) {
			struct nvgpu_mapped_buf *one = mapped_buffer_from_rbtree_node(node);

			fprintf(answers, "0x%llx+0x%llx ", (unsigned long long)one->addr, (unsigned long long)one->size);
			nvgpu_rbtree_enum_next(&node, node);
		}
		fprintf(answers, "\n");
	} else {
		UNKNOWN();
	}
}

const struct kind vm_kinds[] = {
	{ "va", NULL, answer_alloc },
	{ "range", NULL, answer_range },
	{ "area", NULL, answer_space },
	{ "map", NULL, answer_space },
	{ "pte", NULL, answer_space },
	{ NULL, NULL, NULL },
};
