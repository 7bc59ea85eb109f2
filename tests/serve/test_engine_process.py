"""The process of an engine, in this one and without a device."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tegrad import models
from tegrad.llm.grammar import Masks
from tegrad.llm.tokenizer import Tokenizer
from tegrad.serve import engine
from tegrad.serve.wire import Close, Load, Ready


class Service:
    """A model that is never asked."""

    positions = 512
    config = SimpleNamespace(vocab=2048)

    def __init__(self, path: Any, **_: Any) -> None:
        self.tokenizer = Tokenizer.load(path)

    def close(self, *, drain: bool) -> None:
        pass


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
