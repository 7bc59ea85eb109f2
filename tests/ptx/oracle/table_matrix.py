"""mma (PTX ISA 9.7.14): small whole numbers, whose sums are exact in any order; special values; and real numbers.

The order in which silicon adds the products, and how it rounds between them, is not documented. Where a sum is exact
the results are equal bit by bit; elsewhere the rule is `sum:k`: they differ by no more than (k + 1) units of 2^-23 of
the sum of magnitudes, and one unit of a half where the result is one.
"""

from tests.ptx.oracle.form import Form, rows

PACKED = {
    "f16": "f16x2",
    "bf16": "bf16x2",
    "tf32": "tf32",
    "f64": "f64",
    "s8": "s8x4",
    "u8": "u8x4",
    "s4": "s4x8",
    "u4": "u4x8",
    "e4m3": "e4m3x4",
    "e5m2": "e5m2x4",
}
WIDTH = {"f16": 16, "bf16": 16, "tf32": 32, "f64": 64, "s8": 8, "u8": 8, "s4": 4, "u4": 4, "e4m3": 8, "e5m2": 8}


def mma(shape: str, d: str, a: str, b: str, how: str = "exact", more: str = "", arch: int = 80) -> list[Form]:
    m, k = (int(x) for x in shape[1:].replace("n8", "").split("k"))
    per = max(1, 32 // WIDTH[a])
    nb = k // (4 * per)
    na, nc = nb * m // 8, m // 4 // (2 if d == "f16" else 1)
    integer = a in ("s8", "u8", "s4", "u4")
    small = f":{a}small" if a.startswith("e") else "" if integer else f":{how}"
    last = (
        ":low" if integer and not more else "" if integer else ":exactc" if how == "exact" and d != "f16" else f":{how}"
    )
    c = {"f16": "f16x2"}.get(d, d)
    sources = " ".join(
        [PACKED[a] + small] * na
        + [PACKED[b] + (small if a == b else f":{b}small" if b.startswith("e") else small)] * nb
        + [c + last] * nc
    )
    names = [", ".join(f"%s{i}" for i in range(*r)) for r in ((0, na), (na, na + nb), (na + nb, na + nb + nc))]
    target = ", ".join(f"%d{i}" for i in range(nc))
    operands = ", ".join(f"{{{n}}}" for n in [target, *names])
    op = f"mma.sync.aligned.{shape}.row.col{more}.{d}.{a}.{b}.{d}"
    rule = "bits" if integer else "nan" if how != "real" else f"sum:{k}"
    return rows(
        "9.7.14",
        op,
        sources,
        " ".join([c] * nc),
        text=f"{{op}} {operands};",
        scope="warp",
        tag=how,
        arch=arch,
        rule=rule,
    )


HALVES = [
    ("m16n8k8", "f16", "f16"),
    ("m16n8k16", "f16", "f16"),
    ("m16n8k8", "f32", "f16"),
    ("m16n8k16", "f32", "f16"),
    ("m16n8k8", "f32", "bf16"),
    ("m16n8k16", "f32", "bf16"),
    ("m16n8k4", "f32", "tf32"),
    ("m16n8k8", "f32", "tf32"),
]
EIGHTS = [(s, a, b) for s in ("m8n8k16", "m16n8k16", "m16n8k32") for a in ("s8", "u8") for b in ("s8", "u8")]
FOURS = [(s, a, b) for s in ("m8n8k32", "m16n8k32", "m16n8k64") for a in ("s4", "u4") for b in ("s4", "u4")]

FORMS = [
    *(f for how in ("exact", "special", "real") for s, d, t in HALVES for f in mma(s, d, t, t, how)),
    *(f for how in ("exact", "special") for f in mma("m8n8k4", "f64", "f64", "f64", how)),
    *(f for more in ("", ".satfinite") for s, a, b in EIGHTS for f in mma(s, "s32", a, b, "whole", more)),
    *(f for s, a, b in FOURS for f in mma(s, "s32", a, b, "whole")),
    *mma("m16n8k64", "s32", "s4", "s4", "whole", ".satfinite"),
    *(f for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2") for f in mma("m16n8k32", "f32", a, b, "exact", arch=89)),
]
