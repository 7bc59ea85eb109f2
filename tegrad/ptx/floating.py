"""Floating-point instructions (PTX ISA 9.7.3, 9.7.4): f16, f16x2, bf16, bf16x2, f32, f64."""

import math
from collections.abc import Callable

from tegrad.ptx import approx
from tegrad.ptx import directed as doubles
from tegrad.ptx.ir import Fn, V
from tegrad.ptx.rules import Apply, OpRule, mod, same
from tegrad.ptx.syntax import Ins
from tegrad.ptx.types import TYPES, Ty

SMALLEST_NORMAL = {"half": 2.0**-14, "float": 2.0**-126, "double": 2.0**-1022}
DIRECTED = ("rz", "rm", "rp")


def flush(f: Fn, v: V) -> V:
    """Subnormal numbers to zero of the same sign (.ftz)."""
    tiny = f.fcmp("olt", f.intr("fabs", v), SMALLEST_NORMAL[v.el])
    return f.select(tiny, f.intr("copysign", f.like(v, 0.0), v), v)


def saturate(f: Fn, v: V) -> V:
    """Clamp to [0, 1]; NaN becomes 0 (.sat)."""
    return f.intr("minimumnum", f.intr("maximumnum", v, 0.0), 1.0)


def bf16_to_f32(f: Fn, v: V) -> V:
    return f.bits(f.bin("shl", f.resize(v, "i32", False), 16), "float")


def f32_to_bf16(f: Fn, v: V) -> V:
    """Round to nearest even; NaN is canonical."""
    raw = f.bits(v, "i32")
    lsb = f.and_(f.bin("lshr", raw, 16), 1)
    rounded = f.bin("lshr", f.add(raw, f.add(lsb, 0x7FFF)), 16)
    out = f.select(f.fcmp("uno", v, v), f.like(raw, 0x7FFF), rounded)
    return f.resize(out, "i16", False)


def step_to_odd(f: Fn, value: V, error: V) -> V:
    """Make a rounded value odd where it is inexact: `error` is the exact rest (true minus value)."""
    el = "i64" if value.el == "double" else "i32"
    raw = f.bits(value, el)
    even = f.is_zero(f.and_(raw, 1))
    inexact = f.fcmp("one", error, 0.0)
    # Away from zero when the rest has the sign of the value.
    outward = f.icmp("sge", f.xor(f.bits(error, el), raw), f.like(raw, 0))
    stepped = f.add(raw, f.select(outward, f.like(raw, 1), -1))
    return f.bits(f.select(f.and_(even, inexact), stepped, raw), value.el)


def two_sum(f: Fn, a: V, b: V) -> tuple[V, V]:
    """a + b and its exact rounding error; none where something is infinite."""
    s, err = doubles.two_sum(f, a, b)
    return s, f.select(f.fcmp("ord", err, err), err, 0.0)


def fma_odd(f: Fn, a: V, b: V, c: V) -> V:
    """a * b + c of doubles rounded to odd, where the product is exact (operands came from narrower types)."""
    s, err = two_sum(f, f.bin("fmul", a, b), c)
    return step_to_odd(f, s, err)


def narrow_odd(f: Fn, v: V) -> V:
    """Double to float, rounded to odd: a later rounding to 22 bits or fewer is then correct."""
    out = f.cast("fptrunc", v, "float")
    rest = f.bin("fsub", v, f.cast("fpext", out, "double"))
    rest = f.select(f.fcmp("ord", rest, rest), rest, 0.0)
    return step_to_odd(f, out, _sign_only(f, rest))


def _sign_only(f: Fn, rest: V) -> V:
    """-1, 0 or 1 as float: enough for step_to_odd, and safe from underflow."""
    sign = f.intr("copysign", f.like(rest, 1.0), rest)
    return f.cast("fptrunc", f.select(f.fcmp("one", rest, 0.0), sign, 0.0), "float")


