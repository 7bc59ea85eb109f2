"""How near the attention of a decode step comes to the memory's bandwidth, by depth, and which cut comes nearest.

    tegrad bench attention 1b 8b                 a line a model and depth: bytes, microseconds, share
    tegrad bench attention 1b --sweep 5          every cut of `CANDIDATES`, the best ones of each depth
    tegrad bench attention 1b --cache q8_0 --depths 0 --depths 16384

Launches are those of the decode plan, each on a cache of its own, so that none finds its keys in the chip's cache. A
time is what a launch adds to a recording of dependent ones, its dependency included; at depth 0 nearly nothing is read,
and it is what the launch costs. The bandwidth is measured in the same process (`tegrad.bench.products`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product as combinations
from typing import Any, Final, Self

import numpy as np

from tegrad.bench import products
from tegrad.bench.dependencies import FORMS, HOPPER, gpu_us, opened
from tegrad.bench.models import SHAPES
from tegrad.llm.arch import Config
from tegrad.llm.attention import BUFFERS, CACHES, Attention
from tegrad.llm.state import States
from tegrad.nv import roles
from tegrad.nv.compilers import CompileFailed
from tegrad.nv.gpu import Gpu
from tegrad.nv.program import LaunchError
from tegrad.nv.replay import Dependency, Launch
from tegrad.nv.spec import MemorySpec

SPEC: Final = MemorySpec(nolru=True, role=roles.KV_CACHE)
DEPTHS: Final = (0, 4096, 16384)
SPARE_POSITIONS: Final = 256
"""Positions of a cache beyond the deepest."""
ROTATION_BYTES: Final = 1200 << 20
"""Bytes of caches that the launches go through."""
LEAST_LAUNCHES: Final = 24
"""Launches of the shorter recording, at least."""
FILLING_BYTES: Final = 16 << 20
CANDIDATES: Final = {
    "ATTENTION_WARPS": (4, 8, 16),
    "ATTENTION_LOADS": (2, 4, 8),
    "ctas": (1, 2, 4),
    "rows": (0, 64, 128),
}
"""What a sweep tries: warps, loads in flight, parts for each SM, and the positions that make another part (0: those
that one CTA takes at once)."""


@dataclass(frozen=True, slots=True)
class AttentionRow:
    """What the attention of one layer costs at a depth. `share` is of the bandwidth measured in the same process."""

    model: str
    cache: str
    sequences: int
    depth: int
    warps: int
    loads: int
    splits: int
    split_rows: int
    """0: as many positions as a CTA takes at once."""
    launches: int
    """Of a step."""
    bytes: int
    us: float
    gb_s: float
    share: float


def attention(config: Config, positions: int, cache: str, device: Gpu, sequences: int = 1, **tuning: int) -> Attention:
    """The attention of a model on a device, as the decode plan has it for packed output matrices, or a batch."""
    return Attention(
        config.heads, config.kv_heads, config.head_dim, positions, config.arch.rope,
        config.rope.dim // 2 if config.rope.dim else None,
        config.eps if config.arch.query_norm is not None else None,
        cache, device.sm_count, sequences,
        quantized=sequences == 1, halves=sequences > 1, arch=device.arch, tuning=tuning,
    )  # fmt: skip


class AttentionBench:
    """Caches and vectors on an opened device. Use it in a `with`."""

    def __init__(self, device: Gpu, dependency: Dependency, sequences: int = 1) -> None:
        self.device, self.sequences, self._dependency = device, sequences, dependency
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.states = States(self.device, self.sequences)
            self._undo.callback(self.states.close)
            self.caches, self.scratch = self._alloc(ROTATION_BYTES), self._alloc(64 << 20)
            # As bytes they are small whole numbers; as halves, small too.
            filling = (
                np.random.default_rng(1).standard_normal(min(FILLING_BYTES, ROTATION_BYTES) // 2).astype(np.float16)
            )
            self._fill(self.caches, filling.tobytes())
            self._fill(self.scratch, bytes(FILLING_BYTES))
        except BaseException:
            self._undo.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _alloc(self, size: int) -> Any:
        buffer = self.device.allocate(size, SPEC)
        self._undo.callback(self.device.release, buffer, SPEC)
        return buffer

    def _fill(self, buffer: Any, data: bytes) -> None:
        for at in range(0, buffer.size, len(data)):
            part = data[: min(len(data), buffer.size - at)]
            self.device.upload(buffer.offset(at, len(part)), part)

    def us(self, at: Attention, depth: int) -> float:
        """Microseconds that a launch adds for a token of each sequence at position `depth`."""
        for slot in range(self.sequences):
            self.states.begin(slot, [0], depth, at.positions)
        program = at.load(self.device)
        copies: int = max(1, self.caches.size // self._stride(at))
        count = max(LEAST_LAUNCHES, copies)
        launches = [self._launch(program, at, number % copies) for number in range(4 * count)]
        short, long = (gpu_us(self.device, launches[:length], self._dependency) for length in (count, 4 * count))
        return float(long - short) / (3 * count)

    def _stride(self, at: Attention) -> int:
        elements, scales = at.cache_bytes
        return 2 * (elements + scales)

    def _launch(self, program: Any, at: Attention, number: int) -> Launch:
        """A launch on cache `number`. Everything else lies in the scratch memory, and may hold anything."""
        elements, scales = at.cache_bytes
        begin, spots = (
            number * self._stride(at),
            (("k", elements), ("v", elements), ("k_scale", scales), ("v_scale", scales)),
        )
        places: dict[str, Any] = {"states": self.states.states}
        for name, size in spots:
            places[name] = self.caches.offset(begin, max(size, 16))
            begin += size
        names = [name for name in BUFFERS if name not in places]
        room = self.scratch.size // len(names) // 256 * 256
        places |= {name: self.scratch.offset(room * index, room) for index, name in enumerate(names)}
        return Launch(program, tuple(places[name] for name in BUFFERS), at.grid, at.block)

    def row(self, model: str, at: Attention, depth: int, launches: int, bandwidth: float) -> AttentionRow:
        """Measure one depth."""
        us, size = self.us(at, depth), sum(at.cache_bytes) * 2 * depth // at.positions
        rows = (at.tuning or {}).get("SPLIT_ROWS", 0)
        return AttentionRow(model, at.cache, at.sequences, depth, at.warps, at.loads, at.splits, rows, launches,
                   size, us, size / us / 1e3, size / us * 1e6 / bandwidth)  # fmt: skip


def candidates(config: Config, positions: int, cache: str, device: Gpu, sequences: int) -> list[Attention]:
    """All cuts that a sweep tries."""
    plain = attention(config, positions, cache, device, sequences)
    found: dict[tuple[int, ...], Attention] = {}
    for warps, loads, ctas, rows in combinations(*CANDIDATES.values()):
        splits = max(1, ctas * plain.sms // (config.kv_heads * sequences))
        tuning = {"ATTENTION_WARPS": warps, "ATTENTION_LOADS": loads, "SPLITS": splits}
        if rows:
            tuning["SPLIT_ROWS"] = rows
        found[warps, loads, splits, rows] = attention(config, positions, cache, device, sequences, **tuning)
    return list(found.values())


def sweep(
    bench: AttentionBench, model: str, config: Config, cache: str, depths: Sequence[int], bandwidth: float
) -> list[AttentionRow]:
    """Rows of all cuts that this chip can launch."""
    rows = []
    for at in candidates(config, max(depths) + SPARE_POSITIONS, cache, bench.device, bench.sequences):
        try:
            rows += [bench.row(model, at, depth, config.layers, bandwidth) for depth in depths]
        except (CompileFailed, LaunchError):
            continue  # more shared memory than a kernel may have
    return rows


def measured(
    bench: AttentionBench, models: Sequence[str], cache: str, depths: Sequence[int], bandwidth: float, best: int
) -> Iterator[AttentionRow]:
    """The rows of models: one a depth, or the `best` cuts of each."""
    for model in models:
        config = SHAPES[model].config
        if not best:
            at = attention(config, max(depths) + SPARE_POSITIONS, cache, bench.device, bench.sequences)
            yield from (bench.row(model, at, depth, config.layers, bandwidth) for depth in depths)
            continue
        rows = sweep(bench, model, config, cache, depths, bandwidth)
        for depth in depths:
            yield from sorted((row for row in rows if row.depth == depth), key=lambda row: row.us)[:best]


def line(row: AttentionRow) -> str:
    """A row as text."""
    cut = f"{row.warps}w {row.loads}l {row.splits}p {row.split_rows or ''}"
    step = row.us * row.launches
    what = f"{row.model:12} {row.cache:5} x {row.sequences:<2} depth {row.depth:6} {cut:16}"
    return (
        f"{what} {row.bytes / 1e6:8.2f} MB {row.us:8.2f} us "
        f"{row.gb_s:7.0f} GB/s {100 * row.share:5.1f}%  {step:8.1f} us a step"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print what the attention of models costs on this machine's GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="+", choices=list(SHAPES))
    parser.add_argument("--depths", nargs="+", type=int, default=DEPTHS)
    parser.add_argument("--cache", choices=CACHES, default=CACHES[0])
    parser.add_argument("--sequences", type=int, default=1, help="decoded together")
    parser.add_argument(
        "--sweep", type=int, default=0, metavar="N", help="try all cuts, print the best N of each depth"
    )
    parser.add_argument("--dependency", default="chain-lean", choices=[*FORMS, *HOPPER])
    parser.add_argument("--json", action="store_true", help="a JSON list on the last line")
    asked = parser.parse_args(arguments)
    dependency = {**FORMS, **HOPPER}[asked.dependency]
    rows = []
    with opened() as device:
        with products.ProductBench(device, dependency) as reading:
            bandwidth = reading.bandwidth()
        print(f"read bandwidth {bandwidth / 1e9:.0f} GB/s", flush=True)
        with AttentionBench(device, dependency, asked.sequences) as bench:
            for row in measured(bench, asked.models, asked.cache, asked.depths, bandwidth, asked.sweep):
                rows.append(row)
                print(line(row), flush=True)
    if asked.json:
        print(json.dumps([asdict(row) for row in rows]))


if __name__ == "__main__":
    main()
