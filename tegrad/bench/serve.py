"""`tegrad serve` beside llama.cpp's server under the same load, beside its engine alone, and beside itself when idle.

    tegrad bench serve load 1b-q6k --out FOLDER        1, 32, 8 and 64 clients, ours and the peer's in turn
    tegrad bench serve load 8b-q4km --alone --engine   ours and, in a process, its engine alone
    tegrad bench serve same --requests 1000            answers under load against those given alone
    tegrad bench serve replicas --out FOLDER           two replicas, each on a GPU, against one

A round is three requests to a client, each sent by the first client that is free. Both servers get the same ones, no
round has a prompt of another one, and what they do at first is not measured. Ours runs through all of it, half of its
rounds before the peer's and half after. The peer's server is started anew for each number of clients, with as many
slots, in four settings where the number of clients is that of a figure, and in the best of these where it is not.
"""

from __future__ import annotations

import os
import queue
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final, NamedTuple
from urllib.request import urlopen

from tegrad.bench import peers
from tegrad.bench.figures import TARGETS, Target
from tegrad.bench.load import ANSWER_TOKENS, PROMPT_TOKENS, Request, Round, Seen, differing, drive, requests
from tegrad.bench.record import Record, RecordError, Side, replace_rows
from tegrad.llm.config import Config
from tegrad.llm.gguf import Gguf

CLIENTS: Final = (1, 32, 8, 64)
"""Those of figures first."""
ROUNDS: Final = 2
REQUESTS: Final = 3
"""Of each client in a round."""
LEAST_REQUESTS: Final = 8
SLOTS: Final = 64
"""Of our server."""
START_S: Final = 300.0
END_S: Final = 20.0
SERVER: Final = "llama-server"
GREEDY: Final = ("--samplers", "top_k", "--top-k", "1")
"""As little as its sampling can do."""
RESIDENT: Final = ("-no-kvu", "-cram", "0")
"""Prefixes are found in slots, and no slot is copied to the host's memory."""
SETTINGS: Final[Sequence[tuple[str, ...]]] = (
    (*RESIDENT, "-bs", *GREEDY, "-ub", "2048"),
    (*RESIDENT, "-bs", *GREEDY),
    ("-kvu", "-bs", "--cache-reuse", "256"),
    (*RESIDENT, *GREEDY, "-ub", "2048"),
)
"""The peer's, besides what all of them have."""
SCALING: Final = "serve-2-gpus-scaling"
REPLICAS: Final = 2
SAME: Final = "serve-same-answer"
SAME_BLOCK: Final = 200
"""Requests that are answered alone before the same ones are answered under load: more than the cache can hold."""
SAME_TOKENS: Final = 32
SAME_TEMPERATURE: Final = 0.8
"""Of every other of them."""
TABLE: Final = "serve.json"
_KEY: Final = ("model", "clients", "server", "command", "round")
_URL: Final = re.compile(r"serving at (\S+)")
OURS: Final = "tegrad"
ENGINE: Final = "engine"


