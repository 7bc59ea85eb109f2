"""wgmma.mma_async (PTX ISA 9.7.15): every shape, type, layout of shared memory and factor.

A case is a block of one warpgroup. Its threads store their sources into shared memory, word i of thread t at byte
512 i + 4 t, so that the memory is one array of numbers. A matrix in it is a `Side`. With whole numbers sums are exact;
most of these forms fold a warp's sums into one word, in which each counts by its place. Real numbers are held to
`sums:k`, which is mma's rule (`table_matrix`).
"""

from dataclasses import dataclass

import numpy as np

from tests.ptx.oracle.form import Form
from tests.ptx.oracle.table_matrix import PACKED, WIDTH

ROW_BYTES = 512
"""Bytes of shared memory that the threads of a block fill with one source."""
FOLD = 0x9E3779B1
MODES = {0: 0, 128: 1, 64: 2, 32: 3}
"""A descriptor's bits 62 and 63 by the bytes of its swizzle."""
PAIRS = {"f16": "f16x2", "f32": "f32", "s32": "s32"}


@dataclass(frozen=True)
class Side:
    """A matrix in shared memory: `start` of its pattern, 16-byte `columns` into it that each product of a chain begins
    at; `lead` and `stride` are the descriptor's distances; `turned` is M- or N-major."""

    swizzle: int = 0
    lead: int = 128
    stride: int = 256
    start: int = 0
    columns: tuple[int, ...] = (0,)
    turned: bool = False

    def descriptor(self, register: str, column: int) -> str:
        """PTX that makes it."""
        fixed = self.lead >> 4 << 16 | self.stride >> 4 << 32 | MODES[self.swizzle] << 62
        return (
            f"add.u32 %e, %sm, {self.start + 16 * column}; shr.u32 %e, %e, 4; and.b32 %e, %e, 0x3fff;"
            f" cvt.u64.u32 {register}, %e; or.b64 {register}, {register}, {fixed:#x};"
        )


@dataclass(frozen=True)
class Product:
    """What a form computes. `memory` are the bytes of A (0: in registers) and of B in shared memory, in this order."""

    n: int
    types: tuple[str, str, str]
    a: Side | None
    b: Side
    memory: tuple[int, int]
    how: str = "exact"
    folded: bool = True
    own: bool = False
    """Each sum begins as a source of its own, and not as a multiple of the only one."""
    scale: tuple[int, int] = (1, 1)
    optional: bool = False
    """Blocks of an even index do not add to the sums."""
    saturate: bool = False

    @property
    def k(self) -> int:
        return 256 // WIDTH[self.types[1]]

    @property
    def integer(self) -> bool:
        return self.types[0] == "s32"

    @property
    def registers(self) -> int:
        """Registers of sums."""
        return self.n // (4 if self.types[0] == "f16" else 2)

    @property
    def words(self) -> tuple[int, int]:
        """Sources that fill A's and B's memory."""
        return self.memory[0] // ROW_BYTES, self.memory[1] // ROW_BYTES

    @property
    def op(self) -> str:
        d, a, b = self.types
        end = ".satfinite" if self.saturate else ""
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.k}.{d}.{a}.{b}{end}"


PRODUCTS: dict[str, Product] = {}
"""By the form's name."""


def _kind(t: str, how: str) -> str:
    if t.startswith("e"):
        return f"{PACKED[t]}:{t}small"
    return PACKED[t] if t in ("s8", "u8") else f"{PACKED[t]}:{how}"


def _start(p: Product, i: int, first: int) -> str:
    """A register of sums before the product: a source of its own, or a multiple of the one that there is."""
    if p.own:
        return f"mov.b32 %x{i}, %s{first + i};"
    if p.types[0] == "s32":
        return f"mul.lo.s32 %x{i}, %s{first}, {i + 1};"
    if p.types[0] == "f32":
        return f"mul.rn.f32 %x{i}, %s{first}, 0f{np.float32(i + 1).view(np.uint32):08X};"
    both = int(np.float16(i + 1).view(np.uint16)) * 0x10001
    return f"mov.b32 %e, {both:#x}; mul.rn.f16x2 %x{i}, %s{first}, %e;"


