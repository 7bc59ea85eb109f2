"""Inputs: random and edge cases, from nothing but the form's name.

Bits come from SHAKE-128, so that no library's version changes them. Floating-point values mix special values, values
around one, values around the integer types' limits, uniform bit patterns and numbers next to zero; their mantissas
often end in 10...0, 01...1 or 10...01, which are the halfway cases of every narrower format.
"""

import hashlib
import struct

import numpy as np

from tests.ptx.oracle.form import BYTES, Form

Words = np.ndarray
FLOATS = {"f16": (5, 10), "bf16": (8, 7), "f32": (8, 23), "tf32": (8, 23), "f64": (11, 52)}
_NUMBERS = [
    0.5, 1.5, 2.5, 3.5, 3.0, 10.0, 1 / 3, 0.1, 127.5, 128.0, 128.5, 254.5, 255.0, 255.5, 256.0, 32767.0, 32767.5,
    32768.0, 65504.0, 65519.0, 65520.0, 65535.5, 65536.0, 2.0**31 - 1, 2.0**31 - 0.5, 2.0**31, 2.0**32 - 1,
    2.0**32 - 0.5, 2.0**32, 2.0**63, 2.0**64, 2.0**63 - 1024, 2.0**64 - 2048, 2.0**24 + 1, 2.0**53 - 1, 448.0, 464.0,
    57344.0, 61440.0, 2.0**-9, 2.0**-10, 2.0**-16, 2.0**-17, 2.0**-24, 2.0**-25, 2.0**-126, 2.0**-149,
]  # fmt: skip


def stream(key: str, count: int) -> Words:
    """`count` random 64-bit words."""
    return np.frombuffer(hashlib.shake_128(key.encode()).digest(8 * count), np.uint64).copy()


def _pick(values: list[int], r: Words) -> Words:
    return np.array(values, np.uint64)[(r % np.uint64(len(values))).astype(np.int64)]


def _u(x: int) -> np.uint64:
    return np.uint64(x & (1 << 64) - 1)


def float_bits(value: float, exponent: int, mantissa: int) -> int:
    """A double's bits in a narrower format, rounded toward zero; infinity where it does not fit."""
    raw = struct.unpack("<Q", struct.pack("<d", value))[0]
    sign, biased, fraction = raw >> 63, (raw >> 52) & 0x7FF, raw & ((1 << 52) - 1)
    top = (1 << exponent) - 1
    if biased == 0x7FF or biased == 0:
        field, kept = (top if biased else 0), fraction >> (52 - mantissa)
    else:
        field = biased - 1023 + (top >> 1)
        kept = fraction >> (52 - mantissa)
        if field >= top:
            field, kept = top, 0
        elif field <= 0:
            kept = ((1 << 52 | fraction) >> (52 - mantissa)) >> min(1 - field, 63)
            field = 0
    return sign << (exponent + mantissa) | field << mantissa | kept


def _edges(e: int, m: int) -> list[int]:
    top, one = (1 << e) - 1, ((1 << e) - 1) >> 1
    inf = top << m
    found = [
        0, 0, 1, 2, (1 << m) - 1, 1 << m, (1 << m) + 1, one << m, (one << m) + 1, (one << m) - 1, inf - 1, inf - 2,
        inf, inf, inf | 1 << (m - 1), inf | (1 << m) - 1, inf | 1, inf | 5 << (m - 3) & ((1 << m) - 1),
    ]  # fmt: skip
    found += [float_bits(v, e, m) for v in _NUMBERS]
    return found + [v | 1 << (e + m) for v in found]


