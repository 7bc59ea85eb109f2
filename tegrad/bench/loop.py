"""The decode loop from outside: tokens per second at a depth, what the host does for each, what lies between two steps.

    tegrad bench loop 1b-q6k --depth 0 4096 --plan many one
    tegrad bench loop --file MODEL.gguf --dependency chain-lean --overlapped chain-latch-program

Tokens per second are by the clock on the wall, from the first doorbell to the last token read. The host's time is CPU
time of the thread, waits included. The gap is the GPU's: what a step takes more as a run of its own than after another
one in the same recording, where only a dependency between two kernels lies between them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from tegrad.bench.dependencies import FORMS, HOPPER, opened
from tegrad.bench.models import provide
from tegrad.llm.engine import Engine, Planner
from tegrad.llm.gguf import Gguf
from tegrad.llm.loop import Loop
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.sampling import Settings
from tegrad.nv.replay import DEFAULT, DEPENDENCIES, Dependency, Launch, Recording

TOKENS: Final = 128
REPETITIONS: Final = 9
JOINED_STEPS: Final = 16
"""Steps of the recording that holds several."""
PLANS: Final[Mapping[str, Planner]] = {"many": DecodePlan, "one": PersistentPlan}


@dataclass(frozen=True, slots=True)
class LoopRow:
    """Medians for one model and depth: tokens per second, microseconds of the host's CPU and between steps a token."""

    model: str
    depth: int
    plan: str
    dependency: str
    tok_s: float
    host_us: float
    submit_us: float
    gap_us: float | None
    launches: int


class LoopBench:
    """An engine with a greedy step, and what is measured of its loop."""

    def __init__(
        self, path: Path, context: int, dependency: Dependency = DEFAULT, overlapped: Dependency | None = None,
        plan: Planner = DecodePlan,
    ) -> None:  # fmt: skip
        if overlapped is not None:
            plan = partial(DecodePlan, overlap=True)
        with Gguf.open(path) as file:
            self.engine = Engine(file, context, device="NV", dependency=dependency, overlapped=overlapped, plan=plan)
        self.dependency = dependency
        self.loop: Loop = self.engine._loop(Settings())

    def close(self) -> None:
        """Free the engine."""
        self.engine.close()

    @property
    def step(self) -> tuple[Launch, ...]:
        """The launches of one step."""
        return self.loop.step

    def stream(self, depth: int, tokens: int) -> tuple[float, float]:
        """Seconds of the clock and of the CPU for so many tokens after `depth` positions."""
        stream = self.loop.stream([1], depth, self.engine.context, tokens + 1)
        next(stream)
        clock, cpu = time.perf_counter(), time.thread_time()
        for _ in stream:
            pass
        return time.perf_counter() - clock, time.thread_time() - cpu

    def submit(self, runs: int = 64) -> float:
        """Seconds that the host takes to submit a step to an idle GPU, waits not included; median."""
        recording, samples = self.loop.recording, []
        for _ in range(runs):
            begun = time.perf_counter()
            number = recording.run()
            samples.append(time.perf_counter() - begun)
            recording.wait(number)
        return statistics.median(samples)

    def gap(self, depth: int) -> float:
        """Microseconds that a step takes more as a run of its own than in a recording of JOINED_STEPS.

        Not where launches begin early: then the steps of one recording would too.
        """
        with Recording(self.engine.device, self.step * JOINED_STEPS, self.dependency) as joined:
            together = self._gpu_us(depth, joined, 1)
        return (self._gpu_us(depth, self.loop.recording, JOINED_STEPS) - together) / JOINED_STEPS

    def _gpu_us(self, depth: int, recording: Recording, runs: int) -> float:
        self.loop.settle()
        self.engine._states.begin(0, [1], depth, self.engine.context)
        recording.wait(recording.run())
        self.engine._states.begin(0, [1], depth, self.engine.context)
        return self.engine.device.timed(lambda: [recording.run() for _ in range(runs)])


def measure(
    path: Path, depth: int, dependency: str, *, plan: str = "many", overlapped: str | None = None, tokens: int = TOKENS,
    repetitions: int = REPETITIONS,
) -> LoopRow:  # fmt: skip
    """Everything about one model at one depth; with `overlapped`, this form where launches wait by themselves."""
    all_forms = {**FORMS, **HOPPER}
    context = depth + max(tokens + 2, JOINED_STEPS + 1)
    bench = LoopBench(
        path, context, all_forms[dependency], None if overlapped is None else all_forms[overlapped], PLANS[plan]
    )
    try:
        bench.stream(depth, tokens)
        times = [bench.stream(depth, tokens) for _ in range(repetitions)]
        gap = None if overlapped else statistics.median(bench.gap(depth) for _ in range(repetitions))
        submit = bench.submit()
        return LoopRow(
            path.stem,
            depth,
            plan,
            overlapped or dependency,
            tokens / statistics.median(clock for clock, _ in times),
            1e6 * statistics.median(cpu for _, cpu in times) / tokens,
            1e6 * submit,
            gap,
            len(bench.step),
        )
    finally:
        bench.close()


def line(row: LoopRow) -> str:
    """A row as text."""
    what = f"{row.model:16} depth {row.depth:6} {row.plan:10} {row.dependency:20} {row.launches:4} x"
    gap = "" if row.gap_us is None else f", gap {row.gap_us:6.2f} us"
    return f"{what} {row.tok_s:9.1f} tok/s, host {row.host_us:7.2f} us, submit {row.submit_us:6.2f} us{gap}"


def rows(asked: Any) -> Iterator[LoopRow]:
    """The rows that were asked for."""
    common = {"tokens": asked.tokens, "repetitions": asked.repetitions}
    for path in [*(provide(name) for name in asked.models), *asked.file]:
        for depth in asked.depth:
            for plan in asked.plan:
                for dependency in asked.dependency:
                    yield measure(path, depth, dependency, plan=plan, **common)
            for overlapped in asked.overlapped:
                yield measure(path, depth, asked.dependency[0], overlapped=overlapped, **common)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows of models, depths and dependencies; the last line as JSON with --json."""
    default = next(name for name, form in DEPENDENCIES.items() if form is DEFAULT)
    parser = argparse.ArgumentParser("tegrad bench loop", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("models", nargs="*", help="such as 1b-q6k")
    parser.add_argument("--file", type=Path, action="append", default=[])
    parser.add_argument("--depth", type=int, nargs="+", default=[0])
    parser.add_argument("--dependency", nargs="+", default=[default], choices=[*FORMS, *HOPPER])
    parser.add_argument("--plan", nargs="+", default=["many"], choices=PLANS)
    parser.add_argument(
        "--overlapped", nargs="+", default=[], choices=[*FORMS, *HOPPER], help="launches wait by themselves"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args(arguments)
    found = []
    with opened():
        for row in rows(asked):
            found.append(asdict(row))
            print(line(row), flush=True)
    if asked.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
