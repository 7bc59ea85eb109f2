"""Directed rounding of doubles (.rz, .rm, .rp): the nearest result, stepped where the sign of its exact error says so.

Operands are brought near one by powers of two first, so that the error's sign is computed without overflow or
underflow.
"""

import math
from collections.abc import Callable, Sequence

from tegrad.ptx.ir import Fn, V

Step = Callable[..., tuple[V, V]]
"""f and operands -> the nearest result, and a value with the sign of (exact - nearest), zero where it is exact."""
FAR_ORDERS = 110
"""Binary orders between a product and a summand from which on the smaller one only decides a direction."""


def two_sum(f: Fn, a: V, b: V) -> tuple[V, V]:
    """a + b and its rounding error, exact where nothing overflows."""
    s = f.bin("fadd", a, b)
    bb = f.bin("fsub", s, a)
    return s, f.bin("fadd", f.bin("fsub", a, f.bin("fsub", s, bb)), f.bin("fsub", b, bb))


def _finite(f: Fn, *vs: V) -> V:
    """Whether all of them are finite numbers."""
    out = f.fcmp("olt", f.intr("fabs", vs[0]), math.inf)
    for v in vs[1:]:
        out = f.and_(out, f.fcmp("olt", f.intr("fabs", v), math.inf))
    return out


def _where(f: Fn, c: V, v: V) -> V:
    return f.select(c, v, 0.0)


def _power(f: Fn, n: V) -> V:
    return f.bits(f.bin("shl", f.add(n, 1023), 52), "double")


def _scale(f: Fn, v: V, n: V) -> V:
    """v * 2^n in three steps, exact where the result is a normal number."""
    third = f.bin("sdiv", n, 3)
    for part in (third, third, f.sub(n, f.add(third, third))):
        v = f.bin("fmul", v, _power(f, part))
    return v


def _normal(f: Fn, v: V) -> tuple[V, V]:
    """A finite nonzero number as m * 2^e with 1 <= |m| < 2; zero gives zero and some e."""
    tiny = f.fcmp("olt", f.intr("fabs", v), 2.0**-1022)
    raw = f.bits(f.select(tiny, f.bin("fmul", v, 2.0**54), v), "i64")
    field = f.and_(f.bin("lshr", raw, 52), 0x7FF)
    e = f.sub(field, f.select(tiny, f.like(raw, 1023 + 54), 1023))
    one = f.or_(f.and_(raw, -(0x7FF << 52) - 1), 1023 << 52)
    return f.select(f.fcmp("oeq", v, 0.0), v, f.bits(one, "double")), e


def _sum(f: Fn, a: V, b: V) -> tuple[V, V]:
    s, err = two_sum(f, a, b)
    over = f.fcmp("oeq", f.intr("fabs", s), math.inf)
    return s, _where(f, _finite(f, a, b), f.select(over, f.fneg(s), err))


def _product(f: Fn, a: V, b: V) -> tuple[V, V]:
    r = f.bin("fmul", a, b)
    (am, ae), (bm, be) = _normal(f, a), _normal(f, b)
    scaled = _scale(f, r, f.sub(f.like(ae, 0), f.add(ae, be)))
    return r, _where(f, _finite(f, a, b), f.intr("fma", am, bm, f.fneg(scaled)))


def _grow(f: Fn, parts: list[V], x: V) -> list[V]:
    """A sum of non-overlapping numbers, smallest first, with one more."""
    out = []
    for p in parts:
        x, err = two_sum(f, p, x)
        out.append(err)
    return [*out, x]


def _leading(f: Fn, parts: list[V]) -> V:
    """The largest nonzero part of a non-overlapping sum: it has the sum's sign."""
    out = parts[0]
    for p in parts[1:]:
        out = f.select(f.fcmp("une", p, 0.0), p, out)
    return out


