"""ld, st and cvta: state spaces, vectors, parameters (PTX ISA 9.7.9)."""

from collections.abc import Sequence
from typing import Protocol

from tegrad.ptx.access import helper_name
from tegrad.ptx.ir import V
from tegrad.ptx.layout import LANES, Launch
from tegrad.ptx.lowering import Lowering
from tegrad.ptx.rules import PRED, Handler, mod, nothing
from tegrad.ptx.syntax import Addr, Imm, Ins, Operand, Reg, Sym, Variable, Vec
from tegrad.ptx.types import EL_BITS, TYPES, Ty
from tegrad.ptx.view import helper_name as view_helper

SPACES = ("global", "shared", "local", "param", "const")
U64 = TYPES["u64"]


class Accesses(Lowering, Protocol):
    """Loads and stores reach parameters too, and are checked together with others of their block (`view`)."""

    @property
    def param_base(self) -> V:
        """The address of the kernel's parameters."""

    @property
    def globals(self) -> Sequence[Variable]:
        """The module's variables in global and constant memory."""

    def view(self, register: int) -> V | None:
        """The view of the group that the current access belongs to, by the register of its address; None without."""


def space_of(e: Lowering, ins: Ins) -> str:
    """The state space of an access; .const lies in global memory, parameters of inlined functions in local memory."""
    name = next((m.split("__")[0] for m in ins.mods if m.split("__")[0] in SPACES), "generic")
    if name == "param":
        base = ins.operands[0 if ins.base == "st" else 1]
        sym = base.base.name if isinstance(base, Addr) and isinstance(base.base, Sym) else ""
        return "local" if sym in e.symbols else "param"
    return "global" if name == "const" else name


def address(e: Lowering, op: Operand, space: str) -> V:
    """The address of an operand: i32 in shared memory, else i64."""
    f = e.f
    assert isinstance(op, Addr)
    el = "i32" if space == "shared" else "i64"
    if isinstance(op.base, Imm):
        return f.const(el, int(op.base.value) + op.offset)
    if isinstance(op.base, Sym):
        base = e.address_of(Sym(op.base.name, op.base.offset + op.offset))
        return f.resize(base, el, False) if base.ref.startswith("%") else f.const(el, int(base.ref))
    raw = e.get(op.base.number)
    v = f.resize(f.bits(raw, f"i{EL_BITS[raw.el]}"), el, False)
    return f.add(v, op.offset) if op.offset else v


