"""The scheduler in compiled code: runs warps of a CTA, barriers, and CTAs on one host thread.

A worker keeps CTAs resident in slots. It runs one until it ends; a CTA in which every ready warp used up its back-edge
budget gives way to the next resident CTA or to a new one, so that CTAs may wait for each other. A launch that is asked
to give way keeps its CTAs where they are and sleeps: at once, or as soon as no resident CTA is left to finish.
"""

from tegrad.ptx.bulk import BEGIN, END, HOLD, ON
from tegrad.ptx.helpers import family, function
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import (
    ALL_LANES,
    BACK_EDGES,
    BARRIERS,
    LANES,
    STACK_ALIGN,
    Flag,
    Frame,
    Launch,
    Slot,
    Status,
    WarpState,
    Worker,
)  # fmt: skip

COPIES = (Frame.COPY_HEAD, Frame.COPY_COUNT, Frame.COPY_GROUP, Frame.COPY_ARRIVES)
NAP_US = 200
"""How long a launch that gave way sleeps before it looks whether it may go on."""


@function("i1", "ptr launch", "alwaysinline")
def tgx_stopped(f: Fn, launch: V) -> V:
    """Whether the launch has faulted or was aborted."""
    state = f.op("i32", 1, f"load atomic i32, {f.gep(launch, Launch.FAULT_STATE)} monotonic, align 4", pure=False)
    abort = f.and_(_requests(f, launch), Flag.ABORT)
    return f.not_zero(f.or_(state, abort))


def _requests(f: Fn, launch: V) -> V:
    """What the launch is asked to do: bits of Flag."""
    flag = f.load("ptr", launch, Launch.ABORT)
    return f.op("i32", 1, f"load atomic i32, {flag} monotonic, align 4", pure=False)


def _count(f: Fn, launch: V, by: int) -> None:
    """Change the number of workers that are running, which follows the flag."""
    at = f.gep(f.load("ptr", launch, Launch.ABORT), 4)
    f.op("i32", 1, f"atomicrmw add {at}, i32 {by} seq_cst, align 4", pure=False)


@function("void", "ptr launch, i32 mask", "noinline")
def tgx_hold(f: Fn, launch: V, mask: V) -> None:
    """Sleep while the flag has a bit of the mask and no abort; not counted as running then."""
    _count(f, launch, -1)
    with f.loop() as (_, end):
        bits = _requests(f, launch)
        f.leave(f.is_zero(f.and_(bits, mask)), end)
        f.leave(f.not_zero(f.and_(bits, Flag.ABORT)), end)
        f.call("usleep", "i32", 1, f.const("i32", NAP_US))
    _count(f, launch, 1)


