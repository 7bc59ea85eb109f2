"""A model of several engines: which is asked, and that no answer is lost or changed when one of them dies.

Replicas are made here, without Ray; test_ray.py has them made by it.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import processes
import pytest
import tiny_llama
from processes import patience, running, until
from tiny_llama import TYPE, Shape

from tegrad.llm.answer import Answer
from tegrad.llm.errors import ContextError, ModelError
from tegrad.llm.grammar import Grammar
from tegrad.llm.sampling import Settings
from tegrad.llm.service import QueueFull
from tegrad.serve import app, cluster, replica, replicas
from tegrad.serve.catalogue import Catalogue, Place, about
from tegrad.serve.cluster import Cluster
from tegrad.serve.config import Bounds
from tegrad.serve.plan import Wanted
from tegrad.serve.remote import Texts
from tegrad.serve.replica import Call, Replica, authenticate, first_words
from tegrad.serve.replicas import Replicated
from tegrad.serve.wire import EngineError, packed

pytestmark = [pytest.mark.board, pytest.mark.klog_errors("unbind")]  # of a busy channel, as its process is killed

SHAPE = Shape(dim=256, ffn=512, heads=4, kv_heads=2, vocab=301, layers=1, context=512)
WANTED = Wanted(context=192, slots=3, queue=2, same=True)
ENDLESS = Settings(biases=tuple((token, -np.inf) for token in range(297, 301)))
"""Without the tokens that end texts."""
DIGITS = "[0-9]{40}x[a-f]{4}"
KINDS = (ENDLESS, replace(ENDLESS, temperature=0.9), replace(ENDLESS, temperature=1.1, top_p=0.9, logprobs=2),
         replace(ENDLESS, temperature=0.8, repeat=1.3))  # fmt: skip


@dataclass
class Home:
    """Makes replicas, in this process; their engines and boards have processes of their own."""

    bounds: Bounds
    host: str = "127.0.0.1"
    made: list[Replica] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)
    call: Call | None = None

    def start(self, call: Call) -> None:
        self.call = call
        for _ in range(self.bounds.most):
            self.another()

    def another(self) -> None:
        assert self.call is not None
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(replica, "_name", lambda: f"here/{len(self.made)}")  # else Ray tells
            self.made.append(Replica(self.call))

    def engine(self, name: str) -> int:
        """A replica's process."""
        process = self.made[number(name)]._process
        assert process is not None
        return process.pid

    def stop(self, app: str) -> None:
        self.stopped.append(app)
        self.made.clear()


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, Any]], Any]]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama.write(tmp_path_factory.mktemp("models") / "tiny.gguf", SHAPE, TYPE.Q8_0)


@pytest.fixture(scope="module")
def pair(path: Path, run: Any) -> Iterator[tuple[Replicated, Home]]:
    """A model of two replicas, of which nothing is left at last."""
    home = Home(Bounds(2, 2))
    with processes.marked() as mark:
        model = run(Replicated.load(about("tiny", path), WANTED, home))
    yield model, home
    run(model.close())
    assert home.stopped == [model.app]
    until(lambda: not running(mark))


def prompt(at: int, count: int = 5) -> list[int]:
    return np.random.default_rng(at).integers(0, 256, count + at).tolist()


async def whole(answer: Answer) -> tuple[str, list[int], list[Any]]:
    pieces = [piece async for piece in answer]
    tokens = [token for piece in pieces for token in piece.tokens]
    return "".join(piece.text for piece in pieces), tokens, [logs for piece in pieces for logs in piece.logprobs]


async def first(answers: Sequence[Answer], count: int = 1) -> None:
    """Until each has so many tokens, which nobody has read."""
    async with asyncio.timeout(patience(60)):
        while any(len(answer._came) < count for answer in answers):
            await asyncio.sleep(0.001)


async def there(model: Replicated, count: int) -> None:
    async with asyncio.timeout(patience(60)):
        while len(model.replicas) != count:
            await asyncio.sleep(0.01)


