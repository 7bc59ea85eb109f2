"""tinygrad through NV beside tinygrad through CUDA as published, or PyTorch: `tegrad bench tinygrad`.

Each side is one process (rows.py or rows_torch.py) that does all rows. In each round of a row both sides do it, one
after the other, and swap who begins; what they computed is compared before anything is reported. Times are
microseconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from tegrad.bench.record import Record, RecordError, Side, machine, make, now, versions

FOLDER: Final = Path(__file__).parent
ROUNDS: Final = 5


@dataclass(frozen=True)
class Party:
    """Who does the rows: its script and its environment variables; tinygrad has the same renderer on both sides."""

    name: str
    script: str
    environment: Mapping[str, str]
    needs: str = ""
    """What it needs of the machine, for the error when its process ends."""


LIBCUDA: Final = "a GPU and libcuda.so of NVIDIA's driver, which an emulated board does not have"
TORCH: Final = f"PyTorch with CUDA (pip install torch), {LIBCUDA}"
OURS: Final = Party("tinygrad, NV", "rows.py", {"DEV": "NV:CUDA"})
PEERS: Final = {
    # TEGRAD=0: tinygrad as published, also where tegrad is installed
    "cuda": Party("tinygrad, CUDA", "rows.py", {"DEV": "CUDA:CUDA", "TEGRAD": "0"}, LIBCUDA),
    "torch": Party("PyTorch, eagerly", "rows_torch.py", {"TEGRAD_TORCH": "eager"}, TORCH),
    "torch-graphs": Party("PyTorch, CUDA graphs", "rows_torch.py", {"TEGRAD_TORCH": "graphs"}, TORCH),
}
SAMPLES: Final = {"launch": 1_000, "stream": 1, "mlp": 1_000, "matmul": 20, "copyin": 10, "copyout": 10, "gpt2": 120}
"""How many calls a round times, by the first part of the row's name."""
USUAL_SAMPLES: Final = 50
"""The same, for all other rows."""
ELEMENTWISE: Final = ("add", "mul", "exp", "relu")
ROWS: Final = (
    "launch",
    "stream",
    "mlp",
    *(f"matmul-{kind}-{size}" for kind in ("f16", "f32") for size in (256, 512, 1024, 2048, 4096)),
    *(f"{kind}-{size}m" for kind in ELEMENTWISE for size in (1, 10)),
    *(f"{kind}-{size}mb" for kind in ("copyin", "copyout") for size in (1, 16, 64, 256)),
    *(f"copy-{size}mb" for size in (1, 16, 256)),
    *(f"alloc-{size}mb" for size in (1, 64)),
    *(f"gpt2-{kind}-124m" for kind in ("f32", "f16")),
)
SETTINGS: Final = ("BEAM", "JITBEAM", "NOOPT")
"""tinygrad's environment variables that change the kernels of both sides; with one of them no figure is kept."""
TOLERANCES: Final = {"matmul-f16": (2e-2, 2e-1), "mlp": (2e-2, 2e-2), "gpt2-f16": (2e-2, 5e-2), "": (1e-4, 1e-3)}
"""By how a row's name begins, how far a value may differ: by the relative tolerance of the peer's value plus the
absolute one. The sides may add up in another order, and halves are rounded after that."""


@dataclass(frozen=True)
class Figure:
    """A figure of results/figures.json: the rows whose times it adds up, and which quantile it takes of each round."""

    id: str
    what: str
    rows: tuple[str, ...]
    quantile: float = 0.5


FIGURES: Final = {
    figure.id: figure
    for figure in (
        Figure("launch-median-nv-vs-cuda", "a TinyJit call of one small kernel, to synchronized", ("launch",)),
        Figure("launch-p99-nv-vs-cuda", "the same, 99th percentile of 1,000", ("launch",), 0.99),
        Figure("mlp-nv-vs-cuda", "a 12-128-128-4 network of halves by TinyJit, to synchronized", ("mlp",)),
        Figure("eager-launch-us", "a launch, of 10,000 without a wait", ("stream",)),
        Figure("copyout-16mb-nv-vs-cuda", "16 MB from the GPU", ("copyout-16mb",)),
        Figure("copyout-256mb-nv-vs-cuda", "256 MB from the GPU", ("copyout-256mb",)),
        Figure("copyin-256mb-nv-vs-cuda", "256 MB to the GPU", ("copyin-256mb",)),
        Figure(
            "elementwise-10m-nv-vs-cuda",
            "a sum, a product, an exponential and a relu of 10 million floats",
            tuple(f"{kind}-10m" for kind in ELEMENTWISE),
        ),
        Figure("gpt2-124m-nv-vs-cuda", "a token of GPT-2 124M in floats and one in halves", ROWS[-2:]),
        Figure("matmul-f16-2048-nv-vs-cuda", "a product of 2,048 in halves", ("matmul-f16-2048",)),
        Figure("matmul-f16-4096-nv-vs-cuda", "a product of 4,096 in halves", ("matmul-f16-4096",)),
    )
}


