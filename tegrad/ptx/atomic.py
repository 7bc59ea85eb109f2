"""atom and red, fences (PTX ISA 9.7.13.4 to 9.7.13.6).

An atomic runs lane after lane as an atomic operation of the host, so that it is atomic between host threads and with
other processes that map the same memory.
"""

from tegrad.ptx.access import Helper
from tegrad.ptx.check import AccessShape
from tegrad.ptx.floating import PLAIN, bf16_to_f32, f32_to_bf16, flush
from tegrad.ptx.gather import each_lane
from tegrad.ptx.helpers import family
from tegrad.ptx.ir import Module, V
from tegrad.ptx.layout import LANES, Access, Frame
from tegrad.ptx.lowering import Lowering
from tegrad.ptx.memory import address, space_of
from tegrad.ptx.rules import Handler, mod, nothing, require
from tegrad.ptx.syntax import Ins, Vec
from tegrad.ptx.types import TYPES, Ty

INTEGER_OPS = {
    "add": "add",
    "and": "and",
    "or": "or",
    "xor": "xor",
    "exch": "xchg",
    "inc": "uinc_wrap",
    "dec": "udec_wrap",
}
FENCES = frozenset({"sc", "acq_rel", "acquire", "release", "cta", "cluster", "gpu", "sys", "mbarrier_init", "proxy",
                    "alias", "async", "global", "shared__cta", "shared__cluster"})  # fmt: skip
OPS = frozenset({*INTEGER_OPS, "min", "max", "cas"})


class AtomicHelper(Helper):
    """tgx_atom_{space}_{op}_{type}(frame, address, mask, pc, b[, c]) returning the old values."""

    def __init__(self, module: Module, name: str, space: str, op: str, t: Ty) -> None:
        more = f", <32 x {t.iel}> b" + (f", <32 x {t.iel}> c" if op == "cas" else "")
        super().__init__(module, name, AccessShape(space, t.bits, 1, Access.ATOMIC), False, more=more)
        self.op, self.t = op, t
        # A float added in global memory has no subnormal numbers; in shared memory it has.
        self.flushes = t.name == "f32" and op == "add" and space != "shared"
        self.in_shared: V | None = None
        self.subnormal: V | None = None

    def by_lane(self, host: V, good: V) -> None:
        f, t = self.f, self.t
        self.fault_unless(self.open(good))
        out = f.variable(f.const(t.iel, 0, LANES), 64)
        with each_lane(f, self.mask) as lane:
            p = f.pointer(f.extract(host, lane))
            self.subnormal = f.extract(self.in_shared, lane) if self.in_shared is not None else None
            old = self.one(p, [f.extract(s, lane) for s in self.rest])
            f.store(f.insert(f.load(t.iel, out, 0, LANES), old, lane), out)
        self.close()
        f.ret(f.load(t.iel, out, 0, LANES))

    def generic_lanes(self, in_shared: V, in_local: V, shared: V, local: V) -> None:
        self.in_shared = in_shared
        super().generic_lanes(in_shared, in_local, shared, local)

    def consecutive(self, slow: str) -> None:
        """There is no wide path."""

    def common(self) -> None:
        """There is no wide path."""

    def one(self, p: V, values: list[V]) -> V:
        """The operation of one lane; returns what was in memory."""
        f, t, b = self.f, self.t, values[0]
        if self.op == "cas":
            pair = f.name_of("%x")
            f.do(f"{pair} = cmpxchg {p}, {b}, {values[1]} seq_cst seq_cst, align {t.size}")
            return f.op(t.iel, 1, f"extractvalue {{{t.iel}, i1}} {pair}, 0")
        if t.kind == "f" and t.bits > 16 and self.op == "add" and not self.flushes:
            old = f.op(t.el, 1, f"atomicrmw fadd {p}, {f.bits(b, t.el)} seq_cst, align {t.size}", pure=False)
            return f.bits(old, t.iel)
        if t.kind in "fh" or t.name.endswith("x2"):
            return self.loop(p, b)
        name = INTEGER_OPS.get(self.op) or ("" if t.signed else "u") + self.op
        return f.op(t.iel, 1, f"atomicrmw {name} {p}, {b} seq_cst, align {t.size}", pure=False)

    def loop(self, p: V, b: V) -> V:
        """Compare and swap until nobody came between."""
        f, t = self.f, self.t
        seen = f.alloca(t.iel)
        f.store(f.load(t.iel, p), seen)
        with f.loop() as (_, end):
            old = f.load(t.iel, seen)
            new = self.combine(old, b)
            pair = f.name_of("%x")
            f.do(f"{pair} = cmpxchg {p}, {old}, {new} seq_cst seq_cst, align {t.size}")
            f.store(f.op(t.iel, 1, f"extractvalue {{{t.iel}, i1}} {pair}, 0"), seen)
            f.leave(f.op("i1", 1, f"extractvalue {{{t.iel}, i1}} {pair}, 1"), end)
        return f.load(t.iel, seen)

    def combine(self, old: V, b: V) -> V:
        f, t = self.f, self.t
        n, el = {"f16x2": (2, "half"), "bf16x2": (2, "i16"), "bf16": (1, "i16")}.get(t.name, (1, t.el))
        ty = el if n == 1 else f"<{n} x {el}>"
        x, y = (f.op(el, n, f"bitcast {v} to {ty}") for v in (old, b))
        ins = Ins(f"{self.op}", self.op, (), (t,), (), None, 0)
        if self.flushes:
            out = flush(f, f.bin("fadd", flush(f, x), flush(f, y)))
            if self.subnormal is not None:
                out = f.select(self.subnormal, f.bin("fadd", x, y), out)
        elif el == "i16":
            out = f32_to_bf16(f, PLAIN[self.op](f, ins, bf16_to_f32(f, x), bf16_to_f32(f, y)))
        else:
            out = PLAIN[self.op](f, ins, x, y)
        return f.op(t.iel, 1, f"bitcast {out} to {t.iel}")


