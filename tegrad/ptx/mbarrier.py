"""mbarrier objects, and cp.async.mbarrier.arrive (PTX ISA 9.7.13.15).

An object is all in its 8 bytes of shared memory: pending arrivals, expected arrivals, the transaction count, the phase,
and a mark that it is one. What the ISA leaves undefined, and what would leave the object's ranges, ends the launch as
an illegal instruction: an object that was not initialised, more arrivals than are pending, counts beyond 2^20 - 1.

All warps of a CTA run on one host thread, so that nothing here is atomic. A wait that fails lets a copy land on which
the object waits (`bulk`), and the warp gives way at its next back edge.
"""

from collections.abc import Sequence

from tegrad.ptx.check import launch_of
from tegrad.ptx.gather import each_lane
from tegrad.ptx.helpers import helper
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.layout import LANES, Access, Frame, Launch, Space, fault_info
from tegrad.ptx.lowering import Asynchronous
from tegrad.ptx.memory import U64, address, space_of
from tegrad.ptx.rules import PRED, U32, Handler, mod, require
from tegrad.ptx.syntax import Ins, Operand

MOST_COUNT = (1 << 20) - 1
"""The largest count, of arrivals and of bytes."""
EXPECTED, TX, PHASE, VALID = 20, 40, 61, 62
"""Where the fields begin; pending arrivals are the lowest. TX is signed, of 21 bits."""
OPS = ("init", "inval", "arrive", "arrive_drop", "expect_tx", "complete_tx", "test_wait", "try_wait", "pending_count")
MODIFIERS = frozenset({*OPS, "noComplete", "parity", "b64", "release", "acquire", "relaxed", "cta", "cluster",
                   "shared", "shared__cta", "shared__cluster"})  # fmt: skip
NEW_FORMS_SM = 90
VECTOR = f"<{LANES} x i64>"
COUNTS = f"<{LANES} x i32>"


def _field(f: Fn, word: V, at: int) -> V:
    """A count of an object."""
    return f.and_(f.bin("lshr", word, at), MOST_COUNT)


@helper("i64", "ptr object, i32 arrivals, i32 tx, i32 drops")
def tgx_mbarrier_update(f: Fn, at: V, arrivals: V, tx: V, drops: V) -> V:
    """The object before; 0, without effect, if undefined."""
    zero, most = f.const("i64", 0), f.const("i64", MOST_COUNT)
    old = f.load("i64", at)
    pending = f.sub(f.and_(old, most), f.cast("sext", arrivals, "i64"))
    expected = f.sub(_field(f, old, EXPECTED), f.cast("sext", drops, "i64"))
    signed = f.bin("ashr", f.bin("shl", old, 43 - TX), 43)
    bytes_ = f.add(signed, f.cast("sext", tx, "i64"))
    good = f.not_zero(f.and_(old, 1 << VALID))
    for count, limit in ((pending, MOST_COUNT), (expected, MOST_COUNT), (f.add(bytes_, most), 2 * MOST_COUNT)):
        good = f.and_(good, f.icmp("ule", count, limit))
    fine, wrong = f.name_of("fine"), f.name_of("wrong")
    f.condbr(good, fine, wrong, True)
    f.label(wrong)
    f.ret(zero)
    f.label(fine)
    over = f.and_(f.is_zero(pending), f.is_zero(bytes_))
    new = f.or_(f.select(over, expected, pending), f.bin("shl", expected, EXPECTED))
    new = f.or_(new, f.bin("shl", f.and_(bytes_, (1 << 21) - 1), TX))
    phase = f.xor(f.and_(old, 1 << PHASE), f.select(over, f.const("i64", 1 << PHASE), zero))
    f.store(f.or_(f.or_(new, phase), 1 << VALID), at)
    return old


OBJECTS = f"ptr frame, {VECTOR} addr, i64 base, i32 mask, i32 info, i32 pc"
"""What a helper for a warp's lanes takes first; `base` is the address at which shared memory begins."""


class Objects:
    """What helpers have in common that treat the objects of a warp's lanes one after the other: checks and faults.

    `given` are the values of OBJECTS, `empty` is what such a helper returns where it has no effect.
    """

    def __init__(self, f: Fn, given: Sequence[V], empty: V | None) -> None:
        self.f, self.empty = f, empty
        self.frame, self.addr, self.base, self.mask, self.info, self.pc = given
        self.shared = f.load("i64", self.frame, Frame.SHARED)
        self.size = f.resize(f.load("i32", launch_of(f, self.frame), Launch.SHARED_SIZE), "i64", False)
        with f.if_(f.not_zero(f.load("i32", self.frame, Frame.FAULTED)), False):
            f.ret(empty)

    def fault(self, bad: V, lane: V, info: V) -> None:
        """End the launch where something is wrong with a lane's object."""
        f = self.f
        wrong, fine = f.name_of("wrong"), f.name_of("fine")
        f.condbr(bad, wrong, fine, False)
        f.label(wrong)
        f.call_void("tgx_fault", self.frame, f.extract(self.addr, lane), lane, info, self.pc)
        f.ret(self.empty)
        f.label(fine)

    def place(self, lane: V) -> tuple[V, V]:
        """The offset of a lane's object in shared memory, and the object; faults where it cannot be one."""
        f = self.f
        offset = f.sub(f.extract(self.addr, lane), self.base)
        odd = f.not_zero(f.and_(offset, 7))
        # Offsets are far below 2^63, so that one before shared memory is beyond it.
        self.fault(f.or_(odd, f.icmp("uge", offset, f.and_(self.size, -8))), lane, self.info)
        return offset, f.op("ptr", 1, f"inttoptr {f.add(offset, self.shared)} to ptr", pure=False)

    def illegal(self, bad: V, lane: V) -> None:
        """End the launch where the ISA says that the behaviour is undefined."""
        self.fault(bad, lane, self.f.const("i32", fault_info(0, Access.ILLEGAL, 0)))


