"""tinygrad through NV beside tinygrad through CUDA, as published: `tegrad bench tinygrad`.

Each side is one process that stays, rows.py; both do a row in turn, in alternating order, and their results are
compared before anything is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tegrad.bench.record import RecordError

WORKER: Final = Path(__file__).with_name("rows.py")
ROUNDS: Final = 5
OURS: Final = {"DEV": "NV:CUDA"}
PEERS: Final = {"cuda": {"DEV": "CUDA:CUDA"}}
"""The same renderer on both sides: CUDA C, by NVRTC."""
SAMPLES: Final = {"launch": 1_000, "stream": 1, "mlp": 1_000, "matmul": 20, "copyin": 10, "copyout": 10, "alloc": 50}
"""Of a round, by the row's kind."""
USUAL: Final = 50
ROWS: Final = (
    "launch",
    "stream",
    "mlp",
    *(f"matmul-{kind}-{size}" for kind in ("f16", "f32") for size in (256, 512, 1024, 2048, 4096)),
    *(f"{kind}-{size}m" for kind in ("add", "mul", "exp", "relu") for size in (1, 10)),
    *(f"{kind}-{size}mb" for kind in ("copyin", "copyout") for size in (1, 16, 64, 256)),
    *(f"copy-{size}mb" for size in (1, 16, 256)),
    *(f"alloc-{size}mb" for size in (1, 64)),
)
TOLERANCE: Final = {"f16": (2e-2, 2e-1), "": (1e-4, 1e-3)}
"""Relative and absolute, of a product of halves and of everything else: a sum may have another order."""


@dataclass
class Worker:
    """One side's process."""

    name: str
    environment: dict[str, str]
    process: subprocess.Popen[str] = field(init=False)

    def __post_init__(self) -> None:
        root = str(Path(__file__).resolve().parents[2])
        clean = {name: value for name, value in os.environ.items() if name != "DEV"}
        environment = {**clean, "TEGRAD_ROOT": root, **self.environment}
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)], env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, row: str, samples: int) -> dict[str, Any]:
        """A row's samples. RecordError where the process ended."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"row": row, "samples": samples}) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass
        line = self.process.stdout.readline()
        if not line:
            raise RecordError(f"{row} through {self.name} ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Compared:
    """Microseconds of both sides in rounds, which are samples of theirs."""

    row: str
    ours: list[list[float]]
    peer: list[list[float]]

    def ratio(self, quantile: float = 0.5) -> float:
        """The peer's time divided by ours: medians over rounds of a quantile of each."""
        return self.time(self.peer, quantile) / self.time(self.ours, quantile)

    @staticmethod
    def time(rounds: list[list[float]], quantile: float = 0.5) -> float:
        """The median over rounds of a quantile of each."""
        return statistics.median(_quantile(one, quantile) for one in rounds)


def _quantile(samples: Sequence[float], quantile: float) -> float:
    return sorted(samples)[min(int(quantile * len(samples)), len(samples) - 1)]


def agree(row: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    """RecordError unless both sides computed the same."""
    relative, absolute = TOLERANCE["f16" if "f16" in row or row == "mlp" else ""]
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not abs(one - other) <= absolute + relative * abs(other):
            raise RecordError(f"{row}: value {at} is {one} through NV and {other} through the peer")


def compare(row: str, ours: Worker, peer: Worker, rounds: int = ROUNDS) -> Compared:
    """One row on both sides, in alternating order."""
    samples = SAMPLES.get(row.split("-")[0], USUAL)
    taken: dict[str, list[list[float]]] = {ours.name: [], peer.name: []}
    for number in range(rounds):
        values = {}
        for side in (ours, peer) if number % 2 == 0 else (peer, ours):
            answer = side.ask(row, samples)
            taken[side.name].append(answer["us"])
            values[side.name] = answer.get("values", [])
        agree(row, values[ours.name], values[peer.name])
    return Compared(row, taken[ours.name], taken[peer.name])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rows", nargs="*", default=list(ROWS))
    parser.add_argument("--vs", default="cuda", choices=PEERS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args(arguments)
    ours, peer = Worker("nv", OURS), Worker(asked.vs, PEERS[asked.vs])
    kept = {}
    try:
        for row in asked.rows:
            try:
                found = compare(row, ours, peer, asked.rounds)
            except RecordError as error:
                print(f"{row:20} {error}", flush=True)
                ours.close()
                peer.close()
                ours, peer = Worker("nv", OURS), Worker(asked.vs, PEERS[asked.vs])
                continue
            kept[row] = {"nv": found.ours, asked.vs: found.peer}
            print(
                f"{row:20} nv {found.time(found.ours):10.1f} us, p99 {found.time(found.ours, 0.99):10.1f}; "
                f"{asked.vs} {found.time(found.peer):10.1f}, {found.time(found.peer, 0.99):10.1f}; "
                f"ratio {found.ratio():.2f}, p99 {found.ratio(0.99):.2f}, least {found.ratio(0.0):.2f}",
                flush=True,
            )
    finally:
        ours.close()
        peer.close()
        if asked.out:
            asked.out.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
