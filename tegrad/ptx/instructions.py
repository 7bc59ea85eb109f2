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
    warp,
    warpgroup,
)
from tegrad.ptx.emitter import Emitter
from tegrad.ptx.errors import PtxError
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