@helper(VECTOR, f"{OBJECTS}, {COUNTS} arrivals, {COUNTS} tx, {COUNTS} drops")
def tgx_mbarrier_arrive(f: Fn, *given: V) -> V:
    """The objects before the arrivals, transactions and drops, lane after lane."""
    empty = V("i64", LANES, "zeroinitializer")
    o = Objects(f, given[:-3], empty)
    out = f.alloca(VECTOR, 64)
    f.store(empty, out, 0, 64)
    with each_lane(f, o.mask) as lane:
        _, at = o.place(lane)
        old = f.call("tgx_mbarrier_update", "i64", 1, at, *(f.extract(m, lane) for m in given[-3:]))
        o.illegal(f.is_zero(old), lane)
        f.store(f.insert(f.load("i64", out, 0, LANES, 64), old, lane), out, 0, 64)
    return f.load("i64", out, 0, LANES, 64)


@helper("void", f"{OBJECTS}, {COUNTS} counts, i1 valid")
def tgx_mbarrier_set(f: Fn, *given: V) -> None:
    """New objects that expect so many arrivals, or, where they are not valid, memory that is none."""
    *first, counts, valid = given
    o = Objects(f, first, None)
    with each_lane(f, o.mask) as lane:
        _, at = o.place(lane)
        count = f.resize(f.extract(counts, lane), "i64", False)
        wrong = f.icmp("ugt", f.sub(count, 1), MOST_COUNT - 1)
        o.illegal(f.and_(wrong, valid), lane)
        made = f.or_(f.or_(count, f.bin("shl", count, EXPECTED)), 1 << VALID)
        f.store(f.select(valid, made, f.const("i64", 0)), at)


@helper("i32", f"{OBJECTS}, {COUNTS} phases")
def tgx_mbarrier_test(f: Fn, *given: V) -> V:
    """The lanes whose phase is over; for others, copies land."""
    *first, phases = given
    o = Objects(f, first, f.const("i32", 0))
    zero = f.const("i32", 0)
    done = f.variable(zero)

    def over(at: V, phase: V) -> V:
        now = f.cast("trunc", f.bin("lshr", f.load("i64", at), PHASE), "i32")
        return f.not_zero(f.and_(f.xor(now, phase), 1))

    with each_lane(f, o.mask) as lane:
        offset, at = o.place(lane)
        o.illegal(f.is_zero(f.and_(f.load("i64", at), 1 << VALID)), lane)
        phase = f.extract(phases, lane)
        with f.if_(f.not_(over(at, phase)), False):
            f.call_void("tgx_async_land", o.frame, f.cast("trunc", offset, "i32"))
        bit = f.select(over(at, phase), f.bin("shl", f.const("i32", 1), lane), zero)
        f.store(f.or_(f.load("i32", done), bit), done)
    with f.if_(f.icmp("ne", f.load("i32", done), o.mask), False):
        f.store(zero, o.frame, Frame.BUDGET)
    return f.load("i32", done)


def place(e: Asynchronous, op: Operand, space: str) -> tuple[V, V, V]:
    """Of objects: their addresses, scalar where all are one, where shared memory begins, and the info of a fault."""
    f = e.f
    if space not in ("shared", "generic"):
        raise NotImplementedError
    where = Space.SHARED if space == "shared" else Space.GENERIC
    base = f.const("i64", 0) if space == "shared" else f.load("i64", e.launch, Launch.SHARED_WINDOW)
    return f.resize(address(e, op, space), "i64", False), base, f.const("i32", fault_info(where, Access.ATOMIC, 8))


def _arrive(e: Asynchronous, ins: Ins, op: Operand, arrivals: V, tx: V, drops: V) -> V:
    """The objects before an operation of the lanes."""
    f = e.f
    where, base, info = place(e, op, space_of(e, ins))
    counts = [f.splat(v, LANES) for v in (arrivals, tx, drops)]
    args = [e.frame, f.splat(where, LANES), base, e.lanes(ins), info, f.const("i32", e.pc), *counts]
    return f.call("tgx_mbarrier_arrive", "i64", LANES, *args)


