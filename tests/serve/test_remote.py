"""The process of an engine: answers are those of a service here, and either side may end at any time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import processes
import pytest
import tiny_llama
from processes import patience, running, until
from tiny_llama import TYPE, Shape

from tegrad.llm.answer import Answer
from tegrad.llm.errors import ContextError, GgufError, ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.grammar import Grammar, GrammarError
from tegrad.llm.sampling import Settings
from tegrad.llm.service import QueueFull
from tegrad.serve.catalogue import about
from tegrad.serve.plan import Plan
from tegrad.serve.remote import Remote
from tegrad.serve.wire import EngineError, Frames, packed

pytestmark = pytest.mark.board

T = TypeVar("T")
SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=2048)
PLAN = Plan(context=2048, slots=3, blocks=96, queue=2, q8=False, same=True, bytes=0)
"""An answer that fills the context takes seconds: one that is to be left or killed is not over before."""
COUNT = 8
ENDLESS = Settings(biases=tuple((token, -np.inf) for token in range(297, 301)))
"""Without the tokens that end texts."""


@pytest.fixture(scope="module")
def mark() -> Iterator[str]:
    with processes.marked() as made:
        yield made


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    """Runs a coroutine in the loop of this module."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPE, TYPE.Q8_0)


@pytest.fixture(scope="module")
def remote(mark: str, path: Path, run: Any) -> Iterator[Remote]:
    made = run(Remote.load(about("tiny", path), PLAN))
    yield made
    run(made.close())


def prompt(at: int) -> list[int]:
    return np.random.default_rng(at).integers(0, 256, 5 + at).tolist()


async def whole(answer: Answer) -> tuple[str, list[int], list[Any]]:
    """All of an answer's text, tokens and log-probabilities."""
    pieces = [piece async for piece in answer]
    tokens = [token for piece in pieces for token in piece.tokens]
    return "".join(piece.text for piece in pieces), tokens, [logs for piece in pieces for logs in piece.logprobs]


async def quiet(remote: Remote) -> bool:
    counts = await remote.counts()
    return counts.running == counts.waiting == 0 and not remote.busy


async def become_quiet(remote: Remote) -> None:
    async with asyncio.timeout(patience(60)):
        while not await quiet(remote):
            await asyncio.sleep(0.001)


async def begun(answer: Answer) -> None:
    async with asyncio.timeout(patience(60)):
        while answer.first_token is None:
            await asyncio.sleep(0.001)


KINDS = (Settings(), Settings(0.9, top_k=20), Settings(logprobs=3), Settings(1.1, top_p=0.9), Settings())


def test_answers_are_those_of_a_service(device: str, path: Path, remote: Remote, run: Any) -> None:
    """Tokens, text, log-probabilities, usage and counts; more requests than there are slots."""
    from tegrad.llm.service import Service

    options = {"slots": PLAN.slots, "positions": PLAN.context, "blocks": PLAN.blocks, "same": True}
    with Service(path, device, **options) as service:
        answers = [service.submit(prompt(at), COUNT, one, seed=at) for at, one in enumerate(KINDS)]
        expected = [
            ("".join(piece.text for piece in pieces), [token for piece in pieces for token in piece.tokens],
             [logs for piece in pieces for logs in piece.logprobs])
            for pieces in map(list, answers)
        ]  # fmt: skip

    async def ask() -> list[tuple[Any, ...]]:
        mine = [remote.submit(prompt(at), COUNT, one, seed=at) for at, one in enumerate(KINDS)]
        found = await asyncio.gather(*map(whole, mine))
        assert {answer.finish_reason for answer in mine} == {"length"}
        assert [answer.usage.prompt for answer in mine] == [len(prompt(at)) for at in range(len(KINDS))]
        assert all(answer.usage.completion == COUNT and (answer.first_token or 0) > 0 for answer in mine)
        return found

    assert run(ask()) == expected
    counts = run(remote.counts())
    assert counts.completion_tokens == COUNT * len(KINDS)
    assert max(counts.widths) > 1
    assert not remote.busy


def test_a_beginning_that_was_cached_is_told(remote: Remote, run: Any) -> None:
    tokens = np.random.default_rng(9).integers(0, 256, 70).tolist()

    async def ask() -> Answer:
        answer = remote.submit(tokens, 1)
        await whole(answer)
        return answer

    assert [run(ask()).usage.cached for _ in range(2)] == [0, 64]