def number(name: str) -> int:
    """Of the replica in `Home.made`."""
    return int(name.rpartition("/")[2])


def owner(model: Replicated, answer: Answer) -> str:
    """The replica that makes an answer."""
    names = [
        name for name, one in model.replicas.items()
        for owed in one._owed.values() if getattr(owed.sink, "sink", None) is answer
    ]  # fmt: skip
    return names[0]


def test_a_conversation_finds_its_cache_and_who_does_not_know_the_secret_is_not_heard(
    pair: tuple[Replicated, Home], run: Any
) -> None:
    """Not even its pickles are read."""
    model, home = pair
    heard: list[bool] = []

    class Loud:
        def __reduce__(self) -> tuple[Any, ...]:
            return heard.append, (True,)

    async def ask() -> None:
        for at in range(6):  # two conversations in turn
            answer = model.submit(prompt(at % 2, 140), 2)
            await whole(answer)
            assert answer.usage.cached == (128 if at > 1 else 0)
        assert home.call is not None
        address = home.call.address

        def call() -> None:
            with socket.create_connection(address, 10) as sock:
                sock.settimeout(10)
                authenticate(sock, b"guessed", calls=True)
                sock.sendall(packed(Loud()))

        with pytest.raises(ConnectionError):
            await asyncio.to_thread(call)
        await asyncio.sleep(0.1)
        assert heard == []
        assert len(model.replicas) == 2

    run(ask())


def test_answers_go_on_elsewhere_as_if_nothing_had_happened(pair: tuple[Replicated, Home], run: Any) -> None:
    """An engine is killed, its board, and at last all, in whose place another one comes while requests wait for it."""
    model, home = pair

    async def ask() -> None:
        def asked(at: int) -> Answer:
            grammar = Grammar("regex", DIGITS) if at == 4 else None
            settings = KINDS[at % len(KINDS)] if grammar is None else Settings()
            return model.submit(prompt(at), 60, settings, seed=at, stops=["never"], grammar=grammar)

        def kill(pid: int) -> None:
            os.kill(pid, signal.SIGKILL)

        alone = [await whole(asked(at)) for at in range(5)]
        assert [len(one[1]) for one in alone[:4]] == [60] * 4
        assert re.fullmatch(DIGITS, alone[4][0])

        answers = [asked(at) for at in range(5)]
        assert sorted(one.load_now for one in model.replicas.values()) == [2, 3]
        name = owner(model, answers[4])
        await first([one for one in answers if owner(model, one) == name], 10)
        moved = model.replicas[name].load_now
        kill(home.engine(name))
        assert await asyncio.gather(*map(whole, answers)) == alone
        assert [answer.finish_reason for answer in answers] == ["length"] * 4 + ["stop"]
        assert [answer.usage.prompt for answer in answers] == [len(prompt(at)) for at in range(5)]
        assert [answer.usage.completion for answer in answers[:4]] == [60] * 4
        assert model.retried == moved
        await there(model, 1)
        with pytest.raises(EngineError, match="has ended"):
            home.made[number(name)].check_health()

        with processes.marked() as mark:
            await asyncio.to_thread(home.another)
            await there(model, 2)
        boards = running(mark, "tegrad.orin")  # which takes its time
        answers = [asked(at) for at in range(4)]
        (last,) = (answer for answer in answers[:2] if owner(model, answer) == "here/2")
        await first([last], 10)
        for pid in boards:
            kill(pid)  # its engine goes on and opens another board
        assert await asyncio.gather(*map(whole, answers)) == alone[:4]
        assert model.retried == moved + 2
        assert len(model.replicas) == 2

        for name in model.replicas:
            kill(home.engine(name))
        await there(model, 0)
        gone, waits = asked(0), asked(1)
        gone.cancel()
        assert (await whole(gone), gone.finish_reason) == (("", [], []), "cancelled")
        assert model.busy
        await asyncio.to_thread(home.another)
        assert await whole(waits) == alone[1]

    run(ask())


