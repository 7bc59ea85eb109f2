"""Independent models of what can be written simply: exact arithmetic on Python's integers and fractions.

`expected(form)` gives the result bits of each lane, or None for a form without a model. They share no code with the
engine.
"""

from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np

from tests.ptx import model as exact
from tests.ptx.model import FORMATS, Number, decode, encode
from tests.ptx.oracle.form import BYTES, Form, op_types
from tests.ptx.oracle.inputs import arrays

Args = Sequence[int]
Model = Callable[[list[str], list[str], Args], int | None]
ROUNDINGS = ("rn", "rz", "rm", "rp")
WHOLE = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}
WORDS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def sources(form: Form) -> list[np.ndarray]:
    """Each source as unsigned words (blobs as bytes)."""
    return [
        a if t.startswith("blob") else a.view(WORDS[BYTES[t]]) for a, t in zip(arrays(form), form.sources, strict=True)
    ]


def width(t: str) -> int:
    return int(t.lstrip("usbf"))


def value(x: int, t: str) -> int:
    """Bits as a number of an integer type."""
    bits = width(t)
    return exact.signed(x, bits) if t[0] == "s" else x & ((1 << bits) - 1)


def mask(x: int, t: str) -> int:
    return x & ((1 << width(t)) - 1)


def clamp(x: int, t: str) -> int:
    bits = width(t)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if t[0] == "s" else (0, (1 << bits) - 1)
    return min(max(x, low), high)


# ---- integers


def _part(mods: list[str], product: int, t: str) -> int:
    return product >> width(t) if "hi" in mods else product


def _shift(kind: str) -> Model:
    def shift(mods: list[str], types: list[str], a: Args) -> int:
        t, n = types[-1], a[1]
        if kind == "shl":
            return mask(a[0] << min(n, 64), t)
        return mask(value(a[0], t) >> min(n, 64), t)

    return shift


def _amounts(t: str, a: Args) -> list[int]:
    """Beyond 255 the ISA leaves amounts open; this is what silicon does."""
    return [x & 255 if width(t) == 32 else min(x, 255) for x in a]


def _bfe(mods: list[str], types: list[str], a: Args) -> int:
    t = types[-1]
    bits, (pos, size) = width(t), _amounts(t, a[1:])
    sign = 0 if t[0] == "u" or not size else a[0] >> min(pos + size - 1, bits - 1) & 1
    return sum((a[0] >> (pos + i) & 1 if i < size and pos + i < bits else sign) << i for i in range(bits))


def _bfi(mods: list[str], types: list[str], a: Args) -> int:
    out, bits, (pos, size) = a[1], width(types[-1]), _amounts(types[-1], a[2:])
    for i in range(min(size, max(0, bits - pos))):
        out = out & ~(1 << (pos + i)) | (a[0] >> i & 1) << (pos + i)
    return out


def _bfind(mods: list[str], types: list[str], a: Args) -> int:
    t = types[-1]
    x = value(a[0], t)
    top = (~x if x < 0 else x).bit_length() - 1
    return 0xFFFFFFFF if top < 0 else width(t) - 1 - top if "shiftamt" in mods else top


def _fns(mods: list[str], types: list[str], a: Args) -> int:
    word, base, offset = a[0], a[1], exact.signed(a[2], 32)
    if offset == 0:
        return base if word >> base & 1 else 0xFFFFFFFF
    way = range(base, 32) if offset > 0 else range(base, -1, -1)
    found = [p for p in way if word >> p & 1]
    return found[abs(offset) - 1] if len(found) >= abs(offset) else 0xFFFFFFFF


def _dot(parts: Callable[[list[str]], list[tuple[int, int, int]]]) -> Model:
    def dot(mods: list[str], types: list[str], a: Args) -> int:
        def field(x: int, at: int, bits: int, t: str) -> int:
            cut = x >> at & ((1 << bits) - 1)
            return exact.signed(cut, bits) if t[0] == "s" else cut

        total = sum(field(a[0], i, n, types[0]) * field(a[1], j, 8, types[1]) for i, n, j in parts(mods))
        return mask(total + a[2], "u32")

    return dot


def _two(combine: Callable[[int, int], int]) -> Model:
    return lambda mods, types, a: mask(combine(value(a[0], types[-1]), value(a[1], types[-1])), types[-1])


def _sum(mods: list[str], t: str, total: int) -> int:
    return mask(clamp(total, t) if "sat" in mods else total, t)


def _mad24(mods: list[str], types: list[str], a: Args) -> int:
    cut = [exact.signed(x & 0xFFFFFF, 24) if types[-1] == "s32" else x & 0xFFFFFF for x in a[:2]]
    product = cut[0] * cut[1]
    return (product >> 16 if "hi" in mods else product) & 0xFFFFFFFF


