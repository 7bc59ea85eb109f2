"""tinygrad's kernel search (BEAM, JITBEAM) with an end: `TEGRAD_SEARCH_S` seconds for a process.

tinygrad searches kernels as they come in a step, each until it gets no better, and waits for the slowest candidate of
every round. With a limit, the kernels of a step are timed first as they are picked without search. Those that take most
of the step's time are searched first, each for at most half of what is left, so that none takes it all. A kernel for
which time runs out takes the best candidate so far. The picked kernel stays where the search found no faster
one. The search itself is tinygrad's, with its settings, its timing and its cache: whatever was searched to its end is
found there by the next process, whose time goes to the rest.

Without the variable, all of this is left out.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

from tinygrad.codegen import to_program, to_program_cache, to_program_key
from tinygrad.codegen.opt.postrange import args_from_ast
from tinygrad.device import Device
from tinygrad.engine import realize
from tinygrad.engine.worker import terminate_worker_pool
from tinygrad.uop.ops import Ops, UOp

from tegrad.errors import SettingError

SECONDS: Final = "TEGRAD_SEARCH_S"
"""Environment variable: what the searches of a process may take together."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a kernel: seconds of one launch as it is picked and as the search found it, and of the search."""

    name: str
    launches: int
    picked: float
    found: float = math.inf
    took: float = 0.0
    whole: bool = False
    """Whether the search came to its end."""

    @property
    def text(self) -> str:
        """A line for people."""
        if self.took == 0:
            return f"{self.name}: {1e6 * self.picked:.1f} us, no time left to search"
        best = f"{1e6 * self.found:.1f} us found" if self.found < self.picked else "nothing faster found"
        end = "" if self.whole else ", cut short"
        return f"{self.name}: {1e6 * self.picked:.1f} us picked, {best} in {self.took:.1f} s{end}"


outcomes: list[Outcome] = []
"""Of this process, in the order of the search."""


def limit() -> float | None:
    """Seconds that the environment allows, None where it does not say; SettingError where it is no number."""
    if not (text := os.environ.get(SECONDS, "")):
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise SettingError(f"{SECONDS} is {text!r}: give the seconds that kernels may be searched for, such as 60.")
    return seconds


