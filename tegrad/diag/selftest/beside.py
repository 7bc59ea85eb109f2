"""Stage 11: the step in one launch beside a second process that uses the GPU.

All CTAs of such a step wait for each other's packets, so that all must be on the chip at once: the GPU has to take
turns between the two processes as a whole, and keep what a step has passed on meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, Self

from tegrad import models
from tegrad.conformance.process import Forked, Peer
from tegrad.conformance.rig import NVMAP
from tegrad.diag.selftest.place import Place, place
from tegrad.diag.selftest.stage import Notes, Surprise
from tegrad.nv.kernel import pick_kernel

PROMPT = "In the beginning"
CONTEXT = 256
TOKENS = 128
"""Of a text that is written again and again."""
LEAST_TOKENS = 4
"""Tokens of it at least, however slow they come."""
ALONE_SHARE = 1 / 10
"""How long the same goes on alone, as a share of the time beside the other."""
ROUND_TIMEOUT_S = 60.0
"""How long the second process may take to begin, and to end a round."""


def beside(notes: Notes) -> None:
    """A text alone, then for `amount` seconds beside launches and copies of a second process: the same tokens."""
    os.environ.setdefault("DEV", "NV")  # tinygrad reads it when it is imported
    if place() is Place.ORIN:
        pick_kernel().exists(NVMAP)  # a board is there from now on, for both processes
    with Neighbour() as other:  # before this process opens the device: a fork does not share one
        _beside(notes, other)


def _beside(notes: Notes, other: Neighbour) -> None:
    import tegrad.nv

    tegrad.nv.install()
    from tegrad.llm.device import open_device
    from tegrad.llm.engine import Engine
    from tegrad.llm.gguf import Gguf
    from tegrad.llm.persistent import PersistentPlan
    from tegrad.llm.sampling import Settings
    from tegrad.llm.tokenizer import Tokenizer

    with notes.step("open"):
        notes.fact("device", open_device())
    with Gguf.open(models.SMALL) as file, Engine(file, CONTEXT, plan=PersistentPlan) as engine:
        prompt = Tokenizer(file).encode(PROMPT)

        def text() -> Iterator[int]:
            engine.reset()
            return engine.generate(prompt, Settings(), TOKENS)

        with notes.step("alone"):
            known = _until(text(), ALONE_SHARE * notes.amount)
            notes.fact("tokens", known)
            alone = _repeated(notes, text, known, ALONE_SHARE * notes.amount, "alone")
        with notes.step("a second process opens the GPU and does a round"):
            other.begin()
        with notes.step("beside the second process"):
            before = other.rounds
            rate = _repeated(notes, text, known, notes.amount, "beside", other)
            during = other.rounds - before
        with notes.step("the end of the second process"):
            rounds = other.end()
    notes.fact("tok/s alone", round(alone, 2))
    notes.fact("tok/s beside", round(rate, 2))
    notes.fact("rounds of the second process meanwhile", during)
    notes.fact("rounds of the second process", rounds)
    notes.line(f"{rate:.1f} tok/s beside a second process, {alone:.1f} alone; it did {during} rounds meanwhile")


def _until(tokens: Iterator[int], seconds: float) -> list[int]:
    """Tokens up to a time, LEAST_TOKENS at least."""
    end, found = time.perf_counter() + seconds, []
    for token in tokens:
        found.append(token)
        if len(found) >= LEAST_TOKENS and time.perf_counter() > end:
            break
    return found


def _repeated(
    notes: Notes, text: Any, known: list[int], seconds: float, name: str, other: Neighbour | None = None
) -> float:
    """Write the known text again and again; tokens a second. With `other`, until it has done a round meanwhile."""
    start, count, before = time.perf_counter(), 0, other.rounds if other else 0
    while True:
        found = islice(text(), len(known))
        for at, wanted in enumerate(known):
            token = next(found, "the end")
            notes.expect(token == wanted, f"token {wanted} at {at}, as before, {name}", f"{token}, of text {count}")
        count += 1
        notes.fact(f"texts {name}", count)
        if other:
            other.check()
        took = time.perf_counter() - start
        if took >= seconds and (other is None or other.rounds > before or took > seconds + ROUND_TIMEOUT_S):
            break
    if other:
        notes.expect(other.rounds > before, "rounds of the second process meanwhile", "none")
    return count * len(known) / took


class Neighbour:
    """A forked process that launches and copies, once it is told to, until it is told to end. A context manager."""

    def __init__(self) -> None:
        self._count = mmap.mmap(-1, mmap.PAGESIZE)
        self._process = Forked(partial(_rounds, self._count))
        self._line = self._process.peer

    @property
    def rounds(self) -> int:
        """Rounds that it has done, each checked."""
        return int(struct.unpack_from("<Q", self._count)[0])

    def begin(self) -> None:
        """Let it open the device and do its first round. Surprise where it cannot."""
        self._line.send("begin")
        self._answer("a first round")

    def check(self) -> None:
        """Surprise where it has found something wrong, or has ended."""
        if self._line.waits():
            self._answer("rounds")

    def end(self) -> int:
        """Let it end; how many rounds it did. Surprise where something was wrong."""
        with contextlib.suppress(OSError):  # it says why
            self._line.send("end")
        return self._answer("its end")

    def _answer(self, what: str) -> int:
        expected = f"{what} of the second process within {ROUND_TIMEOUT_S:g} s"
        if not self._line.waits(ROUND_TIMEOUT_S):
            raise Surprise(expected, f"nothing, after {self.rounds} rounds")
        try:
            try:
                kind, *said = self._line.value()
            except ConnectionResetError:  # it ended with something unread; what it said last comes after that
                kind, *said = self._line.value()
        except EOFError:
            raise Surprise(expected, f"its death, after {self.rounds} rounds") from None
        if kind != "ok":
            raise Surprise(expected, f"after {self.rounds} rounds, in the second process: {', '.join(said)}")
        return int(said[0])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.close()
        self._count.close()


def _rounds(count: mmap.mmap, line: Peer) -> int:
    """The second process: rounds until somebody speaks on the line, or hangs up."""
    line.value()
    from tegrad.nv.exercise import Traffic

    traffic, done = Traffic(), 0
    while not done or not line.waits():
        traffic.round(done)
        done += 1
        struct.pack_into("<Q", count, 0, done)
        if done == 1:
            line.send(["ok", done])
    traffic.close()
    return done
