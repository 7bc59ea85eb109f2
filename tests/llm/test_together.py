"""Many prompts at once have the answers that each would have alone, in their order."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_llama import TYPE, Shape, letters, write

from tegrad import LLM, models
from tegrad.llm import together
from tegrad.llm.api import ArgumentError
from tegrad.llm.errors import ContextError, OutOfMemory
from tegrad.llm.serial import ClosedError

pytestmark = pytest.mark.board
PROMPTS = ["In the beginning", "And he said", "Blessed are the", "The LORD is my", "And it came to pass"]


@pytest.fixture(scope="module")
def llm(device: str) -> Iterator[LLM]:
    with LLM(models.SMALL, 128, gpu=device) as made:
        yield made


def likeliest(llm: LLM, prompt: str, said: tuple[int, ...]) -> bool:
    """Whether each token is the likeliest one after those before it, but for what roundings differ by."""
    tokens, engine = llm._tokenizer.encode(prompt), llm._session
    engine.reset()
    logits = engine.feed_all([*tokens, *said[:-1]])[len(tokens) - 1 :]
    engine.reset()
    return all(row[token] > row.max() - 0.1 * row.std() for row, token in zip(logits, said, strict=True))


def test_each_is_answered_as_if_alone_and_in_order(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where some wait for a slot, and up to a text of `stop`."""
    monkeypatch.setattr(together, "MOST_TOGETHER", 2)
    found = llm.batch(PROMPTS, max_tokens=6, temperature=0)
    for prompt, reply in zip(PROMPTS, found, strict=True):
        assert likeliest(llm, prompt, reply.tokens)
        assert (len(reply.tokens), reply.finish_reason) == (6, "length")
        assert (reply.prompt_tokens, reply.tokens_per_second) == (len(llm._tokenizer.encode(prompt)), None)
    stop = found[0].text[3:6]
    stopped = llm.batch(PROMPTS, max_tokens=6, temperature=0, stop=stop)
    assert (stopped[0].text, stopped[0].finish_reason) == (found[0].text[: found[0].text.index(stop)], "stop")
    assert [reply.text for reply in llm.batch([PROMPTS[3]] * 3, max_tokens=6, seed=5)] == [
        llm.batch([PROMPTS[3]] * 2, max_tokens=6, seed=5)[1].text
    ] * 3
    assert llm.batch([]) == []


def test_conversations_schemas_and_log_probabilities_are_as_alone(llm: LLM) -> None:
    asked = [[{"role": "user", "content": text}] for text in ("Who made the heaven?", "Who was Moses?")]
    schema = {"type": "object", "properties": {"a": {"enum": [3]}}, "required": ["a"], "additionalProperties": False}
    for reply in llm.batch(asked, schema=schema, logprobs=1):
        assert json.loads(reply.text) == {"a": 3}
        assert len(reply.logprobs) == len(reply.tokens)
        assert reply.finish_reason == "stop"


def test_what_is_wrong_with_one_is_told_before_any_is_answered(llm: LLM) -> None:
    with pytest.raises(ContextError, match="exceed the context of 128"):
        llm.batch(["x", "word " * 200])
    with pytest.raises(ArgumentError, match="no option heat"):
        llm.batch(["x"], heat=3)  # type: ignore[call-arg]


def test_a_model_that_no_batch_runs_answers_one_after_the_other(tmp_path: Path, device: str) -> None:
    shape = Shape(dim=64, ffn=64, heads=2, kv_heads=1, layers=1)
    path = write(tmp_path / "m.gguf", shape, TYPE.F32, vocabulary=letters(300))
    with LLM(path, 64, gpu=device) as llm:
        alone = [llm.generate(prompt, max_tokens=3, temperature=0).tokens for prompt in ("tea", "sea")]
        assert [reply.tokens for reply in llm.batch(["tea", "sea"], max_tokens=3, temperature=0)] == alone


def test_fewer_are_together_where_memory_is_short(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    made = together.Batch

    def short(*given: object, slots: int, **more: object) -> object:
        asked.append(slots)
        if slots > 2:
            raise OutOfMemory("no room")
        return made(*given, slots=slots, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(together, "Batch", short)
    assert len(llm.batch(PROMPTS, max_tokens=2)) == 5
    assert asked == [5, 2]


def test_to_close_a_model_ends_a_batch(device: str) -> None:
    llm = LLM(models.SMALL, 512, gpu=device)
    closing = threading.Thread(target=lambda: (time.sleep(1.0), llm.close()))
    closing.start()
    with pytest.raises(ClosedError):
        llm.batch(PROMPTS, max_tokens=None, temperature=2.0, logit_bias={2: -100})
    closing.join()


def test_a_task_has_the_same_answers_and_ends_them_when_it_is_cancelled(llm: LLM) -> None:
    """The event loop goes on meanwhile, and the model is free at once."""
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    async def main() -> None:
        ticking = asyncio.create_task(tick())
        await asyncio.sleep(0)
        found = await llm.abatch(PROMPTS[:2], max_tokens=3, temperature=0)
        assert ticks > 2
        assert [reply.tokens for reply in found] == [
            reply.tokens for reply in llm.batch(PROMPTS[:2], max_tokens=3, temperature=0)
        ]
        task = asyncio.create_task(llm.abatch(PROMPTS, max_tokens=None, temperature=2.0, logit_bias={2: -100}))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert llm.generate(PROMPTS[0], max_tokens=1).tokens
        ticking.cancel()

    asyncio.run(main())
