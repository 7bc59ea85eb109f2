"""Where one token of a model goes: the launches of a decode step by layer and role, or the stages of a step in one
launch.

The step is the engine's own. It is timed as it is, then recorded with the GPU's clock between its launches
(nv/stamps.py), which then run one at a time; a step in one launch is run with the timestamps that its CTAs take
themselves. On an emulated board each launch is run once more by itself, for what the board counts of it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

from tegrad.bench.kernels import weight_bytes
from tegrad.bench.plans import by_address
from tegrad.bench.steps import PLANNERS, StepTimes
from tegrad.diag.flame import flame
from tegrad.diag.profile import chip_of, foot, row_json
from tegrad.diag.timeline import Counts, Row, Scale, Span, rows, table
from tegrad.hw.chips import Chip
from tegrad.llm.cache import bytes_of
from tegrad.llm.config import Config
from tegrad.llm.engine import Engine, suits_named
from tegrad.llm.errors import ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.persistent import PersistentPlan
from tegrad.llm.plan import DecodePlan
from tegrad.llm.sampling import Settings
from tegrad.llm.schedule import Op
from tegrad.nv.device import NVDevice
from tegrad.nv.kernel import BOARD_VARIABLE
from tegrad.nv.replay import Launch, Recording
from tegrad.nv.stamps import StampedRecording, clock_ahead

Counter = Callable[[], Mapping[str, Any] | None]
"""What a board has counted so far; None where there is none."""
CTAS_SHOWN: Final = 8
"""CTAs of a step in one launch that a trace shows, at most."""
ROLES: Final[Mapping[Op, str]] = {Op.EMBED: "embed", Op.JOIN: "join", Op.SAMPLE: "sample"}
"""What stages are for that are no operation by themselves."""
PHASES: Final = ("waits", "works", "finishes")


@dataclass(frozen=True, slots=True)
class TokenProfile:
    """Tokens of a model, and where their time went."""

    model: str
    plan: str
    chip: Chip | None
    depth: int
    tokens: int
    us: float
    """Of a step as the engine runs it."""
    spans: tuple[Span, ...]
    """Launches, of every token, or stages, of one: medians over its CTAs. Each with its `layer` and `role`."""
    shown: tuple[Span, ...]
    """What a trace shows, the host's part too."""

    @property
    def measured(self) -> int:
        """Tokens that `spans` are of."""
        return 1 if self.plan == "one launch" else self.tokens


def profile(
    path: Path, *, tokens: int = 3, depth: int = 0, context: int | None = None, plan: str = "",
    counted: Counter = lambda: None,
) -> TokenProfile:  # fmt: skip
    """Profile `tokens` tokens after `depth` positions, with the plan "many" or "one", or as the engine chooses. What it
    raises is `Engine`'s, and ContextError."""
    if not suits_named():
        raise ModelError("only our own kernels are profiled by token, and they do not run this device: choose DEV=NV")
    with ExitStack() as undo:
        file = undo.enter_context(Gguf.open(path))
        reach = depth + tokens + 1
        Config.read(file)  # what nothing of ours runs is refused as it is
        try:
            engine = undo.enter_context(Engine(file, context, plan=PLANNERS[plan] if plan else None, reach=reach))
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{error}; profile a run of it: tegrad profile -- tegrad run {path}") from error
        if reach > engine.context:
            raise ModelError(f"{reach} positions exceed the context of {engine.context}: choose a smaller --depth")
        token = _Token(engine, depth, tokens)
        us = token.plain_us()
        device = cast(NVDevice, engine.device)
        if isinstance(engine.plan, PersistentPlan):
            spans, shown = token.stages(counted)
        else:
            spans, shown = token.launches(counted)
        return TokenProfile(
            path.name, engine.plan_name, chip_of(device.arch, device.sm_count), depth, tokens, us, tuple(spans),
            tuple(shown),
        )  # fmt: skip


