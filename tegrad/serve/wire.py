"""What the server and the process of an engine say to each other, over a socket pair.

A message is a pickle with its length in front. What the steps of a batch make comes in one message a step.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tegrad.errors import TegradError
from tegrad.llm import errors
from tegrad.llm.answer import Reason
from tegrad.llm.grammar import Grammar, GrammarError
from tegrad.llm.sampler import Logprobs, Settings

_HEAD: Final = struct.Struct("<I")
READ_BYTES: Final = 1 << 16


class EngineError(TegradError):
    """The process that runs a model failed, or its device did."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An exception as it travels: the name of its class, and what it says."""

    kind: str
    text: str

    @classmethod
    def of(cls, error: BaseException) -> Fault:
        """What is wrong, in words for who asked."""
        if isinstance(error, TegradError):
            kind = next((each.__name__ for each in type(error).__mro__ if each.__name__ in _KINDS), "")
            return cls(kind, str(error))
        kind = "OutOfMemory" if isinstance(error, MemoryError) else ""
        return cls(kind, f"the engine failed ({type(error).__name__}: {error}): its log has more")

    def error(self) -> TegradError:
        """The exception again: of the same class where that is one about models and requests."""
        return _KINDS.get(self.kind, EngineError)(self.text)


_KINDS: Final = {
    each.__name__: each
    for each in (errors.ModelError, errors.GgufError, errors.UnsupportedModelError, errors.OutOfMemory,
                 errors.ContextError, errors.NoRoom, GrammarError)
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Load:
    """The first message: which model the process runs. `options` are a `Service`'s, or a speaker's if it `embeds`."""

    path: Path
    embeds: bool
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded, with so many positions, on a device in words."""

    positions: int
    device: str


@dataclass(frozen=True, slots=True)
class Refused:
    """It could not be loaded."""

    fault: Fault


@dataclass(frozen=True, slots=True)
class Ask:
    """A request. See `Service.submit`."""

    number: int
    tokens: Sequence[int]
    max_tokens: int | None
    settings: Settings
    seed: int
    grammar: Grammar | None
    deadline: float | None
    answered: int = 0
    """So many of the last tokens are the answer's already, which is to go on."""


@dataclass(frozen=True, slots=True)
class Cancel:
    """A request is to end, or nobody waits for a reply any more."""

    number: int
    reason: Reason


@dataclass(slots=True)
class Came:
    """What steps made since the last such message, of requests by number."""

    begun: list[tuple[int, int]] = field(default_factory=list)
    """And how many of the prompt's tokens were in the cache."""
    tokens: list[tuple[int, int, Logprobs | None]] = field(default_factory=list)
    ended: list[tuple[int, Reason, Fault | None]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Embed:
    """Texts, by tokens, of which vectors are wanted."""

    number: int
    texts: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class Query:
    """The counts are wanted."""

    number: int


@dataclass(frozen=True, slots=True)
class Reply:
    """To an Embed or a Query: an array, `Counts`, or a Fault."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Close:
    """The process is to end once what is there is finished. To end it at once, the socket is closed."""


def packed(message: object) -> bytes:
    """A message's bytes."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _HEAD.pack(len(data)) + data


class Frames:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that these bytes complete."""
        self._held += data
        while len(self._held) >= _HEAD.size:
            end = _HEAD.size + _HEAD.unpack_from(self._held)[0]
            if len(self._held) < end:
                return
            message = pickle.loads(self._held[_HEAD.size : end])
            del self._held[:end]
            yield message


class Channel:
    """An end that a thread reads, such as the engine's. Any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._sending = sock, threading.Lock()

    def send(self, message: object) -> None:
        """OSError once the server is gone."""
        with self._sending:
            self._sock.sendall(packed(message))

    def messages(self) -> Iterator[Any]:
        """Messages, until the server closes its end or is gone."""
        frames = Frames()
        while True:
            try:
                data = self._sock.recv(READ_BYTES)
            except ConnectionError:
                return
            if not data:
                return
            yield from frames.feed(data)
