"""Where a kernel's variables and registers live."""

from tegrad.ptx.analysis import Flow
from tegrad.ptx.copies import QUEUE_BYTES
from tegrad.ptx.layout import LANES, Frame
from tegrad.ptx.syntax import Addr, Function, Ins, Source, Sym
from tegrad.ptx.warpgroup import Room


class Layout:
    """Where a kernel's variables and registers live."""

    def __init__(self, source: Source, fn: Function, flow: Flow) -> None:
        self.symbols: dict[str, tuple[str, int]] = {}
        self.shared = self._place(source, fn, "shared")
        self.local = self._place(source, fn, "local")
        self.globals = [v for v in source.variables.values() if v.space in ("global", "const")]
        for i, v in enumerate(self.globals):
            self.symbols[v.name] = (v.space, i)
        self.slots: dict[int, int] = {}
        at = int(Frame.CONVERGE_END if flow.converges else Frame.END)
        for r, ty in enumerate(fn.regs):
            if flow.cross >> r & 1 and r not in flow.constants:
                size = 8 if flow.is_uniform(r) else 4 if ty.kind == "p" else ty.bits // 8 * LANES
                at = -(-at // min(size, 64)) * min(size, 64)
                self.slots[r] = at
                at += size
        self.queue = at = -(-at // 64) * 64
        if any(isinstance(i, Ins) and i.base == "cp" and "bulk" not in i.mods for i in fn.body):
            at += QUEUE_BYTES
        self.warpgroup = Room(fn, at)
        at = self.warpgroup.end
        self.frame_size = -(-at // 64) * 64

    def _place(self, source: Source, fn: Function, space: str) -> int:
        """Offsets of the variables of a space; the total size.

        Of the module's variables only those that the kernel names count. The strictest alignment comes first, which
        wastes nothing; unsized (dynamic) ones come last.
        """
        spaces = (space, "param") if space == "local" else (space,)
        names = _names(fn)
        named = [v for v in source.variables.values() if v.name in names]
        found = [v for v in [*named, *fn.variables] if v.space in spaces]
        at = 0
        for v in sorted(found, key=lambda v: (v.size == 0, -v.align)):
            at = -(-at // v.align) * v.align
            self.symbols[v.name] = ("local" if v.space == "param" else space, at)
            at += v.size
        return at


def _names(fn: Function) -> set[str]:
    """The symbols that a function's instructions name."""
    names = set()
    for item in fn.body:
        for op in item.operands if isinstance(item, Ins) else ():
            base = op.base if isinstance(op, Addr) else op
            if isinstance(base, Sym):
                names.add(base.name)
    return names
