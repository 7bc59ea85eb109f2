"""Instructions that exchange values between the lanes of a warp (PTX ISA 9.7.9.6, 9.7.13): shfl, vote, match, redux.

The `.sync` forms meet in `control.rendezvous` first where lanes may have diverged, so that the lanes of the member mask
execute them together; here the lanes that run are the current mask.
"""

from typing import TYPE_CHECKING

from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.lanes import each_lane, gather
from tegrad.ptx.layout import LANES
from tegrad.ptx.rules import PRED, U32, Handler, mod
from tegrad.ptx.syntax import Imm, Ins, Operand, Pair
from tegrad.ptx.types import Ty

if TYPE_CHECKING:
    from tegrad.ptx.emitter import Emitter

SHFL_MODES = ("up", "down", "bfly", "idx")


def _outputs(op: Operand) -> tuple[Operand, Operand]:
    return (op.first, op.second) if isinstance(op, Pair) else (op, None)


def source_lane(mode: str, lane: int, b: int, c: int) -> tuple[int, bool]:
    """The lane a lane reads from, and whether that is in range; the text of the PTX document."""
    b, clamp, segment = b & 31, c & 31, c >> 8 & 31
    most = (lane & segment) | (clamp & ~segment & 31)
    j = {"up": lane - b, "down": lane + b, "bfly": lane ^ b, "idx": (lane & segment) | (b & ~segment & 31)}[mode]
    ok = j >= most if mode == "up" else j <= most
    return (j if ok else lane), ok


def shfl(e: "Emitter", ins: Ins) -> None:
    """shfl.sync.mode.b32 d|p, a, b, c, membermask."""
    f = e.f
    mode = next(m for m in ins.mods if m in SHFL_MODES)
    target, pred = _outputs(ins.operands[0])
    a = f.splat(e.read(ins.operands[1], U32), LANES)
    b, c = ins.operands[2:4]
    if isinstance(b, Imm) and isinstance(c, Imm):
        moves = [source_lane(mode, i, int(b.value), int(c.value)) for i in range(LANES)]
        e.write(target, f.shuffle(a, None, [j for j, _ in moves]), U32, ins)
        e.write(pred, f.mask_vec(f.const("i32", sum(ok << i for i, (_, ok) in enumerate(moves)))), PRED, ins)
        return
    j, ok = _lanes(f, mode, e.read(b, U32), e.read(c, U32))
    e.write(target, permute(f, a, j), U32, ins)
    e.write(pred, ok, PRED, ins)


def _lanes(f: Fn, mode: str, b: V, c: V) -> tuple[V, V]:
    """`source_lane` for values that are known at run time only."""
    lane = f.iota("i32", LANES)
    b, c = (f.splat(x, LANES) for x in (b, c))
    low = f.like(b, 31)
    b, clamp, segment = f.and_(b, low), f.and_(c, low), f.and_(f.bin("lshr", c, f.like(c, 8)), low)
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
    offsets = f.resize(f.mul(index, f.like(index, 4)), "i64", False)
    return gather(f, slot, offsets, f.const("i1", 1, LANES), a.el)


def members(e: "Emitter", ins: Ins, op: Operand) -> V:
    """The lanes that take part: those that run, and are in the member mask."""
    v = e.read(op, U32)
    lanes = e.lanes(ins)
    if v.n > 1:
        v = e.f.extract(v, e.f.intr_flag("cttz", lanes, False))
    return e.f.and_(lanes, v)


def vote(e: "Emitter", ins: Ins) -> None:
    """vote.sync.{all,any,uni}.pred p, q, mask and vote.sync.ballot.b32 d, q, mask."""
    f = e.f
    lanes = members(e, ins, ins.operands[2]) if mod(ins, "sync") else e.lanes(ins)
    bits = f.and_(e.bits_of(e.read(ins.operands[1], PRED)), lanes)
    zero = f.const("i32", 0)
    if mod(ins, "ballot"):
        e.write(ins.operands[0], bits, U32, ins)
        return
    every, none = f.icmp("eq", bits, lanes), f.icmp("eq", bits, zero)
    out = every if mod(ins, "all") else f.not_(none) if mod(ins, "any") else f.or_(every, none)
    e.write(ins.operands[0], out, PRED, ins)


