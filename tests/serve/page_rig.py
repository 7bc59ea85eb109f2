"""A real Chromium in front of the chat page, and a stand-in for the server that says what it is told to."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect, sync_playwright
from processes import patience
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tegrad.serve import page

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
HOST_NAME = "jetson.test"
"""A name that the browser takes for this machine; unlike localhost it has no secure context without TLS."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window."""
    arguments = ["--no-sandbox", f"--host-resolver-rules=MAP {HOST_NAME} 127.0.0.1"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def watched(browser: Browser, url: str, faults: Sequence[str] = (), **options: Any) -> Iterator[BrowserContext]:
    """A context of its own, which asks for nothing but this server and has no error but those that contain a fault."""
    expect.set_options(timeout=1000 * patience(60))  # a first token may need kernels of its own
    context = browser.new_context(**options)
    wrong: list[str] = []

    def heard(kind: str, text: str) -> None:
        if kind == "error" and not any(fault in text for fault in faults):
            wrong.append(text)

    def looked(at: Page) -> None:
        at.on("console", lambda message: heard(message.type, message.text))
        at.on("pageerror", lambda error: heard("error", str(error)))

    context.on("page", looked)
    asked: list[str] = []
    context.on("request", lambda request: asked.append(request.url))
    context.set_default_timeout(1000 * patience(60))
    try:
        yield context
    finally:
        context.close()
    others = [each for each in asked if urlsplit(each).scheme != "blob" and urlsplit(each).port != urlsplit(url).port]
    assert others == []
    assert wrong == []


def loaded(context: BrowserContext, url: str, hash: str = "") -> Page:
    """A new tab with the page, once it has the server's models."""
    tab = context.new_page()
    tab.goto(f"{url}/{hash}")
    expect(tab.get_by_label("Model").locator("option")).not_to_have_count(0)
    return tab


def say(tab: Page, text: str) -> None:
    """Send a message."""
    tab.get_by_label("Message", exact=True).fill(text)
    tab.keyboard.press("Enter")


def done(tab: Page) -> Locator:
    """The last answer, once it has ended."""
    expect(tab.get_by_role("button", name="Stop")).to_be_hidden(timeout=1000 * patience())
    return tab.locator("article.assistant").last


def written(tab: Page) -> None:
    """Wait until the browser has on disk what the page has begun to write: a read waits for writes before it."""
    tab.evaluate("""() => new Promise((done) => {
        const opened = indexedDB.open("tegrad");
        opened.onsuccess = () => {
            const reading = opened.result.transaction(["conversations", "messages"]);
            reading.objectStore("conversations").getAll();
            reading.oncomplete = () => { opened.result.close(); done(); };
        };
    })""")


def press(tab: Page, name: str) -> None:
    """Press the last button of a name."""
    tab.get_by_role("button", name=name, exact=True).last.click()


@dataclass
class Said:
    """What the stand-in says to a message: texts of deltas, (thoughts,), whole chunks, seconds, or None: until `go`."""

    pieces: Sequence[str | tuple[str] | dict[str, Any] | float | None] = ()
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    finish: str | None = "stop"
    """None: the stream ends without a reason. "break": the connection does."""


@dataclass
class StandIn:
    """Speaks just as much of the API as the page asks for. `says` maps what the user says to what is answered."""

    says: dict[str, Said] = field(default_factory=dict)
    asked: list[dict[str, Any]] = field(default_factory=list)
    go: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)
    """A client went away in the middle of an answer."""
    key: str = ""
    models: tuple[str, ...] = ("small-model", "large-model")

    def routes(self) -> list[Route]:
        return [
            *page.routes(),
            Route("/v1/models", self.listed),
            Route("/v1/chat/completions", self.answered, methods=["POST"]),
        ]

    def refused(self, request: Request) -> Response | None:
        if not self.key or request.headers.get("Authorization") == f"Bearer {self.key}":
            return None
        return JSONResponse({"error": {"message": "This server needs an API key", "code": "invalid_api_key"}}, 401)

    async def listed(self, request: Request) -> Response:
        return self.refused(request) or JSONResponse({"object": "list", "data": [{"id": name} for name in self.models]})

    async def answered(self, request: Request) -> Response:
        if refusal := self.refused(request):
            return refusal
        body = await request.json()
        self.asked.append(body)
        said = self.says[body["messages"][-1]["content"]]
        if said.status != 200:
            return JSONResponse(said.pieces[0], said.status, said.headers)
        return StreamingResponse(self.stream(said), media_type="text/event-stream")

    async def stream(self, said: Said) -> AsyncIterator[str]:
        count = 0
        try:
            for piece in said.pieces:
                if piece is None:
                    while not self.go.is_set():
                        await asyncio.sleep(0.01)
                    continue
                if isinstance(piece, float):
                    await asyncio.sleep(piece)
                    continue
                count += 1
                name = "content" if isinstance(piece, str) else "reasoning_content"
                text = piece if isinstance(piece, str) else piece[0] if isinstance(piece, tuple) else ""
                yield event(piece if isinstance(piece, dict) else {"choices": [{"delta": {name: text}}]})
        except asyncio.CancelledError:
            self.left.set()
            raise
        if said.finish == "break":
            raise ConnectionResetError
        if said.finish:
            yield event({"choices": [{"delta": {}, "finish_reason": said.finish}]})
            yield event({"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": count}})
            yield "data: [DONE]\n\n"


def event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
