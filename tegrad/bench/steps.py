"""Decode steps on the GPU: what one takes, what each kind of launch and each kernel adds to it, and their loop.

    tegrad bench step 1b-q6k.gguf --depth 4096                 what each kind of launch adds
    tegrad bench step 1b-q6k.gguf --dependency latch-program --overlap
    tegrad bench kernels --model 1b-q6k                        what each kernel adds where it stands
    tegrad bench loop 1b-q6k --depth 0 --depth 4096 --plan many --plan one
    tegrad bench persistent 1b-q6k                             a step in one launch, and each kind of its stages
    tegrad bench persistent 1b-q6k --sweep                     every value of each axis of `AXES`, keeping the best
    tegrad bench persistent 1b-q6k --set in_flight=2 --set epoch_flags=0
    tegrad bench persistent 1b-q6k --sweep --compile gh100     only compile, for any chip, without a GPU

A step is the embedding, the layers, the logits and the greedy choice, recorded and submitted as in the decode loop. A
kind of launch, or a kernel, adds the difference between the step and one without it: what it takes in its place, with
its dependencies and with what the caches hold of its neighbours' work. Times are the GPU's, medians.

In the loop, tokens per second are by the clock on the wall, from the first doorbell to the last token read. The host's
time is CPU time of the thread, waits included. The gap is the GPU's: what a step takes more as a run of its own than
after another one in the same recording, where only a dependency between two kernels lies between them.

Of a step in one launch (the persistent one) weights are whatever lies in new buffers of the model's exact sizes, and
its time is the slope between recordings of one step and of nine, so that what a recording costs falls out and the
dependency between two steps does not.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from tegrad.bench import limits, models, plans
from tegrad.bench.dependencies import ALL_FORMS
from tegrad.bench.gpu import gpu_us, opened, printed, spawned
from tegrad.bench.kernels import weight_bytes
from tegrad.bench.plans import PLANS
from tegrad.errors import TegradError
from tegrad.hw.chips import CHIPS
from tegrad.llm.cache import KvCache
from tegrad.llm.engine import Engine, Planner
from tegrad.llm.gguf import Gguf
from tegrad.llm.loop import Loop
from tegrad.llm.packed import PackedModel
from tegrad.llm.persistent import PersistentPlan, Tuning, tuning_for
from tegrad.llm.plan import DecodePlan
from tegrad.llm.sampling import Sampling, Settings
from tegrad.llm.schedule import Op, Program
from tegrad.llm.schedule_build import imbalance
from tegrad.llm.state import STATE_SPEC, State, States
from tegrad.nv.compilers import compile_cuda
from tegrad.nv.gpu import Gpu
from tegrad.nv.replay import DEFAULT, Dependency, Launch, Recording

SPARE_POSITIONS: Final = 256
"""Positions after `depth`: a measurement is a few steps, each of which goes on by one."""


def measure_step(
    device: Gpu, path: Path, *, depth: int = 0, dependency: Dependency, overlap: bool = False, q8: bool = False
) -> dict[str, float]:
    """Microseconds of a step at position `depth`, as "step", and what each kind of launch adds to it."""
    with ExitStack() as undo:
        model = undo.enter_context(PackedModel.load(path, device.device))
        cache = undo.enter_context(KvCache(device, model.config, depth + SPARE_POSITIONS, q8=q8))
        states = States(device)
        undo.callback(states.close)
        plan = undo.enter_context(DecodePlan(model, states, cache, overlap=overlap))
        sampling = undo.enter_context(Sampling(device, model.config.vocab))
        chosen = sampling.launches(states, [Settings()], logits=plan.logits, best=plan.best, best_row=plan.best_row)
        launches = [*plan.launches, *chosen]
        kinds = [*(named.kind for named in plan.named), *("sample" for _ in chosen)]

        def us(without: str = "") -> float:
            states.write(0, State(position=depth, limit=cache.positions, active=1))
            kept = [launch for launch, kind in zip(launches, kinds, strict=True) if kind != without]
            return gpu_us(device, kept, dependency)

        step = us()
        return {"step": step, **{kind: step - us(kind) for kind in dict.fromkeys(kinds)}}


def show_step(path: Path, depth: int, dependency: str, *, overlap: bool, q8: bool) -> dict[str, float]:
    """Print what a step of a model costs on this machine's GPU; the row."""
    with opened() as device:
        form = ALL_FORMS[dependency]
        found = measure_step(device, path, depth=depth, dependency=form, overlap=overlap, q8=q8)
    step = found["step"]
    print(f"{path.stem} at {depth}, {dependency}: {step:.1f} us, {1e6 / step:.0f} tok/s")
    for kind, us in found.items():
        if kind != "step":
            print(f"  {kind:10} {us:8.1f} us {100 * us / step:5.1f}%")
    return found