def fma(f: Fn, a: V, b: V, c: V) -> V:
    """Correctly rounded fma; half goes through doubles, since a float in between would round twice."""
    if a.el != "half":
        return f.intr("fma", a, b, c)
    wide = [f.cast("fpext", f.cast("fpext", x, "float"), "double") for x in f.same(a, b, c)]
    return f.cast("fptrunc", narrow_odd(f, fma_odd(f, *wide)), "half")


def directed(f: Fn, value: V, rounded: V, back: V, mode: str) -> V:
    """Correct a nearest rounding (`rounded`; `back` is it in the type of `value`) to rz, rm or rp."""
    el = {"half": "i16", "float": "i32"}[rounded.el]
    raw = f.bits(rounded, el)
    minus = f.icmp("slt", raw, 0)
    above, below = f.fcmp("ogt", back, value), f.fcmp("olt", back, value)
    toward_zero = f.sub(raw, 1)
    away = f.add(raw, 1)
    sign = f.like(raw, 1 << (int(el[1:]) - 1))
    if mode == "rz":
        large = f.or_(f.and_(above, f.not_(minus)), f.and_(below, minus))
        return f.bits(f.select(large, toward_zero, raw), rounded.el)
    wrong = above if mode == "rm" else below
    shrink = f.not_(minus) if mode == "rm" else minus
    zero = f.is_zero(f.and_(raw, f.not_(sign)))
    smallest = f.or_(sign, 1) if mode == "rm" else f.like(raw, 1)
    stepped = f.select(zero, smallest, f.select(shrink, toward_zero, away))
    return f.bits(f.select(wrong, stepped, raw), rounded.el)


def narrow(f: Fn, v: V, el: str, mode: str) -> V:
    """A double to half or float in a rounding mode."""
    rounded = f.cast("fptrunc", v, "float") if el == "float" else f.cast("fptrunc", narrow_odd(f, v), "half")
    if mode not in DIRECTED:
        return rounded
    back = f.cast("fpext", rounded if el == "float" else f.cast("fpext", rounded, "float"), "double")
    return directed(f, v, rounded, back, mode)


def _rest_of_quotient(f: Fn, a: V, b: V, q: V) -> V:
    """A value with the sign of a/b - q."""
    rest = f.intr("fma", f.fneg(q), b, a)
    signed = f.bits(f.xor(f.bits(rest, "i64"), f.and_(f.bits(b, "i64"), 1 << 63)), "double")
    return f.select(f.fcmp("ord", rest, rest), signed, 0.0)


def _odd_quotient(f: Fn, a: V, b: V) -> V:
    q = f.bin("fdiv", a, b)
    exact = f.or_(f.fcmp("ueq", f.intr("fabs", q), math.inf), f.fcmp("oeq", f.intr("fabs", b), math.inf))
    return step_to_odd(f, q, f.select(exact, f.like(q, 0.0), _rest_of_quotient(f, a, b, q)))


def _odd_root(f: Fn, a: V) -> V:
    r = f.intr("sqrt", a)
    rest = f.intr("fma", f.fneg(r), r, a)
    return step_to_odd(f, r, f.select(f.fcmp("ord", rest, rest), rest, 0.0))


ODD: dict[str, Callable[..., V]] = {
    "add": lambda f, a, b: step_to_odd(f, *two_sum(f, a, b)),
    "sub": lambda f, a, b: step_to_odd(f, *two_sum(f, a, f.fneg(b))),
    "mul": lambda f, a, b: f.bin("fmul", a, b),
    "fma": fma_odd,
    "mad": fma_odd,
    "div": _odd_quotient,
    "rcp": lambda f, a: _odd_quotient(f, f.like(a, 1.0), a),
    "sqrt": _odd_root,
}
"""Operations on doubles that came from floats, exact or rounded to odd, for a second rounding in any mode."""


