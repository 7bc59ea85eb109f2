"""Numbers as PTX computes them, in exact arithmetic: the oracle of the instruction tests.

Floating-point values are Fractions with a sign, rounded once by `encode`; nothing here shares code with the engine.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np


@dataclass(frozen=True)
class Format:
    """A binary format: bits in all, bits of precision, exponent of the largest binade."""

    bits: int
    precision: int
    emax: int

    @property
    def mantissa(self) -> int:
        return self.precision - 1

    @property
    def emin(self) -> int:
        return 1 - self.emax

    @property
    def inf(self) -> int:
        return (2 * self.emax + 1) << self.mantissa

    @property
    def nan(self) -> int:
        return self.inf | 1 << (self.mantissa - 1)

    @property
    def sign(self) -> int:
        return 1 << (self.bits - 1)


FORMATS = {
    "f16": Format(16, 11, 15),
    "bf16": Format(16, 8, 127),
    "f32": Format(32, 24, 127),
    "f64": Format(64, 53, 1023),
}


@dataclass(frozen=True)
class Number:
    """A decoded value: its sign, and a Fraction, infinity (math.inf) or NaN (None)."""

    negative: bool
    value: Fraction | float | None

    @property
    def is_nan(self) -> bool:
        return self.value is None

    @property
    def is_inf(self) -> bool:
        return self.value == math.inf

    @property
    def signed(self) -> Fraction | float:
        assert self.value is not None
        return -self.value if self.negative else self.value


NAN = Number(False, None)


def decode(bits: int, f: Format) -> Number:
    bits = int(bits)
    negative, rest = bool(bits & f.sign), bits & (f.sign - 1)
    if rest > f.inf:
        return NAN
    if rest == f.inf:
        return Number(negative, math.inf)
    exponent, mantissa = rest >> f.mantissa, rest & ((1 << f.mantissa) - 1)
    if exponent:
        mantissa |= 1 << f.mantissa
    return Number(negative, Fraction(mantissa) * Fraction(2) ** (max(exponent, 1) - f.emax - f.mantissa))


def round_integer(x: Fraction, mode: str, negative: bool) -> int:
    """A magnitude to an integer; `negative` tells which way rm and rp go."""
    low = math.floor(x)
    rest = x - low
    if rest == 0 or mode == "rz" or (mode == "rm" and not negative) or (mode == "rp" and negative):
        return low
    if mode in ("rm", "rp"):
        return low + 1
    if rest == Fraction(1, 2):
        return low + 1 if mode == "rna" else low + (low & 1)
    return low + (rest > Fraction(1, 2))


def encode(x: Number, f: Format, mode: str = "rn") -> int:
    """Round to the format."""
    if x.is_nan:
        return f.nan
    sign = f.sign if x.negative else 0
    if x.is_inf:
        return sign | f.inf
    value = x.value
    assert isinstance(value, Fraction)
    if value == 0:
        return sign
    exponent = value.numerator.bit_length() - value.denominator.bit_length()
    if Fraction(2) ** exponent > value:
        exponent -= 1
    step = Fraction(2) ** (max(exponent, f.emin) - f.mantissa)
    units = round_integer(value / step, mode, x.negative)
    rounded = units * step
    if rounded >= Fraction(2) ** (f.emax + 1):
        away = mode in ("rn", "rna") or (mode == "rp" and not x.negative) or (mode == "rm" and x.negative)
        return sign | (f.inf if away else f.inf - 1)
    if rounded < Fraction(2) ** f.emin:
        return sign | units
    top = rounded.numerator.bit_length() - rounded.denominator.bit_length()
    if Fraction(2) ** top > rounded:
        top -= 1
    mantissa = rounded / Fraction(2) ** (top - f.mantissa)
    return sign | (top + f.emax) << f.mantissa | (int(mantissa) - (1 << f.mantissa))


def make(signed: Fraction, zero_negative: bool = False) -> Number:
    return Number(signed < 0 or (signed == 0 and zero_negative), abs(signed))


def add(a: Number, b: Number, mode: str = "rn") -> Number:
    if a.is_nan or b.is_nan or (a.is_inf and b.is_inf and a.negative != b.negative):
        return NAN
    if a.is_inf or b.is_inf:
        return a if a.is_inf else b
    both = a.negative and b.negative
    return make(a.signed + b.signed, both or (mode == "rm" and (a.negative or b.negative) and a.signed + b.signed == 0))


def negate(a: Number) -> Number:
    return a if a.is_nan else Number(not a.negative, a.value)


def mul(a: Number, b: Number) -> Number:
    if a.is_nan or b.is_nan or (a.is_inf and b.value == 0) or (b.is_inf and a.value == 0):
        return NAN
    negative = a.negative != b.negative
    if a.is_inf or b.is_inf:
        return Number(negative, math.inf)
    return Number(negative, a.value * b.value)  # type: ignore[operator]


def div(a: Number, b: Number) -> Number:
    negative = a.negative != b.negative
    if a.is_nan or b.is_nan or (a.is_inf and b.is_inf) or (a.value == 0 and b.value == 0):
        return NAN
    if a.is_inf or b.value == 0:
        return Number(negative, math.inf)
    if b.is_inf:
        return Number(negative, Fraction(0))
    return Number(negative, a.value / b.value)  # type: ignore[operator]


def sqrt(a: Number, f: Format) -> Number:
    """A value that rounds as the square root does: exact to three times the precision, sticky below."""
    if a.is_nan or (a.negative and a.value != 0):
        return NAN
    if a.is_inf or a.value == 0:
        return a
    value = a.value
    assert isinstance(value, Fraction)
    scale = 4 ** (3 * f.precision + 2 * f.emax)
    scaled = value * scale
    root = math.isqrt(math.floor(scaled))
    sticky = Fraction(0) if root * root == scaled else Fraction(1, 3)
    return Number(False, (root + sticky) / Fraction(2) ** (3 * f.precision + 2 * f.emax))


def minmax(a: Number, b: Number, smaller: bool) -> Number:
    """The other one of a NaN; -0 is below +0."""
    if a.is_nan or b.is_nan:
        return b if a.is_nan else a
    key_a, key_b = (a.signed, not a.negative), (b.signed, not b.negative)
    return a if (key_a <= key_b) == smaller else b


def samples(f: Format, count: int, rng: np.random.Generator) -> np.ndarray:
    """Bit patterns: edges first, then random ones of all exponents and around one."""
    one = f.emax << f.mantissa
    edges = [
        0, 1, 2, (1 << f.mantissa) - 1, 1 << f.mantissa, (1 << f.mantissa) + 1, one, one + 1, one - 1, f.inf - 1,
        f.inf, f.nan,
        one + (1 << f.mantissa), one + (1 << (f.mantissa - 1)), one - (1 << f.mantissa),
    ]  # fmt: skip
    edges += [e | f.sign for e in edges]
    chosen = [edges[int(i)] for i in rng.integers(0, len(edges), count // 3)]
    near = [one + int(x) - (3 << f.mantissa) for x in rng.integers(0, 6 << f.mantissa, count // 3, dtype=np.uint64)]
    near = [x | (f.sign if i % 2 else 0) for i, x in enumerate(near)]
    rest = [
        int(x) & (2 * f.sign - 1)
        for x in rng.integers(0, 1 << 63, count - len(chosen) - len(near), dtype=np.uint64) * 2 + 1
    ]
    dtype = {16: np.uint16, 32: np.uint32, 64: np.uint64}[f.bits]
    return np.array(chosen + near + rest, np.uint64).astype(dtype)


def integers(bits: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Bit patterns of a width: edges, small and random."""
    top = 1 << (bits - 1)
    edges = [
        0,
        1,
        2,
        3,
        7,
        8,
        top - 1,
        top,
        top + 1,
        2 * top - 1,
        2 * top - 2,
        0x55 & (2 * top - 1),
        bits,
        bits - 1,
        bits + 1,
    ]
    values = [edges[int(i)] for i in rng.integers(0, len(edges), count // 2)]
    values += [int(x) & (2 * top - 1) for x in rng.integers(0, 1 << 63, count - len(values), dtype=np.uint64) * 2 + 1]
    return np.array(values, np.uint64).astype({8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}[bits])


def signed(x: int, bits: int) -> int:
    """Bits as two's complement."""
    x = int(x) & ((1 << bits) - 1)
    return x - (1 << bits) if x >> (bits - 1) else x


def unsigned(x: int, bits: int) -> int:
    return int(x) & ((1 << bits) - 1)
