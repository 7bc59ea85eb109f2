"""cvt: every pair of integer and floating-point types, with the rounding modes (PTX ISA 9.7.9.21)."""

from tegrad.ptx import directed as doubles
from tegrad.ptx import fp8
from tegrad.ptx.floating import (
    DIRECTED,
    bf16_to_f32,
    f32_to_bf16,
    flush,
    narrow,
    narrow_odd,
    saturate,
    step_to_odd,
    two_sum,
)  # fmt: skip
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.rules import U32, OpRule, mod
from tegrad.ptx.syntax import Ins
from tegrad.ptx.types import EL_BITS, TYPES, Ty

TO_INTEGER = {"rni": "roundeven", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}


def _int_to_int(f: Fn, ins: Ins, a: V, d: Ty, s: Ty) -> V:
    if mod(ins, "sat"):
        a = _clamp(f, a, d, s)
    return f.resize(a, d.iel, s.signed)


def _clamp(f: Fn, a: V, d: Ty, s: Ty) -> V:
    """Limit a source integer to the range of the destination."""
    low = -(1 << (d.bits - 1)) if d.signed else 0
    top = (1 << (d.bits - 1 if d.signed else d.bits)) - 1
    source_low = -(1 << (s.bits - 1)) if s.signed else 0
    source_top = (1 << (s.bits - 1 if s.signed else s.bits)) - 1
    sign = "s" if s.signed else "u"
    if low > source_low:
        a = f.intr(sign + "max", a, low)
    if top < source_top:
        a = f.intr(sign + "min", a, top)
    return a


def exact_double(f: Fn, a: V, signed: bool) -> V:
    """An integer as a double, rounded to odd where it does not fit."""
    return step_to_odd(f, *_double_and_rest(f, a, signed))


def _double_and_rest(f: Fn, a: V, signed: bool) -> tuple[V, V]:
    """An integer as the nearest double, and what is left."""
    if a.el != "i64":
        whole = f.cast("sitofp" if signed else "uitofp", a, "double")
        return whole, f.like(whole, 0.0)
    top = f.bin("ashr" if signed else "lshr", a, 32)
    high = f.bin("fmul", f.cast("sitofp", f.resize(top, "i32", True), "double"), 2.0**32)
    if not signed:
        high = f.bin("fmul", f.cast("uitofp", f.resize(top, "i32", False), "double"), 2.0**32)
    low = f.cast("uitofp", f.resize(a, "i32", False), "double")
    return two_sum(f, high, low)


def _to_bf16(f: Fn, v: V, mode: str) -> V:
    """A double (rounded to odd at most) to bfloat16 bits."""
    if mode == "rz":
        raw = f.bits(narrow(f, v, "float", "rz"), "i32")
        cut = f.resize(f.bin("lshr", raw, 16), "i16", False)
        return f.select(f.fcmp("uno", v, v), f.like(cut, 0x7FFF), cut)
    if mode in DIRECTED:
        return _cut(f, narrow(f, v, "float", mode), mode)
    return f32_to_bf16(f, narrow_odd(f, v))


def _cut(f: Fn, v: V, mode: str) -> V:
    """A float to bfloat16 bits in .rm or .rp: away from zero on one side, cut off on the other."""
    raw = f.bits(v, "i32")
    away = f.icmp("slt" if mode == "rm" else "sge", raw, 0)
    raw = f.add(raw, f.select(away, f.like(raw, 0xFFFF), f.like(raw, 0)))
    cut = f.resize(f.bin("lshr", raw, 16), "i16", False)
    return f.select(f.fcmp("uno", v, v), f.like(cut, 0x7FFF), cut)


def _mode(ins: Ins) -> str:
    return next((m for m in ins.mods if m in ("rn", "rz", "rm", "rp", "rna", *TO_INTEGER)), "rn")


def _int_to_float(f: Fn, ins: Ins, a: V, d: Ty, s: Ty) -> V:
    out = _nearest_float(f, _mode(ins), a, d, s)
    return saturate(f, out) if mod(ins, "sat") else out


