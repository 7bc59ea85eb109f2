"""Causal attention of a chunk of tokens over its sequence's cache: kernels/flash.cu as a launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from tegrad.llm.arch import Config
from tegrad.llm.attention import PLAIN, Scoring
from tegrad.llm.cache import pool_macros
from tegrad.llm.chips import kernels_of
from tegrad.llm.network import Attend
from tegrad.llm.programs import Programs
from tegrad.nv.replay import Launch

WIDE_HEAD_DIM: Final = 128
"""Elements of a head beyond which attention's tiles are halved, or its sums would not fit the registers."""


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

    @classmethod
    def of(
        cls, config: Config, op: Attend, positions: int, arch: str, *, rows: int | None = None, q8: bool = False,
        blocks: int | None = None,
    ) -> Flash:  # fmt: skip
        """A layer's as prompts launch it on a chip, with so many positions and, if others, `rows` of the cache."""
        wide = config.head_dim > WIDE_HEAD_DIM
        warps = kernels_of(arch).flash_warps if config.head_dim == WIDE_HEAD_DIM else 4
        return cls(
            config.heads, config.kv_heads, config.head_dim, rows or positions, q8, warps, 32 if wide else 64,
            Scoring.of(config, op, positions), blocks,
        )  # fmt: skip

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
