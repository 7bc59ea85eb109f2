"""What the persistent decode step takes on the GPU, where its time goes, and which tuning is best.

    tegrad bench persistent 1b-q6k                     a step, and each kind of stage
    tegrad bench persistent 1b-q6k --sweep             every value of each axis of `AXES`, keeping the best
    tegrad bench persistent 1b-q6k --set in_flight=2 --set epoch_flags=0
    tegrad bench persistent 1b-q6k --sweep --compile gh100    only compile, for any chip, without a GPU

Weights are whatever lies in new buffers of the model's exact sizes. A step is the whole of it: embedding, layers,
logits, the greedy token and the state. Its time is the GPU's: the slope between recordings of one step and of nine, so
that what a recording costs falls out and the dependency between two steps does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tegrad.bench import limits, models, plans
from tegrad.bench.dependencies import ALL_FORMS
from tegrad.bench.gpu import gpu_us, opened, printed, spawned
from tegrad.errors import TegradError
from tegrad.hw.chips import CHIPS
from tegrad.llm.cache import KvCache
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan, Tuning
from tegrad.llm.sampling import Sampling
from tegrad.llm.schedule import Op, Program, imbalance
from tegrad.llm.state import State, States
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import Dependency, Launch

AXES: Final[Mapping[str, tuple[int, ...]]] = {
    "in_flight": (2, 1, 3),
    "epoch_flags": (1, 0),
    "consumers": (8, 16, 12),
    "per_tile": (2, 1),
    "epilogue": (4, 3, 7),
    "polled": (2, 3, 1, 4),
    "pipeline_stages": (32, 5, 3),
    "evict_first": (1, 0),
    "backoff": (0, 20, 100),
    "attention_warps": (8, 16, 12),
    "attention_loads": (2, 4),
    "head_groups": (4, 2, 1),
    "attention_rows": (192, 384, 768),
    "attention_pipeline": (0, 1, 2),
    "replicas": (8, 4, 1),
    "bulk": (1, 0),
}
"""In the order of their expected worth."""
STEPS: Final = (1, 9)
"""Steps of the recordings whose difference is measured."""
SPARE_POSITIONS: Final = 1024
"""Positions after `depth`: every step that is measured goes on by one."""


class Rig:
    """A model of whatever lies in memory, its cache and its states, for any number of plans."""

    def __init__(self, device: Gpu, name: str, depth: int = 0, dependency: Dependency = ALL_FORMS["chain"]) -> None:
        shape, _ = models.parse(name)
        self.device, self.depth, self.dependency = device, depth, dependency
        self.model: PackedModel = plans.model(shape.config, models.formats(name), device, shape.tied)
        self.cache = KvCache(device, shape.config, depth + SPARE_POSITIONS)
        self.states = States(device)
        self.sampling = Sampling(device, shape.config.vocab)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads; a tied embedding counts once."""
        return sum(matrix.nbytes for matrix in plans.matrices(self.model)) - (
            0 if self.model.output is self.model.embedding else self.model.embedding.nbytes
        )

    def plan(self, tuning: Tuning, timestamps: bool = False) -> PersistentPlan:
        """A plan of the model; the caller closes it."""
        return PersistentPlan(self.model, self.states, self.cache, tuning=tuning, timestamps=timestamps)

    def us(self, launches: Sequence[Launch]) -> float:
        """Microseconds of a step."""
        times = []
        for count in STEPS:
            self.begin()
            times.append(gpu_us(self.device, list(launches) * count, self.dependency))
        return (times[1] - times[0]) / (STEPS[1] - STEPS[0])

    def begin(self) -> None:
        """The next step stands at the depth."""
        self.states.write(0, State(position=self.depth, token=1, limit=self.cache.positions, active=1))

    def close(self) -> None:
        """Free what is not the model's."""
        self.sampling.close()
        self.states.close()
        self.cache.close()


def measure(rig: Rig, tuning: Tuning) -> float:
    """Microseconds of a step with a tuning; TegradError where a step gave up waiting."""
    with rig.plan(tuning) as plan:
        us = rig.us(plan.likeliest(rig.sampling))
        if told := plan.stuck():
            raise TegradError("a step gave up waiting:\n" + "\n".join(told))
    return us


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of stage in a step, as a CTA that has work in it sees it; microseconds of all such stages together."""

    op: str
    stages: int
    wait: float
    """Until the input was staged."""
    work: float
    """Until the consumers' results were there."""
    finish: float
    """Until the results were published."""
    nbytes: int
    """Of the weights that all CTAs stream for these stages."""

    @property
    def us(self) -> float:
        """All of it."""
        return self.wait + self.work + self.finish

    def line(self, bandwidth: float) -> str:
        """In words; `bandwidth` is the memory's, in bytes a second. Streaming runs ahead, so a share may be above 1."""
        told = (
            f"{self.op:8} {self.stages:3} stages of {self.us / self.stages:6.2f} us: waits {self.wait:6.1f}, "
            f"works {self.work:6.1f}, finishes {self.finish:6.1f}"
        )
        if not self.nbytes:
            return told
        return f"{told}; {self.nbytes / 1e6:8.2f} MB, {self.nbytes / self.us * 1e6 / bandwidth:4.0%} of the bandwidth"


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of a step; medians over the CTAs that have work in it, in microseconds."""

    index: int
    op: Op
    phases: tuple[float, float, float]
    """Until the input was staged, until the consumers' results were there, until the results were published."""
    nbytes: int
    """Of the weights that all CTAs stream for it."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """When each stage of a step was where, by the clocks of the CTAs' SMs, which do not agree with each other."""

    program: Program
    us: NDArray[np.float64]
    """(ctas, stages, 4), as the kernel notes them: begun, input there, results there, published."""

    @classmethod
    def of(cls, plan: PersistentPlan, us: float) -> StepTimes:
        """Of the last step, which takes `us`; waits for the device."""
        program = plan.kernel.program
        plan.device.synchronize()
        raw = plan.device.download(plan.timestamps, 32 * program.ctas * len(program.stages))
        cycles = np.frombuffer(raw, np.uint64).reshape(program.ctas, len(program.stages), 4).astype(np.int64)
        whole = cycles[0, len(program.stages) - 2, 3] - cycles[0, 0, 0]
        return cls(program, (cycles * (us / max(1, int(whole)))).astype(np.float64))

    def stages(self) -> list[StageTime]:
        """All of them but the choice of the token, which notes no times."""
        found = []
        for at, stage in enumerate(self.program.stages):
            busy = [ins.cta for ins in stage.instructions if ins.op is not Op.NOTHING]
            spans = np.diff(self.us[busy, at], axis=1)
            spans = spans[(spans >= 0).all(axis=1)]  # CTAs that had no part of attention left no timestamps
            if stage.op is not Op.SAMPLE and len(spans):
                wait, work, finish = np.median(spans, axis=0).tolist()
                nbytes = sum(run.nbytes for ins in stage.instructions for run in ins.runs)
                found.append(StageTime(at, stage.op, (wait, work, finish), nbytes))
        return found


