"""What a large body takes is done beside the event loop, which answers others meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from rig import Fixed, Scripted, about, served

from tegrad import models
from tegrad.llm.tools import Format
from tegrad.serve import anthropic, exchange, ollama, openai, responses
from tegrad.serve.exchange import BRIEF

HELLO = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
LARGE = {"metadata": {"more": "x" * BRIEF}}
LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    one = Scripted(about("small", models.SMALL), "Good morning")
    routes = [
        route for api in (openai, responses, ollama, anthropic) for route in api.API.routes(Fixed([one]))
    ]  # fmt: skip
    with served(routes) as found:
        yield found
    assert one.template is not None
    one.template.close()


@pytest.mark.parametrize(
    ("api", "path", "body"),
    [
        (openai, "/v1/chat/completions",
         HELLO | {"tools": [{"type": "function", "function": LOOK}], "tool_choice": "required"}),
        (responses, "/v1/responses", {"input": "Hello", "tools": [{"type": "function", **LOOK}]}),
        (ollama, "/api/chat", HELLO),
        (anthropic, "/v1/messages", HELLO | {"max_tokens": 5}),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_it_is_not_read_in_the_loops_thread(
    url: str, monkeypatch: pytest.MonkeyPatch, api: Any, path: str, body: dict[str, Any]
) -> None:
    names: dict[str, set[str]] = {}

    def watched(place: Any, name: str) -> None:
        made = getattr(place, name)

        def call(*rest: Any, **more: Any) -> Any:
            names.setdefault(name, set()).add(threading.current_thread().name)
            return made(*rest, **more)

        monkeypatch.setattr(place, name, call)

    for place, name in ((exchange, "parsed"), (api, "chat_of"), (Format, "messages"), (Format, "grammar")):
        watched(place, name)
    assert httpx.post(f"{url}{path}", json=body | LARGE, timeout=60).status_code == 200
    assert {"parsed", "chat_of", "messages"} <= names.keys()
    assert not any("server" in threads for threads in names.values())