@function("void", "ptr launch, ptr slot, i64 cta, ptr counts", "noinline")
def tgx_init_cta(f: Fn, launch: V, slot: V, cta: V, counts: V) -> None:
    """Make a slot the CTA of this linear index."""
    warps = f.load("i32", launch, Launch.WARPS)
    threads = f.load("i32", launch, Launch.THREADS)
    f.store(f.const("i32", 1), slot, Slot.STATE)
    f.store(warps, slot, Slot.LIVE_WARPS)
    f.store(threads, slot, Slot.LIVE_THREADS)
    f.store(f.const("i32", 0), slot, Slot.PENDING)
    f.store(cta, slot, Slot.CTA)
    f.store(f.const("i32", 0, BARRIERS), slot, Slot.ARRIVED, 64)
    gx = f.resize(f.load("i32", launch, Launch.GRID), "i64", False)
    gy = f.resize(f.load("i32", launch, Launch.GRID + 4), "i64", False)
    row = f.bin("udiv", cta, gx)
    ctaid = [f.bin("urem", cta, gx), f.bin("urem", row, gy), f.bin("udiv", row, gy)]
    frame_size = f.load("i64", launch, Launch.FRAME_SIZE)
    shared = f.gep(slot, f.load("i64", launch, Launch.FRAMES_END))
    local = f.gep(slot, f.load("i64", launch, Launch.SHARED_END))
    local_size = f.mul(f.resize(f.load("i32", launch, Launch.LOCAL_SIZE), "i64", False), LANES)
    with f.for_(warps) as w:
        frame = f.element(f.gep(slot, Slot.FRAMES), w, frame_size)
        f.store(launch, frame, Frame.LAUNCH)
        f.store(shared, frame, Frame.SHARED)
        f.store(f.element(local, w, local_size), frame, Frame.LOCAL)
        f.store(counts, frame, Frame.COUNTS)
        f.store(slot, frame, Frame.SLOT)
        left = f.sub(threads, f.mul(w, LANES))
        partial = f.sub(f.bin("shl", f.const("i32", 1), f.and_(left, 31)), 1)
        live = f.select(f.icmp("uge", left, LANES), f.const("i32", ALL_LANES), partial)
        f.store(live, frame, Frame.LIVE)
        f.store(live, frame, Frame.ALL)
        for off in (Frame.BLOCKED, Frame.FAULTED, Frame.STATE, Frame.ROTATE, Frame.MET, Frame.HELD, *COPIES):
            f.store(f.const("i32", 0), frame, off)
        f.store(w, frame, Frame.WARP)
        f.store(f.const("i32", 1), frame, Frame.RESUME)
        f.store(cta, frame, Frame.CTA)
        for i, c in enumerate(ctaid):
            f.store(f.resize(c, "i32", False), frame, Frame.CTAID + 4 * i)
        f.store(f.const("i32", 0, BARRIERS), frame, Frame.BAR_MASK, 4)
        f.store(f.const("i32", 0, LANES), frame, Frame.PCS, 64)
        _thread_ids(f, launch, frame, w)
    _settle(f, launch, slot, BEGIN)


def _settle(f: Fn, launch: V, slot: V, why: int, progress: V | None = None) -> None:
    """Tell a CTA's bulk copies that it begins, cannot go on or ends, in a launch that has some (`bulk`)."""
    settle = f.load("ptr", launch, Launch.SETTLE)
    with f.if_(f.not_zero(settle), False):
        landed = f.op("i32", 1, f"call i32 {settle.ref}({launch}, {slot}, {f.const('i32', why)})", pure=False)
        if progress is not None:
            f.store(f.not_zero(landed), progress)


def _thread_ids(f: Fn, launch: V, frame: V, w: V) -> None:
    bx = f.load("i32", launch, Launch.BLOCK)
    by = f.load("i32", launch, Launch.BLOCK + 4)
    linear = f.add(f.mul(w, LANES), f.iota("i32", LANES))
    f.store(linear, frame, Frame.TID, 64)
    flat = f.icmp("eq", f.mul(by, f.load("i32", launch, Launch.BLOCK + 8)), 1)
    zero = f.const("i32", 0, LANES)
    f.store(zero, frame, Frame.TID + 128, 64)
    f.store(zero, frame, Frame.TID + 256, 64)
    with f.if_(f.not_(flat)):
        row = f.bin("udiv", linear, bx)
        f.store(f.bin("urem", linear, bx), frame, Frame.TID, 64)
        f.store(f.bin("urem", row, by), frame, Frame.TID + 128, 64)
        f.store(f.bin("udiv", row, by), frame, Frame.TID + 256, 64)