def _mul(mods: list[str], types: list[str], a: Args) -> int:
    t = types[-1]
    product = value(a[0], t) * value(a[1], t)
    if "wide" in mods:
        return (product + (a[2] if len(a) > 2 else 0)) & ((1 << 2 * width(t)) - 1)
    out = _part(mods, product, t)
    if len(a) > 2:
        out = clamp(value(out, t) + value(a[2], t), t) if "sat" in mods else out + a[2]
    return mask(out, t)


def _prmt(mods: list[str], types: list[str], a: Args) -> int:
    both = (a[0] | a[1] << 32).to_bytes(8, "little")
    k = a[2] & 3
    rows = {
        "f4e": [k, k + 1, k + 2, k + 3],
        "b4e": [k, (k - 1) % 8, (k - 2) % 8, (k - 3) % 8],
        "rc8": [k] * 4,
        "ecl": [max(i, k) for i in range(4)],
        "ecr": [min(i, k) for i in range(4)],
        "rc16": [2 * (k & 1), 2 * (k & 1) + 1] * 2,
    }
    mode = next((m for m in mods if m in rows), None)
    if mode:
        return int.from_bytes(bytes(both[i] for i in rows[mode]), "little")
    out = 0
    for i in range(4):
        pick = a[2] >> 4 * i & 15
        byte = both[pick & 7]
        out |= ((0xFF if byte & 0x80 else 0) if pick & 8 else byte) << 8 * i
    return out


def _szext(mods: list[str], types: list[str], a: Args) -> int:
    size = min(a[1], 32) if "clamp" in mods else a[1] & 31
    low = a[0] & ((1 << size) - 1)
    return mask(exact.signed(low, size), "u32") if types[-1] == "s32" and size else low


def _bmsk(mods: list[str], types: list[str], a: Args) -> int:
    at, size = (min(x, 32) if "clamp" in mods else x & 31 for x in a)
    return mask(((1 << size) - 1) << at, "u32")


def _shf(mods: list[str], types: list[str], a: Args) -> int:
    n = min(a[2], 32) if "clamp" in mods else a[2] & 31
    both = a[1] << 32 | a[0]
    return mask(both << n >> 32 if "l" in mods else both >> n, "u32")


INTEGER: dict[str, Model] = {
    "add": lambda m, t, a: _sum(m, t[-1], value(a[0], t[-1]) + value(a[1], t[-1])),
    "sub": lambda m, t, a: _sum(m, t[-1], value(a[0], t[-1]) - value(a[1], t[-1])),
    "mul": _mul, "mad": _mul, "mul24": _mad24,
    "mad24": lambda m, t, a: _sum(m, t[-1], value(_mad24(m, t, a), t[-1]) + value(a[2], t[-1])),
    "sad": lambda m, t, a: mask(abs(value(a[0], t[-1]) - value(a[1], t[-1])) + a[2], t[-1]),
    "div": lambda m, t, a: None if not a[1] else mask(int(Fraction(value(a[0], t[-1]), value(a[1], t[-1]))), t[-1]),
    "rem": lambda m, t, a: None if not a[1] else mask(
        value(a[0], t[-1]) - value(a[1], t[-1]) * int(Fraction(value(a[0], t[-1]), value(a[1], t[-1]))), t[-1]),
    "abs": lambda m, t, a: mask(abs(value(a[0], t[-1])), t[-1]),
    "neg": lambda m, t, a: mask(-a[0], t[-1]),
    "min": _two(min), "max": _two(max),
    "and": lambda m, t, a: a[0] & a[1], "or": lambda m, t, a: a[0] | a[1], "xor": lambda m, t, a: a[0] ^ a[1],
    "not": lambda m, t, a: a[0] ^ 1 if t[-1] == "pred" else mask(~a[0], t[-1]),
    "cnot": lambda m, t, a: int(a[0] == 0),
    "popc": lambda m, t, a: a[0].bit_count(),
    "clz": lambda m, t, a: width(t[-1]) - a[0].bit_length(),
    "brev": lambda m, t, a: int(f"{a[0]:0{width(t[-1])}b}"[::-1], 2),
    "bfe": _bfe, "bfi": _bfi, "bfind": _bfind, "fns": _fns, "prmt": _prmt, "szext": _szext, "bmsk": _bmsk, "shf": _shf,
    "shl": _shift("shl"), "shr": _shift("shr"),
    "dp4a": _dot(lambda m: [(8 * i, 8, 8 * i) for i in range(4)]),
    "dp2a": _dot(lambda m: [(16 * i, 16, 8 * i + (16 if "hi" in m else 0)) for i in range(2)]),
}  # fmt: skip


# ---- floating point


def flush(x: Number, t: str) -> Number:
    """A subnormal number as zero."""
    f = FORMATS[t]
    if x.value is not None and 0 < x.value < Fraction(2) ** f.emin:
        return Number(x.negative, Fraction(0))
    return x


