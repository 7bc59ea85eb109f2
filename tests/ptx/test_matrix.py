"""mma against a matrix product, with fragments as the PTX document lays them out."""

import numpy as np
import pytest

from tegrad import ptx
from tests.ptx.forms import HEADER

RNG = np.random.default_rng(17)
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


def fragments_a(a: np.ndarray, per: int) -> np.ndarray:
    """(registers, lanes, per): rows g and g + 8 alternate, k advances by four threads' worth."""
    rows, k = a.shape
    halves = rows // 8
    return np.array([
        [[a[G[i] + 8 * (r % halves), 4 * per * (r // halves) + per * T[i] + s] for s in range(per)] for i in LANE]
        for r in range(halves * k // (4 * per))
    ])  # fmt: skip


def fragments_b(b: np.ndarray, per: int) -> np.ndarray:
    return np.array([
        [[b[4 * per * r + per * T[i] + s, G[i]] for s in range(per)] for i in LANE]
        for r in range(b.shape[0] // (4 * per))
    ])  # fmt: skip


def fragments_c(c: np.ndarray) -> np.ndarray:
    """(values, lanes): row g then g + 8, columns 2t and 2t + 1."""
    return np.array([[c[G[i] + 8 * (v // 2), 2 * T[i] + v % 2] for i in LANE] for v in range(c.shape[0] // 4)])


def matrix_of(values: np.ndarray, rows: int) -> np.ndarray:
    out = np.zeros((rows, 8), values.dtype)
    for v in range(rows // 4):
        out[G + 8 * (v // 2), 2 * T + v % 2] = values[v]
    return out


def bits(x: np.ndarray, t: str) -> np.ndarray:
    """Values as the bits of a PTX type."""
    if t == "bf16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    kinds = {
        "f16": np.float16,
        "tf32": np.float32,
        "f32": np.float32,
        "f64": np.float64,
        "s8": np.int8,
        "u8": np.uint8,
        "s32": np.int32,
    }
    return x.astype(kinds[t])


def words(x: np.ndarray, t: str) -> np.ndarray:
    """(registers, lanes, per) as (registers, lanes) of 32- or 64-bit words."""
    raw = np.ascontiguousarray(bits(x, t))
    return raw.view(np.uint64 if t == "f64" else np.uint32)[..., 0]


def mma(op: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Run one mma on matrices."""
    d_t, a_t, b_t, c_t = op.split(".")[-4:]
    per = {"f64": 1, "tf32": 1, "f16": 2, "bf16": 2, "s8": 4, "u8": 4}[a_t]
    wide = a_t == "f64"
    values = fragments_c(c)
    packed = values.astype(np.float16) if c_t == "f16" else bits(values, c_t)
    if c_t == "f16":
        pairs = np.ascontiguousarray(packed.reshape(-1, 2, 32).transpose(0, 2, 1))
        packed = pairs.view(np.uint32)[..., 0]
    operands = [words(fragments_a(a, per), a_t), words(fragments_b(b, per), b_t), np.ascontiguousarray(packed)]
    reg, size = ("b64", 8) if wide else ("b32", 4)
    counts = [len(o) for o in operands]
    names = [[f"%{n}{i}" for i in range(k)] for n, k in zip("abc", counts, strict=True)]
    outs = [f"%d{i}" for i in range(counts[2])]
    loads = "".join(
        f"ld.param.u64 %p, [p{m + 1}]; mad.wide.u32 %p, %i, {size}, %p;"
        + "".join(f"ld.global.{reg} {n}, [%p+{32 * size * i}];" for i, n in enumerate(group))
        for m, group in enumerate(names)
    )
    text = f"""{HEADER}.visible .entry k(.param .u64 p0, .param .u64 p1, .param .u64 p2, .param .u64 p3) {{
      .reg .u64 %p; .reg .u32 %i; .reg .{reg} {", ".join([*outs, *(n for g in names for n in g)])};
      mov.u32 %i, %tid.x; {loads} {op} {", ".join("{" + ", ".join(g) + "}" for g in [outs, *names])};
      ld.param.u64 %p, [p0]; mad.wide.u32 %p, %i, {size}, %p;
      {"".join(f"st.global.{reg} [%p+{32 * size * i}], {n};" for i, n in enumerate(outs))} ret; }}"""
    out = np.zeros((counts[2], 32), np.uint64 if wide else np.uint32)
    ptx.load(text, None).kernels["k"].launch((1, 1, 1), (32, 1, 1), [out, *(np.ascontiguousarray(o) for o in operands)])
    if d_t == "f16":
        halves = out.view(np.float16).reshape(-1, 32, 2).transpose(0, 2, 1).reshape(-1, 32)
        return matrix_of(halves, len(a))
    return matrix_of(out.view({"f32": np.float32, "f64": np.float64, "s32": np.int32}[d_t]), len(a))


FORMS = [
    "m16n8k8.row.col.f16.f16.f16.f16", "m16n8k8.row.col.f32.f16.f16.f32", "m16n8k16.row.col.f16.f16.f16.f16",
    "m16n8k16.row.col.f32.f16.f16.f32", "m16n8k8.row.col.f32.bf16.bf16.f32", "m16n8k16.row.col.f32.bf16.bf16.f32",
    "m16n8k4.row.col.f32.tf32.tf32.f32", "m16n8k8.row.col.f32.tf32.tf32.f32", "m8n8k4.row.col.f64.f64.f64.f64",
    "m16n8k16.row.col.s32.s8.s8.s32", "m16n8k32.row.col.s32.s8.s8.s32", "m16n8k32.row.col.s32.u8.s8.s32",
    "m16n8k32.row.col.s32.s8.u8.s32", "m8n8k16.row.col.s32.u8.u8.s32",
]  # fmt: skip


def shape(form: str) -> tuple[int, int]:
    m, k = form.split(".")[0][1:].split("n8k")
    return int(m), int(k)


@pytest.mark.parametrize("form", FORMS)
def test_products_of_small_integers_are_exact(form: str) -> None:
    m, k = shape(form)
    low = 0 if "u8" in form else -7
    a, b, c = RNG.integers(low, 8, (m, k)), RNG.integers(low, 8, (k, 8)), RNG.integers(-90, 90, (m, 8))
    assert (mma(f"mma.sync.aligned.{form}", a, b, c) == a @ b + c).all()


@pytest.mark.parametrize("form", [f for f in FORMS if ".s32." not in f])
def test_products_of_reals_are_within_the_rounding_of_a_sum(form: str) -> None:
    m, k = shape(form)
    _, a_t, _, c_t = form.split(".")[-4:]
    digits = {"f16": 11, "bf16": 8, "tf32": 11, "f64": 53}[a_t]

    def cut(x: np.ndarray) -> np.ndarray:
        mantissa, exponent = np.frexp(x)
        return np.ldexp(np.round(np.ldexp(mantissa, digits)), exponent - digits)

    a, b = cut(RNG.standard_normal((m, k))), cut(RNG.standard_normal((k, 8)))
    c = (
        RNG.standard_normal((m, 8))
        .astype({"f16": np.float16, "f32": np.float32, "f64": np.float64}[c_t])
        .astype(np.float64)
    )
    unit = 2.0 ** -{"f16": 11, "f32": 24, "f64": 53}[c_t]
    bound = 2 * k * unit * (np.abs(a) @ np.abs(b) + np.abs(c))
    assert (np.abs(mma(f"mma.sync.aligned.{form}", a, b, c).astype(np.float64) - (a @ b + c)) <= bound).all()


def test_tf32_ignores_the_low_bits() -> None:
    a, b = np.zeros((16, 8)), np.zeros((8, 8))
    a[0, 0], b[0, 0] = 1 + 2.0**-12, 1.0
    assert mma("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", a, b, np.zeros((16, 8)))[0, 0] == 1.0


def test_saturating_integer_product() -> None:
    a, b = np.full((16, 32), 127), np.full((32, 8), 127)
    c = np.full((16, 8), 2**31 - 5)
    assert (mma("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", a, b, c) == 2**31 - 1).all()


def test_a_form_without_support_is_named() -> None:
    text = f"""{HEADER}.visible .entry k() {{ .reg .b32 %a<9>;
      mma.sync.aligned.m8n8k128.row.col.s32.b1.b1.s32.xor.popc {{%a0, %a1}}, {{%a2}}, {{%a3}}, {{%a4, %a5}}; ret; }}"""
    with pytest.raises(ptx.PtxError, match="m8n8k128"):
        ptx.load(text, None)
