"""`tegrad models`: what has been pulled, what of it fits, and how to be rid of it."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer


def models(
    words: Annotated[list[str] | None, typer.Argument(metavar="[rm NAME]", help="rm removes a model.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models in the Hugging Face hub's cache: name, size, quantization and where each lies.

    \b
    tegrad models
    tegrad models rm owner/repo:Q4_K_M
    """
    match words or []:
        case []:
            _list(as_json)
        case ["rm", name]:
            _remove(name, as_json)
        case others:
            raise typer.BadParameter(f"{' '.join(others)}: nothing, or rm and a name, expected")


def _list(as_json: bool) -> None:
    from tegrad.hub.cache import folder, here

    rows: list[dict[str, Any]] = [
        {
            "name": each.model.name,
            "size": each.model.size,
            "quantization": each.model.quantization,
            "path": str(each.path),
        }
        for each in here()
    ]
    if as_json:
        typer.echo(json.dumps(rows))
    elif not rows:
        typer.echo(f"no models in {folder()}: tegrad pull OWNER/REPO:QUANT fetches one")
    for row in () if as_json else rows:
        typer.echo(f"{row['name']:60} {row['size'] / 1e9:7.2f} GB  {row['quantization'] or '-':8} {row['path']}")


def _remove(name: str, as_json: bool) -> None:
    from tegrad.hub.cache import remove

    model, freed = remove(name)
    if as_json:
        typer.echo(json.dumps({"name": model.name, "freed": freed}))
    else:
        typer.echo(f"removed {model.name}, {freed / 1e9:.2f} GB")
