"""The figures of decoding and prompts, ours and the peers' on the same file and machine, in turn (`figures.TARGETS`).

    tegrad bench take decode-1b-q6k-d0                     one figure
    tegrad bench decode --out FOLDER                       all that are held side by side, in one process
    tegrad bench decode decode-3b-q6k --plan many          one of them, with a plan of choice

Ours decodes greedily with the engine of `tegrad run`: 128 tokens, from the call to the last token read, so that its
sampling and its start count. llama-bench samples nothing, so that it has no tokens to check. Half of our samples are
taken before the peer's, half after.

In a timed decode the step chooses its tokens itself, steps run ahead of the host, and tokens come through a ring. They
have to be those that the same step gives when the host waits for each, reads its logits and feeds back the likeliest.
Whether the step computes what it should is another matter: after each of these tokens a step of many launches, with the
dependency that recordings have by default, has to find the next one about as likely.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from tegrad.bench import grammar, graph, peers, serve
from tegrad.bench.dependencies import ALL_FORMS, HOPPER
from tegrad.bench.figures import SAMPLE_TOKENS, SERVED, TARGETS, Target, better, target
from tegrad.bench.gpu import opened, spawned
from tegrad.bench.limits import decode_limit, read_bandwidth
from tegrad.bench.models import provide
from tegrad.bench.prefill import prompt, together
from tegrad.bench.record import Record, RecordError, Side, output
from tegrad.bench.steps import OVERLAPPED, PLANNERS, Timestamps
from tegrad.errors import TegradError
from tegrad.llm.config import DEFAULT_CONTEXT
from tegrad.llm.engine import Engine
from tegrad.llm.gemm import PICKS
from tegrad.llm.gguf import Gguf
from tegrad.llm.loop import Loop
from tegrad.llm.plan import DecodePlan
from tegrad.llm.sampling import Settings
from tegrad.llm.state import State
from tegrad.nv.replay import DEFAULT, Dependency, up_to

REPETITIONS: Final = 5
"""Samples of ours before the peer's, and as many after; the first run of either is not counted."""
MAKER_PROCESSES: Final = 3
"""Processes that write models; each has threads of its own."""
PROMPT: Final = "In the beginning God created the heaven and the earth."
TIMEOUT_S: Final = 120
FIRST_TOKEN: Final = 1
"""The token that a decode begins with."""
LOGIT_MARGIN: Final = 1.0
"""Standard deviations of the logits by which a token may lie below the likeliest of a step that rounds otherwise: two
steps' logits differ by less than 0.1 (root mean square), and the largest of 100,000 lies 4 above the mean."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How ours is run, by names: one of PLANNERS, a dependency between launches, and for prompts and batches who picks
    their tiles. Empty is what ours does by itself.
    """

    plan: str = ""
    dependency: str = ""
    pick: str = ""
    alone: bool = False
    """Ours only: to tune it, or where the peer is missing."""
    steps_per_submission: int = 1
    """Steps that one submission holds."""

    def __post_init__(self) -> None:
        for kind, given, known in self._given:
            if given and given not in known:
                raise RecordError(f"no {kind} {given}; known: {', '.join(known)}")
        if self.plan == OVERLAPPED and not self.dependency:
            raise RecordError(f"the plan {OVERLAPPED} needs a dependency, such as {', '.join(HOPPER)}")

    @property
    def _given(self) -> tuple[tuple[str, str, Mapping[str, Any]], ...]:
        """Each choice's name, what was chosen, and what may be."""
        return ("plan", self.plan, PLANNERS), ("dependency", self.dependency, ALL_FORMS), ("pick", self.pick, PICKS)

    @property
    def chunks(self) -> dict[str, Any]:
        """What a `Prefill` or a `Batch` is given; their launches begin early where a step's do."""
        chosen: dict[str, Any] = {"pick": PICKS[self.pick]} if self.pick else {}
        if self.dependency:
            chosen |= {"dependency": ALL_FORMS[self.dependency], "overlap": self.plan == OVERLAPPED}
        return chosen

    @property
    def engine(self) -> dict[str, Any]:
        """The engine's arguments."""
        chosen: dict[str, Any] = {"steps_per_submission": self.steps_per_submission}
        if self.plan:
            chosen["plan"] = PLANNERS[self.plan]
        if self.dependency:
            chosen["overlapped" if self.plan == OVERLAPPED else "dependency"] = ALL_FORMS[self.dependency]
        return chosen

    def between(self, launches: int) -> Dependency:
        """The dependency between the launches of a step, of which so many may begin early where any may."""
        chosen = ALL_FORMS[self.dependency] if self.dependency else DEFAULT
        return up_to(chosen, launches) if self.plan == OVERLAPPED else chosen

    def command(self, target: Target) -> str:
        """The command that takes the figure this way."""
        given = [word for name, chosen, _ in self._given if chosen for word in (f"--{name}", chosen)]
        given += ["--steps-per-submission", str(self.steps_per_submission)] if self.steps_per_submission > 1 else []
        given += ["--alone"] if self.alone else []
        way = ("decode", target.id, *given) if given or target.id not in TARGETS else ("take", target.id)
        return shlex.join(["tegrad", "bench", *way])


