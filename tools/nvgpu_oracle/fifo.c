/* Channels, groups, runlists, their timeouts and the host engine's interrupts: common/fifo and hal/fifo. */
#include "oracle.h"

#include <nvgpu/as.h>
#include <nvgpu/bitops.h>
#include <nvgpu/channel.h>
#include <nvgpu/cic_rm.h>
#include <nvgpu/device.h>
#include <nvgpu/dma.h>
#include <nvgpu/engines.h>
#include <nvgpu/enabled.h>
#include <nvgpu/error_notifier.h>
#include <nvgpu/fifo.h>
#include <nvgpu/fifo/userd.h>
#include <nvgpu/kref.h>
#include <nvgpu/pbdma_status.h>
#include <nvgpu/posix/posix-fault-injection.h>
#include <nvgpu/rc.h>
#include <nvgpu/runlist.h>
#include <nvgpu/timers.h>
#include <nvgpu/tsg.h>
#include <nvgpu/vm.h>
#include <nvgpu/watchdog.h>
#include "common/semaphore/semaphore_priv.h"

#define VMS 4
#define NOTIFIERS 512
#define PTIMER_HZ 31250000u
#define POLL_TIMEOUT_MS 3000u /* what os/linux starts with */
#define TIMEOUT_PERIOD_MS 100u

static struct vm_gk20a *vms[VMS];
struct nvgpu_tsg *tsgs[16];
struct nvgpu_channel *channels[256];
static int n_tsgs, n_channels;
static int buffers_error;
static int notified[NOTIFIERS];

/* ---- the device ---- */

static int init_ce_info(struct nvgpu_fifo *f) { return 0; }
static void init_enginfo(struct gk20a *g, struct nvgpu_fifo *f) { }
static void get_pbdma_info(struct gk20a *g, u32 base, struct nvgpu_pbdma_info *info) { memset(info, 0, sizeof(*info)); }
static u32 one_engine(struct gk20a *g, u32 runlist, u32 rleng) { return runlist; }
static int runlist_update(struct gk20a *g, struct nvgpu_runlist *rl, struct nvgpu_channel *ch, bool add, bool wait)
{
	return 0;
}
static int runlist_reload(struct gk20a *g, struct nvgpu_runlist *rl, struct nvgpu_runlist_domain *domain, bool add,
		bool wait)
{
	return 0;
}
static int preempt(struct gk20a *g, struct nvgpu_tsg *tsg) { return 0; }
static u32 sixteen(struct gk20a *g) { return 16; }
static u32 channel_count(struct gk20a *g) { return 512; } /* os/linux has more syncpoints than that */
static void no_tlb_flush(struct gk20a *g) { }
static void channel_bit(struct nvgpu_channel *ch) { }
static void channel_clear(struct gk20a *g, u32 runlist, u32 chid) { }
static void tsg_bit(struct nvgpu_tsg *tsg) { }
static void hw_idle(struct gk20a *g, u32 runlist, u32 chid, struct nvgpu_channel_hw_state *state)
{
	memset(state, 0, sizeof(*state));
}
static int ramfc_setup(struct nvgpu_channel *ch, u64 base, u32 entries, u64 timeout, u32 flags) { return 0; }
static int subctx_hw(struct nvgpu_channel *ch, bool replayable) { return 0; }

static int usermode_buffers(struct nvgpu_channel *ch, struct nvgpu_setup_bind_args *args)
{
	if (buffers_error != 0)
		return buffers_error;
	if (nvgpu_dma_alloc_sys(ch->g, 4096, &ch->usermode_userd) != 0)
		return -ENOMEM;
	return nvgpu_dma_alloc_map_sys(ch->vm, 4096, &ch->usermode_gpfifo);
}

static void usermode_free(struct nvgpu_channel *ch)
{
	nvgpu_dma_free(ch->g, &ch->usermode_userd);
}

