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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer

from tegrad import models
from tegrad.cli import options
from tegrad.errors import TegradError
from tegrad.hub.cache import located
from tegrad.llm.start import choose_device, described, say, speaker

if TYPE_CHECKING:
    from tegrad.llm.generate import Reply
    from tegrad.llm.gguf import Gguf
    from tegrad.llm.grammar import Grammar
    from tegrad.llm.sampler import Mask
    from tegrad.llm.tokenizer import Tokenizer

    Opened: TypeAlias = tuple[Gguf, int, tuple[str, bool], tuple[Tokenizer, list[int]] | None, Mask | None]

SWITCH_INTERVAL_S: Final = 2e-4
"""Seconds after which a thread that computes lets another have the interpreter: opening a device is hundreds of short
calls, each of which would wait for the thread that reads the file."""
MOST_PROMPT_BYTES: Final = 16 << 20
"""Bytes of a prompt that are read at most: four for each token of the longest contexts."""
BYTES_PER_LETTER: Final = 16
"""Of a prompt for a letter of a token: four in UTF-8, and where letters are composed up to four times that."""
SLOW_LOAD_S: Final = 1.0
"""Seconds after which a load shows its progress."""


EPILOG: Final = options.SAMPLING


class UsageError(TegradError):
    """The command line makes no sense."""

    exit_code = 2


def run(
    call: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[MODEL] [PROMPT]", hidden=True, help="The prompt may be -, for stdin."),
    ] = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="The prompt, or what follows PROMPT.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system prompt.")] = None,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", " /--no-template", help="With or without MODEL's chat template."),
    ] = None,
    schema: Annotated[
        str | None, typer.Option(metavar="FILE|JSON", help="The answer is JSON of this JSON schema.")
    ] = None,
    grammar: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The answer is of this grammar, in Lark.")
    ] = None,
    max_tokens: options.MaxTokens = 64,
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
    as_json: Annotated[bool, typer.Option("--json", help="Text and figures as one JSON object.")] = False,
) -> None:
    """Generate text, on the GPU, or where there is none on an emulated Orin.

    \b
    tegrad run "In the beginning"             the shipped model
    tegrad run model.gguf "Sum up:" --file a.txt --system "Be brief."
    tegrad run owner/repo:Q4_K_M - < prompt   a model that was pulled
    """
    path, prompt = _arguments(words or [], file)
    seed, q8 = secrets.randbits(32) if seed is None else seed, cache is options.Cache.Q8_0
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy's threads would take time to start and do nothing
    with nothing_collected(), ExitStack() as held, ThreadPoolExecutor(1, "tegrad-prompt") as beside:
        from tegrad.llm.sampler import SAMPLED, Sampler, own_options, settings_of

        drawn = {name: call.params[name] for name in SAMPLED}
        Sampler(**settings_of(drawn))  # refuses what makes no sense before anything is opened
        notes: list[str] = []
        choose_device(tell=notes.append)
        in_chat = path != models.SMALL or system is not None if chat is None else chat
        constraint = _constraint(schema, grammar)
        kept = constraint is not None
        ask = partial(_asked, prompt, system=system, chat=in_chat, insist=bool(chat), held=kept)
        opening = beside.submit(_opened_file, path, context, q8, ask, constraint)
        held.callback(_close_file, opening)  # it is read while the device opens, most of which is waiting
        try:
            with _no_template_waits(opening):
                from tegrad.llm.device import open_device  # only now: tinygrad reads what was chosen

                device = described(open_device())
        finally:
            with _no_template_waits(opening):
                # What is wrong with it is said, whatever else is wrong.
                model, positions, asked, known, mask = opening.result()
            for note in notes:
                say(note)
        reading = beside.submit(lambda: known or _tokens(model, *asked))
        begun = time.perf_counter()
        reach = _most_tokens(asked[0]) + max_tokens
        session, steps = speaker(model, positions, q8=q8, reach=reach, progress=progress(path))
        load = time.perf_counter() - begun
        tokenizer, tokens = reading.result()
        drawn |= own_options(model.metadata, options.said(call))
        sampler = Sampler(seed=seed, **settings_of(drawn))
    from tegrad.llm.engine import Engine
    from tegrad.llm.generate import Reply

    reply = Reply(session, tokenizer, tokens, sampler, max_tokens, mask=mask)
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


