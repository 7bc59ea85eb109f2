"""Products of many tokens' activations with packed weights on tensor cores, as launches of kernels with tiles.

`Gemm` says what is computed. How is said by a `Tile` (kernels/gemm.cu, for many tokens), a `WgmmaTile` (the same with
Hopper's own instructions), a `StreamTile` or a `SmallMTile` (kernels/gemm_stream.cu and gemm_small_m.cu, for up to 32
with one read of the weights); all turn a `Gemm` and its `Operands` into a launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product as combinations
from typing import Any, Final, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from tegrad.llm.chips import kernels_of, shared_bytes
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.formats import LANE_WEIGHTS, SEGMENT, BlockType
from tegrad.llm.macros import ACTIVATIONS, Activation, number
from tegrad.llm.programs import Programs
from tegrad.nv.gpu import Gpu
from tegrad.nv.program import SHARED_RESERVE, LaunchError
from tegrad.nv.replay import Launch


def fragment_order(columns: int) -> NDArray[np.int64]:
    """Where each column lies in a row of halves: of each 16, the pairs 0, 2, 4, 6, then 1, 3, 5, 7 (async.cuh)."""
    at = np.arange(columns)
    return (at & ~15) | (at & 2) << 2 | (at & 12) >> 1 | (at & 1)


@dataclass(frozen=True, slots=True)
class Gemm:
    """y (tokens, rows) of x (tokens, columns) halves and a packed matrix (rows, columns).

    `gated`: activation(x W^T) * (x W2^T), else activation(x W^T + bias). `add`: y += the product. `half_out`: y is
    halves, else float32. Halves are in `fragment_order`. UnsupportedModelError for columns that are not whole runs of
    64, and for halves of rows that are no multiple of 16.
    """

    kind: BlockType
    rows: int
    columns: int
    gated: bool = False
    activation: Activation = "none"
    half_out: bool = False
    add: bool = False
    bias: bool = False
    stride: int = 0
    """Elements from a row of y to the next, where y holds more than this product."""
    cap: float = 0.0
    """Of the activation "cap"."""

    def __post_init__(self) -> None:
        if self.columns % LANE_WEIGHTS:
            raise UnsupportedModelError(
                f"rows of {self.columns} weights: prompts and batches run rows of a multiple of {LANE_WEIGHTS}"
            )
        if self.half_out and (self.rows % 16 or self.stride % 16):
            raise UnsupportedModelError(f"{self.rows} elements between products of a prompt: a multiple of 16 is run")

    @property
    def flops(self) -> int:
        """Multiplications and additions for one token."""
        return 2 * self.rows * self.columns * (2 if self.gated else 1)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, read once."""
        return self.kind.row_bytes(self.rows * self.columns) * (2 if self.gated else 1)

    def macros(self) -> dict[str, int | str]:
        """The macros that both kernels have in common."""
        cap = {"CAP": number(self.cap)} if self.activation == "cap" else {}
        return {
            **cap,
            "KIND": self.kind.number, "ROWS": self.rows, "COLUMNS": self.columns, "GATED": self.gated,
            "ACTIVATION": ACTIVATIONS[self.activation], "HALF_OUT": self.half_out, "ADD": self.add,
            "BIAS": self.bias, "STRIDE": self.stride or self.rows,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Operands:
    """Buffers of a product; `count` is an int on the device, the tokens that there are."""

    y: Any
    x: Any
    w: Any
    count: Any
    w2: Any = None
    bias: Any = None
    """float32 (rows,), of gate and up (2, rows)."""
    scratch: Any = None
    """`scratch_bytes` of the tile, for partial sums."""
    arrived: Any = None
    """`counters` of the tile, zeros before and after."""


@dataclass(frozen=True, slots=True)
class Tile:
    """A product of many tokens by kernels/gemm.cu, which tells what the macros mean."""

    bm: int = 128
    bn: int = 128
    wm: int = 64
    wn: int = 64
    units: int = 1
    stages: int = 3
    splits: int = 1
    resident: int = 1

    def grid(self, gemm: Gemm, tokens: int) -> tuple[int, int, int]:
        """Blocks for up to `tokens` tokens."""
        width = self.bn // 2 if gemm.gated else self.bn
        return -(-tokens // self.bm), -(-gemm.rows // width), self.splits

    def counters(self, gemm: Gemm, tokens: int) -> int:
        """Counters that split columns need."""
        x, y, _ = self.grid(gemm, tokens)
        return x * y if self.splits > 1 else 0

    def scratch_bytes(self, gemm: Gemm, tokens: int) -> int:
        """Bytes of partial sums that split columns need."""
        return self.counters(gemm, tokens) * self.splits * self.bm * self.bn * 4

    def shared_bytes(self, gemm: Gemm) -> int:
        """Shared memory of a block."""
        return self.stages * self.units * (self.bm * 2 * LANE_WEIGHTS + self.bn * gemm.kind.run_bytes)

    def launch(self, programs: Programs, gemm: Gemm, on: Operands, tokens: int, overlap: int = 0) -> Launch:
        """The product of up to `tokens` tokens; `overlap` as in kernels/overlap.cuh."""
        program = programs(
            "gemm", buffers=8, dynamic_shared=self.shared_bytes(gemm), BM=self.bm, BN=self.bn, WM=self.wm, WN=self.wn,
            UNITS=self.units, STAGES=self.stages, SPLITS=self.splits, RESIDENT=self.resident, OVERLAP=overlap,
            **gemm.macros(),
        )  # fmt: skip
        threads = self.bm // self.wm * (self.bn // self.wn) * 32
        return Launch(program, _buffers(on), self.grid(gemm, tokens), (threads, 1, 1))


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """A product of many tokens by Hopper's asynchronous tensor cores: kernels/gemm_wgmma.cu. Only sm_90 runs it."""

    bm: int = 128
    bn: int = 128
    units: int = 1
    stages: int = 4
    resident: int = 1
    blocks: int = 0
    """Blocks that share all tiles' columns evenly; 0: one for each tile."""

    def across(self, tokens: int) -> int:
        """Tiles of tokens."""
        return -(-tokens // self.bm)

    def tiles(self, gemm: Gemm, tokens: int) -> int:
        """Tiles of up to `tokens` tokens."""
        return self.across(tokens) * -(-gemm.rows * (2 if gemm.gated else 1) // self.bn)

    def grid(self, gemm: Gemm, tokens: int) -> tuple[int, int, int]:
        """Blocks for up to `tokens` tokens: no more than there are stages of columns."""
        tiles = self.tiles(gemm, tokens)
        return min(self.blocks or tiles, tiles * (gemm.columns // (LANE_WEIGHTS * self.units))), 1, 1

    def counters(self, gemm: Gemm, tokens: int) -> int:
        """Counters that shared tiles need."""
        blocks = self.grid(gemm, tokens)[0]
        return blocks if blocks != self.tiles(gemm, tokens) else 0

    def scratch_bytes(self, gemm: Gemm, tokens: int) -> int:
        """Bytes of partial sums that shared tiles need."""
        return 2 * self.counters(gemm, tokens) * self.bm * self.bn * 4

    def shared_bytes(self, gemm: Gemm) -> int:
        """Shared memory of a block: stages of whole KiB, from a whole one on."""
        stage = self.units * (self.bm * 2 * LANE_WEIGHTS + self.bn * gemm.kind.run_bytes)
        return (self.stages * -(-stage // 1024) + 1) * 1024

    def launch(self, programs: Programs, gemm: Gemm, on: Operands, tokens: int, overlap: int = 0) -> Launch:
        """The product of up to `tokens` tokens; `overlap` as in kernels/overlap.cuh."""
        grid = self.grid(gemm, tokens)
        program = programs(
            "gemm_wgmma", buffers=8, dynamic_shared=self.shared_bytes(gemm), features="a", BM=self.bm, BN=self.bn,
            UNITS=self.units, STAGES=self.stages, ACROSS=self.across(tokens), BLOCKS=grid[0], RESIDENT=self.resident,
            OVERLAP=overlap, **gemm.macros(),
        )  # fmt: skip
        return Launch(program, _buffers(on), grid, (2 * self.bn, 1, 1))


def _buffers(on: Operands) -> tuple[Any, ...]:
    """The buffers of both kernels for many tokens; what a product lacks is not read."""
    return on.y, on.x, on.w, on.w2 or on.w, on.bias or on.w, on.scratch or on.w, on.arrived or on.w, on.count


@dataclass(frozen=True, slots=True)
class SmallMTile:
    """A product of up to 8 `nb` tokens by kernels/gemm_small_m.cu, which tells what the macros mean.

    x has room for as many tokens as the launch is for, whatever their count on the device.
    """

    nb: int
    mt: int = 1
    warps_m: int = 8
    warps_k: int = 1
    stages: int = 4
    splits: int = 1
    phases: int = 1
    resident: int = 1
    blocks: int = 0
    """Blocks that share all sets of rows, each with the same columns; 0: one for each set."""

    @property
    def rows(self) -> int:
        """Rows of a set, of gate and up together."""
        return 16 * self.mt * self.warps_m

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.warps_m * self.warps_k

    def sets(self, gemm: Gemm) -> int:
        """Sets of rows."""
        return -(-gemm.rows * (2 if gemm.gated else 1) // self.rows)

    def counters(self, gemm: Gemm, tokens: int) -> int:
        """Counters that split columns need."""
        return self.sets(gemm) if self.splits > 1 else 0

    def scratch_bytes(self, gemm: Gemm, tokens: int) -> int:
        """Bytes of partial sums that split columns need."""
        return self.counters(gemm, tokens) * self.splits * self.rows * 8 * self.nb * 4

    def groups(self, gemm: Gemm) -> int:
        """Groups of 256 columns of a block."""
        return -(-gemm.columns // (4 * LANE_WEIGHTS * self.splits))

    def shared_bytes(self, gemm: Gemm) -> int:
        """Shared memory of a block: x of a phase, the warps' stages, and their sums where they share columns."""
        steps = -(-self.groups(gemm) // self.warps_k)
        held = -(-steps // self.phases) * self.warps_k * self.nb * 4096
        stages = self.warps * self.stages * self.mt * 64 * gemm.kind.run_bytes
        return held + stages + (self.warps_k * self.rows * 8 * self.nb * 4 if self.warps_k > 1 else 0)

    def launch(self, programs: Programs, gemm: Gemm, on: Operands, tokens: int, overlap: int = 0) -> Launch:
        """The product of up to `tokens` tokens; `overlap` as in kernels/overlap.cuh."""
        assert tokens <= 8 * self.nb
        program = programs(
            "gemm_small_m", buffers=8, dynamic_shared=self.shared_bytes(gemm), NB=self.nb, MT=self.mt,
            WARPS_M=self.warps_m, WARPS_K=self.warps_k, STAGES=self.stages, SPLITS=self.splits,
            PHASES=self.phases, RESIDENT=self.resident, MOST=tokens, OVERLAP=overlap, **gemm.macros(),
        )  # fmt: skip
        sets = self.sets(gemm)
        grid = (min(sets, self.blocks) if self.blocks else sets, self.splits, 1)
        return Launch(program, _buffers(on), grid, (32 * self.warps, 1, 1))


@dataclass(frozen=True, slots=True)
class StreamTile:
    """The same for rows of whole segments, by kernels/gemm_stream.cu, which tells what the macros mean."""

    nb: int
    stages: int = 4
    resident: int = 1
    blocks: int = 16
    """Blocks that share all sets of 16 rows, for each segment of the columns."""
    parts: int | None = None
    """Sums of an element that are added up at the end; as many as registers allow unless given."""

    def segments(self, gemm: Gemm) -> int:
        """Segments of a row."""
        return gemm.columns // SEGMENT

    def sets(self, gemm: Gemm) -> int:
        """Sets of 16 rows, of gate and up together."""
        return -(-gemm.rows * (2 if gemm.gated else 1) // 16)

    def evenly(self, gemm: Gemm, most: int) -> StreamTile:
        """With at most so many blocks, or fewer that take no longer."""
        return replace(self, blocks=-(-self.sets(gemm) // -(-self.sets(gemm) // most)))

    def counters(self, gemm: Gemm, tokens: int) -> int:
        """Counters that rows of several segments need."""
        return self.blocks if self.segments(gemm) > 1 else 0

    def scratch_bytes(self, gemm: Gemm, tokens: int) -> int:
        """Bytes of partial sums that rows of several segments need."""
        segments = self.segments(gemm)
        return self.sets(gemm) * segments * 16 * 8 * self.nb * 4 if segments > 1 else 0

    def stage_bytes(self, gemm: Gemm) -> int:
        """Shared memory of the stages, through which x comes at first."""
        return self.stages * 16 * ((gemm.kind.segment_bytes + 111) // 128 * 128 + 16)

    def shared_bytes(self, gemm: Gemm) -> int:
        """Shared memory of a block: stages, and the sums of two sets of rows."""
        return self.stage_bytes(gemm) + 2 * 8 * self.nb * 512

    def launch(self, programs: Programs, gemm: Gemm, on: Operands, tokens: int, overlap: int = 0) -> Launch:
        """The product of up to `tokens` tokens; `overlap` as in kernels/overlap.cuh."""
        assert tokens <= 8 * self.nb
        program = programs(
            "gemm_stream", buffers=8, dynamic_shared=self.shared_bytes(gemm), NB=self.nb, STAGES=self.stages,
            RESIDENT=self.resident, MOST=tokens, OVERLAP=overlap,
            SUM_PARTS=self.parts or stream_parts(self.nb), **gemm.macros(),
        )  # fmt: skip
        grid = (min(self.sets(gemm), self.blocks), self.segments(gemm), 1)
        return Launch(program, _buffers(on), grid, (256, 1, 1))


def stream_parts(nb: int) -> int:
    """Sums of an element that a StreamTile of 8 `nb` tokens has registers for."""
    return {1: 4, 2: 2}.get(nb, 1)


AnyTile: TypeAlias = Tile | WgmmaTile | SmallMTile | StreamTile
TilePicker: TypeAlias = Callable[[Any, Gemm, int], AnyTile]
"""The tile of a product of up to so many tokens on a device."""

SMALL_M: Final = 32
"""Tokens up to which the weights, read once, decide and not the arithmetic."""
BLOCKS_PER_SM: Final = 2
"""What registers and shared memory of both chips allow of the tiles below."""
LEAST_STEPS: Final = 4
"""Stages of columns that a split keeps, so that its copies run ahead."""
MOST_IDLE: Final = 0.8
"""Share of the blocks that the SMs hold, up to which they are idle rather than busy."""
MOST_PARTS: Final = 4
"""Blocks that share a tile."""
MOST_WHOLE_COLUMNS: Final = 4096
"""Columns up to which sharing a few tiles costs more than it saves: the parts' sums go through memory."""
LEAST_SHARED_COLUMNS: Final = 3072
"""The same where there are more tiles than SMs, of which most stay whole."""
LEAST_TILE_TOKENS: Final = 64
"""Of a WgmmaTile that is picked."""
FEW_TILES_TOKENS: Final = 256
"""Tokens up to which most products have fewer large tiles than a GPU has SMs."""
LEAST_PART_STEPS: Final = 8
"""Steps of columns that a part of a tile has."""
LEAST_BUSY: Final = 0.6
"""Share of the SMs from which a large tile to each is quicker than small ones to all."""
LEAST_WHOLE: Final = 0.9
"""Share of the last round's SMs, and of those before, from which tiles of their own are quicker than shared ones."""


def blocks_held(arch: str, shared: int) -> int:
    """Blocks that the shared memory of an SM holds; the hardware takes its reserve for each."""
    return shared_bytes(arch) // (shared + SHARED_RESERVE)


def pick_tile(device: Gpu, gemm: Gemm, tokens: int) -> AnyTile:
    """The tile that suits a product of up to so many tokens, by reckoning and not by measurement."""
    return pick_small_m(device, gemm, tokens) if tokens <= SMALL_M else pick_many(device, gemm, tokens)


LEAST_STAGE_BYTES: Final = 8 * 4096
"""Stages of a StreamTile that hold x of eight tokens and a segment."""
STREAMS: Final = ((2, 3), (1, 7), (1, 4), (1, 3), (1, 2))
"""Blocks of an SM and stages of a StreamTile, the best on an H200 first; two blocks have registers for 16 tokens."""


def pick_small_m(device: Gpu, gemm: Gemm, tokens: int) -> StreamTile | SmallMTile:
    """A StreamTile for rows of whole segments, if the chip has room for it."""
    nb, sms = -(-tokens // 8), int(device.sm_count)
    if gemm.columns % SEGMENT == 0:
        for resident, stages in _streams(gemm, nb):
            tile = StreamTile(nb, stages, resident)
            tile = tile.evenly(gemm, max(1, sms * resident // tile.segments(gemm)))
            if tile.stage_bytes(gemm) >= LEAST_STAGE_BYTES and _fits(device, gemm, tokens, tile):
                return tile
    return _pick_split(device, gemm, tokens)


def _streams(gemm: Gemm, nb: int) -> Iterable[tuple[int, int]]:
    """STREAMS that suit so many tokens: x of 32 comes in halves, which leave room for a set of weights beside them."""
    if nb <= 2:
        return STREAMS
    if nb % 2:
        return STREAMS[1:]
    halves = -(-nb // 2 * LEAST_STAGE_BYTES // StreamTile(nb, 1).stage_bytes(gemm)) + 1
    return (1, halves), *STREAMS[1:]


def _pick_split(device: Gpu, gemm: Gemm, tokens: int) -> SmallMTile:
    """Columns split over blocks while every SM has at most one, and x whole if shared memory holds it."""
    sms, groups = int(device.sm_count), -(-gemm.columns // (4 * LANE_WEIGHTS))
    for warps, stages, phases in combinations((8, 4, 2), (3, 2), (1, 2, 4, 8, 16)):
        tile = SmallMTile(-(-tokens // 8), warps_m=warps, stages=stages, phases=phases)
        fitting = [n for n in (1, 2, 4, 8, 16) if groups % n == 0 and tile.sets(gemm) * n <= sms * 5 // 4]
        tile = replace(tile, splits=max(fitting, default=1))
        tile = replace(tile, blocks=sms if tile.splits == 1 else 0)
        if _fits(device, gemm, tokens, tile):
            return tile
    raise LaunchError(f"no tile of {tokens} tokens and rows of {gemm.columns} fits an SM of {device.arch}")


def _fits(device: Gpu, gemm: Gemm, tokens: int, tile: StreamTile | SmallMTile) -> bool:
    """Whether an SM holds the blocks, and the buffers their partial sums."""
    scratch, counters = scratch_bound(device)
    return (
        blocks_held(device.arch, tile.shared_bytes(gemm)) >= tile.resident
        and tile.scratch_bytes(gemm, tokens) <= scratch
        and 4 * tile.counters(gemm, tokens) <= counters
    )


def pick_many(device: Gpu, gemm: Gemm, tokens: int) -> Tile:
    """As large a tile as leaves every SM a block, else columns split over blocks."""
    bm, wm = next(((most, most) for most in (16, 32, 64) if tokens <= most), (128, 64))
    wide = 64 if gemm.kind.booked else 128  # finding entries takes registers, which a wide tile has not
    tiles = [Tile(bm, bn, wm, bn * (bm // wm) // 4) for bn in (wide, 64)]
    return _filling(device, gemm, tokens, *(_deepest(device, gemm, tile) for tile in tiles))


def pick_wgmma(device: Gpu, gemm: Gemm, tokens: int) -> AnyTile:
    """`pick_tile` with Hopper's own instructions where there are more tokens than a batch has.

    As an H200 was quickest with the products of four models and 512 or 2,048 tokens (docs/notebook.md): a large tile to
    an SM, which all SMs share where its tiles are not whole rounds of them; else the smallest that all hold at once.
    """
    if tokens <= SMALL_M:
        return pick_small_m(device, gemm, tokens)
    if tokens <= FEW_TILES_TOKENS:
        return _pick_equal_parts(device, gemm, tokens)
    small, large, tall, wide = _wgmma_tiles(device, gemm, tokens)
    sms, tiles = int(device.sm_count), wide.tiles(gemm, tokens)
    slots, short = BLOCKS_PER_SM * sms, gemm.columns <= MOST_WHOLE_COLUMNS
    if tiles < LEAST_BUSY * sms and short:
        return small if small.tiles(gemm, tokens) <= slots else tall
    if _rounds(tiles, sms) >= LEAST_WHOLE or (tiles <= sms and short):
        return wide
    if tiles > sms and gemm.columns < LEAST_SHARED_COLUMNS:
        return large
    if (blocks := min(sms, MOST_PARTS * tiles)) > MOST_IDLE * sms:
        return replace(wide, blocks=blocks)
    for tile in (tall, small):
        parts = slots // (tiles := tile.tiles(gemm, tokens))
        if 1 < parts <= MOST_PARTS and parts * tiles > MOST_IDLE * slots:
            return replace(tile, blocks=parts * tiles)
    return replace(small, blocks=min(sms * small.resident, MOST_PARTS * small.tiles(gemm, tokens)))


def _pick_equal_parts(device: Gpu, gemm: Gemm, tokens: int) -> WgmmaTile:
    """The largest tile of which equal parts keep the SMs busy, else what comes nearest to that.

    By an H200's times of all tiles, the products of two models with 64, 128 and 256 tokens take at most 2% more in sum
    than by the best ones (docs/notebook.md).
    """
    small, large, _, wide = _wgmma_tiles(device, gemm, tokens)
    sms, tiles = int(device.sm_count), large.tiles(gemm, tokens)
    own = _deepest(device, gemm, WgmmaTile(large.bm, large.bn), residents=(1,))
    most = max(1, min(MOST_PARTS, gemm.columns // LANE_WEIGHTS // LEAST_PART_STEPS))
    ways = [(wide, sms), (large, large.resident * sms), (own, sms), (small, small.resident * sms), (small, sms)]
    if tiles > sms and (large.bm == wide.bm or tiles <= large.resident * sms):
        ways.insert(0, ways[1])
    found = []
    for tile, slots in ways:
        tiles = tile.tiles(gemm, tokens)
        parts = max(1, min(most, slots // tiles))
        share = _rounds(parts * tiles, slots)
        made = replace(tile, blocks=parts * tiles if parts > 1 else 0)
        if share >= MOST_IDLE:
            return made
        found.append((share, -parts, made))
    slots = small.resident * sms
    if gemm.columns >= LEAST_SHARED_COLUMNS and MOST_PARTS * small.tiles(gemm, tokens) >= MOST_IDLE * slots:
        return replace(small, blocks=slots)
    return max(found, key=lambda way: way[:2])[2]


def _wgmma_tiles(device: Gpu, gemm: Gemm, tokens: int) -> tuple[WgmmaTile, WgmmaTile, WgmmaTile, WgmmaTile]:
    """The smallest, one of more rows, one of more tokens, and the largest, to an SM of its own; as high as so many
    tokens need."""
    bm = LEAST_TILE_TOKENS if tokens <= LEAST_TILE_TOKENS else 128
    high = 2 * bm if tokens > bm else bm
    small, large, tall = (_deepest(device, gemm, WgmmaTile(*cut)) for cut in ((bm, 64), (bm, 128), (high, 64)))
    return small, large, tall, _deepest(device, gemm, WgmmaTile(high, 128), residents=(1,))


def _rounds(tiles: int, sms: int) -> float:
    """The share of whole rounds that so many tiles take up."""
    return tiles / (-(-tiles // sms) * sms)


def pick_quickest(device: Gpu, gemm: Gemm, tokens: int) -> AnyTile:
    """`pick_wgmma` on chips with its instructions, else `pick_tile`."""
    return (pick_wgmma if kernels_of(device.arch).wgmma else pick_tile)(device, gemm, tokens)


def pick_alike(most: int) -> TilePicker:
    """Tiles that add up a token's sums in the same order, however many there are of up to `most`.

    The kernel and how columns are split, which decide that, are those for `most`.
    """

    def pick(device: Gpu, gemm: Gemm, tokens: int) -> AnyTile:
        if most <= SMALL_M:
            widest, tile = pick_small_m(device, gemm, most), pick_small_m(device, gemm, tokens)
            if isinstance(widest, StreamTile) and isinstance(tile, StreamTile):
                return replace(tile, parts=stream_parts(widest.nb))
            return replace(widest, nb=-(-tokens // 8))
        if not kernels_of(device.arch).wgmma:
            return replace(pick_many(device, gemm, tokens), splits=pick_many(device, gemm, most).splits)
        if most <= LEAST_TILE_TOKENS:
            return _pick_equal_parts(device, gemm, most)  # all of them are one tile high
        # Blocks that share tiles evenly cut each otherwise: tiles are whole.
        small, large, _, wide = _wgmma_tiles(device, gemm, tokens)
        sms, tiles = int(device.sm_count), wide.tiles(gemm, tokens)
        if tiles >= LEAST_BUSY * sms and (tiles <= sms or _rounds(tiles, sms) >= LEAST_WHOLE):
            return wide
        return small if small.tiles(gemm, tokens) <= BLOCKS_PER_SM * sms else large

    return pick


PICKS: Final[Mapping[str, TilePicker]] = {"mma": pick_tile, "wgmma": pick_wgmma}
"""By the instruction for many tokens."""

_Large = TypeVar("_Large", Tile, WgmmaTile)


def _deepest(device: Gpu, gemm: Gemm, tile: _Large, residents: Sequence[int] = (BLOCKS_PER_SM, 1)) -> _Large:
    """With the most stages that let an SM hold so many blocks, two or one unless said."""
    for resident in residents:
        for stages in (5, 4, 3) if isinstance(tile, WgmmaTile) else (4, 3, 2):
            made = replace(tile, stages=stages, resident=resident)
            if blocks_held(device.arch, made.shared_bytes(gemm)) >= resident:
                return made
    raise LaunchError(f"no tile of {tile.bm} x {tile.bn} fits an SM of {device.arch}")


def _filling(device: Gpu, gemm: Gemm, tokens: int, wide: Tile, narrow: Tile) -> Tile:
    """The wide tile if it leaves every SM a block, else the narrow one, its columns split while that adds blocks."""
    sms, steps = int(device.sm_count), gemm.columns // LANE_WEIGHTS

    def blocks(tile: Tile) -> int:
        x, y, _ = tile.grid(gemm, tokens)
        return x * y

    tile = wide if blocks(wide) >= sms else narrow
    splits = 1
    while blocks(tile) * splits * 2 <= BLOCKS_PER_SM * sms and steps >= 2 * splits * LEAST_STEPS:
        splits *= 2
    return replace(tile, splits=splits)


def scratch_bound(device: Gpu) -> tuple[int, int]:
    """Bytes of partial sums and of counters that any launch with a picked tile needs."""
    blocks = BLOCKS_PER_SM * int(device.sm_count)
    parts = 2 if kernels_of(device.arch).wgmma else 1  # of a block whose tiles are shared
    return parts * blocks * 128 * 128 * 4, blocks * 4