/* The number that os/linux writes for each of the driver's own error numbers. */
static int user_code(u32 error)
{
	switch (error) {
	case NVGPU_ERR_NOTIFIER_FIFO_ERROR_IDLE_TIMEOUT: return 8;
	case NVGPU_ERR_NOTIFIER_GR_ERROR_SW_METHOD: return 12;
	case NVGPU_ERR_NOTIFIER_GR_ERROR_SW_NOTIFY: return 13;
	case NVGPU_ERR_NOTIFIER_GR_EXCEPTION: return 13;
	case NVGPU_ERR_NOTIFIER_GR_SEMAPHORE_TIMEOUT: return 24;
	case NVGPU_ERR_NOTIFIER_GR_ILLEGAL_NOTIFY: return 25;
	case NVGPU_ERR_NOTIFIER_FIFO_ERROR_MMU_ERR_FLT: return 31;
	case NVGPU_ERR_NOTIFIER_PBDMA_ERROR: return 32;
	case NVGPU_ERR_NOTIFIER_FECS_ERR_UNIMP_FIRMWARE_METHOD: return 37;
	case NVGPU_ERR_NOTIFIER_RESETCHANNEL_VERIF_ERROR: return 43;
	case NVGPU_ERR_NOTIFIER_PBDMA_PUSHBUFFER_CRC_MISMATCH: return 80;
	default: return -(int)error;
	}
}

static void notify(struct nvgpu_channel *ch, u32 error)
{
	if (notified[ch->chid] == 0)
		notified[ch->chid] = user_code(error);
}

/* In place of the engines' reset: what it leaves of the channels. */
void nvgpu_rc_tsg_and_related_engines(struct gk20a *g, struct nvgpu_tsg *tsg, bool dump, u32 type)
{
	nvgpu_tsg_set_unserviceable(g, tsg);
}

void nvgpu_report_err_to_sdl(struct gk20a *g, u32 unit, u32 error) { }

static void read_status(struct gk20a *g, u32 pbdma, struct nvgpu_pbdma_status_info *status)
{
	memset(status, 0, sizeof(*status));
	status->chsw_status = NVGPU_PBDMA_CHSW_STATUS_VALID;
	status->id = tsgs[0]->tsgid;
	status->id_type = PBDMA_STATUS_ID_TYPE_TSGID;
}

static void add_device(struct gk20a *g, u32 type, u32 engine, u32 runlist)
{
	struct nvgpu_device *dev = calloc(1, sizeof(*dev));

	dev->type = type;
	dev->engine = true;
	dev->engine_id = engine;
	dev->runlist_id = runlist;
	dev->inst_id = engine;
	nvgpu_init_list_node(&dev->dev_list_node);
	nvgpu_list_add_tail(&dev->dev_list_node, &g->devs->devlist_heads[type]);
	g->devs->dev_counts[type]++;
	g->fifo.host_engines[engine] = dev;
	g->fifo.active_engines[g->fifo.num_engines++] = dev;
}

static void set_operations(struct gk20a *g)
{
	g->ops.engine.init_ce_info = init_ce_info;
	g->ops.runlist.init_enginfo = init_enginfo;
	g->ops.runlist.get_pbdma_info = get_pbdma_info;
	g->ops.runlist.update = runlist_update;
	g->ops.runlist.reload = runlist_reload;
	g->ops.fifo.preempt_tsg = preempt;
	g->ops.gr.init.get_no_of_sm = sixteen;
	g->ops.gr.intr.flush_channel_tlb = no_tlb_flush;
	g->ops.tsg.init_eng_method_buffers = NULL;
	g->ops.tsg.deinit_eng_method_buffers = NULL;
	g->ops.tsg.bind_channel_eng_method_buffers = NULL;
	g->ops.tsg.enable = tsg_bit;
	g->ops.tsg.add_subctx_channel_hw = subctx_hw;
	g->ops.tsg.remove_subctx_channel_hw = NULL;
	g->ops.channel.count = channel_count;
	g->ops.channel.enable = channel_bit;
	g->ops.channel.disable = channel_bit;
	g->ops.channel.clear = channel_clear;
	g->ops.channel.read_state = hw_idle;
	g->ops.channel.set_error_notifier = notify;
	g->ops.ramfc.setup = ramfc_setup;
	g->ops.pbdma_status.read_pbdma_status_info = read_status;
	g->os_channel.alloc_usermode_buffers = usermode_buffers;
	g->os_channel.free_usermode_buffers = usermode_free;
}

