"""How an answer is read in between: a pause ends with the answer, not before and not after."""

from __future__ import annotations

import asyncio
import threading

import pytest

from tegrad import models
from tegrad.llm.answer import Answer
from tegrad.llm.tokenizer import Tokenizer

LONG_S = 60.0
"""A pause that no test waits for."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(models.SMALL)


def paused(answer: Answer, seconds: float, bound: float) -> None:
    """TimeoutError where the pause is longer than `bound`."""

    async def pause() -> None:
        async with asyncio.timeout(bound):
            await answer.pause(seconds)

    asyncio.run(pause())


def test_a_pause_ends_when_the_answer_does(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, 1, ())
    timer = threading.Timer(0.05, answer.end, ("length",))
    timer.start()
    paused(answer, LONG_S, LONG_S / 4)
    timer.join()


def test_there_is_no_pause_after_the_end(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, 1, ())
    answer.end("stop")
    paused(answer, LONG_S, LONG_S / 4)


def test_a_stop_string_ends_pauses_too(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, 1, ("the",))
    answer.leave = lambda reason: None
    for token in tokenizer.encode("in the beginning", bos=False):
        answer.put(token, None)
    next(iter(answer))
    assert answer.finish_reason == "stop"
    paused(answer, LONG_S, LONG_S / 4)


def test_a_token_does_not_end_a_pause(tokenizer: Tokenizer) -> None:
    answer = Answer(tokenizer, 1, ())
    answer.put(5, None)
    with pytest.raises(TimeoutError):
        paused(answer, LONG_S, 0.05)
