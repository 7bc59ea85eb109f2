"""Every integer and bit instruction against Python integers, on edges and random values."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.ptx.forms import HEADER, NUMPY, apply, kernel, launch
from tests.ptx.model import integers, signed, unsigned

COUNT = 512
Model = Callable[..., int]


def bits_of(t: str) -> int:
    return int(t.lstrip("usb"))


def value(x: int, t: str) -> int:
    return signed(x, bits_of(t)) if t[0] == "s" else unsigned(x, bits_of(t))


def quotient(a: int, b: int, bits: int) -> int:
    return -1 if b == 0 else (abs(a) // abs(b)) * (1 if (a < 0) == (b < 0) else -1)


def remainder(a: int, b: int, bits: int) -> int:
    return -1 if b == 0 else a - b * quotient(a, b, bits)


def clamp(x: int, bits: int) -> int:
    return max(-(1 << (bits - 1)), min((1 << (bits - 1)) - 1, x))


BINARY: dict[str, Model] = {
    "add": lambda a, b, n: a + b, "sub": lambda a, b, n: a - b, "mul.lo": lambda a, b, n: a * b, "mul.hi": lambda a,
    b, n: a * b >> n,
    "div": quotient, "rem": remainder, "min": lambda a, b, n: min(a, b), "max": lambda a, b, n: max(a, b),
}  # fmt: skip
TYPES = ["u16", "s16", "u32", "s32", "u64", "s64"]


def check(op: str, result: str, sources: list[str], model: Callable[..., int], extra: str = "", seed: int = 0) -> None:
    rng = np.random.default_rng(seed + len(op))
    arrays = [integers(bits_of(s), COUNT, rng) for s in sources]
    got = apply(op, result, sources, arrays, extra)
    for i in range(COUNT):
        args = [value(int(x[i]), s) for x, s in zip(arrays, sources, strict=True)]
        want = unsigned(model(*args), bits_of(result))
        assert unsigned(int(got[i]), bits_of(result)) == want, (op, args)


@pytest.mark.parametrize("t", TYPES)
@pytest.mark.parametrize("op", sorted(BINARY))
def test_arithmetic(op: str, t: str) -> None:
    check(f"{op}.{t}", t, [t, t], lambda a, b: BINARY[op](a, b, bits_of(t)))


@pytest.mark.parametrize("t", ["u16", "s16", "u32", "s32"])
def test_products_of_twice_the_width(t: str) -> None:
    wide = t[0] + str(2 * bits_of(t))
    check(f"mul.wide.{t}", wide, [t, t], lambda a, b: a * b)
    check(f"mad.wide.{t}", wide, [t, t, wide], lambda a, b, c: a * b + c)


@pytest.mark.parametrize("t", TYPES)
def test_multiply_add(t: str) -> None:
    check(f"mad.lo.{t}", t, [t, t, t], lambda a, b, c: a * b + c)
    check(f"mad.hi.{t}", t, [t, t, t], lambda a, b, c: (a * b >> bits_of(t)) + c)


def test_saturating_forms() -> None:
    check("add.sat.s32", "s32", ["s32", "s32"], lambda a, b: clamp(a + b, 32))
    check("sub.sat.s32", "s32", ["s32", "s32"], lambda a, b: clamp(a - b, 32))
    check("mad.hi.sat.s32", "s32", ["s32"] * 3, lambda a, b, c: clamp((a * b >> 32) + c, 32))


@pytest.mark.parametrize("t", ["u32", "s32"])
def test_24_bit_products(t: str) -> None:
    def cut(x: int) -> int:
        return signed(x, 24) if t == "s32" else unsigned(x, 24)

    check(f"mul24.lo.{t}", t, [t, t], lambda a, b: cut(a) * cut(b))
    check(f"mul24.hi.{t}", t, [t, t], lambda a, b: cut(a) * cut(b) >> 16)
    check(f"mad24.lo.{t}", t, [t, t, t], lambda a, b, c: cut(a) * cut(b) + c)


@pytest.mark.parametrize("t", ["s16", "s32", "s64"])
def test_signs(t: str) -> None:
    check(f"abs.{t}", t, [t], abs)
    check(f"neg.{t}", t, [t], lambda a: -a)


@pytest.mark.parametrize("t", ["u16", "u32", "u64", "s32"])
def test_sum_of_absolute_differences(t: str) -> None:
    check(f"sad.{t}", t, [t, t, t], lambda a, b, c: abs(a - b) + c)


@pytest.mark.parametrize("t", ["b16", "b32", "b64"])
def test_logic(t: str) -> None:
    check(f"and.{t}", t, [t, t], lambda a, b: a & b)
    check(f"or.{t}", t, [t, t], lambda a, b: a | b)
    check(f"xor.{t}", t, [t, t], lambda a, b: a ^ b)
    check(f"not.{t}", t, [t], lambda a: ~a)
    check(f"cnot.{t}", t, [t], lambda a: int(a == 0))


@pytest.mark.parametrize("op", ["and", "or", "xor", "not"])
def test_predicate_logic(op: str) -> None:
    a, b = (np.array([i >> k & 1 for i in range(32)], np.uint32) for k in range(2))
    if op == "not":
        assert (apply("not.pred", "pred", ["pred"], [a]) == 1 - a).all()
        return
    want = {"and": a & b, "or": a | b, "xor": a ^ b}[op]
    assert (apply(f"{op}.pred", "pred", ["pred", "pred"], [a, b]) == want).all()


@pytest.mark.parametrize("t", ["u16", "s16", "b16", "u32", "s32", "b32", "u64", "s64", "b64"])
def test_shifts_clamp_at_the_width(t: str) -> None:
    n = bits_of(t)
    if t[0] == "b":
        check(f"shl.{t}", t, [t, "u32"], lambda a, b: a << b if b < n else 0)
    check(f"shr.{t}", t, [t, "u32"], lambda a, b: a >> min(b, n) if t[0] == "s" or b < n else 0)
    for amount in (0, 1, n - 1, n, n + 5):
        check(f"shr.{t}", t, [t], lambda a, amount=amount: a >> amount, f", {amount}")


def test_funnel_shifts() -> None:
    for way in "lr":
        for mode in ("wrap", "clamp"):

            def model(a: int, b: int, c: int, way: str = way, mode: str = mode) -> int:
                n = c & 31 if mode == "wrap" else min(c, 32)
                both = b << 32 | a
                return both << n >> 32 if way == "l" else both >> n

            check(f"shf.{way}.{mode}.b32", "b32", ["b32", "b32", "u32"], model)


@pytest.mark.parametrize("table", [0x00, 0x1A, 0x80, 0x96, 0xE8, 0xFE, 0xFF, 0x3C])
def test_lop3_is_the_truth_table(table: int) -> None:
    def model(a: int, b: int, c: int) -> int:
        return sum((table >> ((a >> i & 1) * 4 + (b >> i & 1) * 2 + (c >> i & 1)) & 1) << i for i in range(32))

    check("lop3.b32", "b32", ["b32"] * 3, model, f", {table}")


@pytest.mark.parametrize("n", [32, 64])
def test_counting_bits(n: int) -> None:
    check(f"popc.b{n}", "u32", [f"b{n}"], lambda a: a.bit_count())
    check(f"clz.b{n}", "u32", [f"b{n}"], lambda a: n - a.bit_length())
    check(f"brev.b{n}", f"b{n}", [f"b{n}"], lambda a: int(f"{a:0{n}b}"[::-1], 2))


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bfind(t: str) -> None:
    def position(a: int) -> int:
        return (a if a >= 0 else ~a).bit_length() - 1

    check(f"bfind.{t}", "u32", [t], position)
    check(f"bfind.shiftamt.{t}", "u32", [t], lambda a: -1 if position(a) < 0 else bits_of(t) - 1 - position(a))


def extract(t: str, a: int, pos: int, size: int) -> int:
    """The pseudo-code of bfe in the PTX document."""
    n = bits_of(t)
    pos, size, raw = pos & 0xFF, size & 0xFF, unsigned(a, n)
    sign = 0 if t[0] == "u" or size == 0 else raw >> min(pos + size - 1, n - 1) & 1
    out = 0
    for i in range(n):
        out |= ((raw >> (pos + i) & 1) if i < size and pos + i < n else sign) << i
    return out


@pytest.mark.parametrize("t", ["u32", "s32", "u64", "s64"])
def test_bit_field_extract(t: str) -> None:
    rng = np.random.default_rng(9)
    a = integers(bits_of(t), COUNT, rng)
    pos, size = (rng.integers(0, 80, COUNT).astype(np.uint32) for _ in range(2))
    got = apply(f"bfe.{t}", t, [t, "u32", "u32"], [a, pos, size])
    for i in range(COUNT):
        want = extract(t, int(a[i]), int(pos[i]), int(size[i]))
        assert unsigned(int(got[i]), bits_of(t)) == want, (int(a[i]), int(pos[i]), int(size[i]))


@pytest.mark.parametrize("n", [32, 64])
def test_bit_field_insert(n: int) -> None:
    rng = np.random.default_rng(10)
    a, b = (integers(n, COUNT, rng) for _ in range(2))
    pos, size = (rng.integers(0, 80, COUNT).astype(np.uint32) for _ in range(2))
    got = apply(f"bfi.b{n}", f"b{n}", [f"b{n}", f"b{n}", "u32", "u32"], [a, b, pos, size])
    for i in range(COUNT):
        want = int(b[i])
        for k in range(int(size[i])):
            if int(pos[i]) + k < n:
                at = int(pos[i]) + k
                want = want & ~(1 << at) | (int(a[i]) >> k & 1) << at
        assert int(got[i]) == want


def permuted(mode: str, a: int, b: int, c: int) -> int:
    data = [(b << 32 | a) >> (8 * i) & 255 for i in range(8)]
    s = c & 3
    if mode == "":
        out = 0
        for i in range(4):
            sel = c >> (4 * i) & 15
            byte = data[sel & 7]
            out |= ((255 if byte & 128 else 0) if sel & 8 else byte) << (8 * i)
        return out
    pick = {
        "f4e": [s, s + 1, s + 2, s + 3], "b4e": [s, s - 1, s - 2, s - 3], "rc8": [s] * 4,
        "ecl": [max(s, i) for i in range(4)], "ecr": [min(s, i) for i in range(4)],
        "rc16": [2 * (s & 1), 2 * (s & 1) + 1] * 2,
    }[mode]  # fmt: skip
    return sum(data[p % 8] << (8 * i) for i, p in enumerate(pick))


@pytest.mark.parametrize("mode", ["", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"])
def test_byte_permute(mode: str) -> None:
    op = "prmt.b32" + (f".{mode}" if mode else "")
    check(op, "b32", ["b32"] * 3, lambda a, b, c: permuted(mode, a, b, c))


@pytest.mark.parametrize("types", ["u32.u32", "s32.s32", "u32.s32", "s32.u32"])
def test_dot_products(types: str) -> None:
    ta, tb = types.split(".")

    def part(x: int, at: int, width: int, t: str) -> int:
        cut = x >> at & ((1 << width) - 1)
        return signed(cut, width) if t == "s32" else cut

    result = "u32" if types == "u32.u32" else "s32"

    def four(a: int, b: int, c: int) -> int:
        return c + sum(part(a, 8 * i, 8, ta) * part(b, 8 * i, 8, tb) for i in range(4))

    check(f"dp4a.{types}", result, ["b32", "b32", result], four)
    for half, first in (("lo", 0), ("hi", 16)):

        def two(a: int, b: int, c: int, first: int = first) -> int:
            return c + sum(part(a, 16 * i, 16, ta) * part(b, first + 8 * i, 8, tb) for i in range(2))

        check(f"dp2a.{half}.{types}", result, ["b32", "b32", result], two)


@pytest.mark.parametrize("n", [32, 64])
@pytest.mark.parametrize("op", ["add", "sub", "mad"])
def test_carry_chains_compute_twice_the_width(n: int, op: str) -> None:
    """Low words set the carry, high words take it."""
    rng = np.random.default_rng(11)
    arrays = [integers(n, COUNT, rng) for _ in range(4)]
    low, high = {
        "add": (f"add.cc.u{n} %d, %s0, %s2", f"addc.u{n} %d, %s1, %s3"),
        "sub": (f"sub.cc.u{n} %d, %s0, %s2", f"subc.u{n} %d, %s1, %s3"),
        "mad": (f"mad.lo.cc.u{n} %d, %s0, %s2, %s1", f"madc.hi.u{n} %d, %s0, %s2, %s3"),
    }[op]
    text = kernel("k", "XX", f"b{n}", [f"b{n}"] * 4).replace("XX %d, %s0, %s1, %s2, %s3;", f"{low}; {high};")
    from tegrad import ptx

    got = launch(ptx.load(HEADER + text, None).kernels["k"], f"b{n}", arrays)
    for i in range(COUNT):
        a, b, c, d = (int(x[i]) for x in arrays)
        want = {
            "add": (b << n | a) + (d << n | c), "sub": (b << n | a) - (d << n | c), "mad": a * c + b + (d << n),
        }[op] >> n  # fmt: skip
        assert int(got[i]) == unsigned(want, n)


COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b, "lo": lambda a, b: a < b, "ls": lambda a, b: a <= b,
    "hi": lambda a, b: a > b, "hs": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("t", [*TYPES, "b16", "b32", "b64"])
def test_comparisons(t: str) -> None:
    names = ["eq", "ne"] if t[0] == "b" else [c for c in COMPARE if c not in ("lo", "ls", "hi", "hs") or t[0] == "u"]
    rng = np.random.default_rng(12)
    n = bits_of(t)
    a, b = (integers(n, 64, rng) for _ in range(2))
    for name in names:
        want = [COMPARE[name](value(int(x), t), value(int(y), t)) for x, y in zip(a, b, strict=True)]
        assert apply(f"setp.{name}.{t}", "pred", [t, t], [a, b]).tolist() == want, name


@pytest.mark.parametrize("how", ["and", "or", "xor"])
def test_comparison_combined_with_a_predicate(how: str) -> None:
    rng = np.random.default_rng(13)
    a, b, c = integers(32, 64, rng), integers(32, 64, rng), rng.integers(0, 2, 64).astype(np.uint32)
    less = (a.view(np.int32) < b.view(np.int32)).astype(np.uint32)
    want = {"and": less & c, "or": less | c, "xor": less ^ c}[how]
    assert (apply(f"setp.lt.{how}.s32", "pred", ["s32", "s32", "pred"], [a, b, c]) == want).all()


@pytest.mark.parametrize("t", ["b16", "u32", "s64", "f32", "f64", "u16"])
def test_selection(t: str) -> None:
    rng = np.random.default_rng(14)
    n = NUMPY[t]().itemsize * 8
    a, b, c = integers(n, 64, rng), integers(n, 64, rng), rng.integers(0, 2, 64).astype(np.uint32)
    got = apply(f"selp.{t}", f"b{n}", [f"b{n}", f"b{n}", "pred"], [a, b, c])
    assert (got == np.where(c, a, b)).all()


def test_slct_takes_the_first_where_the_third_is_not_negative() -> None:
    check("slct.u32.s32", "u32", ["u32", "u32", "s32"], lambda a, b, c: a if c >= 0 else b)
    check("slct.u64.s32", "u64", ["u64", "u64", "s32"], lambda a, b, c: a if c >= 0 else b)


@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
@pytest.mark.parametrize("target", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_conversions(target: str, source: str) -> None:
    check(f"cvt.{target}.{source}", target, [source], lambda a: a)

    def limited(a: int) -> int:
        n = bits_of(target)
        return max(0, min((1 << n) - 1, a)) if target[0] == "u" else clamp(a, n)

    check(f"cvt.sat.{target}.{source}", target, [source], limited)
