"""Accesses of a block whose addresses are one register plus constants: what they have in common is found out once.

A view is a structure on the warp's stack. `tgx_view` fills it before the first access of such a group: the lanes'
addresses, whether they lie at equal distances, and what the pages between the lowest and the highest byte of the whole
group allow. `tgx_ldv_*` and `tgx_stv_*` then look at a few scalars; where a view does not prove an access good, they
leave it to the helper that checks every lane, which finds the fault or does the work.
"""

from dataclasses import dataclass
from enum import IntEnum

from tegrad.ptx.access import Transfer, last_first, sizes
from tegrad.ptx.access import helper_name as general_name
from tegrad.ptx.analysis import Block, defs_uses
from tegrad.ptx.check import AccessShape, Checker
from tegrad.ptx.gather import gather_any, interleave, scatter_any
from tegrad.ptx.helpers import family, helper
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import ALL_LANES, LANES, Access, Frame
from tegrad.ptx.syntax import Addr, Ins, Reg

FEWEST_ACCESSES = 2
"""Accesses that a group must have for a view to pay."""
MAX_SPAN_BYTES = 1 << 20
"""Most bytes between the constants of a group."""
NO_STRIDE = 1 << 62


class View(IntEnum):
    """Offsets in a view: host addresses of the lanes, that of lane 0, the distance from lane to lane, what the pages
    allow (the flags of the page table), and the low bits that any address has set."""

    HOST = 0
    ADDRESS = 256
    START = 512
    STRIDE = 520
    CAN = 528
    BITS = 532
    SIZE = 576


@dataclass
class Group:
    """Accesses through one value of a register; bytes `low` to `low + size - 1` from it."""

    register: int
    low: int
    high: int
    count: int = 1
    view: V | None = None


