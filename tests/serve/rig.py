"""A server of some routes in a thread of this process, in front of models that are loaded in it."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import ASGIApp

from tegrad.llm.answer import Answer, Reason
from tegrad.llm.config import Config
from tegrad.llm.embeddings import Vectors
from tegrad.llm.errors import UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.grammar import Grammar, Masks
from tegrad.llm.sampling import Logprobs, Settings
from tegrad.llm.service import Service
from tegrad.llm.start import speaker
from tegrad.llm.template import Template
from tegrad.llm.tokenizer import Tokenizer
from tegrad.serve.model import About, Loaded, Model, UnknownModel
from tegrad.serve.remote import Texts

GREEDY = Settings()


def about(name: str, path: Path, *, embeds: bool = False) -> About:
    """What is told of a file."""
    with Gguf.open(path) as file:
        metadata = {key: value for key, value in file.metadata.items() if not isinstance(value, list)}
    family, stat = str(metadata["general.architecture"]), path.stat()
    context = int(str(metadata[f"{family}.context_length"]))
    return About(name, path, stat.st_size, stat.st_mtime, family, "Q8_0", 1000, context, embeds, metadata)


class Direct:
    """A model that answers: a `Service`, without the process around it."""

    def __init__(self, about: About, service: Service) -> None:
        self.about, self.service, self.context = about, service, service.positions
        self.tokenizer = service.tokenizer
        with Gguf.open(about.path) as file:
            self.template = Template.of(file)
        self.answers: list[Answer] = []
        self._masks = Masks(self.tokenizer)

    def submit(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        settings: Settings = GREEDY,
        *,
        stops: Sequence[str] = (),
        seed: int = 0,
        grammar: Grammar | None = None,
        deadline: float | None = None,
    ) -> Answer:
        """With masks of a grammar, if there is one."""
        mask = None if grammar is None else self._masks.mask(grammar)
        made = self.service.submit(
            tokens, max_tokens, settings, stops=stops, seed=seed, mask=mask, deadline=deadline
        )  # fmt: skip
        self.answers.append(made)
        return made

    async def embed(self, texts: Sequence[Sequence[int]]) -> Any:
        raise UnsupportedModelError(f"{self.about.name} was not made for vectors of texts: choose an embedding model")


class Embedder:
    """A model that makes vectors."""

    template = None

    def __init__(self, about: About, device: str) -> None:
        self.about, self.context = about, 64
        self.tokenizer = Tokenizer.load(about.path)
        with Gguf.open(about.path) as file:
            self._vectors = Vectors.of(file, Config.read(file))
            self._speaker, _ = speaker(file, self.context, device)

    def submit(self, *_: Any, **__: Any) -> Answer:
        raise UnsupportedModelError(f"{self.about.name} makes vectors of texts alone: choose another model")

    async def embed(self, texts: Sequence[Sequence[int]]) -> Any:
        return np.stack([self._vectors.made(self._speaker, tokens) for tokens in texts])


@dataclass
class Fixed:
    """Models that are all loaded."""

    models: Sequence[Model]
    used: int = 0
    kept: list[float | None] = field(default_factory=list)
    """For how long each use wanted its model kept."""

    def names(self) -> Sequence[About]:
        return [model.about for model in self.models]

    def find(self, name: str | None) -> About:
        found = [one for one in self.names() if name in (None, one.name)]
        if not found:
            raise UnknownModel(f"there is no model {name!r}: GET /v1/models lists them")
        return found[0]

    def loaded(self) -> Sequence[Loaded]:
        return [Loaded(model.about, model.about.size, model.context, None) for model in self.models]

    @asynccontextmanager
    async def use(self, name: str | None, keep_alive: float | None = None) -> AsyncIterator[Model]:
        one = self.find(name)
        self.used += 1
        self.kept.append(keep_alive)
        try:
            yield next(model for model in self.models if model.about is one)
        finally:
            self.used -= 1


@contextmanager
def served(app: Sequence[Route] | ASGIApp) -> Iterator[str]:
    """A server of an application, or of some routes; its URL."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        made = app if callable(app) else Starlette(routes=list(app))
        config = uvicorn.Config(made, log_level="warning", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listening])), name="server")
        thread.start()
        try:
            while not server.started:
                time.sleep(0.01)
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(30)


class Scripted:
    """A model that says what it is told to, token by token; `wait` comes in front of each, `error` at the end."""

    def __init__(self, about: About, text: str = "") -> None:
        self.about, self.context, texts = about, about.context, Texts.read(about)
        self.config, self.tokenizer, self.template = texts.config, texts.tokenizer, texts.template
        self.text = text
        self.wait: Callable[[], object] = lambda: None
        self.error: Exception | None = None
        self.reason: Reason = "stop"
        self.refusal: Exception | None = None
        """What `submit` raises."""
        self.asked: list[Asked] = []

    def submit(self, tokens: Sequence[int], *rest: Any, **more: Any) -> Answer:
        """Say it, in a thread."""
        if self.refusal is not None:
            raise self.refusal
        asked = Asked(list(tokens), rest, more, Answer(self.tokenizer, len(tokens), more.get("stops", ())))
        asked.answer.leave = asked.left.append
        self.asked.append(asked)
        threading.Thread(target=self._say, args=(asked,)).start()
        return asked.answer

    def apart(self) -> None:
        """To `wait` for: what was said last is read, so that each token comes by itself, however late its reader is."""
        asked, end = self.asked[-1], time.monotonic() + 60
        while asked.answer._came and not asked.left:
            assert time.monotonic() < end
            time.sleep(0.001)

    async def embed(self, texts: Sequence[Sequence[int]]) -> Any:
        return np.ones((len(texts), 4), np.float32) / 2

    def said(self, asked: Asked) -> str:
        """What it says to a request."""
        return self.text

    def _say(self, asked: Asked) -> None:
        for at, token in enumerate(self.tokenizer.encode(self.said(asked), bos=False)):
            self.wait()
            if asked.left:
                return asked.answer.end(asked.left[0])
            if not at:
                asked.answer.begin(0)
            asked.answer.put(token, Logprobs(-0.5, ((token, -0.5),)))
        self.wait()
        return asked.answer.end("error" if self.error else self.reason, self.error)


@dataclass
class Asked:
    """A request that a model got."""

    tokens: list[int]
    rest: tuple[Any, ...]
    more: dict[str, Any]
    answer: Answer
    left: list[Reason] = field(default_factory=list)
