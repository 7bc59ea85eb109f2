"""Attention of one new token a sequence: sizes, macros and buffers of `kernels/attention.cu`.

The cache of a layer is a buffer for keys and one for values, (sequences, kv heads, positions, head dim) in f16, or in
int8 with f16 scales (sequences, kv heads, positions, head dim / 32) in buffers of their own; or pools of blocks
(`cache`), with a table that is the kernel's last buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Final, Self

from tegrad.llm.cache import LayerCache, pool_macros
from tegrad.llm.chips import WARPS, kernels_of
from tegrad.llm.config import Config
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.macros import QK_NORMS, ROPES, WIDE, group_counts, number
from tegrad.llm.network import Attend
from tegrad.llm.programs import Programs, load_kernel
from tegrad.llm.rope import Temperature
from tegrad.nv.gpu import Buffer, Gpu
from tegrad.nv.replay import Launch

CACHES: Final = ("f16", "q8_0")
BUFFERS: Final = (
    *("states", "qkv", "q_norm", "k_norm", "rope", "k", "v", "k_scale", "v_scale"),
    *("workspace", "counters", "x", "q", "s"),
)
"""The kernel's buffers in order; where the variant does not use one, any buffer stands in its place."""
FEWEST_WARPS: Final = 4
"""Of a CTA where there are more of them than SMs, so that one SM holds several."""
MIXED_BYTES: Final = 32 << 10
MOST_HEAD_DIM: Final = 512
MOST_GROUP_READS: Final = 32768
"""Positions of a cache, times the CTAs that each read all of them for a group of the query heads, at most. On an H200
seven groups were quicker at 4,000 positions; more were not tried."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """What only some layers do with scores: a scale that is not a head's usual one, a cap, a window of positions, a
    temperature of queries.

    With a window, the rows of a cache are a ring in which position p lies in row p % rows.
    """

    scale: float | None = None
    cap: float | None = None
    window: int | None = None
    temperature: Temperature | None = None
    causal: bool = True

    @classmethod
    def of(cls, config: Config, op: Attend, positions: int) -> Self:
        """A layer's, where there are so many positions."""
        usual = op.scale == 1 / sqrt(config.head_dim)
        return cls(None if usual else op.scale, op.cap, op.window_within(positions), op.temperature, op.causal)

    @property
    def defines(self) -> dict[str, Any]:
        """Macros of attention.cuh and flash.cu; none for most layers."""
        made = {"ATTENTION_SCALE": self.scale, "SCORE_CAP": self.cap}
        floats = {name: number(value) for name, value in made.items() if value is not None}
        if (by := self.temperature) is not None:
            floats |= {"TEMPERATURE": number(by.scale), "TEMPERATURE_PERIOD": str(by.period)}
        made = {} if self.causal else {"BOTH_WAYS": 1}
        return floats | made | ({} if self.window is None else {"WINDOW": self.window})


PLAIN: Final = Scoring()