class _Token:
    """An engine whose steps are profiled."""

    def __init__(self, engine: Engine, depth: int, tokens: int) -> None:
        self.engine, self.depth, self.tokens = engine, depth, tokens
        self.device = cast(NVDevice, engine.device)
        self.weights = by_address(engine.model)

    def begin(self) -> None:
        """The next step stands at the depth."""
        self.device.synchronize()
        self.engine._states.begin(0, [1], self.depth, self.engine.context)

    def plain_us(self) -> float:
        """Microseconds of a step as the engine's loop submits it: the median."""
        loop = self.engine._loop(Settings())
        self.begin()
        loop.recording.wait(loop.recording.run())
        self.begin()
        return median(self.device.timed(loop.recording.run) for _ in range(self.tokens))

    def ran(self, recording: Recording) -> Iterator[Span]:
        """Run a recording for each token, after one that does not count; what the host did, in its own time."""
        self.begin()
        recording.wait(recording.run())
        self.begin()
        for _ in range(self.tokens):
            begun = time.perf_counter_ns()
            number = recording.run()
            submitted = time.perf_counter_ns()
            recording.wait(number)
            done = time.perf_counter_ns()
            yield Span("host", "submit", begun / 1e3, (submitted - begun) / 1e3)
            yield Span("host", "wait", submitted / 1e3, (done - submitted) / 1e3)

    # ---- many launches

    def launches(self, counted: Counter) -> tuple[list[Span], list[Span]]:
        """A span of each launch of each token, and these with the host's."""
        step, runs = self.engine._step(Settings()), list[list[int]]()
        with StampedRecording(self.device, step, runs.append) as recording:
            host = list(self.ran(recording))
        runs, ahead = runs[-self.tokens :], clock_ahead(self.device)
        start = min(host[0].begin, runs[0][0] / 1e3 + ahead)
        counts = self.counts(step, counted)
        spans = []
        for times in runs:
            for at, (role, layer, launch) in enumerate(self.named(step)):
                begin, us = times[at] / 1e3 + ahead - start, (times[at + 1] - times[at]) / 1e3
                args = {"role": role, "layer": layer, "kernel": launch.program.name, "grid": launch.grid,
                        "block": launch.block}  # fmt: skip
                nbytes = weight_bytes(launch, self.weights) + self.cached(role, layer)
                name = role if layer is None else f"{role} {layer}"
                found = None if counts is None else counts[at]
                spans.append(Span("GPU", name, begin, us, nbytes, found, args))
        return spans, [*(replace(span, begin=span.begin - start) for span in host), *spans]

    def named(self, step: Sequence[Launch]) -> list[tuple[str, int | None, Launch]]:
        """Role and layer of each launch of a step."""
        plan = cast(DecodePlan, self.engine.plan)
        sampled = [("sample", None, launch) for launch in step[len(plan.named) :]]
        return [*plan.named, *sampled]

    def cached(self, role: str, layer: int | None) -> int:
        """Bytes of what attention or a convolution of a layer reads of earlier tokens at the depth."""
        if layer is None or role != (mixer := self.engine.config.network.mixers[layer]).role:
            return 0
        rows = min(self.depth + 1, mixer.window or self.depth + 1)
        return bytes_of(self.engine.config, mixer, rows, self.engine._cache.q8)

    def counts(self, step: Sequence[Launch], counted: Counter) -> list[Counts] | None:
        """What a board counts of each launch; None where there is none."""
        if counted() is None:
            return None
        found = []
        self.begin()
        for launch in step:
            before = _counts_of(counted, launch.program.name)
            with self.device.record([launch]) as recording:
                recording.wait(recording.run())
            found.append(_counts_of(counted, launch.program.name) - before)
        return found

    # ---- one launch

    def stages(self, counted: Counter) -> tuple[list[Span], list[Span]]:
        """A span of each stage, with medians over its CTAs, and what some of the CTAs and the host did."""
        engine, own = self.engine, cast(PersistentPlan, self.engine.plan)
        with PersistentPlan(
            engine.model, engine._states, engine._cache, tuning=own.kernel.tuning, timestamps=True
        ) as plan:
            step, runs = plan.likeliest(engine._sampling), list[list[int]]()
            with StampedRecording(self.device, step, runs.append) as recording:
                host = list(self.ran(recording))
            begin, end = (ns / 1e3 for ns in runs[-1][-2:])  # of the step itself: others make layers' own inputs
            times = StepTimes.of(plan, end - begin)
            counts = self.counts(step, counted)
        ahead = clock_ahead(self.device)
        begin += ahead
        start = min(host[0].begin, begin)
        whole = Span("GPU", "step", begin - start, end + ahead - begin, counts=counts[-1] if counts else None)
        roles = list(_roles(times))
        spans, at = [], 0.0
        for stage in times.stages():
            (role, layer), us = roles[stage.index], sum(stage.phases)
            nbytes = stage.nbytes + self.cached(role, layer)
            phases = {name: round(us, 3) for name, us in zip(PHASES, stage.phases, strict=True)}
            args = {"role": role, "layer": layer, **phases}
            name = role if layer is None else f"{role} {layer}"
            spans.append(Span("median of the CTAs", name, begin - start + at, us, nbytes, args=args))
            at += us
        shown = [replace(span, begin=span.begin - start) for span in host]
        return spans, [*shown, whole, *spans, *_ctas(times, roles, begin - start)]


def _counts_of(counted: Counter, kernel: str) -> Counts:
    return Counts.of((counted() or {}).get("kernels", {}).get(kernel, {}))


