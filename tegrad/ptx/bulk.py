"""cp.async.bulk between global and this CTA's shared memory (PTX ISA 9.7.9.25.4).

What a copy may touch is checked when it is issued; the bytes move, and the mbarrier or the bulk group hears of it, when
the copy lands. Copies of a CTA wait in a queue, and land as late as the rules allow: one at each failing wait for their
mbarrier, at the wait for their group, or when no warp of the CTA can go on. So code that forgets to wait shows it. A
full queue lets the oldest land.

A launch with a seed draws. Half of the copies land at once, which shows a slot that is filled while it is read, and
others out of order; the scheduler holds warps back (`schedule`), and a warp may give way after an arrival.
"""

from tegrad.ptx.check import PAGE_SHIFT, launch_of
from tegrad.ptx.gather import each_lane
from tegrad.ptx.helpers import helper
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.layout import HASH_FACTOR, LANES, Access, Frame, Launch, Slot, Space, WarpState, fault_info
from tegrad.ptx.lowering import Asynchronous
from tegrad.ptx.mbarrier import COUNTS, NEW_FORMS_SM, VECTOR, place
from tegrad.ptx.memory import address
from tegrad.ptx.rules import U32, mod, require
from tegrad.ptx.syntax import Imm, Ins

UNIT = 16
"""Addresses and sizes are multiples of it."""
MOST_WAITING = 64
WARPS = 32
COUNT, RANDOM, HELD, ENTRIES, ENTRY = 0, 4, 8, 64, 64
GROUPS = ENTRIES + MOST_WAITING * ENTRY
AREA_BYTES = GROUPS + WARPS * LANES * 4
"""Bytes before a CTA's shared memory: how many copies wait, the state of the draws, the warp that is held back
(or NOBODY), the copies, each thread's group."""
OWNER, OBJECT, GLOBAL, OFFSET, SIZE, LANE, GROUP, PC = 0, 8, 16, 24, 28, 32, 36, 40
"""An entry: the warp's frame, the mbarrier's offset (NO_OBJECT: to global memory), the addresses, who issued it."""
NO_OBJECT = NOBODY = -1
BEGIN, ON, END, HOLD = range(4)
"""What `tgx_async_settle` is called for: a CTA begins, cannot go on, or is done; with a seed, runs its warps."""


def _area(f: Fn, frame: V) -> V:
    """What belongs to the copies of a warp's CTA."""
    return f.pointer(f.sub(f.load("i64", frame, Frame.SHARED), AREA_BYTES))


def _entry(f: Fn, area: V, index: V) -> V:
    return f.gep(area, f.add(f.mul(f.resize(index, "i64", False), ENTRY), ENTRIES))


@helper("i64", "ptr launch, i64 addr, i64 size, i8 flag")
def tgx_bulk_pages(f: Fn, launch: V, addr: V, size: V, flag: V) -> V:
    """The first byte that the pages do not allow, or -1."""
    limit, pages = f.load("i64", launch, Launch.LIMIT), f.load("ptr", launch, Launch.PAGES)
    end = f.add(addr, size)
    with f.if_(f.or_(f.icmp("ugt", end, limit), f.icmp("ult", end, addr)), False):
        f.ret(f.intr("umax", addr, limit))
    with f.if_(f.is_zero(pages)):
        f.ret(f.const("i64", -1))
    at = f.variable(addr)
    with f.loop() as (_, done):
        here = f.load("i64", at)
        f.leave(f.icmp("uge", here, end), done)
        page = f.bin("lshr", here, PAGE_SHIFT)
        either = f.or_(flag, f.bin("shl", flag, 4))
        with f.if_(f.is_zero(f.and_(f.load("i8", pages, page), either)), False):
            f.ret(here)
        f.store(f.bin("shl", f.add(page, 1), PAGE_SHIFT), at)
    return f.const("i64", -1)


def _info(space: int, load: V, f: Fn) -> V:
    """The fault record's word of one side of a copy."""
    read, write = (f.const("i32", fault_info(space, access, UNIT)) for access in (Access.READ, Access.WRITE))
    return f.select(load, read, write) if space == Space.GLOBAL else f.select(load, write, read)


@helper("void", f"ptr frame, {VECTOR} offset, {VECTOR} global, {COUNTS} size, {VECTOR} object, i32 mask, i32 pc, "
                "i1 load")  # fmt: skip