def finish(x: Number, t: str, mods: list[str]) -> int:
    """Round, flush, saturate, clamp."""
    mode = next((m for m in mods if m in ROUNDINGS), "rn")
    bits = encode(x, FORMATS[t], mode)
    out = decode(bits, FORMATS[t])
    if "ftz" in mods and not out.is_nan:
        out = flush(out, t)
    if "sat" in mods:
        out = (
            Number(False, Fraction(0))
            if out.is_nan or out.negative
            else out
            if out.value <= 1
            else Number(False, Fraction(1))
        )
    if "relu" in mods and out.negative and not out.is_nan:
        out = Number(False, Fraction(0))
    return encode(out, FORMATS[t])


def _float(base: str) -> Callable[[list[str], str, list[Number]], int]:
    def run(mods: list[str], t: str, a: list[Number]) -> int:
        mode = next((m for m in mods if m in ROUNDINGS), "rn")
        if base in ("add", "sub"):
            x = exact.add(a[0], exact.negate(a[1]) if base == "sub" else a[1], mode)
        elif base == "mul":
            x = exact.mul(*a)
        elif base in ("fma", "mad"):
            x = exact.add(exact.mul(a[0], a[1]), a[2], mode)
        elif base == "div":
            x = exact.div(*a)
        elif base == "rcp":
            x = exact.div(Number(False, Fraction(1)), a[0])
        elif base == "sqrt":
            x = exact.sqrt(a[0], FORMATS[t])
        elif base in ("abs", "neg"):
            x = a[0] if a[0].is_nan else Number(base == "neg" and not a[0].negative, a[0].value)
        else:
            x = _least(base, mods, a)
        return finish(x, t, mods)

    return run


def _least(base: str, mods: list[str], a: list[Number]) -> Number:
    sign = a[0].negative != a[1].negative
    if "NaN" in mods and (a[0].is_nan or a[1].is_nan):
        return exact.NAN
    if "xorsign" not in mods:
        return exact.minmax(a[0], a[1], base == "min")
    out = exact.minmax(*(x if x.is_nan else Number(False, x.value) for x in a), base == "min")
    return out if out.is_nan else Number(sign, out.value)


FLOAT = {b: _float(b) for b in ("add", "sub", "mul", "fma", "mad", "div", "rcp", "sqrt", "abs", "neg", "min", "max")}


def _numbers(a: Args, t: str, mods: list[str]) -> list[Number]:
    made = [decode(x, FORMATS[t]) for x in a]
    return [flush(x, t) for x in made] if "ftz" in mods else made


def _scalar(base: str, mods: list[str], t: str, a: Args) -> int | None:
    """One float operation on bits. A NaN's sign under xorsign is read from its bits."""
    if "xorsign" in mods:
        f = FORMATS[t]
        x, y = _numbers(a, t, mods)
        out = _least(base, mods, [x, y])
        sign = (a[0] ^ a[1]) & f.sign
        return f.nan if out.is_nan else encode(Number(False, out.value), f) | sign
    return FLOAT[base](mods, t, _numbers(a, t, mods))


def _by_type(base: str, mods: list[str], t: str, a: Args) -> int | None:
    if not t.endswith("x2"):
        return _scalar(base, mods, t, a)
    halves = [_scalar(base, mods, t[:-2], [x >> at & 0xFFFF for x in a]) for at in (0, 16)]
    return halves[0] | halves[1] << 16  # type: ignore[operator]


# ---- conversion


def _convert(mods: list[str], types: list[str], a: Args) -> int | None:
    d, s = types
    if "ftz" in mods and s == "f32" and d != "f16":
        number = flush(decode(a[0], FORMATS[s]), s)
    else:
        number = decode(a[0], FORMATS[s]) if s in FORMATS else exact.make(Fraction(value(a[0], s)))
    whole = next((WHOLE[m] for m in mods if m in WHOLE), None)
    if d not in FORMATS:
        if s not in FORMATS:
            x = value(a[0], s)
            out = clamp(x, d) if "sat" in mods else value(mask(x, d), d)
        elif number.is_nan:
            out = 1 << (width(d) - 1) if s == "f64" or width(d) == 64 else 0
        elif number.is_inf:
            out = clamp(-(1 << 99) if number.negative else 1 << 99, d)
        else:
            size = exact.round_integer(number.value, whole or "rz", number.negative)  # type: ignore[arg-type]
            out = clamp(-size if number.negative else size, d)
        # An 8-bit result fills its 32-bit register.
        return value(out, d) & 0xFFFFFFFF if width(d) == 8 else mask(out, d)
    if whole and isinstance(number.value, Fraction):
        number = Number(number.negative, Fraction(exact.round_integer(number.value, whole, number.negative)))
    keep = [m for m in mods if m != "ftz" or d == "f32"]
    return finish(number, d, keep)