# ---- ours


@contextmanager
def conversation(path: Path, depth: int, ways: Ways) -> Iterator[Engine]:
    """An engine on the NV device whose cache is filled with random tokens up to `depth`.

    What is quickest depends on its context, which is that of `tegrad run` or longer, and on how much of it will be
    used, which `tegrad run --max-tokens 128` tells too.
    """
    wanted = depth + SAMPLE_TOKENS + 8
    context = wanted if wanted > DEFAULT_CONTEXT else None
    with Gguf.open(path) as file, Engine(file, context, device="NV", reach=wanted, **ways.engine) as engine:
        if depth:
            engine.feed(np.random.default_rng(4).integers(0, engine.config.vocab, depth).tolist())
        yield engine


def seconds(
    engine: Engine, depth: int, expected: Sequence[int], repetitions: int, clock: Callable[[], float]
) -> list[float]:
    """What greedy tokens after `depth` take of a clock, each time, but for the first; RecordError for others than
    `expected`.
    """
    found = []
    for _ in range(repetitions + 1):
        engine.reset(depth)
        begun = clock()
        came = list(engine.generate([FIRST_TOKEN], Settings(), len(expected)))
        found.append(clock() - begun)
        check_tokens(came, expected)
    return found[1:]


def rates(engine: Engine, depth: int, expected: Sequence[int], repetitions: int) -> list[float]:
    """Tokens per second, as `seconds`."""
    return [len(expected) / took for took in seconds(engine, depth, expected, repetitions, time.perf_counter)]


def host_us(engine: Engine, expected: Sequence[int], repetitions: int) -> list[float]:
    """Microseconds of CPU time that the process takes for a token, as `seconds`."""
    return [1e6 * took / len(expected) for took in seconds(engine, 0, expected, repetitions, time.process_time)]


def gaps(engine: Engine, ways: Ways, expected: Sequence[int], repetitions: int) -> list[float]:
    """Microseconds of the GPU's clock between two steps, the mean of a stream; as `seconds`."""
    found = []
    with Timestamps(engine.device, engine._states, len(expected)) as timestamps:
        step = timestamps.around(engine._step(Settings()))
        form = ways.between(1 + len(engine.plan.launches))
        loop = Loop(
            engine.device, step, engine._states, dependency=form, steps_per_submission=ways.steps_per_submission
        )
        with closing(loop):
            for _ in range(repetitions + 1):
                came = list(loop.stream([FIRST_TOKEN], 0, engine.context, len(expected)))
                loop.settle()
                check_tokens(came, expected)
                found.append(timestamps.gap())
    return found[1:]


def process(arguments: Sequence[str]) -> float:
    """Seconds from the start of `tegrad ...` to its end; RecordError where it fails.

    Python may keep compiled modules, as an installed package has them: some machines forbid it in the environment.
    """
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    begun = time.perf_counter()
    output([sys.executable, "-m", "tegrad", *arguments], f"`tegrad {shlex.join(arguments)}`", TIMEOUT_S, env=kept)
    return time.perf_counter() - begun


# ---- a figure of each kind


def around(ways: Ways, ours: Callable[[], list[float]], peer: Callable[[], Side]) -> tuple[list[float], Side | None]:
    """Our samples before the peer's and after, and the peer's; ours alone where that is asked for."""
    samples = ours()
    if ways.alone:
        return samples, None
    theirs = peer()
    return samples + ours(), theirs


