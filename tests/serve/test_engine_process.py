"""The process of an engine, in this one and without a device."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tegrad import models
from tegrad.llm.grammar import Grammar, Masks
from tegrad.llm.sampling import Settings
from tegrad.llm.tokenizer import Tokenizer
from tegrad.serve import engine
from tegrad.serve.wire import Ask, Cancel, Close, Load, Ready


class Service:
    """A model that is never asked."""

    positions = 512
    config = SimpleNamespace(vocab=2048)

    def __init__(self, path: Any, **_: Any) -> None:
        self.tokenizer = Tokenizer.load(path)

    def ask(self, *_: Any, **__: Any) -> None:
        raise AssertionError("nobody waits for this answer")

    def close(self, *, drain: bool) -> None:
        pass


@pytest.mark.parametrize("leaves", [False, True])
def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch, leaves: bool
) -> None:
    """It had to wait for others, until the client's patience ended or the client left."""
    told, compiled, free = queue.SimpleQueue[Any](), list[Any](), threading.Event()
    monkeypatch.setattr(engine, "Service", Service)
    monkeypatch.setattr(engine, "COMPILERS", 1)
    monkeypatch.setattr(engine.engine, "suits_named", lambda: True)
    monkeypatch.setattr(Masks, "warm", lambda masks: free.wait(10))
    monkeypatch.setattr(Masks, "mask", lambda masks, grammar: compiled.append(grammar))
    made = engine.Generator(cast("Any", SimpleNamespace(send=told.put)), Load(models.SMALL, False, {}))
    made.warm()
    made.ask(Ask(7, [1], 5, Settings(), 0, Grammar("json"), None if leaves else 0.0))
    if leaves:
        made.cancel(Cancel(7, "cancelled"))
    free.set()
    assert told.get(timeout=10).ended == [(7, "cancelled" if leaves else "timeout", None)]
    made.close(drain=True)
    assert compiled == []
    assert made.sinks == {}


def test_a_model_that_leaves_as_soon_as_it_is_there_needs_no_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--keep-alive 0`: the server's word to close it may come before its own next step."""
    monkeypatch.setattr(engine, "Service", Service)
    monkeypatch.setattr(engine.engine, "suits_named", lambda: True)
    made = engine.Generator(cast("Any", SimpleNamespace()), Load(models.SMALL, False, {}))
    made.close(drain=False)
    made.warm()


class Panic(BaseException):
    """Of a library in another language."""


def test_a_panic_while_a_grammar_is_compiled_ends_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    told = queue.SimpleQueue[Any]()

    def panic(*_: Any) -> None:
        raise Panic("no room")

    monkeypatch.setattr(engine, "Service", Service)
    monkeypatch.setattr(engine.engine, "suits_named", lambda: True)
    monkeypatch.setattr(Masks, "mask", panic)
    made = engine.Generator(cast("Any", SimpleNamespace(send=told.put)), Load(models.SMALL, False, {}))
    made.ask(Ask(7, [1], 5, Settings(), 0, Grammar("json"), None))
    ((number, reason, fault),) = told.get(timeout=10).ended
    assert (number, reason) == (7, "error")
    assert "Panic: no room" in fault.text
    made.close(drain=True)


def test_what_grammars_need_is_built_beside_the_first_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    warmed, told = queue.SimpleQueue[Any](), list[Any]()
    monkeypatch.setattr(engine, "Service", Service)
    monkeypatch.setattr(engine, "_opened", lambda: "no device")
    monkeypatch.setattr(engine, "gc", SimpleNamespace(collect=int, freeze=int))  # this process goes on
    monkeypatch.setattr(engine.engine, "suits_named", lambda: True)
    monkeypatch.setattr(Masks, "warm", lambda masks: warmed.put((masks, threading.current_thread(), told[:])))
    process = engine.Process(cast("Any", SimpleNamespace(send=told.append)))
    monkeypatch.setattr(process, "_listen", lambda: None)
    for job in (Load(models.SMALL, False, {}), Close()):
        process._jobs.put(job)
    assert process.run() == 0
    assert told == [Ready(512, "no device")]
    _, thread, before = warmed.get(timeout=10)
    assert thread is not threading.current_thread()
    assert before == told
