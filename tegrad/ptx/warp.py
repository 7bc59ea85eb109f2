"""Instructions that exchange values between the lanes of a warp (PTX ISA 9.7.9.6, 9.7.13): shfl, vote, match, redux.

An instruction is two steps: what the lanes of its group have together, and what each lane makes of it. Where lanes may
have diverged, or a mask names some of them only, they converge first (`convergence.converge`). A group that is complete
runs both steps at once, on the lanes of the current mask. Lanes that had to wait gave their values (`give`), and run
the second step only, with what was computed when the last of them came (`_told`).
"""

from collections.abc import Callable
from enum import IntEnum

from tegrad.ptx.analysis import MET, member_mask
from tegrad.ptx.gather import each_lane, gather
from tegrad.ptx.helpers import family
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import LANES, Frame
from tegrad.ptx.lowering import Lowering
from tegrad.ptx.rules import PRED, U32, Handler, mod
from tegrad.ptx.syntax import Ins, Operand, Pair
from tegrad.ptx.types import TYPES, Ty

SHFL_MODES = ("up", "down", "bfly", "idx")
MATCH = "tgx_match_b"


def _outputs(op: Operand) -> tuple[Operand, Operand]:
    return (op.first, op.second) if isinstance(op, Pair) else (op, None)


def source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane a lane reads from, and whether that is in range; the text of the PTX document."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    most = (lane & segment) | (clamp & ~segment & 31)
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment & 31)}[mode]
    ok = j >= most if mode == "up" else j <= most
    return (j if ok else lane), ok


class Action(IntEnum):
    """What lanes that wait for each other will get; from REDUX on, an entry of REDUCTIONS."""

    NOTHING = 0
    SHFL = 1
    VOTE = 2
    MATCH = 3
    REDUX = 4


_ACTIONS = {"shfl": Action.SHFL, "vote": Action.VOTE, "match": Action.MATCH}
REDUCTIONS = (
    *((op, "u32") for op in ("add", "and", "or", "xor", "min", "max")), ("min", "s32"), ("max", "s32")
)  # fmt: skip


def action(ins: Ins) -> int:
    """The action of a `.sync` instruction."""
    if ins.base != "redux":
        return _ACTIONS.get(ins.base, Action.NOTHING)
    op, ty = _reduction(ins)
    return Action.REDUX + REDUCTIONS.index((op, "s32" if ty.signed and op in ("min", "max") else "u32"))


def give(e: Lowering, ins: Ins) -> tuple[V, V]:
    """What a lane leaves for the others: a value (i64), and the lane that it reads from."""
    f = e.f
    none = f.const("i32", 0)
    if ins.base == "shfl":
        return f.resize(e.read(ins.operands[1], U32), "i64", False), _source(e, ins)[0]
    if ins.base == "vote":
        return f.cast("zext", e.read(ins.operands[1], PRED), "i64"), none
    if ins.base in ("match", "redux"):
        value = e.read(ins.operands[1], TYPES[f"b{ins.types[-1].bits}"])
        return f.resize(value, "i64", False), none
    return f.const("i64", 0), none


def _told(e: Lowering) -> tuple[V, V]:
    """What lanes that waited got, and their groups."""
    return e.f.load("i32", e.frame, Frame.CONVERGE_RESULT, LANES, 64), e.f.load(
        "i32", e.frame, Frame.CONVERGE_GROUP, LANES, 64
    )


def _handlers(base: str, joined: Callable[..., V], finish: Callable[..., None]) -> dict[str, Handler[Lowering]]:
    """An instruction, and the pseudo instruction of lanes that waited."""

    def now(e: Lowering, ins: Ins) -> None:
        lanes = e.mask if base == "shfl" else members(e, ins)
        finish(e, ins, joined(e, ins, lanes), lanes)

    return {base: now, MET + base: lambda e, ins: finish(e, ins, *_told(e))}


def _moves(mode: str, b: V, c: V) -> list[tuple[int, bool]]:
    """The lane that each lane reads from, and whether it is in range, where constants tell; else nothing."""
    if b.n > 1 or c.n > 1 or "%" in b.ref + c.ref:
        return []
    return [source_lane(mode, lane, int(b.ref), int(c.ref)) for lane in range(LANES)]


