"""Pure instructions that LLVM takes long over are compiled once, as functions that all kernels call.

Compiling them is most of a kernel's time otherwise: 12 ms for each ex2 of 32 lanes, 6 ms for each dp4a.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import LANES
from tegrad.ptx.rules import OpRule
from tegrad.ptx.syntax import Ins

PREFIX: Final = "tgx_op_"
MOST_LINES: Final = 8
"""Lines of IR that an instruction may have in a kernel."""
DEAR: Final = ("fptosi.sat", "fptoui.sat")
"""Intrinsics of one line that are many instructions without AVX-512."""


def applied(f: Fn, rule: OpRule, ins: Ins, values: Sequence[V]) -> V:
    """The result of an instruction: written here if it is short or the same for the whole warp, else a call."""
    if all(v.n == 1 for v in values):
        return rule.apply(f, ins, *values)
    like = tuple(V(v.el, v.n, f"%x{at}") if v.ref.startswith("%") else v for at, v in enumerate(values))
    name, el = _call(rule, ins._replace(operands=(), pred=None, line=0), like)
    if not name:
        return rule.apply(f, ins, *values)
    return f.call(name, el, LANES, *(f.splat(v, LANES) for v in values), pure=True)


@lru_cache(4096)
def _call(rule: OpRule, ins: Ins, values: tuple[V, ...]) -> tuple[str, str]:
    """The function's name and the type of its elements; no name for what is written in the kernel."""
    f = Fn(Module(), "tried", "void", "")
    out = rule.apply(f, ins, *values)
    short = len(f.lines) <= MOST_LINES and not any(word in line for line in f.lines for word in DEAR)
    if short or out.n != LANES or "i1" in (out.el, *(v.el for v in values)):
        return "", ""
    return PREFIX + ins.op.replace("::", "__"), out.el