def _fused(f: Fn, a: V, b: V, c: V) -> tuple[V, V]:
    r = f.intr("fma", a, b, c)
    (am, ae), (bm, be), (_, ce) = _normal(f, a), _normal(f, b), _normal(f, c)
    exponent = f.add(ae, be)
    sign = f.bin("fmul", am, bm)
    apart = f.sub(ce, exponent)
    back = f.sub(f.like(exponent, 0), exponent)
    # Out of range, where the case is another one, these are infinite or zero and not used.
    scaled_c, scaled_r = _scale(f, c, back), _scale(f, r, back)
    low = f.intr("fma", am, bm, f.fneg(sign))
    near = _leading(f, _grow(f, _grow(f, [low, sign], scaled_c), f.fneg(scaled_r)))
    rest = f.intr("fma", am, bm, f.fneg(scaled_r))
    small_c = f.select(f.fcmp("oeq", rest, 0.0), c, rest)
    zero_c = f.fcmp("oeq", c, 0.0)
    err = f.select(f.or_(zero_c, f.icmp("slt", apart, -2 * FAR_ORDERS)), small_c, near)
    far_c = f.and_(f.icmp("sgt", apart, FAR_ORDERS), f.not_(zero_c))
    err = f.select(far_c, sign, err)
    nothing = f.fcmp("oeq", sign, 0.0)
    over = f.fcmp("oeq", f.intr("fabs", r), math.inf)
    err = f.select(nothing, f.like(err, 0.0), f.select(over, f.fneg(r), err))
    return r, _where(f, _finite(f, a, b, c), err)


def _quotient(f: Fn, a: V, b: V) -> tuple[V, V]:
    r = f.bin("fdiv", a, b)
    (am, ae), (bm, be) = _normal(f, a), _normal(f, b)
    rest = f.intr("fma", f.fneg(_scale(f, r, f.sub(be, ae))), bm, am)
    minus = f.fcmp("olt", b, 0.0)
    inexact = f.and_(_finite(f, a, b), f.fcmp("one", b, 0.0))
    inexact = f.and_(inexact, f.fcmp("one", a, 0.0))
    return r, _where(f, inexact, f.select(minus, f.fneg(rest), rest))


def _root(f: Fn, a: V) -> tuple[V, V]:
    r = f.intr("sqrt", a)
    tiny = f.fcmp("olt", a, 2.0**-500)
    scaled = f.select(tiny, f.bin("fmul", a, 2.0**500), a)
    root = f.select(tiny, f.bin("fmul", r, 2.0**250), r)
    rest = f.intr("fma", f.fneg(root), root, scaled)
    return r, _where(f, _finite(f, a, r), rest)


STEPS: dict[str, Step] = {
    "add": _sum,
    "sub": lambda f, a, b: _sum(f, a, f.fneg(b)),
    "mul": _product,
    "fma": _fused,
    "mad": _fused,
    "div": _quotient,
    "rcp": lambda f, a: _quotient(f, f.like(a, 1.0), a),
    "sqrt": _root,
}


def step(f: Fn, r: V, err: V, mode: str) -> V:
    """The neighbour of a nearest result on the side of its error, where the mode wants that one."""
    raw = f.bits(r, "i64")
    minus = f.icmp("slt", raw, 0)
    zero = f.fcmp("oeq", r, 0.0)
    above, below = (f.fcmp(p, err, 0.0) for p in ("olt", "ogt"))
    inward, outward = f.sub(raw, 1), f.add(raw, 1)
    if mode == "rz":
        large = f.select(minus, below, above)
        return f.bits(f.select(f.and_(large, f.not_(zero)), inward, raw), "double")
    wrong = above if mode == "rm" else below
    smallest = f.like(raw, (1 << 63) + 1 if mode == "rm" else 1)
    moved = f.select(minus, outward, inward) if mode == "rm" else f.select(minus, inward, outward)
    return f.bits(f.select(wrong, f.select(zero, smallest, moved), raw), "double")


def apply(f: Fn, base: str, mode: str, *vs: V) -> V:
    """An operation of doubles in a directed mode; a sum that is exactly zero is -0 in .rm unless both parts are +0."""
    vs = tuple(f.same(*vs))
    r, err = STEPS[base](f, *vs)
    out = step(f, r, err, mode)
    if mode != "rm" or base not in ("add", "sub", "fma", "mad"):
        return out
    either = signs(f, base, vs)
    exact = f.and_(f.fcmp("oeq", r, 0.0), f.fcmp("oeq", err, 0.0))
    return f.select(f.and_(exact, f.icmp("slt", either, 0)), f.like(out, -0.0), out)


def signs(f: Fn, base: str, vs: Sequence[V]) -> V:
    """The two parts of a sum, or-ed as integers: negative unless both are positive."""
    first = f.bin("fmul", vs[0], vs[1]) if len(vs) == 3 else vs[0]
    second = f.fneg(vs[1]) if base == "sub" else vs[-1]
    return f.or_(f.bits(first, "i64"), f.bits(second, "i64"))