def _source(e: Lowering, ins: Ins) -> tuple[V, V]:
    """The lane that each lane reads from, and whether it is in range."""
    f = e.f
    mode, b, c = _shfl(e, ins)
    if moves := _moves(mode, b, c):
        ok = f.mask_vec(f.const("i32", sum(ok << i for i, (_, ok) in enumerate(moves))))
        return f.elements("i32", [j for j, _ in moves]), ok
    return _lanes(f, mode, b, c)


def _shfl(e: Lowering, ins: Ins) -> tuple[str, V, V]:
    """The mode of a shfl, and its sources b and c."""
    return next(m for m in ins.mods if m in SHFL_MODES), e.read(ins.operands[2], U32), e.read(ins.operands[3], U32)


def _shfl_joined(e: Lowering, ins: Ins, lanes: V) -> V:
    """shfl.sync.mode.b32 d|p, a, b, c, membermask."""
    f = e.f
    a = f.splat(e.read(ins.operands[1], U32), LANES)
    if moves := _moves(*_shfl(e, ins)):
        return f.shuffle(a, None, [j for j, _ in moves])
    return permute(f, a, _source(e, ins)[0])


def _shfl_finish(e: Lowering, ins: Ins, value: V, lanes: V) -> None:
    target, pred = _outputs(ins.operands[0])
    e.write(target, value, U32, ins)
    if pred is not None:
        e.write(pred, _source(e, ins)[1], PRED, ins)


def _lanes(f: Fn, mode: str, b: V, c: V) -> tuple[V, V]:
    """`source_lane` for values that are known at run time only."""
    lane = f.iota("i32", LANES)
    b, c = (f.splat(x, LANES) for x in (b, c))
    low = f.like(b, 31)
    b, clamp, segment = f.and_(b, low), f.and_(c, low), f.and_(f.bin("lshr", c, 8), low)
    outside = f.and_(f.not_(segment), low)
    most = f.or_(f.and_(lane, segment), f.and_(clamp, outside))
    j = {
        "up": lambda: f.sub(lane, b),
        "down": lambda: f.add(lane, b),
        "bfly": lambda: f.xor(lane, b),
        "idx": lambda: f.or_(f.and_(lane, segment), f.and_(b, outside)),
    }[mode]()
    ok = f.icmp("sge" if mode == "up" else "sle", j, most)
    return f.select(ok, j, lane), ok


def permute(f: Fn, a: V, index: V) -> V:
    """a[index[i]] for each lane, through a stack slot."""
    slot = f.alloca(f"<{LANES} x {a.el}>", 64)
    f.store(a, slot, 0, 64)
    offsets = f.resize(f.mul(index, 4), "i64", False)
    return gather(f, slot, offsets, f.const("i1", 1, LANES), a.el)


def members(e: Lowering, ins: Ins) -> V:
    """The lanes that take part: those that run, and are in the member mask."""
    lanes = e.lanes(ins)
    if "sync" not in ins.mods:
        return lanes
    v = e.read(member_mask(ins), U32)
    if v.n > 1:
        v = e.f.extract(v, e.f.intr_flag("cttz", lanes, False))
    return e.f.and_(lanes, v)


def _vote_joined(e: Lowering, ins: Ins, lanes: V) -> V:
    """vote.sync.{all,any,uni}.pred p, q, mask and vote.sync.ballot.b32 d, q, mask."""
    return e.f.and_(e.bits_of(e.read(ins.operands[1], PRED)), lanes)


def _vote_finish(e: Lowering, ins: Ins, bits: V, lanes: V) -> None:
    f = e.f
    if mod(ins, "ballot"):
        e.write(ins.operands[0], bits, U32, ins)
        return
    every, none = f.icmp("eq", bits, lanes), f.icmp("eq", bits, f.const("i32", 0))
    out = every if mod(ins, "all") else f.not_(none) if mod(ins, "any") else f.or_(every, none)
    e.write(ins.operands[0], out, PRED, ins)