def floats(t: str, key: str, n: int) -> Words:
    """Bit patterns of a format."""
    e, m = FLOATS[t]
    r = stream(key, 5 * n).reshape(5, n)
    bias, top = ((1 << e) - 1) >> 1, (1 << e) - 1
    low = r[2] % _u(m + 1)
    ones = (_u(1) << low) - _u(1)
    half = (_u(1) << low) >> _u(1)
    tails = np.choose((r[3] % _u(5)).astype(int), [r[4] & ones, half, half - (half > 0), half + (low > 1), 0 * half])
    mantissa = ((r[4] >> _u(8)) & ~ones & _u((1 << m) - 1)) | (tails & ones)
    reach = min(70, bias - 1)
    exponents = np.choose(
        (r[0] >> _u(8)).astype(np.int64) % 4,
        [
            _u(bias - 4) + r[1] % _u(9),
            _u(bias - min(30, bias - 1)) + r[1] % _u(min(30, bias - 1) + reach),
            r[1] % _u(4),
            r[1] % _u(top),
        ],
    )
    made = np.minimum(exponents, _u(top - 1)) << _u(m) | mantissa | (r[0] >> _u(63)) << _u(e + m)
    kind = (r[0] % _u(8)).astype(int)
    out = np.where(kind < 3, _pick(_edges(e, m), r[1]), made)
    return np.where(kind == 3, r[4] >> _u(64 - 1 - e - m), out)


def integers(bits: int, key: str, n: int) -> Words:
    """Bit patterns of a width: limits, small ones, lone bits, and random ones of every length."""
    r = stream(key, 3 * n).reshape(3, n)
    top = 1 << (bits - 1)
    edges = [
        0, 1, 2, 3, 7, 8, 15, 16, 31, 32, 33, 63, 64, 127, 128, 255, 256, top - 1, top, top + 1, 2 * top - 1,
        2 * top - 2, 2 * top - 3, 0x5555555555555555, 0xAAAAAAAAAAAAAAAA, 0x8080808080808080, 0x7F7F7F7F7F7F7F7F,
    ]  # fmt: skip
    kind = (r[0] % _u(8)).astype(int)
    lengths = r[2] >> (r[1] % _u(64))
    out = np.choose(
        kind,
        [
            _pick(edges, r[1]),
            _pick(edges, r[1]),
            _pick(edges, r[1]),
            lengths,
            ~lengths,
            _u(1) << (r[1] % _u(bits)),
            r[2],
            r[2],
        ],
    )
    return out & _u(2 * top - 1)


def _below(key: str, n: int, count: int) -> Words:
    return stream(key, n) % _u(count)


def _nearly_all_ones(key: str, n: int) -> Words:
    """One bit of 128 is clear: of 32 such words some bits are set in all."""
    return ~np.bitwise_and.reduce(stream(key, 7 * n).reshape(7, n)) & _u(0xFFFFFFFF)


def _normal(key: str, n: int) -> np.ndarray:
    """Values in (-2, 2) with full mantissas, most of them near zero."""
    r = stream(key, 2 * n).reshape(2, n)
    unit = ((r[0] >> _u(11)).astype(np.float64) / 2.0**53 - 0.5) * 4
    return np.ldexp(unit, -(r[1] % _u(4)).astype(np.int32))


def _small(key: str, n: int, most: int) -> np.ndarray:
    return _below(key, n, 2 * most + 1).astype(np.float64) - most


def _encode(values: np.ndarray, t: str) -> Words:
    if t == "f64":
        return values.astype(np.float64).view(np.uint64)
    if t == "f16":
        return values.astype(np.float16).view(np.uint16).astype(np.uint64)
    raw = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return raw >> _u(16) if t == "bf16" else raw & _u(0xFFFFE000) if t == "tf32" else raw


def _special(t: str, key: str, n: int) -> Words:
    e, m = FLOATS[t]
    inf = ((1 << e) - 1) << m
    odd = _pick([inf, inf | 1 << (e + m), inf | 1 << (m - 1), 1 << (e + m), 0], stream(key + "/odd", n))
    return np.where(_below(key + "/where", n, 40) == 0, odd, _encode(_small(key, n, 8), t))


_SHIFTS = [
    0, 1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 127, 128, 255, 256, 257, 0x7FFFFFFF, 0x80000000,
    0xFFFFFFFF,
]  # fmt: skip
_CLAMPS = [0x1F, 0, 0x1C1F, 0x181F, 0x101F, 0x1E1F, 0x1C00, 0x1800, 0x1000, 0x0F, 0x0707, 0x1F1F, 0x1F00]


