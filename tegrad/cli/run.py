"""`tegrad run`: text from a GGUF model, streamed as it comes, and one line of figures."""

from __future__ import annotations

import gc
import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from tegrad import models
from tegrad.errors import TegradError
from tegrad.hub.cache import located
from tegrad.llm.start import choose_device, described, say, speaker

if TYPE_CHECKING:
    from tegrad.llm.generate import Reply
    from tegrad.llm.gguf import Gguf
    from tegrad.llm.tokenizer import Tokenizer

    Opened: TypeAlias = tuple[Gguf, int, tuple[str, bool], tuple[Tokenizer, list[int]] | None]

SWITCH_INTERVAL_S: Final = 2e-4
"""Seconds after which a thread that computes lets another have the interpreter: opening a device is hundreds of short
calls, each of which would wait for the thread that reads the file."""
MOST_PROMPT_BYTES: Final = 16 << 20
"""Bytes of a prompt that are read at most: four for each token of the longest contexts."""
BYTES_PER_LETTER: Final = 16
"""Of a prompt for a letter of a token: four in UTF-8, and where letters are composed up to four times that."""
SLOW_LOAD_S: Final = 1.0
"""Seconds after which a load shows its progress."""


class UsageError(TegradError):
    """The command line makes no sense."""

    exit_code = 2


class Cache(StrEnum):
    """What keys and values are kept in."""

    F16 = "f16"
    Q8_0 = "q8_0"


def run(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[MODEL] PROMPT",
            help="A GGUF file (of one in parts, any of them) or a pulled model's name, the shipped model if left out; "
            "and the prompt, - for stdin (at most 16 MiB).",
        ),
    ],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", min=1, help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token each time.")] = 0.7,
    top_k: Annotated[int, typer.Option(help="Choose among this many of the likeliest tokens; 0 is all.")] = 0,
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest tokens that together have this probability.")
    ] = 0.95,
    min_p: Annotated[
        float, typer.Option(help="Drop tokens less likely than this share of the likeliest token's probability.")
    ] = 0.0,
    repeat_penalty: Annotated[
        float, typer.Option(help="Make tokens that occurred lately less likely; 1 is off.")
    ] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="Lower the logits of tokens that occurred by this.")] = 0.0,
    frequency_penalty: Annotated[
        float, typer.Option(help="Lower logits by this for each time that the token occurred.")
    ] = 0.0,
    repeat_last_n: Annotated[
        int, typer.Option(help="How many of the last tokens the penalties look at, up to 1024.")
    ] = 64,
    seed: Annotated[int | None, typer.Option(min=0, help="Equal seeds give equal text; random if left out.")] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens of prompt and answer together; the model's own context, up to 4096, if left out."
        ),
    ] = None,
    cache: Annotated[
        Cache, typer.Option(help="Keys and values: q8_0 takes about half of f16's memory, and a little accuracy.")
    ] = Cache.F16,
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw", help="Put the prompt into the model's chat template, the default for a MODEL that has one."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print text and figures as one JSON object.")] = False,
) -> None:
    """Generate text from a GGUF model, on the GPU, or where there is none on an emulated Orin.

    \b
    tegrad run "In the beginning"              the shipped model
    tegrad run model.gguf "Once upon a time"   a model of yours
    tegrad run owner/repo:Q4_K_M "Why?"        one that tegrad pull has fetched
    tegrad run model.gguf - < prompt.txt       a prompt from a file
    tegrad run "And he said" --json            text and figures for a program
    """
    path, prompt = _arguments(words)
    seed = secrets.randbits(32) if seed is None else seed
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would take time to start and do nothing
    with nothing_collected(), ExitStack() as held, ThreadPoolExecutor(1, "tegrad-prompt") as beside:
        from tegrad.llm.sampler import Sampler

        sampler = Sampler(
            temperature, top_k=top_k, top_p=top_p, min_p=min_p, repeat=repeat_penalty, presence=presence_penalty,
            frequency=frequency_penalty, last_n=repeat_last_n, seed=seed,
        )  # fmt: skip
        notes: list[str] = []
        choose_device(tell=notes.append)
        in_chat = path != models.SMALL if chat is None else chat
        opening = beside.submit(_opened_file, path, context, partial(_asked, prompt, chat=in_chat, insist=bool(chat)))
        held.callback(_close_file, opening)  # it is read while the device opens, most of which is waiting
        try:
            with _no_template_waits(opening):
                device = _opened()
        finally:
            with _no_template_waits(opening):
                # What is wrong with it is said, whatever else is wrong.
                file, positions, asked, known = opening.result()
            for note in notes:
                say(note)
        reading = beside.submit(lambda: known or _tokens(file, *asked))
        begun = time.perf_counter()
        reach = _most_tokens(asked[0]) + max_tokens
        q8, shown = cache is Cache.Q8_0, progress(path)
        session, steps = speaker(file, positions, q8=q8, reach=reach, progress=shown)
        load = time.perf_counter() - begun
        tokenizer, tokens = reading.result()
    from tegrad.llm.engine import Engine
    from tegrad.llm.generate import Reply

    reply = Reply(session, tokenizer, tokens, sampler, max_tokens)
    text = _stream(reply, show=not as_json)
    figures: dict[str, Any] = {
        "device": device,
        "steps": steps,
        "plan": session.plan_name if isinstance(session, Engine) else None,
        "model": path.name,
        "prompt_tokens": len(tokens),
        "tokens": len(reply.tokens),
        "load_s": round(load, 3),
        "first_token_s": round(reply.first_token or 0.0, 4),
        "tok_s": reply.tokens_per_second and round(reply.tokens_per_second, 2),
        "seed": seed,
        "ended": reply.ended,
    }
    typer.echo(json.dumps({"text": text, **figures}) if as_json else f"\n\n{_line(figures)}")


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Until the first token hardly anything becomes garbage, and what does is not much: searching for it over and over
    takes a third of the imports' time (docs/notebook.md). What is there at the end is never searched again."""
    gc.disable()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.freeze()
        gc.enable()


