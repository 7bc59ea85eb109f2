"""A hub on loopback that speaks the protocol of huggingface.co as far as a download needs it.

/api/models/REPO lists files; /REPO/resolve/REVISION/FILE tells commit, etag and size and redirects to a host of
storage, which is this server by another name; there ranges are answered, and connections break where they are told to.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "a" * 40


@dataclass
class Repository:
    """Files of a repository, and who may read them."""

    files: dict[str, bytes]
    gated: bool = False
    token: str | None = None
    """Without it the repository is not there."""


@dataclass
class Hub:
    """The server's contents, what was asked of it, and where its connections break."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    breaks: list[int] = field(default_factory=list)
    """Bytes after which the next answers of storage end, one after the other."""
    stall: int | None = None
    """Bytes after which storage's next answer says nothing more until the client has gone."""
    ranges: list[str | None] = field(default_factory=list)
    """Of each request to storage."""
    tokens: set[str | None] = field(default_factory=set)
    """That storage was shown."""
    port: int = 0

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Nothing is logged."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        for pattern, answer in (
            (r"/storage/([0-9a-f]+)", self._storage),
            (r"/api/models/([^/]+/[^/]+)(?:/revision/([^/]+))?", self._listing),
            (r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ):
            if found := re.fullmatch(pattern, path):
                answer(*found.groups())
                return
        self._answer(404)

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _repository(self, name: str, revision: str) -> Repository | None:
        known = self.hub.repositories.get(name)
        if known is None or (known.token and self.headers["Authorization"] != f"Bearer {known.token}"):
            self._answer(401, X_Error_Message="Invalid username or password.")
            return None
        if revision not in ("main", "v1", COMMIT):
            self._answer(404, X_Error_Code="RevisionNotFound")
            return None
        return known

    def _listing(self, name: str, revision: str | None) -> None:
        if (known := self._repository(name, revision or "main")) is not None:
            siblings = [
                {
                    "rfilename": file,
                    "size": len(data),
                    "lfs": {"sha256": _sha(data), "size": len(data), "pointerSize": 9},
                }
                for file, data in known.files.items()
            ]
            body = json.dumps({"id": name, "sha": COMMIT, "siblings": siblings, "tags": [], "downloads": 0}).encode()
            self._answer(200, body, Content_Type="application/json")

    def _resolve(self, name: str, revision: str, file: str) -> None:
        if (known := self._repository(name, revision)) is None:
            return
        if known.gated and self.headers["Authorization"] is None:
            self._answer(401, X_Error_Code="GatedRepo")
            return
        data = known.files[file]
        storage = f"http://localhost:{self.hub.port}/storage/{_sha(data)}"
        linked = {"X_Linked_Etag": f'"{_sha(data)}"', "X_Linked_Size": str(len(data))}
        self._answer(302, Location=storage, X_Repo_Commit=COMMIT, ETag='"of the pointer"', **linked)

    def _storage(self, digest: str) -> None:
        hub = self.hub
        data = next(data for own in hub.repositories.values() for data in own.files.values() if _sha(data) == digest)
        asked = self.headers["Range"]
        hub.ranges.append(asked)
        hub.tokens.add(self.headers["Authorization"])
        begin = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - begin))
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        end = begin + hub.breaks.pop(0) if hub.breaks else len(data)
        if (stall := hub.stall) is not None:
            self.wfile.write(data[begin : begin + stall])
            hub.stall = None
            self.rfile.read(1)
            self.close_connection = True
            return
        self.wfile.write(data[begin:end])
        self.close_connection = end < len(data)


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Server:
    """Serves a hub from a thread. Use as a context manager."""

    def __enter__(self) -> Hub:
        hub = Hub()
        self._server = ThreadingHTTPServer(("", 0), type("Handler", (_Handler,), {"hub": hub}))
        hub.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return hub

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
