"""The server's ASGI application: all APIs, the page, and what tells how the server is."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Final

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from tegrad import __version__
from tegrad.serve import anthropic, metrics, ollama, openai, page, responses
from tegrad.serve.catalogue import Catalogue
from tegrad.serve.config import Config
from tegrad.serve.exchange import Voice
from tegrad.serve.failures import Failure
from tegrad.serve.guard import OPEN, Bounded, Guarded, Logged, refusal

APIS: Final = (openai.API, responses.API, ollama.API, anthropic.API)
VOICES: Final[Mapping[str, Voice]] = {
    "/v1/messages": anthropic.API.voice, "/api": ollama.API.voice, "": openai.API.voice,
}  # fmt: skip
"""Of the API that a path belongs to, by what it begins with; the first that it does."""


def application(models: Catalogue, config: Config) -> ASGIApp:
    """What uvicorn serves."""
    own = [Route(path, partial(answer, models), methods=["GET"]) for path, (answer, _) in OWN.items()]
    app = Starlette(routes=[*own, *(route for api in APIS for route in api.routes(models)), *page.routes()])
    app.router.redirect_slashes = False
    app.router.default = _missing
    app.add_exception_handler(HTTPException, _http_error)
    guarded = Guarded(
        Bounded(app, told, config.most_body), told, keys=config.keys, origins=config.cors, local=config.local,
        free=OPEN | page.PATHS,
    )  # fmt: skip
    cors = CORSMiddleware(
        guarded, allow_origins=config.cors, allow_methods=["GET", "POST", "DELETE", "HEAD"], allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )  # fmt: skip
    return Logged(cors if config.cors else guarded, told)


def told(path: str, failure: Failure) -> Mapping[str, Any]:
    """A failure's JSON, in the words of the API that a path belongs to."""
    voice = next(voice for begin, voice in VOICES.items() if path == begin or path.startswith(f"{begin}/"))
    return voice.failure(failure)


def document() -> dict[str, Any]:
    """The OpenAPI document of all APIs."""
    paths: dict[str, Any] = {}
    for api in APIS:
        paths |= api.paths
    return {
        "openapi": "3.1.0",
        "info": {"title": "tegrad serve", "version": __version__},
        "paths": {**paths, **page.OPENAPI, **{path: {"get": told} for path, (_, told) in OWN.items()}},
        "components": {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"key": []}],
    }


# ---- how the server is


async def _health(models: Catalogue, request: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _ready(models: Catalogue, request: Request) -> Response:
    if models.loads:
        return JSONResponse({"status": "loading model"}, 503, {"retry-after": "1"})
    told: dict[str, Any] = {"status": "ok", "models": [each.about.name for each in models.loaded()]}
    if models.home is not None:
        there = {place.about.name: sorted(place.here.replicas) for place in models.places if place.here}
        told["replicas"] = {name: {"there": found, "wanted": models.home.bounds.most} for name, found in there.items()}
        if not all(there.values()):
            return JSONResponse({**told, "status": "no replica"}, 503, {"retry-after": "10"})
    return JSONResponse(told)


async def _figures(models: Catalogue, request: Request) -> Response:
    return Response(await metrics.text(models), media_type=metrics.MEDIA)


async def _document(models: Catalogue, request: Request) -> Response:
    return JSONResponse(document())


def _answer(description: str, media: str = "application/json", kind: str = "object") -> dict[str, Any]:
    return {"description": description, "content": {media: {"schema": {"type": kind}}}}


OWN: Final[Mapping[str, tuple[Callable[[Catalogue, Request], Awaitable[Response]], Mapping[str, Any]]]] = {
    "/health": (_health, {"summary": "Whether the server runs", "responses": {"200": _answer("It does")}}),
    "/ready": (
        _ready,
        {
            "summary": "Whether a request is answered at once",
            "responses": {"200": _answer("It is"), "503": _answer("A model is being loaded")},
        },
    ),
    "/metrics": (
        _figures,
        {"summary": "Figures for Prometheus", "responses": {"200": _answer("Figures", "text/plain", "string")}},
    ),
    "/openapi.json": (_document, {"summary": "This document", "responses": {"200": _answer("The document")}}),
}
"""What answers for the server itself, by path, and what OpenAPI says of it."""


async def _missing(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "http":
        failure = Failure(f"there is no {scope['path']} here: /openapi.json tells what is", 404)
        await refusal(scope["path"], told, failure)(scope, receive, send)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    failure = Failure(error.detail, error.status_code)
    if error.status_code == 405:
        failure = Failure(f"{request.url.path} takes no {request.method}: see /openapi.json", 405)
    return JSONResponse(told(request.url.path, failure), error.status_code, error.headers)