@family("tgx_atom_")
def emit_atomic(module: Module, name: str) -> None:
    """Write the helper of this name."""
    _, _, space, op, t = name.split("_")
    AtomicHelper(module, name, space, op, TYPES[t]).build()


def atomic(e: Lowering, ins: Ins) -> None:
    """atom d, [a], b{, c} and red [a], b."""
    f = e.f
    t = ins.types[-1]
    op = next(m for m in ins.mods if m in OPS)
    operands = ins.operands if ins.base == "atom" else (None, *ins.operands)
    space = space_of(e, ins._replace(base="atom", operands=operands))
    if mod(ins, "async") or isinstance(operands[2], Vec) or t.bits == 128 or (op == "exch" and t.bits == 16):
        raise NotImplementedError
    as_bits = TYPES[f"b{t.bits}"] if t.kind in "fh" else t
    sources = [
        f.splat(f.bits(e.read(o, t if t.kind == "f" else as_bits), t.iel), LANES)
        for o in operands[2 : 4 if op == "cas" else 3]
    ]
    a = f.splat(address(e, operands[1], space), LANES)
    e.account(ins, t.size, True)
    if mod(ins, "acquire", "acq_rel", "release"):
        f.do("fence seq_cst")
    name = f"tgx_atom_{space}_{op}_{t.name}"
    old = f.call(name, t.iel, LANES, e.frame, a, e.lanes(ins), f.const("i32", e.pc), *sources)
    if operands[0] is not None:
        e.write(operands[0], old, t, ins)


def fence(e: Lowering, ins: Ins) -> None:
    """membar and fence: a fence of the host, as CTAs run on several threads."""
    if ins.base == "fence":
        if not FENCES.issuperset(ins.mods):
            raise NotImplementedError
        require(e.source, ins, 90 if mod(ins, "async", "mbarrier_init", "cluster") else 70)
    if not mod(ins, "proxy"):
        e.f.do("fence seq_cst")
        passed = e.f.load("i32", e.frame, Frame.FENCES)
        e.f.store(e.f.add(passed, 1), e.frame, Frame.FENCES)


def nanosleep(e: Lowering, ins: Ins) -> None:
    """Give way to other warps at the next back edge."""
    e.f.store(e.f.const("i32", 0), e.frame, Frame.BUDGET)


HANDLERS: dict[str, Handler[Lowering]] = {
    "atom": atomic, "red": atomic, "membar": fence, "fence": fence, "nanosleep": nanosleep,
    "griddepcontrol": nothing, "setmaxnreg": nothing,
}  # fmt: skip