def activemask(e: Lowering, ins: Ins) -> None:
    """The lanes that run together now."""
    e.write(ins.operands[0], e.mask, U32, ins)


IDENTITY = {"add": 0, "or": 0, "xor": 0, "and": -1}
REDUCE = {"add": "add", "or": "or", "xor": "xor", "and": "and", "min": "min", "max": "max"}


def _reduction(ins: Ins) -> tuple[str, Ty]:
    t = ins.types[-1]
    if t.kind == "f":
        raise NotImplementedError
    return next(m for m in ins.mods if m in REDUCE), t


def _redux_joined(e: Lowering, ins: Ins, lanes: V) -> V:
    """redux.sync.op.type d, a, mask."""
    op, t = _reduction(ins)
    return reduce(e.f, op, t, e.f.splat(e.read(ins.operands[1], t), LANES), lanes)


def _redux_finish(e: Lowering, ins: Ins, value: V, lanes: V) -> None:
    e.write(ins.operands[0], value, ins.types[-1], ins)


def reduce(f: Fn, op: str, t: Ty, a: V, lanes: V) -> V:
    """The combination of the values of the lanes of a mask."""
    name = op
    if op in ("min", "max"):
        name = ("s" if t.signed else "u") + op
        low, high = (-(1 << 31), (1 << 31) - 1) if t.signed else (0, -1)
        empty = high if op == "min" else low
    else:
        empty = IDENTITY[op]
    kept = f.select(f.mask_vec(lanes), a, empty)
    return f.call(f"llvm.vector.reduce.{name}.v{LANES}{a.el}", a.el, 1, kept, pure=True)


@family(MATCH)
def emit_match(module: Module, name: str) -> None:
    """tgx_match_b*(values, mask): for each lane the mask of lanes with its value."""
    el = f"i{name.removeprefix(MATCH)}"
    f = Fn(module, name, "<32 x i32>", f"<32 x {el}> values, i32 mask", "nounwind")
    values, mask = f.args
    active = f.mask_vec(mask)
    out = f.variable(f.const("i32", 0, LANES), 64)
    with each_lane(f, mask) as lane:
        equal = f.and_(f.icmp("eq", values, f.extract(values, lane)), active)
        f.store(f.select(equal, f.mask_bits(equal), f.load("i32", out, 0, LANES)), out)
    f.ret(f.load("i32", out, 0, LANES))
    f.finish()


def _match_joined(e: Lowering, ins: Ins, lanes: V) -> V:
    """match.any.sync d, a, mask; match.all.sync d|p, a, mask."""
    t = ins.types[-1]
    a = e.f.splat(e.read(ins.operands[1], t), LANES)
    return e.f.call(f"{MATCH}{t.bits}", "i32", LANES, a, lanes)


def _match_finish(e: Lowering, ins: Ins, groups: V, lanes: V) -> None:
    f = e.f
    target, pred = _outputs(ins.operands[0])
    if mod(ins, "any"):
        e.write(target, groups, U32, ins)
        return
    every = f.icmp("eq", groups, lanes)
    e.write(target, f.select(every, lanes, f.const("i32", 0)), U32, ins)
    e.write(pred, every, PRED, ins)


def _elect_joined(e: Lowering, ins: Ins, lanes: V) -> V:
    """elect.sync d|p, mask: the lowest lane is the leader."""
    return e.f.intr_flag("cttz", lanes, False)


def _elect_finish(e: Lowering, ins: Ins, leader: V, lanes: V) -> None:
    target, pred = _outputs(ins.operands[0])
    e.write(target, leader, U32, ins)
    e.write(pred, e.f.icmp("eq", e.f.iota("i32", LANES), leader), PRED, ins)


HANDLERS: dict[str, Handler[Lowering]] = {
    "activemask": activemask,
    **_handlers("shfl", _shfl_joined, _shfl_finish),
    **_handlers("vote", _vote_joined, _vote_finish),
    **_handlers("match", _match_joined, _match_finish),
    **_handlers("redux", _redux_joined, _redux_finish),
    **_handlers("elect", _elect_joined, _elect_finish),
}
