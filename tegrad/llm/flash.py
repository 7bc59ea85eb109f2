"""Causal attention of a chunk of tokens over its sequence's cache: kernels/flash.cu as a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tegrad.llm.attention import PLAIN, Scoring
from tegrad.llm.cache import pool_macros
from tegrad.llm.programs import Programs
from tegrad.nv.replay import Launch


@dataclass(frozen=True, slots=True)
class Flash:
    """Attention of one model's layers; `positions` are rows of the cache, which is f16 or q8_0; where they are a ring,
    it has whole tiles."""

    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    q8: bool = False
    warps: int = 4
    tile: int = 64
    scoring: Scoring = PLAIN
    blocks: int | None = None
    """Blocks of a sequence in the table, where the cache is a pool of them."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def defines(self) -> dict[str, Any]:
        """Macros of every kernel that reads or writes such a cache."""
        sizes = {"HEADS": self.heads, "KV_HEADS": self.kv_heads, "HEAD_DIM": self.head_dim, "POSITIONS": self.positions}
        return {**sizes, "CACHE_Q8": self.q8, **self.scoring.defines, **pool_macros(self.blocks)}

    def launch(
        self,
        programs: Programs,
        *,
        out: Any,
        q: Any,
        keys: Any,
        values: Any,
        chunk: Any,
        tokens: int,
        key_scales: Any = None,
        value_scales: Any = None,
        table: Any = None,
        overlap: int = 0,
    ) -> Launch:
        """The attention of up to `tokens` tokens: out and q halves (tokens, heads, head_dim); `chunk` says how many.

        `table` is a pool's. `overlap` as in kernels/overlap.cuh.
        """
        program = programs(
            "flash", buffers=7 + (table is not None), dynamic_shared=4 * self.tile * (2 * self.head_dim + 16),
            WARPS=self.warps, TILE=self.tile, OVERLAP=overlap, **self.defines,
        )  # fmt: skip
        buffers = (out, q, keys, values, key_scales or keys, value_scales or values, chunk)
        buffers += () if table is None else (table,)
        grid = (-(-tokens * self.group // (16 * self.warps)), self.kv_heads, 1)
        return Launch(program, buffers, grid, (32 * self.warps, 1, 1))