def _products(p: Product, fragments: str) -> str:
    """The chain of instructions."""
    sums = ", ".join(f"%x{i}" for i in range(p.registers))
    operands = []
    if not p.integer:
        operands += [str(s) for s in p.scale]
    if p.types[1] in ("f16", "bf16"):
        operands += [str(int(side.turned)) for side in (p.a, p.b) if side]
    out = []
    for i, column in enumerate(p.b.columns):
        left = p.a.descriptor("%da", p.a.columns[i]) if p.a else ""
        rest = ", ".join([f"{{{sums}}}", "%da" if p.a else fragments, "%db", "%k", *operands])
        out.append(f"{left} {p.b.descriptor('%db', column)} {p.op} {rest};")
    return " ".join(out)


def form(p: Product, tag: str) -> Form:
    """The form of a product."""
    _, a, b = p.types
    in_a, in_b = p.words
    sources = [_kind(a, p.how)] * in_a + [_kind(b, p.how)] * in_b
    first = len(sources)
    fragments = ", ".join(f"%s{first + i}" for i in range(4))
    if not p.a:
        sources += [_kind(a, p.how)] * 4
    sums = len(sources)
    c = PAIRS[p.types[0]]
    how = ":low" if p.integer and not p.own else "" if p.integer else ":exact" if p.how == "exact" else f":{p.how}"
    sources += [c + how] * (p.registers if p.own else 1)
    count = p.registers
    store = " ".join(f"st.shared.b32 [%a+{ROW_BYTES * i}], %s{i};" for i in range(in_a + in_b))
    keep = "and.b32 %e, %cta, 1; setp.ne.u32 %k, %e, 0;" if p.optional else "setp.eq.u32 %k, %th, %th;"
    if p.folded:
        end = f"mov.b32 %e, 0; {' '.join(f'mad.lo.u32 %e, %e, {FOLD:#x}, %x{i};' for i in range(count))}"
        end += " mad.lo.u32 %a, %th, 2, 1; mul.lo.u32 %e, %e, %a; redux.sync.add.u32 %d0, %e, 0xffffffff;"
    else:
        end = " ".join(f"mov.b32 %d{i}, %x{i};" for i in range(count))
    text = (
        f".reg .b32 %a, %e, %x<{count}>; .reg .b64 %da, %db; .reg .pred %k;"
        f" mad.lo.u32 %a, %th, 4, %sm; bar.sync 0; {store} fence.proxy.async.shared::cta; bar.sync 0;\n"
        f"{' '.join(_start(p, i, sums) for i in range(count))} {keep}\n"
        f"wgmma.fence.sync.aligned; {_products(p, f'{{{fragments}}}')}\n"
        f"wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0; {end}"
    )
    kinds = [s.split(":") for s in sources]
    results = ("u32",) if p.folded else (c,) * count
    rule = "bits" if p.folded or p.integer else "nan" if p.how != "real" else f"sums:{p.k}"
    name = f"{p.op} {tag}"
    PRODUCTS[name] = p
    return Form(
        name, text, results, tuple(k[0] for k in kinds), tuple(k[-1] for k in kinds), "9.7.15", rule, "warpgroup", 90,
        "sm_90a",
    )  # fmt: skip