@dataclass
class Worker:
    """One party's process, from the first row to the last, or until a row fails."""

    party: Party
    process: subprocess.Popen[str] = field(init=False)
    answered: bool = False
    """Whether it has done anything yet."""

    def __post_init__(self) -> None:
        clean = {name: value for name, value in os.environ.items() if name != "DEV"}
        party = dict(self.party.environment)
        interface, _, device = os.environ.get("DEV", "").partition(";")[0].rpartition("+")
        if interface and device.startswith("NV") and party.get("DEV", "").startswith("NV"):
            party["DEV"] = f"{interface}+{party['DEV']}"  # the GPU that was chosen
        root = str(FOLDER.parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        environment = {**clean, "TEGRAD_ROOT": root, "PYTHONPATH": path, **party}
        command = [sys.executable, str(FOLDER / self.party.script)]
        self.process = subprocess.Popen(
            command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, row: str, samples: int) -> dict[str, Any]:
        """Have the process do a row: its answer, as rows.py describes it. RecordError if the process ends instead."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"row": row, "samples": samples}) + "\n")
            self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            needs = f". It needs {self.party.needs}" if self.party.needs else ""
            raise RecordError(
                f"{row}: {self.party.name} ended with exit code {self.process.wait()}; its error is above{needs}"
            )
        answer: dict[str, Any] = json.loads(line)
        self.answered = True
        return answer

    def close(self) -> None:
        """End the process: by the end of its stdin, after 10 s by a kill."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@dataclass(frozen=True)
class Compared:
    """One row, done by both sides: microseconds of each call, a list for each round."""

    row: str
    ours: list[list[float]]
    peer: list[list[float]]
    loops: tuple[list[float], list[float]] = ([], [])
    """How quick our core and the peer's were, one number for each round: microseconds of a fixed Python loop."""

    def ratio(self, quantile: float = 0.5) -> float:
        """The peer's time divided by ours; above 1 we are faster. A side's time is the median over its rounds of a
        quantile of each."""
        return median(times(self.peer, quantile)) / median(times(self.ours, quantile))


def times(rounds: Sequence[Sequence[float]], quantile: float = 0.5) -> list[float]:
    """A quantile of each round: at 0.99, of 100 calls or fewer the slowest."""
    return [sorted(one)[min(int(quantile * len(one)), len(one) - 1)] for one in rounds]


def agree(row: str, ours: Sequence[float], theirs: Sequence[float]) -> None:
    """RecordError unless all values agree within the row's tolerances (TOLERANCES); NaN never does."""
    relative, absolute = next(bounds for begin, bounds in TOLERANCES.items() if row.startswith(begin))
    if len(ours) != len(theirs):
        raise RecordError(f"{row}: {len(ours)} values through NV and {len(theirs)} through the peer")
    for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if not abs(one - other) <= absolute + relative * abs(other):
            raise RecordError(f"{row}: value {at} is {one} through NV and {other} through the peer")


def compare(row: str, ours: Worker, peer: Worker, rounds: int = ROUNDS) -> Compared:
    """One row on both sides, which swap who begins from round to round. RecordError if a side ends or they disagree."""
    samples = SAMPLES.get(row.split("-")[0], USUAL_SAMPLES)
    taken: tuple[list[list[float]], list[list[float]]] = [], []
    loops: tuple[list[float], list[float]] = [], []
    for number in range(rounds):
        values: list[list[float]] = [[], []]
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            answer = (ours, peer)[side].ask(row, samples)
            taken[side].append(answer["us"])
            loops[side].append(answer["loop_us"])
            values[side] = answer.get("values", [])
        agree(row, *values)
    return Compared(row, *taken, loops)


def measured(rows: Iterable[str], vs: str, rounds: int = ROUNDS) -> Iterator[Compared | RecordError]:
    """Each row, compared, or its error, after which the next row starts both processes anew.

    `vs` is a key of PEERS. A side that ends before anybody has done a row will not do the others either: its error is
    the last.
    """
    workers: list[Worker] = []
    begun = False

    def end() -> None:
        while workers:
            workers.pop().close()

    try:
        for row in rows:
            if not workers:
                workers += [Worker(OURS), Worker(PEERS[vs])]
            try:
                found = compare(row, workers[0], workers[1], rounds)
            except RecordError as error:
                begun |= all(worker.answered for worker in workers)
                end()
                yield error
                if not begun:
                    return
            else:
                begun = True
                yield found
    finally:
        end()


def take(id: str) -> Record:
    """Measure the rows of one figure, beside tinygrad through CUDA. RecordError if one of them fails."""
    found = {}
    for row in measured(FIGURES[id].rows, "cuda"):
        if isinstance(row, RecordError):
            raise row
        found[row.row] = row
    return records(found, f"tegrad bench take {id}")[0]


def records(found: Mapping[str, Compared], command: str) -> list[Record]:
    """The records of all figures whose rows are among those `found`, which must be beside tinygrad through CUDA.

    `command` goes into each record.
    """
    made = []
    for figure in FIGURES.values():
        if not all(row in found for row in figure.rows):
            continue
        sides = []
        for party, side in ((OURS, "ours"), (PEERS["cuda"], "peer")):
            each = [times(getattr(found[row], side), figure.quantile) for row in figure.rows]
            how = f"{command}; " + " ".join(f"{name}={value}" for name, value in party.environment.items())
            sides.append(Side(party.name, how, [sum(one) for one in zip(*each, strict=True)]))
        made.append(make(figure.id, figure.what, "us", sides[0], larger_is_better=False, peer=sides[1]))
    return made


def text(found: Compared) -> str:
    """A row's line, below HEAD: medians, their ratio, the range of the rounds' medians, 99th percentiles."""
    ours, peer = (median(times(side)) for side in (found.ours, found.peer))
    late = (median(times(side, 0.99)) for side in (found.ours, found.peer))
    spread = [f"{min(times(side)):.1f} to {max(times(side)):.1f}" for side in (found.ours, found.peer)]
    return (
        f"{found.row:18} {ours:10.1f} {peer:10.1f} {found.ratio():7.2f}   {spread[0]:>22} {spread[1]:>22}   "
        + " ".join(f"{one:10.1f}" for one in late)
        + f" {found.ratio(0.99):7.2f}"
    )


HEAD: Final = (
    f"{'us a call':18} {'NV':>10} {'peer':>10} {'ratio':>7}   {'rounds, NV':>22} {'rounds, peer':>22}   "
    f"{'p99 NV':>10} {'p99 peer':>10} {'ratio':>7}"
)


def as_json(found: Compared) -> dict[str, Any]:
    """A row for --json: by side the median, 99th percentile and least of each round, in microseconds."""
    sides = {"ours": found.ours, "peer": found.peer}
    quantiles = {"median": 0.5, "p99": 0.99, "least": 0.0}
    taken = {
        side: {name: times(rounds, quantile) for name, quantile in quantiles.items()} for side, rounds in sides.items()
    }
    loops = dict(zip(sides, found.loops, strict=True))
    return {
        "row": found.row,
        "unit": "us",
        **taken,
        "loop_us": loops,
        "ratio": found.ratio(),
        "ratio_p99": found.ratio(0.99),
    }


def settings() -> dict[str, str]:
    """Those of SETTINGS that are set to something, with their values."""
    return {name: os.environ[name] for name in SETTINGS if os.environ.get(name, "") not in ("", "0")}


def document(found: Iterable[Compared | RecordError], vs: str, command: str) -> dict[str, Any]:
    """Rows as they are kept in results/hardware: what they were measured with, and which failed with what."""
    rows = list(found)
    return {
        "command": command,
        "peer": PEERS[vs].name,
        "settings": settings(),
        "date": now(),
        "machine": machine(),
        "versions": versions(),
        "unit": "us a call",
        "rows": [as_json(row) for row in rows if isinstance(row, Compared)],
        "failed": [str(row) for row in rows if isinstance(row, RecordError)],
    }