@dataclass(slots=True)
class Candidates:
    """tinygrad's worker pool until `end` (of time.monotonic): a round then has no further candidates."""

    pool: Any
    end: float
    cut: bool = False

    def imap_unordered(self, work: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        """As a pool's, but ends early; what the workers have begun goes on without anyone who asks for it."""
        results = iter(map(work, tasks)) if self.pool is None else self.pool.imap_unordered(work, tasks)
        while not self.cut:
            try:
                yield self._next(results)
            except StopIteration:
                return
            except multiprocessing.TimeoutError:
                self.cut = True

    def _next(self, results: Any) -> Any:
        left = self.end - time.monotonic()
        if left <= 0:
            raise multiprocessing.TimeoutError
        return next(results) if self.pool is None else results.next(timeout=left)


@contextmanager
def until(end: float) -> Iterator[Candidates]:
    """tinygrad's searches inside of the block stop at `end`; what was cut short is not kept as a result."""
    from tinygrad.codegen.opt import search

    pool, put = search.get_worker_pool, search.diskcache_put
    candidates = Candidates(None, end)

    def get_worker_pool() -> Candidates:
        candidates.pool = pool()
        return candidates

    search.get_worker_pool = get_worker_pool
    search.diskcache_put = lambda *entry: None if candidates.cut else put(*entry)
    try:
        yield candidates
    finally:
        search.get_worker_pool, search.diskcache_put = pool, put


@dataclass(slots=True)
class SearchedKernel:
    """A kernel to search: one of its calls, its computation, and how often the step launches it."""

    call: UOp
    ast: UOp
    renderer: Any
    launches: int = 0
    picked: UOp | None = None
    """The program that is made without search."""
    time: float = math.inf
    """Seconds of a launch of it."""
    inputs: tuple[list[Any], dict[str, int]] = field(default_factory=lambda: ([], {}))

    def measure(self, program: UOp) -> float:
        """Seconds of a launch, as tinygrad's search times its candidates."""
        from tinygrad.codegen.opt import search

        buffers, values = self.inputs
        clear = hasattr(Device[self.renderer.target.device], "invalidate_caches")
        return float(min(search._time_program(program, values, buffers, clear_l2=clear)))

    @contextmanager
    def buffers(self) -> Iterator[None]:
        """Memory for the kernel's arguments, inside of the block."""
        buffers, values = args_from_ast(self.ast, self.renderer.target.device)
        self.inputs = [buffer.ensure_allocated() for buffer in buffers], values
        try:
            yield
        finally:
            self.inputs = [], {}

    def search(self, seconds: float) -> Outcome:
        """Search for so long, and leave the faster program where tinygrad looks for the kernel's."""
        assert self.picked is not None, "kernels are picked before they are searched"
        outcome = Outcome(self.picked.src[0].arg.function_name, self.launches, self.time)
        key = to_program_key(self.ast, self.renderer)
        if seconds <= 0:
            to_program_cache[key] = self.picked
            return outcome
        begun = time.monotonic()
        with until(begun + seconds) as candidates:
            program = to_program(self.ast, self.renderer)
        with self.buffers():
            found = self.measure(program)
        if found >= self.time:
            to_program_cache[key] = self.picked
        return replace(outcome, found=found, took=time.monotonic() - begun, whole=not candidates.cut)


def kernels(linear: UOp) -> list[SearchedKernel]:
    """The kernels of a step that tinygrad would search now."""
    found: dict[tuple[Any, ...], SearchedKernel] = {}
    for call in linear.src:
        made = realize._get_call_to_compile(call) if call.op is Ops.CALL else None
        if made is None or not getattr(made[0].arg, "beam", 0):
            continue
        key = to_program_key(*made)
        if key not in to_program_cache:
            found.setdefault(key, SearchedKernel(call, *made)).launches += 1
    return list(found.values())


def _pick(chosen: list[SearchedKernel], compile: Callable[[UOp], UOp]) -> None:
    """Make and time each kernel as it is without search."""
    plain = [kernel.ast.replace(arg=replace(kernel.ast.arg, beam=0)) for kernel in chosen]
    calls = [kernel.call.replace(src=(ast, *kernel.call.src[1:])) for kernel, ast in zip(chosen, plain, strict=True)]
    compile(UOp(Ops.LINEAR, src=tuple(calls)))
    for kernel, ast in zip(chosen, plain, strict=True):
        kernel.picked = to_program(ast, kernel.renderer)
        with kernel.buffers():
            kernel.time = kernel.measure(kernel.picked)


def search(chosen: list[SearchedKernel], seconds: float, tell: Callable[[str], None]) -> Iterator[Outcome]:
    """Search kernels that are picked and timed, the dearest first, for so many seconds together."""
    waiting = sorted(chosen, key=lambda kernel: kernel.time * kernel.launches, reverse=True)
    end = time.monotonic() + seconds
    for number, kernel in enumerate(waiting, 1):
        left = end - time.monotonic()
        outcome = kernel.search(left if number == len(waiting) else left / 2)
        tell(f"tegrad: search {number} of {len(waiting)}, {kernel.launches} launches of {outcome.text}")
        yield outcome


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _limited(original: Callable[[UOp], UOp]) -> Callable[[UOp], UOp]:
    def lower_and_compile(linear: UOp) -> UOp:
        seconds = limit()
        chosen = kernels(linear) if seconds is not None else []
        if seconds is not None and chosen:
            left = max(0.0, seconds - sum(outcome.took for outcome in outcomes))
            _tell(f"tegrad: searching {len(chosen)} kernels for up to {left:.0f} s")
            _pick(chosen, original)
            try:
                outcomes.extend(search(chosen, left, _tell))
            finally:
                terminate_worker_pool()  # some may still compile what nobody waits for
        return original(linear)

    lower_and_compile.__wrapped__ = original  # type: ignore[attr-defined]
    return lower_and_compile


def install() -> None:
    """Put the limit around tinygrad's compilation of a step; once, however often it is called."""
    if not hasattr(realize.lower_and_compile, "__wrapped__"):
        realize.lower_and_compile = _limited(realize.lower_and_compile)
