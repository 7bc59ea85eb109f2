"""A server's load: clients that each send one streamed request after another, and what they see of the answers.

All clients are one event loop over plain sockets, which only notes when bytes come; they are read once all is over. So
it costs little beside the server, whichever it is: it speaks OpenAI's /v1/completions, with prompts as tokens.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final
from urllib.parse import urlsplit

import numpy as np

from tegrad.bench.record import RecordError

PROMPT_TOKENS: Final = (100, 2000)
ANSWER_TOKENS: Final = 128
PREFIX_TOKENS: Final = 512
"""What every second prompt begins with, as far as it is long enough."""
OWN_TOKENS: Final = 32
"""Those of a prompt that no other one has, at least."""
SHARED_MS: Final = 10.0
"""Tokens of one stream that come within this time share an event."""
_EVENT: Final = re.compile(rb"data: ([^\r\n]+)\r?\n")
_ENDS: Final = (b"0\r\n\r\n", b"data: [DONE]\n\n")
"""A response of chunks is over with the first of these, or when the server says so."""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt's tokens, and how it is to be continued."""

    tokens: Sequence[int]
    max_tokens: int = ANSWER_TOKENS
    temperature: float = 0.0
    seed: int = 0

    @property
    def body(self) -> bytes:
        """As /v1/completions takes it."""
        return json.dumps({
            "prompt": list(self.tokens), "max_tokens": self.max_tokens, "temperature": self.temperature,
            "seed": self.seed, "stream": True, "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client saw of an answer. Times are those of `time.perf_counter`."""

    asked: float
    times: Sequence[float]
    """When each event with a part of the answer came."""
    text: str
    tokens: int
    prompt_tokens: int
    cached_tokens: int

    @property
    def first_ms(self) -> float:
        """From the request to the first part of its answer."""
        return 1e3 * (self.times[0] - self.asked)

    @property
    def gaps_ms(self) -> list[float]:
        """Between parts, where those share an event that come within SHARED_MS of one, as our server has them do."""
        return [1e3 * (later - sooner) for sooner, later in pairwise(paced(self.times, SHARED_MS / 1e3))]


@dataclass(frozen=True, slots=True)
class Round:
    """All answers to a round of requests, in the order of those."""

    seen: Sequence[Seen]
    seconds: float
    """From the first request to the end of the last answer."""

    @property
    def tokens(self) -> int:
        """Of all answers."""
        return sum(one.tokens for one in self.seen)

    @property
    def rate(self) -> float:
        """Answers' tokens per second."""
        return self.tokens / self.seconds

    @property
    def first_ms(self) -> float:
        """The median time to an answer's first part."""
        return float(np.median([one.first_ms for one in self.seen]))

    @property
    def gap_ms(self) -> float:
        """The 99th percentile of the time between two parts of an answer."""
        gaps = [gap for one in self.seen for gap in one.gaps_ms]
        return float(np.percentile(gaps, 99)) if gaps else 0.0

    @property
    def cached(self) -> float:
        """The share of prompts' tokens that the server found in its cache."""
        return sum(one.cached_tokens for one in self.seen) / sum(one.prompt_tokens for one in self.seen)


def requests(
    count: int, vocab: int, seed: int, *, lengths: tuple[int, int] = PROMPT_TOKENS, tokens: int = ANSWER_TOKENS
) -> list[Request]:
    """Random prompts, their lengths evenly between two; every second one begins with what is the same for any seed."""
    rng, prefix = np.random.default_rng(seed), np.random.default_rng(0).integers(0, vocab, PREFIX_TOKENS)
    made = []
    for at in range(count):
        prompt = rng.integers(0, vocab, rng.integers(lengths[0], lengths[1] + 1))
        if at % 2:
            shared = max(0, min(PREFIX_TOKENS, len(prompt) - OWN_TOKENS))
            prompt[:shared] = prefix[:shared]
        made.append(Request(prompt.tolist(), tokens, seed=seed + at))
    return made


def paced(times: Sequence[float], pace: float) -> list[float]:
    """When a reader sees what came at these times, if it looks again at the earliest `pace` after it saw something."""
    seen: list[float] = []
    for came in times:
        if not seen or came > seen[-1]:
            seen.append(max(came, seen[-1] + pace) if seen else came)
    return seen


def drive(url: str, asked: Sequence[Request], clients: int) -> Round:
    """Send all requests, each by the first of `clients` that is free. RecordError for one that fails."""
    bodies = [one.body for one in asked]
    gc.disable()  # it would hold up the clock
    try:
        streams, seconds = asyncio.run(_drive(url, bodies, clients))
    finally:
        gc.enable()
    return Round([stream.seen() for stream in streams], seconds)


async def _drive(url: str, bodies: Sequence[bytes], clients: int) -> tuple[list[_Stream], float]:
    address = urlsplit(url)
    host, port = address.hostname or "", address.port or 80
    streams: list[_Stream | None] = [None] * len(bodies)
    waiting = iter(range(len(bodies)))

    async def client(numbers: Iterator[int]) -> None:
        for number in numbers:
            streams[number] = await _Stream.of(host, port, bodies[number])

    begun = time.perf_counter()
    await asyncio.gather(*(client(waiting) for _ in range(clients)))
    return [stream for stream in streams if stream is not None], time.perf_counter() - begun


class _Stream(asyncio.Protocol):
    """One request's response, as it comes."""

    def __init__(self) -> None:
        self._came: list[tuple[float, bytes]] = []
        self._over = asyncio.get_running_loop().create_future()
        self._asked = 0.0

    @classmethod
    async def of(cls, host: str, port: int, body: bytes) -> _Stream:
        """Ask, and wait for the end. RecordError where nobody listens."""
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        asked = time.perf_counter()
        try:
            transport, stream = await asyncio.get_running_loop().create_connection(cls, host, port)
        except OSError as error:
            raise RecordError(f"the server at {host}:{port} takes no request: {error}") from error
        stream._asked = asked
        transport.write(head.encode() + body)
        await stream._over
        transport.close()
        return stream

    def data_received(self, data: bytes) -> None:
        """See asyncio."""
        self._came.append((time.perf_counter(), data))
        if data.endswith(_ENDS):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        """See asyncio."""
        self._end()

    def _end(self) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def seen(self) -> Seen:
        """What came. RecordError where that is no answer."""
        data = b"".join(part for _, part in self._came)
        ends = list(accumulate(len(part) for _, part in self._came))
        times: list[float] = []
        text, usage = "", None
        for found in _EVENT.finditer(data):
            if found[1] == b"[DONE]":
                continue
            event = _event(found[1])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                text += choice["text"]
                if choice["finish_reason"] is None or not times:  # an end is all that comes of an answer without text
                    times.append(self._came[bisect_left(ends, found.end())][0])
        if usage is None or not times:
            raise RecordError(f"the server did not answer: {data.decode(errors='replace')[-400:]!r}")
        details = usage.get("prompt_tokens_details") or {}
        return Seen(
            self._asked, times, text, usage["completion_tokens"], usage["prompt_tokens"],
            details.get("cached_tokens", 0),
        )  # fmt: skip


def _event(data: bytes) -> Mapping[str, Any]:
    event = json.loads(data)
    if not isinstance(event, dict) or "choices" not in event:
        raise RecordError(f"the server answers with {data.decode(errors='replace')[:400]}")
    return event


def differing(one: Iterable[Seen], other: Iterable[Seen]) -> int:
    """How many answers have another text."""
    return sum(a.text != b.text for a, b in zip(one, other, strict=True))
