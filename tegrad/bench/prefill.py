"""How fast prompts and batches of sequences are: each product on tensor cores, attention, and the whole.

    tegrad bench prefill 1b-q6k 8b-q4k                         a line a product and number of tokens
    tegrad bench prefill 1b-q6k --tokens 512 --sweep 5         the best 5 tiles of each
    tegrad bench prefill 1b-q6k --attention 0 --attention 4096   attention of a chunk after so many positions
    tegrad bench prefill --file MODEL.gguf                     tokens per second of a prompt of 512, and of batches
    ... --pick wgmma                                           with Hopper's own instructions for many tokens

Each product runs as prompts and batches launch it, in a recording of dependent launches that go through so many copies
of the weights that none is in a cache when its turn comes again. A time is the GPU's, the slope between recordings of
two lengths: what a launch adds, its dependency included. Only --file measures by the clock on the wall, from tokens on
the host to the last logits, or tokens, there.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import product as combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from tegrad.bench import models, plans
from tegrad.bench.dependencies import ALL_FORMS
from tegrad.bench.gpu import opened, printed, spawned
from tegrad.bench.products import POSITIONS, Bench, farthest
from tegrad.llm.batch import Batch, Member
from tegrad.llm.cache import KvCache
from tegrad.llm.chips import kernels_of
from tegrad.llm.config import Config
from tegrad.llm.flash import Flash
from tegrad.llm.formats import LANE_WEIGHTS, SEGMENT, BlockType
from tegrad.llm.gemm import (
    PICKS,
    SMALL_M,
    AnyTile,
    Gemm,
    Operands,
    SmallMTile,
    StreamTile,
    Tile,
    WgmmaTile,
    blocks_held,
    pick_tile,
)
from tegrad.llm.network import Add, Gate, InputGate
from tegrad.llm.packed import PackedModel
from tegrad.llm.packing import packed_bytes
from tegrad.llm.prefill import Prefill, chunk_bytes, chunk_sizes
from tegrad.llm.programs import Programs, compile_kernel
from tegrad.llm.rows import COUNT_AT, Rows
from tegrad.nv.compilers import CompileFailed
from tegrad.nv.gpu import Gpu
from tegrad.nv.program import LaunchError
from tegrad.nv.replay import Dependency, Launch

LEAST_LAUNCHES: Final = 12
"""Launches of the shorter recording, at least."""
TOKENS: Final = (8, 32, 128, 512)
SM_REGISTERS: Final = 65536
REPETITIONS: Final = 5


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """What a product, or attention, costs for so many tokens."""

    model: str
    role: str
    tokens: int
    form: str
    launches: int
    """Of a chunk or step."""
    bytes: int
    """Of weights, read once; or of the cache."""
    us: float
    tflop_s: float
    gb_s: float


def gemms(
    config: Config, formats: BlockType | plans.Formats, arch: str, tied: bool = True
) -> Counter[tuple[str, Gemm]]:
    """The products of a chunk or step of a model on a chip, as `Rows` has them, and how many of each it has.

    The logits are of batches: of a prompt, one row.
    """
    noted: list[Gemm] = []

    def pick(device: Gpu, gemm: Gemm, tokens: int) -> AnyTile:
        noted.append(gemm)
        return pick_tile(device, gemm, tokens)

    roles: list[str] = []
    with plans.uncompiled(arch) as device:
        made = plans.model(config, formats, device, tied)
        with Rows(made, SMALL_M, POSITIONS, pick) as rows:
            rows.inputs(SMALL_M, rows.x, (rows.x, rows.x))
            roles += ["down"] * len(noted)
            for at, block in enumerate(rows.network.blocks):
                rows.layer(at, SMALL_M, rows.x, lambda at, op: ())
                roles += ["qkv"] * len(made.layers[at].qkv)
                for op in block:
                    if isinstance(op, Add | Gate | InputGate):
                        roles += [op.role] * (1 + (isinstance(op, Gate) and rows.gates_apart(at)))
            rows.logits(rows.x, SMALL_M, rows.x)
    return Counter(zip([*roles, "logits"], noted, strict=True))


class PrefillBench(Bench):
    """Weights and activations on an opened device. Use it in a `with`."""

    def __init__(self, device: Gpu, dependency: Dependency, overlap: bool) -> None:
        super().__init__(device, dependency)
        self._weights, self._programs, self._overlap = self.weights(), Programs(device), int(overlap)
        self._zeros: dict[str, Any] = {}

    def us(self, gemm: Gemm, tile: AnyTile, tokens: int) -> float:
        """Microseconds that a launch of the product adds."""
        size = -(-packed_bytes(gemm.kind, gemm.rows, gemm.columns) // 256) * 256
        stride = size * (2 if gemm.gated else 1)
        return self.added_us(
            lambda at: self._launch(gemm, tile, tokens, at, size), stride, LEAST_LAUNCHES, 4 * LEAST_LAUNCHES
        )

    def row(self, model: str, role: str, gemm: Gemm, launches: int, tile: AnyTile, tokens: int) -> PrefillRow:
        """Measure a product."""
        us = self.us(gemm, tile, tokens)
        size, flops = gemm.weight_bytes, gemm.flops * tokens
        return PrefillRow(model, role, tokens, shown(tile), launches, size, us, flops / us / 1e6, size / us / 1e3)

    def attention(self, model: str, config: Config, tokens: int, depth: int) -> PrefillRow:
        """Measure attention of a chunk after `depth` positions; the layers' caches are not in the GPU's cache."""
        positions = depth + tokens
        flash = Flash.of(config, farthest(config), positions, self.device.arch)
        flash = flash.spread(tokens, int(self.device.sm_count))
        side = 2 * config.kv_heads * positions * config.head_dim
        width = 2 * tokens * config.heads * config.head_dim
        chunk = self._zero(f"chunk of {tokens} after {depth}", 0, chunk_bytes(start=depth, count=tokens))

        def launch(at: int) -> Launch:
            keys, values = (self._weights.offset(at + side * i, side) for i in range(2))
            return flash.launch(
                self._programs, out=self._zero("y", width), q=self._zero("x", width), keys=keys, values=values,
                key_scales=keys, value_scales=values, chunk=chunk, tokens=tokens, overlap=self._overlap,
            )  # fmt: skip

        us = self.added_us(launch, 2 * side, LEAST_LAUNCHES, LEAST_LAUNCHES)
        pairs = tokens * depth + tokens * (tokens + 1) // 2
        flops = 4 * config.heads * config.head_dim * pairs
        form = f"{flash.groups or flash.warps}{'g' if flash.groups else 'w'} tile {flash.tile} at {depth}"
        return PrefillRow(
            model, "attention", tokens, form, config.layers, 2 * side, us, flops / us / 1e6, 2 * side / us / 1e3
        )

    def _zero(self, name: str, size: int, data: bytes | None = None) -> Any:
        """A buffer of zeros for a purpose, at least as large as asked; or of these bytes."""
        if name not in self._zeros or self._zeros[name].size < size:
            self._zeros[name] = self.workspace.put(bytes(size) if data is None else data)
        return self._zeros[name]

    def _launch(self, gemm: Gemm, tile: AnyTile, tokens: int, at: int, size: int) -> Launch:
        chunk = self._zero(f"count {tokens}", 0, chunk_bytes(count=tokens))
        operands = Operands(
            self._zero("y", 4 * tokens * (gemm.stride or gemm.rows)), self._zero("x", 2 * tokens * gemm.columns),
            self._weights.offset(at, size), chunk.offset(COUNT_AT, 4),
            self._weights.offset(at + size, size) if gemm.gated else None, self._zero("bias", 8 * gemm.rows),
            self._zero("scratch", max(16, tile.scratch_bytes(gemm, tokens))),
            self._zero("arrived", max(16, 4 * tile.counters(gemm, tokens))),
        )  # fmt: skip
        return tile.launch(self._programs, gemm, operands, tokens, self._overlap)


# ---- tiles to try


def candidates(gemm: Gemm, tokens: int, arch: str, sms: int) -> list[AnyTile]:
    """The tiles that a sweep tries on a chip of so many SMs.

    What shared memory and, by reckoning, registers hold, and no more than pays.
    """
    found: list[AnyTile] = (
        [*_stream(gemm, tokens, arch, sms), *_small_m(gemm, tokens, arch, sms)] if tokens <= SMALL_M else []
    )
    if tokens > 16:
        found += _many(gemm, tokens, arch, sms)
        found += _wgmma(gemm, tokens, arch, sms) if kernels_of(arch).wgmma else ()
    return found


def _stream(gemm: Gemm, tokens: int, arch: str, sms: int) -> Iterator[StreamTile]:
    nb = -(-tokens // 8)
    if gemm.columns % SEGMENT:
        return
    for resident, stages in combinations((1, 2), (2, 3, 4, 5, 7)):
        tile = StreamTile(nb, stages, resident)
        most = sms * resident // tile.segments(gemm)
        if most and _resident(60 + 40 * nb, 8, tile.shared_bytes(gemm), arch) >= resident:
            for blocks in sorted({min(most, tile.sets(gemm)), tile.evenly(gemm, most).blocks}):
                yield replace(tile, blocks=blocks)


STAGES: Final = (6, 4, 3, 2)
"""Of weights, of gemm_small_m.cu: the deepest that fits is tried."""


def _small_m(gemm: Gemm, tokens: int, arch: str, sms: int) -> Iterator[SmallMTile]:
    nb = -(-tokens // 8)
    cuts = combinations((1, 2), (2, 4, 8, 16), (1, 2, 4, 8), (1, 2, 4, 8, 16), (2, 1))
    for mt, warps_m, warps_k, splits, resident in cuts:
        tile = SmallMTile(nb, mt, warps_m, warps_k, splits=splits, resident=resident)
        blocks, groups = tile.sets(gemm) * splits, tile.groups(gemm)
        uneven = groups % warps_k or groups * splits != -(-gemm.columns // (4 * LANE_WEIGHTS))
        crowded = splits > 1 and blocks / resident > 1.15 * sms
        idle = splits > 1 and blocks / resident < 0.7 * sms
        if tile.warps * mt not in (8, 16) or uneven or crowded or idle:
            continue
        phased = (replace(tile, phases=phases) for phases in (1, 2, 4, 8) if groups % (warps_k * phases) == 0)
        if found := next((made for one in phased if (made := _deep(gemm, one, arch))), None):
            yield replace(found, blocks=sms * resident if splits == 1 and blocks > sms * resident else 0)


def _deep(gemm: Gemm, tile: SmallMTile, arch: str) -> SmallMTile | None:
    """With the most stages that so many blocks of an SM hold."""
    registers = 56 + tile.mt * (4 * tile.nb + 36)
    made = (replace(tile, stages=stages) for stages in STAGES)
    return next((t for t in made if _resident(registers, t.warps, t.shared_bytes(gemm), arch) >= t.resident), None)


def _many(gemm: Gemm, tokens: int, arch: str, sms: int) -> Iterator[Tile]:
    runs = gemm.columns // 64
    shapes = combinations((32, 64, 128, 256), (32, 64, 128), (32, 64), (16, 32, 64), (1, 2), (3, 4), (1, 2, 4, 8, 16))
    for bm, bn, wm, wn, units, stages, splits in shapes:
        warps = (bm // wm) * (bn // wn)
        if bm % wm or bn % wn or warps not in (4, 8) or runs % units or splits * stages * units > runs:
            continue
        tile = Tile(bm, bn, wm, wn, units, stages, splits)
        x, y, _ = tile.grid(gemm, tokens)
        idle = x * y * splits < 0.7 * sms or (splits > 1 and x * y * splits > 2.3 * sms)
        wasted = bm >= 2 * tokens or (bm < 128 and bm < tokens) or wm * wn * warps < 4096
        resident = _resident(wm * wn // 32 + wm + 44, warps, tile.shared_bytes(gemm), arch)
        if resident and not idle and not wasted:
            yield replace(tile, resident=resident)


WGMMA_STAGES: Final = (3, 4, 5)


def _wgmma(gemm: Gemm, tokens: int, arch: str, sms: int) -> Iterator[WgmmaTile]:
    runs = gemm.columns // 64
    shapes = combinations((32, 64, 128, 256), (64, 128, 192, 256), (1, 2), WGMMA_STAGES, (False, True))
    for bm, bn, units, stages, shared in shapes:
        tile = WgmmaTile(bm, bn, units, stages)
        idle = not shared and tile.tiles(gemm, tokens) < 0.7 * sms
        if runs % units or bm >= 2 * tokens or idle or (bm < 64 and bm < tokens):
            continue
        if resident := _resident(bm // 2 + 64, bn // 16, tile.shared_bytes(gemm), arch):
            yield replace(tile, resident=resident, blocks=sms * resident if shared else 0)


def _resident(registers: int, warps: int, shared: int, arch: str) -> int:
    """Blocks that an SM holds, at most 2; 0 where it holds none."""
    if registers > 255:
        return 0
    return min(2, blocks_held(arch, shared), SM_REGISTERS // (32 * warps * registers))


def _compile(gemm: Gemm, tile: AnyTile, tokens: int, arch: str) -> None:
    """Put a program into the cache on disk; what fails there fails again where it is loaded."""

    def compiled(name: str, *, buffers: int, features: str = "", **how: Any) -> None:
        compile_kernel(name, arch + features, **how)

    try:
        tile.launch(compiled, gemm, Operands(0, 0, 0, 0), tokens)  # type: ignore[arg-type]
    except CompileFailed:
        return


def sweep(bench: PrefillBench, model: str, role: str, gemm: Gemm, launches: int, tokens: int) -> list[PrefillRow]:
    """All candidates of a product, the fastest first."""
    arch = bench.device.arch
    tiles = candidates(gemm, tokens, arch, int(bench.device.sm_count))
    list(spawned(_compile, [(gemm, tile, tokens, arch) for tile in tiles]))
    rows = []
    for tile in tiles:
        with suppress(CompileFailed, LaunchError):  # a tile that cannot be is none of the fastest
            rows.append(bench.row(model, role, gemm, launches, tile, tokens))
    return sorted(rows, key=lambda row: row.us)


# ---- whole prompts and batches


def prompt(path: Path, tokens: int = 512, repetitions: int = REPETITIONS, **how: Any) -> list[float]:
    """Tokens per second of a prompt, each time: from tokens on the host to the last one's logits on the device.

    `how` is what a `Prefill` takes beside the model, the cache and its chunks, which are a conversation's.
    """
    found = []
    with PackedModel.load(path, "NV") as model:
        sizes = chunk_sizes(model.device.arch, tokens)
        fed = np.random.default_rng(2).integers(0, model.config.vocab, tokens).tolist()
        with (
            KvCache(model.device, model.config, tokens, ahead=sizes[-1]) as cache,
            Prefill(model, cache, sizes=sizes, **how) as prefill,
        ):
            for _ in range(repetitions + 1):
                begun = time.perf_counter()
                prefill.run(fed)
                model.device.synchronize()
                found.append(tokens / (time.perf_counter() - begun))
    return found[1:]


def together(
    path: Path, sequences: int, tokens: int = 128, repetitions: int = 3, *, prompt: int = 8, **how: Any
) -> list[float]:
    """Tokens per second of `sequences` decoding together after a prompt each, of all of them in sum, each time.

    Time counts from when all of them decode.

    `how` is what a `Batch` takes beside the model, its slots and positions.
    """
    found = []
    with (
        PackedModel.load(path, "NV") as model,
        Batch(model, slots=sequences, positions=tokens + prompt + 8, **how) as batch,
    ):
        rng = np.random.default_rng(3)
        for _ in range(repetitions + 1):
            members = [batch.join(rng.integers(0, model.config.vocab, prompt).tolist()) for _ in range(sequences)]
            while not all(member.tokens for member in members):
                stepped(batch, members)
            left = tokens * sequences - sum(len(member.tokens) for member in members)
            begun, count = time.perf_counter(), 0
            while count < left:
                count += stepped(batch, members)
            found.append(count / (time.perf_counter() - begun))
            for member in batch.members:
                batch.leave(member)
    return found[1:]


def stepped(batch: Batch, members: Sequence[Member]) -> int:
    """How many tokens a step gave; the error of a sequence that has one."""
    came = len(batch.step())
    if error := next((member.error for member in members if member.error), None):
        raise error
    return came


# ---- the command


def shown(tile: AnyTile) -> str:
    """A tile as a few letters."""
    if isinstance(tile, StreamTile):
        return f"{tile.nb}nb stream {tile.stages}s {tile.blocks} {tile.resident}r"
    if isinstance(tile, SmallMTile):
        cut = f"/{tile.splits}" + f" {tile.phases}p" * (tile.phases > 1)
        return f"{tile.nb}nb {tile.mt}mt {tile.warps_m}x{tile.warps_k}w {tile.stages}s {cut} {tile.resident}r"
    size = f"{tile.bm}x{tile.bn} " + (f"{tile.wm}x{tile.wn}" if isinstance(tile, Tile) else "wgmma")
    cut = f"/{tile.splits}" if isinstance(tile, Tile) else f"{tile.blocks or 'own'}"
    return f"{size} {tile.units}u {tile.stages}s {cut} {tile.resident}r"


def line(row: PrefillRow) -> str:
    """A row as text."""
    what = f"{row.model:12} {row.role:9} {row.tokens:5} {row.form:28} {row.bytes / 1e6:8.2f} MB"
    return f"{what} {row.us:9.2f} us {row.tflop_s:7.1f} TFLOP/s {row.gb_s:6.0f} GB/s"


@dataclass(frozen=True, slots=True)
class Asked:
    """What `tegrad bench prefill` was asked for."""

    models: Sequence[str] = ()
    tokens: Sequence[int] = TOKENS
    """Of a chunk or batch."""
    depths: Sequence[int] = ()
    """Positions after which attention is measured, too."""
    sweep: int = 0
    """How many of the best tiles of each product; 0 where only those that are used are measured."""
    pick: str = "mma"
    dependency: str = "chain-lean"
    overlap: bool = False
    file: Path | None = None

    @property
    def given(self) -> dict[str, Any]:
        """How they are run, as a `Prefill` and a `Batch` take it."""
        return {"pick": PICKS[self.pick], "dependency": ALL_FORMS[self.dependency], "overlap": self.overlap}


def measured(bench: PrefillBench, asked: Asked) -> Iterator[PrefillRow]:
    """The rows that were asked for."""
    for model in asked.models:
        shape, _ = models.parse(model)
        found = gemms(shape.config, models.formats(model), bench.device.arch, shape.tied)
        for tokens, ((role, gemm), launches) in combinations(asked.tokens, found.items()):
            if role == "logits" and tokens > SMALL_M:
                continue
            if asked.sweep:
                yield from sweep(bench, model, role, gemm, launches, tokens)[: asked.sweep]
            else:
                yield bench.row(model, role, gemm, launches, PICKS[asked.pick](bench.device, gemm, tokens), tokens)
        for depth in asked.depths:
            yield bench.attention(model, shape.config, max(asked.tokens), depth)


def show(asked: Asked) -> list[dict[str, Any]]:
    """Print what prompts and batches cost on this machine's GPU; the rows."""
    rows: list[PrefillRow] = []
    with opened() as device:
        if asked.models:
            with PrefillBench(device, ALL_FORMS[asked.dependency], asked.overlap) as bench:
                rows = printed(measured(bench, asked), line)
        for tokens in () if asked.sweep else asked.tokens:
            for model in asked.models:
                us = sum(row.us * row.launches for row in rows if (row.model, row.tokens) == (model, tokens))
                print(f"{model:12} {tokens:5} tokens {us:9.1f} us in what is above, {tokens / us * 1e6:9.0f} tok/s")
        if path := asked.file:
            for what, speeds in (
                ("prompt of 512", prompt(path, **asked.given)),
                *((f"batch of {count}", together(path, count, **asked.given)) for count in (8, SMALL_M)),
            ):
                print(f"{path.name} {what}: {np.median(speeds):.0f} tok/s, {min(speeds):.0f} to {max(speeds):.0f}")
    return [asdict(row) for row in rows]
