"""A model without a device: what a conversation sees of `LLM`."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tegrad.llm.api import DEFAULTS, Reply
from tegrad.llm.tools import Event, Text, Thinking


class Model:
    """Says `answers` in turn; a message takes a token for each of its words and two more."""

    def __init__(self, context: int = 40, answers: Sequence[Sequence[str] | Exception] = (), name: str = "") -> None:
        self.context, self.name, self.answers = context, name, list(answers)
        self.told: list[list[Mapping[str, Any]]] = []
        self.closed = self.lost = False

    def count(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Tokens of a conversation."""
        return sum(len(one["content"].split()) + 2 for one in messages)

    def stream(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> Said:
        """The next answer."""
        self.told.append(list(messages))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return Said(answer, self.count(messages))

    def options(self, **given: Any) -> Mapping[str, Any]:
        """No own."""
        return {**DEFAULTS, **given}

    def close(self) -> None:
        """It is over."""
        self.closed = True


class Said:
    """An answer; one that ends with "..." goes on until it is closed."""

    def __init__(self, pieces: Sequence[str], prompt: int) -> None:
        self._pieces, self._prompt, self._closed = pieces, prompt, threading.Event()
        self._count, self._ended = 0, False

    def events(self) -> Iterator[Event]:
        """What it says, and in brackets what it thinks."""
        for piece in self._pieces:
            if piece == "...":
                self._closed.wait(20)
                return
            self._count += 1
            yield Thinking(piece[1:-1]) if piece.startswith("(") else Text(piece)
        self._ended = True

    @property
    def reply(self) -> Reply:
        """What has come."""
        return Reply("", (0,) * self._count, "stop" if self._ended else None, self._prompt, 0, None, 0)

    def close(self) -> None:
        """Say no more."""
        self._closed.set()

    def __enter__(self) -> Said:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
