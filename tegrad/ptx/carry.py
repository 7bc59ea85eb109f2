"""Extended-precision arithmetic with the carry flag (PTX ISA 9.7.2): add.cc, addc, sub.cc, subc, mad.cc, madc.

The flag is a value of the emitter; it does not live across basic blocks, as compilers keep such chains together.
"""

from typing import Protocol

from tegrad.ptx.integer import mul
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.lowering import Operands
from tegrad.ptx.rules import Handler, mod
from tegrad.ptx.syntax import Ins


class Carries(Operands, Protocol):
    """The flag is nowhere but in the emitter: it is no operand."""

    carry: V | None


def _sum(f: Fn, a: V, b: V, carry: V | None) -> tuple[V, V]:
    """a + b + carry and the carry out."""
    a, b = f.same(a, b)
    out = f.add(a, b)
    over = f.icmp("ult", out, a)
    if carry is None:
        return out, over
    extra = f.resize(carry, a.el, False)
    total = f.add(out, extra)
    return total, f.or_(over, f.icmp("ult", total, f.splat(out, total.n)))


def _difference(f: Fn, a: V, b: V, carry: V | None) -> tuple[V, V]:
    """a - b - borrow and the borrow out."""
    a, b = f.same(a, b)
    out, under = f.sub(a, b), f.icmp("ult", a, b)
    if carry is None:
        return out, under
    extra = f.resize(carry, a.el, False)
    total = f.sub(out, extra)
    return total, f.or_(under, f.icmp("ult", f.splat(out, total.n), f.splat(extra, total.n)))


def extended(e: Carries, ins: Ins) -> None:
    """Any of the six instructions; the base name tells the operation and whether the flag is read."""
    t = ins.types[-1]
    reads = ins.base.endswith("c")
    kind = ins.base[:3]
    values = [e.read(o, t) for o in ins.operands[1:]]
    if ins.pred is not None or (reads and e.carry is None):
        raise NotImplementedError
    carry = e.carry if reads else None
    if kind == "mad":
        product = mul(e.f, ins, values[0], values[1])
        values = [product, values[2]]
    out, flag = (_difference if kind == "sub" else _sum)(e.f, values[0], values[1], carry)
    if mod(ins, "cc"):
        e.carry = flag
    e.write(ins.operands[0], out, t, ins)


HANDLERS: dict[str, Handler[Carries]] = {"addc": extended, "subc": extended, "madc": extended}
CC_BASES = frozenset({"add", "sub", "mad"})
