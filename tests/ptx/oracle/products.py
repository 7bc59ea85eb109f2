"""mma: the matrices behind the registers, their product, and how far two results may be apart."""

import re

import numpy as np

from tests.ptx.oracle.form import CASES, Form
from tests.ptx.oracle.models import sources
from tests.ptx.oracle.table_matrix import WIDTH

LANES = np.arange(32)


def elements(words: np.ndarray, t: str) -> np.ndarray:
    """The numbers in registers (..., last axis: the elements of one), as float64."""
    from tests.ptx.oracle.judge import number

    if t in ("f64", "f32", "tf32", "s32"):
        if t == "s32":
            return words.view(np.int32).astype(np.float64)[..., None]
        kept = words & np.uint32(0xFFFFE000) if t == "tf32" else words
        return number(kept, t)[..., None]
    bits = WIDTH[t]
    cut = np.stack([words >> np.uint32(i * bits) & np.uint32((1 << bits) - 1) for i in range(32 // bits)], -1)
    if t in ("f16", "bf16"):
        return number(cut.astype(np.uint16), t)
    if t in ("e4m3", "e5m2"):
        return _fp8(cut, t)
    signed = np.where(cut >> (bits - 1) & 1, cut.astype(np.int64) - (1 << bits), cut.astype(np.int64))
    return (signed if t[0] == "s" else cut).astype(np.float64)


def _fp8(code: np.ndarray, t: str) -> np.ndarray:
    mantissa, bias = {"e4m3": (3, 7), "e5m2": (2, 15)}[t]
    size = (code & 0x7F).astype(np.int64)
    e, m = size >> mantissa, size & ((1 << mantissa) - 1)
    value = np.where(e == 0, m * 2.0 ** (1 - bias - mantissa), (1 + m / 2**mantissa) * 2.0 ** (e - bias))
    return np.where(code & 0x80, -value, value)


def types(form: Form) -> list[str]:
    """The types of D, A, B and C."""
    return form.name.split()[0].split(".")[-4:]


def matrices(form: Form) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A (warps, rows, k), B (warps, k, 8) and C (warps, rows, 8), from the fragments of PTX ISA 9.7.14."""
    rows, k = (int(x) for x in re.search(r"\.m(\d+)n8k(\d+)\.", form.name).groups())  # type: ignore[union-attr]
    d, a, b, _ = types(form)
    words = [s.reshape(CASES["warp"], 32) for s in sources(form)]
    per = max(1, 32 // WIDTH[a])
    nb, halves = k // (4 * per), rows // 8
    na = nb * halves
    group, thread = LANES // 4, LANES % 4
    left, right = np.zeros((CASES["warp"], rows, k)), np.zeros((CASES["warp"], k, 8))
    for r in range(na):
        x = elements(words[r], a)
        for s in range(per):
            left[:, group + 8 * (r % halves), 4 * per * (r // halves) + per * thread + s] = x[..., s]
    for r in range(nb):
        x = elements(words[na + r], b)
        for s in range(per):
            right[:, 4 * per * r + per * thread + s, group] = x[..., s]
    return left, right, accumulators(words[na + nb :], d, rows)


def accumulators(words: list[np.ndarray], t: str, rows: int) -> np.ndarray:
    """Registers of C or D (warps, 32) as matrices (warps, rows, 8)."""
    flat = [x for w in words for x in np.moveaxis(elements(w.reshape(CASES["warp"], 32), t), -1, 0)]
    out = np.zeros((CASES["warp"], rows, 8))
    for v, x in enumerate(flat):
        out[:, LANES // 4 + 8 * (v // 2), 2 * (LANES % 4) + v % 2] = x
    return out


def apart(form: Form, ours: list[np.ndarray], theirs: list[np.ndarray]) -> np.ndarray:
    """Threads of warps with an element that differs by more than the rule allows."""
    a, b, c = matrices(form)
    t = types(form)[0]
    k = int(form.rule.split(":")[1])
    magnitude = np.abs(a) @ np.abs(b) + np.abs(c)
    x, y = (accumulators(r, t, a.shape[1]) for r in (ours, theirs))
    allowed = (k + 1) * 2.0**-23 * magnitude
    if t == "f16":
        allowed = allowed + 2.0**-10 * np.maximum(np.abs(y), 2.0**-14)
    return np.repeat((np.abs(x - y) > allowed).any((1, 2)), 32)
