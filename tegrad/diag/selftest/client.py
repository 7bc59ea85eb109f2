"""Stages 7 and 8: tegrad's own client: the one-liner, and launches until every ring has wrapped."""

from __future__ import annotations

import time
from dataclasses import asdict

from tegrad.diag.selftest.stage import Notes
from tegrad.nv import exercise


def one_liner(notes: Notes) -> None:
    """tinygrad on this GPU: a sum of two tensors."""
    with notes.step("import, open, compile, run"):
        start = time.perf_counter()
        notes.fact("sum", exercise.one_liner())
        notes.fact("seconds", round(time.perf_counter() - start, 3))


def launches(notes: Notes) -> None:
    """Small launches whose results each depend on all before."""
    with notes.step("open"):
        exercise.open_device()
    with notes.step("launches"):
        start = time.perf_counter()
        rounds = exercise.launches(notes.amount, lambda done: notes.fact("launches submitted", done))
        seconds = time.perf_counter() - start
    notes.fact("us a launch", round(seconds / notes.amount * 1e6, 1))
    notes.fact("times each ring wrapped", asdict(rounds))
    if not notes.board:
        notes.expect(min(asdict(rounds).values()) > 0, "every ring to wrap", rounds)
