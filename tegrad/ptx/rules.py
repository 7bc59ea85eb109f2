"""How instruction tables are written.

A pure instruction is a `OpRule`: the types of its result and sources, and a function that writes the LLVM IR for values
of those types, scalar or vector alike. Everything else (memory, warp, matrix) is a handler.
"""

import re
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from tegrad.ptx.errors import PtxError
from tegrad.ptx.ir import V
from tegrad.ptx.syntax import Ins, Source
from tegrad.ptx.types import TYPES, Ty

Signature = Callable[[Ins], tuple[Ty, tuple[Ty, ...]]]
Apply = Callable[..., V]
E = TypeVar("E", contravariant=True)
Handler = Callable[[E, Ins], None]
"""Writes one instruction; `E` is what it needs of the emitter (`lowering`)."""

PRED, U32 = TYPES["pred"], TYPES["u32"]


class OpRule(NamedTuple):
    """A pure instruction. `apply(f, ins, *sources)` returns the result."""

    signature: Signature
    apply: Apply


def same(count: int) -> Signature:
    """Result and `count` sources of the instruction's type."""
    return lambda ins: (ins.types[-1], (ins.types[-1],) * count)


def wide(ty: Ty) -> Ty:
    """The integer type of twice the width."""
    return TYPES[f"{ty.kind}{ty.bits * 2}"]


def nothing(e: object, ins: Ins) -> None:
    """The handler of what has no effect on results: prefetches, hints to caches and the scheduler, marks for tools."""


def unsupported(ins: Ins) -> str:
    return f"line {ins.line}: instruction {ins.op} is not supported by the PTX engine"


def require(source: Source, ins: Ins, age: int) -> None:
    """PtxError where a module's .target has not got an instruction that needs sm_`age`."""
    digits = re.match(r"sm_(\d+)", source.target)
    if digits is None or int(digits[1]) < age:
        raise PtxError(
            f"line {ins.line}: instruction {ins.op} needs sm_{age}, the module is for {source.target or 'none'}"
        )


def mod(ins: Ins, *names: str) -> bool:
    """Whether the instruction has one of these modifiers."""
    return any(n in ins.mods for n in names)
