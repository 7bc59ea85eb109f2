"""Random operands of the attention kernel on a device, and what float64 says of its results. Needs no pytest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from operands import Operands

from tegrad.llm.attention import BUFFERS, PLAIN, Attention, Scoring
from tegrad.llm.cache import BLOCK_POSITIONS
from tegrad.llm.numerics import capped
from tegrad.llm.state import State

SIDES = ("k", "v", "k_scale", "v_scale")
HOPPER = {"sms": 132, "arch": "sm_90", "floats": True}
PUBLISHED = {
    "llama-1b": Attention(32, 8, 64, 4200, **HOPPER),
    "llama-8b-q8_0": Attention(32, 8, 128, 2100, cache="q8_0", **HOPPER),
    "qwen2.5-0.5b": Attention(14, 2, 64, 4200, "halves", **HOPPER),
    "qwen3-0.6b": Attention(16, 8, 128, 2100, "halves", eps=1e-6, **HOPPER),
}
"""As an H200 runs them."""


def rotate(x: np.ndarray, table: np.ndarray, rope: str) -> np.ndarray:
    """Heads (..., dim) turned by cosines and sines (2, pairs)."""
    pairs, out = table.shape[-1], x.copy()
    if rope == "none":
        return out
    even, odd = (
        (slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2))
        if rope == "interleaved"
        else (
            slice(0, pairs),
            slice(pairs, 2 * pairs),
        )
    )
    a, b = x[..., even], x[..., odd]
    out[..., even], out[..., odd] = a * table[0] - b * table[1], a * table[1] + b * table[0]
    return out


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


@dataclass
class Cached:
    """Keys or values as a cache holds them: raw elements, scales, and what they stand for."""

    raw: np.ndarray
    scale: np.ndarray

    @property
    def values(self) -> np.ndarray:
        if not self.scale.size:
            return self.raw.astype(np.float64)
        blocks = self.raw.reshape(*self.scale.shape, 32).astype(np.float64) * self.scale.astype(np.float64)[..., None]
        return blocks.reshape(self.raw.shape)


def random_cache(rng: np.random.Generator, at: Attention) -> Cached:
    shape = (at.sequences, at.kv_heads, at.positions, at.head_dim)
    if at.cache == "f16":
        return Cached(rng.standard_normal(shape).astype(np.float16), np.zeros(0, np.float16))
    scale = (0.005 + 0.02 * rng.random((*shape[:-1], at.head_dim // 32))).astype(np.float16)
    return Cached(rng.integers(-127, 128, shape, np.int8), scale)


def rounded(row: np.ndarray, at: Attention) -> Cached:
    """A row as the cache stores it (llama.cpp's rounding of q8_0)."""
    if at.cache == "f16":
        return Cached(row.astype(np.float16), np.zeros(0, np.float16))
    blocks = row.reshape(*row.shape[:-1], -1, 32).astype(np.float32)
    step = np.abs(blocks).max(-1) / np.float32(127)
    raw = np.floor(np.abs(blocks / np.where(step, step, 1)[..., None]) + np.float32(0.5)) * np.sign(blocks)
    return Cached(raw.astype(np.int8).reshape(row.shape), step.astype(np.float16))


@dataclass
class Case:
    """Random operands of one launch."""

    at: Attention

    def __post_init__(self) -> None:
        at, rng = self.at, np.random.default_rng(11)
        self.qkv = 1.5 * rng.standard_normal((at.sequences, at.heads + 2 * at.kv_heads, at.head_dim)).astype(np.float32)
        sizes = [at.head_dim * heads for heads in ((at.heads, at.kv_heads) if at.norms == "whole" else (1, 1))]
        self.norms = [(0.5 + rng.random(size)).astype(np.float32) for size in sizes]
        pairs = at.head_dim // 2 if at.rope_pairs is None else at.rope_pairs
        angle = rng.random((at.turned or at.positions, max(pairs, 1))) * 6
        self.rope = np.stack([np.cos(angle), np.sin(angle)]).astype(np.float32)
        self.k, self.v = random_cache(rng, at), random_cache(rng, at)

    def fresh(self, sequence: int, position: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The rotated queries (heads, dim), and the new key and value (kv heads, dim), before rounding."""
        at = self.at
        q, k, v = np.split(self.qkv[sequence].astype(np.float64), [at.heads, at.heads + at.kv_heads])
        table = self.rope[:, position].astype(np.float64)

        def normed(rows: np.ndarray, norm: np.ndarray) -> np.ndarray:
            shape = (1, -1) if at.norms == "whole" else rows.shape
            return rows if at.eps is None else rms_norm(rows.reshape(shape), norm, at.eps).reshape(rows.shape)

        def prepared(rows: np.ndarray, norm: np.ndarray) -> np.ndarray:
            if at.norms == "turned":
                return normed(rotate(rows, table, at.rope), norm)
            return rotate(normed(rows, norm), table, at.rope)

        return prepared(q, self.norms[0]), prepared(k, self.norms[1]), v


def attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray, scoring: Scoring = PLAIN) -> np.ndarray:
    """Output (heads, dim) of queries (heads, dim) over keys and values (kv heads, positions, dim)."""
    grouped = q.reshape(len(keys), -1, q.shape[-1])
    scale = 1 / np.sqrt(q.shape[-1]) if scoring.scale is None else scoring.scale
    scores = capped(grouped @ keys.transpose(0, 2, 1) * scale, scoring.cap)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ values).reshape(q.shape)


class Scattered:
    """Sequences' rows in a pool of blocks, in no order, beside blocks that are nobody's."""

    def __init__(self, at: Attention) -> None:
        count = at.sequences * (at.blocks or 0)
        self.table = np.random.default_rng(4).permutation(count + 2)[:count].reshape(at.sequences, -1).astype(np.int32)

    def pool(self, rows: np.ndarray) -> np.ndarray:
        """(sequences, kv heads, positions, ...) as (blocks, kv heads, positions of a block, ...)."""
        sequences, heads, _, width = rows.shape
        cut = rows.reshape(sequences, heads, -1, BLOCK_POSITIONS, width).swapaxes(1, 2)
        made = np.full((self.table.size + 2, *cut.shape[2:]), 77, rows.dtype)
        made[self.table] = cut
        return made

    def rows(self, pool: np.ndarray) -> np.ndarray:
        """The reverse; what is nobody's is as it was."""
        nobody = np.setdiff1d(np.arange(len(pool)), self.table)
        assert (pool[nobody] == 77).all()
        cut = pool[self.table].swapaxes(1, 2)
        return np.ascontiguousarray(cut).reshape(*cut.shape[:2], -1, cut.shape[-1])


class Bench:
    """A case's operands on the device, launched several times; the cache goes on from launch to launch."""

    def __init__(self, at: Attention, program: Any, operands: Operands) -> None:
        self.case, self.program, self.operands = Case(at), program, operands
        case = self.case
        self.given = {
            "states": np.zeros(64 * at.sequences, np.uint8),
            "qkv": case.qkv,
            "q_norm": case.norms[0],
            "k_norm": case.norms[1],
            "rope": case.rope,
            "k": case.k.raw,
            "v": case.v.raw,
            "k_scale": case.k.scale,
            "v_scale": case.v.scale,
            "workspace": np.full(at.workspace_bytes // 4, np.nan, np.float32),
            "counters": np.zeros(at.counter_bytes // 4, np.uint32),
            "x": np.full((at.sequences, at.heads, at.head_dim), np.nan, np.float32),
            "q": np.zeros((at.sequences, at.heads * at.head_dim), np.int8),
            "s": np.full((at.sequences, at.heads * at.head_dim // 16), np.nan, np.float32),
        }
        names = BUFFERS
        if at.blocks is not None:
            self.scattered = Scattered(at)
            for name in SIDES:
                self.given[name] = self.scattered.pool(self.given[name]) if self.given[name].size else self.given[name]
            self.given["table"], names = self.scattered.table, (*BUFFERS, "table")
        self.buffers = {name: operands.put(self.given[name]) for name in names}

    def copy(self, name: str, array: np.ndarray) -> None:
        self.program.dev.allocator._copyin(self.buffers[name], memoryview(array.tobytes()))

    def run(self, positions: list[int | None]) -> None:
        """Launch with each sequence at its position, None for one that is not active; compare everything."""
        at = self.case.at
        rows = [State(position=p or 0, active=p is not None) for p in positions]
        self.given["states"] = np.frombuffer(b"".join(bytes(row) for row in rows), np.uint8)
        for name in ("states", "x"):
            self.copy(name, self.given[name])
        self.program(*self.buffers.values(), global_size=at.grid, local_size=at.block, wait=True)
        found = {name: self.operands.get(self.buffers[name], g.shape, g.dtype) for name, g in self.given.items()}
        if at.blocks is not None:
            np.testing.assert_array_equal(found.pop("table"), self.given["table"])
            found |= {name: self.scattered.rows(found[name]) for name in SIDES if found[name].size}
        for name in ("states", "qkv", "q_norm", "k_norm", "rope", "counters"):
            np.testing.assert_array_equal(found[name], self.given[name])
        check(self.case, positions, found)
        self.case.k, self.case.v = Cached(found["k"], found["k_scale"]), Cached(found["v"], found["v_scale"])


def check(case: Case, positions: list[int | None], found: dict[str, np.ndarray]) -> None:
    """The cache differs in the new rows only, and those and the outputs are what float64 says."""
    at = case.at
    for sequence, position in enumerate(positions):
        k, v = Cached(found["k"], found["k_scale"]), Cached(found["v"], found["v_scale"])
        row = None if position is None else position % at.positions
        past = np.s_[sequence, :, np.arange(at.positions) != row] if row is not None else np.s_[sequence]
        for now, before in ((k, case.k), (v, case.v)):
            np.testing.assert_array_equal(now.raw[past], before.raw[past])
            if now.scale.size:
                np.testing.assert_array_equal(now.scale[past], before.scale[past])
        if position is None:
            assert at.halves or np.isnan(found["x"][sequence]).all()
            continue
        q, *rows = case.fresh(sequence, position)
        for now, row in zip((k, v), rows, strict=True):
            stored, meant = now.values[sequence, :, position % at.positions], rounded(row, at).values
            assert (stored == meant).mean() > 0.98  # all but those at the edge of two neighbours
            assert np.abs(stored - row).max() <= np.abs(row).max() * (2**-11 if at.cache == "f16" else 1 / 254 + 2**-11)
        seen = np.arange(max(0, position + 1 - (at.scoring.window or position + 1)), position + 1) % at.positions
        x = attend(q, k.values[sequence][:, seen], v.values[sequence][:, seen], at.scoring)
        if at.halves:
            written = halves(found["x"]).reshape(-1)[: at.sequences * x.size].reshape(at.sequences, *x.shape)
            assert (np.abs(written[sequence] - x) <= 2**-11 * np.abs(x) + 5e-6 * np.abs(x).max()).all()
            continue
        assert np.abs(found["x"][sequence] - x).max() < 5e-6 * np.abs(x).max()
        blocks = found["x"][sequence].reshape(-1, 16)
        step = np.abs(blocks).max(-1) / np.float32(127)
        np.testing.assert_array_equal(found["s"][sequence], step)
        error = np.abs(found["q"][sequence].reshape(-1, 16) * step[:, None] - blocks)
        assert (error <= 0.5001 * step[:, None]).all()


def halves(buffer: np.ndarray) -> np.ndarray:
    """Halves in the order of fragments, in that of their columns."""
    columns = [8 * (column >> 1 & 1) + column // 4 * 2 + column % 2 for column in range(16)]
    return buffer.view(np.float16).reshape(-1, 16)[:, columns]