def _nearest_float(f: Fn, mode: str, a: V, d: Ty, s: Ty) -> V:
    if mode in DIRECTED or d.name == "bf16":
        if d.name == "f64":
            return doubles.step(f, *_double_and_rest(f, a, s.signed), mode)
        v = exact_double(f, a, s.signed)
        return _to_bf16(f, v, mode) if d.name == "bf16" else narrow(f, v, d.el, mode)
    if d.name == "f16":
        # Exact in float up to the largest half; beyond that both roundings overflow.
        return f.cast("fptrunc", f.cast("sitofp" if s.signed else "uitofp", a, "float"), "half")
    return f.cast("sitofp" if s.signed else "uitofp", a, d.el)


def _as_float(f: Fn, a: V, s: Ty) -> V:
    if s.name == "bf16":
        return bf16_to_f32(f, a)
    return f.cast("fpext", a, "float") if s.name == "f16" else a


def _float_to_int(f: Fn, ins: Ins, a: V, d: Ty, s: Ty) -> V:
    """Round to an integer, then saturate; NaN gives 0, or the top bit from or to 64 bits."""
    a = _as_float(f, a, s)
    if mod(ins, "ftz"):
        a = flush(f, a)
    rounding = TO_INTEGER[_mode(ins)]
    if rounding != "trunc":
        a = f.intr(rounding, a)
    out = f.to_int(a, d.iel, d.signed)
    if s.name != "f64" and d.bits != 64:
        return out
    return f.select(f.fcmp("uno", a, a), f.like(out, 1 << (d.bits - 1)), out)


def _float_to_float(f: Fn, ins: Ins, a: V, d: Ty, s: Ty) -> V:
    mode = _mode(ins)
    if mod(ins, "ftz") and s.name == "f32" and d.name != "f16":
        # To half, the GPU keeps a subnormal source: in .rm and .rp it becomes the smallest half.
        a = flush(f, a)
    if mode in TO_INTEGER:
        a = _as_float(f, a, s)
        a = f.intr(TO_INTEGER[mode], a)
        if d.name == "f16":
            a = f.cast("fptrunc", a, "half")
        elif d.name == "bf16":
            a = f32_to_bf16(f, a)
        elif d.bits < s.bits:
            raise NotImplementedError
    elif d.name == "tf32":
        return _relu(f, ins, _to_tf32(f, a, mode))
    elif s.name == d.name:
        pass
    elif d.name == "bf16":
        a = f32_to_bf16(f, a) if s.name == "f32" and mode == "rn" else _to_bf16(f, _as_double(f, a, s), mode)
    elif s.name == "bf16" or d.bits > s.bits:
        a = _as_float(f, a, s)
        a = a if d.name != "f64" else f.cast("fpext", a, "double")
        if d.name == "f16":
            a = narrow(f, f.cast("fpext", a, "double"), "half", mode)
    elif s.name == "f32" and mode == "rn":
        a = f.cast("fptrunc", a, "half")
    else:
        a = narrow(f, _as_double(f, a, s), d.el, mode)
    if mod(ins, "ftz") and d.name == "f32":
        a = flush(f, a)
    if mod(ins, "sat"):
        a = saturate(f, a)
    return _relu(f, ins, a)


def _relu(f: Fn, ins: Ins, a: V) -> V:
    """.relu: what is below zero becomes zero; NaN stays."""
    if not mod(ins, "relu"):
        return a
    if a.el == "half":
        return f.intr("maximum", a, 0.0)
    # Bits of a bfloat16 or a tf32.
    nan = f.icmp("ugt", f.and_(a, (1 << (EL_BITS[a.el] - 1)) - 1), 0xFF << (EL_BITS[a.el] - 9))
    minus = f.and_(f.icmp("slt", a, 0), f.not_(nan))
    return f.select(minus, f.like(a, 0), a)


def _as_double(f: Fn, a: V, s: Ty) -> V:
    return f.cast("fpext", _as_float(f, a, s), "double")


def _to_tf32(f: Fn, a: V, mode: str) -> V:
    """Float to 10 bits of mantissa; .rna rounds ties away from zero."""
    raw = f.bits(a, "i32")
    if mode in ("rna", "rz"):
        add = f.like(raw, 0x1000 if mode == "rna" else 0)
    else:
        add = f.add(f.and_(f.bin("lshr", raw, 13), 1), 0xFFF)
    out = f.and_(f.add(raw, add), -0x2000)
    special = f.icmp("eq", f.and_(raw, 0x7F800000), 0x7F800000)
    return f.select(special, f.select(f.fcmp("uno", a, a), f.like(raw, 0x7FFFFFFF), raw), out)


