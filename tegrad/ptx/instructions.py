"""The table of all instructions, put together from the families."""

from tegrad.ptx import (
    atomic,
    carry,
    compare,
    control,
    conversion,
    copies,
    floating,
    integer,
    matrix,
    mbarrier,
    memory,
    shared,
    warp,
    warpgroup,
)
from tegrad.ptx.emitter import Emitter
from tegrad.ptx.errors import PtxError
from tegrad.ptx.helpers import family
from tegrad.ptx.ir import Fn, Module, vec
from tegrad.ptx.layout import LANES
from tegrad.ptx.parser import split_op
from tegrad.ptx.rules import Handler, OpRule, unsupported
from tegrad.ptx.syntax import Ins

HANDLERS: dict[str, Handler[Emitter]] = {
    **compare.HANDLERS,
    **memory.HANDLERS,
    **control.HANDLERS,
    **matrix.HANDLERS,
    **carry.HANDLERS,
    **warp.HANDLERS,
    **atomic.HANDLERS,
    **copies.HANDLERS,
    **mbarrier.HANDLERS,
    **warpgroup.HANDLERS,
}
"""Handlers by base name; an emitter is all that any of them needs."""
RULES: dict[str, OpRule] = {**compare.RULES, **conversion.RULES}


def find(ins: Ins) -> OpRule | Handler[Emitter]:
    """How an instruction is executed. Raises PtxError for one that is not known."""
    if "cc" in ins.mods and ins.base in carry.CC_BASES:
        return carry.extended
    known: OpRule | Handler[Emitter] | None = HANDLERS.get(ins.base) or RULES.get(ins.base)
    if known is None:
        known = (floating.RULES if floating.is_float(ins) else integer.RULES).get(ins.base)
    if known is None:
        raise PtxError(unsupported(ins))
    return known


@family(shared.PREFIX)
def emit_shared(module: Module, name: str) -> None:
    """tgx_op_*(sources): the instruction that the name ends with, of 32 lanes (`shared`)."""
    op = name.removeprefix(shared.PREFIX)
    ins = Ins(op, *split_op(op), (), None, 0)
    rule = find(ins)
    assert isinstance(rule, OpRule)
    result, sources = rule.signature(ins)
    params = ", ".join(f"{vec(t.el, LANES)} x{at}" for at, t in enumerate(sources))
    f = Fn(module, name, vec(result.el, LANES), params, "nounwind")
    f.ret(rule.apply(f, ins, *f.args))
    f.finish()
