"""`tegrad models`: what has been pulled, what of it fits, and how to be rid of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tegrad.hub import cache


def models(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[rm NAME] | [GB] [MODEL]", help="What the examples show.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Tokens of context that fit this machine, or a module of GB.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the models in the Hugging Face hub's cache: name, size, quantization, place.

    \b
    tegrad models                         what is here
    tegrad models --fit                   with the context that fits here
    tegrad models --fit 8 model.gguf      a file, on a module of 8 GB
    tegrad models rm owner/repo:Q4_K_M    remove one
    """
    given = list(words or ())
    if given[:1] == ["rm"] and len(given) == 2 and not fit:
        return _remove(given[1], as_json)
    if given and not fit:
        raise typer.BadParameter(f"{' '.join(given)}: nothing, rm NAME, or --fit expected")
    gigabytes = given.pop(0) if given and given[0].isdecimal() else None
    rows = [_row_of(text) for text in given] if given else _rows()
    if fit and rows:
        room = _room(gigabytes)
        rows = [row | _fit(Path(row["path"]), room) for row in rows]
    if as_json:
        typer.echo(json.dumps(rows))
    elif not rows:
        named = "; tegrad models --fit model.gguf tells of a file elsewhere" if fit else ""
        typer.echo(f"no models in {cache.folder()}: tegrad pull OWNER/REPO:QUANT fetches one{named}")
    for row in () if as_json else rows:
        last = _words(row) if fit else f"{row['quantization'] or '-':8} {row['path']}"
        typer.echo(f"{row['name']:52} {row['size'] / 1e6:8,.0f} MB  {last}")
    return None


def _rows() -> list[dict[str, Any]]:
    """What is in the cache."""
    return [
        {
            "name": each.model.name,
            "size": each.model.size,
            "quantization": each.model.quantization,
            "path": str(each.path),
        }
        for each in cache.here()
    ]


def _row_of(text: str) -> dict[str, Any]:
    """A model that was named, by a path or a name."""
    path = cache.located(text)
    return next((row for row in _rows() if row["path"] == str(path)), {"name": text, "path": str(path)})


def _room(gigabytes: str | None) -> int:
    """Bytes that a model may take, on a module of so many GB or here."""
    from tegrad.cli.run import UsageError
    from tegrad.llm.footprint import gpu_has_memory, machine_room, module_room

    if gigabytes is not None:
        return module_room(int(gigabytes))
    if gpu_has_memory():
        raise UsageError("this machine's GPU has memory of its own, which is not asked: say how much, --fit GB")
    return machine_room()


def _fit(path: Path, room: int) -> dict[str, Any]:
    """The contexts of each cache that fit, 0 where none does, or why the model is refused: by `tegrad serve` alone
    ("unserved"), or by all."""
    from tegrad.llm import rows
    from tegrad.llm.errors import ModelError, UnsupportedModelError
    from tegrad.llm.footprint import Footprint
    from tegrad.llm.gguf import Gguf

    try:
        with Gguf.open(path) as file:
            fit = {kind: Footprint.of(file, q8=q8).longest(room) for kind, q8 in (("f16", False), ("q8_0", True))}
            unserved = None
            try:
                rows.check(file)
            except UnsupportedModelError as error:
                unserved = str(error)
            return {"size": file.size, "context": fit, "refused": None, "unserved": unserved}
    except ModelError as error:
        size = path.stat().st_size if path.exists() else 0
        return {"size": size, "context": None, "refused": str(error), "unserved": None}


def _words(row: dict[str, Any]) -> str:
    """A line's end about what fits."""
    if row["refused"]:
        return f"refused: {row['refused']}"
    f16, q8 = row["context"]["f16"], row["context"]["q8_0"]
    fits = f"context {f16:,}, with --cache q8_0 {q8:,}" if q8 else "does not fit"
    return f"{fits}; not served: {row['unserved']}" if row["unserved"] else fits


def _remove(name: str, as_json: bool) -> None:
    model, freed = cache.remove(name)
    if as_json:
        typer.echo(json.dumps({"name": model.name, "freed": freed}))
    else:
        typer.echo(f"removed {model.name}, {freed / 1e6:,.0f} MB")
