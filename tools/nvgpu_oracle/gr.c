/* Engine objects and preemption modes: common/gr and hal/class. */
#include "oracle.h"

/* The check of the modes that ALLOC_OBJ_CTX asks for is static there; the rest of that function needs an engine. */
#define nvgpu_gr_obj_ctx_alloc obj_ctx_alloc_with_an_engine
#include "common/gr/obj_ctx.c"
#undef nvgpu_gr_obj_ctx_alloc

#include <nvgpu/gr/setup.h>
#include <nvgpu/grmgr.h>
#include "common/gr/gr_priv.h"

static int image_compute; /* what the context's image was told */

static void set_cilp(struct gk20a *g, struct nvgpu_mem *image) { image_compute = 4; }
static void set_cta(struct gk20a *g, struct nvgpu_mem *image) { image_compute = 2; }
static void set_gfxp(struct gk20a *g, struct nvgpu_mem *image) { }
static void set_zcull(struct gk20a *g, struct nvgpu_mem *image, u32 mode) { }
static void set_zcull_ptr(struct gk20a *g, struct nvgpu_mem *image, u64 va) { }
static u32 some(struct gk20a *g) { return 4096; }
static u32 some_attrib(struct gk20a *g, u32 betacb, u32 tpcs, u32 most) { return 4096; }
static u32 commit_manager(struct gk20a *g, struct nvgpu_gr_config *config, struct nvgpu_gr_ctx *ctx, bool patch)
{
	return 0;
}

void nvgpu_gr_ctx_patch_write_begin(struct gk20a *g, struct nvgpu_gr_ctx *ctx, bool count) { }
void nvgpu_gr_ctx_patch_write_end(struct gk20a *g, struct nvgpu_gr_ctx *ctx, bool count) { }
int nvgpu_gr_ctx_alloc_ctx_preemption_buffers(struct gk20a *g, struct nvgpu_gr_ctx_desc *desc, struct nvgpu_gr_ctx *ctx)
{
	return 0;
}
int nvgpu_gr_ctx_mappings_map_ctx_preemption_buffers(struct gk20a *g, struct nvgpu_gr_ctx *ctx,
		struct nvgpu_tsg_subctx *subctx, struct nvgpu_gr_ctx_mappings *mappings)
{
	return 0;
}
void nvgpu_gr_subctx_zcull_setup(struct gk20a *g, struct nvgpu_gr_subctx *subctx, struct nvgpu_gr_ctx *ctx) { }
int nvgpu_gr_subctx_setup_header(struct gk20a *g, struct nvgpu_gr_subctx *subctx, struct vm_gk20a *vm) { return 0; }

/* Of making a context: the modes that it starts with, and what its image is told of them. */
int nvgpu_gr_obj_ctx_alloc(struct gk20a *g, struct nvgpu_gr_obj_ctx_golden_image *golden,
		struct nvgpu_gr_global_ctx_buffer_desc *global, struct nvgpu_gr_ctx_desc *desc,
		struct nvgpu_gr_config *config, struct nvgpu_gr_ctx *ctx, struct nvgpu_channel *ch,
		struct nvgpu_tsg_subctx *subctx, struct nvgpu_gr_ctx_mappings *mappings, struct nvgpu_mem *inst,
		u32 class_num, u32 flags, bool cde, bool vpr)
{
	int err = nvgpu_gr_obj_ctx_init_ctxsw_preemption(g, ch, config, desc, ctx, class_num, flags);

	if (err == 0)
		nvgpu_gr_obj_ctx_update_ctxsw_preemption_mode(g, config, ctx, subctx, mappings);
	return err;
}

void gr_boot(struct gk20a *g)
{
	int i;

	g->gr = calloc(1, sizeof(*g->gr));
	g->num_gr_instances = 1;
	g->gr->g = g;
	g->gr->config = calloc(1, 1 << 16);
	g->gr->gr_ctx_desc = nvgpu_gr_ctx_desc_alloc(g);
	for (i = 0; i < NVGPU_GR_CTX_COUNT; i++)
		nvgpu_gr_ctx_set_size(g->gr->gr_ctx_desc, i, 4096);
	g->ops.gr.init.get_ctx_spill_size = some;
	g->ops.gr.init.get_ctx_pagepool_size = some;
	g->ops.gr.init.get_ctx_betacb_size = some;
	g->ops.gr.init.get_ctx_attrib_cb_size = some_attrib;
	g->ops.gr.init.get_gfxp_rtv_cb_size = NULL;
	g->ops.gr.init.commit_global_cb_manager = commit_manager;
	g->ops.gr.ctxsw_prog.set_compute_preemption_mode_cilp = set_cilp;
	g->ops.gr.ctxsw_prog.set_compute_preemption_mode_cta = set_cta;
	g->ops.gr.ctxsw_prog.set_graphics_preemption_mode_gfxp = set_gfxp;
	g->ops.gr.ctxsw_prog.set_zcull = set_zcull;
	g->ops.gr.ctxsw_prog.set_zcull_ptr = set_zcull_ptr;
	g->ops.gr.fecs_trace.bind_channel = NULL;
	g->ops.gr.fecs_trace.unbind_channel = NULL;
	g->ops.perf.get_num_hwpm_perfmon = NULL;
	g->ops.gr.setup.free_gr_ctx = NULL;
}

static void answer_object(struct gk20a *g, const struct step *s)
{
	if (OP("object")) { /* channel, class, flags (1 << 1 GFXP, 1 << 2 CILP) */
		u32 flags = (s->v[2] & 2 ? NVGPU_OBJ_CTX_FLAGS_SUPPORT_GFXP : 0)
			| (s->v[2] & 4 ? NVGPU_OBJ_CTX_FLAGS_SUPPORT_CILP : 0);

		if (nvgpu_tsg_from_ch(channels[s->v[0]]) == NULL) { /* what os/linux asks first */
			fprintf(answers, "%d\n", -EINVAL);
			return;
		}
		fprintf(answers, "%d\n", g->ops.gr.setup.alloc_obj_ctx(channels[s->v[0]], s->v[1], flags));
	} else if (OP("modes")) { /* channel, graphics, compute */
		fprintf(answers, "%d\n", g->ops.gr.setup.set_preemption_mode(channels[s->v[0]], s->v[1], s->v[2], 0));
	} else if (OP("zcull")) { /* channel, address, mode */
		fprintf(answers, "%d\n", g->ops.gr.setup.bind_ctxsw_zcull(g, channels[s->v[0]], s->v[1], s->v[2]));
	} else if (OP("image")) {
		fprintf(answers, "%u %u %d\n", nvgpu_gr_ctx_get_graphics_preemption_mode(tsgs[0]->gr_ctx),
			nvgpu_gr_ctx_get_compute_preemption_mode(tsgs[0]->gr_ctx), image_compute);
	} else {
		answer_group(g, s);
	}
}

static void answer_class(struct gk20a *g, const struct step *s)
{
	fprintf(answers, "%d %d %d\n", g->ops.gpu_class.is_valid(s->v[0]), g->ops.gpu_class.is_valid_compute(s->v[0]),
		g->ops.gpu_class.is_valid_gfx(s->v[0]));
}

const struct kind gr_kinds[] = {
	{ "object", start_group, answer_object },
	{ "class", NULL, answer_class },
	{ NULL, NULL, NULL },
};
