"""How long it takes until a model's weights lie packed on the device, and how the reading is best cut.

    tegrad bench loading MODEL.gguf                    three loads, the first perhaps from a cold page cache
    tegrad bench loading MODEL.gguf --readers 2 --readers 8 --mib 4 --mib 32

`python -m tegrad.bench.loading` is the same with lists: `--readers 2 4 8 --mib 4 8 32`.

A load is opening the file, allocating every buffer, reading, copying and repacking, to the last repacked byte on the
device. Times are the clock's on the wall.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

from tegrad.bench.dependencies import opened
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the loads of a model on this machine's GPU."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--readers", type=int, nargs="+", default=[stream.READERS])
    parser.add_argument("--mib", type=int, nargs="+", default=[stream.PIECE_BYTES >> 20])
    parser.add_argument("--json", action="store_true", help="a JSON list on the last line")
    given = parser.parse_args(arguments)
    rows = []
    with opened() as device:
        for row in measure(device, given.model, given.readers, given.mib):
            rows.append(asdict(row))
            print(f"{row.readers} readers, {row.mib} MiB: {row.seconds:.3f} s, first after {row.first:.3f} s, "
                  f"{row.gb_s:.1f} GB/s", flush=True)  # fmt: skip
    if given.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
