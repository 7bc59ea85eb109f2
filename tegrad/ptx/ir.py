"""A writer of LLVM IR text: typed values, one function at a time, structured control flow.

Values are scalars or vectors; an operation on a scalar and a vector splats the scalar. Pure instructions with equal
text are written once per basic block. Text is used because it is several times faster than an object model.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from tegrad.ptx.types import EL_BITS

STACK_FLAG = "override-stack-alignment"


class V(NamedTuple):
    """A value: LLVM element type, number of elements (1 is a scalar), and its name or constant text."""

    el: str
    n: int
    ref: str

    @property
    def ty(self) -> str:
        return self.el if self.n == 1 else f"<{self.n} x {self.el}>"

    def __str__(self) -> str:
        return f"{self.ty} {self.ref}"


def vec(el: str, n: int) -> str:
    """The LLVM type of n elements."""
    return el if n == 1 else f"<{n} x {el}>"


def float_text(el: str, value: float) -> str:
    """A float constant in LLVM's hexadecimal form."""
    if el == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', value))[0]:04X}"
    if el == "float":
        value = struct.unpack("<f", struct.pack("<f", value))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"


class Module:
    """Functions and the external declarations that they use.

    With `stack_align` they are called with that alignment of the stack, in bytes, and call each other with it.
    """

    def __init__(self, stack_align: int = 0) -> None:
        self.stack_align = stack_align
        self.decls: dict[str, str] = {}
        self.functions: list[str] = []
        self.imports: set[str] = set()
        self.defined: set[str] = set()

    def text(self) -> str:
        return "\n".join([*self.decls.values(), *self.functions, *self._flags()]) + "\n"

    def _flags(self) -> list[str]:
        if not self.stack_align:
            return []
        return ["!llvm.module.flags = !{!0}", f'!0 = !{{i32 1, !"{STACK_FLAG}", i32 {self.stack_align}}}']


