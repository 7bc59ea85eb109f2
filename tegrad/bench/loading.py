"""How long it takes until a model's weights lie packed on the device, and how the reading is best cut.

    tegrad bench loading MODEL.gguf                    three loads, the first perhaps from a cold page cache
    tegrad bench loading MODEL.gguf --readers 2 --readers 8 --mib 4 --mib 32

A load is opening the file, allocating every buffer, reading, copying and repacking, to the last repacked byte on the
device. Times are the clock's on the wall.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tegrad.bench.gpu import opened, printed
from tegrad.llm import packed, stream
from tegrad.llm.packed import PackedModel
from tegrad.nv.gpu import Gpu

REPETITIONS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """One load: how it was cut, its seconds, and those until the first byte had arrived."""

    readers: int
    mib: int
    seconds: float
    first: float
    gb_s: float


def load(path: Path, device: Gpu, readers: int, mib: int) -> Load:
    """Load a model once, with so many reading threads and pieces of so many MiB."""
    arrived: list[float] = []

    def progress(done: int, total: int) -> None:
        if not arrived:
            arrived.append(time.perf_counter())

    size = mib << 20
    with (
        patch.multiple(stream, READERS=readers, HOST_BLOCKS=2 * readers, PIECE_BYTES=size),
        patch.object(packed, "PIECE_BYTES", size),
    ):
        begun = time.perf_counter()
        with PackedModel.load(path, device.device, progress):
            seconds = time.perf_counter() - begun
    return Load(readers, mib, seconds, arrived[0] - begun, path.stat().st_size / seconds / 1e9)


def measure(device: Gpu, path: Path, readers: Sequence[int], sizes: Sequence[int]) -> Iterator[Load]:
    """REPETITIONS loads of every cut."""
    for count in readers:
        for mib in sizes:
            for _ in range(REPETITIONS):
                yield load(path, device, count, mib)


def show(path: Path, readers: Sequence[int], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Print the loads of a model on this machine's GPU, by default as it is loaded; the rows."""

    def line(row: Load) -> str:
        what = f"{row.readers} readers, {row.mib} MiB: {row.seconds:.3f} s"
        return f"{what}, first after {row.first:.3f} s, {row.gb_s:.1f} GB/s"

    with opened() as device:
        rows = measure(device, path, readers or [stream.READERS], sizes or [stream.PIECE_BYTES >> 20])
        return [asdict(row) for row in printed(rows, line)]