def _b(n: int, memory: int = 0) -> tuple[Side, int]:
    """B without a swizzle, dense."""
    return Side(), -(-max(memory, 32 * n) // ROW_BYTES) * ROW_BYTES


def typed(d: str, a: str, b: str, how: str = "exact", *, saturate: bool = False) -> Form:
    """Eight columns, A in registers, every sum a result."""
    side, size = _b(8)
    whole = d == "s32" or a.startswith("e")
    made = Product(8, (d, a, b), None, side, (0, size), how, folded=whole, own=True, saturate=saturate)
    return form(made, "registers" if whole else f"registers {how}")


def wide(n: int, d: str = "f32", t: str = "f16") -> Form:
    """Any number of columns."""
    side, size = _b(n)
    return form(Product(n, (d, t, t), None, side, (0, size)), "registers")


LAYOUTS = {
    "none": (16, Side(0, 128, 256), 512),
    "none, distances apart": (24, Side(0, 512, 128), 1024),
    "none, gaps": (16, Side(0, 384, 1024, 256), 2048),
    "32": (16, Side(32, 16, 256), 512),
    "32, gaps": (16, Side(32, 16, 768, 256), 1536),
    "64": (24, Side(64, 16, 512), 1536),
    "64, second half": (16, Side(64, 16, 512, 512, (2,)), 1536),
    "128": (16, Side(128, 16, 1024), 2048),
    "128, one quarter after the other": (16, Side(128, 16, 1024, 1024, (0, 2, 4, 6)), 3072),
    "N-major, none": (24, Side(0, 384, 128, turned=True), 1024),
    "N-major, none, distances apart": (24, Side(0, 128, 256, turned=True), 1024),
    "N-major, 32": (40, Side(32, 512, 256, turned=True), 1536),
    "N-major, 32, distances apart": (24, Side(32, 256, 1024, 256, turned=True), 2048),
    "N-major, 64": (72, Side(64, 1024, 512, turned=True), 3072),
    "N-major, 64, distances apart": (40, Side(64, 512, 1536, turned=True), 2560),
    "N-major, 128": (72, Side(128, 2048, 1024, turned=True), 4096),
    "N-major, 128, distances apart": (136, Side(128, 1024, 3072, 1024, turned=True), 7168),
}
"""Columns, B, and the bytes that it lies in."""
LEFT = {
    "none": (Side(0, 128, 256), 2048),
    "none, distances apart": (Side(0, 1024, 128), 2048),
    "32": (Side(32, 16, 256), 2048),
    "64, second half": (Side(64, 16, 512, 0, (2,)), 4096),
    "128, last quarter": (Side(128, 16, 1024, 0, (6,)), 8192),
    "M-major, none": (Side(0, 1024, 128, turned=True), 2048),
    "M-major, 32": (Side(32, 512, 256, turned=True), 2048),
    "M-major, 64": (Side(64, 512, 1024, turned=True), 2048),
    "M-major, 128": (Side(128, 16, 1024, turned=True), 2048),
}
"""A, and the bytes that it lies in; B follows."""


def right(name: str, d: str = "f32", t: str = "f16") -> Form:
    """B in a layout, A in registers."""
    n, side, size = LAYOUTS[name]
    return form(Product(n, (d, t, t), None, side, (0, size)), f"registers, {name}")


def left(name: str, d: str, a: str, b: str, **how: bool) -> Form:
    """A in a layout."""
    side, size = LEFT[name]
    after = Side(128, 16, 1024, size)
    return form(Product(16, (d, a, b), side, after, (size, 2048), **how), f"memory, {name}")


def factors(d: str, t: str, scale: tuple[int, int], *, optional: bool = False) -> Form:
    """Factors of A and B, and sums that are added to or not."""
    side, size = _b(8)
    tag = f"registers, factors {scale[0]} {scale[1]}{', sums by turns' if optional else ''}"
    return form(Product(8, (d, t, t), None, side, (0, size), scale=scale, optional=optional), tag)


FLOATS = [("f32", "f16"), ("f16", "f16"), ("f32", "bf16"), ("f32", "tf32")]
FP8 = [(d, a, b) for d in ("f32", "f16") for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")]
INTEGERS = [(a, b) for a in ("s8", "u8") for b in ("s8", "u8")]

FORMS = [
    *(typed(d, t, t, how) for how in ("exact", "special", "real") for d, t in FLOATS),
    *(typed(*types) for types in FP8),
    *(typed("s32", a, b, saturate=more) for a, b in INTEGERS for more in (False, True)),
    *(wide(n) for n in range(8, 257, 8)),
    *(
        wide(n, d, t)
        for n, d, t in [(256, "f16", "f16"), (104, "f32", "bf16"), (40, "f32", "tf32"), (224, "s32", "s8")]
    ),
    *(right(name) for name in LAYOUTS),
    right("128, one quarter after the other", "f32", "bf16"),
    right("128, one quarter after the other", "f32", "tf32"),
    right("64, second half", "s32", "u8"),
    right("N-major, 128", "f32", "bf16"),
    *(left(name, "f32", "f16", "f16") for name in LEFT),
    left("none", "f32", "tf32", "tf32"),
    left("64, second half", "f32", "e4m3", "e5m2"),
    left("128, last quarter", "s32", "s8", "u8"),
    left("M-major, 64", "f16", "f16", "f16"),
    left("M-major, 128", "f32", "bf16", "bf16"),
    factors("f32", "f16", (-1, 1)),
    factors("f32", "bf16", (1, -1)),
    factors("f16", "f16", (-1, -1), optional=True),
    factors("f32", "tf32", (-1, 1), optional=True),
]