def _directed_float(f: Fn, base: str, mode: str, vs: tuple[V, ...]) -> V:
    """.rz, .rm and .rp; of float through doubles. A sum that is exactly zero is -0 in .rm."""
    if base not in ODD or vs[0].el not in ("float", "double"):
        raise NotImplementedError
    if vs[0].el == "double":
        return doubles.apply(f, base, mode, *vs)
    wide = [f.cast("fpext", v, "double") for v in f.same(*vs)]
    exact = ODD[base](f, *wide)
    out = narrow(f, exact, "float", mode)
    if mode == "rm" and base in ("add", "sub", "fma", "mad"):
        return _minus_zero(f, base, wide, exact, out)
    return out


def _minus_zero(f: Fn, base: str, wide: list[V], exact: V, out: V) -> V:
    """Exact cancellation gives -0 when rounding down, unless both parts are +0."""
    either = doubles.signs(f, base, wide)
    minus = f.and_(f.icmp("slt", either, 0), f.fcmp("oeq", exact, 0.0))
    return f.select(minus, f.like(out, -0.0), out)


Plain = Callable[..., V]


def _minmax(name: str) -> Plain:
    return lambda f, ins, a, b: f.intr(
        ("minimum" if name == "min" else "maximum") + ("" if mod(ins, "NaN") else "num"), a, b
    )


def _min(f: Fn, ins: Ins, *vs: V) -> V:
    """min or max; .xorsign.abs compares magnitudes and gives the result the product's sign."""
    if not mod(ins, "xorsign"):
        return _minmax(ins.base)(f, ins, *vs)
    a, b = f.same(*vs)
    el = {"half": "i16", "float": "i32"}[a.el]
    sign = f.like(f.bits(a, el), 1 << (int(el[1:]) - 1))
    minus = f.and_(f.xor(f.bits(a, el), f.bits(b, el)), sign)
    out = f.bits(_minmax(ins.base)(f, ins, f.intr("fabs", a), f.intr("fabs", b)), el)
    return f.bits(f.or_(f.and_(out, f.not_(sign)), minus), a.el)


PLAIN: dict[str, Plain] = {
    "add": lambda f, ins, a, b: f.bin("fadd", a, b),
    "sub": lambda f, ins, a, b: f.bin("fsub", a, b),
    "mul": lambda f, ins, a, b: f.bin("fmul", a, b),
    "fma": lambda f, ins, a, b, c: fma(f, a, b, c),
    "mad": lambda f, ins, a, b, c: fma(f, a, b, c),
    "min": _min,
    "max": _min,
    "abs": lambda f, ins, a: f.intr("fabs", a),
    "neg": lambda f, ins, a: f.fneg(a),
    "div": lambda f, ins, a, b: f.bin("fdiv", a, b),
    "rcp": lambda f, ins, a: f.bin("fdiv", f.like(a, 1.0), a),
    "sqrt": lambda f, ins, a: f.intr("sqrt", a),
    "rsqrt": lambda f, ins, a: f.bin("fdiv", f.like(a, 1.0), f.intr("sqrt", a)),
    "ex2": lambda f, ins, a: approx.ex2(f, a),
    "lg2": lambda f, ins, a: approx.lg2(f, a),
    "sin": lambda f, ins, a: approx.sine(f, a, 0),
    "cos": lambda f, ins, a: approx.sine(f, a, 1),
    "tanh": lambda f, ins, a: approx.tanh(f, a),
}
ARITY = {"add": 2, "sub": 2, "mul": 2, "fma": 3, "mad": 3, "min": 2, "max": 2, "div": 2}
THROUGH_FLOAT = frozenset({"ex2", "lg2", "sin", "cos", "tanh", "rcp", "sqrt", "rsqrt", "div"})


