"""`tegrad pull`: a model from the Hugging Face hub."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def pull(
    name: Annotated[
        str,
        typer.Argument(metavar="REPO[:QUANT]", help="Without QUANT it is Q4_K_M."),
    ],
    revision: Annotated[str | None, typer.Option(help="A branch, tag or commit of the repository.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Fetch a model from the Hugging Face hub, into the cache that its other programs use.

    Pull again what was interrupted: it goes on. HF_TOKEN is for private models.

    \b
    tegrad pull bartowski/SmolLM2-135M-Instruct-GGUF:Q8_0
    tegrad run SmolLM2-135M-Instruct:Q8_0 "Why is the sky blue?"
    """
    from tegrad.hub.download import pull as fetch

    got = fetch(name, revision)
    if as_json:
        typer.echo(json.dumps({"name": got.model.name, "size": got.model.size, "path": str(got.path)}))
    else:
        typer.echo(f'{got.path}\ntegrad run {got.model.name} "Once upon a time"')
