"""The loop of a chat: a question or a command, an answer as it comes, and what it took."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Protocol, TypeAlias

from tegrad.chat import commands
from tegrad.chat.screen import Screen, no_echo
from tegrad.chat.talk import Talk
from tegrad.errors import TegradError
from tegrad.llm.api import Reply, Stream
from tegrad.llm.tools import Event, Text, Thinking

Came: TypeAlias = Event | BaseException | None
"""A part of an answer; what ended it, an error, or None for its own end."""


class Reading(Protocol):
    """Where questions come from."""

    interactive: bool
    """Whether somebody types them, and wants to be told more than answers."""

    def read(self) -> str:
        """The next one. EOFError, KeyboardInterrupt."""


class Session:
    """A conversation in front of a user."""

    def __init__(self, talk: Talk, screen: Screen, reading: Reading) -> None:
        self.talk, self.screen, self._reading = talk, screen, reading
        self.failed = False
        """Whether some question, or command, ended with an error."""
        self._came: SimpleQueue[Came] | None = None
        """The answer that is on its way."""

    def run(self) -> None:
        """Until the user ends it. At a prompt Ctrl-C ends an answer, and only twice the program."""
        if not self._reading.interactive:
            self._loop()
            return
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            self._loop()
        finally:
            signal.signal(signal.SIGINT, before)
            self.talk.llm.close()

    def _loop(self) -> None:
        interrupted = False
        while True:
            try:
                text = self._reading.read()
                interrupted = False
                self._take(text)
            except EOFError:
                return
            except KeyboardInterrupt:
                if not self._reading.interactive:
                    raise
                if interrupted:
                    return
                interrupted = True
                self.screen.note("Ctrl-C again ends, and so does Ctrl-D")
            except TegradError as error:
                self.failed = True
                self.screen.error(str(error))
                if self.talk.llm.lost:
                    self.screen.note("the GPU is opened anew, and the model loaded again")
                    self.talk.change(self.talk.model)

    def _interrupt(self, *_: object) -> None:
        if self._came is None:
            raise KeyboardInterrupt
        self._came.put(None)

    def _take(self, text: str) -> None:
        if text.startswith("/"):
            commands.run(self, text.strip())
        elif text.strip():
            self.talk.ask(text.strip())
            self.answer()

    def answer(self) -> None:
        """Answer the last question; without an answer it is taken back."""
        said, talk = "", self.talk
        try:
            if dropped := talk.fit():
                turns = "the oldest turn" if dropped == 1 else f"the {dropped} oldest turns"
                self.screen.note(f"the context is full: the model is no longer told {turns}")
            with talk.begin() as stream, no_echo():
                for event in self._events(stream):
                    if isinstance(event, Thinking):
                        self.screen.thinking(event.text)
                    elif isinstance(event, Text):
                        said += event.text
                        self.screen.text(event.text)
            self.screen.end()
            if self._reading.interactive:
                self._figures(stream.reply)
            if not said.strip():
                self.screen.note("nothing was said, so that the question is forgotten")
        finally:
            if said.strip():  # before anything is drawn: Ctrl-C may come meanwhile
                talk.answered(said.strip())
            else:
                talk.take_back()
            self.screen.end()

    def _figures(self, reply: Reply) -> None:
        """What an answer took, and how it ended where that was not by itself."""
        context, used = self.talk.llm.context, reply.prompt_tokens + len(reply.tokens)
        speed = f", {reply.tokens_per_second:.1f} tok/s" if reply.tokens_per_second else ""
        ended = {"stop": "", "length": "; cut off: /set max_tokens", None: "; stopped"}[reply.finish_reason]
        if reply.finish_reason == "length" and used >= context:
            ended = "; the context is full: the next question leaves out the oldest turns"
        count = f"{len(reply.tokens)} token{'s' if len(reply.tokens) != 1 else ''}"
        self.screen.note(f"[{count}{speed}; {max(context - used, 0)} of {context} tokens are left{ended}]")

    def _events(self, stream: Stream) -> Iterator[Event]:
        """An answer's parts. Another thread makes them: what is under way with the GPU is never interrupted."""
        came = self._came = SimpleQueue()
        threading.Thread(target=_make, args=(stream, came), name="tegrad-chat").start()
        try:
            while (event := came.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            self._came = None


def _make(stream: Stream, came: SimpleQueue[Came]) -> None:
    try:
        for event in stream.events():
            came.put(event)
        came.put(None)
    except BaseException as error:
        came.put(error)