def width(ins: Ins) -> int:
    return next((int(m[1]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)


def _view(e: Accesses, op: Operand) -> tuple[V, V] | None:
    """The view and the constant of an access that belongs to a group."""
    if not isinstance(op, Addr) or not isinstance(op.base, Reg):
        return None
    view = e.view(op.base.number)
    return None if view is None else (view, e.f.const("i64", op.offset))


def _parts(op: Operand, n: int) -> tuple[Operand, ...]:
    if n == 1:
        return (op,)
    if not isinstance(op, Vec) or len(op.items) != n:
        raise NotImplementedError
    return op.items


def load(e: Accesses, ins: Ins) -> None:
    t, n, space = ins.types[-1], width(ins), space_of(e, ins)
    targets = _parts(ins.operands[0], n)
    if space == "param":
        values = _load_param(e, ins, t, n)
    elif (view := _view(e, ins.operands[1])) is not None:
        values = _load_view(e, ins, *view, t.bits, n)
    else:
        values = load_values(e, ins, space, address(e, ins.operands[1], space), t.bits, n)
    if mod(ins, "acquire"):
        e.f.do("fence acquire")
    for target, v in zip(targets, values, strict=True):
        e.write(target, e.f.bits(v, t.el) if t.kind == "f" else v, t, ins)


def _load_param(e: Accesses, ins: Ins, t: Ty, n: int) -> list[V]:
    f = e.f
    a = address(e, ins.operands[1], "param")
    if a.n != 1:
        raise NotImplementedError
    return [f.load(t.iel, e.param_base, f.add(a, i * t.size) if i else a, align=1) for i in range(n)]


def load_values(e: Accesses, ins: Ins, space: str, a: V, bits: int, n: int) -> list[V]:
    """Call the load helper; a load whose address is one for the warp gives scalars."""
    f = e.f
    uniform = a.n == 1 and space != "local" and space != "generic"
    lanes = e.lanes(ins)
    e.account(ins, bits * n // 8, False)
    args = [e.frame, f.splat(a, LANES) if not uniform else a, lanes, f.const("i32", e.pc)]
    if uniform:
        name = helper_name("ldu", space, bits, n)
        if n == 1:
            return [f.call(name, f"i{bits}", 1, *args)]
        out = f.alloca(f"[{n} x i{bits}]", 16)
        f.call_void(name, *args, out)
        return [f.load(f"i{bits}", out, i * bits // 8) for i in range(n)]
    return _call_load(e, helper_name("ld", space, bits, n), args, bits, n)


def _load_view(e: Accesses, ins: Ins, view: V, offset: V, bits: int, n: int) -> list[V]:
    """A load of a group of accesses to global memory."""
    e.account(ins, bits * n // 8, False)
    args = [e.frame, view, e.mask, offset, e.f.const("i32", e.pc)]
    return _call_load(e, view_helper("ld", bits, n), args, bits, n)


def _call_load(e: Lowering, name: str, args: list[V], bits: int, n: int) -> list[V]:
    """Vectors that a helper returns, or leaves in memory if there are several."""
    f = e.f
    if n == 1:
        return [f.call(name, f"i{bits}", LANES, *args)]
    out = f.alloca(f"[{n} x <{LANES} x i{bits}>]", 64)
    f.call_void(name, *args, out)
    return [f.load(f"i{bits}", out, i * bits // 8 * LANES, LANES, 4) for i in range(n)]


def store(e: Accesses, ins: Ins) -> None:
    f = e.f
    t, n, space = ins.types[-1], width(ins), space_of(e, ins)
    if space == "param" or mod(ins, "async", "bulk"):
        raise NotImplementedError
    view = _view(e, ins.operands[0])
    if view is None:
        where, name = (
            [f.splat(address(e, ins.operands[0], space), LANES), e.lanes(ins)],
            helper_name("st", space, t.bits, n),
        )
    else:
        where, name = [view[0], e.mask, view[1]], view_helper("st", t.bits, n)
    values = [f.splat(f.bits(e.read(o, t), t.iel), LANES) for o in _parts(ins.operands[1], n)]
    if mod(ins, "release"):
        f.do("fence release")
    e.account(ins, t.size * n, True)
    args = [e.frame, *where, f.const("i32", e.pc)]
    if n == 1:
        f.call_void(name, *args, values[0])
        return
    buffer = f.alloca(f"[{n} x <{LANES} x i{t.bits}>]", 64)
    for i, v in enumerate(values):
        f.store(v, buffer, i * t.bits // 8 * LANES, 4)
    f.call_void(name, *args, buffer)


def cvta(e: Lowering, ins: Ins) -> None:
    """Between a space's addresses and generic ones: windows for shared and local, nothing for global and const."""
    f = e.f
    t = ins.types[-1]
    v = e.read(ins.operands[1], U64 if t.bits == 64 else t)
    space = next(m.split("__")[0] for m in ins.mods if m != "to")
    if space in ("shared", "local"):
        window = f.load("i64", e.launch, Launch.SHARED_WINDOW if space == "shared" else Launch.LOCAL_WINDOW)
        if t.bits != 64:
            raise NotImplementedError
        v = f.sub(v, window) if mod(ins, "to") else f.add(v, window)
    elif space not in ("global", "const"):
        raise NotImplementedError
    e.write(ins.operands[0], v, t, ins)


def isspacep(e: Accesses, ins: Ins) -> None:
    """Whether a generic address lies in a space's window; .const in a variable of the module, .global in neither."""
    f = e.f
    v = e.read(ins.operands[1], U64)
    size = f.load("i64", e.launch, Launch.WINDOW_SIZE)
    inside = {
        name: f.icmp("ult", f.sub(v, f.load("i64", e.launch, at)), size)
        for name, at in (("shared", Launch.SHARED_WINDOW), ("local", Launch.LOCAL_WINDOW))
    }
    inside["const"] = f.const("i1", 0)
    for variable in e.globals:
        if variable.space == "const":
            start = e.address_of(Sym(variable.name))
            held = f.icmp("ult", f.sub(v, start), variable.size)
            inside["const"] = f.or_(inside["const"], held)
    space = ins.mods[0].split("__")[0]
    known = inside.get(space)
    if space == "global":
        known = f.not_(f.or_(f.or_(inside["shared"], inside["local"]), inside["const"]))
    if known is None:
        raise NotImplementedError
    e.write(ins.operands[0], known, PRED, ins)


def createpolicy(e: Lowering, ins: Ins) -> None:
    """A cache policy; caches are not modelled, so that it is any value."""
    e.write(ins.operands[0], e.f.const("i64", 0), U64, ins)


HANDLERS: dict[str, Handler[Accesses]] = {
    "ld": load, "ldu": load, "st": store, "cvta": cvta, "isspacep": isspacep, "createpolicy": createpolicy,
    "prefetch": nothing, "prefetchu": nothing, "discard": nothing, "applypriority": nothing,
}  # fmt: skip