# ---- what each kernel adds; weights are whatever lies in new buffers of a model's exact sizes


def show_stages(name: str, plan: str) -> None:
    """Print what each kernel of a plan of a model such as "1b-q6k" adds to it on this machine's GPU."""
    shape, _ = models.parse(name)
    with opened() as device:
        made = plans.model(shape.config, models.formats(name), device, shape.tied)
        launches, weights = PLANS[plan](made), plans.by_address(made)
        bandwidth = limits.bandwidth(device)
        whole, twice = (gpu_us(device, launches * count, DEFAULT) for count in (1, 2))
        us, size = twice - whole, sum(weight_bytes(launch, weights) for launch in launches)
        print(
            f"{plan} of {name}: {us:.1f} us for {size / 1e6:.1f} MB of weights, {size / us * 1e6 / bandwidth:.0%} of "
            f"the {bandwidth / 1e9:.0f} GB/s that a kernel reads at"
        )
        print(f"{'kernel':>12} {'grid':>12} {'launches':>9} {'MB':>8} {'us':>8} {'each':>7} {'GB/s':>6} {'':>6}")
        for group in plans.groups(launches):
            chosen = set(map(id, group))
            us = whole - gpu_us(device, [launch for launch in launches if id(launch) not in chosen], DEFAULT)
            size = sum(weight_bytes(launch, weights) for launch in group)
            rate = size / us * 1e6 if us > 0 else float("nan")
            speed, of = (f"{rate / 1e9:.0f}", f"{rate / bandwidth:.0%}") if size else ("", "")
            grid = "x".join(map(str, group[0].grid))
            print(
                f"{group[0].program.name:>12} {grid:>12} {len(group):9} {size / 1e6:8.1f} {us:8.1f} "
                f"{us / len(group):7.2f} {speed:>6} {of:>6}"
            )


# ---- when steps begin and end


SOURCE: Final = """
extern "C" __global__ void timestamp(unsigned long long *to, const volatile unsigned *state, int after) {
    unsigned long long now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    to[2 * (state[WRITTEN] - after) + after] = now;
}
"""
"""A step before which n tokens were written stores at 2n, and after it, where there is one more, at 2n + 1."""


