"""mma: matrix multiply-accumulate over a warp (PTX ISA 9.7.14).

A lane is (group g = lane / 4, thread t = lane % 4). A register holds `per` elements;
register r of A has row g + 8 (r % 2)
and k = per * t + 4 per (r / 2) + s; register r of B has column g and k = per * t + 4 per r + s; C and D have rows g and
g + 8 and columns 2t and 2t + 1. Each k is a step: elements are brought to their lanes by constant shuffles. Products
are
added in order of k with one rounding each; silicon rounds in another order, so that sums agree within the error of
such an addition, and exactly where every partial sum is exact.
"""

from dataclasses import dataclass

from tegrad.ptx import fp8
from tegrad.ptx.floating import bf16_to_f32
from tegrad.ptx.helpers import family
from tegrad.ptx.ir import Fn, Module, V
from tegrad.ptx.layout import LANES
from tegrad.ptx.lowering import Operands
from tegrad.ptx.rules import Handler, mod
from tegrad.ptx.syntax import Ins, items
from tegrad.ptx.types import TYPES, Ty

LANE_BYTES = {"i32": 4 * LANES, "i64": 8 * LANES}
ROW = [[lane // 4 * 4 + t for lane in range(LANES)] for t in range(4)]
COLUMN = [[[4 * (2 * (lane % 4) + c) + t for lane in range(LANES)] for c in range(2)] for t in range(4)]
SHAPES = {
    "m16n8k4": (16, 4), "m16n8k8": (16, 8), "m16n8k16": (16, 16), "m16n8k32": (16, 32), "m16n8k64": (16, 64),
    "m8n8k4": (8, 4),
    "m8n8k16": (8, 16), "m8n8k32": (8, 32),
}  # fmt: skip
SUPPORTED = {
    ("m16n8k8", "f16"), ("m16n8k16", "f16"), ("m16n8k8", "bf16"), ("m16n8k16", "bf16"), ("m16n8k4", "tf32"),
    ("m16n8k8", "tf32"),
    ("m8n8k4", "f64"), ("m16n8k16", "s8"), ("m16n8k32", "s8"), ("m16n8k16", "u8"), ("m16n8k32", "u8"), ("m8n8k16",
    "s8"),
    ("m8n8k16", "u8"),
    ("m8n8k32", "s4"), ("m8n8k32", "u4"), ("m16n8k32", "s4"), ("m16n8k32", "u4"), ("m16n8k64", "s4"),
    ("m16n8k64", "u4"),
    ("m16n8k32", "e4m3"), ("m16n8k32", "e5m2"), ("m16n8k16", "e4m3"), ("m16n8k16", "e5m2"),
}  # fmt: skip


@dataclass(frozen=True)
class MmaShape:
    """One form of mma."""

    rows: int
    k: int
    a: Ty
    b: Ty
    acc: Ty
    saturate: bool

    @property
    def name(self) -> str:
        how = "sat" if self.saturate else "wrap"
        return f"tgx_mma_m{self.rows}k{self.k}_{self.a.name}_{self.b.name}_{self.acc.name}_{how}"

    @property
    def reg(self) -> str:
        """The type of a register of A, B."""
        return "i64" if self.a.bits == 64 else "i32"

    @property
    def per(self) -> int:
        return max(1, 32 // self.a.bits)

    @property
    def b_regs(self) -> int:
        return self.k // (4 * self.per)

    @property
    def a_regs(self) -> int:
        return self.b_regs * self.rows // 8

    @property
    def c_values(self) -> int:
        return self.rows // 4

    @property
    def c_regs(self) -> int:
        return self.c_values // 2 if self.acc.name == "f16" else self.c_values

    @property
    def c_el(self) -> str:
        return "i64" if self.acc.bits == 64 else "i32"


def parse_name(name: str) -> MmaShape:
    """The shape of a helper's name."""
    _, _, rk, a, b, acc, how = name.split("_")
    rows, k = rk[1:].split("k")
    return MmaShape(int(rows), int(k), TYPES[a], TYPES[b], TYPES[acc], how == "sat")


@family("tgx_mma_")
def emit_mma(module: Module, name: str) -> None:
    """tgx_mma_*(ptr out, ptr ...): where D goes, one register after the other; where each of A, B and C lies."""
    s = parse_name(name)
    count = s.a_regs + s.b_regs + s.c_regs
    f = Fn(module, name, "void", ", ".join(["ptr out", *(f"ptr x{at}" for at in range(count))]), "nounwind")
    out, *sources = f.args

    def regs(count: int, el: str) -> list[V]:
        return [f.load(el, sources.pop(0), 0, LANES, 4) for _ in range(count)]

    a = [elements(f, r, s.a) for r in regs(s.a_regs, s.reg)]
    b = [elements(f, r, s.b) for r in regs(s.b_regs, s.reg)]
    start = accumulators(f, regs(s.c_regs, s.c_el), s.acc)
    acc = [f.like(v, 0) for v in start] if s.saturate else start
    half = s.rows // 8
    for k in range(s.k):
        r, t, i = k // (4 * s.per), k % (4 * s.per) // s.per, k % s.per
        rows = [f.shuffle(a[half * r + h][i], None, ROW[t]) for h in range(half)]
        columns = [f.shuffle(b[r][i], None, COLUMN[t][c]) for c in range(2)]
        for h in range(half):
            for c in range(2):
                acc[2 * h + c] = multiply_add(f, rows[h], columns[c], acc[2 * h + c])
    if s.saturate:
        acc = [f.intr("sadd.sat", v, c) for v, c in zip(acc, start, strict=True)]
    for i, v in enumerate(packed(f, acc, s.acc)):
        f.store(v, out, i * LANE_BYTES[s.c_el], 4)
    f.ret()
    f.finish()


def multiply_add(f: Fn, a: V, b: V, c: V) -> V:
    """a * b + c with one rounding."""
    return f.add(f.mul(a, b), c) if c.el == "i32" else f.intr("fma", a, b, c)


def elements(f: Fn, reg: V, t: Ty) -> list[V]:
    """The elements of a register, widened to what is multiplied."""
    if t.name == "f64":
        return [f.bits(reg, "double")]
    if t.name == "tf32":
        # The low 13 bits of the mantissa are not used.
        return [f.bits(f.and_(reg, -0x2000), "float")]
    out = []
    for i in range(32 // t.bits):
        cut = f.resize(f.bin("lshr", reg, i * t.bits) if i else reg, t.iel, False)
        if t.name == "bf16":
            out.append(bf16_to_f32(f, cut))
        elif t.name == "f16":
            out.append(f.cast("fpext", f.bits(cut, "half"), "float"))
        elif t.name in fp8.FORMATS:
            out.append(fp8.decode(f, cut, t.name))
        else:
            out.append(f.resize(cut, "i32", t.signed))
    return out


def accumulators(f: Fn, regs: list[V], t: Ty) -> list[V]:
    """The sums that registers hold."""
    if t.name == "f16":
        return [v for r in regs for v in elements(f, r, t)]
    return [f.bits(r, t.el) for r in regs]


def packed(f: Fn, acc: list[V], t: Ty) -> list[V]:
    """Sums as the registers that hold them."""
    if t.name != "f16":
        return [f.bits(v, t.iel) for v in acc]
    halves = [f.resize(f.bits(f.cast("fptrunc", v, "half"), "i16"), "i32", False) for v in acc]
    return [f.or_(halves[i], f.bin("shl", halves[i + 1], 16)) for i in range(0, len(halves), 2)]


def mma(e: Operands, ins: Ins) -> None:
    """mma.sync.aligned.shape.row.col.d.a.b.c."""
    f = e.f
    shape = next((m for m in ins.mods if m in SHAPES), "")
    if len(ins.types) != 4 or (shape, ins.types[1].name) not in SUPPORTED or mod(ins, "sp", "xor", "popc"):
        raise NotImplementedError
    d, a, b, c = ins.types
    if d != c:
        raise NotImplementedError
    s = MmaShape(*SHAPES[shape], a, b, c, mod(ins, "satfinite"))
    words = [
        *_operand(e, ins, 1, s.a_regs, s.reg),
        *_operand(e, ins, 2, s.b_regs, s.reg),
        *_operand(e, ins, 3, s.c_regs, s.c_el),
    ]
    out = f.alloca(f"[{s.c_regs * LANE_BYTES[s.c_el]} x i8]", 64)
    f.call_void(s.name, out, *(f.placed(word) for word in words))
    t = TYPES["b64" if s.c_el == "i64" else "b32"]
    for i, o in enumerate(items(ins.operands[0])):
        e.write(o, f.load_placed(s.c_el, f.gep(out, i * LANE_BYTES[s.c_el])), t, ins)


def _operand(e: Operands, ins: Ins, index: int, count: int, el: str) -> list[V]:
    parts = items(ins.operands[index])
    if len(parts) != count:
        raise NotImplementedError
    t = TYPES["b64" if el == "i64" else "b32"]
    return [e.f.splat(e.read(o, t), LANES) for o in parts]


HANDLERS: dict[str, Handler[Operands]] = {"mma": mma}
