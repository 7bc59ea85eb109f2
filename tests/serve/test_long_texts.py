"""A text that cannot fit is refused, or cut, before anything is made of it, whichever API it comes by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rig import Fixed, Scripted, about, served
from starlette.routing import Mount

from tegrad import models
from tegrad.serve.app import application
from tegrad.serve.config import Config
from tegrad.serve.conversation import LETTERS_OF_TOKEN


class Server(Fixed):
    loads = False
    places = ()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[int]]]:
    """A server's URL, and the lengths of the texts that tokens were made of."""
    model, lengths = Scripted(about("small", models.SMALL), "so it was"), list[int]()
    encode = model.tokenizer.encode

    def counted(text: str, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, **options)

    monkeypatch.setattr(model.tokenizer, "encode", counted)
    with served([Mount("/", application(Server([model]), Config()))]) as url:
        yield url, lengths


TEXT = "word " * 512 * LETTERS_OF_TOKEN
CHAT = [{"role": "user", "content": TEXT}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": CHAT}),
        ("/v1/responses", {"input": TEXT}),
        ("/v1/embeddings", {"input": ["a", TEXT]}),
        ("/api/generate", {"model": "small", "prompt": TEXT, "raw": True}),
        ("/api/chat", {"model": "small", "messages": CHAT}),
        ("/api/embed", {"model": "small", "input": TEXT, "truncate": False}),
        ("/v1/messages", {"model": "small", "max_tokens": 1, "messages": CHAT}),
    ],
)
def test_a_text_that_cannot_fit_is_refused_unread(asked: tuple[str, list[int]], path: str, body: Any) -> None:
    url, lengths = asked
    response = httpx.post(f"{url}{path}", json=body, timeout=60)
    assert response.status_code == 400
    assert "letters do not fit a context of 512 tokens: shorten the text" in response.text
    assert all(length < 10 for length in lengths)


def test_ollamas_embeddings_cut_it_first(asked: tuple[str, list[int]]) -> None:
    url, lengths = asked
    response = httpx.post(f"{url}/api/embed", json={"model": "small", "input": TEXT}, timeout=60)
    assert response.json()["prompt_eval_count"] == 512
    assert lengths == [512 * LETTERS_OF_TOKEN]
