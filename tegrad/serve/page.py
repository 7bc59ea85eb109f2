"""The chat page at /: files of `page/`, served as they are, which speak to /v1/models and /v1/chat/completions.

The page asks no other host, and its policy has the browser hold it to that: no script or style but its own files, no
text that becomes markup. It is loaded without a key, by whoever reaches the server; what it asks for wants one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

FOLDER: Final = Path(__file__).with_name("page")
TYPES: Final = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
POLICY: Final = (
    "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # asked for anew each time, and sent only if it changed
}


RUNNING: Final = "Ollama is running"
"""What Ollama's clients look for at /, which no browser is."""
FILES: Final = {
    "/" if path.name == "index.html" else f"/page/{path.name}": path
    for path in sorted(FOLDER.iterdir())
    if path.suffix in TYPES
}
PATHS: Final = frozenset(FILES)
"""Where the page is, which needs no key."""
OPENAPI: Final[Mapping[str, Any]] = {
    "/": {
        "get": {
            "summary": "A page to chat on, for who accepts HTML",
            "responses": {
                "200": {
                    "description": "The page, or that the server runs",
                    "content": {media: {"schema": {"type": "string"}} for media in ("text/html", "text/plain")},
                }
            },
        }
    }
}


def routes() -> list[Route]:
    """The page at /, and its files below /page/."""
    return [_route(address, path) for address, path in FILES.items()]


def _route(address: str, path: Path) -> Route:
    content = path.read_bytes()
    tag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag, "Content-Type": TYPES[path.suffix], "Vary": "Accept"}

    async def file(request: Request) -> Response:
        if address == "/" and "text/html" not in request.headers.get("Accept", ""):
            return Response(RUNNING, media_type="text/plain", headers={"Vary": "Accept"})
        known = tag in request.headers.get("If-None-Match", "")
        return Response(b"" if known else content, 304 if known else 200, headers)

    return Route(address, file, name=path.name)