def test_what_can_never_be_is_refused_at_once(remote: Remote, run: Any) -> None:
    async def ask() -> None:
        with pytest.raises(ContextError, match="a prompt of 2049 tokens does not fit a context of 2048"):
            remote.submit([1] * 2049)
        for tokens, settings in (([], Settings()), ([999], Settings()), ([1], Settings(biases=((999, 1.0),)))):
            with pytest.raises(ModelError):
                remote.submit(tokens, 1, settings)
        with pytest.raises(UnsupportedModelError, match="tiny was not made for vectors"):
            await remote.embed([[1]])
        assert not remote.busy

    run(ask())


def test_who_leaves_and_what_stops_gives_its_slot_back(remote: Remote, run: Any) -> None:
    async def ask() -> None:
        text, _, _ = await whole(remote.submit(prompt(3), 40))
        before = (await remote.counts()).ended
        stop = next(letter for letter in text if letter.isascii() and letter.isprintable())
        cut = remote.submit(prompt(3), stops=[stop])
        assert (await whole(cut))[0] == text[: text.index(stop)]
        assert cut.finish_reason == "stop"
        reader = asyncio.create_task(whole(left := remote.submit(prompt(0), None, ENDLESS)))
        await begun(left)
        reader.cancel()
        late = remote.submit(prompt(1), deadline=0.0)
        assert await whole(late) == ("", [], [])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(remote, "deadline", 0.0)  # of all requests
            assert await whole(remote.submit(prompt(1), deadline=9.0)) == ("", [], [])
        await become_quiet(remote)
        after = (await remote.counts()).ended
        assert left.finish_reason == "cancelled"
        assert late.finish_reason == "timeout"
        assert {reason: after[reason] - before[reason] for reason in after if after[reason] > before[reason]} == {
            "stop": 1, "cancelled": 1, "timeout": 2,
        }  # fmt: skip

    run(ask())


def test_the_queue_is_bounded_and_a_stalled_reader_holds_up_nobody(remote: Remote, run: Any) -> None:
    async def ask() -> None:
        stalled = [remote.submit(prompt(at), 60, ENDLESS) for at in range(5)]
        with pytest.raises(QueueFull, match="2 requests wait already: try again in") as caught:
            remote.submit(prompt(0))
        assert caught.value.retry_after >= 1
        assert remote.refused == 1
        await become_quiet(remote)  # though nobody reads
        assert len((await whole(remote.submit(prompt(1), 5)))[1]) == 5
        for answer in stalled:
            assert len((await whole(answer))[1]) == 60

    run(ask())


def test_an_answer_keeps_to_its_grammar_and_a_wrong_one_ends_it_alone(remote: Remote, run: Any) -> None:
    async def ask() -> None:
        digits, wrong, gone = (
            remote.submit(prompt(1), 30, grammar=Grammar("regex", text)) for text in ("[0-9]{3,5}x", "(", "[a-z]*")
        )
        gone.cancel()  # while its grammar is compiled
        others = [whole(remote.submit(prompt(at), COUNT)) for at in range(2)]
        text, *_ = await asyncio.gather(whole(digits), whole(wrong), whole(gone), *others)
        assert re.fullmatch("[0-9]{3,5}x", text[0])
        assert (digits.finish_reason, wrong.finish_reason, gone.finish_reason) == ("stop", "error", "cancelled")
        assert isinstance(wrong.error, GrammarError)
        assert await quiet(remote)

    run(ask())


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed
def test_without_board_or_engine_answers_end_with_an_error(mark: str, path: Path, run: Any, remote: Remote) -> None:
    """kill -9. Of an engine whose board is gone the next request is served; an engine that is gone leaves no board."""
    engines = running(mark, "tegrad.serve.engine")
    with processes.marked() as own:
        other = run(Remote.load(about("tiny", path), PLAN))

    async def killed(word: str) -> list[Answer]:
        pids = running(own, word)  # which takes its time
        answers = [other.submit(prompt(at), None, ENDLESS) for at in range(4)]
        readers = [asyncio.create_task(whole(answer)) for answer in answers]
        await begun(answers[0])
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        await asyncio.wait_for(asyncio.gather(*readers), patience(60))
        assert {answer.finish_reason for answer in answers} == {"error"}
        assert all(isinstance(answer.error, EngineError) for answer in answers)
        return answers

    async def ask() -> None:
        alone = await whole(other.submit(prompt(1), COUNT))
        await killed("tegrad.orin")
        assert await whole(other.submit(prompt(1), COUNT)) == alone
        assert (await other.counts()).reopened == 1
        assert "ended (signal SIGKILL): ask again" in str((await killed("tegrad.serve.engine"))[0].error)
        with pytest.raises(EngineError, match="SIGKILL"):
            other.submit(prompt(1), COUNT)
        with pytest.raises(EngineError, match="SIGKILL"):
            await other.counts()

    try:
        run(ask())
    finally:
        run(other.close())
    until(lambda: not running(own))
    assert running(mark, "tegrad.serve.engine") == engines


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed
@pytest.mark.parametrize("drain", [True, False])
def test_a_close_finishes_what_is_there_or_ends_it(path: Path, run: Any, drain: bool) -> None:
    def fds() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def ask() -> None:
        before = fds()
        with processes.marked() as own:
            other = await Remote.load(about("tiny", path), PLAN)
        answers = [other.submit(prompt(at), 60, ENDLESS) for at in range(4)]
        await other.close(drain=drain)
        found = [len((await whole(answer))[1]) for answer in answers]
        assert (found == [60] * 4) is drain
        assert {answer.finish_reason for answer in answers} == ({"length"} if drain else {"error"})
        until(lambda: not running(own))
        assert fds() == before

    run(ask())