@function("i1", "ptr launch, ptr slot", "noinline")
def tgx_release(f: Fn, launch: V, slot: V) -> V:
    """Open every barrier that has all its threads; returns whether one opened."""
    zero = f.const("i32", 0)
    opened = f.variable(f.const("i1", 0))
    pending = f.alloca("i32")
    f.store(f.load("i32", slot, Slot.PENDING), pending)
    warps = f.load("i32", launch, Launch.WARPS)
    frame_size = f.load("i64", launch, Launch.FRAME_SIZE)
    with f.loop() as (_, end):
        bits = f.load("i32", pending)
        f.leave(f.is_zero(bits), end)
        f.store(f.and_(bits, f.sub(bits, 1)), pending)
        k = f.intr_flag("cttz", bits, False)
        at = f.word(slot, k)
        want = f.load("i32", at, Slot.EXPECTED)
        want = f.select(f.is_zero(want), f.load("i32", slot, Slot.LIVE_THREADS), want)
        with f.if_(f.icmp("uge", f.load("i32", at, Slot.ARRIVED), want)):
            f.store(f.const("i1", 1), opened)
            f.store(zero, at, Slot.ARRIVED)
            f.store(f.load("i32", at, Slot.REDUCE), at, Slot.RESULT)
            still = f.load("i32", slot, Slot.PENDING)
            f.store(f.and_(still, f.not_(f.bin("shl", f.const("i32", 1), k))), slot, Slot.PENDING)
            with f.for_(warps) as w:
                frame = f.element(f.gep(slot, Slot.FRAMES), w, frame_size)
                mine = f.word(frame, k)
                lanes = f.load("i32", mine, Frame.BAR_MASK)
                f.store(zero, mine, Frame.BAR_MASK)
                f.store(f.and_(f.load("i32", frame, Frame.BLOCKED), f.not_(lanes)), frame, Frame.BLOCKED)
                state = f.load("i32", frame, Frame.STATE)
                wake = f.and_(f.icmp("eq", state, WarpState.WAITING), f.not_zero(lanes))
                f.store(f.select(wake, f.const("i32", WarpState.READY), state), frame, Frame.STATE)
    return f.load("i1", opened)


def _run_cta(module: Module) -> None:
    """tgx_run_cta(launch, slot): 0 the CTA is done, 1 it waits for another CTA, 2 the launch was stopped."""
    attributes = f"noinline alignstack({STACK_ALIGN})"
    f = Fn(module, "tgx_run_cta", "i32", "ptr launch, ptr slot", attributes)
    launch, slot = f.args
    warps = f.load("i32", launch, Launch.WARPS)
    frame_size = f.load("i64", launch, Launch.FRAME_SIZE)
    warp_fn = f.load("ptr", launch, Launch.WARP_FN)
    progress = f.alloca("i1")
    # With a seed a warp may stand still while others run, in kernels with mbarriers.
    seed, settle = f.load("i32", launch, Launch.SEED), f.load("ptr", launch, Launch.SETTLE)
    draws = f.and_(f.not_zero(seed), f.not_zero(settle))
    with f.loop() as _:
        f.store(f.const("i1", 0), progress)
        with f.if_(draws, False):
            _settle(f, launch, slot, HOLD)
        with f.for_(warps) as w:
            frame = f.element(f.gep(slot, Slot.FRAMES), w, frame_size)
            with f.if_(f.icmp("eq", f.load("i32", frame, Frame.STATE), WarpState.READY)):
                _run_warp(f, launch, slot, frame, warp_fn, progress)
        _give_way(f, launch)
        stop = f.call("tgx_stopped", "i1", 1, launch)
        with f.if_(stop):
            f.ret(f.const("i32", 2))
        with f.if_(f.is_zero(f.load("i32", slot, Slot.LIVE_WARPS))):
            _settle(f, launch, slot, END)
            f.ret(f.const("i32", 0))
        with f.if_(f.not_(f.load("i1", progress))):
            _settle(f, launch, slot, ON, progress)
        with f.if_(f.not_(f.load("i1", progress))):
            stuck = f.call("tgx_stuck", "i1", 1, f.gep(slot, Slot.FRAMES), frame_size, warps)
            f.ret(f.select(stuck, f.const("i32", 2), f.const("i32", 1)))
    f.do("unreachable")
    f.finish()


def _give_way(f: Fn, launch: V) -> None:
    """Sleep here if the launch is asked to give way at once."""
    now = f.const("i32", Flag.PAUSE)
    with f.if_(f.not_zero(f.and_(_requests(f, launch), now)), False):
        f.call_void("tgx_hold", launch, now)