void fifo_boot(struct gk20a *g)
{
	struct nvgpu_fifo *f = &g->fifo;
	int i;

	set_operations(g);
	f->g = g;
	g->poll_timeout_default = POLL_TIMEOUT_MS;
	g->ctxsw_timeout_period_ms = TIMEOUT_PERIOD_MS;
	g->runlist_interleave = true;
	g->tsg_timeslice_min_us = NVGPU_TSG_TIMESLICE_MIN_US;
	g->tsg_timeslice_max_us = NVGPU_TSG_TIMESLICE_MAX_US;
	g->ptimer_src_freq = PTIMER_HZ;
	nvgpu_set_enabled(g, NVGPU_SUPPORT_TSG_SUBCONTEXTS, true);
	nvgpu_set_enabled(g, NVGPU_SUPPORT_VPR, true);
	nvgpu_rwsem_init(&g->deterministic_busy);
	nvgpu_mutex_init(&g->dbg_sessions_lock);
	g->devs = calloc(1, sizeof(*g->devs));
	for (i = 0; i < NVGPU_MAX_DEVTYPE; i++)
		nvgpu_init_list_node(&g->devs->devlist_heads[i]);
	f->host_engines = calloc(16, sizeof(*f->host_engines));
	f->active_engines = calloc(16, sizeof(*f->active_engines));
	f->max_engines = 16;
	add_device(g, NVGPU_DEVTYPE_GRAPHICS, 0, 0);
	add_device(g, NVGPU_DEVTYPE_LCE, 1, 1);
	if (nvgpu_channel_setup_sw(g) != 0 || nvgpu_tsg_setup_sw(g) != 0 || nvgpu_runlist_setup_sw(g) != 0
			|| nvgpu_userd_init_slabs(g) != 0)
		exit(2);
	if (nvgpu_cic_rm_setup(g) != 0 || nvgpu_cic_rm_init_vars(g) != 0)
		exit(2);
	f->active_runlists[0].eng_bitmask = 1;
	f->active_runlists[1].eng_bitmask = 2;
}

/* ---- objects of a case ---- */

void start_group(struct gk20a *g)
{
	int i;

	for (i = 0; i < VMS; i++)
		vms[i] = new_vm(g, 0x200000, 0xff00000000);
}

static int open_tsg(struct gk20a *g)
{
	struct nvgpu_tsg *tsg = nvgpu_tsg_open(g, 1);

	tsgs[n_tsgs++] = tsg;
	return tsg == NULL ? -1 : (int)tsg->tsgid;
}

static int open_channel(struct gk20a *g, int runlist)
{
	struct nvgpu_channel *ch = nvgpu_channel_open_new(g, runlist, false, 1, 1);

	channels[n_channels++] = ch;
	if (ch == NULL)
		return -1;
	notified[ch->chid] = 0;
	return ch->chid;
}

/* What os/linux does in BIND_CHANNEL_EX; a veid of -1 is BIND_CHANNEL. */
static int bind_channel(struct gk20a *g, struct nvgpu_tsg *tsg, struct nvgpu_channel *ch, int veid)
{
	int err;

	if (veid >= 0) {
		if ((u32)veid >= g->ops.gr.init.get_max_subctx_count())
			return -EINVAL;
		ch->subctx_id = veid;
		if (ch->subctx_id > CHANNEL_INFO_VEID0)
			ch->runqueue_sel = 1;
	}
	err = nvgpu_tsg_create_sync_subcontext_internal(g, tsg, ch);
	if (err == 0)
		err = nvgpu_tsg_validate_ch_subctx_vm(g, tsg, ch);
	return err != 0 ? err : nvgpu_tsg_bind_channel(tsg, ch);
}

static int unbind_channel(struct nvgpu_tsg *tsg, struct nvgpu_channel *ch)
{
	int err;

	if (tsg != nvgpu_tsg_from_ch(ch))
		return -EINVAL;
	err = nvgpu_tsg_unbind_channel(tsg, ch, false);
	if (err != -EAGAIN)
		nvgpu_channel_set_unserviceable(ch);
	return err;
}

static bool in_use(struct nvgpu_tsg *tsg)
{
	return tsg->in_use;
}

/* ---- groups and channels ---- */

