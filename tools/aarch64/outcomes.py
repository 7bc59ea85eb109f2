"""The journal of a shard: what became of each test, as journal.py wrote it down.

A line is a JSON object: a run's head (`commit`, `date`), `collected` (all tests of the shard), `start` (a test begins),
or a `test` with its `outcome`: passed, failed, skipped, left out, or killed (by a signal or a time limit, which
`reason` names).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SETTLED = frozenset({"passed", "skipped", "left out"})
"""Outcomes that a later run does not ask for again."""


def write(path: Path, **line: object) -> None:
    """Append a line."""
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """All whole lines of a journal; none where there is no file yet."""
    text = path.read_text() if path.exists() else ""
    return map(json.loads, text[: text.rfind("\n") + 1].splitlines())


def outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """By test, what became of it last, with the commit of that run. What is no longer collected is not among them."""
    found: dict[str, dict[str, Any]] = {}
    commit = None
    for line in lines(path):
        commit = line.get("commit", commit)
        if "test" in line:
            found[line["test"]] = {**line, "commit": commit}
        elif "collected" in line:
            found = {test: found[test] for test in line["collected"] if test in found}
    return found


def unfinished(path: Path) -> str | None:
    """The test that had started and not ended when the last run stopped."""
    running = None
    for line in lines(path):
        if "commit" in line:
            running = None
        elif "start" in line:
            running = line["start"]
        elif line.get("test") == running:
            running = None
    return running


def is_complete(path: Path) -> bool:
    """Whether every test of the shard has been collected and is settled."""
    collected: list[str] | None = None
    for line in lines(path):
        collected = line.get("collected", collected)
    known = outcomes(path)
    return collected is not None and all(known.get(test, {}).get("outcome") in SETTLED for test in collected)
