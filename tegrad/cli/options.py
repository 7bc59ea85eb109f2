"""Options that several commands have: how tokens are drawn, and which GPU is used."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final

import typer

from tegrad.llm.start import choose_gpu, gpus

SAMPLING: Final = """\b
Sampling: --temperature 0.7 --top-p 0.95 --top-k 0 --min-p 0 --seed N
  --repeat-penalty 1 --presence-penalty 0 --frequency-penalty 0
  --repeat-last-n 64, where MODEL's file has no own (docs/api.md, Options)"""
"""What a command's help says of these, for which there is no room."""


def _gpu(number: int | None) -> int | None:
    if number is not None and number >= (there := gpus() or 1):
        raise typer.BadParameter(f"this machine has {there} GPU{'s' * (there > 1)}, numbered from 0")
    if number is not None:
        choose_gpu(number)
    return number


def said(call: typer.Context) -> dict[str, Any]:
    """The options by which tokens are drawn that the command line has; the others may be the model's own."""
    from tegrad.llm.sampler import SAMPLED

    sources = {name: call.get_parameter_source(name) for name in SAMPLED}
    return {name: call.params[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"}


class Cache(StrEnum):
    """What keys and values are kept in."""

    F16 = "f16"
    Q8_0 = "q8_0"


Temperature = Annotated[float, typer.Option(hidden=True, help="0 takes the likeliest token each time.")]
TopP = Annotated[float, typer.Option(hidden=True)]
TopK = Annotated[int, typer.Option(hidden=True)]
MinP = Annotated[float, typer.Option(hidden=True)]
RepeatPenalty = Annotated[float, typer.Option(hidden=True)]
PresencePenalty = Annotated[float, typer.Option(hidden=True)]
FrequencyPenalty = Annotated[float, typer.Option(hidden=True)]
RepeatLastN = Annotated[int, typer.Option(hidden=True)]
Seed = Annotated[int | None, typer.Option(min=0, hidden=True)]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--max-tokens", "-n", min=1, metavar="N", show_default=False, help="Tokens of the answer at most, 64."
    ),
]
Context = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", show_default=False, help="Tokens in all; MODEL's, up to 4096."),
]
Kept = Annotated[Cache, typer.Option(show_default=False, help="Keys and values; q8_0 takes half as much.")]
Gpu = Annotated[int | None, typer.Option("--gpu", min=0, metavar="N", callback=_gpu, help="The GPU's number, from 0.")]
"""Settled as it is parsed, before tinygrad is imported; for this process and those that it starts."""
