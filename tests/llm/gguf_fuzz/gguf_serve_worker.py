"""A process that does with one GGUF file after the other what `tegrad models --fit` and `tegrad serve` do.

As `gguf_worker`, with a server's stages: the file in the hub's cache and named alone, which context fits, the
batch of an engine on a device that keeps books, a grammar for its vocabulary, and what three APIs tell of it and have a
model answer that says the same to all. A status of 500 or more is found, but for 503.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf_worker
import httpx
from gguf_worker import ROOM, BoundedDevice

sys.path.insert(0, str(Path(__file__).parents[2] / "serve"))
from rig import Fixed, Scripted
from told import TOOLS

from tegrad.cli import models as command
from tegrad.errors import TegradError
from tegrad.hub import cache
from tegrad.hw.chips import CHIPS
from tegrad.llm import packed
from tegrad.llm.batch import Batch
from tegrad.llm.config import Config as ModelConfig
from tegrad.llm.errors import OutOfMemory
from tegrad.llm.gguf import Gguf
from tegrad.llm.grammar import Grammar, Masks
from tegrad.models import SMALL
from tegrad.serve.app import application
from tegrad.serve.catalogue import Place, Shelf
from tegrad.serve.config import Config
from tegrad.serve.model import About
from tegrad.serve.plan import Plan, Wanted, planned

CHAT: Any = {"messages": gguf_worker.MESSAGES, "max_tokens": 8}
ASKED: Sequence[tuple[str, Any]] = (
    ("/v1/models", None),
    ("/api/tags", None),
    ("/api/show", {}),
    ("/v1/chat/completions", {**CHAT, "tools": TOOLS}),
    ("/v1/completions", {"prompt": gguf_worker.TEXTS, "echo": True, "logprobs": 2}),
    ("/v1/messages/count_tokens", CHAT),
)


class Server(Fixed):
    """What the application asks of a catalogue besides."""

    loads = False
    places: Sequence[Place] = ()


_warnings: list[str] = []


class Log(logging.Handler):
    """The server's, into `_warnings`."""

    def emit(self, record: logging.LogRecord) -> None:
        _warnings.append(record.getMessage())


def served(path: Path) -> None:
    """Everything of a file, a stage after the other, as `gguf_worker.opened`."""
    link = Path(os.environ["HF_HUB_CACHE"]) / "models--any--one-GGUF/snapshots" / ("a" * 40) / "one-Q8_0.gguf"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(path)
    (listed,) = command._rows()
    fits = listed | command._fit(link, ROOM)
    assert command._words(fits)
    _warnings.clear()
    among = [one.path for one in Shelf([]).all()]
    assert all(said.isprintable() for said in _warnings)
    assert among == ([SMALL] if _warnings else [link])  # one that is not sound is left out, and told of
    assert cache.find("one").path == link
    one = Shelf([str(path)]).find(None)
    refusals: list[TegradError] = []
    try:
        made = planned(one.path, Wanted(slots=2), ROOM, embeds=one.embeds)
        _loaded(path, made)
    except TegradError as error:
        refusals.append(error)
    try:
        _answered(one)
    except TegradError as error:
        refusals.append(error)
    for refusal in refusals:
        gguf_worker._check_words(refusal, path)
    if refusals:
        raise refusals[0]


_sound: set[str] = set()
"""Vocabularies and templates that were gone through, since most mutants have one of a few."""


def _answered(one: About) -> None:
    """What the server's own process does with texts."""
    with Gguf.open(one.path) as file:
        kept = {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}
        config = ModelConfig.read(file)
    key = repr((kept, config.vocab, config.longest))
    if key in _sound:
        return
    model = Scripted(one, "It is late.")
    try:
        Masks(model.tokenizer, config.vocab).check(Grammar("json"))
        asyncio.run(_asked(model))
    finally:
        if model.template is not None:
            model.template.close()
    _sound.add(key)


async def _asked(model: Scripted) -> None:
    """Requests to a server that has the model."""
    transport = httpx.ASGITransport(application(Server([model]), Config()))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        for where, body in ASKED:
            if body is None:
                answer = await http.get(where)
            else:
                answer = await http.post(where, json={"model": model.about.name, **body})
            assert answer.status_code in (200, 400, 503), f"{where}: {answer.status_code} {answer.text[:300]}"
            assert answer.status_code == 200 or "error" in answer.json()


def _loaded(path: Path, made: Plan) -> None:
    """A batch on a device that keeps books."""
    device = BoundedDevice(CHIPS["agx-orin-64gb"])
    with contextlib.ExitStack() as held:
        held.callback(device.close_all)
        packed.opened = lambda name: device  # type: ignore[assignment]
        model = held.enter_context(packed.PackedModel.load(path, "NV"))
        try:
            held.enter_context(Batch(model, slots=made.slots, positions=made.context, blocks=made.blocks))
        except MemoryError as error:
            if not str(error).startswith("no room"):
                raise
            raise OutOfMemory(f"{error}: ask for a shorter context") from error


if __name__ == "__main__":
    logging.getLogger("tegrad.serve").addHandler(Log())
    logging.getLogger("tegrad.serve").propagate = False
    gguf_worker.main(served)