def _pack(types: list[str], a: Args) -> int:
    d, bits = types[0], width(types[0])
    out = mask(clamp(value(a[0], "s32"), d), d) << bits | mask(clamp(value(a[1], "s32"), d), d)
    return mask(out | (a[2] << 2 * bits if len(a) > 2 else 0), "u32")


def _tf32(mods: list[str], a: Args) -> int:
    mode = next(m for m in mods if m in (*ROUNDINGS, "rna"))
    number = decode(a[0], FORMATS["f32"])
    f = exact.Format(19, 11, 127)
    out = encode(number, f, mode) << 13
    return 0 if "relu" in mods and number.negative and not number.is_nan else out


# ---- comparison

TESTS: dict[str, Callable[[int], bool]] = {
    "eq": lambda c: c == 0, "ne": lambda c: c != 0, "lt": lambda c: c < 0, "le": lambda c: c <= 0,
    "gt": lambda c: c > 0, "ge": lambda c: c >= 0,
}  # fmt: skip
UNSIGNED = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _holds(name: str, t: str, a: Args, mods: list[str]) -> bool:
    if t not in FORMATS:
        x, y = value(a[0], t), value(a[1], t)
        return TESTS[UNSIGNED.get(name, name)]((x > y) - (x < y))
    p, q = _numbers(a[:2], t, mods)
    if p.is_nan or q.is_nan:
        return name in ("equ", "neu", "ltu", "leu", "gtu", "geu", "nan")
    if name in ("num", "nan"):
        return name == "num"
    x, y = p.signed, q.signed
    return TESTS[name[:2]]((x > y) - (x < y))


def _compared(mods: list[str], t: str, a: Args) -> bool:
    held = _holds(mods[0], t, a, mods)
    how = next((m for m in mods[1:] if m in ("and", "or", "xor")), None)
    return {None: held, "and": held and bool(a[-1]), "or": held or bool(a[-1]), "xor": held != bool(a[-1])}[how]


ONES = {"f32": 0x3F800000, "f16": 0x3C00, "bf16": 0x3F80, "u32": 0xFFFFFFFF, "s32": 0xFFFFFFFF, "u16": 0xFFFF}


def _set(mods: list[str], types: list[str], a: Args) -> int:
    d, s = types
    if not s.endswith("x2"):
        return ONES[d] if _compared(mods, s, a) else 0
    return sum(
        (ONES[d[:-2]] if _compared(mods, s[:-2], [x >> at & 0xFFFF for x in a[:2]]) else 0) << at for at in (0, 16)
    )


# ---- all


def lane_model(form: Form) -> Callable[[Args], list[int | None]] | None:
    """What one lane's sources give, one value per result; None where there is no model."""
    op, _, rest = form.name.partition(" ")
    base, *mods = op.split(".")
    types = op_types(op)
    if form.scope != "lane" or any(t.startswith("blob") for t in (*form.sources, *form.results)) or "cc" in mods:
        return None
    t = types[-1] if types else ""
    if base == "setp" and not rest and not t.endswith("x2"):

        def both(a: Args) -> list[int | None]:
            first = _compared(mods, t, a)
            # The second result combines the opposite comparison.
            held = _holds(mods[0], t, a, mods)
            how = next((m for m in mods[1:] if m in ("and", "or", "xor")), None)
            c = bool(a[-1])
            second = {None: not held, "and": not held and c, "or": not held or c, "xor": (not held) != c}[how]
            return [int(first), int(second)]

        return both
    if base == "set":
        return lambda a: [_set(mods, types, a)]
    if base == "cvt" and "pack" in mods:
        return lambda a: [_pack(types, a)]
    if base == "cvt" and not rest and len(types) == 2 and not any(x[0] == "e" for x in types):
        if types[0] == "tf32":
            return lambda a: [_tf32(mods, a)]
        if types[0].endswith("x2"):
            one = [types[0][:-2], "f32"]
            return lambda a: [_convert(mods, one, a[1:]) | _convert(mods, one, a[:1]) << 16]  # type: ignore[operator]
        return lambda a: [_convert(mods, types, a)]
    if "approx" in mods or "full" in mods or rest:
        return None
    if base in FLOAT and t in (*FORMATS, "f16x2", "bf16x2"):
        return lambda a: [_by_type(base, mods, t, a)]
    if base in INTEGER:
        return lambda a: [INTEGER[base](mods, types, a)]
    return None


def expected(form: Form) -> list[list[int | None]] | None:
    """Per result the value of each lane; None in it where the ISA leaves it open."""
    run = lane_model(form)
    if run is None:
        return None
    rows = [run(a) for a in zip(*(s.tolist() for s in sources(form)), strict=True)]
    return [list(column) for column in zip(*rows, strict=True)]
