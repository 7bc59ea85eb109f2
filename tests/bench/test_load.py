"""What clients see of a server that is made up here: tokens, times and texts; and what is no answer."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tegrad.bench.load import (
    OWN_TOKENS,
    PREFIX_TOKENS,
    Request,
    Round,
    Seen,
    differing,
    drive,
    paced,
    requests,
)
from tegrad.bench.record import RecordError

Event = dict[str, Any]


@contextmanager
def served(answer: Callable[[Event], Iterator[Event | float]], status: int = 200) -> Iterator[tuple[str, list[Event]]]:
    """A server whose answers are events and pauses: its URL, and the requests that came."""
    asked: list[Event] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.path == "/v1/completions"
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            asked.append(body)
            self.send_response(status)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for item in answer(body):
                if isinstance(item, float):
                    time.sleep(item)
                else:
                    self.chunk(f"data: {json.dumps(item)}\n\n".encode())
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")

        def chunk(self, data: bytes) -> None:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def part(text: str, finish: str | None = None) -> Event:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish}], "usage": None}


def ended(tokens: int, prompt: int = 10, cached: int = 4) -> Event:
    details = {"cached_tokens": cached}
    return {
        "choices": [],
        "usage": {"completion_tokens": tokens, "prompt_tokens": prompt, "prompt_tokens_details": details},
    }


def words(asked: Event) -> Iterator[Event | float]:
    """An answer that tells the prompt's first token, after 20 ms, in two parts 30 ms apart."""
    yield 0.02
    yield part(f"{asked['prompt'][0]} ")
    yield 0.03
    yield part("ab")
    yield part("", "length")
    yield ended(7)


def test_tokens_are_those_that_the_server_counts_and_answers_are_in_the_order_of_requests() -> None:
    made = [Request([token], 7, seed=token) for token in range(9)]
    together, most = 0, []

    def counted(request: Event) -> Iterator[Event | float]:
        nonlocal together
        together += 1
        most.append(together)
        yield from words(request)
        together -= 1

    with served(counted) as (url, asked):
        found = drive(url, made, 3)
    assert [one.text for one in found.seen] == [f"{token} ab" for token in range(9)]
    assert found.tokens == 63
    assert found.cached == 0.4
    assert found.rate == pytest.approx(63 / found.seconds)
    assert max(most) == 3
    assert found.seconds >= 3 * 0.05
    assert sorted(one["seed"] for one in asked) == list(range(9))
    assert {(one["temperature"], one["max_tokens"], one["stream"]) for one in asked} == {(0.0, 7, True)}


def test_the_first_part_and_the_gap_are_timed_apart() -> None:
    with served(words) as (url, _):
        found = drive(url, [Request([1])], 1)
    (seen,) = found.seen
    (gap,) = seen.gaps_ms
    assert seen.first_ms >= 20
    assert 50 <= seen.first_ms + gap <= 1e3 * found.seconds


def test_an_answer_that_ends_at_once_is_one() -> None:
    with served(lambda _: iter([0.02, part("", "stop"), ended(1)])) as (url, _):
        (seen,) = drive(url, [Request([1])], 1).seen
    assert (seen.text, seen.tokens, seen.gaps_ms) == ("", 1, [])
    assert seen.first_ms >= 20


def test_what_comes_within_the_pace_is_seen_together_at_its_end() -> None:
    assert paced([0, 1, 2, 12, 40], 10) == [0, 10, 20, 40]
    assert paced([0, 10.5, 21], 10) == [0, 10.5, 21]
    assert paced([], 10) == []


def test_a_round_tells_the_median_first_token_and_the_longest_gaps() -> None:
    seen = [
        Seen(0.0, [0.001 * first, 0.001 * (first + gap)], "", 2, 1, 0) for first, gap in ((5, 20), (7, 30), (90, 50))
    ]
    found = Round(seen, 2.0)
    assert found.first_ms == pytest.approx(7)
    assert found.gap_ms == pytest.approx(49.6)
    assert found.rate == 3


@pytest.mark.parametrize(
    ("status", "answer", "said"),
    [
        (400, {"error": {"message": "the prompt is too long"}}, "the prompt is too long"),
        (200, {"error": {"message": "the GPU is gone"}}, "the GPU is gone"),
        (200, part("a", "stop"), "did not answer"),
    ],
)
def test_what_is_no_answer_is_no_figure(status: int, answer: Event, said: str) -> None:
    with served(lambda _: iter([answer]), status) as (url, _), pytest.raises(RecordError, match=said):
        drive(url, [Request([1])], 1)


def test_a_server_that_is_gone_is_told_of() -> None:
    with served(words) as (url, _):
        pass
    with pytest.raises(RecordError, match="takes no request"):
        drive(url, [Request([1])], 1)


def test_every_second_prompt_begins_with_what_is_the_same_in_every_round() -> None:
    one, other = (requests(40, 1000, seed) for seed in (1, 2))
    assert one == requests(40, 1000, 1)
    assert {100 <= len(each.tokens) <= 2000 for each in (*one, *other)} == {True}
    pairs = [(a.tokens, b.tokens) for a in one[1::2] for b in other[1::2]]
    for a, b in pairs:
        shared = min(PREFIX_TOKENS, min(len(a), len(b)) - OWN_TOKENS)
        assert a[:shared] == b[:shared]
        assert a[shared:] != b[shared:]
    firsts = [tuple(each.tokens[:16]) for each in (*one[::2], *other[::2])]
    assert len(set(firsts)) == 40


def test_answers_differ_by_their_texts() -> None:
    seen = [Seen(0.0, [1.0], text, 1, 1, 0) for text in "abcd"]
    assert differing(seen, seen) == 0
    assert differing(seen, [seen[0], *seen[2:], seen[1]]) == 3