def cvt(f: Fn, ins: Ins, *vs: V) -> V:
    if mod(ins, "pack"):
        return _pack_integers(f, ins, *vs)
    d, s = ins.types
    if d.name in FP8 or s.name in FP8:
        return _fp8(f, ins, d, s, vs)
    if len(vs) == 2:
        return _pack(f, ins, vs[0], vs[1])
    (a,) = vs
    if s.kind in "usb":
        return _int_to_float(f, ins, a, d, s) if d.kind in "fh" else _int_to_int(f, ins, a, d, s)
    return _float_to_float(f, ins, a, d, s) if d.kind in "fh" else _float_to_int(f, ins, a, d, s)


def _pack(f: Fn, ins: Ins, high: V, low: V) -> V:
    """cvt.rn.f16x2.f32 d, a, b: a in the upper half."""
    d, s = ins.types
    part = TYPES[{"f16x2": "f16", "bf16x2": "bf16"}[d.name]]
    one = ins._replace(types=(part, s))
    halves = [f.resize(f.bits(_float_to_float(f, one, v, part, s), "i16"), "i32", False) for v in (high, low)]
    return f.or_(f.bin("shl", halves[0], 16), halves[1])


def _pack_integers(f: Fn, ins: Ins, high: V, low: V, rest: V | None = None) -> V:
    """cvt.pack.sat.d.s32{.b32} d, a, b{, c}: a and b clamped, a above b, both below what is left of c."""
    d, s = ins.types[:2]
    parts = [f.resize(f.resize(_clamp(f, v, d, s), d.iel, True), "i32", False) for v in f.same(high, low)]
    out = f.or_(f.bin("shl", parts[0], d.bits), parts[1])
    return out if rest is None else f.or_(f.bin("shl", rest, 2 * d.bits), out)


FP8 = {"e4m3x2": "e4m3", "e5m2x2": "e5m2"}


def _fp8(f: Fn, ins: Ins, d: Ty, s: Ty, vs: tuple[V, ...]) -> V:
    """Between pairs of 8-bit floats and floats or pairs of halves; the first source goes to the upper part."""
    if s.name in FP8:
        if d.name != "f16x2":
            raise NotImplementedError
        parts = [fp8.decode(f, _byte(f, vs[0], i), FP8[s.name]) for i in (1, 0)]
        if mod(ins, "relu"):
            parts = [f.intr("maximum", p, 0.0) for p in parts]
        return _join(f, [f.bits(f.cast("fptrunc", p, "half"), "i16") for p in parts], "i32")
    if s.name == "f16x2":
        halves = [f.resize(f.bin("lshr", vs[0], at), "i16", False) for at in (16, 0)]
        vs = tuple(f.cast("fpext", f.bits(h, "half"), "float") for h in halves)
    elif s.name != "f32":
        raise NotImplementedError
    if mod(ins, "relu"):
        vs = tuple(f.intr("maximum", v, 0.0) for v in vs)
    return _join(f, [fp8.encode(f, v, FP8[d.name]) for v in vs], "i16")


def _byte(f: Fn, v: V, i: int) -> V:
    return f.resize(f.bin("lshr", v, 8 * i) if i else v, "i8", False)


def _join(f: Fn, parts: list[V], el: str) -> V:
    """Two values as one of twice the width, the first one on top."""
    high, low = (f.resize(p, el, False) for p in f.same(*parts))
    return f.or_(f.bin("shl", high, int(el[1:]) // 2), low)


def _signature(ins: Ins) -> tuple[Ty, tuple[Ty, ...]]:
    d, s = ins.types[:2]
    if mod(ins, "pack"):
        return U32, (s, s, *ins.types[2:])
    pair = d.name in ("f16x2", "bf16x2", *FP8) and s.name == "f32"
    return d, (s,) * (2 if pair else 1)


RULES: dict[str, OpRule] = {"cvt": OpRule(_signature, cvt)}