@dataclass(frozen=True)
class Attention:
    """One layer's attention over a cache of `positions` of each sequence, in splits for a chip `arch` of `sms` SMs.

    `rope_pairs` pairs of a head are rotated; `eps` is that of the RMS norm of query and key heads where a model has
    one. `floats`, `quantized` and `halves` say in which forms the output is written; halves, in the order of fragments
    (kernels/async.cuh), take the place of floats. What the kernel lacks is an UnsupportedModelError.
    """

    heads: int
    kv_heads: int
    head_dim: int
    positions: int
    rope: str = "interleaved"
    rope_pairs: int | None = None
    eps: float | None = None
    cache: str = "f16"
    sms: int = 16
    sequences: int = 1
    floats: bool = False
    quantized: bool = True
    halves: bool = False
    arch: str = "sm_87"
    tuning: Mapping[str, int] | None = None
    """Macros of attention.cuh to set otherwise: ATTENTION_WARPS, ATTENTION_LOADS, SPLITS, SPLIT_ROWS; and HEAD_GROUPS,
    which becomes `head_groups`."""
    scoring: Scoring = PLAIN
    norms: str = "head"
    """As `network.Attend.norms` has them, where there are."""
    turned: int | None = None
    """Positions of the table of angles, where the cache holds only some of them."""
    blocks: int | None = None
    """Blocks of a sequence in the table, where the cache is a pool of them."""
    gated: bool = False
    """As `network.Attend.gated`."""
    made: int = 2
    """As `network.Attend.made`."""
    unit_values: bool = False
    """As `network.Attend.unit_values`."""

    @classmethod
    def of(
        cls, config: Config, op: Attend, positions: int, cache: str, device: Gpu, sequences: int = 1, *,
        rows: int | None = None, floats: bool = False, quantized: bool = True, halves: bool = False,
        tuning: Mapping[str, int] | None = None, blocks: int | None = None,
    ) -> Self:  # fmt: skip
        """A layer's of a model, on a device; of `positions` the cache holds all, or has `rows` for them."""
        rows = positions if rows is None else rows
        return cls(
            config.heads, config.kv_heads, config.head_dim, rows, op.rotation,
            op.rope.dim // 2 if op.rope.dim else None, config.head_eps if op.query_norm is not None else None,
            cache, device.sm_count, sequences, floats, quantized, halves, device.arch, tuning,
            Scoring.of(config, op, positions), op.norms, positions if rows < positions else None,
            blocks, op.gated, op.made, op.unit_values,
        )  # fmt: skip

    def __post_init__(self) -> None:
        if self.rope not in ROPES or self.cache not in CACHES:
            raise UnsupportedModelError(f"no attention kernel for rope {self.rope!r} with a cache of {self.cache!r}")
        if not self.scoring.causal:
            raise UnsupportedModelError("no attention kernel of decode steps looks ahead")
        if self.heads % self.kv_heads or self.head_dim % 16 or self.head_dim > MOST_HEAD_DIM:
            raise UnsupportedModelError(
                f"no attention kernel for {self.heads} heads on {self.kv_heads} key heads of {self.head_dim}: "
                f"whole groups of heads of up to {MOST_HEAD_DIM} elements, a multiple of 16, are run"
            )
        if self.cache == "q8_0" and self.head_dim % 32:
            raise UnsupportedModelError(
                f"a q8_0 cache has blocks of 32, which heads of {self.head_dim} are not made of: use an f16 cache"
            )

    @property
    def head_groups(self) -> int:
        """CTAs that share a KV head's query heads: fewer registers each, but keys and values are read again."""
        many = self.sequences == 1 and kernels_of(self.arch).overlaps and self.norms != "whole"
        most = MOST_GROUP_READS // self.positions if many else 1
        fewest, *more = group_counts(self.heads // self.kv_heads, self.head_dim)
        return (self.tuning or {}).get("HEAD_GROUPS", max((at for at in more if at <= most), default=fewest))

    @property
    def kv_groups(self) -> int:
        """Groups of query heads of all KV heads."""
        return self.kv_heads * self.head_groups

    @property
    def group(self) -> int:
        """Query heads of a CTA."""
        return self.heads // self.kv_groups

    @property
    def splits(self) -> int:
        """Parts that the positions of one group are cut into at most: a CTA takes an SM's registers."""
        return (self.tuning or {}).get("SPLITS", max(1, self.sms // (self.kv_groups * self.sequences)))

    @property
    def warps(self) -> int:
        """Warps of a CTA."""
        bytes_of_one = 4 * self.group * self.head_dim
        crowded = self.sequences * self.kv_groups > self.sms
        fitting = (
            w
            for w in (
                (FEWEST_WARPS,) if crowded else kernels_of(self.arch).attention_warps if self.sequences > 1 else WARPS
            )
            if w * bytes_of_one <= MIXED_BYTES and (w <= 8 or self.group <= 4)
        )
        return (self.tuning or {}).get("ATTENTION_WARPS", next(fitting))

    @property
    def loads(self) -> int:
        """Rows of keys, and of values, that a lane has in flight."""
        many = self.group <= (kernels_of(self.arch).deep_group if self.sequences == 1 else 2)
        if self.head_dim > WIDE or (self.blocks is not None and self.head_dim == 16):  # a tile lies in one block
            many = False
        return (self.tuning or {}).get("ATTENTION_LOADS", 8 if many else 4)

    @property
    def defines(self) -> dict[str, Any]:
        """Macros of the kernel."""
        made: dict[str, Any] = {
            "HEADS": self.heads,
            "KV_HEADS": self.kv_groups,
            "HEAD_DIM": self.head_dim,
            "POSITIONS": self.positions,
            "ROPE": ROPES[self.rope],
            "CACHE_Q8": self.cache == "q8_0",
            "SPLITS": self.splits,
            "ATTENTION_WARPS": self.warps,
            "ATTENTION_LOADS": self.loads,
            "OUTPUT_X": self.floats and not self.halves,
            "OUTPUT_H": self.halves,
            "OUTPUT_Q": self.quantized,
            **self.scoring.defines,
            **pool_macros(self.blocks),
            **{name: value for name, value in (self.tuning or {}).items() if name != "HEAD_GROUPS"},
        }
        if self.gated:
            made["GATED"] = 1
        if self.made != 2:
            made["MADE"] = self.made
        if self.unit_values:
            made["UNIT_VALUES"] = 1
        if self.head_groups > 1:
            made["CACHE_HEADS"] = self.kv_heads
        if self.turned is not None:
            made["ROPE_POSITIONS"] = self.turned
        if self.rope_pairs is not None:
            made["ROPE_PAIRS"] = self.rope_pairs
        if self.eps is not None:
            made |= {"QK_NORM": QK_NORMS[self.norms], "EPS": number(self.eps)}
        return made

    @property
    def grid(self) -> tuple[int, int, int]:
        """CTAs of the launch."""
        return self.splits, self.kv_groups, self.sequences

    @property
    def block(self) -> tuple[int, int, int]:
        """Threads of a CTA."""
        return 32 * self.warps, 1, 1

    @property
    def cache_bytes(self) -> tuple[int, int]:
        """Bytes of a layer's keys, or values, of all sequences; and of their scales."""
        elements = self.sequences * self.kv_heads * self.positions * self.head_dim
        return (elements, elements // 16) if self.cache == "q8_0" else (2 * elements, 0)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace; what lies there matters only during the launch, so all layers may share it."""
        return 4 * self.sequences * self.kv_groups * self.splits * (self.group * self.head_dim + 2 * self.group)

    @property
    def counter_bytes(self) -> int:
        """Bytes of the counters: zeros before the first launch and after every launch."""
        return 4 * self.sequences * self.kv_groups

    def load(self, device: Gpu) -> Any:
        """The program for an opened NV device; its buffers are those of BUFFERS."""
        buffers = len(BUFFERS) + (self.blocks is not None)
        return load_kernel(device, "attention", buffers=buffers, **self.defines)

    def launch(
        self, programs: Programs, states: Buffer, qkv: Buffer, norms: Sequence[Buffer], turns: Buffer, kept: LayerCache,
        space: tuple[Buffer, Buffer], out: tuple[Buffer, Buffer, Buffer],
    ) -> Launch:  # fmt: skip
        """A layer's launch. `norms` are the weights for queries and keys, `space` are workspace and counters."""
        buffers = (states, qkv, *norms, turns, kept.keys, kept.values, kept.key_scales, kept.value_scales, *space, *out,
                   *kept.tables)  # fmt: skip
        program = programs("attention", buffers=len(buffers), **self.defines)
        return Launch(program, buffers, self.grid, self.block)