def tgx_bulk_issue(f: Fn, frame: V, offsets: V, globals_: V, sizes: V, objects: V, mask: V, pc: V, load: V) -> None:
    """Check and queue the lanes' copies.

    `offsets` and `objects` are in shared memory, with anything beyond 32 bits outside of it.
    """
    launch, area = launch_of(f, frame), _area(f, frame)
    room = f.resize(f.load("i32", launch, Launch.SHARED_SIZE), "i64", False)
    low = f.const("i64", UNIT - 1)
    with f.if_(f.not_zero(f.load("i32", frame, Frame.FAULTED)), False):
        f.ret()
    with each_lane(f, mask) as lane:
        offset, far, object_ = (f.extract(v, lane) for v in (offsets, globals_, objects))
        size = f.resize(f.extract(sizes, lane), "i64", False)

        def fault(bad: V, where: V, info: V, lane: V = lane) -> None:
            with f.if_(bad, False):
                f.call_void("tgx_fault", frame, where, lane, info, pc)
                f.ret()

        near, away = _info(Space.SHARED, load, f), _info(Space.GLOBAL, load, f)
        fault(f.not_zero(f.and_(offset, low)), offset, near)
        fault(f.not_zero(f.and_(far, low)), far, away)
        fault(f.not_zero(f.and_(size, low)), f.add(far, size), away)
        beyond = f.or_(f.icmp("ugt", offset, room), f.icmp("ugt", size, f.sub(room, offset)))
        fault(beyond, f.add(offset, f.sub(size, UNIT)), near)
        info = f.const("i32", fault_info(Space.SHARED, Access.ATOMIC, 8))
        outside = f.icmp("uge", object_, f.and_(room, -8))
        wrong = f.or_(outside, f.not_zero(f.and_(object_, 7)))
        fault(f.and_(load, wrong), object_, info)
        flag = f.select(load, f.const("i8", 1), f.const("i8", 2))
        page = f.call("tgx_bulk_pages", "i64", 1, launch, far, size, flag)
        fault(f.icmp("ne", page, -1), f.and_(page, -UNIT), away)
        _push(f, frame, area, lane, (offset, far, size, f.select(load, object_, f.const("i64", NO_OBJECT)), pc))


def _push(f: Fn, frame: V, area: V, lane: V, copy: tuple[V, V, V, V, V]) -> None:
    """Queue a copy; where the launch draws, half of them land at once."""
    offset, far, size, object_, pc = copy
    with f.if_(f.icmp("eq", f.load("i32", area, COUNT), MOST_WAITING), False):
        f.call_void("tgx_bulk_land", frame, f.const("i32", 0))
    count = f.load("i32", area, COUNT)
    entry = _entry(f, area, count)
    group = f.load("i32", f.word(_groups(f, frame, area), lane))
    narrow = [f.cast("trunc", v, "i32") for v in (offset, size)]
    for value, at in ((frame, OWNER), (object_, OBJECT), (far, GLOBAL), (narrow[0], OFFSET), (narrow[1], SIZE),
                      (lane, LANE), (group, GROUP), (pc, PC)):  # fmt: skip
        f.store(value, entry, at)
    f.store(f.add(count, 1), area, COUNT)
    with f.if_(_draw(f, area, 1), False):
        f.call_void("tgx_bulk_land", frame, count)


def _groups(f: Fn, frame: V, area: V) -> V:
    """The numbers of a warp's threads' open bulk groups."""
    warp = f.resize(f.load("i32", frame, Frame.WARP), "i64", False)
    return f.gep(f.gep(area, GROUPS), f.mul(warp, 4 * LANES))


def _number(f: Fn, area: V) -> V:
    """The next number of a CTA's draws; always 0 in a launch without a seed."""
    x = f.load("i32", area, RANDOM)
    for op, by in (("shl", 13), ("lshr", 17), ("shl", 5)):
        x = f.xor(x, f.bin(op, x, by))
    f.store(x, area, RANDOM)
    return f.bin("lshr", f.mul(x, HASH_FACTOR), 8)


def _draw(f: Fn, area: V, bits: int) -> V:
    """True once in 2^bits; never for a launch without a seed."""
    return f.icmp("eq", f.bin("lshr", _number(f, area), 24 - bits), (1 << bits) - 1)


