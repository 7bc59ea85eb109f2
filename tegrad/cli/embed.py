"""`tegrad embed`: vectors of texts, a JSON list a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tegrad.cli import options
from tegrad.cli.run import from_stdin, progress
from tegrad.hub.cache import located
from tegrad.llm.embeddings import Pooling
from tegrad.llm.start import choose_device, speaker


def embed(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            parser=located,
            help="A GGUF file (of one in parts, any of them), or a pulled model's name.",
        ),
    ],
    texts: Annotated[list[str], typer.Argument(metavar="TEXT", help="The texts; a single - takes each line of stdin.")],
    pooling: Annotated[
        Pooling | None,
        typer.Option(
            help="Make a vector of the last or first token's state, or of all tokens' mean; else the file decides."
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(min=1, help="The most tokens of a text; the model's own context, up to 4096, if left out."),
    ] = None,
    gpu: options.Gpu = None,
) -> None:
    """Print the vector of each text as a line of JSON, for models such as Qwen3-Embedding and EmbeddingGemma.

    A vector has length 1. Runs on the GPU, or where there is none on an emulated Orin.

    \b
    tegrad embed qwen3-embedding.gguf "a text" "another"
    tegrad embed qwen3-embedding.gguf - < lines.txt
    """
    choose_device()
    from tegrad.llm.config import Config
    from tegrad.llm.device import open_device
    from tegrad.llm.embeddings import Vectors, text_tokens
    from tegrad.llm.footprint import positions
    from tegrad.llm.gguf import Gguf
    from tegrad.llm.tokenizer import Tokenizer

    with Gguf.open(model) as file:
        config = Config.read(file)
        vectors = Vectors.of(file, config, pooling)
        config.check_tokens(file)
        tokenizer = Tokenizer(file)
        # As bytes: text has more ends of lines than a line of stdin, such as form feeds and U+2028.
        lines = texts if texts != ["-"] else [line.decode("utf-8", "replace") for line in from_stdin().splitlines()]
        tokens = [text_tokens(file, tokenizer, text) for text in lines]
        held = positions(file, config, context, max(map(len, tokens), default=0))
        open_device()
        session, _ = speaker(file, held, progress=progress(model))
    for each in tokens:
        typer.echo(json.dumps([float(f"{value:.7g}") for value in vectors.made(session, each)]))
