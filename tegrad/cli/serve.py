"""`tegrad serve`: models over HTTP, by the APIs that other programs speak, and a page to chat on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tegrad.cli import options
from tegrad.cli.run import UsageError
from tegrad.installed import pip_install

PACKAGES = ("starlette", "uvicorn", "prometheus_client")
"""What serving needs beside the rest."""


def serve(
    models: Annotated[
        list[str] | None,
        typer.Argument(hidden=True, metavar="[MODEL]...", help="Files or pulled models; the first is loaded now."),
    ] = None,
    host: Annotated[str | None, typer.Option(metavar="NAME", help="127.0.0.1; 0.0.0.0 lets other machines in.")] = None,
    port: Annotated[int | None, typer.Option(metavar="N", help="8080; 0 takes any free one.")] = None,
    context: Annotated[int | None, typer.Option(metavar="N", help="Tokens of prompt and answer; by memory.")] = None,
    slots: Annotated[int | None, typer.Option(metavar="N", help="Requests that run together: 8, up to 64.")] = None,
    cache: Annotated[options.Cache | None, typer.Option(help="Keys and values; q8_0 takes half as much.")] = None,
    memory: Annotated[float | None, typer.Option(metavar="GB", help="Limit for all models; what is free.")] = None,
    keep_alive: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Unload models idle for so long; never.")
    ] = None,
    gpu: options.Gpu = None,
    api_key_file: Annotated[str | None, typer.Option(metavar="FILE", help="One key a line; requests need one.")] = None,
    config: Annotated[Path | None, typer.Option(metavar="FILE", help="All options as TOML (docs/serve.md).")] = None,
    queue: Annotated[int | None, typer.Option(hidden=True)] = None,
    same_answer: Annotated[bool | None, typer.Option("--same-answer", hidden=True)] = None,
    cors: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    tls_cert: Annotated[str | None, typer.Option(hidden=True)] = None,
    tls_key: Annotated[str | None, typer.Option(hidden=True)] = None,
    deadline: Annotated[float | None, typer.Option(hidden=True)] = None,
    grace: Annotated[float | None, typer.Option(hidden=True)] = None,
    log: Annotated[str | None, typer.Option(hidden=True)] = None,
    replicas: Annotated[str | None, typer.Option(hidden=True)] = None,
    ray: Annotated[str | None, typer.Option(hidden=True)] = None,
) -> None:
    """Serve OpenAI's, Ollama's and Anthropic's APIs, and a page. Ctrl-C ends it.

    \b
    tegrad serve model.gguf             then open http://127.0.0.1:8080
    tegrad serve owner/repo:Q4_K_M --host 0.0.0.0 --api-key-file keys

    \b
    Also: --queue 64 --same-answer --cors ORIGIN --tls-cert FILE --tls-key FILE
      --deadline SECONDS --grace 30 --log text|json|off --replicas N --ray ADDRESS
      (docs/serve.md has all)
    """
    try:
        from tegrad.serve.config import Config
        from tegrad.serve.server import serve as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in PACKAGES:
            raise UsageError(f"serving needs {error.name}: {pip_install('serve')}") from None
        raise
    given = {
        "models": models or None, "host": host, "port": port, "context": context, "slots": slots, "queue": queue,
        "cache": cache and cache.value, "same_answer": same_answer, "memory": memory, "keep_alive": keep_alive,
        "api_key_file": api_key_file, "cors": cors or None, "tls_cert": tls_cert, "tls_key": tls_key,
        "deadline": deadline, "grace": grace, "log": log, "replicas": replicas, "ray": ray,
    }  # fmt: skip
    run(Config.of(given, config), typer.echo)
