"""Products of activations with packed weights on tensor cores: which kernel, with which tiles, as launches.

`Gemm` describes one product of many tokens (kernels/gemm.cu). Its sizes and tiles are macros of the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import BLOCK_TYPES, BlockType
from tegrad.llm.packing import LANE_WEIGHTS, segment_bytes
from tegrad.llm.programs import Programs
from tegrad.nv.replay import Launch

Activation = Literal["none", "silu", "gelu"]
ACTIVATIONS: Final[tuple[Activation, ...]] = ("none", "silu", "gelu")
"""In the order of activation.cuh's numbers."""

_NUMBERS: Final = {kind: number for number, kind in BLOCK_TYPES.items()}
_HEADS: Final = {"Q4_0": 4, "Q8_0": 4, "Q4_K": 16, "Q5_K": 24, "Q6_K": 8}
"""Bytes that a stage holds for the scales of a run."""


def type_number(kind: BlockType) -> int:
    """ggml's number of a format: the macro KIND."""
    return _NUMBERS[kind]


def run_bytes(kind: BlockType) -> int:
    """Bytes that a stage in shared memory holds for 64 weights."""
    planes = {"Q4_0": 2, "Q8_0": 4, "Q4_K": 2, "Q5_K": 2, "Q6_K": 3}
    return 16 * planes[kind.name] + _HEADS[kind.name] if kind.name in planes else segment_bytes(kind) // 32


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is divided: macros of kernels/gemm.cu."""

    bm: int
    bn: int
    wm: int
    wn: int
    units: int = 1
    stages: int = 3
    splits: int = 1
    resident: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.bm // self.wm * (self.bn // self.wn) * 32


@dataclass(frozen=True, slots=True)
class Gemm:
    """y (tokens, rows) of x (tokens, columns) halves and a packed matrix (rows, columns).

    `gated`: activation(x W^T) * (x W2^T). `add`: y += the product. `half_out`: y is halves, else float32.
    """

    kind: BlockType
    rows: int
    columns: int
    tile: Tile = Tile(128, 128, 64, 64)
    gated: bool = False
    activation: Activation = "none"
    half_out: bool = False
    add: bool = False
    bias: bool = False
    stride: int = 0
    """Elements from a row of y to the next, where y holds more than this product."""

    def __post_init__(self) -> None:
        if self.columns % (LANE_WEIGHTS * self.tile.units):
            raise UnsupportedModelError(
                f"rows of {self.columns} weights are no multiple of {LANE_WEIGHTS * self.tile.units}: "
                "prefill runs rows of whole runs of 64"
            )

    def grid(self, tokens: int) -> tuple[int, int, int]:
        """Blocks for up to `tokens` tokens."""
        width = self.tile.bn // 2 if self.gated else self.tile.bn
        return -(-tokens // self.tile.bm), -(-self.rows // width), self.tile.splits

    def tiles(self, tokens: int) -> int:
        """Counters that a launch with split columns needs, zeros."""
        x, y, _ = self.grid(tokens)
        return x * y if self.tile.splits > 1 else 0

    def scratch_bytes(self, tokens: int) -> int:
        """Bytes of partial sums that a launch with split columns needs."""
        return self.tiles(tokens) * self.tile.splits * self.tile.bm * self.tile.bn * 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        tile = self.tile
        return tile.stages * tile.units * (tile.bm * 2 * LANE_WEIGHTS + tile.bn * run_bytes(self.kind))

    def macros(self) -> dict[str, int]:
        """The kernel's macros."""
        tile = self.tile
        return {
            "KIND": type_number(self.kind), "ROWS": self.rows, "COLUMNS": self.columns, "BM": tile.bm, "BN": tile.bn,
            "WM": tile.wm, "WN": tile.wn, "UNITS": tile.units, "STAGES": tile.stages, "SPLITS": tile.splits,
            "RESIDENT": tile.resident, "GATED": self.gated, "ACTIVATION": ACTIVATIONS.index(self.activation),
            "HALF_OUT": self.half_out, "ADD": self.add, "BIAS": self.bias,
            "STRIDE": self.stride or self.rows,
        }  # fmt: skip

    def launch(
        self,
        programs: Programs,
        *,
        y: Any,
        x: Any,
        w: Any,
        count: Any,
        tokens: int,
        w2: Any = None,
        bias: Any = None,
        scratch: Any = None,
        arrived: Any = None,
    ) -> Launch:
        """The product of up to `tokens` tokens as a launch; `count` is an int on the device: how many there are."""
        program = programs("gemm", buffers=8, dynamic_shared=self.shared_bytes, **self.macros())
        buffers = (y, x, w, w2 or w, bias or w, scratch or w, arrived or w, count)
        return Launch(program, buffers, self.grid(tokens), (self.tile.threads, 1, 1))


BLOCKS_PER_SM: Final = 2
"""What registers and shared memory of both chips allow of the tiles below."""
LEAST_STEPS: Final = 4
"""Stages of columns that a split keeps, so that its copies run ahead."""
HOPPER_SMS: Final = 132
STAGES: Final = {"sm_87": 3, "sm_90": 4}


def sm_count(device: Any) -> int:
    """SMs of an opened device."""
    return int(getattr(device.iface, "sm_count", HOPPER_SMS))


def pick_tile(device: Any, gemm: Gemm, tokens: int) -> Tile:
    """The tile that suits a product of up to so many tokens: as large as leaves every SM a block, else split columns.

    By reckoning, not by measurement. Any other function of these arguments can take its place (`Prefill`'s `pick`).
    """
    sms = sm_count(device)
    bm, wm = next(((most, most) for most in (16, 32, 64) if tokens <= most), (128, 64))
    across = bm // wm

    def tile(bn: int) -> Tile:
        stages = 2 if run_bytes(gemm.kind) > 128 else STAGES.get(device.arch, 3)
        return Tile(bm, bn, wm, bn * across // 4, stages=stages, resident=1 if stages == 2 else BLOCKS_PER_SM)

    def blocks(bn: int) -> int:
        x, y, _ = replace(gemm, tile=tile(bn)).grid(tokens)
        return x * y

    bn = 128 if blocks(128) >= sms else 64
    splits, steps = 1, gemm.columns // LANE_WEIGHTS
    while blocks(bn) * splits * 2 <= BLOCKS_PER_SM * sms and steps >= 2 * splits * LEAST_STEPS:
        splits *= 2
    return replace(tile(bn), splits=splits)


def scratch_bound(device: Any) -> tuple[int, int]:
    """Bytes of partial sums and of counters that any launch with `pick_tile`'s tiles needs."""
    blocks = BLOCKS_PER_SM * sm_count(device)
    return blocks * 128 * 64 * 4, blocks * 4