def test_an_answer_that_may_round_otherwise_goes_on_with_what_came(path: Path, run: Any) -> None:
    """The next replica gets the tokens so far, of which a grammar and limits know."""

    async def ask() -> None:
        wanted = replace(WANTED, same=False)
        model = await Replicated.load(about("tiny", path), wanted, home := Home(Bounds(2, 2)))
        answer = model.submit(prompt(4), 60, Settings(), seed=4, grammar=Grammar("regex", DIGITS))
        await first([answer], 10)
        name = owner(model, answer)
        kill_at = len(answer._came)
        os.kill(home.engine(name), signal.SIGKILL)
        while name in model.replicas:
            await asyncio.sleep(0.001)
        request = next(iter(model._remotes[owner(model, answer)]._owed.values())).sink
        assert isinstance(request, replicas._Request)
        rest = request.rest(same=False)
        assert (rest.tokens[: len(prompt(4))], rest.answered) == (prompt(4), len(request.came))
        assert rest.max_tokens == 60 - len(request.came) <= 60 - kill_at
        text, tokens, _ = await whole(answer)
        assert re.fullmatch(DIGITS, text)
        assert (answer.finish_reason, answer.usage.completion) == ("stop", len(tokens))
        assert model.retried == 1
        await model.close()

    run(ask())


@pytest.mark.long
class Fake:
    """A replica as a model sees it, which answers nothing by itself."""

    plan = SimpleNamespace(slots=1, context=192)
    context, load_now, full = 192, 0, False

    def __init__(self) -> None:
        self.error: EngineError | None = None
        self.sink: Any = None

    def ask(self, sink: Any, ask: Any, *, anyway: bool = False) -> Callable[[str], None]:
        self.sink = sink
        return lambda reason: None


@pytest.mark.parametrize(("prompted", "most", "reason"), [(5, 3, "length"), (5, 50, "stop"), (190, None, "length")])
def test_an_answer_whose_last_token_came_ends_as_it_would_have(
    path: Path, run: Any, prompted: int, most: int | None, reason: str
) -> None:
    """Though its replica dies before it says so, a step later: nothing is left to ask another for."""

    async def ask() -> None:
        one = about("tiny", path)
        home: Any = SimpleNamespace(bounds=Bounds(1, 2), host="")
        model = Replicated(one, replace(WANTED, same=False), texts := Texts.read(one), home)
        dies, other = Fake(), Fake()
        model._remotes = {"dies": dies}  # type: ignore[dict-item]
        answer = model.submit([1] * prompted, most)
        dies.sink.begin(0)
        for token in (7, 8, min(texts.tokenizer.stops) if reason == "stop" else 9):
            dies.sink.put(token, None)
        dies.error = EngineError("killed")
        model._remotes = {"dies": dies, "other": other}  # type: ignore[dict-item]
        dies.sink.end("error", dies.error)
        assert other.sink is None
        assert len((await whole(answer))[1]) == 3
        assert answer.finish_reason == reason

    run(ask())


def test_a_model_whose_replicas_are_all_gone_is_not_ready(path: Path, run: Any, pair: Any) -> None:
    """Which a server says; what one of them was counted with stays known."""
    model, _ = pair
    plan, remotes = model.plan, dict(model._remotes)
    with pytest.MonkeyPatch.context() as patch:
        for name in remotes:
            patch.delitem(model._remotes, name)
        assert model.plan == plan
        models: Any = Catalogue.__new__(Catalogue)
        models._places, models.home = {"tiny": Place(model.about, remote=model)}, SimpleNamespace(bounds=Bounds(2, 2))
        answer = run(app._ready(models, None))
        assert answer.status_code == 503
        assert b'"status":"no replica"' in answer.body


