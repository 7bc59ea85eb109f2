"""The approximate functions (ex2, lg2, sin, cos, tanh), as polynomials.

NVIDIA's tables are not public; these stay within the errors that the PTX ISA documents for each instruction.
"""

import math
import struct
from collections.abc import Sequence

from tegrad.ptx.ir import Fn, V

_INT = {"float": "i32", "double": "i64"}
_MANTISSA = {"float": 23, "double": 52}
_BIAS = {"float": 127, "double": 1023}


def poly(f: Fn, x: V, coefficients: Sequence[float]) -> V:
    """Horner's rule, the constant term first."""
    out = f.like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        out = f.intr("fma", out, x, f.like(x, c))
    return out


def power_of_two(f: Fn, n: V, el: str) -> V:
    """2^n of an integer within the exponent range of normal numbers."""
    return f.bits(f.bin("shl", f.add(n, _BIAS[el]), _MANTISSA[el]), el)


def ex2(f: Fn, x: V) -> V:
    """2^x: the fraction by its series, the integer part into the exponent in two steps (subnormal results)."""
    top = 160.0 if x.el == "float" else 1200.0
    clamped = f.intr("minnum", f.intr("maxnum", x, -top), top)
    whole = f.intr("rint", clamped)
    frac = f.bin("fsub", clamped, whole)
    terms = 8 if x.el == "float" else 14
    p = poly(f, frac, [math.log(2) ** i / math.factorial(i) for i in range(terms)])
    n = f.to_int(whole, _INT[x.el], True)
    half = f.bin("ashr", n, 1)
    p = f.bin("fmul", f.bin("fmul", p, power_of_two(f, half, x.el)), power_of_two(f, f.sub(n, half), x.el))
    return f.select(f.fcmp("uno", x, x), x, p)


def lg2(f: Fn, x: V) -> V:
    """log2: exponent plus the series of atanh for a mantissa in [sqrt(1/2), sqrt(2))."""
    bits, mant = _INT[x.el], _MANTISSA[x.el]
    tiny = f.fcmp("olt", x, 2.0 ** (1 - _BIAS[x.el]))
    scaled = f.select(tiny, f.bin("fmul", x, 2.0**mant), x)
    raw = f.bits(scaled, bits)
    root_half = f.like(raw, _float_bits(x.el, math.sqrt(0.5)))
    exponent = f.bin("ashr", f.sub(raw, root_half), mant)
    m = f.bits(f.sub(raw, f.bin("shl", exponent, mant)), x.el)
    exponent = f.sub(exponent, f.select(tiny, f.like(raw, mant), f.like(raw, 0)))
    one = f.like(x, 1.0)
    s = f.bin("fdiv", f.bin("fsub", m, one), f.bin("fadd", m, one))
    terms = 5 if x.el == "float" else 11
    series = poly(f, f.bin("fmul", s, s), [2 / math.log(2) / (2 * i + 1) for i in range(terms)])
    out = f.intr("fma", s, series, f.cast("sitofp", exponent, x.el))
    inf = f.like(x, math.inf)
    out = f.select(f.fcmp("oeq", x, inf), inf, out)
    out = f.select(f.fcmp("oeq", x, 0.0), f.like(x, -math.inf), out)
    bad = f.fcmp("ult", x, 0.0)
    return f.select(bad, f.like(x, math.nan), out)


def _float_bits(el: str, value: float) -> int:
    return int(struct.unpack("<I" if el == "float" else "<Q", struct.pack("<f" if el == "float" else "<d", value))[0])


# pi/2 in parts whose products with a quarter count below 2^31 are exact.
_PI_2 = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624871116645580e-21)


def sine(f: Fn, x: V, quarter: int) -> V:
    """sin(x + quarter * pi/2): reduction by multiples of pi/2 in double precision, then the series."""
    wide = f.cast("fpext", x, "double")
    n = f.intr("rint", f.bin("fmul", wide, 2 / math.pi))
    r = wide
    for part in _PI_2:
        r = f.intr("fma", n, f.like(wide, -part), r)
    r = f.cast("fptrunc", r, x.el)
    terms = 5 if x.el == "float" else 10
    r2 = f.bin("fmul", r, r)
    sin = f.bin("fmul", r, poly(f, r2, [(-1) ** i / math.factorial(2 * i + 1) for i in range(terms)]))
    cos = poly(f, r2, [(-1) ** i / math.factorial(2 * i) for i in range(terms + 1)])
    k = f.add(f.to_int(n, "i64", True), f.const("i64", quarter))
    out = f.select(f.is_zero(f.and_(k, 1)), sin, cos)
    out = f.select(f.is_zero(f.and_(k, 2)), out, f.fneg(out))
    # The reduction of a huge argument is arbitrary, here as in hardware, but the result stays bounded.
    out = f.intr("minnum", f.intr("maxnum", out, -1.0), 1.0)
    if quarter == 0:
        out = f.select(f.fcmp("oeq", x, 0.0), x, out)
    unbounded = f.fcmp("ueq", f.intr("fabs", x), math.inf)
    return f.select(unbounded, f.like(x, math.nan), out)


def tanh(f: Fn, x: V) -> V:
    """tanh by ex2 away from zero, by its series near zero; the sign is put back at the end."""
    a = f.intr("fabs", x)
    e = ex2(f, f.bin("fmul", a, 2 / math.log(2)))
    one = f.like(x, 1.0)
    far = f.bin("fsub", one, f.bin("fdiv", f.like(x, 2.0), f.bin("fadd", e, one)))
    a2 = f.bin("fmul", a, a)
    near = f.bin("fmul", a, poly(f, a2, [1.0, -1 / 3, 2 / 15, -17 / 315]))
    out = f.select(f.fcmp("olt", a, 0.25), near, far)
    return f.intr("copysign", f.select(f.fcmp("uno", x, x), x, out), x)