def _roles(times: StepTimes) -> Iterator[tuple[str, int | None]]:
    """Role and layer of each stage."""
    for stage in times.program.stages:
        role = ROLES[stage.op] if stage.op in ROLES or stage.does is None else stage.does.role
        yield role, None if role in ("embed", "logits", "sample") else stage.layer


def _ctas(times: StepTimes, roles: Sequence[tuple[str, int | None]], begin: float) -> Iterator[Span]:
    """The stages of some CTAs, each by its own clock from its first stage on, with their phases inside."""
    count = times.program.ctas
    for cta in range(0, count, -(-count // CTAS_SHOWN)):
        own = times.us[cta] - times.us[cta, 0, 0] + begin
        for (role, layer), at in zip(roles, own.tolist(), strict=True):
            if role == "sample" or at != sorted(at) or at[0] < begin:
                continue
            name, track = role if layer is None else f"{role} {layer}", f"CTA {cta}"
            yield Span(track, name, at[0], at[3] - at[0], args={"role": role, "layer": layer})
            for phase, since, until in zip(PHASES, at, at[1:], strict=False):
                yield Span(track, phase, since, until - since)


# ---- as text and JSON


def text(found: TokenProfile, peak: float | None = None, *, layers: bool = False) -> str:
    """By role, with `layers` by layer too, and what the numbers mean; `peak` in bytes a second, if not the chip's."""
    board = os.environ.get(BOARD_VARIABLE, "")
    if board:
        peak = None
    elif peak is None and found.chip is not None:
        peak = found.chip.mem_bandwidth
    scale = Scale(found.measured, peak)
    whole = sum(span.us for span in found.spans) / found.measured
    head = f"{found.model}, a token after {found.depth} positions, {found.plan}: {found.us:.1f} us"
    told = "by its stages" if found.plan == "one launch" else "with its launches one at a time"
    parts = [f"{head}, {whole:.1f} us {told}", table(rows(found.spans, lambda span: span.args["role"]), "role", scale)]
    if layers:
        parts.append(table(rows(found.spans, _layer), "layer", scale))
    if found.plan == "one launch":
        parts.append("\n".join(_phases(found)))
        parts += [f"counted of all of it: {_counted(span.counts)}" for span in found.shown if span.counts]
    parts.append(foot(board, found.chip, peak, "MB are the weights, keys and values that a launch has to read."))
    return "\n\n".join(parts)


def _counted(counts: Counts) -> str:
    instructions, read, written = counts.instructions / 1e6, counts.read / 1e6, counts.written / 1e6
    return f"{instructions:.3f} Minstr, {read:.3f} MB read, {written:.3f} MB written"


def _layer(span: Span) -> str:
    layer = span.args["layer"]
    return str(span.args["role"] if layer is None else layer)


def _phases(found: TokenProfile) -> Iterator[str]:
    """What the stages of a step in one launch do, in all."""
    told = {"waits": "for what other CTAs compute", "works": "on it", "finishes": "by publishing results"}
    whole = sum(span.us for span in found.spans)
    for phase in PHASES:
        us = sum(span.args[phase] for span in found.spans)
        yield f"a CTA {phase} {told[phase]}: {us:.1f} us, {us / whole:.1%}"


def picture(found: TokenProfile) -> str:
    """An SVG of a token's layers and roles: by time, or on a board, where they were counted, by instructions."""
    each = rows(found.spans)
    counted = all(row.counts for row in each)
    layers = {span.name: (_layer(span), span.args["role"]) for span in found.spans}
    parts = []
    for row in each:
        layer, role = layers[row.name]
        size = row.counts.instructions / 1e6 if counted and row.counts else row.us
        parts.append(((role,) if layer == role else (f"layer {layer}", role), size / found.measured))
    board = os.environ.get(BOARD_VARIABLE, "")
    where = f"emulated {board}" if board else found.chip.name if found.chip else ""
    title = f"{found.model}, a token after {found.depth} positions, {found.plan}, {where}"
    return flame(parts, title, "million instructions" if counted else "us")


def as_json(found: TokenProfile) -> dict[str, Any]:
    """Everything: the step, sums by role, each launch or stage."""
    return {
        "model": found.model, "plan": found.plan, "chip": found.chip and found.chip.name, "depth": found.depth,
        "board": os.environ.get(BOARD_VARIABLE, ""), "tokens": found.measured, "us": found.us,
        "roles": [row_json(row) for row in rows(found.spans, lambda span: span.args["role"])],
        "spans": [{**row_json(row), **args} for row, args in _each(found)],
    }  # fmt: skip


def _each(found: TokenProfile) -> Iterator[tuple[Row, Mapping[str, Any]]]:
    for span in found.spans:
        row = Row(span.name)
        row.add(span)
        yield row, span.args