def _set(e: Asynchronous, ins: Ins) -> None:
    f = e.f
    valid = mod(ins, "init")
    count = e.read(ins.operands[1], U32) if valid else f.const("i32", 0)
    where, base, info = place(e, ins.operands[0], space_of(e, ins))
    f.call_void("tgx_mbarrier_set", e.frame, f.splat(where, LANES), base, e.lanes(ins), info, f.const("i32", e.pc),
                f.splat(count, LANES), f.const("i1", valid))  # fmt: skip


def _wait(e: Asynchronous, ins: Ins) -> None:
    """test_wait and try_wait; the second differs only in how long it may take."""
    f = e.f
    target, object_, phase = ins.operands[:3]
    if mod(ins, "parity"):
        wanted = e.read(phase, U32)
    else:
        wanted = f.cast("trunc", f.bin("lshr", e.read(phase, U64), PHASE), "i32")
    where, base, info = place(e, object_, space_of(e, ins))
    lanes = e.lanes(ins)
    same = where.n == 1 and wanted.n == 1
    asked = f.and_(lanes, f.sub(f.const("i32", 0), lanes)) if same else lanes
    done = f.call("tgx_mbarrier_test", "i32", 1, e.frame, f.splat(where, LANES), base, asked, info,
                  f.const("i32", e.pc), f.splat(wanted, LANES))  # fmt: skip
    e.write(target, f.not_zero(done) if same else f.mask_vec(done), PRED, ins)


def _age(ins: Ins, op: str) -> int:
    """The least architecture that has a form [what NVIDIA's assembler takes]."""
    counted = op in ("arrive", "arrive_drop") and len(ins.operands) > 2 and not mod(ins, "noComplete")
    young = counted or op in ("complete_tx", "try_wait")
    return NEW_FORMS_SM if young or mod(ins, "expect_tx", "cluster", "shared__cluster") else 80


def mbarrier(e: Asynchronous, ins: Ins) -> None:
    """All instructions on objects of this CTA; a cluster has no other one here."""
    f = e.f
    op = next(o for o in (*OPS[2:4], *OPS) if o in ins.mods)
    if not MODIFIERS.issuperset(ins.mods):
        raise NotImplementedError
    require(e.source, ins, _age(ins, op))
    e.asynchronous = True
    one, zero = f.const("i32", 1), f.const("i32", 0)
    if op in ("init", "inval"):
        _set(e, ins)
    elif op in ("test_wait", "try_wait"):
        _wait(e, ins)
    elif op == "pending_count":
        state = e.read(ins.operands[1], U64)
        e.write(ins.operands[0], f.cast("trunc", f.and_(state, MOST_COUNT), "i32"), U32, ins)
    elif op in ("expect_tx", "complete_tx"):
        tx = e.read(ins.operands[1], U32)
        _arrive(e, ins, ins.operands[0], zero, tx if op == "expect_tx" else f.sub(f.like(tx, 0), tx), zero)
    else:
        count = e.read(ins.operands[2], U32) if len(ins.operands) > 2 else one
        arrivals, tx = (one, count) if mod(ins, "expect_tx") else (count, zero)
        old = _arrive(e, ins, ins.operands[1], arrivals, tx, arrivals if op == "arrive_drop" else zero)
        e.write(ins.operands[0], old, U64, ins)


def arrive_after_copies(e: Asynchronous, ins: Ins) -> None:
    """cp.async.mbarrier.arrive: an arrival after the lane's copies in the warp's queue (`copies`)."""
    f = e.f
    if mod(ins, "shared__cluster"):
        raise NotImplementedError
    e.asynchronous = e.arrives = True
    space = space_of(e, ins)
    if not mod(ins, "noinc"):
        _arrive(e, ins, ins.operands[0], f.const("i32", -1), f.const("i32", 0), f.const("i32", 0))
    where, base, _ = place(e, ins.operands[0], space)
    offset = f.splat(f.cast("trunc", f.sub(where, base), "i32"), LANES)
    queue, zero = f.gep(e.frame, e.copy_queue), f.const("i32", 0)
    f.call_void("tgx_copy_push", e.frame, queue, offset, queue, e.lanes(ins), zero, f.const("i32", e.pc))


@helper("void", f"ptr frame, {COUNTS} target, i32 mask, i32 pc")
def tgx_copy_arrive(f: Fn, frame: V, target: V, mask: V, pc: V) -> None:
    """What an entry of the copies' queue without data does."""
    none = f.const("i32", 0, LANES)
    info = f.const("i32", fault_info(Space.SHARED, Access.ATOMIC, 8))
    f.call("tgx_mbarrier_arrive", "i64", LANES, frame, f.cast("zext", target, "i64"), f.const("i64", 0), mask, info, pc,
           f.const("i32", 1, LANES), none, none)  # fmt: skip


HANDLERS: dict[str, Handler[Asynchronous]] = {"mbarrier": mbarrier}
