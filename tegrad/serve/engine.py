"""The process of an engine: one model, its batch and its device, and nothing of HTTP, texts or templates.

`remote` starts it with one end of a socket pair. It ends when told to, or when the other end is gone; a GPU fault ends
the requests that run, and the next one has the device opened again (`llm.service`). What ends the process itself, such
as kill -9, leaves nothing: the device belongs to it.
"""

from __future__ import annotations

import gc
import math
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tegrad.errors import TegradError
from tegrad.llm import embeddings, engine, rows
from tegrad.llm.answer import Reason
from tegrad.llm.config import Config
from tegrad.llm.errors import ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.grammar import Masks
from tegrad.llm.sampler import Logprobs, Mask
from tegrad.llm.service import Counts, Order, Service
from tegrad.llm.start import choose_device, described, speaker
from tegrad.llm.tokenizer import Tokenizer
from tegrad.serve.wire import Ask, Came, Cancel, Channel, Close, Embed, Fault, Load, Query, Ready, Refused, Reply

COMPILERS: Final = 2
"""Threads that compile grammars."""
PATIENCE_S: Final = 5.0
"""Seconds that the end of this process may take once nobody waits for answers any more."""


@dataclass(eq=False, slots=True)
class _Sink:
    """Where one request's tokens go: into the message of this step."""

    number: int
    runner: Generator
    order: Order | None = None
    left: Reason | None = None
    """Why the reader wants no more."""

    def begin(self, cached: int) -> None:
        self.runner.came.begun.append((self.number, cached))

    def put(self, token: int, logprobs: Logprobs | None) -> None:
        self.runner.came.tokens.append((self.number, token, logprobs))

    def end(self, reason: Reason, error: Exception | None = None) -> None:
        self.runner.sinks.pop(self.number, None)
        self.runner.came.ended.append((self.number, reason, Fault.of(error) if error else None))


class Generator:
    """A model that answers: requests in, tokens out, a message a step."""

    def __init__(self, channel: Channel, load: Load) -> None:
        if not engine.suits_named():
            device = os.environ.get("DEV")
            raise UnsupportedModelError(
                f"only our own kernels serve several at once, and not on DEV={device}: unset it"
            )
        self._channel = channel
        self.came = Came()
        self.sinks: dict[int, _Sink] = {}
        self._compiling = ThreadPoolExecutor(COMPILERS, "tegrad-grammar")
        try:
            self._service = Service(load.path, after=self._tell, warm=True, known=self._build, **load.options)
            wait([self._built])  # what went wrong is said to who asks for a grammar
        except BaseException:
            self._compiling.shutdown(wait=False)
            raise
        self.positions = self._service.positions

    @property
    def counts(self) -> Counts:
        """What was done so far."""
        return self._service.counts

    def _build(self, tokenizer: Tokenizer, vocab: int) -> None:
        """Begin to build what grammars need, while the model is loaded: it takes a second in which Python's other
        threads stand still, and beside the first requests these would wait for it."""
        self._masks = Masks(tokenizer, vocab)
        self._built = self._compiling.submit(self._masks.warm)

    def ask(self, ask: Ask) -> None:
        """Begin to answer, once its grammar is compiled, for which no other request waits."""
        sink = self.sinks[ask.number] = _Sink(ask.number, self)
        end = math.inf if ask.deadline is None else time.monotonic() + ask.deadline
        if ask.grammar is None:
            self._begin(ask, sink, end)
        else:
            self._compiling.submit(self._begin, ask, sink, end)

    def _begin(self, ask: Ask, sink: _Sink, end: float) -> None:
        """Unless nobody waits for the answer any more by the time that its grammar's turn comes."""
        reason: Reason | None = sink.left or ("timeout" if time.monotonic() >= end else None)
        if reason and ask.grammar is not None:
            del self.sinks[ask.number]
            return self._channel.send(Came(ended=[(ask.number, reason, None)]))
        try:
            mask = self._masks.mask(ask.grammar) if ask.grammar is not None else None
            if mask is not None and ask.answered:
                mask = partial(_after, ask.tokens[-ask.answered :], mask)
            deadline = None if ask.deadline is None else end - time.monotonic()
            sink.order = self._service.ask(
                sink, ask.tokens, ask.max_tokens, ask.settings, seed=ask.seed, mask=mask, deadline=deadline
            )
            if sink.left is not None:
                sink.order.cancel(sink.left)
        except BaseException as error:  # a panic of llguidance's is no Exception
            del self.sinks[ask.number]
            self._channel.send(Came(ended=[(ask.number, "error", Fault.of(error))]))
            if not isinstance(error, TegradError):
                raise
        return None

    def cancel(self, cancel: Cancel) -> None:
        """End an answer, if it has not ended."""
        if (sink := self.sinks.get(cancel.number)) is not None:
            sink.left = cancel.reason
            if sink.order is not None:
                sink.order.cancel(cancel.reason)

    def close(self, *, drain: bool) -> None:
        """Finish what is there or else cancel it, and free everything. A second close may cancel for the first."""
        self._compiling.shutdown(wait=drain)
        self._service.close(drain=drain)

    def _tell(self) -> None:
        """Send what this step made; in the service's thread."""
        came = self.came
        if came.begun or came.tokens or came.ended:
            self.came = Came()
            with suppress(OSError):  # the server is gone, and this process soon
                self._channel.send(came)