@helper("void", "ptr frame, i32 index")
def tgx_bulk_land(f: Fn, frame: V, index: V) -> None:
    """A copy of the CTA's queue moves its bytes and tells its mbarrier."""
    area = _area(f, frame)
    entry = _entry(f, area, index)
    owner, object_, far = f.load("ptr", entry, OWNER), f.load("i64", entry, OBJECT), f.load("i64", entry, GLOBAL)
    offset, size, lane, pc = (f.load("i32", entry, at) for at in (OFFSET, SIZE, LANE, PC))
    left = f.sub(f.load("i32", area, COUNT), 1)
    f.store(left, area, COUNT)
    after = f.mul(f.resize(f.sub(left, index), "i64", False), ENTRY)
    f.call("memmove", "ptr", 1, entry, f.gep(entry, ENTRY), after)
    launch, wide = launch_of(f, frame), f.resize(size, "i64", False)
    shared = f.load("i64", frame, Frame.SHARED)
    here = f.pointer(f.add(shared, f.resize(offset, "i64", False)))
    there = f.pointer(f.add(f.load("i64", launch, Launch.MEM_BASE), far))
    load = f.icmp("ne", object_, NO_OBJECT)
    # The pages may have gone since the copy was issued.
    flag = f.select(load, f.const("i8", 1), f.const("i8", 2))
    page = f.call("tgx_bulk_pages", "i64", 1, launch, far, wide, flag)
    with f.if_(f.icmp("ne", page, -1), False):
        where = f.and_(page, -UNIT)
        f.call_void("tgx_fault", owner, where, lane, _info(Space.GLOBAL, load, f), pc)
        f.ret()
    port = f.load("ptr", launch, Launch.L2)
    cached = f.not_zero(port)
    with f.if_(f.and_(cached, load), False):
        f.call_void("tgx_l2_load", port, far, wide, f.resize(f.load("i32", launch, Launch.TAG), "i64", False))
    with f.if_(f.and_(cached, f.not_(load)), False):
        f.call_void("tgx_l2_begin", port, far, wide)
    f.call("memcpy", "ptr", 1, f.select(load, here, there), f.select(load, there, here), wide)
    with f.if_(f.and_(cached, f.not_(load)), False):
        f.call_void("tgx_l2_end", port, far, wide)
    with f.if_(load):
        told = f.sub(f.const("i32", 0), size)
        none = f.const("i32", 0)
        old = f.call("tgx_mbarrier_update", "i64", 1, f.pointer(f.add(shared, object_)), none, told, none)
        with f.if_(f.is_zero(old), False):
            info = f.const("i32", fault_info(0, Access.ILLEGAL, 0))
            f.call_void("tgx_fault", owner, object_, lane, info, pc)


@helper("void", "ptr frame, i32 object")
def tgx_async_land(f: Fn, frame: V, object_: V) -> None:
    """One copy lands that an mbarrier waits for, or a warp's copies up to an arrival.

    The oldest of its bulk copies; with a seed none in half of the cases, or the newest, and now and then another one's.
    """
    area, none = _area(f, frame), f.const("i32", -1)
    found = f.variable(none)
    with f.if_(_draw(f, area, 1), False):
        f.ret()
    newest, count = _draw(f, area, 1), f.load("i32", area, COUNT)
    with f.for_(count) as i:
        mine = f.icmp("eq", f.load("i64", _entry(f, area, i), OBJECT), f.resize(object_, "i64", False))
        first = f.icmp("eq", f.load("i32", found), none)
        with f.if_(f.and_(mine, f.or_(first, newest))):
            f.store(i, found)
    other = f.and_(_draw(f, area, 2), f.not_zero(count))
    index = f.select(other, f.const("i32", 0), f.load("i32", found))
    with f.if_(f.icmp("ne", index, none)):
        f.call_void("tgx_bulk_land", frame, index)
        f.ret()
    _copies_before_an_arrival(f, frame)