def _global_access(ins: Ins) -> tuple[int, int, int] | None:
    """Register, constant and bytes of an unconditional load or store of global memory by [register + constant]."""
    if ins.base not in ("ld", "st") or "global" not in ins.mods or ins.pred is not None:
        return None
    where = ins.operands[0 if ins.base == "st" else 1]
    if not isinstance(where, Addr) or not isinstance(where.base, Reg):
        return None
    n = next((int(m[1]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
    return where.base.number, where.offset, n * ins.types[-1].size


def groups(block: Block) -> dict[int, Group]:
    """The groups of a block by the index in its body of each of their accesses."""
    current: dict[int, Group] = {}
    found: dict[int, Group] = {}
    for index, ins in enumerate(block.body):
        access = _global_access(ins)
        if access is not None:
            register, low, size = access
            group = current.get(register)
            if group is None:
                group = current[register] = Group(register, low, low + size, 0)
            bottom, top = min(group.low, low), max(group.high, low + size)
            if top - bottom <= MAX_SPAN_BYTES:
                group.low, group.high, group.count = bottom, top, group.count + 1
                found[index] = group
        for register in defs_uses(ins)[0]:
            current.pop(register, None)
    return {index: group for index, group in found.items() if group.count >= FEWEST_ACCESSES}


@helper("void", "ptr frame, ptr view, <32 x i64> addr, i32 mask, i64 low, i64 size")
def tgx_view(f: Fn, frame: V, view: V, addr: V, mask: V, low: V, size: V) -> None:
    """Fill a view for size bytes from address + low on."""
    check = Checker(f, frame, AccessShape("global", 8, 1, Access.READ))
    host = f.add(addr, f.splat(check.base, LANES))
    f.store(host, view, View.HOST, 64)
    f.store(addr, view, View.ADDRESS, 64)
    active = f.mask_vec(mask)
    first = f.extract(addr, 0)
    stride = f.sub(f.extract(addr, 1), first)
    even = f.add(f.splat(first, LANES), f.mul(f.iota("i64", LANES), f.splat(stride, LANES)))
    equal = f.is_zero(f.mask_bits(f.icmp("ne", addr, even)))
    regular = f.and_(equal, f.icmp("eq", mask, ALL_LANES))
    f.store(f.extract(host, 0), view, View.START)
    f.store(f.select(regular, stride, NO_STRIDE), view, View.STRIDE)
    bottom, top, bits = (f.alloca("i64") for _ in range(3))
    end = f.extract(addr, LANES - 1)
    f.store(f.intr("umin", first, end), bottom)
    f.store(f.intr("umax", first, end), top)
    f.store(f.or_(first, stride), bits)
    with f.if_(f.not_(regular)):
        f.store(check.reduce("umin", f.select(active, addr, -1)), bottom)
        f.store(check.reduce("umax", f.select(active, addr, 0)), top)
        f.store(check.reduce("or", f.select(active, addr, 0)), bits)
    f.store(f.cast("trunc", f.load("i64", bits), "i32"), view, View.BITS)
    lowest = f.add(f.load("i64", bottom), low)
    highest = f.add(f.load("i64", top), f.add(low, f.sub(size, 1)))
    can = f.alloca("i32")
    f.store(f.select(check.inside(lowest, highest), f.const("i32", 3), f.const("i32", 0)), can)
    idle = f.is_zero(mask)
    with f.if_(f.or_(idle, f.not_zero(f.load("i32", frame, Frame.FAULTED))), False):
        f.store(f.const("i32", 0), can)
    ask = f.and_(f.not_zero(f.load("i32", can)), f.not_zero(check.pages))
    with f.if_(ask):
        f.store(f.and_(f.load("i32", can), check.span(lowest, highest)), can)
    f.store(f.load("i32", can), view, View.CAN)


def helper_name(kind: str, bits: int, n: int) -> str:
    return f"tgx_{kind}v_global_b{bits}x{n}"


@family("tgx_ldv_", "tgx_stv_")
def emit_access(module: Module, name: str) -> None:
    """tgx_ldv_*(frame, view, mask, constant, pc[, out]) and tgx_stv_*(..., value or buffer): an access of a group."""
    kind, (bits, n) = name.split("_")[1].removesuffix("v"), sizes(name)
    store = kind == "st"
    shape = AccessShape("global", bits, n, Access.WRITE if store else Access.READ)
    moved = Transfer(module, name, shape, store, "ptr frame, ptr view, i32 mask, i64 off, i32 pc")
    f = moved.f
    frame, view, mask, off, pc = moved.where
    low_bits = f.or_(f.load("i32", view, View.BITS), f.cast("trunc", off, "i32"))
    flag = f.and_(f.load("i32", view, View.CAN), shape.flag)
    good = f.and_(f.not_zero(flag), f.is_zero(f.and_(low_bits, shape.step - 1)))
    good = f.and_(good, f.is_zero(f.load("i32", frame, Frame.FAULTED)))
    fast, slow, row, other = (f.name_of(h) for h in ("fast", "slow", "row", "other"))
    f.condbr(good, fast, slow, True)
    f.label(fast)
    stride = f.load("i64", view, View.STRIDE)
    f.condbr(f.icmp("eq", stride, shape.step), row, other, True)
    f.label(row)
    p = f.pointer(f.add(f.load("i64", view, View.START), off))
    if store:
        f.store(interleave(f, moved.values()), p, 0, bits // 8)
        f.ret()
    else:
        moved.give_row(f.load(shape.el, p, 0, LANES * n, bits // 8, once=True))
    f.label(other)
    if not store:
        one, apart = f.name_of("one"), f.name_of("apart")
        f.condbr(f.is_zero(stride), one, apart)
        f.label(one)
        p = f.pointer(f.add(f.load("i64", view, View.START), off))
        moved.give(last_first(f, n, lambda i: f.splat(f.load(shape.el, p, i * bits // 8, once=True), LANES)))
        f.label(apart)
    hosts = f.add(f.load("i64", view, View.HOST, LANES, 64), f.splat(off, LANES))
    each = [f.add(hosts, i * bits // 8) for i in range(n)]
    active = f.mask_vec(mask)
    if store:
        for h, v in zip(each, moved.values(), strict=True):
            scatter_any(f, h, active, v)
            f.in_order()
        f.ret()
    else:
        moved.give(last_first(f, n, lambda i: gather_any(f, each[i], active, shape.el)))
    f.label(slow)
    addr = f.add(f.load("i64", view, View.ADDRESS, LANES, 64), f.splat(off, LANES))
    moved.pass_on(general_name(kind, "global", bits, n), frame, addr, mask, pc)
    f.finish()
