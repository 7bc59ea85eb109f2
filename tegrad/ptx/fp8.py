"""8-bit floating-point numbers: e4m3 (no infinity, one NaN) and e5m2, to and from float (PTX ISA 5.2.3)."""

from typing import NamedTuple

from tegrad.ptx.ir import Fn, V


class Fp8(NamedTuple):
    """An 8-bit format: mantissa bits, bias, the code of the largest number."""

    mantissa: int
    bias: int
    largest: int


FORMATS = {"e4m3": Fp8(3, 7, 0x7E), "e5m2": Fp8(2, 15, 0x7B)}
NAN = 0x7F


def encode(f: Fn, v: V, name: str) -> V:
    """A float to i8, to nearest even, saturated to the largest number (.satfinite)."""
    t = FORMATS[name]
    raw = f.bits(v, "i32")
    size = f.and_(raw, 0x7FFFFFFF)
    cut = 23 - t.mantissa
    even = f.and_(f.bin("lshr", size, cut), 1)
    rounded = f.bin("lshr", f.add(size, f.add(even, (1 << (cut - 1)) - 1)), cut)
    code = f.sub(rounded, (127 - t.bias) << t.mantissa)
    magnitude = f.bits(size, "float")
    smallest = 2.0 ** (1 - t.bias)
    small = f.fcmp("olt", magnitude, smallest)
    # Below the normal numbers the codes count steps of one size.
    steps = f.intr("rint", f.bin("fmul", f.select(small, magnitude, 0.0), 2**t.mantissa / smallest))
    code = f.select(small, f.cast("fptoui", steps, "i32"), code)
    code = f.intr("umin", code, t.largest)
    code = f.select(
        f.fcmp("uno", v, v),
        f.like(code, NAN),
        f.or_(code, f.and_(f.bin("lshr", raw, 24), 0x80)),
    )
    return f.resize(code, "i8", False)


def decode(f: Fn, v: V, name: str) -> V:
    """i8 to float, exactly."""
    t = FORMATS[name]
    code = f.resize(v, "i32", False)
    size = f.and_(code, 0x7F)
    normal = f.bits(f.add(f.bin("shl", size, 23 - t.mantissa), (127 - t.bias) << 23), "float")
    small = f.bin("fmul", f.cast("uitofp", size, "float"), 2.0 ** (1 - t.bias - t.mantissa))
    out = f.select(f.icmp("ult", size, 1 << t.mantissa), small, normal)
    if name == "e5m2":
        out = f.select(f.icmp("eq", size, 0x7C), f.like(out, float("inf")), out)
    out = f.select(f.icmp("ugt", size, 0x7E if name == "e4m3" else 0x7C), f.like(out, float("nan")), out)
    sign = f.bin("shl", f.and_(code, 0x80), 24)
    return f.bits(f.or_(f.bits(out, "i32"), sign), "float")
