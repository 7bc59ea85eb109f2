"""A server, from its configuration to its end."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from tegrad.serve import log
from tegrad.serve.app import application
from tegrad.serve.catalogue import Catalogue, Shelf
from tegrad.serve.cluster import Cluster
from tegrad.serve.config import Config, ConfigError
from tegrad.serve.log import LOG
from tegrad.serve.replicas import Home

IDLE_CONNECTION_S: Final = 75
"""Longer than clients keep one, httpx and the openai client 5 s: what is sent on one that has just closed is lost."""


def serve(config: Config, tell: Callable[[str], None]) -> None:
    """Serve until a signal ends it; requests that run have `grace` seconds then, and a second signal ends it at once.

    The URL goes to `tell` once the first model of `models` is loaded. ConfigError, and what its load raises.
    """
    log.set_up(config.log)
    shelf = Shelf(config.models)
    _check_model_names(config, shelf)
    ray = Cluster.running(config.replicas, config.ray) if config.replicas else nullcontext()
    with _listening(config) as sock, ray as home:
        asyncio.run(_serve(config, shelf, home, sock, tell))


async def _serve(
    config: Config, shelf: Shelf, home: Home | None, sock: socket.socket, tell: Callable[[str], None]
) -> None:
    models = Catalogue(
        shelf, config.wanted, own=config.own, memory=config.memory, keep_alive=config.keep_alive, home=home
    )  # fmt: skip
    server = Server(application(models, config), config)
    gc.collect()
    gc.freeze()  # what is here stays: to search it for garbage would hold up all streams, and so be done seldom
    failed: Exception | None = None

    async def first() -> None:
        """Load the first model, while /health answers already."""
        nonlocal failed
        try:
            if config.models:
                async with models.use(None):
                    pass
            tell(f"serving at {_url(config, sock)}")
        except Exception as error:
            failed, server.should_exit = error, True

    beside = asyncio.gather(first(), asyncio.to_thread(shelf.all))  # files are read before somebody waits for that
    try:
        await server.serve(sockets=[sock])
    finally:
        beside.cancel()
        await asyncio.gather(beside, return_exceptions=True)
        await models.close()
    if failed is not None:
        raise failed


class Server(uvicorn.Server):
    """uvicorn's, which ends with success when it is told to end, and at once when it is told so twice."""

    def __init__(self, app: ASGIApp, config: Config) -> None:
        try:
            super().__init__(
                uvicorn.Config(
                    app, lifespan="off", log_config=None, access_log=False, server_header=False,
                    timeout_keep_alive=IDLE_CONNECTION_S, timeout_graceful_shutdown=max(1, round(config.grace)),
                    ssl_certfile=config.tls_cert, ssl_keyfile=config.tls_key,
                )
            )  # fmt: skip
            self.config.load()
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"cannot use {config.tls_cert} and {config.tls_key}: {error.strerror}") from error

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal. See uvicorn."""
        if self.should_exit:
            os._exit(128 + sig)  # the engines see that their socket is closed, and end
        LOG.info("ending, once what runs has finished; a second signal ends it at once")
        self.should_exit = True


@contextmanager
def _listening(config: Config) -> Iterator[socket.socket]:
    """A socket that listens. ConfigError."""
    where = f"{config.host}:{config.port}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ConfigError(f"{config.host} is no address to serve at ({error.strerror}): see --host") from error
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
            sock.listen(2048)
        except OSError as error:
            raise ConfigError(f"cannot serve at {where}: {error.strerror}; choose another --port") from error
        yield sock


def _url(config: Config, sock: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http{'s' if config.tls_cert else ''}://{host}:{sock.getsockname()[1]}"


def _check_model_names(config: Config, shelf: Shelf) -> None:
    known = {one.name for one in shelf.all()} if config.own else set()
    if unknown := sorted(config.own.keys() - known):
        raise ConfigError(f"there is no model {unknown[0]} that is told of: there are {', '.join(sorted(known))}")