void answer_group(struct gk20a *g, const struct step *s)
{
	struct nvgpu_tsg *tsg = tsgs[s->v[0] & 15];
	struct nvgpu_channel *ch;

	if (OP("tsg")) {
		fprintf(answers, "%d\n", open_tsg(g));
	} else if (OP("channel")) { /* runlist */
		fprintf(answers, "%d\n", open_channel(g, s->v[0]));
	} else if (OP("as")) { /* channel, vm */
		fprintf(answers, "%d\n", g->ops.mm.vm_bind_channel(vms[s->v[1]], channels[s->v[0]]));
	} else if (OP("sub")) { /* tsg, type, vm */
		u32 veid = 0;
		int err = nvgpu_tsg_create_subcontext(g, tsg, s->v[1], vms[s->v[2]],
				g->ops.gr.init.get_max_subctx_count(), &veid);

		fprintf(answers, "%d\n", err != 0 ? err : (int)veid);
	} else if (OP("del")) { /* tsg, veid */
		fprintf(answers, "%d\n", nvgpu_tsg_user_delete_subcontext(g, tsg,
				g->ops.gr.init.get_max_subctx_count(), s->v[1]));
	} else if (OP("bind")) { /* tsg, channel, veid */
		fprintf(answers, "%d\n", bind_channel(g, tsg, channels[s->v[1]], (int)s->v[2]));
	} else if (OP("unbind")) { /* tsg, channel */
		fprintf(answers, "%d\n", unbind_channel(tsg, channels[s->v[1]]));
	} else if (OP("close")) { /* channel */
		nvgpu_channel_close(channels[s->v[0]]);
		fprintf(answers, "0\n");
	} else if (OP("drop")) { /* tsg */
		nvgpu_ref_put(&tsg->refcount, nvgpu_tsg_release);
		fprintf(answers, "%d\n", in_use(tsg));
	} else if (OP("serves")) { /* channel */
		fprintf(answers, "%d\n", !nvgpu_channel_check_unserviceable(channels[s->v[0]]));
	} else if (OP("members")) { /* tsg */
		fprintf(answers, "%u", tsg->ch_count);
		nvgpu_list_for_each_entry(ch, &tsg->ch_list, nvgpu_channel, ch_entry)
			fprintf(answers, " %u:%u", ch->chid, ch->subctx_id);
		fprintf(answers, "\n");
	} else {
		UNKNOWN();
	}
}

/* ---- runlists ---- */

static void answer_schedule(struct gk20a *g, const struct step *s)
{
	struct nvgpu_tsg *tsg = tsgs[s->v[0] & 15];

	if (OP("level")) { /* tsg, level */
		fprintf(answers, "%d\n", nvgpu_tsg_set_interleave(tsg, s->v[1]));
	} else if (OP("timeslice")) { /* tsg, microseconds */
		fprintf(answers, "%d\n", g->ops.tsg.set_timeslice(tsg, s->v[1]));
	} else if (OP("gettimeslice")) {
		fprintf(answers, "%u\n", nvgpu_tsg_get_timeslice(tsg));
	} else if (OP("runlist")) { /* prints the groups in the order of their entries */
		struct nvgpu_runlist_domain *domain = g->fifo.active_runlists[0].shadow_rl_domain;
		u32 *entry = domain->mem->mem.cpu_va, count, i;
		int t;

		memset(domain->active_tsgs, 0, 64);
		memset(domain->active_channels, 0, 64);
		for (t = 0; t < n_tsgs; t++) {
			struct nvgpu_channel *ch;

			nvgpu_list_for_each_entry(ch, &tsgs[t]->ch_list, nvgpu_channel, ch_entry) {
				nvgpu_set_bit(ch->chid, domain->active_channels);
				nvgpu_set_bit(tsgs[t]->tsgid, domain->active_tsgs);
			}
		}
		count = nvgpu_runlist_construct_locked(&g->fifo, domain, g->fifo.num_runlist_entries);
		if (count == RUNLIST_APPEND_FAILURE) {
			fprintf(answers, "full\n");
			return;
		}
		fprintf(answers, "order");
		for (i = 0; i < count; i++, entry += g->fifo.runlist_entry_size / sizeof(u32))
			if (entry[0] & 1) /* a group's entry */
				fprintf(answers, " %u", entry[2] & 0xfff);
		fprintf(answers, "\n");
	} else {
		answer_group(g, s);
	}
}

/* ---- setting channels up ---- */

