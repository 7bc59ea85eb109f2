"""A service on the board: answers together are those alone; who leaves, stalls, is late or fails touches no other."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from sampling_rig import bits
from tiny_llama import TYPE, Shape

from tegrad.llm.answer import Reason
from tegrad.llm.batch import Batch
from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.packed import PackedModel
from tegrad.llm.sampling import Logprobs, Settings
from tegrad.llm.service import Answer, QueueFull, Service
from tegrad.nv.compilers import compile_cuda
from tegrad.nv.faults import DeviceFault
from tegrad.orin.client import board_status
from tegrad.orin.connection import connection
from tegrad.uapi.errors import DriverError

pytestmark = pytest.mark.board

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1)
TEXT = np.random.default_rng(1).integers(0, 256, 100).tolist()
COUNT = 6
SLOTS, QUEUE, BLOCKS = 3, 2, 4
OPTIONS: dict[str, Any] = {"slots": SLOTS, "positions": 128, "blocks": BLOCKS, "sizes": (32,), "same": True}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("models") / "model.gguf", SHAPE, TYPE.Q8_0)


@pytest.fixture(scope="module")
def service(device: str, path: Path) -> Iterator[Service]:
    with Service(path, device, queue=QUEUE, **OPTIONS) as made:
        yield made


GATES: list[Gate] = []
"""Those that a test made."""


@dataclass
class Gate:
    """A mask that allows all, for which the service waits until the gate is opened; `begun` once it does."""

    after: int = 0
    begun: threading.Event = field(default_factory=threading.Event)
    opened: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        GATES.append(self)

    def __call__(self, tokens: Sequence[int]) -> None:
        if len(tokens) == self.after:
            self.begun.set()
            assert self.opened.wait(30)


def prompt(at: int) -> list[int]:
    return TEXT[at : at + 5 + at]


def whole(answer: Answer) -> tuple[str, list[int], list[Logprobs]]:
    """All of an answer's text, tokens and log-probabilities."""
    pieces = list(answer)
    return (
        "".join(piece.text for piece in pieces),
        [token for piece in pieces for token in piece.tokens],
        [logs for piece in pieces for logs in piece.logprobs],
    )


def until(true: Callable[[], bool]) -> None:
    """Wait for what the service's thread does soon."""
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.002)


def nothing_is_held(service: Service) -> bool:
    batch = service._batch
    assert batch is not None
    return service.counts.running == 0 and not batch.members and batch.pool.free == BLOCKS