def test_a_request_that_ends_engines_does_not_end_all_of_them(
    path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is more taken than may wait, or a prompt that is too long, or one after the end."""
    monkeypatch.setattr(replicas, "TRIES", 2)

    async def ask() -> None:
        model = await Replicated.load(about("tiny", path), WANTED, home := Home(Bounds(2, 3)))
        await there(model, 3)
        answer = model.submit(prompt(0), None, ENDLESS)
        for _ in range(2):
            await first([answer])
            (name,) = (name for name, one in model.replicas.items() if one.load_now)
            os.kill(home.engine(name), signal.SIGKILL)
            async with asyncio.timeout(patience(30)):
                while name in model.replicas:
                    await asyncio.sleep(0.001)
        await whole(answer)
        assert (answer.finish_reason, len(model.replicas)) == ("error", 1)
        assert isinstance(answer.error, EngineError)
        with pytest.raises(ContextError, match="does not fit a context of 192"):
            model.submit([1] * 193)
        taken = [model.submit(prompt(at), 100, ENDLESS) for at in range(5)]
        with pytest.raises(QueueFull, match="2 requests wait already"):
            model.submit(prompt(0))
        assert sum(one.refused for one in model.replicas.values()) == 1
        await model.close()
        for one in taken:
            await whole(one)
            assert one.finish_reason == "error"
        await whole(late := model.submit(prompt(0)))
        assert "was unloaded" in str(late.error)
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(home.another)

    run(ask())


def test_both_sides_prove_that_they_know_the_secret() -> None:
    """Whoever takes the server's place gets nothing, not even by saying what it hears."""
    near, far = socket.socketpair()

    def echo() -> None:
        with suppress(OSError):
            while data := far.recv(64):
                far.sendall(data)

    with near, far:
        thread = threading.Thread(target=echo)
        thread.start()
        near.settimeout(10)
        with pytest.raises(ConnectionRefusedError, match="does not know the secret"):
            authenticate(near, b"secret", calls=True)
        near.close()
        thread.join()
    near, far = socket.socketpair()
    with near, far:
        near.settimeout(10)
        far.settimeout(10)
        thread = threading.Thread(target=authenticate, args=(far, b"secret"), kwargs={"calls": True})
        thread.start()
        authenticate(near, b"secret", calls=False)
        thread.join()
        far.sendall(packed("words"))
        assert first_words(near) == "words"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "0"}, r"here/0: this machine has tegrad .*, its server 0: install the same"),
        ({"size": 7}, r"here/0: .*tiny.gguf is another file than the server's: copy that one here"),
        ({"wanted": replace(WANTED, slots=1, context=192), "memory": 1 << 20}, "here/0: the model with a context"),
    ],
)
def test_a_machine_that_cannot_load_it_says_why(path: Path, run: Any, change: dict[str, Any], said: str) -> None:
    class Odd(Home):
        def start(self, call: Call) -> None:
            super().start(replace(call, **change))

    async def ask() -> None:
        with pytest.raises(ModelError, match=said):
            await Replicated.load(about("tiny", path), WANTED, home := Odd(Bounds(1, 1)))
        assert home.stopped

    with processes.marked() as mark:
        run(ask())
        until(lambda: not running(mark))


@pytest.mark.parametrize(
    ("address", "raised", "said"),
    [
        (
            None,
            Exception("The node timed out.\nMore of it"),
            "Ray does not start: The node timed out. (docs/replicas.md)",
        ),
        ("auto", AssertionError(), "cannot use Ray at auto: AssertionError (docs/replicas.md)"),
    ],
)
def test_ray_that_does_not_start_is_one_sentence_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, address: str | None, raised: Exception, said: str
) -> None:
    ended: list[bool] = []

    def init(**_: object) -> None:
        raise raised

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(cluster.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(cluster, "_imported", lambda: SimpleNamespace(init=init, shutdown=lambda: ended.append(True)))
    with pytest.raises(EngineError, match=re.escape(said)), Cluster.running(Bounds(1, 1), address):
        pass
    assert ended == [True] * (address is None)
    assert not list(tmp_path.iterdir())