class Timestamps:
    """Launches that note the begin and the end of the first `steps` steps of a stream of slot 0. Use it in a `with`."""

    def __init__(self, device: Gpu, states: States, steps: int) -> None:
        self._device, self._states, self._steps = device, states, steps
        macro = f"-DWRITTEN={State.written.offset // 4}"
        image = compile_cuda(SOURCE, device.arch, (macro,))
        self._program = device.load_program(image, "timestamp", buffers=2, values=1)
        self._memory = device.allocate(16 * steps, STATE_SPEC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._device.release(self._memory, STATE_SPEC)

    def around(self, step: Sequence[Launch]) -> tuple[Launch, ...]:
        """The launches of a step with one in front and one after that take the time."""
        begin, end = (Launch(self._program, (self._memory, self._states.states), values=(at,)) for at in (0, 1))
        return (begin, *step, end)

    def clock(self) -> NDArray[np.int64]:
        """Nanoseconds (steps, 2) of each step's begin and end, once the last one is over."""
        view = self._memory.cpu_view()
        return np.frombuffer(bytes(view[0 : 16 * self._steps]), np.int64).reshape(-1, 2)

    def gap(self) -> float:
        """Mean microseconds between the end of a step and the begin of the next, of at least two."""
        begins, ends = self.clock().T
        return float((begins[1:] - ends[:-1]).mean()) / 1e3


# ---- the loop


TOKENS: Final = 128
REPETITIONS: Final = 9
JOINED_STEPS: Final = 16
"""Steps of the recording that holds several."""
OVERLAPPED: Final = "overlapped"
PLANNERS: Final[Mapping[str, Planner]] = {
    "many": DecodePlan, OVERLAPPED: partial(DecodePlan, overlap=True), "one": PersistentPlan,
}  # fmt: skip
"""A step as many launches, as overlapped ones (which wait by themselves, so that they need a dependency that lets them
begin early), or as one."""


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


def measure_loop(
    path: Path, depth: int, dependency: str, *, plan: str = "many", overlapped: str | None = None, tokens: int = TOKENS,
    repetitions: int = REPETITIONS,
) -> LoopRow:  # fmt: skip
    """Everything about one model at one depth; with `overlapped`, this form where launches wait by themselves."""
    context, form = depth + max(tokens + 2, JOINED_STEPS + 1), ALL_FORMS[dependency]
    how: dict[str, Any] = {"plan": PLANNERS[plan]}
    if overlapped is not None:
        how = {"plan": PLANNERS[OVERLAPPED], "overlapped": ALL_FORMS[overlapped]}
    with Gguf.open(path) as file, Engine(file, context, device="NV", dependency=form, **how) as engine:
        loop: Loop = engine._loop(Settings())
        _stream(engine, loop, depth, tokens)
        times = [_stream(engine, loop, depth, tokens) for _ in range(repetitions)]
        # Where launches begin early, the steps of one recording would too.
        gap = None if overlapped else median(_gap(engine, loop, form, depth) for _ in range(repetitions))
        return LoopRow(
            path.stem,
            depth,
            plan,
            overlapped or dependency,
            tokens / median(clock for clock, _ in times),
            1e6 * median(cpu for _, cpu in times) / tokens,
            1e6 * _submit(loop),
            gap,
            len(loop.step),
        )


def _stream(engine: Engine, loop: Loop, depth: int, tokens: int) -> tuple[float, float]:
    """Seconds of the clock and of the CPU for so many tokens after `depth` positions."""
    stream = loop.stream([1], depth, engine.context, tokens + 1)
    next(stream)
    clock, cpu = time.perf_counter(), time.thread_time()
    for _ in stream:
        pass
    return time.perf_counter() - clock, time.thread_time() - cpu


def _submit(loop: Loop, runs: int = 64) -> float:
    """Seconds that the host takes to submit a step to an idle GPU, waits not included; median."""
    samples = []
    for _ in range(runs):
        begun = time.perf_counter()
        number = loop.recording.run()
        samples.append(time.perf_counter() - begun)
        loop.recording.wait(number)
    return median(samples)


def _gap(engine: Engine, loop: Loop, form: Dependency, depth: int) -> float:
    """Microseconds that a step takes more as a run of its own than in a recording of JOINED_STEPS."""

    def us(recording: Recording, runs: int) -> float:
        loop.settle()
        engine._states.begin(0, [1], depth, engine.context)
        recording.wait(recording.run())
        engine._states.begin(0, [1], depth, engine.context)
        return engine.device.timed(lambda: [recording.run() for _ in range(runs)])

    with engine.device.record(loop.step * JOINED_STEPS, form) as joined:
        together = us(joined, 1)
    return (us(loop.recording, JOINED_STEPS) - together) / JOINED_STEPS


def loop_line(row: LoopRow) -> str:
    """A row as text."""
    what = f"{row.model:16} depth {row.depth:6} {row.plan:10} {row.dependency:20} {row.launches:4} x"
    gap = "" if row.gap_us is None else f", gap {row.gap_us:6.2f} us"
    return f"{what} {row.tok_s:9.1f} tok/s, host {row.host_us:7.2f} us, submit {row.submit_us:6.2f} us{gap}"


def show_loop(
    paths: Sequence[Path], depths: Sequence[int], plans: Sequence[str], dependencies: Sequence[str],
    overlapped: Sequence[str], tokens: int, repetitions: int,
) -> list[dict[str, Any]]:  # fmt: skip
    """Print the rows of models, depths and dependencies; with each of `overlapped`, launches wait by themselves."""

    def rows() -> Iterator[LoopRow]:
        measure = partial(measure_loop, tokens=tokens, repetitions=repetitions)
        for path, depth in product(paths, depths):
            for plan, dependency in product(plans, dependencies):
                yield measure(path, depth, dependency, plan=plan)
            for form in overlapped:
                yield measure(path, depth, dependencies[0], overlapped=form)

    with opened():
        return [asdict(row) for row in printed(rows(), loop_line)]


# ---- a step in one launch: what it takes, where its time goes, and which tuning is best


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
RECORDED_STEPS: Final = (1, 9)
"""Steps of the recordings whose difference is measured."""
RIG_POSITIONS: Final = 1024
"""Positions after `depth`: every step that is measured goes on by one."""


class Rig:
    """A model of whatever lies in memory, its cache and its states, for any number of plans."""

    def __init__(self, device: Gpu, name: str, depth: int = 0, dependency: Dependency = ALL_FORMS["chain"]) -> None:
        shape, _ = models.parse(name)
        self.device, self.depth, self.dependency = device, depth, dependency
        self.model: PackedModel = plans.model(shape.config, models.formats(name), device, shape.tied)
        self.cache = KvCache(device, shape.config, depth + RIG_POSITIONS)
        self.states = States(device)
        self.sampling = Sampling(device, shape.config.vocab)

    @property
    def nbytes(self) -> int:
        """Bytes of weights that a step reads; a tied embedding counts once, a table of which it reads a row not."""
        model = self.model
        tables = (model.inputs, None if model.output is model.embedding else model.embedding)
        return sum(matrix.nbytes for matrix in plans.matrices(model) if all(matrix is not table for table in tables))

    def plan(self, tuning: Tuning, timestamps: bool = False) -> PersistentPlan:
        """A plan of the model; the caller closes it."""
        return PersistentPlan(self.model, self.states, self.cache, tuning=tuning, timestamps=timestamps)

    def us(self, launches: Sequence[Launch]) -> float:
        """Microseconds of a step."""
        times = []
        for count in RECORDED_STEPS:
            self.begin()
            times.append(gpu_us(self.device, list(launches) * count, self.dependency))
        return (times[1] - times[0]) / (RECORDED_STEPS[1] - RECORDED_STEPS[0])

    def begin(self) -> None:
        """The next step stands at the depth."""
        self.states.write(0, State(position=self.depth, token=1, limit=self.cache.positions, active=1))

    def close(self) -> None:
        """Free what is not the model's."""
        self.sampling.close()
        self.states.close()
        self.cache.close()


def measure_tuning(rig: Rig, tuning: Tuning) -> float:
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
        us = rig.us(plan.likeliest(rig.sampling)[-1:])  # others make layers' own inputs
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
    best, least = start, measure_tuning(rig, start)
    print(f"{least:8.1f} us  {start}", flush=True)
    for axis in AXES:
        for tuning in list(variants(best, axis)):
            try:
                us = measure_tuning(rig, tuning)
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
    return replace(tuning_for(models.parse(name)[0].config, models.kinds(name), depth + RIG_POSITIONS), **given)


def show_persistent(
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
        bandwidth = limits.bandwidth(device)
        limit = rig.nbytes / bandwidth * 1e6
        us = measure_tuning(rig, tuning)
        if sweeping:
            tuning, us = sweep(rig, tuning)
        print(
            f"{model} at {depth}: {us:.1f} us, {1e6 / us:.0f} tok/s, {limit / us:.0%} of the byte limit "
            f"of {limit:.1f} us, {tuning}"
        )
        printed(parts(rig, tuning), lambda part: f"  {part.line(bandwidth)}")
    return {"us": us, "limit": limit, "tuning": {name: getattr(tuning, name) for name in Tuning.__slots__}}