def test_what_is_wrong_with_a_model_is_told(path: Path, tmp_path: Path, run: Any) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(path.read_bytes()[:-4096])
    with processes.marked() as own:
        with pytest.raises(GgufError):
            run(Remote.load(replace(about("tiny", path), path=bad), PLAN))
        with pytest.raises(ModelError, match="1 to 64 decode together"):
            run(Remote.load(about("tiny", path), replace(PLAN, slots=65)))
        until(lambda: not running(own))


@pytest.mark.klog_errors("unbind")  # of a channel that is busy, as its process is killed while it loads
def test_a_load_that_is_given_up_leaves_no_process(path: Path, run: Any) -> None:
    async def ask() -> None:
        with processes.marked() as own:
            loading = asyncio.create_task(Remote.load(about("tiny", path), PLAN))
            async with asyncio.timeout(patience(60)):
                while not running(own, "tegrad.serve.engine"):
                    await asyncio.sleep(0.001)
            loading.cancel()
            with pytest.raises(asyncio.CancelledError):
                await loading
            until(lambda: not running(own))

    run(ask())


EMBEDS = Shape(arch="qwen3", dim=64, ffn=64, heads=2, kv_heads=1, layers=1, vocab=301, extra={"qwen3.pooling_type": 3})


def test_vectors_are_those_of_a_speaker_here(device: str, tmp_path: Path, run: Any) -> None:
    """An engine that makes vectors and whose board is gone ends with an error: the next request has another one."""
    from tegrad.llm.embeddings import Pooling, Vectors
    from tegrad.llm.engine import Engine

    path = tiny_llama.write(tmp_path / "embed.gguf", EMBEDS, TYPE.Q8_0)
    texts = [prompt(at) for at in range(3)]
    with Gguf.open(path) as file:
        speaker = Engine(file, 64, device=device)
    expected = np.stack([Vectors(Pooling.LAST).made(speaker, tokens) for tokens in texts])
    speaker.close()

    async def ask() -> None:
        one = about("embed", path)
        assert one.embeds
        with processes.marked() as own:
            other = await Remote.load(one, replace(PLAN, context=64))
        with pytest.raises(UnsupportedModelError, match="makes vectors of texts"):
            other.submit([1])
        with pytest.raises(ContextError, match="a text of 65 tokens does not fit a context of 64"):
            await other.embed([[1] * 65])
        found = await other.embed(texts)
        assert np.array_equal(found, expected)
        assert (await other.counts()).prompt_tokens == sum(map(len, texts))
        for pid in running(own, "tegrad.orin"):
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(EngineError):
            await other.embed(texts)
        await asyncio.wait_for(other.link.ended.wait(), patience(60))
        await other.close()
        until(lambda: not running(own))

    run(ask())


def test_messages_come_whole_however_they_are_cut() -> None:
    messages = [{"a": 1}, list(range(1000)), "x"]
    data = b"".join(map(packed, messages))
    for size in (1, 3, 1000, len(data)):
        frames = Frames()
        assert [one for at in range(0, len(data), size) for one in frames.feed(data[at : at + size])] == messages
