"""What handlers of instructions need of the emitter that calls them; `Emitter` has all of it.

`Operands` is enough for instructions that only compute; `Lowering` is for those that act on lanes or memory. A family
that needs more has a protocol of its own beside its handlers, which says why.
"""

from collections.abc import Mapping
from typing import Protocol

from tegrad.ptx.ir import Fn, V
from tegrad.ptx.syntax import Ins, Operand, Source, Sym
from tegrad.ptx.types import Ty


class Operands(Protocol):
    """The function being written, and the values of an instruction's operands in it."""

    @property
    def f(self) -> Fn: ...

    def read(self, op: Operand, ty: Ty) -> V:
        """An operand as a value of the element type of `ty`; scalar where the whole warp has one value."""

    def write(self, op: Operand, v: V, ty: Ty, ins: Ins) -> None:
        """Give a register (or the parts of a vector operand) a value of type `ty`."""


class Lowering(Operands, Protocol):
    """Where an instruction stands: which lanes execute it, in which frame, launch and module."""

    @property
    def source(self) -> Source: ...

    @property
    def frame(self) -> V:
        """The address of the warp's frame; `launch` that of the launch's record."""

    @property
    def launch(self) -> V: ...

    @property
    def mask(self) -> V:
        """The i32 mask of the lanes that run, whatever the instruction's predicate says."""

    @property
    def pc(self) -> int:
        """The instruction's number in the kernel, which faults name."""

    @property
    def symbols(self) -> Mapping[str, tuple[str, int]]:
        """State space and place of each variable in reach."""

    def lanes(self, ins: Ins) -> V:
        """The i32 mask of the lanes that execute an instruction."""

    def bits_of(self, v: V) -> V:
        """A predicate as an i32 mask."""

    def get(self, reg: int) -> V:
        """The current value of a register, in whatever type it was produced."""

    def address_of(self, sym: Sym) -> V:
        """The value of a variable's name in mov: an offset in its space, or an address in global memory."""

    def account(self, ins: Ins, size: int, write: bool) -> None:
        """Count the bytes that each lane of an access reads or writes."""


class Asynchronous(Lowering, Protocol):
    """For mbarriers and copies that land later: the kernel is launched otherwise if it has any of them."""

    asynchronous: bool
    """Whether it has mbarriers or bulk copies."""
    arrives: bool
    """Whether its cp.async arrive at an mbarrier."""

    @property
    def copy_queue(self) -> int:
        """Where in the frame the copies of cp.async wait."""

    def account_dynamic(self, lanes: V, sizes: V, write: bool) -> None:
        """Count the lanes' bytes where they are known at run time only."""
