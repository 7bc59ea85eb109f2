"""Comparison, selection and moves (PTX ISA 9.7.6 to 9.7.9, without memory)."""

from tegrad.ptx.floating import bf16_to_f32, flush
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.lowering import Operands
from tegrad.ptx.rules import PRED, Handler, OpRule, mod
from tegrad.ptx.syntax import Ins, Pair
from tegrad.ptx.types import TYPES, Ty

SIGNED = {"eq": "eq", "ne": "ne", "lt": "slt", "le": "sle", "gt": "sgt", "ge": "sge"}
UNSIGNED = {
    "eq": "eq", "ne": "ne", "lt": "ult", "le": "ule", "gt": "ugt", "ge": "uge", "lo": "ult", "ls": "ule", "hi": "ugt",
    "hs": "uge",
}  # fmt: skip
FLOAT = {
    "eq": "oeq", "ne": "one", "lt": "olt", "le": "ole", "gt": "ogt", "ge": "oge", "equ": "ueq", "neu": "une",
    "ltu": "ult",
    "leu": "ule", "gtu": "ugt", "geu": "uge", "num": "ord", "nan": "uno",
}  # fmt: skip
PAIRS = ("f16x2", "bf16x2")
BOOLEAN = {"and": "and", "or": "or", "xor": "xor"}


def compare(f: Fn, ins: Ins, t: Ty, a: V, b: V) -> V:
    """The comparison that the first modifier names, as i1."""
    name = ins.mods[0]
    if t.name == "bf16":
        a, b = bf16_to_f32(f, a), bf16_to_f32(f, b)
    elif t.kind != "f":
        return f.icmp((SIGNED if t.signed else UNSIGNED)[name], a, b)
    if mod(ins, "ftz"):
        a, b = flush(f, a), flush(f, b)
    return f.fcmp(FLOAT[name], a, b)


def _combined(e: Operands, ins: Ins, result: V) -> V:
    """With the third source, a predicate: setp.lt.and p, a, b, c."""
    how = next((m for m in ins.mods[1:] if m in BOOLEAN), None)
    if how is None:
        return result
    return e.f.bin(BOOLEAN[how], result, e.read(ins.operands[3], PRED))


def _halves(e: Operands, ins: Ins, t: Ty) -> list[V]:
    """The comparison of the lower and of the upper halves of f16x2 or bf16x2."""
    f = e.f
    part = TYPES[t.name[:-2]]
    out = []
    for at in (0, 16):
        cut = [f.resize(f.bin("lshr", v, at), "i16", False) for v in (e.read(o, t) for o in ins.operands[1:3])]
        out.append(compare(f, ins, part, *(f.bits(v, part.el) for v in cut)))
    return out


def setp(e: Operands, ins: Ins) -> None:
    """setp p|q: q is the opposite of p, or for pairs the comparison of the upper halves."""
    t = ins.types[-1]
    if t.name in PAIRS:
        target = ins.operands[0]
        if not isinstance(target, Pair):
            raise NotImplementedError
        for op, result in zip((target.first, target.second), _halves(e, ins, t), strict=True):
            e.write(op, _combined(e, ins, result), PRED, ins)
        return
    a, b = (e.read(o, t) for o in ins.operands[1:3])
    result = compare(e.f, ins, t, a, b)
    target = ins.operands[0]
    if isinstance(target, Pair):
        e.write(target.second, _combined(e, ins, e.f.not_(result)), PRED, ins)
        target = target.first
    e.write(target, _combined(e, ins, result), PRED, ins)


def set_(e: Operands, ins: Ins) -> None:
    """set: 1.0 or all ones where the comparison holds."""
    f = e.f
    result_ty, t = ins.types[-2:]
    if t.name in PAIRS:
        _set_pair(e, ins, result_ty, t)
        return
    a, b = (e.read(o, t) for o in ins.operands[1:3])
    holds = _combined(e, ins, compare(f, ins, t, a, b))
    one: int | float = 1.0 if result_ty.kind == "f" else 0x3F80 if result_ty.name == "bf16" else -1
    e.write(ins.operands[0], f.select(holds, f.const(result_ty.el, one), f.const(result_ty.el, 0)), result_ty, ins)


def _set_pair(e: Operands, ins: Ins, result_ty: Ty, t: Ty) -> None:
    f = e.f
    one = {"f16x2": 0x3C00, "bf16x2": 0x3F80}.get(result_ty.name, 0xFFFF)
    low, high = (
        f.select(_combined(e, ins, h), f.const("i32", one << at), f.const("i32", 0))
        for h, at in zip(_halves(e, ins, t), (0, 16), strict=True)
    )
    e.write(ins.operands[0], f.or_(low, high), result_ty, ins)


def mov(e: Operands, ins: Ins) -> None:
    t = ins.types[-1]
    e.write(ins.operands[0], e.read(ins.operands[1], t), t, ins)


def _slct(f: Fn, ins: Ins, a: V, b: V, c: V) -> V:
    if ins.types[-1].kind == "f":
        c = flush(f, c) if mod(ins, "ftz") else c
        return f.select(f.fcmp("oge", c, 0.0), a, b)
    return f.select(f.icmp("sge", c, 0), a, b)


RULES: dict[str, OpRule] = {
    "selp": OpRule(
        lambda ins: (ins.types[-1], (ins.types[-1], ins.types[-1], PRED)), lambda f, ins, a, b, p: f.select(p, a, b)
    ),
    "slct": OpRule(lambda ins: (ins.types[0], (ins.types[0], ins.types[0], ins.types[1])), _slct),
}
HANDLERS: dict[str, Handler[Operands]] = {"setp": setp, "set": set_, "mov": mov}
