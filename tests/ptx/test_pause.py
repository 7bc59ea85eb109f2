"""Launches that give way for a while: at once, or between CTAs, and go on where they were."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import numpy as np

from tegrad import ptx
from tests.ptx.bodies import module

BACKSTOP_S = 120.0

COUNT = """
  ld.param.u64 %a, [p0];
  L: atom.global.add.u32 %t1, [%a], 1; ld.volatile.global.u32 %t2, [%a+64]; setp.eq.u32 %p, %t2, 0; @%p bra L;
"""
"""Count at p0 until the word 64 bytes after it is set."""

TWO_STEPS = """
  ld.param.u64 %a, [p0]; atom.global.add.u32 %t1, [%a], 1;
  L: ld.volatile.global.u32 %t2, [%a+64]; setp.eq.u32 %p, %t2, 0; @%p bra L;
  atom.global.add.u32 %t1, [%a+4], 1;
"""
"""A CTA counts its begin, waits for the word, and counts its end."""


def until(what: Callable[[], object]) -> None:
    deadline = time.monotonic() + BACKSTOP_S
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.0005)


def launch(body: str, ctas: int, words: np.ndarray, flag: ptx.AbortFlag, threads: int = 2) -> threading.Thread:
    kernel = module(body).kernels["k"]
    kernel.compile()
    run = threading.Thread(
        target=lambda: kernel.launch((ctas, 1, 1), (1, 1, 1), [words.ctypes.data], abort=flag, threads=threads),
        daemon=True,
    )
    run.start()
    return run


def word(words: np.ndarray, at: int) -> int:
    return ctypes.c_uint32.from_address(words.ctypes.data + 4 * at).value


def test_a_paused_launch_stands_still_and_goes_on_afterwards() -> None:
    words, flag = np.zeros(32, np.uint32), ptx.AbortFlag()
    run = launch(COUNT, 5000, words, flag)
    until(lambda: word(words, 0) and flag.running == 2)
    flag.pause()
    until(lambda: flag.running == 0)
    seen = word(words, 0)
    time.sleep(0.02)
    assert word(words, 0) == seen
    flag.resume()
    until(lambda: word(words, 0) > seen)
    words[16] = 1
    run.join(BACKSTOP_S)
    assert not run.is_alive()
    assert flag.running == 0


def test_between_ctas_those_that_have_begun_end_first() -> None:
    words, flag = np.zeros(32, np.uint32), ptx.AbortFlag()
    run = launch(TWO_STEPS, 5000, words, flag, threads=1)
    until(lambda: word(words, 0))
    flag.pause(between_ctas=True)
    time.sleep(0.02)
    began = word(words, 0)
    assert flag.running == 1  # CTAs that wait for the word keep it on
    words[16] = 1
    until(lambda: flag.running == 0)
    assert word(words, 0) == word(words, 1) < 5000
    assert began <= word(words, 0)
    flag.resume()
    run.join(BACKSTOP_S)
    assert (word(words, 0), word(words, 1)) == (5000, 5000)


def test_a_paused_launch_can_be_ended() -> None:
    words, flag = np.zeros(32, np.uint32), ptx.AbortFlag()
    caught: list[str] = []
    kernel = module(COUNT).kernels["k"]

    def run() -> None:
        try:
            kernel.launch((4, 1, 1), (1, 1, 1), [words.ctypes.data], abort=flag, threads=2)
        except ptx.PtxFault as fault:
            caught.append(fault.kind)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    until(lambda: word(words, 0))
    flag.pause()
    until(lambda: flag.running == 0)
    flag.set()
    thread.join(BACKSTOP_S)
    assert caught == ["aborted"]