def _decode(target: Target, path: Path, ways: Ways) -> Record:
    depth = target.amount
    with opened() as device, conversation(path, depth, ways) as engine:
        expected = expected_tokens(engine, depth, SAMPLE_TOKENS)
        ours, peer = around(
            ways,
            lambda: rates(engine, depth, expected, REPETITIONS),
            lambda: peers.decode(path, depth=depth, tokens=SAMPLE_TOKENS),
        )
        limit = decode_limit(path, depth, read_bandwidth(device))
    second = None if depth or ways.alone else _second(path)
    return target.record(
        Side("tegrad", ways.command(target), ours), peer=peer, limit=limit.rate if limit else None,
        limit_note=limit.note if limit else "", others=() if second is None else (second,),
    )  # fmt: skip


def _second(path: Path) -> Side | None:
    """tinygrad 0.13's samples, if it is there and runs; what it says if it does not."""
    try:
        return peers.tinygrad_decode(path)
    except RecordError as error:
        print(f"tegrad: without {peers.TINYGRAD}: {error}", file=sys.stderr)
        return None


def _prompt(target: Target, path: Path, ways: Ways) -> Record:
    with opened():
        ours, peer = around(
            ways, lambda: prompt(path, target.amount, **ways.chunks), lambda: peers.prefill(path, target.amount)
        )
    return target.record(Side("tegrad", ways.command(target), ours), peer=peer)


def _batch(target: Target, path: Path, ways: Ways) -> Record:
    with opened():
        ours, peer = around(
            ways, lambda: together(path, target.amount, **ways.chunks), lambda: peers.batch(path, target.amount)
        )
    return target.record(Side("tegrad", ways.command(target), ours), peer=peer)


def _grammar(target: Target, path: Path, ways: Ways) -> Record:
    with opened():
        found = grammar.speeds(path, SAMPLE_TOKENS, 2 * REPETITIONS, **ways.chunks)
    return target.record(Side("tegrad", ways.command(target), found.shares))


def _first(target: Target, path: Path, ways: Ways) -> Record:
    arguments = ["run", str(path), PROMPT, "--max-tokens", "1", "--temperature", "0", "--raw", "--json"]
    process(arguments)
    ours, peer = around(
        ways,
        lambda: [process(arguments) for _ in range(REPETITIONS)],
        lambda: peers.first_token(path, PROMPT),
    )
    shown = shlex.join(["tegrad", *arguments]).replace(str(path), path.name)
    return target.record(Side("tegrad", shown, ours), peer=peer)


def _host(target: Target, path: Path, ways: Ways) -> Record:
    with opened(), conversation(path, 0, ways) as engine:
        ours = host_us(engine, expected_tokens(engine, 0, SAMPLE_TOKENS), REPETITIONS)
    return target.record(Side("tegrad", ways.command(target), ours))


def _gap(target: Target, path: Path, ways: Ways) -> Record:
    with opened(), conversation(path, 0, ways) as engine:
        ours = gaps(engine, ways, expected_tokens(engine, 0, SAMPLE_TOKENS), REPETITIONS)
    return target.record(Side("tegrad", ways.command(target), ours))


def _served(target: Target, path: Path, ways: Ways) -> Record:
    return serve.take(target, path)


def _matvec(target: Target, path: Path, ways: Ways) -> Record:
    ours, peer = graph.repaired(path)
    return target.record(ours, peer=peer)


TAKERS: Final[Mapping[str, Callable[[Target, Path, Ways], Record]]] = {
    "decode": _decode, "prompt": _prompt, "batch": _batch, "first": _first, "host": _host, "gap": _gap,
    "matvec": _matvec, "grammar": _grammar, **dict.fromkeys(SERVED, _served),
}  # fmt: skip
PEERS: Final[Mapping[str, str]] = {
    "decode": "llama-bench", "prompt": "llama-bench", "batch": "llama-batched-bench", "first": "llama-completion",
    **dict.fromkeys(serve.VALUES, serve.SERVER),
}  # fmt: skip
"""The program that a kind of figure is held against."""


def take(id: str, ways: Ways | None = None) -> Record:
    """Measure one figure; its model is written first if it is not there. RecordError at once without the peer."""
    wanted, ways = target(id), ways or Ways()
    if wanted.kind in PEERS and not ways.alone:
        peers.program(PEERS[wanted.kind])
    return TAKERS[wanted.kind](wanted, provide(wanted.model), ways)


# ---- the command


@dataclass(frozen=True, slots=True)
class Line:
    """A figure as the command prints it: medians, and what is to be reached; or why there is none."""

    id: str
    ours: float | None = None
    unit: str = ""
    peer: float | None = None
    other: float | None = None
    ratio: float | None = None
    """Ours to the peer's, above 1 where ours is better."""
    goal: float | None = None
    reached: bool | None = None
    """None where nobody can tell."""
    limit: float | None = None
    share: float | None = None
    """Of the byte limit."""
    error: str = ""