def _run_warp(f: Fn, launch: V, slot: V, frame: V, warp_fn: V, progress: V) -> None:
    f.store(f.const("i32", BACK_EDGES), frame, Frame.BUDGET)
    before = f.intr("ctpop", f.load("i32", frame, Frame.LIVE))
    status = f.op("i32", 1, f"call i32 {warp_fn.ref}({frame})", pure=False)
    gone = f.sub(before, f.intr("ctpop", f.load("i32", frame, Frame.LIVE)))
    f.store(f.sub(f.load("i32", slot, Slot.LIVE_THREADS), gone), slot, Slot.LIVE_THREADS)
    with f.if_(f.icmp("ne", status, Status.YIELD)):
        f.store(f.const("i1", 1), progress)
        done = f.icmp("eq", status, Status.EXIT)
        state = f.select(done, f.const("i32", WarpState.DONE), f.const("i32", WarpState.WAITING))
        f.store(state, frame, Frame.STATE)
        left = f.sub(f.load("i32", slot, Slot.LIVE_WARPS), f.resize(done, "i32", False))
        f.store(left, slot, Slot.LIVE_WARPS)
    with f.if_(f.not_zero(f.load("i32", slot, Slot.PENDING))):
        opened = f.call("tgx_release", "i1", 1, launch, slot)
        f.store(f.or_(f.load("i1", progress), opened), progress)


@function("void", "ptr launch, ptr worker", "")
def tgx_worker(f: Fn, launch: V, worker: V) -> None:
    """Take CTAs until the grid is done or stopped."""
    zero, one = f.const("i32", 0), f.const("i32", 1)
    slots, stride = f.load("ptr", worker, Worker.SLOTS), f.load("i64", worker, Worker.STRIDE)
    count, counts = f.load("i32", worker, Worker.COUNT), f.load("ptr", worker, Worker.COUNTS)
    total = f.load("i64", launch, Launch.TOTAL_CTAS)
    resident, current, high, dry = (f.variable(zero) for _ in range(4))
    _count(f, launch, 1)
    with f.loop() as (head, end):
        _give_way(f, launch)
        f.leave(f.call("tgx_stopped", "i1", 1, launch), end)
        # Asked to give way between CTAs: start no new one, and sleep when no resident one is left.
        full = f.const("i32", Flag.PAUSE_CTA)
        closed = f.not_zero(f.and_(_requests(f, launch), full))
        with f.if_(f.and_(closed, f.is_zero(f.load("i32", resident))), False):
            f.call_void("tgx_hold", launch, full)
            f.br(head)
        shut = f.or_(f.load("i32", dry), f.resize(closed, "i32", False))
        cur = f.load("i32", current)
        with f.if_(f.icmp("uge", cur, f.load("i32", high))):
            # Past the used slots: open a new one while there are CTAs left, else start over.
            more = f.and_(f.icmp("ult", cur, count), f.is_zero(shut))
            with f.if_(more):
                f.store(f.add(cur, one), high)
                f.store(zero, f.element(slots, cur, stride), Slot.STATE)
            with f.if_(f.not_(more)):
                f.store(zero, current)
                f.br(head)
        slot = f.element(slots, cur, stride)
        with f.if_(f.is_zero(f.load("i32", slot, Slot.STATE))):
            with f.if_(f.is_zero(shut)):
                next_cta = f.gep(launch, Launch.NEXT_CTA)
                cta = f.op("i64", 1, f"atomicrmw add {next_cta}, i64 1 monotonic, align 8", pure=False)
                got = f.icmp("ult", cta, total)
                with f.if_(got):
                    f.call_void("tgx_init_cta", launch, slot, cta, counts)
                    f.store(f.add(f.load("i32", resident), one), resident)
                f.store(f.select(got, zero, one), dry)
            with f.if_(f.is_zero(f.load("i32", slot, Slot.STATE))):
                f.leave(f.is_zero(f.load("i32", resident)), end)
                f.store(f.add(cur, one), current)
                f.br(head)
        status = f.call("tgx_run_cta", "i32", 1, launch, slot)
        f.leave(f.icmp("eq", status, 2), end)
        with f.if_(f.is_zero(status)):
            f.store(zero, slot, Slot.STATE)
            f.store(f.sub(f.load("i32", resident), one), resident)
        with f.if_(f.icmp("eq", status, one)):
            f.store(f.add(cur, one), current)
    _count(f, launch, -1)


@family("tgx_worker")
def emit_scheduler(module: Module, name: str) -> None:
    """tgx_worker(launch, worker), with the functions that it uses."""
    for write in (tgx_stopped, tgx_hold, tgx_init_cta, tgx_release, _run_cta, tgx_worker):
        write(module)