def _opened_file(path: Path, context: int | None, ask: Callable[[Gguf], tuple[str, bool]]) -> Opened:
    """A model's file, the positions of its cache, what `ask` makes of the prompt, which fits them, and its tokens where
    they had to be counted for that."""
    from tegrad.llm.arch import Config
    from tegrad.llm.gguf import Gguf

    with ExitStack() as held:
        file = held.enter_context(Gguf.open(path))
        config, asked = Config.read(file), ask(file)
        config.check_tokens(file)
        positions = config.positions(context)
        known = None
        if _most_tokens(asked[0]) > positions:
            _check_length(asked[0], file, positions)
            known = _tokens(file, *asked)
            config.positions(context, len(known[1]))
        held.pop_all()
        return file, positions, asked, known


def _most_tokens(text: str) -> int:
    """What a text takes at most: a token for each byte, for a beginning and for a space in front."""
    return len(text.encode()) + 2


def _check_length(text: str, file: Gguf, positions: int) -> None:
    """UsageError for a text that cannot fit, however its tokens turn out: to encode megabytes takes long."""
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    longest = max((len(str(token)) for token in tokens), default=0) if isinstance(tokens, list) else 0
    size = len(text.encode())
    if size > BYTES_PER_LETTER * max(longest, 1) * positions:
        raise UsageError(f"a prompt of {size} bytes is more than the context of {positions} tokens holds: shorten it")


def _close_file(opening: Future[Opened]) -> None:
    if opening.exception() is None:
        opening.result()[0].close()


@contextmanager
def _no_template_waits(opening: Future[Any]) -> Iterator[None]:
    """Ctrl-C is passed on to a chat template that the other thread runs, or is about to."""
    try:
        yield
    except KeyboardInterrupt:
        from tegrad.llm import template

        while not opening.done():
            template.interrupt()
            wait([opening], 0.05)
        raise