def _opened_file(
    path: Path, context: int | None, q8: bool, ask: Callable[[Gguf], tuple[str, bool]], constraint: Grammar | None
) -> Opened:
    """A model's file, the positions of its cache, what `ask` makes of the prompt, which fits them, its tokens where
    they had to be counted for that, and what holds the answer to a constraint."""
    from tegrad.llm.config import Config
    from tegrad.llm.footprint import positions as fitting
    from tegrad.llm.gguf import Gguf

    with ExitStack() as held:
        file = held.enter_context(Gguf.open(path))
        config, asked = Config.read(file), ask(file)
        config.check_tokens(file)
        positions = fitting(file, config, context, q8=q8)
        known = None
        if _most_tokens(asked[0]) > positions:
            _check_length(asked[0], file, positions)
            known = _tokens(file, *asked)
            fitting(file, config, context, len(known[1]), q8=q8)
        mask = None
        if constraint is not None:
            from tegrad.llm.grammar import Masks

            known = known or _tokens(file, *asked)
            mask = Masks(known[0], config.vocab).mask(constraint)
        held.pop_all()
        return file, positions, asked, known, mask


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


def _stream(reply: Reply, *, show: bool) -> str:
    """Everything that a reply says, shown as it comes."""
    text = []
    for piece in reply:
        text.append(piece)
        if show:
            typer.echo(piece, nl=False)
    return "".join(text)


def _arguments(words: list[str], file: Path | None) -> tuple[Path, str]:
    """Model and prompt."""
    if len(words) > 2:
        raise UsageError(f"{len(words)} arguments were given, a model and a prompt expected: put the prompt in quotes")
    if file is None and (not words or (len(words) == 1 and words[0].endswith(".gguf"))):
        raise UsageError(f'a prompt is missing: tegrad run {"".join(f"{word} " for word in words)}"Once upon a time"')
    model, prompt = (None, *words) if file is None and len(words) == 1 else (*words, None, None)[:2]
    path = models.SMALL if model is None else located(model)
    parts = [] if prompt is None else [from_stdin() if prompt == "-" else os.fsencode(prompt)]
    parts += [] if file is None else [_content(file)]
    return path, b"\n\n".join(parts).decode("utf-8", "replace")


def _content(path: Path) -> bytes:
    """A file's bytes. UsageError where there are none, or more than any model's context."""
    try:
        with open(path, "rb") as file:
            return _bounded(file.read(MOST_PROMPT_BYTES + 1))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}; give a file") from error


def _constraint(schema: str | None, grammar: Path | None) -> Grammar | None:
    """What the answer must keep to."""
    if schema is None and grammar is None:
        return None
    if schema is not None and grammar is not None:
        raise UsageError("an answer keeps to a schema or to a grammar: leave out one of them")
    from tegrad.llm.grammar import Grammar

    if grammar is not None:
        return Grammar("lark", _content(grammar).decode("utf-8", "replace"))
    assert schema is not None
    inline = schema.lstrip().startswith("{")
    return Grammar("schema", schema if inline else _content(Path(schema)).decode("utf-8", "replace"))


def from_stdin() -> bytes:
    """The prompt on standard input. UsageError where it is closed, no text, or longer than any model's context."""
    if sys.stdin is None:
        raise UsageError("standard input is closed, and the prompt was to come from there: tegrad run - < prompt.txt")
    try:
        data = sys.stdin.buffer.read(MOST_PROMPT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the prompt from standard input: {error.strerror}; give a file") from error
    return _bounded(data)


def _bounded(data: bytes) -> bytes:
    if len(data) > MOST_PROMPT_BYTES:
        raise UsageError(
            f"the prompt has more than {MOST_PROMPT_BYTES >> 20} MiB, which no model's context holds: give a part of it"
        )
    return data


def _asked(prompt: str, file: Gguf, *, system: str | None, chat: bool, insist: bool, held: bool) -> tuple[str, bool]:
    """The text to encode, in the model's chat template if wanted and there, and whether it lacks its first token.

    Before an answer that is `held` to a schema or grammar there is no room for a thought.
    """
    template = None
    told = [] if system is None else [{"role": "system", "content": system}]
    if chat:
        from tegrad.llm.messages import render
        from tegrad.llm.template import Template, TemplateRefusalError

        try:
            if (template := Template.of(file)) is not None:
                values: dict[str, Any] = {"enable_thinking": False} if held else {}
                text = render(template, [*told, {"role": "user", "content": prompt}], **values)
        except TemplateRefusalError as error:
            raise UsageError(f"{error}; use --raw") from error
    if template is None:
        if insist or told:
            option = "--system" if told else "--chat"
            raise UsageError(f"{file.path if chat else '--raw'} has no chat template: leave out {option}")
        return prompt, True
    if not text:
        raise UsageError("the model's chat template writes nothing: use --raw")
    return text, False


def _tokens(file: Gguf, text: str, bare: bool) -> tuple[Tokenizer, list[int]]:
    """The tokens of a `bare` text, or of what a chat template wrote: at least one."""
    from tegrad.llm.tokenizer import Tokenizer

    tokenizer = Tokenizer(file)
    tokens = tokenizer.encode(text) if bare else tokenizer.encode_chat(text)
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