def _copies_before_an_arrival(f: Fn, frame: V) -> None:
    """The first warp that has a cp.async.mbarrier.arrive in its queue lets its copies land up to that."""
    launch, slot = launch_of(f, frame), f.load("ptr", frame, Frame.SLOT)
    queue = f.load("i32", launch, Launch.COPY_QUEUE)
    with f.if_(f.is_zero(queue)):
        f.ret()
    with f.for_(f.load("i32", launch, Launch.WARPS)) as w:
        start = f.mul(f.resize(w, "i64", False), f.load("i64", launch, Launch.FRAME_SIZE))
        other = f.gep(f.gep(slot, Slot.FRAMES), start)
        before = f.load("i32", other, Frame.COPY_ARRIVES)
        with f.if_(f.not_zero(before)):
            with f.loop() as (_, done):
                f.leave(f.icmp("ne", f.load("i32", other, Frame.COPY_ARRIVES), before), done)
                f.call_void("tgx_copy_land", other, f.gep(other, f.resize(queue, "i64", False)))
            f.ret()


@helper("void", "ptr frame, i32 mask, i32 keep")
def tgx_bulk_wait(f: Fn, frame: V, mask: V, keep: V) -> None:
    """The lanes' copies land, but for those of their newest `keep` groups."""
    area, at = _area(f, frame), f.alloca("i32")
    groups = _groups(f, frame, area)
    f.store(f.const("i32", 0), at)
    with f.loop() as (_, done):
        i = f.load("i32", at)
        f.leave(f.icmp("uge", i, f.load("i32", area, COUNT)), done)
        entry = _entry(f, area, i)
        lane = f.load("i32", entry, LANE)
        limit = f.sub(f.load("i32", f.word(groups, lane)), keep)
        old = f.icmp("slt", f.sub(f.load("i32", entry, GROUP), limit), f.const("i32", 0))
        mine = f.icmp("eq", f.cast("ptrtoint", f.load("ptr", entry, OWNER), "i64"), f.cast("ptrtoint", frame, "i64"))
        store = f.icmp("eq", f.load("i64", entry, OBJECT), NO_OBJECT)
        asked = f.not_zero(f.and_(f.bin("lshr", mask, lane), 1))
        land = f.and_(f.and_(old, mine), f.and_(store, asked))
        with f.if_(land):
            f.call_void("tgx_bulk_land", frame, i)
        f.store(f.add(i, f.resize(f.not_(land), "i32", False)), at)


@helper("i1", "ptr frame")
def tgx_async_pause(f: Fn, frame: V) -> V:
    """Whether a warp gives way after an arrival, as in a quarter of the cases with a seed."""
    return _draw(f, _area(f, frame), 2)


def _change(f: Fn, launch: V, slot: V, warp: V, old: int, new: int) -> None:
    """Change a warp's state, where it is the old one."""
    start = f.mul(f.resize(warp, "i64", False), f.load("i64", launch, Launch.FRAME_SIZE))
    frame = f.gep(f.gep(slot, Slot.FRAMES), start)
    state = f.load("i32", frame, Frame.STATE)
    is_old = f.icmp("eq", state, old)
    f.store(f.select(is_old, f.const("i32", new), state), frame, Frame.STATE)


def _let_go(f: Fn, launch: V, slot: V, area: V) -> None:
    """The warp that is held back may go on."""
    held = f.load("i32", area, HELD)
    with f.if_(f.icmp("ne", held, NOBODY)):
        _change(f, launch, slot, held, WarpState.HELD, WarpState.READY)
        f.store(f.const("i32", NOBODY), area, HELD)


