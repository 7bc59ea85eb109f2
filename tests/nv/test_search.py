"""A search that has so many seconds: dear kernels first, the best so far where time runs out, and nothing lost."""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tinygrad.codegen.opt import search as theirs

from tegrad.errors import TegradError
from tegrad.nv import search

ROOT = Path(__file__).resolve().parents[2]
LATER = 1e6
"""Seconds that no test takes."""


class Pool:
    """Hands out what it is given, and then has nothing ready."""

    def __init__(self, *ready: int) -> None:
        self.ready = iter(ready)

    def imap_unordered(self, work: Any, tasks: Any) -> "Pool":
        return self

    def next(self, timeout: float) -> int:
        for result in self.ready:
            return result
        raise multiprocessing.TimeoutError


def started() -> Iterator[int]:
    yield from range(4)


def test_all_candidates_come_where_there_is_time() -> None:
    candidates = search.Candidates(None, time.monotonic() + LATER)
    assert list(candidates.imap_unordered(lambda x: 2 * x, started())) == [0, 2, 4, 6]
    assert not candidates.cut


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_no_candidate_is_compiled_when_time_is_up(late: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search.time, "monotonic", lambda: 9.0 + late)
    candidates = search.Candidates(None, 9.0)
    done: list[int] = []
    assert list(candidates.imap_unordered(done.append, started())) == []
    assert candidates.cut
    assert done == []


def test_a_round_does_not_wait_for_workers_beyond_the_end() -> None:
    candidates = search.Candidates(Pool(5, 7), time.monotonic() + LATER)
    assert list(candidates.imap_unordered(abs, started())) == [5, 7]
    assert candidates.cut
    candidates.pool = Pool(9)
    assert list(candidates.imap_unordered(abs, started())) == [], "rounds after it are empty"


def test_only_what_was_searched_to_its_end_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[tuple[Any, ...]] = []
    monkeypatch.setattr(theirs, "diskcache_put", lambda *entry: kept.append(entry))
    before = theirs.get_worker_pool, theirs.diskcache_put
    with search.until(time.monotonic() + LATER) as candidates:
        assert theirs.get_worker_pool() is candidates
        theirs.diskcache_put("beam_search", "key", "whole")
        candidates.cut = True
        theirs.diskcache_put("beam_search", "key", "part")
    assert kept == [("beam_search", "key", "whole")]
    assert (theirs.get_worker_pool, theirs.diskcache_put) == before


class Timed(search.SearchedKernel):
    """A kernel whose search takes as long as it wants, of a clock that only it moves."""

    def __init__(self, name: str, seconds: float, launches: int, wants: float, clock: list[float]) -> None:
        self.name, self.time, self.launches, self.wants, self.clock = name, seconds, launches, wants, clock

    def search(self, seconds: float) -> search.Outcome:
        took = max(0.0, min(seconds, self.wants))
        self.clock[0] += took
        return search.Outcome(self.name, self.launches, self.time, took=took, whole=took == self.wants)


def test_dear_kernels_come_first_and_take_no_more_than_half(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(search.time, "monotonic", lambda: clock[0])
    some = [Timed("small", 1.0, 1, 100, clock), Timed("often", 2.0, 4, 100, clock), Timed("large", 11.0, 1, 10, clock)]
    told: list[str] = []
    outcomes = list(search.search(some, 50, told.append))
    assert [(o.name, o.whole) for o in outcomes] == [("large", True), ("often", False), ("small", False)]
    assert [o.took for o in outcomes] == [10.0, 20.0, 20.0]
    assert clock[0] == 50
    assert told[1].startswith("tegrad: search 2 of 3, 4 launches of often")
    assert told[1].endswith("cut short")


@pytest.mark.parametrize(("text", "seconds"), [("", None), ("0", 0.0), ("7.5", 7.5)])
def test_the_environment_says_the_seconds(monkeypatch: pytest.MonkeyPatch, text: str, seconds: float | None) -> None:
    monkeypatch.setenv(search.SECONDS, text)
    assert search.limit() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "inf", "nan"])
def test_other_words_are_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(search.SECONDS, text)
    with pytest.raises(TegradError, match=r"TEGRAD_SEARCH_S is .*: give the seconds"):
        search.limit()


PROGRAM = """
import json, multiprocessing, os
import numpy as np
import tegrad
from tinygrad import Context, Tensor
from tinygrad.codegen import to_program_cache
from tinygrad.codegen.opt import search as theirs
from tegrad.nv import search

compiled = 0
original = theirs._try_compile


def counted(task):
    global compiled
    compiled += 1
    return original(task)


def late(candidates, results):
    raise multiprocessing.TimeoutError


theirs._try_compile = counted
in_time = search.Candidates._next
values = np.arange(8, dtype=np.float32)
tensor = Tensor(values).realize()
for seconds, next in (("", in_time), ("0", in_time), ("900", late), ("900", in_time), ("900", in_time)):
    os.environ["TEGRAD_SEARCH_S"], search.Candidates._next = seconds, next
    to_program_cache.clear()
    search.outcomes.clear()
    compiled = 0
    with Context(BEAM=1 if seconds else 0):
        got = (tensor * 2 + 1).numpy()
    right = bool((got == 2 * values + 1).all())
    print(json.dumps([right, compiled > 0, [(o.took > 0, o.whole) for o in search.outcomes]]))
"""


@pytest.mark.board
def test_a_searched_kernel_is_right_and_found_again(tmp_path: Path) -> None:
    """On a board: without a limit's variable, with no time, cut short, with enough, and again."""
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "DEV": "NV", "TEGRAD_BOARD": "agx-orin-64gb", "PARALLEL": "0",
        "CACHEDB": str(tmp_path / "cache.db"),
    }  # fmt: skip
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    without, none, little, enough, again = map(json.loads, done.stdout.splitlines())
    assert without == [True, False, []]
    assert none == [True, False, [[False, False]]], "nothing is searched without time"
    assert little == [True, False, [[True, False]]], "a search that was cut short leaves what was picked"
    assert enough == [True, True, [[True, True]]], "what was cut short had not been kept"
    assert again == [True, False, [[True, True]]], "what was searched to its end was kept"
    assert "search 1 of 1, 1 launches of E_" in done.stderr