def line(record: Record) -> Line:
    """A record's line."""
    ours, larger = record.ours.median, record.larger_is_better
    peer = record.peer.median if record.peer else None
    goal = target(record.id).goal.level(peer, record.limit, larger=larger)
    reached = None if goal is None else ours >= goal if larger else ours <= goal
    other = record.others[0].median if record.others else None
    ratio, share = better(ours, peer, larger), better(ours, record.limit, larger)
    return Line(record.id, ours, record.unit, peer, other, ratio, goal, reached, record.limit, share)


HEAD: Final = f"{'figure':26} {'ours':>10} {'peer':>10} {'ratio':>7} {'to reach':>10}     {'limit':>10} {'share':>6}"


def text(row: Line) -> str:
    """A line of the table."""
    if row.error:
        return f"{row.id:26} {row.error}"

    def number(value: float | None, form: str = "10.5g") -> str:
        return "-".rjust(int(form.split(".")[0])) if value is None else format(value, form)

    reached = {True: "yes", False: "no", None: ""}[row.reached]
    share = "-" if row.share is None else f"{row.share:.1%}"
    other = "" if row.other is None else f"  {peers.TINYGRAD} {row.other:.4g}"
    return (
        f"{row.id:26} {number(row.ours)} {number(row.peer)} {number(row.ratio, '7.3g')} {number(row.goal)} {reached:3} "
        f"{number(row.limit)} {share:>6} {row.unit}{other}"
    )


def prepare(ids: Sequence[str]) -> None:
    """Write the models of figures that are not there yet, several at a time."""
    names = list(dict.fromkeys(target(id).model for id in ids))
    list(spawned(provide, [(name,) for name in names], MAKER_PROCESSES))


def measured(ids: Sequence[str], ways: Ways) -> Iterator[tuple[Line, Record | None]]:
    """Each figure's line as it comes, with its record; a figure that fails leaves the others."""
    for id in ids:
        try:
            record = take(id, ways)
        except (TegradError, OSError, MemoryError) as error:
            yield Line(id, error=f"{type(error).__name__}: {error}"), None
        else:
            yield line(record), record


# ---- the tokens that a timed decode has to draw


def expected_tokens(engine: Engine, depth: int, count: int) -> list[int]:
    """The tokens that the engine has to draw greedily after `depth` positions and FIRST_TOKEN.

    RecordError where many launches disagree.
    """
    engine.reset(depth)
    found, token = [], FIRST_TOKEN
    for _ in range(count):
        token = int(engine.feed([token]).argmax())
        found.append(token)
    _hold_against_launches(engine, depth, found)
    engine.reset(depth)
    return found


def check_tokens(came: Sequence[int], wanted: Sequence[int]) -> None:
    """RecordError where a timed decode drew other tokens than it had to, or another number of them."""
    if len(came) != len(wanted):
        raise RecordError(f"{len(came)} tokens came where {len(wanted)} were asked for")
    for at, (own, right) in enumerate(zip(came, wanted, strict=True)):
        if own != right:
            raise RecordError(
                f"the timed decode drew {own} as token {at + 1}, where the same step gave {right} when the host waited "
                "for each: what is timed here is wrong, its speed is no figure"
            )


def _hold_against_launches(engine: Engine, depth: int, tokens: Sequence[int]) -> None:
    """RecordError for a token that is not about the likeliest of a step of many launches after the same ones."""
    device = engine.device
    for loop in engine._loops.values():
        loop.settle()
    with (
        DecodePlan(engine.model, engine._states, engine._cache) as plan,
        device.record(plan.launches) as step,
    ):
        for at, (token, drawn) in enumerate(zip([FIRST_TOKEN, *tokens[:-1]], tokens, strict=True)):
            engine._states.write(0, State(position=depth + at, token=token, limit=engine.context, active=1))
            step.wait(step.run())
            logits = np.frombuffer(device.download(plan.logits, 4 * engine.config.vocab), np.float32)
            below = float((logits.max() - logits[drawn]) / logits.std())
            if not below <= LOGIT_MARGIN:  # nor where they are no numbers
                raise RecordError(
                    f"the step draws {drawn} as token {at + 1}, which lies {below:.2f} standard deviations below what "
                    f"many launches find the likeliest, {int(logits.argmax())}: it computes something else"
                )
