"""Causal attention of a chunk of tokens over its sequence's cache: kernels/flash.cu, or flash_wgmma.cu, as a launch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from tegrad.llm.attention import PLAIN, Scoring
from tegrad.llm.cache import pool_macros
from tegrad.llm.chips import kernels_of
from tegrad.llm.config import Config
from tegrad.llm.network import Attend
from tegrad.llm.programs import Programs
from tegrad.nv.replay import Launch

WIDE_HEAD_DIM: Final = 128
"""Elements of a head beyond which attention's tiles are halved, or its sums would not fit the registers."""
HELD_HEAD_DIM: Final = 256
"""Beyond which a block mixes half of it, and has its queries in shared memory instead of registers."""
HEAD_PARTS_MULTIPLE: Final = 64
"""What such a head is a multiple of."""
DEPTH: Final = 4
"""Tiles of keys or of values that a block of warpgroups has room for."""


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
    groups: int = 0
    """Warpgroups of a block that compute by Hopper's asynchronous tensor cores; 0: warps, by those of every chip."""

    @classmethod
    def of(
        cls, config: Config, op: Attend, positions: int, arch: str, *, rows: int | None = None, q8: bool = False,
        blocks: int | None = None,
    ) -> Flash:  # fmt: skip
        """A layer's as prompts launch it on a chip, with so many positions and, if others, `rows` of the cache."""
        tile = 64 if config.head_dim <= WIDE_HEAD_DIM else 32 if config.head_dim <= HELD_HEAD_DIM else 16
        kernels, scoring = kernels_of(arch), Scoring.of(config, op, positions)
        sizes = config.heads, config.kv_heads, config.head_dim, rows or positions
        made = cls(*sizes, q8, tile=tile, scoring=scoring, blocks=blocks)
        if not q8 and (own := kernels.flash_tiles.get(config.head_dim)):
            return replace(made, groups=2, tile=own)
        return replace(made, warps=kernels.flash_warps) if config.head_dim == WIDE_HEAD_DIM else made

    def spread(self, tokens: int, sms: int) -> Flash:
        """With one warpgroup to a block where two would leave half of the SMs idle. Rows are computed alike."""
        if not self.groups:
            return self
        blocks = -(-tokens * self.group // (64 * self.groups)) * self.kv_heads
        return replace(self, groups=1) if 2 * blocks <= sms else self

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
        buffers = (out, q, keys, values, key_scales or keys, value_scales or values, chunk)
        buffers += () if table is None else (table,)
        rows, threads = (
            (64 * self.groups, 128 * (self.groups + 1)) if self.groups else (16 * self.warps, 32 * self.warps)
        )
        program = self._program(programs, len(buffers), overlap)
        grid = (-(-tokens * self.group // rows), self.kv_heads, 1 if self.head_dim <= HELD_HEAD_DIM else 2)
        return Launch(program, buffers, grid, (threads, 1, 1))

    def _program(self, programs: Programs, buffers: int, overlap: int) -> Any:
        how = {"buffers": buffers, "TILE": self.tile, "OVERLAP": overlap, **self.defines}
        side = self.tile * self.head_dim * 2
        if not self.groups:
            row = self.head_dim * 2 + 16
            shared = 4 * self.tile * row
            if self.head_dim > HELD_HEAD_DIM:
                shared = 16 * self.warps * row + 2 * self.tile * (row + self.head_dim + 16)
            return programs("flash", dynamic_shared=shared, WARPS=self.warps, **how)
        if how.pop("CACHE_Q8"):
            raise ValueError("warpgroups read keys and values as halves")
        shared = 1024 + 64 * self.groups * self.head_dim * 2 + DEPTH * side
        return programs("flash_wgmma", dynamic_shared=shared, features="a", GROUPS=self.groups, DEPTH=DEPTH, **how)
