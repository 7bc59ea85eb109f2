"""`tegrad chat`: a conversation with a model in a terminal."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any, Final

import typer

from tegrad import models
from tegrad.cli import options
from tegrad.cli.run import UsageError, progress
from tegrad.hub.cache import located
from tegrad.installed import pip_install

EPILOG: Final = options.SAMPLING


def chat(
    call: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="[MODEL]", hidden=True)] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system prompt.")] = "",
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", "-n", min=1, metavar="N", help="Tokens of an answer at most.")
    ] = None,
    temperature: options.Temperature = 0.7,
    top_k: options.TopK = 0,
    top_p: options.TopP = 0.95,
    min_p: options.MinP = 0.0,
    repeat_penalty: options.RepeatPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    repeat_last_n: options.RepeatLastN = 64,
    seed: options.Seed = None,
    context: options.Context = None,
    cache: options.Kept = options.Cache.F16,
    gpu: options.Gpu = None,
) -> None:
    """Talk with MODEL, a GGUF file or a pulled one's name; /help there lists commands.

    \b
    tegrad chat                                 with the shipped model
    tegrad chat owner/repo:Q4_K_M --system "Be brief." --cache q8_0
    tegrad chat model.gguf < questions.txt      a line is a question
    """
    try:
        import prompt_toolkit  # noqa: F401
        import rich  # noqa: F401
    except ModuleNotFoundError as error:
        raise UsageError(f"chat needs the package {error.name}: {pip_install('chat')}") from None
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from tegrad import LLM
    from tegrad.chat import commands
    from tegrad.chat.reading import Lines, Prompted
    from tegrad.chat.screen import Plain, Terminal
    from tegrad.chat.session import Session
    from tegrad.chat.talk import Talk
    from tegrad.llm.gguf import Gguf
    from tegrad.llm.template import KEY

    settings: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, **options.said(call)}

    def opened(name: str) -> LLM:
        path = located(name)
        with Gguf.open(path) as file:
            if KEY not in file.metadata:
                raise UsageError(f'{path} has no chat template: tegrad run {name} "..." goes on with a text')
        return LLM(path, context, cache=cache.value, progress=progress(path))

    talk = Talk(opened, model or str(models.SMALL), system, settings)
    in_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    if in_terminal and os.environ.get("TERM") != "dumb":
        Session(talk, Terminal(), Prompted(list(commands.COMMANDS), commands.values)).run()
        return
    session = Session(talk, Plain(), Lines())
    session.run()
    raise typer.Exit(int(session.failed))
