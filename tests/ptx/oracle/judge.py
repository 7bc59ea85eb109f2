"""When two results of a form are the same, as the ISA allows.

- `bits`: every bit.
- `nan`: every bit, but any NaN stands for any other: the ISA leaves the payload and sign of a NaN result open.
- `tf32`: as `nan`, and without the 13 lowest bits, which a tf32 does not have.
- `approx:F:REL:ABS`: each side within 2^REL of F(x), or within 2^ABS, whichever is more (the instruction's documented
  error); results that are zero, infinite or NaN agree in class and sign.
- `sum:K`: see `table_matrix`; `sums:K`: the same of wgmma.
"""

import numpy as np

from tests.ptx.oracle.form import BYTES, THREADS, Form
from tests.ptx.oracle.models import WORDS

KIND = {"f16": np.float16, "f32": np.float32, "f64": np.float64}


def results(form: Form, data: bytes) -> list[np.ndarray]:
    """A form's results as unsigned words (blobs as bytes, a row per thread)."""
    out, at = [], 0
    for t in form.results:
        size = BYTES[t] * form.threads
        raw = np.frombuffer(data[at : at + size], np.uint8)
        out.append(raw.reshape(form.threads, -1) if t.startswith("blob") else raw.view(WORDS[BYTES[t]]))
        at += size
    return out


def number(x: np.ndarray, t: str) -> np.ndarray:
    """Bits of a floating-point type as float64, a column for each part of a pair."""
    with np.errstate(invalid="ignore"):  # signalling NaN
        return _number(x, t)


def _number(x: np.ndarray, t: str) -> np.ndarray:
    if t in ("f16x2", "bf16x2"):
        return np.stack(
            [_number((x >> np.uint32(at) & np.uint32(0xFFFF)).astype(np.uint16), t[:-2]) for at in (0, 16)], -1
        )
    if t == "bf16":
        return (x.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return x.view(KIND["f32" if t == "tf32" else t]).astype(np.float64)


def is_float(t: str) -> bool:
    return t in (*KIND, "bf16", "tf32", "f16x2", "bf16x2")


def same(a: np.ndarray, b: np.ndarray, t: str, rule: str) -> np.ndarray:
    """Which values of a type agree by a rule other than `approx` and `sum`."""
    if t.startswith("blob"):
        return (a == b).all(-1)
    if rule == "bits" or not is_float(t):
        return a == b
    if rule == "tf32":
        a, b = a & np.uint32(0xFFFFE000), b & np.uint32(0xFFFFE000)
    if t.endswith("x2"):
        halves = [
            same(*((v >> np.uint32(at) & np.uint32(0xFFFF)).astype(np.uint16) for v in (a, b)), t[:-2], rule)
            for at in (0, 16)
        ]
        return halves[0] & halves[1]
    return (a == b) | (np.isnan(number(a, t)) & np.isnan(number(b, t)))


def differing(form: Form, ours: bytes, theirs: bytes) -> np.ndarray:
    """For each case, whether the two differ."""
    if form.rule.startswith("approx"):
        from tests.ptx.oracle.approximations import disagree

        wrong = disagree(form, results(form, ours)[0], results(form, theirs)[0])
    elif form.rule.startswith("sums"):
        from tests.ptx.oracle.warpgroups import apart as groups_apart

        wrong = groups_apart(form, results(form, ours), results(form, theirs))
    elif form.rule.startswith("sum"):
        from tests.ptx.oracle.products import apart

        wrong = apart(form, results(form, ours), results(form, theirs))
    else:
        pairs = zip(results(form, ours), results(form, theirs), form.results, strict=True)
        wrong = np.zeros(form.threads, bool)
        for a, b, t in pairs:
            wrong |= ~same(a, b, t, form.rule)
    return wrong.reshape(form.cases, THREADS[form.scope]).any(1)
