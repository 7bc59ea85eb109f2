"""`tegrad eval`: a model's bits per byte on held-out text, and the share of known words in what it writes."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from tegrad import models
from tegrad.cli import options
from tegrad.hub.cache import located
from tegrad.llm.config import Config
from tegrad.llm.errors import ModelError
from tegrad.llm.gguf import Gguf
from tegrad.llm.quality import EngineRunner, Loss, ReferenceRunner, Runner, SessionRunner, loss, sample, words
from tegrad.llm.reference import Reference
from tegrad.llm.sampler import Sampler
from tegrad.llm.tokenizer import Tokenizer

DOCUMENT_END = "\f"
"""Documents of a text file are separated by form feeds."""


def evaluate(
    model: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL]", parser=located, help="A GGUF file or a pulled model's name."),
    ] = None,
    text: Annotated[Path | None, typer.Option(metavar="FILE", help="Held-out text; form feeds part documents.")] = None,
    vocabulary: Annotated[Path | None, typer.Option("--words", metavar="FILE", help="Known words, one a line.")] = None,
    tokens: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens to sample.")] = 1000,
    temperature: Annotated[float, typer.Option(min=0.0, metavar="T", help="Of the samples.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of the samples.")] = 0,
    documents: Annotated[int | None, typer.Option(min=1, metavar="N", help="So many documents only.")] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="numpy, or a device such as NV.")] = "numpy",
    gpu: options.Gpu = None,
    show: Annotated[bool, typer.Option("--show", help="Print the sampled texts too.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print a model's held-out bits per byte and the share of sampled words that occur in the corpus.

    \b
    tegrad eval                             the shipped model, in numpy
    tegrad eval --device NV --documents 1   on the GPU, or an emulated Orin
    tegrad eval model.gguf --text held-out.txt --words known.txt --json
    """
    path = model or models.SMALL
    held_out = _read(text or models.HELD_OUT).split(DOCUMENT_END)[:documents]
    known = frozenset(_read(vocabulary or models.WORDS).split())
    tokenizer = _tokenizer(path)
    with _opened(path, device) as (runner, where, steps):
        started = time.perf_counter()
        cost = _measure(runner, tokenizer, held_out)
        texts = list(sample(runner, tokenizer, Sampler(temperature, seed=seed), tokens))
        seconds = time.perf_counter() - started
    written = [word for written, _ in texts for word in words(written)]
    unknown = [word for word in written if word not in known]
    result = {
        "model": path.name,
        "device": where,
        "steps": steps,
        "bits_per_byte": round(cost.bits_per_byte, 4),
        "nats_per_token": round(cost.nats / cost.tokens, 4),
        "held_out_documents": len(held_out),
        "held_out_bytes": cost.text_bytes,
        "held_out_tokens": cost.tokens,
        "sampled_tokens": sum(count for _, count in texts),
        "temperature": temperature,
        "seed": seed,
        "words": len(written),
        "known_words_percent": round(100 * (1 - len(unknown) / len(written)), 2) if written else None,
        "unknown_words": sorted(set(unknown)),
        "seconds": round(seconds, 1),
    }
    if as_json:
        typer.echo(json.dumps(result))
        return
    if show:
        typer.echo("\n\n".join(written for written, _ in texts) + "\n")
    _print(result)


def _tokenizer(path: Path) -> Tokenizer:
    """A model's tokenizer, which has all of its tokens."""
    with Gguf.open(path) as file:
        Config.read(file).check_tokens(file)
        return Tokenizer(file)


@contextmanager
def _opened(path: Path, device: str) -> Iterator[tuple[Runner, str, str]]:
    """A model to measure, the device in words, and what runs its steps: as `tegrad run` says, or "numpy"."""
    if device == "numpy":
        yield ReferenceRunner(Reference(path)), device, device
        return
    from tegrad.cli.run import progress
    from tegrad.llm.start import choose_device, described, speaker

    choose_device(device)
    # Only here: tinygrad reads what was chosen when it is imported.
    from tegrad.llm.device import open_device
    from tegrad.llm.engine import Engine

    where = described(open_device(device))
    with ExitStack() as undo:
        file = undo.enter_context(Gguf.open(path))
        session, steps = speaker(file, device=device, progress=progress(path))
        if isinstance(session, Engine):
            yield EngineRunner(undo.enter_context(session)), where, steps
        else:
            yield SessionRunner(session), where, steps


def _measure(runner: Runner, tokenizer: Tokenizer, held_out: Sequence[str]) -> Loss:
    """The loss over all documents, with progress on stderr where someone looks at it."""
    cost = Loss(0.0, 0, 0)
    for done, cost in enumerate(loss(runner, tokenizer, held_out), 1):
        if sys.stderr.isatty():
            typer.echo(f"\r{done}/{len(held_out)} documents, {cost.bits_per_byte:.3f} bits a byte", nl=False, err=True)
    if sys.stderr.isatty():
        typer.echo("\r\x1b[K", nl=False, err=True)
    if not cost.text_bytes:
        raise ModelError("the held-out text is empty: give a file with text")
    return cost


def _print(result: dict[str, Any]) -> None:
    typer.echo(
        f"held-out loss   {result['bits_per_byte']:.3f} bits a byte "
        f"({result['held_out_bytes']:,} bytes in {result['held_out_documents']} documents)"
    )
    if result["words"]:
        typer.echo(
            f"known words     {result['known_words_percent']:.1f}% of {result['words']} words "
            f"in {result['sampled_tokens']} tokens sampled at temperature {result['temperature']:g}"
        )
        typer.echo(f"unknown words   {', '.join(result['unknown_words']) or 'none'}")
    where = result["device"] if result["steps"] == result["device"] else f"{result['device']} ({result['steps']})"
    typer.echo(f"{result['model']} on {where}, {result['seconds']:.1f} s")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ModelError(f"cannot read {path}: {reason}; give a text file") from error