@helper("i32", "ptr launch, ptr slot, i32 why")
def tgx_async_settle(f: Fn, launch: V, slot: V, why: V) -> V:
    """Whether something landed, or a warp that was held back may go on.

    At the end copies to global memory land. One to shared memory that is still on its way is a fault: on silicon it
    would write to what is no longer the CTA's [inferred].
    """
    frame = f.gep(slot, Slot.FRAMES)
    area, zero, one = _area(f, frame), f.const("i32", 0), f.const("i32", 1)
    with f.if_(f.icmp("eq", why, BEGIN)):
        f.store(zero, area, COUNT)
        f.store(f.const("i32", NOBODY), area, HELD)
        seed = f.load("i32", launch, Launch.SEED)
        cta = f.mul(f.add(f.cast("trunc", f.load("i64", slot, Slot.CTA), "i32"), one), 0x85EBCA6B)
        mixed = f.or_(f.xor(f.mul(seed, HASH_FACTOR), cta), one)
        f.store(f.select(f.is_zero(seed), zero, mixed), area, RANDOM)
        f.ret(zero)
    with f.if_(f.icmp("eq", why, ON)):
        with f.if_(f.icmp("ne", f.load("i32", area, HELD), NOBODY)):
            _let_go(f, launch, slot, area)
            f.ret(one)
        some = f.not_zero(f.load("i32", area, COUNT))
        with f.if_(some):
            f.call_void("tgx_bulk_land", frame, zero)
        f.ret(f.resize(some, "i32", False))
    with f.if_(f.icmp("eq", why, HOLD)):
        drawn = _number(f, area)
        with f.if_(f.is_zero(f.and_(drawn, 3))):
            _let_go(f, launch, slot, area)
            twice = f.mul(f.load("i32", launch, Launch.WARPS), 2)
            warp = f.bin("urem", f.bin("lshr", drawn, 2), twice)
            with f.if_(f.icmp("ult", warp, f.load("i32", launch, Launch.WARPS))):
                _change(f, launch, slot, warp, WarpState.READY, WarpState.HELD)
                f.store(warp, area, HELD)
        f.ret(zero)
    with f.loop() as (_, done):
        f.leave(f.is_zero(f.load("i32", area, COUNT)), done)
        first = _entry(f, area, zero)
        with f.if_(f.icmp("ne", f.load("i64", first, OBJECT), NO_OBJECT), False):
            owner, where = f.load("ptr", first, OWNER), f.resize(f.load("i32", first, OFFSET), "i64", False)
            lane, pc = f.load("i32", first, LANE), f.load("i32", first, PC)
            f.call_void("tgx_fault", owner, where, lane, f.const("i32", fault_info(0, Access.ILLEGAL, 0)), pc)
            f.ret(zero)
        f.call_void("tgx_bulk_land", frame, zero)
    return zero


DIRECTIONS = {("shared__cluster", "global"): True, ("shared__cta", "global"): True, ("global", "shared__cta"): False}
"""From global memory or to it, by the two state spaces."""


def copy(e: Asynchronous, ins: Ins) -> None:
    """cp.async.bulk of bytes, its groups and waits, and its prefetch; within a cluster of one CTA."""
    f = e.f
    if mod(ins, "tensor", "multicast__cluster", "cp_mask"):
        raise NotImplementedError
    require(e.source, ins, NEW_FORMS_SM)
    e.asynchronous = True
    if mod(ins, "commit_group"):
        f.call_void("tgx_bulk_commit", e.frame, e.lanes(ins))
    elif mod(ins, "wait_group"):
        if not isinstance(ins.operands[0], Imm):
            raise NotImplementedError
        f.call_void("tgx_bulk_wait", e.frame, e.lanes(ins), f.const("i32", int(ins.operands[0].value)))
    elif mod(ins, "prefetch"):
        if not mod(ins, "L2") or not mod(ins, "global"):
            raise NotImplementedError
    else:
        _issue(e, ins)


@helper("void", "ptr frame, i32 mask")
def tgx_bulk_commit(f: Fn, frame: V, mask: V) -> None:
    """The lanes' open groups are closed, and others begin."""
    groups = _groups(f, frame, _area(f, frame))
    now = f.load("i32", groups, 0, LANES, 64)
    f.store(f.sub(now, f.cast("sext", f.mask_vec(mask), "i32")), groups, 0, 64)


def _issue(e: Asynchronous, ins: Ins) -> None:
    f = e.f
    spaces = tuple(m for m in ins.mods if m in ("global", "shared__cta", "shared__cluster"))
    load = DIRECTIONS[spaces[0], spaces[1]]
    if not mod(ins, "mbarrier__complete_tx__bytes" if load else "bulk_group"):
        raise NotImplementedError
    near, far = ins.operands[:2] if load else ins.operands[1::-1]
    size = f.splat(e.read(ins.operands[2], U32), LANES)
    nobody = f.const("i64", NO_OBJECT)
    object_ = place(e, ins.operands[3], "shared")[0] if load else nobody
    offset, where = place(e, near, "shared")[0], address(e, far, "global")
    lanes = e.lanes(ins)
    e.account_dynamic(lanes, size, not load)
    wide = [f.splat(v, LANES) for v in (offset, where, object_)]
    f.call_void("tgx_bulk_issue", e.frame, wide[0], wide[1], size, wide[2], lanes, f.const("i32", e.pc),
                f.const("i1", load))  # fmt: skip