def _after(answered: Sequence[int], mask: Mask, tokens: Sequence[int]) -> Any:
    """The mask of an answer that goes on with `tokens`."""
    return mask([*answered, *tokens])


class Embedder:
    """A model that makes vectors of texts."""

    def __init__(self, load: Load) -> None:
        with Gguf.open(load.path) as file:
            self._vectors = embeddings.Vectors.of(file, Config.read(file))
            self._speaker, _ = speaker(file, **load.options)
            if isinstance(self._speaker, engine.Engine):  # whose kernels for prompts make the vectors
                try:
                    rows.check(file)
                except BaseException:
                    self._speaker.close()
                    raise
        self.positions: int = load.options["context"]
        self.counts = Counts()
        self._left: set[int] = set()
        """Numbers of messages whose vectors nobody wants any more."""

    def vectors(self, wanted: Embed) -> NDArray[np.float32] | None:
        """(texts, dim); None once nobody wants them."""
        made = []
        for tokens in wanted.texts:
            if wanted.number in self._left:
                self._left.discard(wanted.number)
                return None
            made.append(self._vectors.made(self._speaker, tokens))
            self.counts.prompt_tokens += len(tokens)
        return np.stack(made)

    def cancel(self, cancel: Cancel) -> None:
        """Make no more of a message's vectors; in another thread."""
        self._left.add(cancel.number)

    def close(self, *, drain: bool) -> None:
        """As `Generator.close`."""
        if isinstance(self._speaker, engine.Engine):
            self._speaker.close()


class Process:
    """This process: the main thread loads the model and makes vectors, another one listens to the server."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._runner: Generator | Embedder | None = None
        self._jobs: queue.SimpleQueue[Load | Embed | Close] = queue.SimpleQueue()

    def run(self) -> int:
        """Until the server has enough, or is gone; the exit code."""
        threading.Thread(target=self._listen, name="tegrad-listen", daemon=True).start()
        while True:
            match self._jobs.get():
                case Load() as load:
                    try:
                        device = _opened()
                        self._runner = Embedder(load) if load.embeds else Generator(self._channel, load)
                    except Exception as error:
                        self._channel.send(Refused(Fault.of(error)))
                        if isinstance(error, TegradError | MemoryError):
                            return 1
                        raise
                    gc.collect()
                    gc.freeze()  # what is here stays: to search it for garbage would hold up a step
                    self._channel.send(Ready(self._runner.positions, device))
                case Embed(number) as embed if isinstance(self._runner, Embedder):
                    try:
                        if (vectors := self._runner.vectors(embed)) is not None:
                            self._channel.send(Reply(number, vectors))
                    except TegradError as error:
                        self._channel.send(Reply(number, Fault.of(error)))
                        if not isinstance(error, ModelError):  # the device's: the next request has a new process
                            return 1
                case Close():
                    if self._runner is not None:
                        self._runner.close(drain=True)
                    return 0

    def _listen(self) -> None:
        for message in self._channel.messages():
            match message, self._runner:
                case ((Load() | Embed() | Close()), _):
                    self._jobs.put(message)
                case Query(number), Generator() | Embedder() as runner:
                    self._channel.send(Reply(number, runner.counts))
                case Ask(), Generator() as runner:
                    runner.ask(message)
                case Cancel(), Generator() | Embedder() as runner:
                    runner.cancel(message)
        if self._runner is None:  # a load cannot be told to stop
            os._exit(1)
        _end_in(PATIENCE_S)
        self._runner.close(drain=False)
        self._jobs.put(Close())


def _opened() -> str:
    """Choose and open the device; what it is, in words."""
    choose_device()
    from tegrad.llm.device import open_device  # only now: tinygrad reads what was chosen when it is imported

    return described(open_device())


def _end_in(seconds: float) -> None:
    """Whatever this process still does, it ends then."""
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def _end_with(pipe: int) -> None:
    """End this process once nobody has the other end of a pipe."""
    os.read(pipe, 1)
    os._exit(1)


def main() -> int:
    """The process's program: its arguments are the number of the socket, and of a pipe with which it is to end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal, or systemd, tells the server as well, which tells us
        signal.signal(number, signal.SIG_IGN)
    for pipe in sys.argv[2:]:
        threading.Thread(target=_end_with, args=(int(pipe),), name="tegrad-end", daemon=True).start()
    return Process(Channel(socket.socket(fileno=int(sys.argv[1])))).run()


if __name__ == "__main__":
    sys.exit(main())
