"""The processes that a test starts, found by a mark in their environment: engines, templates, boards."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

MARK = "TEGRAD_TEST_MARK"


@contextmanager
def marked() -> Iterator[str]:
    """Whatever is started meanwhile, and what that starts, can be found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(MARK, mark := os.urandom(8).hex())
        yield mark


def running(mark: str, word: str = "") -> list[int]:
    """Marked processes whose command has a word in it."""
    found = []
    for place in Path("/proc").iterdir():
        with suppress(OSError):
            if not place.name.isdecimal() or int(place.name) == os.getpid():
                continue
            variables, command = ((place / name).read_bytes() for name in ("environ", "cmdline"))
            if f"{MARK}={mark}".encode() in variables.split(b"\0") and word.encode() in command:
                found.append(int(place.name))
    return found


def patience(seconds: float = 600) -> float:
    """How long to wait for an answer: so long, or as long as a device may take, which may have kernels to compile."""
    return max(seconds, int(os.environ.get("HCQDEV_WAIT_TIMEOUT_MS", "0")) / 1000)


def until(true: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait for what comes soon."""
    end = time.monotonic() + patience(seconds)
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