class Fn:
    """One LLVM function being written."""

    def __init__(self, module: Module, name: str, ret: str, params: str, attrs: str = "") -> None:
        """`params` are types and names as LLVM has them, without the "%": "ptr frame, <32 x i32> values"."""
        self.module = module
        self.name = name
        module.defined.add(name)
        self.ret_ty = ret
        self.params = [(ty, name) for ty, _, name in (one.rpartition(" ") for one in params.split(", ") if one)]
        self.attrs = attrs
        self.entry: list[str] = []
        self.lines: list[str] = []
        self._n = 0
        self._memo: dict[str, str] = {}
        self._places: dict[str, V] = {}
        self.args = [V(t, 1, f"%{n}") if not t.startswith("<") else _vector(t, f"%{n}") for t, n in self.params]

    # -- plumbing ------------------------------------------------------------------------------------------------
    def name_of(self, hint: str = "t") -> str:
        self._n += 1
        return f"{hint}{self._n}"

    def op(self, el: str, n: int, text: str, pure: bool = True) -> V:
        """Append an instruction with a result; a pure one is shared with an equal one of the same block."""
        if pure:
            known = self._memo.get(text)
            if known is not None:
                return V(el, n, known)
        self._n += 1
        ref = f"%v{self._n}"
        self.lines.append(f"  {ref} = {text}")
        if pure:
            self._memo[text] = ref
        return V(el, n, ref)

    def do(self, text: str) -> None:
        """Append an instruction without a result."""
        self.lines.append("  " + text)

    def alloca(self, ty: str, align: int = 0) -> V:
        """A stack slot, placed in the entry block."""
        self._n += 1
        ref = f"%a{self._n}"
        self.entry.append(f"  {ref} = alloca {ty}" + (f", align {align}" if align else ""))
        return V("ptr", 1, ref)

    def variable(self, v: V, align: int = 0) -> V:
        """A stack slot with a first value."""
        slot = self.alloca(v.ty, align)
        self.store(v, slot)
        return slot

    def finish(self) -> None:
        """Close the function and add it to the module."""
        params = ", ".join(f"{t} %{n}" for t, n in self.params)
        head = f"define {self.ret_ty} @{self.name}({params}) {self.attrs} {{\nentry:"
        self.module.functions.append("\n".join([head, *self.entry, *self.lines, "}"]))

    # -- constants -----------------------------------------------------------------------------------------------
    def const(self, el: str, value: int | float, n: int = 1) -> V:
        if el in ("half", "float", "double"):
            text = float_text(el, float(value))
        elif el == "ptr":
            if value:
                raise ValueError(f"no address but null is a constant: {value!r}")
            text = "null"
        elif el == "i1":
            text = "true" if value else "false"
        else:
            bits = EL_BITS[el]
            value = int(value) & ((1 << bits) - 1)
            text = str(value - (1 << bits) if value >> (bits - 1) else value)
        return V(el, n, text if n == 1 else f"splat ({el} {text})")

    def like(self, v: V, value: int | float) -> V:
        """A constant of the same type as v."""
        return self.const(v.el, value, v.n)

    def iota(self, el: str, n: int, step: int = 1, start: int = 0) -> V:
        return V(el, n, "<" + ", ".join(f"{el} {start + i * step}" for i in range(n)) + ">")

    def elements(self, el: str, values: Sequence[int]) -> V:
        return V(el, len(values), "<" + ", ".join(f"{el} {x}" for x in values) + ">")

    # -- shapes --------------------------------------------------------------------------------------------------
    def splat(self, v: V, n: int) -> V:
        if v.n == n:
            return v
        assert v.n == 1
        if not v.ref.startswith("%"):
            return V(v.el, n, "zeroinitializer" if v.ref in ("0", "false", "null") else f"splat ({v.el} {v.ref})")
        one = self.op(v.el, n, f"insertelement {vec(v.el, n)} poison, {v}, i32 0")
        return self.op(v.el, n, f"shufflevector {one}, {vec(v.el, n)} poison, <{n} x i32> zeroinitializer")

    def same(self, *vs: V) -> list[V]:
        """Bring values to one shape."""
        n = max(v.n for v in vs)
        return [self.splat(v, n) for v in vs]

    def extract(self, v: V, i: V | int) -> V:
        return self.op(v.el, 1, f"extractelement {v}, {i if isinstance(i, V) else f'i32 {i}'}")

    def insert(self, v: V, x: V, i: V | int) -> V:
        return self.op(v.el, v.n, f"insertelement {v}, {x}, {i if isinstance(i, V) else f'i32 {i}'}")

    def shuffle(self, a: V, b: V | None, idx: Sequence[int]) -> V:
        other = str(b) if b is not None else f"{a.ty} poison"
        mask = ", ".join(f"i32 {i}" for i in idx)
        return self.op(a.el, len(idx), f"shufflevector {a}, {other}, <{len(idx)} x i32> <{mask}>")

    # -- arithmetic ----------------------------------------------------------------------------------------------
    def value(self, b: V | float, a: V) -> V:
        """A second operand: a number is a constant of the first one's type."""
        return b if isinstance(b, V) else self.like(a, b)

    def bin(self, op: str, a: V, b: V | float) -> V:
        b = self.value(b, a)
        if a.n != b.n:
            a, b = self.same(a, b)
        return self.op(a.el, a.n, f"{op} {a}, {b.ref}")

    def add(self, a: V, b: V | float) -> V:
        return self.bin("add", a, b)

    def sub(self, a: V, b: V | float) -> V:
        return self.bin("sub", a, b)

    def mul(self, a: V, b: V | float) -> V:
        return self.bin("mul", a, b)

    def and_(self, a: V, b: V | float) -> V:
        return self.bin("and", a, b)

    def or_(self, a: V, b: V | float) -> V:
        return self.bin("or", a, b)

    def xor(self, a: V, b: V | float) -> V:
        return self.bin("xor", a, b)

    def not_(self, a: V) -> V:
        return self.bin("xor", a, -1)

    def fneg(self, a: V) -> V:
        return self.op(a.el, a.n, f"fneg {a}")

    def icmp(self, pred: str, a: V, b: V | float) -> V:
        a, b = self.same(a, self.value(b, a))
        return self.op("i1", a.n, f"icmp {pred} {a}, {b.ref}")

    def is_zero(self, a: V) -> V:
        return self.icmp("eq", a, 0)

    def not_zero(self, a: V) -> V:
        return self.icmp("ne", a, 0)

    def fcmp(self, pred: str, a: V, b: V | float) -> V:
        a, b = self.same(a, self.value(b, a))
        return self.op("i1", a.n, f"fcmp {pred} {a}, {b.ref}")

    def select(self, c: V, a: V, b: V | float) -> V:
        b = self.value(b, a)
        n = max(c.n, a.n, b.n)
        a, b = self.splat(a, n), self.splat(b, n)
        return self.op(a.el, n, f"select {c}, {a}, {b}")

    def call(self, name: str, el: str, n: int, *args: V, pure: bool = False) -> V:
        """Call a function by its full name; it is declared on first use."""
        self._declare(name, vec(el, n), args)
        return self.op(el, n, f"call {vec(el, n)} @{name}({', '.join(map(str, args))})", pure)

    def call_void(self, name: str, *args: V) -> None:
        self._declare(name, "void", args)
        self.do(f"call void @{name}({', '.join(map(str, args))})")

    def function(self, name: str, ret: str, *params: str) -> V:
        """The address of a function."""
        self._declare(name, ret, [V(p, 1, "") for p in params])
        return V("ptr", 1, f"@{name}")

    def _declare(self, name: str, ret: str, args: Sequence[V]) -> None:
        if name not in self.module.decls and name not in self.module.defined:
            self.module.decls[name] = f"declare {ret} @{name}({', '.join(a.ty for a in args)})"
            if name.startswith("tgx_"):
                self.module.imports.add(name)

    def intr(self, name: str, a: V, *more: V | float) -> V:
        """An intrinsic whose result and overload type are those of its arguments, e.g. llvm.fma."""
        a, *rest = self.same(a, *(self.value(b, a) for b in more))
        return self.call(f"llvm.{name}.{mangle(a)}", a.el, a.n, a, *rest, pure=True)

    def intr_flag(self, name: str, a: V, flag: bool) -> V:
        """An intrinsic with a trailing i1 immediate (ctlz, cttz, abs)."""
        return self.call(f"llvm.{name}.{mangle(a)}", a.el, a.n, a, self.const("i1", flag), pure=True)

    # -- casts ---------------------------------------------------------------------------------------------------
    def cast(self, op: str, a: V, el: str) -> V:
        if a.el == el:
            return a
        return self.op(el, a.n, f"{op} {a} to {vec(el, a.n)}")

    def bits(self, a: V, el: str) -> V:
        """Reinterpret an element as another type of the same width."""
        if a.el == el:
            return a
        return self.op(el, a.n, f"bitcast {a} to {vec(el, a.n)}")

    def resize(self, a: V, el: str, signed: bool) -> V:
        """An integer brought to another width."""
        have, want = EL_BITS[a.el], EL_BITS[el]
        if have == want:
            return a
        return self.cast("trunc" if have > want else "sext" if signed else "zext", a, el)

    def to_int(self, a: V, el: str, signed: bool) -> V:
        """A float to an integer toward zero, saturating; NaN gives 0."""
        name = f"llvm.fpto{'s' if signed else 'u'}i.sat.{mangle(V(el, a.n, ''))}.{mangle(a)}"
        return self.call(name, el, a.n, a, pure=True)

    def pointer(self, at: V) -> V:
        """Host addresses (i64) as pointers."""
        return self.cast("inttoptr", at, "ptr")

    def mask_bits(self, v: V) -> V:
        """<32 x i1> to i32."""
        return self.op("i32", 1, f"bitcast {v} to i32")

    def mask_vec(self, v: V) -> V:
        """i32 to <32 x i1>."""
        return self.op("i1", 32, f"bitcast {v} to <32 x i1>")

    # -- memory --------------------------------------------------------------------------------------------------
    def gep(self, ptr: V, off: V | int) -> V:
        if isinstance(off, int):
            if off == 0:
                return ptr
            off = self.const("i64", off)
        return self.op("ptr", 1, f"getelementptr i8, {ptr}, {off}")

    def word(self, base: V, index: V) -> V:
        """The address of the i32 at an index (i32)."""
        return self.gep(base, self.resize(self.mul(index, 4), "i64", False))

    def element(self, base: V, index: V, size: V | int) -> V:
        """The address of what has this index, of elements of so many bytes."""
        return self.gep(base, self.mul(self.resize(index, "i64", False), size))

    def load(self, el: str, ptr: V, off: V | int = 0, n: int = 1, align: int = 0, once: bool = False) -> V:
        """A load; with `once` each byte is read exactly once, as memory that others store to meanwhile has to be.

        LLVM reads parts of a plain load twice where that makes a shuffle cheaper (it does without AVX-512).
        """
        p = self.gep(ptr, off)
        al = align or max(1, EL_BITS.get(el, 64) // 8)
        return self.op(el, n, f"load {'volatile ' if once else ''}{vec(el, n)}, {p}, align {al}", pure=False)

    def placed(self, v: V) -> V:
        """The address of a vector of bytes 64 apart that nobody stores to: it is stored once in a basic block."""
        if str(v) not in self._places:
            self._places[str(v)] = at = self.alloca(v.ty, 64)
            self.store(v, at, 0, 64)
        return self._places[str(v)]

    def load_placed(self, el: str, at: V) -> V:
        """The 32 elements at an address that is `placed`'s for them from now on."""
        v = self.load(el, at, 0, 32, 64)
        self._places[str(v)] = at
        return v

    def in_order(self) -> None:
        """What comes before stays before what follows, as far as the compiler goes."""
        self.do('fence syncscope("singlethread") seq_cst')

    def store(self, v: V, ptr: V, off: V | int = 0, align: int = 0) -> None:
        p = self.gep(ptr, off)
        self.do(f"store {v}, {p}, align {align or max(1, EL_BITS.get(v.el, 64) // 8)}")

    # -- control flow --------------------------------------------------------------------------------------------
    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self._memo.clear()
        self._places.clear()

    def br(self, name: str) -> None:
        self.do(f"br label %{name}")

    def condbr(self, c: V, then: str, other: str, likely: bool | None = None) -> None:
        hint = (
            ""
            if likely is None
            else f', !prof !{{!"branch_weights", i32 {2000 if likely else 1}, i32 {1 if likely else 2000}}}'
        )
        self.do(f"br {c}, label %{then}, label %{other}{hint}")

    def ret(self, v: V | None = None) -> None:
        self.do(f"ret {v}" if v is not None else "ret void")

    @contextmanager
    def if_(self, c: V, likely: bool | None = None) -> Iterator[None]:
        """Run the body where the scalar c is true."""
        then, end = self.name_of("then"), self.name_of("fi")
        self.condbr(c, then, end, likely)
        self.label(then)
        yield
        self.br(end)
        self.label(end)

    @contextmanager
    def loop(self) -> Iterator[tuple[str, str]]:
        """An endless loop; yields the labels to continue and to leave it."""
        head, end = self.name_of("loop"), self.name_of("done")
        self.br(head)
        self.label(head)
        yield head, end
        self.br(head)
        self.label(end)

    def leave(self, c: V, to: str) -> None:
        """Branch to a label where the scalar c is true."""
        cont = self.name_of("go")
        self.condbr(c, to, cont)
        self.label(cont)

    @contextmanager
    def for_(self, count: V) -> Iterator[V]:
        """A loop over range(count); yields the index. Its counter is a stack slot: optimise the function."""
        slot = self.variable(self.like(count, 0))
        with self.loop() as (_, end):
            i = self.load(count.el, slot)
            self.leave(self.icmp("uge", i, count), end)
            yield i
            self.store(self.add(i, 1), slot)


def _vector(ty: str, ref: str) -> V:
    n, el = ty[1:-1].split(" x ")
    return V(el, int(n), ref)


_MANGLE = {"float": "f32", "double": "f64", "half": "f16", "ptr": "p0"}


def mangle(v: V) -> str:
    """The overload suffix of an intrinsic for this type."""
    el = _MANGLE.get(v.el, v.el)
    return el if v.n == 1 else f"v{v.n}{el}"
