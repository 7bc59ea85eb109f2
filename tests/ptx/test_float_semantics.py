"""Floating-point instructions against exact arithmetic, rounded once; approximations against their documented error."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest

from tests.ptx import model
from tests.ptx.forms import NUMPY, apply
from tests.ptx.model import FORMATS, Number, decode, encode, samples

COUNT = 512
MODES = ["rn", "rz", "rm", "rp"]


def same(got: int, want: int, t: str) -> bool:
    f = FORMATS[t]
    return got == want or (decode(got, f).is_nan and decode(want, f).is_nan)


def check(op: str, t: str, arity: int, fn: Callable[..., Number], mode: str = "rn") -> None:
    """Run on samples; `fn` gives the exact result, which is rounded once."""
    f = FORMATS[t]
    rng = np.random.default_rng(len(op))
    arrays = [samples(f, COUNT, rng) for _ in range(arity)]
    got = apply(op, t, [t] * arity, arrays).view(arrays[0].dtype)
    for i in range(COUNT):
        args = [decode(x[i], f) for x in arrays]
        want = encode(fn(*args), f, mode)
        assert same(int(got[i]), want, t), (op, [hex(int(x[i])) for x in arrays], hex(int(got[i])), hex(want))


def subtract(a: Number, b: Number, mode: str = "rn") -> Number:
    return model.add(a, model.negate(b), mode)


def fused(a: Number, b: Number, c: Number, mode: str = "rn") -> Number:
    return model.add(model.mul(a, b), c, mode)


@pytest.mark.parametrize("t", ["f16", "bf16", "f32", "f64"])
def test_addition_and_multiplication_round_once(t: str) -> None:
    dot = "" if t in ("f16", "bf16") else ".rn"
    check(f"add{dot}.{t}", t, 2, model.add)
    check(f"sub{dot}.{t}", t, 2, subtract)
    check(f"mul{dot}.{t}", t, 2, model.mul)


@pytest.mark.parametrize("t", ["f16", "bf16", "f32", "f64"])
def test_fma_rounds_once(t: str) -> None:
    check(f"fma.rn.{t}", t, 3, fused)


def test_fma_of_half_is_not_rounded_twice() -> None:
    """Cases in which a float in between would round to the tie: 2^k + a tiny product."""
    f = FORMATS["f16"]
    a, b, c = [], [], []
    for i in range(32):
        a.append(0x0001 + i % 3)
        b.append(0x0401 + i)
        c.append(0x6800 + i)
    arrays = [np.array(x, np.uint16) for x in (a, b, c)]
    got = apply("fma.rn.f16", "f16", ["f16"] * 3, arrays).view(np.uint16)
    for i in range(32):
        assert int(got[i]) == encode(fused(*(decode(x[i], f) for x in arrays)), f)


@pytest.mark.parametrize("mode", MODES)
def test_directed_rounding_of_float(mode: str) -> None:
    check(f"add.{mode}.f32", "f32", 2, lambda a, b: model.add(a, b, mode), mode)
    check(f"sub.{mode}.f32", "f32", 2, lambda a, b: subtract(a, b, mode), mode)
    check(f"mul.{mode}.f32", "f32", 2, model.mul, mode)
    check(f"fma.{mode}.f32", "f32", 3, lambda a, b, c: fused(a, b, c, mode), mode)
    check(f"div.{mode}.f32", "f32", 2, model.div, mode)
    check(f"rcp.{mode}.f32", "f32", 1, lambda a: model.div(Number(False, Fraction(1)), a), mode)
    check(f"sqrt.{mode}.f32", "f32", 1, lambda a: model.sqrt(a, FORMATS["f32"]), mode)


def test_division_and_square_root_of_double() -> None:
    check("div.rn.f64", "f64", 2, model.div)
    check("rcp.rn.f64", "f64", 1, lambda a: model.div(Number(False, Fraction(1)), a))
    check("sqrt.rn.f64", "f64", 1, lambda a: model.sqrt(a, FORMATS["f64"]))


@pytest.mark.parametrize("t", ["f16", "bf16", "f32", "f64"])
def test_minimum_and_maximum_prefer_numbers(t: str) -> None:
    check(f"min.{t}", t, 2, lambda a, b: model.minmax(a, b, True))
    check(f"max.{t}", t, 2, lambda a, b: model.minmax(a, b, False))


@pytest.mark.parametrize("t", ["f16", "bf16", "f32"])
def test_minimum_and_maximum_with_nan(t: str) -> None:
    def strict(smaller: bool) -> Callable[[Number, Number], Number]:
        return lambda a, b: model.NAN if a.is_nan or b.is_nan else model.minmax(a, b, smaller)

    check(f"min.NaN.{t}", t, 2, strict(True))
    check(f"max.NaN.{t}", t, 2, strict(False))


@pytest.mark.parametrize("t", ["f16", "bf16", "f32", "f64"])
def test_sign_operations(t: str) -> None:
    check(f"neg.{t}", t, 1, model.negate)
    check(f"abs.{t}", t, 1, lambda a: a if a.is_nan else Number(False, a.value))


@pytest.mark.parametrize("t", ["f32", "f64"])
def test_copysign_moves_the_sign_bit(t: str) -> None:
    f = FORMATS[t]
    a, b = (samples(f, COUNT, np.random.default_rng(k)) for k in (31, 32))
    got = apply(f"copysign.{t}", t, [t, t], [a, b]).view(a.dtype)
    want = (a & np.array(f.sign, a.dtype)) | (b & np.array(f.sign - 1, a.dtype))
    assert (got == want).all()


@pytest.mark.parametrize("t", ["f16x2", "bf16x2"])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "fma.rn", "min", "max", "neg", "abs"])
def test_pairs_are_two_halves(op: str, t: str) -> None:
    one = t[:-2]
    f = FORMATS[one]
    arity = {"fma.rn": 3, "neg": 1, "abs": 1}.get(op, 2)
    rng = np.random.default_rng(21)
    arrays = [samples(f, 2 * 64, rng) for _ in range(arity)]
    single = apply(f"{op}.{one}", one, [one] * arity, arrays).view(np.uint16)
    pairs = apply(f"{op}.{t}", t, [t] * arity, [x.view(np.uint32) for x in arrays]).view(np.uint16)
    assert all(same(int(p), int(s), one) for p, s in zip(pairs, single, strict=True))


def flushed(x: Number) -> Number:
    tiny = not x.is_nan and not x.is_inf and x.value < Fraction(2) ** -126  # type: ignore[operator]
    return Number(x.negative, Fraction(0)) if tiny else x


def test_flush_to_zero_of_inputs_and_result() -> None:
    f = FORMATS["f32"]
    small = lambda fn: lambda *a: flushed(decode(encode(fn(*(flushed(x) for x in a)), f), f))  # noqa: E731
    check("add.ftz.f32", "f32", 2, small(model.add))
    check("mul.ftz.f32", "f32", 2, small(model.mul))
    check("fma.rn.ftz.f32", "f32", 3, small(fused))


def test_saturation_to_the_unit_interval() -> None:
    def sat(x: Number) -> Number:
        if x.is_nan or x.negative:
            return Number(False, Fraction(0))
        return Number(False, min(Fraction(1), x.value)) if not x.is_inf else Number(False, Fraction(1))  # type: ignore[arg-type,type-var]

    f = FORMATS["f32"]
    check("add.sat.f32", "f32", 2, lambda a, b: sat(decode(encode(model.add(a, b), f), f)))
    check("fma.rn.sat.f32", "f32", 3, lambda a, b, c: sat(decode(encode(fused(a, b, c), f), f)))


COMPARE: dict[str, Callable[[float, float], bool]] = {
    "eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b,
}  # fmt: skip


@pytest.mark.parametrize("t", ["f16", "bf16", "f32", "f64"])
def test_comparisons_with_nan(t: str) -> None:
    f = FORMATS[t]
    rng = np.random.default_rng(22)
    a, b = samples(f, 96, rng), samples(f, 96, rng)
    b[::3] = a[::3]
    for name in [*COMPARE, *(c + "u" for c in COMPARE if c != "ne"), "neu", "num", "nan"]:
        want = []
        for x, y in zip(a, b, strict=True):
            x, y = decode(x, f), decode(y, f)
            nan = x.is_nan or y.is_nan
            if name in ("num", "nan"):
                want.append(nan == (name == "nan"))
            elif nan:
                want.append(name.endswith("u"))
            else:
                want.append(COMPARE[name.removesuffix("u") if name not in COMPARE else name](x.signed, y.signed))
        assert apply(f"setp.{name}.{t}", "pred", [t, t], [a, b]).tolist() == want, name


def test_set_gives_one_or_all_ones() -> None:
    rng = np.random.default_rng(23)
    a, b = (rng.standard_normal(64).astype(np.float32) for _ in range(2))
    assert (apply("set.lt.f32.f32", "f32", ["f32", "f32"], [a, b]) == (a < b)).all()
    assert (apply("set.lt.u32.f32", "u32", ["f32", "f32"], [a, b]) == np.where(a < b, 0xFFFFFFFF, 0)).all()
    h, g = a.astype(np.float16), b.astype(np.float16)
    assert (apply("set.lt.f16.f16", "f16", ["f16", "f16"], [h, g]) == (h < g)).all()


@pytest.mark.parametrize("kind", ["finite", "infinite", "number", "notanumber", "normal", "subnormal"])
def test_testp(kind: str) -> None:
    f = FORMATS["f32"]
    a = samples(f, 96, np.random.default_rng(24))
    want = []
    for x in a:
        v = decode(x, f)
        finite = not v.is_nan and not v.is_inf
        normal = finite and (v.value == 0 or v.value >= Fraction(2) ** -126)  # type: ignore[operator]
        want.append({
            "finite": finite, "infinite": v.is_inf, "number": not v.is_nan, "notanumber": v.is_nan, "normal": normal,
            "subnormal": finite and v.value != 0 and not normal,
        }[kind])  # fmt: skip
    assert apply(f"testp.{kind}.f32", "pred", ["f32"], [a]).tolist() == want


FLOATS = ["f16", "bf16", "f32", "f64"]


def convert(target: str, source: str, mods: str, mode: str) -> None:
    s, d = FORMATS[source], FORMATS[target]
    a = samples(s, COUNT, np.random.default_rng(25))
    got = apply(f"cvt{mods}.{target}.{source}", target, [source], [a]).view(
        {16: np.uint16, 32: np.uint32, 64: np.uint64}[d.bits]
    )
    for x, g in zip(a, got, strict=True):
        want = encode(decode(x, s), d, mode)
        assert same(int(g), want, target), (hex(int(x)), hex(int(g)), hex(want))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("target", "source"), [("f16", "f32"), ("f16", "f64"), ("f32", "f64"), ("bf16", "f64")])
def test_narrowing_conversions(target: str, source: str, mode: str) -> None:
    if target == "bf16" and mode not in ("rn", "rz"):
        pytest.skip("PTX has no such form")
    convert(target, source, f".{mode}", mode)


@pytest.mark.parametrize("mode", ["rn", "rz"])
def test_float_to_bfloat(mode: str) -> None:
    convert("bf16", "f32", f".{mode}", mode)


@pytest.mark.parametrize(("target", "source"), [("f32", "f16"), ("f64", "f16"), ("f64", "f32"), ("f32", "bf16")])
def test_widening_conversions(target: str, source: str) -> None:
    convert(target, source, "", "rn")


@pytest.mark.parametrize("t", ["f16", "f32", "f64"])
@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
def test_rounding_to_whole_numbers(t: str, mode: str) -> None:
    f = FORMATS[t]
    a = samples(f, COUNT, np.random.default_rng(26))
    got = apply(f"cvt.{mode}.{t}.{t}", t, [t], [a]).view(a.dtype)
    for x, g in zip(a, got, strict=True):
        v = decode(x, f)
        if not v.is_nan and not v.is_inf:
            v = Number(v.negative, Fraction(model.round_integer(v.value, mode[:2], v.negative)))  # type: ignore[arg-type]
        assert same(int(g), encode(v, f), t)


@pytest.mark.parametrize("source", ["f16", "f32", "f64"])
@pytest.mark.parametrize("target", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_float_to_integer_saturates_and_nan_is_zero_or_the_top_bit(target: str, source: str) -> None:
    f = FORMATS[source]
    n, minus = int(target[1:]), target[0] == "s"
    low, top = (-(1 << (n - 1)), (1 << (n - 1)) - 1) if minus else (0, (1 << n) - 1)
    for mode in ("rni", "rzi", "rmi", "rpi"):
        a = samples(f, COUNT, np.random.default_rng(27))
        got = apply(f"cvt.{mode}.{target}.{source}", target, [source], [a])
        for x, g in zip(a, got, strict=True):
            v = decode(x, f)
            if v.is_nan:
                want = (-top - 1 if minus else 1 << (n - 1)) if source == "f64" or n == 64 else 0
            elif v.is_inf:
                want = low if v.negative else top
            else:
                whole = model.round_integer(v.value, mode[:2], v.negative)  # type: ignore[arg-type]
                want = max(low, min(top, -whole if v.negative else whole))
            assert int(g) == want, (mode, hex(int(x)))


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", ["u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64"])
def test_integer_to_float_rounds_once(target: str, source: str) -> None:
    n, minus = int(source[1:]), source[0] == "s"
    f = FORMATS[target]
    a = model.integers(n, COUNT, np.random.default_rng(28))
    for mode in MODES if target in ("f16", "f32") else ["rn"]:
        got = apply(f"cvt.{mode}.{target}.{source}", target, [source], [a])
        got = got.view({16: np.uint16, 32: np.uint32, 64: np.uint64}[f.bits])
        for x, g in zip(a, got, strict=True):
            v = model.signed(x, n) if minus else int(x)
            assert int(g) == encode(model.make(Fraction(v)), f, mode), (mode, v)


def test_packing_two_floats() -> None:
    f = FORMATS["f32"]
    rng = np.random.default_rng(29)
    a, b = samples(f, 96, rng), samples(f, 96, rng)
    for t in ("f16", "bf16"):
        got = apply(f"cvt.rn.{t}x2.f32", f"{t}x2", ["f32", "f32"], [a, b])
        for x, y, g in zip(a, b, got, strict=True):
            assert same(int(g) >> 16, encode(decode(x, f), FORMATS[t]), t)
            assert same(int(g) & 0xFFFF, encode(decode(y, f), FORMATS[t]), t)


def test_tf32_rounds_ties_away() -> None:
    f = FORMATS["f32"]
    a = samples(f, COUNT, np.random.default_rng(30))
    got = apply("cvt.rna.tf32.f32", "b32", ["f32"], [a])
    ten = model.Format(19, 11, 127)
    for x, g in zip(a, got, strict=True):
        v = decode(x, f)
        want = encode(v, ten, "rna") << 13
        assert int(g) == want or (v.is_nan and decode(g, f).is_nan)


def ulp_error(got: np.ndarray, want: np.ndarray) -> float:
    """The largest relative error, over finite results."""
    good = np.isfinite(want) & (np.abs(want) > 2.0**-126) & (np.abs(want) < 3e38)
    return float(np.max(np.abs(got[good].astype(np.float64) - want[good]) / np.abs(want[good])))


X = np.concatenate([np.linspace(-140, 140, 20000), np.logspace(-40, 38, 12768)]).astype(np.float32)


@pytest.mark.parametrize(
    ("op", "fn", "bound"),
    [
        ("ex2.approx.f32", np.exp2, 2.0**-22), ("rcp.approx.f32", lambda x: 1 / x, 2.0**-23),
        ("sqrt.approx.f32", lambda x: np.sqrt(np.abs(x)), 2.0**-23), ("rsqrt.approx.f32",
        lambda x: 1 / np.sqrt(np.abs(x)), 2.0**-22.4),
        ("tanh.approx.f32", np.tanh, 2.0**-11),
    ],
)  # fmt: skip
def test_approximations_stay_within_the_documented_relative_error(
    op: str, fn: Callable[[np.ndarray], np.ndarray], bound: float
) -> None:
    x = np.abs(X) if "sqrt" in op else X
    with np.errstate(all="ignore"):
        want = fn(x.astype(np.float64))
    assert ulp_error(apply(op, "f32", ["f32"], [x]), want) <= bound


def test_lg2_stays_within_the_documented_error() -> None:
    """2^-22 absolute for results around zero, 2^-22 relative elsewhere."""
    x = np.concatenate([np.linspace(0.4, 2.5, 16384), np.logspace(-44, 38, 16384)]).astype(np.float32)
    got = apply("lg2.approx.f32", "f32", ["f32"], [x]).astype(np.float64)
    want = np.log2(x.astype(np.float64))
    assert np.max(np.abs(got - want) / np.maximum(np.abs(want), 1)) <= 2.0**-22


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine_and_cosine_stay_within_the_documented_error(name: str) -> None:
    x = np.linspace(-math.pi, math.pi, 32768).astype(np.float32)
    got = apply(f"{name}.approx.f32", "f32", ["f32"], [x])
    assert np.max(np.abs(got - getattr(np, name)(x.astype(np.float64)))) <= 2.0**-20.5


@pytest.mark.parametrize(
    ("op", "cases"),
    [
        ("ex2.approx.f32", [(math.inf, math.inf), (-math.inf, 0.0), (0.0, 1.0), (-0.0, 1.0), (200.0, math.inf),
        (-200.0, 0.0), (-149.0, 2.0**-149)]),
        ("lg2.approx.f32", [(math.inf, math.inf), (0.0, -math.inf), (-0.0, -math.inf), (1.0, 0.0), (-1.0, math.nan),
        (2.0**-149, -149.0)]),
        ("rcp.approx.f32", [(math.inf, 0.0), (-math.inf, -0.0), (0.0, math.inf), (-0.0, -math.inf)]),
        ("rsqrt.approx.f32", [(math.inf, 0.0), (0.0, math.inf), (-1.0, math.nan)]),
        ("sqrt.approx.f32", [(math.inf, math.inf), (0.0, 0.0), (-0.0, -0.0), (-1.0, math.nan)]),
        ("sin.approx.f32", [(0.0, 0.0), (-0.0, -0.0), (math.inf, math.nan), (-math.inf, math.nan)]),
        ("cos.approx.f32", [(0.0, 1.0), (math.inf, math.nan)]),
        ("tanh.approx.f32", [(math.inf, 1.0), (-math.inf, -1.0), (0.0, 0.0), (-0.0, -0.0)]),
    ],
)  # fmt: skip
def test_special_values_of_approximations(op: str, cases: list[tuple[float, float]]) -> None:
    x = np.array([c[0] for c in cases] + [math.nan] + [1.0] * (31 - len(cases)), np.float32)
    got = apply(op, "f32", ["f32"], [x])
    for g, w in zip(got, [*(c[1] for c in cases), math.nan], strict=False):
        assert (math.isnan(g) and math.isnan(w)) or (g == w and math.copysign(1, g) == math.copysign(1, w)), (op, g, w)


@pytest.mark.parametrize(
    ("op", "fn"), [("ex2", np.exp2), ("lg2", lambda x: np.log2(np.abs(x))), ("sin", np.sin), ("sqrt",
    lambda x: np.sqrt(np.abs(x))),
                   ("rcp", lambda x: 1 / x)]
)  # fmt: skip
def test_double_forms_of_the_ptx_renderer(op: str, fn: Callable[[np.ndarray], np.ndarray]) -> None:
    x = np.linspace(-20, 20.5, 4096)
    x = np.abs(x) if op in ("lg2", "sqrt") else x
    np.testing.assert_allclose(apply(f"{op}.approx.f64", "f64", ["f64"], [x]), fn(x), rtol=1e-13, atol=1e-13)


def test_half_approximations() -> None:
    x = np.linspace(-8, 8, 1024).astype(np.float16)
    got = apply("ex2.approx.f16", "f16", ["f16"], [x]).astype(np.float64)
    want = np.exp2(x.astype(np.float64))
    assert np.max(np.abs(got - want) / want) <= 2.0**-9.9
    got = apply("tanh.approx.f16", "f16", ["f16"], [x]).astype(np.float64)
    assert np.max(np.abs(got - np.tanh(x.astype(np.float64)))) <= 2.0**-10.987
    assert NUMPY["f16"] is np.float16


def fp8_values(name: str) -> list[float]:
    """All 256 codes, from the definition of the format."""
    mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[name]
    out = []
    for code in range(256):
        sign, size = (-1.0 if code & 0x80 else 1.0), code & 0x7F
        exponent, m = size >> mantissa, size & ((1 << mantissa) - 1)
        if name == "e4m3" and size == 0x7F:
            value = math.nan
        elif name == "e5m2" and exponent == 31:
            value = math.nan if m else math.inf
        elif exponent == 0:
            value = m * 2.0 ** (1 - bias - mantissa)
        else:
            value = (1 + m / 2**mantissa) * 2.0 ** (exponent - bias)
        out.append(sign * value)
    return out


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_eight_bit_floats_widen_exactly(name: str) -> None:
    codes = np.arange(256, dtype=np.uint16)
    pairs = codes | (255 - codes) << 8
    got = apply(f"cvt.rn.f16x2.{name}x2", "b32", [f"{name}x2"], [pairs]).view(np.float16).reshape(-1, 2)
    want = np.array(fp8_values(name))
    np.testing.assert_array_equal(got[:, 0].astype(np.float64), want)
    np.testing.assert_array_equal(got[:, 1].astype(np.float64), want[::-1])


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
@pytest.mark.parametrize("source", ["f32", "f16x2"])
def test_eight_bit_floats_round_to_nearest_even_and_saturate(name: str, source: str) -> None:
    values = np.array(fp8_values(name)[:128])
    finite = values[np.isfinite(values)]
    middle = (finite[1:] + finite[:-1]) / 2
    x = np.concatenate(
        [finite, middle, np.nextafter(middle, 0), np.nextafter(middle, 9e9), [1e30, np.inf, 1e-30, np.nan]]
    )
    x = np.concatenate([x, -x])
    x = np.resize(x, -(-len(x) // 32) * 32).astype(np.float32)
    if source == "f16x2":
        with np.errstate(over="ignore"):
            x = x.astype(np.float16).astype(np.float32)
        packed = (x.astype(np.float16).view(np.uint16).astype(np.uint32)) * 0x10001
        got = apply(f"cvt.rn.satfinite.{name}x2.f16x2", f"{name}x2", ["f16x2"], [packed])
    else:
        got = apply(f"cvt.rn.satfinite.{name}x2.f32", f"{name}x2", ["f32", "f32"], [x, x])
    assert (got >> 8 == got & 0xFF).all()
    for v, g in zip(x.astype(np.float64), got & 0xFF, strict=True):
        if math.isnan(v):
            assert g & 0x7F == 0x7F
            continue
        best = min(range(len(finite)), key=lambda i: (abs(finite[i] - min(abs(v), finite[-1])), i & 1))
        assert g == best | (0x80 if math.copysign(1, v) < 0 else 0), (v, hex(g), hex(best))


@pytest.mark.parametrize("t", ["f16x2", "bf16x2"])
def test_comparisons_of_pairs(t: str) -> None:
    rng = np.random.default_rng(33)
    one = FORMATS[t[:-2]]
    a, b = (samples(one, 128, rng) for _ in range(2))
    b[::3] = a[::3]
    less = []
    for x, y in zip(a, b, strict=True):
        p, q = decode(x, one), decode(y, one)
        less.append(not p.is_nan and not q.is_nan and p.signed < q.signed)
    bits = {"f16x2": 0x3C00, "bf16x2": 0x3F80}[t]
    want = np.where(less, bits, 0).astype(np.uint16)
    got = apply(f"set.lt.{t}.{t}", t, [t, t], [a.view(np.uint32), b.view(np.uint32)])
    assert (got.view(np.uint16) == want).all()