def _opened() -> str:
    """Open the chosen device; what it is, in words."""
    from tegrad.llm.device import open_device

    return described(open_device())


def _stream(reply: Reply, *, show: bool) -> str:
    """Everything that a reply says, shown as it comes."""
    text = []
    for piece in reply:
        text.append(piece)
        if show:
            typer.echo(piece, nl=False)
    return "".join(text)


def _arguments(words: list[str]) -> tuple[Path, str]:
    """Model and prompt."""
    if len(words) > 2:
        raise UsageError(f"{len(words)} arguments were given, a model and a prompt expected: put the prompt in quotes")
    if len(words) == 1 and words[0].endswith(".gguf"):
        raise UsageError(f'a prompt is missing: tegrad run {words[0]} "Once upon a time"')
    path = located(words[0]) if len(words) == 2 else models.SMALL
    data = from_stdin() if words[-1] == "-" else os.fsencode(words[-1])
    return path, data.decode("utf-8", "replace")


def from_stdin() -> bytes:
    """The prompt on standard input. UsageError where it is closed, no text, or longer than any model's context."""
    if sys.stdin is None:
        raise UsageError("standard input is closed, and the prompt was to come from there: tegrad run - < prompt.txt")
    try:
        data = sys.stdin.buffer.read(MOST_PROMPT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the prompt from standard input: {error.strerror}; give a file") from error
    if len(data) > MOST_PROMPT_BYTES:
        raise UsageError(
            f"the prompt has more than {MOST_PROMPT_BYTES >> 20} MiB, which no model's context holds: give a part of it"
        )
    return data


def _asked(prompt: str, file: Gguf, *, chat: bool, insist: bool) -> tuple[str, bool]:
    """The text to encode, in the model's chat template if wanted and there, and whether it lacks its first token."""
    template = None
    if chat:
        from tegrad.llm.template import Template, TemplateRefusalError

        try:
            if (template := Template.of(file)) is not None:
                text = template.render([{"role": "user", "content": prompt}])
        except TemplateRefusalError as error:
            raise UsageError(f"{error}; use --raw") from error
    if template is None:
        if insist:
            raise UsageError(f"{file.path} has no chat template: leave out --chat")
        return prompt, True
    if not text:
        raise UsageError("the model's chat template writes nothing; use --raw")
    return text, False


def _tokens(file: Gguf, text: str, bare: bool) -> tuple[Tokenizer, list[int]]:
    """A text's tokens, at least one; a `bare` one begins as the model wants."""
    from tegrad.llm.tokenizer import Tokenizer

    tokenizer = Tokenizer(file)
    tokens = tokenizer.encode(text, bos=None if bare else False)
    if not tokens:
        raise UsageError("the prompt is empty, and the model has no token to begin with: give some text")
    return tokenizer, tokens


def progress(path: Path) -> Callable[[int, int], None] | None:
    """A line on a terminal's stderr for a load that takes long, else nothing."""
    if not sys.stderr.isatty():
        return None
    begun = time.perf_counter()
    shown = -1

    def show(done: int, total: int) -> None:
        nonlocal shown
        percent = 100 * done // max(total, 1)
        if percent == shown or (shown < 0 and time.perf_counter() - begun < SLOW_LOAD_S):
            return
        shown = percent
        end = "\r\x1b[K" if done >= total else ""
        sys.stderr.write(f"\rloading {path.name}: {percent}%{end}")
        sys.stderr.flush()

    return show


def _line(figures: dict[str, Any]) -> str:
    speed = f", {figures['tok_s']:.1f} tok/s" if figures["tok_s"] else ""
    return f"[{figures['device']}: {figures['tokens']} tokens, first after {figures['first_token_s']:.2f} s{speed}]"