def _ieee(base: str) -> Apply:
    """The operation on half, float or double values with .ftz, .sat and .relu."""
    plain = PLAIN[base]

    def apply(f: Fn, ins: Ins, *vs: V) -> V:
        mode = next((m for m in ins.mods if m in DIRECTED), "")
        ftz = mod(ins, "ftz")
        if ftz and base != "neg":
            vs = tuple(flush(f, v) for v in vs)
        if mode:
            out = _directed_float(f, base, mode, vs)
        elif base in THROUGH_FLOAT and vs[0].el == "half":
            out = f.cast("fptrunc", plain(f, ins, *(f.cast("fpext", v, "float") for v in vs)), "half")
        else:
            out = plain(f, ins, *vs)
        if ftz:
            out = flush(f, out)
        if mod(ins, "sat"):
            out = saturate(f, out)
        if mod(ins, "relu"):
            out = f.intr("maximum", out, 0.0)
        return out

    return apply


def _bf16(base: str) -> Apply:
    """The operation on bfloat16 bits: exact in float or rounded to odd, then rounded once."""
    ieee = _ieee(base)

    def apply(f: Fn, ins: Ins, *vs: V) -> V:
        if base == "abs":
            return f.and_(vs[0], 0x7FFF)
        if base == "neg":
            return f.xor(vs[0], 0x8000)
        wide = f.same(*(bf16_to_f32(f, v) for v in vs))
        if base == "fma":
            out = narrow_odd(f, fma_odd(f, *(f.cast("fpext", w, "double") for w in wide)))
            if mod(ins, "relu"):
                out = f.intr("maximum", out, 0.0)
            return f32_to_bf16(f, out)
        return f32_to_bf16(f, ieee(f, ins, *wide))

    return apply


def _paired(el: str, apply: Apply) -> Apply:
    """Run on both halves of f16x2 or bf16x2 as a vector of twice the length."""

    def both(f: Fn, ins: Ins, *vs: V) -> V:
        n = max(v.n for v in vs)
        halves = [f.op(el, 2 * n, f"bitcast {f.splat(v, n)} to <{2 * n} x {el}>") for v in vs]
        out = apply(f, ins, *halves)
        return f.op("i32", n, f"bitcast {out} to {'i32' if n == 1 else f'<{n} x i32>'}")

    return both


def _apply(base: str) -> Apply:
    ieee, bf16 = _ieee(base), _bf16(base)
    table: dict[str, Apply] = {"f16x2": _paired("half", ieee), "bf16x2": _paired("i16", bf16), "bf16": bf16}

    def apply(f: Fn, ins: Ins, *vs: V) -> V:
        return table.get(ins.types[-1].name, ieee)(f, ins, *vs)

    return apply


def _testp(f: Fn, ins: Ins, a: V) -> V:
    """Zeros count as normal numbers."""
    magnitude = f.intr("fabs", a)
    inf, small = f.like(a, math.inf), f.like(a, SMALLEST_NORMAL[a.el])
    return {
        "finite": lambda: f.fcmp("olt", magnitude, inf),
        "infinite": lambda: f.fcmp("oeq", magnitude, inf),
        "number": lambda: f.fcmp("ord", a, a),
        "notanumber": lambda: f.fcmp("uno", a, a),
        "normal": lambda: f.and_(
            f.fcmp("olt", magnitude, inf), f.or_(f.fcmp("oge", magnitude, small), f.fcmp("oeq", a, 0.0))
        ),
        "subnormal": lambda: f.and_(f.fcmp("olt", magnitude, small), f.fcmp("ogt", magnitude, 0.0)),
    }[ins.mods[0]]()


def _pred(ins: Ins) -> tuple[Ty, tuple[Ty, ...]]:
    return TYPES["pred"], (ins.types[-1],)


RULES: dict[str, OpRule] = {
    **{base: OpRule(same(ARITY.get(base, 1)), _apply(base)) for base in PLAIN},
    "copysign": OpRule(same(2), lambda f, ins, a, b: f.intr("copysign", b, a)),
    "testp": OpRule(_pred, _testp),
}


def is_float(ins: Ins) -> bool:
    """Whether the instruction works on a floating-point type."""
    if not ins.types:
        return False
    t = ins.types[-1]
    return t.kind in ("f", "h") or t.name in ("f16x2", "bf16x2")
