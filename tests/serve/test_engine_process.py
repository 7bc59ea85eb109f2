"""The process of an engine, in this one and without a device."""

from __future__ import annotations

import queue
import threading
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tegrad import models
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.grammar import Grammar, GrammarError, Masks
from tegrad.llm.sampling import Settings
from tegrad.llm.tokenizer import Tokenizer
from tegrad.serve import engine
from tegrad.serve.wire import Ask, Cancel, Close, Load, Ready


class Service:
    """A model that is never asked."""

    positions = 512
    config = SimpleNamespace(vocab=2048)

    def __init__(self, path: Any, *, known: Any, **_: Any) -> None:
        self.tokenizer = Tokenizer.load(path)
        known(self.tokenizer, len(self.tokenizer))

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

    def compile_slowly(masks: Masks, grammar: Grammar) -> None:
        compiled.append(grammar)
        free.wait(10)
        raise GrammarError("no grammar")

    monkeypatch.setattr(engine, "Service", Service)
    monkeypatch.setattr(engine, "COMPILERS", 1)
    monkeypatch.setattr(engine.engine, "suits_named", lambda: True)
    monkeypatch.setattr(Masks, "mask", compile_slowly)
    made = engine.Generator(cast("Any", SimpleNamespace(send=told.put)), Load(models.SMALL, False, {}))
    made.ask(Ask(6, [1], 5, Settings(), 0, Grammar("regex", "a"), None))
    made.ask(Ask(7, [1], 5, Settings(), 0, Grammar("json"), None if leaves else 0.0))
    if leaves:
        made.cancel(Cancel(7, "cancelled"))
    free.set()
    assert [(number, reason) for number, reason, _ in told.get(timeout=10).ended] == [(6, "error")]
    assert told.get(timeout=10).ended == [(7, "cancelled" if leaves else "timeout", None)]
    made.close(drain=True)
    assert compiled == [Grammar("regex", "a")]
    assert made.sinks == {}


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


def test_what_grammars_need_is_built_before_the_model_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a thread beside the load: llguidance holds Python's other threads up meanwhile, and the first answers once had
    gaps of 0.2 s for it."""
    warmed, told = list[Any](), list[Any]()

    def warm(masks: Masks) -> None:
        time.sleep(0.2)
        warmed.append((masks, threading.current_thread(), told[:]))

    monkeypatch.setattr(engine, "Service", Service)
    monkeypatch.setattr(engine, "_opened", lambda: "no device")
    monkeypatch.setattr(engine, "gc", SimpleNamespace(collect=int, freeze=int))  # this process goes on
    monkeypatch.setattr(engine.engine, "suits_named", lambda: True)
    monkeypatch.setattr(Masks, "warm", warm)
    process = engine.Process(cast("Any", SimpleNamespace(send=told.append)))
    monkeypatch.setattr(process, "_listen", lambda: None)
    for job in (Load(models.SMALL, False, {}), Close()):
        process._jobs.put(job)
    assert process.run() == 0
    assert told == [Ready(512, "no device")]
    [(_, thread, before)] = warmed
    assert thread is not threading.current_thread()
    assert before == []


def test_a_model_that_is_not_loaded_leaves_no_thread_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Service):
        def __init__(self, path: Any, **more: Any) -> None:
            super().__init__(path, **more)
            raise OutOfMemory("no room")

    monkeypatch.setattr(engine, "Service", Broken)
    monkeypatch.setattr(engine.engine, "suits_named", lambda: True)
    with pytest.raises(OutOfMemory, match="no room"):
        engine.Generator(cast("Any", SimpleNamespace()), Load(models.SMALL, False, {}))
    for thread in threading.enumerate():
        if thread.name.startswith("tegrad-grammar"):
            thread.join(10)
            assert not thread.is_alive()