static void answer_setup(struct gk20a *g, const struct step *s)
{
	if (OP("wdt")) { /* channel, on */
		if (s->v[1])
			nvgpu_channel_wdt_enable(channels[s->v[0]]->wdt);
		else
			nvgpu_channel_wdt_disable(channels[s->v[0]]->wdt);
		fprintf(answers, "0\n");
	} else if (OP("setup")) { /* channel, entries, flags, what the buffers of os/linux fail with, no memory */
		struct nvgpu_setup_bind_args args = { .num_gpfifo_entries = s->v[1], .flags = 0 };
		u32 user = s->v[2];
		struct nvgpu_posix_fault_inj *fault = nvgpu_dma_alloc_get_fault_injection();
		int err;

		args.flags |= user & 0x1 ? NVGPU_SETUP_BIND_FLAGS_SUPPORT_VPR : 0;
		args.flags |= user & 0x2 ? NVGPU_SETUP_BIND_FLAGS_SUPPORT_DETERMINISTIC : 0;
		args.flags |= user & 0x4 ? NVGPU_SETUP_BIND_FLAGS_REPLAYABLE_FAULTS_ENABLE : 0;
		args.flags |= user & 0x8 ? NVGPU_SETUP_BIND_FLAGS_USERMODE_SUPPORT : 0;
		buffers_error = (int)s->v[3];
		nvgpu_posix_enable_fault_injection(fault, s->v[4] != 0, 0);
		err = nvgpu_channel_setup_bind(channels[s->v[0]], &args);
		nvgpu_posix_enable_fault_injection(fault, false, 0);
		if (err != 0)
			fprintf(answers, "%d\n", err);
		else
			fprintf(answers, "0x%x\n", g->ops.usermode.doorbell_token(channels[s->v[0]]));
	} else {
		answer_group(g, s);
	}
}

/* ---- faults ---- */

static void print_notified(struct nvgpu_tsg *tsg)
{
	int i;

	for (i = 0; i < n_channels; i++)
		fprintf(answers, " %d:%d", notified[channels[i]->chid],
			!nvgpu_channel_check_unserviceable(channels[i]));
	fprintf(answers, "\n");
}

static void answer_fault(struct gk20a *g, const struct step *s)
{
	struct nvgpu_tsg *tsg = tsgs[0];

	if (OP("limit")) { /* channel, ms: SET_TIMEOUT */
		channels[s->v[0]]->ctxsw_timeout_max_ms = s->v[1];
		fprintf(answers, "0\n");
	} else if (OP("period")) { /* one more period without a switch */
		bool dump = false;
		u32 ms = 0;
		bool recover = g->ops.tsg.check_ctxsw_timeout(tsg, &dump, &ms);

		if (recover) {
			nvgpu_tsg_set_error_notifier(g, tsg, NVGPU_ERR_NOTIFIER_FIFO_ERROR_IDLE_TIMEOUT);
			nvgpu_rc_tsg_and_related_engines(g, tsg, true, RC_TYPE_CTXSW_TIMEOUT);
			fprintf(answers, "%u", ms);
		} else {
			fprintf(answers, "-");
		}
		print_notified(tsg);
	} else if (OP("reset")) { /* channel: FORCE_RESET */
		fprintf(answers, "%d", nvgpu_tsg_force_reset_ch(channels[s->v[0]],
				NVGPU_ERR_NOTIFIER_RESETCHANNEL_VERIF_ERROR, true));
		print_notified(tsg);
	} else if (OP("host")) { /* PBDMA_INTR_0, PBDMA_INTR_1 of the host engine that runs the first group */
		u32 code = NVGPU_ERR_NOTIFIER_PBDMA_ERROR;
		bool recover = false;
		struct nvgpu_pbdma_status_info status;

		read_status(g, 0, &status);
		if (s->v[0] != 0)
			recover = g->ops.pbdma.handle_intr_0(g, 0, s->v[0], &code);
		if (!recover && s->v[1] != 0) {
			reg_write(0x40148, s->v[1]); /* PBDMA_INTR_1 of the first, which the driver reads again */
			recover = g->ops.pbdma.handle_intr_1(g, 0, s->v[1], &code);
		}
		if (recover)
			nvgpu_rc_pbdma_fault(g, 0, code, &status);
		fprintf(answers, "%d", recover);
		print_notified(tsg);
	} else {
		answer_group(g, s);
	}
}

/* ---- arithmetic ---- */

static void answer_number(struct gk20a *g, const struct step *s)
{
	if (OP("released")) { /* threshold, value of the counter */
		fprintf(answers, "%d\n", nvgpu_semaphore_value_released(s->v[0], s->v[1]));
	} else if (OP("token")) { /* channel number, runlist */
		struct nvgpu_runlist runlist = { .id = s->v[1] };
		struct nvgpu_channel ch = { .g = g, .chid = s->v[0], .runlist = &runlist };

		fprintf(answers, "0x%x\n", g->ops.usermode.doorbell_token(&ch));
	} else {
		UNKNOWN();
	}
}

const struct kind fifo_kinds[] = {
	{ "group", start_group, answer_group },
	{ "numbers", start_group, answer_group },
	{ "runlist", start_group, answer_schedule },
	{ "setup", start_group, answer_setup },
	{ "fault", start_group, answer_fault },
	{ "number", NULL, answer_number },
	{ NULL, NULL, NULL },
};
