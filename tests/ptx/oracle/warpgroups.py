"""wgmma: what a form's matrices are and what comes out, from the figures of PTX ISA 9.7.15.

A swizzled layout is made of atoms: eight rows of as many bytes as the swizzle's name says, in units of 16 bytes, whose
places within a row change with the row. Rows of an atom run along K of a K-major matrix, along M or N of the others.
Written from the drawn atoms, and not from a rule for addresses.
"""

import numpy as np

from tests.ptx.oracle.form import CASES, Form
from tests.ptx.oracle.judge import results
from tests.ptx.oracle.models import sources
from tests.ptx.oracle.products import elements
from tests.ptx.oracle.table_warpgroup import FOLD, PRODUCTS, ROW_BYTES, Product, Side

COUNT = CASES["warpgroup"]
THREAD = np.arange(128)
WARP, GROUP, PLACE = THREAD // 32, THREAD % 32 // 4, THREAD % 4


def units(side: Side, rows: int, column: int) -> np.ndarray:
    """Byte offsets of 16-byte units: K-major (rows, 2 along k), else (rows / 8, 16 steps of k)."""
    wide = side.swizzle // 16
    if side.turned:
        i, k = np.ogrid[: rows // 8, :16]
        if not wide:
            return np.asarray(side.start + i * side.stride + k // 8 * side.lead + k % 8 * 16)
        atom = side.start + i // wide * side.lead + k // 8 * side.stride
        return np.asarray(atom + k % 8 * side.swizzle + 16 * (i % wide ^ k % 8 * wide // 8))
    r, c = np.ogrid[:rows, :2]
    if not wide:
        return np.asarray(side.start + r // 8 * side.stride + r % 8 * 16 + (c + column) * side.lead)
    atom = side.start + r // 8 * side.stride
    return np.asarray(atom + r % 8 * side.swizzle + 16 * ((c + column) ^ r % 8 * wide // 8))


def matrix(memory: np.ndarray, side: Side, rows: int, column: int, t: str) -> np.ndarray:
    """(cases, rows, k) of words (cases, all of shared memory)."""
    words = units(side, rows, column)[..., None] // 4 + np.arange(4)
    found = elements(memory[:, words], t)
    found = found.reshape(*found.shape[:3], -1)
    if side.turned:
        return found.transpose(0, 1, 3, 2).reshape(COUNT, rows, -1)
    return found.reshape(COUNT, rows, -1)


def fragments(registers: list[np.ndarray], t: str, k: int) -> np.ndarray:
    """A (cases, 64, k) of four registers of each thread."""
    out = np.zeros((COUNT, 64, k))
    for r, words in enumerate(registers):
        parts = elements(words.reshape(COUNT, 128), t)
        for s in range(parts.shape[-1]):
            first = parts.shape[-1] * (4 * (r // 2) + PLACE)
            out[:, 16 * WARP + 8 * (r % 2) + GROUP, first + s] = parts[..., s]
    return out


def where(p: Product) -> tuple[np.ndarray, np.ndarray]:
    """Row and column of each of a thread's sums: (sums, threads)."""
    v = np.arange(p.n // 2)[:, None]
    return 16 * WARP + 8 * (v // 2 % 2) + GROUP, 8 * (v // 4) + 2 * PLACE + v % 2


def sums(words: list[np.ndarray], p: Product) -> np.ndarray:
    """Registers of sums (threads of all cases) as (cases, 64, n)."""
    flat = [x for w in words for x in np.moveaxis(elements(w.reshape(COUNT, 128), p.types[0]), -1, 0)]
    out = np.zeros((COUNT, 64, p.n))
    rows, columns = where(p)
    out[:, rows, columns] = np.stack(flat, 1)
    return out


def before(p: Product, given: list[np.ndarray]) -> np.ndarray:
    """The sums before the product."""
    if p.own:
        return sums(given, p)
    times = np.arange(1, p.registers + 1)[:, None, None]
    one = np.moveaxis(elements(given[0].reshape(COUNT, 128), p.types[0]), -1, 0)
    flat = (times[:, None] * one).reshape(-1, COUNT, 128)
    out = np.zeros((COUNT, 64, p.n))
    rows, columns = where(p)
    out[:, rows, columns] = flat.transpose(1, 0, 2)
    if p.optional:
        out[::2] = 0
    return out


def operands(form: Form) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A (cases, 64, k), B (cases, k, n), of a chain one after the other along k; and the sums before."""
    p = PRODUCTS[form.name]
    given = [s.reshape(COUNT, -1) for s in sources(form)]
    count = sum(p.words)
    memory = np.concatenate([g.reshape(COUNT, ROW_BYTES // 4) for g in given[:count]], 1)
    rest = given[count:]
    lefts, rights = [], []
    for i, column in enumerate(p.b.columns):
        if p.a:
            lefts.append(matrix(memory, p.a, 64, p.a.columns[i], p.types[1]))
        else:
            lefts.append(fragments(rest[:4], p.types[1], p.k))
        rights.append(matrix(memory, p.b, p.n, column, p.types[2]))
    c = before(p, rest[0 if p.a else 4 :])
    return p.scale[0] * np.concatenate(lefts, 2), p.scale[1] * np.concatenate(rights, 2).transpose(0, 2, 1), c


def expected(form: Form) -> np.ndarray:
    """(cases, 64, n) by matrix products in float64."""
    a, b, c = operands(form)
    p = PRODUCTS[form.name]
    out = np.asarray(a @ b + c)
    if p.saturate:
        return np.clip(out, -(2**31), 2**31 - 1)
    return (out + 2**31) % 2**32 - 2**31 if p.integer else out


def folded(p: Product, whole: np.ndarray) -> np.ndarray:
    """Exact sums as the word of each warp that a form gives, for all threads."""
    rows, columns = where(p)
    each = whole[:, rows, columns].transpose(1, 0, 2).reshape(p.n // 2, -1)
    if p.types[0] == "f16":
        bits = each.astype(np.float16).view(np.uint16).astype(np.uint32)
        words = bits[::2] | bits[1::2] << np.uint32(16)
    else:
        words = (each.astype(np.int64) if p.integer else each).astype(np.int32 if p.integer else np.float32)
        words = words.view(np.uint32)
    h = np.zeros(words.shape[1], np.uint32)
    for w in words:
        h = h * np.uint32(FOLD) + w
    h = h.reshape(COUNT, 4, 32) * (2 * THREAD + 1).astype(np.uint32).reshape(4, 32)
    return np.repeat(h.sum(2, dtype=np.uint32).ravel(), 32)


def wrong(form: Form, data: bytes) -> int:
    """Threads whose results are not those of the matrix product: bits, or within the rounding of a sum in any order."""
    p = PRODUCTS[form.name]
    want, got = expected(form), results(form, data)
    if p.folded:
        return int((folded(p, want) != got[0]).sum())
    a, b, c = operands(form)
    slack = 0.0
    if p.how == "real":
        slack = (2.0**-10 if p.types[0] == "f16" else 17 * 2.0**-23) * (np.abs(a) @ np.abs(b) + np.abs(c))
    return int((np.abs(sums(got, p) - want) > slack).sum())


def apart(form: Form, ours: list[np.ndarray], theirs: list[np.ndarray]) -> np.ndarray:
    """Threads of blocks with a sum that differs by more than the rule `sums` allows."""
    a, b, c = operands(form)
    p = PRODUCTS[form.name]
    x, y = sums(ours, p), sums(theirs, p)
    allowed = (p.k + 1) * 2.0**-23 * (np.abs(a) @ np.abs(b) + np.abs(c))
    if p.types[0] == "f16":
        allowed = allowed + 2.0**-10 * np.maximum(np.abs(y), 2.0**-14)
    return np.repeat((np.abs(x - y) > allowed).any((1, 2)), 128)
