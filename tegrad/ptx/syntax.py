"""The parsed form of a PTX module."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tegrad.ptx.types import Ty


class Reg(NamedTuple):
    """A register, by its number in the kernel."""

    number: int


class Imm(NamedTuple):
    """An immediate: integers as written, floats as their value with the width of the literal (0f.., 0d..)."""

    value: int | float
    bits: int = 0


class Sym(NamedTuple):
    """A name: a variable, a parameter, a label, a function; with a byte offset."""

    name: str
    offset: int = 0


class Special(NamedTuple):
    """A special register, e.g. %tid.x."""

    name: str


class Addr(NamedTuple):
    """[base + offset]."""

    base: "Reg | Sym | Imm"
    offset: int


class Vec(NamedTuple):
    """{a, b, ...}."""

    items: "tuple[Operand, ...]"


class Pair(NamedTuple):
    """p|q, the two results of setp or of shfl; either may be the sink `_` (None)."""

    first: "Reg | None"
    second: "Reg | None"


class Not(NamedTuple):
    """!p as a source operand."""

    reg: Reg


class Args(NamedTuple):
    """(a, b) of a call."""

    items: "tuple[Operand, ...]"


Operand = Reg | Imm | Sym | Special | Addr | Vec | Pair | Not | Args | None


def items(op: Operand) -> "tuple[Operand, ...]":
    """The parts of a vector; any other operand by itself."""
    return op.items if isinstance(op, Vec) else (op,)


class Ins(NamedTuple):
    """An instruction. `types` are those modifiers that name a type; `pred` is (register, negated)."""

    op: str
    base: str
    mods: tuple[str, ...]
    types: tuple[Ty, ...]
    operands: tuple[Operand, ...]
    pred: tuple[int, bool] | None
    line: int


class Label(NamedTuple):
    """A branch target in a body."""

    name: str


class Param(NamedTuple):
    """A kernel or function parameter: byte offset, size of the whole, element type."""

    name: str
    offset: int
    size: int
    type: Ty


@dataclass
class Variable:
    """A variable of module or function scope. `init` are its bytes; `pointers` the (offset, symbol, addend) in them."""

    name: str
    space: str
    size: int
    align: int
    init: bytes | None = None
    pointers: Sequence[tuple[int, str, int]] = ()
    extern: bool = False


@dataclass
class Function:
    """A .entry or a .func. `tables` are the label lists of .branchtargets."""

    name: str
    entry: bool
    params: list[Param] = field(default_factory=list)
    results: list[Param] = field(default_factory=list)
    param_size: int = 0
    max_threads: tuple[int, int, int] | None = None
    exact_threads: bool = False
    body: list[Ins | Label] = field(default_factory=list)
    regs: list[Ty] = field(default_factory=list)
    variables: list[Variable] = field(default_factory=list)
    tables: dict[str, list[str]] = field(default_factory=dict)


@dataclass
class Source:
    """A parsed module: its text, functions and module-scope variables."""

    text: str
    target: str = ""
    functions: dict[str, Function] = field(default_factory=dict)
    variables: dict[str, Variable] = field(default_factory=dict)

    def line(self, number: int) -> str:
        """The text of a line, counted from 1."""
        lines = self.text.split("\n")
        return lines[number - 1].strip() if 0 < number <= len(lines) else ""