@pytest.fixture(autouse=True)
def _empty(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves the module's service to the next one as it found it."""
    yield
    while GATES:
        GATES.pop().opened.set()
    if "service" in request.fixturenames:
        made: Service = request.getfixturevalue("service")
        with made._changed:
            for order in (*made._running.values(), *made._waiting):
                order.cancel()
        until(lambda: made.counts.waiting == 0 and (made._batch is None or nothing_is_held(made)))


KINDS = (Settings(), Settings(0.9, top_k=20), Settings(logprobs=3), Settings(1.1, top_p=0.9, logprobs=0), Settings())


def test_answers_together_are_those_of_a_batch_alone(device: str, path: Path, service: Service) -> None:
    """More than there are slots: two wait. Read by a thread each, and their text is that of their tokens."""
    expected = []
    with PackedModel.load(path, device) as model, Batch(model, **OPTIONS) as batch:
        for at, settings in enumerate(KINDS):
            member = batch.join(prompt(at), len(prompt(at)) + COUNT - 1, settings, seed=at)
            while not member.finished:
                batch.step()
            expected.append((member.tokens, member.logprobs))
    found: dict[int, Any] = {}
    before = service.counts
    with service._changed:  # none begins before all are there
        answers = [service.submit(prompt(at), COUNT, settings, seed=at) for at, settings in enumerate(KINDS)]
    threads = [
        threading.Thread(target=lambda at=at: found.__setitem__(at, whole(answers[at]))) for at in range(len(KINDS))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for at, answer in enumerate(answers):
        text, tokens, logprobs = found[at]
        assert (tokens, logprobs) == expected[at]
        assert text == service.tokenizer.decode(tokens)
        assert answer.finish_reason == "length"
        assert (answer.usage.prompt, answer.usage.completion) == (len(prompt(at)), COUNT)
        assert answer.first_token is not None
    counts = service.counts
    widths = counts.widths - before.widths
    made = counts.completion_tokens - before.completion_tokens
    assert made == COUNT * len(KINDS) == sum(width * n for width, n in widths.items())
    assert counts.prompt_tokens - before.prompt_tokens == sum(len(prompt(at)) for at in range(len(KINDS)))
    assert max(widths) > 1
    assert counts.ended - before.ended == {"length": len(KINDS)}


def test_a_prompts_beginning_is_found_and_told(service: Service) -> None:
    before = service.counts.cached_tokens
    first, second = (service.submit(TEXT[:80], 2) for _ in range(2))
    assert whole(first) == whole(second)
    assert whole(third := service.submit(TEXT[:70], 2)) != whole(first)
    assert third.usage.cached == 64
    assert service.counts.cached_tokens - before == first.usage.cached + second.usage.cached + 64


def test_coroutines_read_and_a_cancelled_task_gives_its_slot_and_blocks_back(service: Service) -> None:
    alone = [whole(service.submit(prompt(at), COUNT)) for at in range(2)]
    before = service.counts.ended["cancelled"]

    async def read(answer: Answer) -> str:
        return "".join([piece.text async for piece in answer])

    async def both() -> list[str]:
        gate = Gate(after=2)
        gone = service.submit(prompt(2), mask=gate)
        reader = asyncio.create_task(read(gone))
        readers = [asyncio.create_task(read(service.submit(prompt(at), COUNT))) for at in range(2)]
        await asyncio.to_thread(gate.begun.wait, 30)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        gate.opened.set()
        assert gone.finish_reason == "cancelled"
        assert gone.usage.completion <= 2
        return await asyncio.gather(*readers)

    assert asyncio.run(both()) == [text for text, _, _ in alone]
    until(lambda: nothing_is_held(service))
    assert service.counts.ended["cancelled"] == before + 1


def test_who_leaves_the_loop_gives_slot_and_blocks_back(service: Service) -> None:
    before, gate = service.counts.ended["cancelled"], Gate(after=1)
    answer = service.submit(prompt(0), mask=gate)
    for piece in answer:
        assert piece.tokens
        break
    gate.opened.set()
    assert answer.finish_reason == "cancelled"
    until(lambda: nothing_is_held(service))
    assert service.counts.ended["cancelled"] == before + 1
    assert list(answer) == []


def test_the_queue_is_bounded_and_goes_in_order(service: Service) -> None:
    """The first two take all blocks, so that a slot is free that nobody behind the third may have."""
    gate, second, order, refused = Gate(), Gate(after=1), [], service.counts.refused
    first = service.submit(prompt(0), mask=gate)
    assert gate.begun.wait(30)

    def told(at: int) -> Callable[[Sequence[int]], None]:
        def mask(tokens: Sequence[int]) -> None:
            if not tokens:
                order.append(at)
            elif at == 1:
                second(tokens)

        return mask

    others = [service.submit(prompt(at), 120 if at < 3 else 2, mask=told(at)) for at in range(1, SLOTS + QUEUE)]
    assert (service.counts.running, service.counts.waiting) == (1, SLOTS + QUEUE - 1)
    with pytest.raises(QueueFull, match="4 requests wait already: try again in") as caught:
        service.submit(prompt(0))
    assert caught.value.retry_after >= 1
    assert service.counts.refused == refused + 1
    gate.opened.set()
    assert second.begun.wait(30)
    assert order == [1]
    first.cancel()
    second.opened.set()
    for answer in others[:2]:
        next(iter(answer))  # and leave it
    assert [len(whole(answer)[1]) for answer in others[2:]] == [2, 2]
    assert order == [1, 2, 3, 4]


def test_what_can_never_be_is_refused_at_once(service: Service) -> None:
    with pytest.raises(ContextError, match="a prompt of 129 tokens does not fit a context of 128"):
        service.submit([1] * 129)
    for tokens, count, settings in (
        ([], 1, Settings()),
        ([1], 0, Settings()),
        ([1], 1, Settings(biases=((999, 1.0),))),
    ):
        with pytest.raises(ModelError):
            service.submit(tokens, count, settings)
    assert service.counts.waiting == 0
    assert len(whole(service.submit([1] * 128))[1]) == 1


def test_a_deadline_ends_what_waits_and_what_runs(service: Service) -> None:
    gate = Gate(after=1)
    running = service.submit(prompt(0), mask=gate, deadline=30)
    assert gate.begun.wait(30)
    waiting = service.submit(prompt(1), deadline=0.01)
    next(iter(service._running.values())).deadline = time.monotonic()
    time.sleep(0.02)
    gate.opened.set()
    assert len(whole(running)[1]) in (1, 2)
    assert whole(waiting) == ("", [], [])
    assert [running.finish_reason, waiting.finish_reason] == ["timeout", "timeout"]


def test_what_comes_too_late_while_another_ends_is_not_begun(service: Service) -> None:
    """It is asked for after the service looked for what is late, and before it lets what waits begin."""
    late: list[Answer] = []
    first = service.submit(prompt(0), 90, mask=(gate := Gate(after=1)))
    end = first.end

    def ask_again(reason: Reason, error: Exception | None = None) -> None:
        late.append(service.submit(prompt(1), deadline=0.0))
        end(reason, error)

    first.end = ask_again  # type: ignore[method-assign]
    first.cancel()
    gate.opened.set()
    whole(first)
    assert whole(late[0]) == ("", [], [])
    assert late[0].finish_reason == "timeout"


def test_a_prompt_that_is_alone_ends_between_two_parts_of_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else decodes, whose steps would end a turn of the service."""
    assert service._batch is not None
    prefill, parts, asked = service._batch.prefill, list[int](), threading.Event()
    run = prefill.run

    def counted(tokens: Sequence[int], *how: Any, **named: Any) -> None:
        assert asked.wait(30)
        run(tokens, *how, **named)
        parts.append(len(tokens))
        answer.cancel()

    monkeypatch.setattr(prefill, "run", counted)
    answer = service.submit(TEXT[::-1], 5)
    asked.set()
    assert whole(answer) == ("", [], [])
    assert answer.finish_reason == "cancelled"
    assert parts == [32]
    until(lambda: nothing_is_held(service))


def test_a_reader_that_stalls_holds_up_nobody(service: Service) -> None:
    stalled = service.submit(prompt(0), 40)
    assert len(whole(service.submit(prompt(1), 10))[1]) == 10
    until(lambda: nothing_is_held(service))
    assert stalled.finish_reason is None
    assert len(whole(stalled)[1]) == 40
    assert stalled.finish_reason == "length"


def test_text_ends_in_front_of_a_stop_string(service: Service) -> None:
    """And the sequence with it; tokens are counted up to the one that completed the string."""
    before, read = service.counts.ended["stop"], threading.Event()
    letters = bits(np.isin(np.arange(SHAPE.vocab), range(ord("a"), ord("z") + 1)))
    text, tokens, _ = whole(service.submit(prompt(0), 12, mask=lambda tokens: letters))
    stop = text[5:7]

    def held(tokens: Sequence[int]) -> bytes:
        """The string is complete by now: its reader sees it before the answer's last token is made."""
        assert len(tokens) < 12 or read.wait(30)
        return letters

    answer = service.submit(prompt(0), 60, stops=("never", stop), mask=held)
    cut, taken, _ = whole(answer)
    read.set()
    assert cut == text[: text.index(stop)]
    assert taken == tokens[: len(taken)]
    assert service.tokenizer.decode(taken).endswith(stop)
    assert (answer.finish_reason, answer.usage.completion) == ("stop", len(taken))
    until(lambda: nothing_is_held(service))
    assert service.counts.ended["stop"] == before + 1


def test_a_token_that_ends_texts_ends_the_answer(service: Service) -> None:
    (end,) = service.tokenizer.stops
    answer = service.submit(prompt(0), 9, Settings(biases=((end, 1e6),)))
    assert whole(answer) == ("", [end], [])
    assert answer.finish_reason == "stop"


def test_an_error_of_one_ends_it_alone(service: Service) -> None:
    alone = whole(service.submit(prompt(1), COUNT))

    def broken(tokens: Sequence[int]) -> bytes | None:
        if len(tokens) == 2:
            raise ValueError("no grammar")
        return bytes(4) if len(tokens) == 9 else None

    answers = [service.submit(prompt(0), COUNT, mask=broken), service.submit(prompt(1), COUNT)]
    wrong = service.submit(prompt(2), COUNT, mask=lambda tokens: bytes(4))
    assert len(whole(answers[0])[1]) == 2
    assert whole(answers[1]) == alone
    assert whole(wrong)[1] == []
    assert [answer.finish_reason for answer in (*answers, wrong)] == ["error", "length", "error"]
    assert isinstance(answers[0].error, ValueError)
    assert isinstance(wrong.error, ModelError)
    assert answers[1].error is None


@pytest.mark.parametrize("drain", [True, False])
def test_a_close_finishes_what_is_there_or_ends_it_and_leaves_nothing(opened: Any, path: Path, drain: bool) -> None:
    def held() -> tuple[int, set[str], int]:
        gc.collect()
        opened.iface.give_back()
        used = int(board_status(os.environ["TEGRAD_BOARD"])["counts"]["memory_bytes"])
        return len(os.listdir("/proc/self/fd")), {thread.name for thread in threading.enumerate()}, used

    def closing(tokens: Sequence[int]) -> None:
        """No answer is whole before the close is asked for."""
        if len(tokens) == 1:
            until(lambda: made._closing)

    for _ in range(2):  # what the first keeps is the device's
        before = held()
        made = Service(path, opened.device, **OPTIONS)
        answers = [made.submit(prompt(at), 30, mask=closing) for at in range(4)]
        made.close(drain=drain)
        made.close()
    assert held() == before
    reasons = {answer.finish_reason for answer in answers if whole(answer) is not None}
    assert reasons == {"length" if drain else "cancelled"}
    with pytest.raises(ModelError, match="closed"):
        made.submit([1])


def lose_the_gpu(service: Service) -> None:
    """By a store to an address that is none."""
    gpu, batch = service._device, service._batch
    assert batch is not None
    source = 'extern "C" __global__ void wild(int *at, int value) { at[(long long)value << 28] = 1; }'
    wild = gpu.load_program(compile_cuda(source, gpu.arch), "wild", 1, 1)
    wild(batch.logits, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(-300,))


def lose_the_driver(service: Service) -> None:
    os.kill(connection(os.environ["TEGRAD_BOARD"]).pid, signal.SIGKILL)


@pytest.mark.klog_errors("(?i)mmu fault|page fault|error notifier")
@pytest.mark.parametrize("lose", [lose_the_gpu, lose_the_driver])
def test_without_the_device_all_answers_end_and_the_next_is_served(
    device: str, path: Path, service: Service, lose: Callable[[Service], None]
) -> None:
    """Also by another service of that GPU, from which the first one's new device is not taken."""
    alone, before = whole(service.submit(prompt(1), COUNT)), service.counts.reopened
    with Service(path, device, **OPTIONS) as other:
        gate = Gate(after=1)
        answers = [service.submit(prompt(0), mask=gate), *(service.submit(prompt(1), COUNT) for _ in range(3))]
        assert gate.begun.wait(30)
        lose(service)
        gate.opened.set()
        for answer in answers:
            whole(answer)
        assert {answer.finish_reason for answer in answers} == {"error"}
        # A step of a width that was not recorded yet finds the driver gone where it allocates.
        assert all(isinstance(answer.error, DeviceFault | DriverError) for answer in answers)
        assert whole(service.submit(prompt(1), COUNT)) == alone
        failed = other.submit(prompt(1), COUNT)
        assert whole(failed) == ("", [], [])
        assert failed.finish_reason == "error"
        assert whole(other.submit(prompt(1), COUNT)) == alone
        assert whole(service.submit(prompt(1), COUNT)) == alone
        assert other.counts.reopened == 1
    assert service.counts.reopened == before + 1
    assert nothing_is_held(service)