def activemask(e: "Emitter", ins: Ins) -> None:
    """The lanes that run together now."""
    e.write(ins.operands[0], e.mask, U32, ins)


IDENTITY = {"add": 0, "or": 0, "xor": 0, "and": -1}
REDUCE = {"add": "add", "or": "or", "xor": "xor", "and": "and", "min": "min", "max": "max"}


def redux(e: "Emitter", ins: Ins) -> None:
    """redux.sync.op.type d, a, mask."""
    f = e.f
    t = ins.types[-1]
    if t.kind == "f":
        raise NotImplementedError
    op = next(m for m in ins.mods if m in REDUCE)
    a = f.splat(e.read(ins.operands[1], t), LANES)
    lanes = members(e, ins, ins.operands[2])
    e.write(ins.operands[0], reduce(f, op, t, a, lanes), t, ins)


def reduce(f: Fn, op: str, t: Ty, a: V, lanes: V) -> V:
    """The combination of the values of the lanes of a mask."""
    name = op
    if op in ("min", "max"):
        name = ("s" if t.signed else "u") + op
        low, high = (-(1 << 31), (1 << 31) - 1) if t.signed else (0, -1)
        empty = high if op == "min" else low
    else:
        empty = IDENTITY[op]
    kept = f.select(f.mask_vec(lanes), a, f.like(a, empty))
    return f.call(f"llvm.vector.reduce.{name}.v{LANES}{a.el}", a.el, 1, kept, pure=True)


def emit_match(module: Module, bits: int) -> None:
    """tgx_match_b*(values, mask): for each lane the mask of lanes with its value."""
    el = f"i{bits}"
    f = Fn(module, f"tgx_match_b{bits}", "<32 x i32>", [(f"<32 x {el}>", "values"), ("i32", "mask")], "nounwind")
    values, mask = f.args
    active = f.mask_vec(mask)
    out = f.alloca("<32 x i32>", 64)
    f.store(f.const("i32", 0, LANES), out)
    with each_lane(f, mask) as lane:
        equal = f.and_(f.icmp("eq", values, f.extract(values, lane)), active)
        f.store(f.select(equal, f.mask_bits(equal), f.load("i32", out, 0, LANES)), out)
    f.ret(f.load("i32", out, 0, LANES))
    f.finish()


def match(e: "Emitter", ins: Ins) -> None:
    """match.any.sync d, a, mask; match.all.sync d|p, a, mask."""
    f = e.f
    t = ins.types[-1]
    target, pred = _outputs(ins.operands[0])
    a = f.splat(e.read(ins.operands[1], t), LANES)
    lanes = members(e, ins, ins.operands[2])
    groups = f.call(f"tgx_match_b{t.bits}", "i32", LANES, a, lanes)
    if mod(ins, "any"):
        e.write(target, groups, U32, ins)
        return
    first = f.extract(groups, f.intr_flag("cttz", lanes, False))
    every = f.icmp("eq", first, lanes)
    e.write(target, f.select(every, lanes, f.const("i32", 0)), U32, ins)
    e.write(pred, every, PRED, ins)


def elect(e: "Emitter", ins: Ins) -> None:
    """elect.sync d|p, mask: the lowest lane is the leader."""
    f = e.f
    target, pred = _outputs(ins.operands[0])
    leader = f.intr_flag("cttz", members(e, ins, ins.operands[1]), False)
    e.write(target, leader, U32, ins)
    e.write(pred, f.icmp("eq", f.iota("i32", LANES), leader), PRED, ins)


HANDLERS: dict[str, Handler] = {
    "shfl": shfl, "vote": vote, "activemask": activemask, "redux": redux, "match": match, "elect": elect,
}  # fmt: skip