def _named(name: str, t: str, key: str, n: int, warps: int) -> Words | None:
    """Generators that are not a type's own."""
    per_warp = {
        "wmask": lambda k: np.where(
            _below(k + "/all", warps, 4) == 0, _u(0xFFFFFFFF), np.maximum(stream(k, warps) & _u(0xFFFFFFFF), _u(1))
        ),
        "wlow": lambda k: _below(k, warps, 1000),
        "wint": lambda k: integers(32, k, warps),
        "wbit": lambda k: _below(k, warps, 2),
        "wones": lambda k: _nearly_all_ones(k, warps),
    }
    if name in per_warp:
        return np.repeat(per_warp[name](key), n // warps)
    plain = {
        "shift": lambda: np.where(_below(key + "/x", n, 3) == 0, _below(key, n, 70), _pick(_SHIFTS, stream(key, n))),
        "lane": lambda: _below(key, n, 32),
        "lane64": lambda: _below(key, n, 40),
        "clamp": lambda: _pick(_CLAMPS, stream(key, n)),
        "few": lambda: _below(key, n, 3),
        "bit": lambda: _below(key, n, 2),
        "zeros": lambda: np.where(_below(key + "/x", n, 2) == 0, _u(0), stream(key, n)),
        "ones": lambda: _nearly_all_ones(key, n),
        "size4": lambda: _pick([0, 1, 2, 3, 4], stream(key, n)),
        "size8": lambda: _below(key, n, 9),
        "size16": lambda: _below(key, n, 17),
        "nth": lambda: _below(key, n, 70) - _u(35),
        "low": lambda: _below(key, n, 1000),
        "nonzero": lambda: np.maximum(integers(8 * BYTES[t], key, n), _u(1)),
        "wsame": lambda: np.where(
            np.repeat(_below(key + "/one", warps, 2) == 0, n // warps),
            np.repeat(integers(8 * BYTES[t], key, warps), n // warps),
            _below(key, n, 3),
        ),
        "prmt": lambda: np.where(_below(key + "/x", n, 3) == 0, stream(key, n), _below(key, n, 65536)) & _u(0xFFFFFFFF),
        "angle": lambda: _angles(key, n),
        "tame": lambda: _tame(t, key, n),
    }
    return plain[name]() if name in plain else None


def _angles(key: str, n: int) -> Words:
    """Floats within 100 pi, where the errors of sin and cos are documented, and the special values."""
    made = _normal(key, n) * np.where(_below(key + "/far", n, 2) == 0, np.pi, 50 * np.pi)
    edges = [
        0, 1 << 31, 0x7F800000, 0xFF800000, 0x7FFFFFFF, 1, 0x007FFFFF, 0x00800000, 0x80000001, 0x3FC90FDB, 0x40490FDB,
        0x40C90FDB,
    ]  # fmt: skip
    return np.where(_below(key + "/edge", n, 6) == 0, _pick(edges, stream(key + "/e", n)), _encode(made, "f32"))


def _tame(t: str, key: str, n: int) -> Words:
    """Values in (-16, 16), and the special ones."""
    e, m = FLOATS[t]
    edges = _edges(e, m)[:16]
    edges += [v | 1 << (e + m) for v in edges]
    made = _encode(_normal(key, n) * 8, t)
    return np.where(_below(key + "/edge", n, 5) == 0, _pick(edges, stream(key + "/e", n)), made)


def _packed(parts: list[Words], bits: int) -> Words:
    out = parts[0] & _u((1 << bits) - 1)
    for i, p in enumerate(parts[1:], 1):
        out = out | (p & _u((1 << bits) - 1)) << _u(i * bits)
    return out


def values(name: str, t: str, key: str, n: int, warps: int) -> Words:
    """`n` values of a type by a generator, as 64-bit words."""
    found = _named(name, t, key, n, warps)
    if found is not None:
        return found
    if t in ("f16x2", "bf16x2"):
        return _packed([values(t[:-2] if name == t else name, t[:-2], f"{key}/{i}", n, warps) for i in range(2)], 16)
    if name == "exact":
        return _encode(_small(key, n, 8), t)
    if name == "exactc":
        return _encode(_small(key, n, 400), t)
    if name == "real":
        return _encode(_normal(key, n), t)
    if name == "special":
        return _special(t, key, n)
    if name == "e4m3small":
        return _packed(
            [_pick([0, 0x38, 0xB8, 0x40, 0xC0, 0x44, 0x48, 0xC8, 0x30], stream(f"{key}/{i}", n)) for i in range(4)], 8
        )
    if name == "e5m2small":
        return _packed(
            [_pick([0, 0x3C, 0xBC, 0x40, 0xC0, 0x42, 0x44, 0xC4, 0x38], stream(f"{key}/{i}", n)) for i in range(4)], 8
        )
    if t in FLOATS:
        return floats(t, key, n)
    if t == "pred":
        return _below(key, n, 2)
    if t.endswith(("x4", "x8")) or t in ("e4m3x2", "e5m2x2"):
        return stream(key, n)
    if t in ("u8", "s8", "b8"):
        # The whole register: the instruction must take its lowest 8 bits only.
        return np.where(_below(key + "/x", n, 2) == 0, stream(key, n), integers(8, key, n)) & _u(0xFFFFFFFF)
    return integers(8 * BYTES[t], key, n)


def _correlate(form: Form, sources: list[Words]) -> None:
    """Let sources of one type meet: equal, opposite, next to each other, and for fma a sum that cancels."""
    n = form.threads
    every = np.arange(n)
    first = form.sources[0]
    if form.scope != "lane" or first.startswith("blob") or first == "pred":
        return
    bits = 8 * BYTES[first] if first not in ("u8", "s8", "b8") else 32
    for k in range(1, len(sources)):
        if form.sources[k] != first or form.inputs[k] != first or form.inputs[0] != first:
            continue
        near = every % 8 == 3
        step = _pick(
            [0, 0, 1, 2, (1 << 64) - 1, 1 << (bits - 1), (1 << (bits - 1)) + 1, (1 << (bits - 1)) - 1],
            stream(f"{form.name}/near{k}", n),
        )
        sources[k] = np.where(near, (sources[0] + step) & _u((1 << bits) - 1), sources[k])
    if len(sources) == 3 and first in ("f32", "f64") and form.sources == (first,) * 3 and "fma" in form.name:
        sources[2] = np.where(every % 8 == 5, _opposite_product(sources[0], sources[1], first), sources[2])


def _opposite_product(a: Words, b: Words, t: str) -> Words:
    """The bits of -(a * b), rounded; a NaN's are spelled out, as hosts differ in them."""
    kind, word = (np.float32, np.uint32) if t == "f32" else (np.float64, np.uint64)
    e, m = FLOATS[t]
    quiet, sign = _u(1 << (m - 1)), _u(1 << (e + m))
    x, y = (v.astype(word).view(kind) for v in (a, b))
    with np.errstate(all="ignore"):
        product = -(x * y)
    bits = product.view(word).astype(np.uint64)
    bits = np.where(np.isnan(product), _u(((1 << e) - 1) << m) | quiet, bits)
    bits = np.where(np.isnan(y), (b | quiet) ^ sign, bits)
    return np.where(np.isnan(x), (a | quiet) ^ sign, bits)


def arrays(form: Form) -> list[np.ndarray]:
    """The bytes of each source over all threads, in the order of the sources."""
    n = form.threads
    warps = n // 32 if form.scope != "lane" else n
    made: list[Words] = []
    blobs: dict[int, np.ndarray] = {}
    for i, (t, name) in enumerate(zip(form.sources, form.inputs, strict=True)):
        key = f"{form.name}/{i}"
        if t.startswith("blob"):
            size = BYTES[t]
            blobs[i] = np.frombuffer(hashlib.shake_128(key.encode()).digest(size * n), np.uint8)
            made.append(np.zeros(n, np.uint64))
        else:
            made.append(values(name, t, key, n, warps))
    _correlate(form, made)
    sized = {2: np.uint16, 4: np.uint32, 8: np.uint64}
    return [
        blobs[i] if i in blobs else np.ascontiguousarray(w.astype(sized[BYTES[t]])).view(np.uint8)
        for i, (t, w) in enumerate(zip(form.sources, made, strict=True))
    ]