def parts(rig: Rig, tuning: Tuning) -> list[Part]:
    """Where a step's time goes, summed over a kind's stages."""
    with rig.plan(tuning, timestamps=True) as plan:
        us = rig.us(plan.likeliest(rig.sampling))
        found: dict[Op, list[StageTime]] = {}
        for stage in StepTimes.of(plan, us).stages():
            found.setdefault(stage.op, []).append(stage)
    return [_part(op, each) for op, each in found.items()]


def _part(op: Op, stages: Sequence[StageTime]) -> Part:
    wait, work, finish = (sum(phase) for phase in zip(*(one.phases for one in stages), strict=True))
    return Part(op.name, len(stages), wait, work, finish, sum(one.nbytes for one in stages))


def variants(start: Tuning, axis: str) -> Iterator[Tuning]:
    """The tunings along an axis, others as they are."""
    for value in AXES[axis]:
        if axis == "consumers":
            made = replace(start, consumers=value, attention_warps=min(start.attention_warps, value))
        elif axis == "epilogue":
            made = replace(start, epilogue=value, polled=2 if value > 3 else 3)
        else:
            made = replace(start, **{axis: value})
        fits = (
            made.attention_warps == made.consumers
            if made.attention_pipeline
            else made.attention_warps <= made.consumers
        )
        if fits and made != start:
            yield made


def sweep(rig: Rig, start: Tuning) -> tuple[Tuning, float]:
    """Try each axis in turn and keep what is best; prints a line for each try."""
    best, least = start, measure(rig, start)
    print(f"{least:8.1f} us  {start}", flush=True)
    for axis in AXES:
        for tuning in list(variants(best, axis)):
            try:
                us = measure(rig, tuning)
            except TegradError as error:
                print(f"    none     {axis}={getattr(tuning, axis)}: {str(error).splitlines()[0][:90]}", flush=True)
                continue
            print(f"{us:8.1f} us  {axis}={getattr(tuning, axis)}{'  better' if us < least else ''}", flush=True)
            if us < least:
                best, least = tuning, us
    return best, least


def _compile(name: str, chip: str, depth: int, tuning: Tuning) -> str:
    """Compile the kernels of a tuning, so that a GPU does not wait for compilers; what it is, in words."""
    rig = Rig(plans.DryDevice(CHIPS[chip]), name, depth)
    try:
        with rig.plan(tuning), rig.plan(tuning, timestamps=True) as plan:
            return f"{imbalance(plan.kernel.program):.3f} of an even share  {tuning}"
    except TegradError as error:
        return f"none: {str(error).splitlines()[0][:90]}  {tuning}"


def _tuning(name: str, settings: Sequence[str], depth: int = 0) -> Tuning:
    given = {key: int(value) for key, _, value in (entry.partition("=") for entry in settings)}
    return replace(Tuning.suited(models.kinds(name), depth + SPARE_POSITIONS), **given)


def show(
    model: str, depth: int, dependency: str, settings: Sequence[str], *, sweeping: bool, chip: str = ""
) -> dict[str, Any] | None:
    """Print what the persistent step of a model takes on this machine's GPU; for a chip only compile, with no row."""
    tuning = _tuning(model, settings, depth)
    if chip:
        tried = [made for axis in AXES for made in variants(tuning, axis)] if sweeping else []
        for told in spawned(_compile, [(model, chip, depth, made) for made in (tuning, *tried)]):
            print(told, flush=True)
        return None
    with ExitStack() as undo:
        device = undo.enter_context(opened())
        rig = Rig(device, model, depth, ALL_FORMS[dependency])
        undo.callback(rig.close)
        bandwidth = limits.read_bandwidth(device).rate
        limit = rig.nbytes / bandwidth * 1e6
        us = measure(rig, tuning)
        if sweeping:
            tuning, us = sweep(rig, tuning)
        print(
            f"{model} at {depth}: {us:.1f} us, {1e6 / us:.0f} tok/s, {limit / us:.0%} of the byte limit "
            f"of {limit:.1f} us, {tuning}"
        )
        printed(parts(rig, tuning), lambda part: f"  {part.line(bandwidth)}")
    return {"us": us, "limit": limit, "tuning": {name: getattr(tuning, name) for name in Tuning.__slots__}}