@dataclass(frozen=True)
class Load:
    """What is to be measured of a model."""

    model: str
    """Its name in the figures."""
    path: Path
    clients: Sequence[int] = CLIENTS
    rounds: int = ROUNDS
    requests: int = REQUESTS
    slots: int = SLOTS
    lengths: tuple[int, int] = PROMPT_TOKENS
    tokens: int = ANSWER_TOKENS

    @property
    def context(self) -> int:
        """Positions that the longest prompt and its answer take."""
        return -(-(self.lengths[1] + self.tokens) // 64) * 64

    @cached_property
    def vocab(self) -> int:
        """Tokens of the model."""
        with Gguf.open(self.path) as file:
            return Config.read(file).vocab

    def round(self, clients: int, number: int, do: Callable[[Sequence[Request], int], Round]) -> Row:
        """A round, the same requests whoever is to `do` them; others first, which are not counted."""
        seed, count = 1_000_000 * clients + 10_000 * number, max(LEAST_REQUESTS, self.requests * clients)
        short = (self.lengths[0], max(self.lengths[0], self.lengths[1] // 4))
        do(requests(2 * clients, self.vocab, seed + 9000, lengths=short, tokens=min(8, self.tokens)), clients)
        found = do(requests(count, self.vocab, seed, lengths=self.lengths, tokens=self.tokens), clients)
        return Row(
            self.model, clients, "", "", number, len(found.seen), found.tokens, found.seconds, found.rate,
            found.first_ms, found.gap_ms, found.cached,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Row:
    """A round, in figures. `command` is the server's, without folders."""

    model: str
    clients: int
    server: str
    command: str
    round: int
    requests: int
    tokens: int
    seconds: float
    tok_s: float
    first_ms: float
    """Median time to the first token."""
    gap_ms: float
    """99th percentile of the time between two events of a stream, where tokens within 10 ms share one."""
    cached: float
    """Share of prompts' tokens that were found in the cache."""


_COLUMNS: Final = {"tok/s": 8, "first ms": 9, "gap ms": 7, "cached": 6, "s": 6}
HEAD: Final = " ".join(
    [f"{'model':8} clients {'server':10}", *(f"{name:>{width}}" for name, width in _COLUMNS.items())]
)


def text(row: Row) -> str:
    """A line."""
    return (
        f"{row.model:8} {row.clients:7} {row.server:10} {row.tok_s:8.0f} {row.first_ms:9.1f} {row.gap_ms:7.2f} "
        f"{row.cached:6.1%} {row.seconds:6.2f}  {row.command}".rstrip()
    )


# ---- the servers


class Server(NamedTuple):
    """One that runs: where, and by which command, without the folders of this machine."""

    url: str
    command: str


@contextmanager
def ours(load: Load, *, same: bool = False, replicas: int = 1) -> Iterator[Server]:
    """Our server, ready, with so many GPUs."""
    arguments = ["serve", str(load.path), "--context", str(load.context), "--slots", str(load.slots)]
    arguments += ["--queue", str(max(load.clients)), "--log", "off", *(["--same-answer"] if same else [])]
    arguments += ["--replicas", str(replicas)] if replicas > 1 else []
    shown = peers.shown("tegrad", arguments, load.path)

    def url(said: str) -> str | None:
        found = _URL.search(said)
        return found[1] if found else None

    with _running([sys.executable, "-m", "tegrad", *arguments, "--port", "0"], dict(os.environ), url) as found:
        yield Server(found, shown)


@contextmanager
def theirs(load: Load, clients: int, setting: Sequence[str]) -> Iterator[Server]:
    """The peer's, ready, with a slot for each client, and for a single one another that keeps what prompts share."""
    program, slots = peers.program(SERVER), max(clients, 2)
    arguments = ["-m", str(load.path), "-ngl", "99", "-fa", "on", "-np", str(slots)]
    arguments += ["-c", str(slots * load.context), *setting]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"

    def ready(said: str) -> str | None:
        with suppress(OSError), urlopen(f"{url}/health", timeout=1) as answer:  # 503 while it loads
            return url if answer.status == 200 else None
        return None

    command = [str(program), *arguments, "--host", "127.0.0.1", "--port", str(port), "--no-ui"]
    with _running(command, peers.environment(program), ready) as found:
        yield Server(found, peers.shown(SERVER, arguments, load.path))


@contextmanager
def _running(
    command: Sequence[str], environment: Mapping[str, str], ready: Callable[[str], str | None]
) -> Iterator[str]:
    """A server's process, once `ready` finds a URL in what it says, or by asking it. RecordError."""
    with (
        NamedTemporaryFile() as log,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as process,
    ):
        try:
            yield _awaited(process, Path(log.name), ready)
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def _awaited(process: subprocess.Popen[bytes], log: Path, ready: Callable[[str], str | None]) -> str:
    end, ended = time.monotonic() + START_S, False
    while not ended and time.monotonic() < end:
        ended = process.poll() is not None
        if not ended and (url := ready(log.read_text(errors="replace"))):
            return url
        time.sleep(0.1)
    said = log.read_text(errors="replace").strip()[-600:]
    raise RecordError(f"`{shlex.join(map(str, process.args))}` is not ready to serve: {said}")  # type: ignore[arg-type]


# ---- ours beside the peer's


def compared(load: Load, *, alone: bool = False, engine: bool = False) -> Iterator[Row]:
    """Rounds of both servers as they are done, of ours `alone` to tune it or where the peer is missing, of its `engine`
    besides."""
    if not alone:
        peers.program(SERVER)
    before = (load.rounds + 1) // 2
    with ours(load) as server:
        yield from _rounds(load, OURS, server, load.clients, range(before))
        if not alone:
            yield from _peers(load)
        yield from _rounds(load, OURS, server, load.clients, range(before, load.rounds))
    if engine:
        yield from _engine(load)


def _rounds(load: Load, name: str, server: Server, clients: Iterable[int], numbers: range) -> Iterator[Row]:
    for count, number in product(clients, numbers):
        yield replace(load.round(count, number, partial(drive, server.url)), server=name, command=server.command)


def _peers(load: Load) -> Iterator[Row]:
    """The peer's rounds: the first one in all settings for what is a figure's, all others in the best."""
    figured = {target.amount for target in TARGETS.values() if target.kind in VALUES and target.model == load.model}
    best = SETTINGS[0]
    for clients in sorted(load.clients, key=lambda clients: clients not in figured):
        tried = SETTINGS if clients in figured else (best,)
        speeds: dict[tuple[str, ...], float] = {}
        for setting in tried:
            with theirs(load, clients, setting) as server:
                for row in _rounds(load, peers.LLAMA, server, [clients], range(1)):
                    speeds[setting] = row.tok_s
                    yield row
        best = max(tried, key=lambda setting: speeds[setting])
        if clients in figured and load.rounds > 1:
            with theirs(load, clients, best) as server:
                yield from _rounds(load, peers.LLAMA, server, [clients], range(1, load.rounds))


VALUES: Final[Mapping[str, str]] = {"serve-rate": "tok_s", "serve-first": "first_ms", "serve-gap": "gap_ms"}
"""A row's value by the kind of figure."""


def records(rows: Sequence[Row]) -> Iterator[Record]:
    """The figures that rows hold both sides of, each beside the peer's best setting for that figure."""
    for target in TARGETS.values():
        name = VALUES.get(target.kind)
        sides: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            if name and (row.model, row.clients) == (target.model, target.amount):
                sides.setdefault((row.server, row.command), []).append(getattr(row, name))
        made = [Side(server, command, values) for (server, command), values in sides.items()]
        own, other = ([side for side in made if side.name == who] for who in (OURS, peers.LLAMA))
        if own and other:
            pick = max if target.larger else min
            yield target.record(own[0], peer=pick(other, key=lambda side: side.median))
        if target.kind == "serve-overhead" and (samples := overhead(rows, target.model, target.amount)):
            yield target.record(Side(OURS, f"tegrad bench serve load {target.model} --engine", samples))


def keep(folder: Path, rows: Sequence[Row]) -> None:
    """Put rows into a folder's table."""
    what = "rounds of requests to servers; see docs/benchmarks.md"
    replace_rows(folder / TABLE, what, _KEY, [asdict(row) for row in rows])


# ---- through the server, and through the engine alone


class _Timed:
    """Where the engine puts an answer; `over` is told of its end."""

    def __init__(self, prompt_tokens: int, over: Callable[[_Timed], None]) -> None:
        self.asked = time.perf_counter()
        self._prompt_tokens, self._over, self._cached = prompt_tokens, over, 0
        self._times: list[float] = []
        self.error: Exception | None = None

    def begin(self, cached: int) -> None:
        """See `service.Sink`."""
        self._cached = cached

    def put(self, token: int, logprobs: object) -> None:
        """See `service.Sink`."""
        self._times.append(time.perf_counter())

    def end(self, reason: str, error: Exception | None = None) -> None:
        """See `service.Sink`."""
        self.error = error
        self._over(self)

    def seen(self) -> Seen:
        """The answer, without a text."""
        if self.error is not None:
            raise self.error
        return Seen(self.asked, self._times, "", len(self._times), self._prompt_tokens, self._cached)


def through_engine(service: Any, asked: Sequence[Request], clients: int) -> Round:
    """The round that `drive` has a server do, by a `Service` in this process: no HTTP, and no texts."""
    ended: queue.SimpleQueue[_Timed] = queue.SimpleQueue()
    sinks: list[_Timed] = []
    begun = time.perf_counter()
    for at, one in enumerate(asked):
        if at >= clients:
            ended.get()
        sinks.append(_Timed(len(one.tokens), ended.put))
        service.ask(sinks[-1], one.tokens, one.max_tokens)
    for _ in range(min(clients, len(asked))):
        ended.get()
    seconds = time.perf_counter() - begun
    return Round([sink.seen() for sink in sinks], seconds)


def _engine(load: Load) -> Iterator[Row]:
    """The rounds through the engine alone."""
    from tegrad.llm.start import choose_device

    choose_device()
    from tegrad.llm.service import Service  # tinygrad comes with it, which reads what was chosen

    options: dict[str, Any] = {"slots": load.slots, "positions": load.context, "queue": max(load.clients)}
    with Service(load.path, warm=True, **options) as service:
        for clients, number in product(load.clients, range(load.rounds)):
            yield replace(load.round(clients, number, partial(through_engine, service)), server=ENGINE)


def overhead(rows: Sequence[Row], model: str, clients: int) -> list[float]:
    """Percent by which each round took longer through the server than through the engine alone."""
    seconds = {(row.server, row.round): row.seconds for row in rows if (row.model, row.clients) == (model, clients)}
    return [
        100 * (seconds[OURS, number] / alone - 1)
        for (server, number), alone in seconds.items() if server == ENGINE and (OURS, number) in seconds
    ]  # fmt: skip


# ---- several GPUs


def scaled(load: Load) -> Iterator[Row]:
    """Rounds of two GPUs, which may be refused, and of one in turn, each of a server that has just started."""
    for clients, number, replicas in product(load.clients, range(load.rounds), (REPLICAS, 1)):
        with ours(load, replicas=replicas) as server:
            yield from _rounds(load, f"{OURS} x{replicas}", server, [clients], range(number, number + 1))


def scaling(rows: Sequence[Row]) -> list[float]:
    """The speed of two GPUs to that of one, of each round."""
    rates = {(row.server, row.clients, row.round): row.tok_s for row in rows}
    return [
        rates[f"{OURS} x{REPLICAS}", clients, number] / rate
        for (server, clients, number), rate in rates.items() if server == f"{OURS} x1"
    ]  # fmt: skip


def scaling_record(load: Load, rows: Sequence[Row]) -> Record | None:
    """The figure of `scaled`; None of a model that has none, or of other clients."""
    target = TARGETS[SCALING]
    if (load.model, tuple(load.clients)) != (target.model, (target.amount,)):
        return None
    command = f"tegrad bench serve replicas {load.model} --clients {target.amount}"
    return target.record(Side(OURS, command, scaling(rows)))


# ---- the same answers


def alike(load: Load, count: int) -> Iterator[tuple[int, int]]:
    """So many requests, each alone and among those of all clients: how many were made so far, and differed.

    Every other pair is drawn with a seed, the others are greedy. The server is told that answers are to be the same.
    """
    made = [
        replace(one, temperature=SAME_TEMPERATURE if at % 4 > 1 else 0.0)
        for at, one in enumerate(requests(count, load.vocab, 1, lengths=load.lengths, tokens=load.tokens))
    ]
    clients, differed = max(load.clients), 0
    with ours(load, same=True) as server:
        for first in range(0, count, SAME_BLOCK):
            block = made[first : first + SAME_BLOCK]
            alone, together = drive(server.url, block, 1), drive(server.url, block[::-1], clients)
            differed += differing(alone.seen, together.seen[::-1])
            yield first + len(block), differed


def same_record(load: Load, count: int, differed: int) -> Record | None:
    """The figure of `alike`: how many requests were made, 0 if one differed; None of a model that has none."""
    target = TARGETS[SAME]
    if load.model != target.model:
        return None
    command = f"tegrad bench serve same {load.model} --requests {count}"
    return target.record(Side(OURS, command, [0.0 if differed else float(count)]))


# ---- a figure by itself


def take(target: Target, path: Path) -> Record:
    """Measure one figure."""
    load, found = Load(target.model, path, (target.amount,)), []
    if target.kind == "serve-same":
        load = replace(load, tokens=SAME_TOKENS)
        *_, (made, differed) = alike(load, int(target.goal.value or 0))
        found = [same_record(load, made, differed)]
    elif target.kind == "serve-scaling":
        found = [scaling_record(load, list(scaled(load)))]
    else:
        beyond = target.kind == "serve-overhead"
        found = [*records(list(compared(load, alone=beyond, engine=beyond)))]
    return next(record for record in found if record is not None and record.id == target.id)
