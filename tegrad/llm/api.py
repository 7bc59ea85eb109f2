"""`tegrad.LLM`: a model in a Python program, behind a few methods. docs/api.md has examples of each."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, Self, TypeAlias, TypedDict, Unpack, cast, get_args

import numpy as np

from tegrad.llm import embeddings, generate
from tegrad.llm.closing import Closing
from tegrad.llm.config import Config
from tegrad.llm.errors import ContextError, ModelError, UnsupportedModelError
from tegrad.llm.gguf import Gguf, Progress
from tegrad.llm.grammar import Grammar, Masks
from tegrad.llm.messages import render
from tegrad.llm.sampler import SAMPLED, Logprobs, Mask, Sampler, own_options, settings_of
from tegrad.llm.serial import Serial, User
from tegrad.llm.start import choose_device, speaker
from tegrad.llm.template import Template, source_of
from tegrad.llm.tokenizer import Tokenizer
from tegrad.llm.tools import Event, Format, Reader, Said, Text, Tool, ToolCall

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tegrad.llm.engine import Engine
    from tegrad.llm.session import Session
    from tegrad.llm.together import Part

Cache: TypeAlias = Literal["f16", "q8_0"]
located: Callable[[str], Path] = Path
"""The file that a model's name or path means: `tegrad.LLM` knows the names of the hub's cache, too."""
Messages: TypeAlias = Sequence[Mapping[str, Any]]
"""A conversation, such as [{"role": "user", "content": "Hello"}]."""

Tools: TypeAlias = Sequence[Tool]
"""Functions that a model may call."""


class Options(TypedDict, total=False):
    """How an answer is made; docs/api.md tells what each does, `LLM.options` what it is where it is left out."""

    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    repeat_last_n: int
    seed: int | None
    stop: str | Sequence[str]
    logit_bias: Mapping[int, float] | None
    logprobs: int | None
    schema: Mapping[str, Any] | None
    grammar: str | None
    thinking: bool | None


DEFAULTS: Final[Options] = {
    "max_tokens": 256,
    "temperature": 0.7,
    "top_p": 0.95,
    "top_k": 0,
    "min_p": 0.0,
    "repeat_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repeat_last_n": 64,
    "seed": None,
    "stop": (),
    "logit_bias": None,
    "logprobs": None,
    "schema": None,
    "grammar": None,
    "thinking": None,
}
"""Where the model's file says nothing either; those of `tegrad run` where it has them."""
WHOLE: Final[Mapping[str, Any]] = {
    "max_tokens": NoneType, "seed": NoneType, "top_k": int, "repeat_last_n": int, "logprobs": NoneType
}  # fmt: skip
"""Options that are whole numbers, and what else they may be."""


class ArgumentError(ModelError, TypeError):
    """An argument that no model could take: its name, its type, or a count below 1."""


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer and what it took."""

    text: str
    """What the model said; of a chat without what it thought, and without its calls."""
    tokens: tuple[int, ...]
    """All of that, with what ended it: the token that ends texts, or those of a string of `stop`."""
    finish_reason: Literal["stop", "length"] | None
    """"length": `max_tokens`, or the context's end. None of a stream that was not read to its end."""
    prompt_tokens: int
    cached_tokens: int
    """Of those, how many a chat's conversation before had left in the cache."""
    tokens_per_second: float | None
    """Of the tokens after the first; None where there is only one."""
    seed: int
    """What repeats the answer."""
    logprobs: tuple[Logprobs, ...] = ()
    """Of each token, where the options ask for them."""
    thinking: str = ""
    """What the model thought first, in a chat."""
    calls: tuple[ToolCall, ...] = ()
    """The tools that it calls, in a chat with tools."""

    @property
    def message(self) -> dict[str, Any]:
        """What goes on with a conversation, in front of {"role": "tool", "content": ...} for each call."""
        functions = [{"name": call.name, "arguments": call.json} for call in self.calls]
        calls = [{"type": "function", "id": f"call_{at}", "function": one} for at, one in enumerate(functions)]
        thought = {"reasoning_content": self.thinking} if self.thinking else {}
        return {"role": "assistant", "content": self.text, **thought} | ({"tool_calls": calls} if calls else {})


@dataclass(frozen=True, slots=True)
class _Request:
    """A prompt's tokens and how to answer; `keep` takes over what they have in common with the cache.

    `read` makes a chat's reader, `mask` one of what may be said.
    """

    tokens: list[int]
    keep: bool
    sampler: Sampler
    seed: int
    limit: int | None
    stops: Sequence[str]
    read: Callable[[], Reader] | None = None
    mask: Mask | None = None

    @classmethod
    def of(cls, tokens: list[int], keep: bool, options: Mapping[str, Any]) -> Self:
        """ArgumentError, ModelError for settings without meaning."""
        if unknown := sorted(options.keys() - DEFAULTS.keys()):
            raise ArgumentError(f"there is no option {unknown[0]}: choose among {', '.join(DEFAULTS)}")
        given: dict[str, Any] = {**DEFAULTS, **options}
        for name in sorted({*WHOLE, *SAMPLED}):
            kinds = int | WHOLE[name] if name in WHOLE else int | float
            if not isinstance(given[name], kinds):
                raise ArgumentError(f"{name}={given[name]!r} is no {'whole ' if name in WHOLE else ''}number")
        if not isinstance(given["thinking"], bool | None):
            raise ArgumentError(f"thinking={given['thinking']!r} is neither True nor False nor None")
        limit, seed = given["max_tokens"], given["seed"]
        if limit is not None and limit < 1:
            raise ArgumentError(f"max_tokens={limit}: ask for at least 1")
        if seed is not None and seed < 0:
            raise ArgumentError(f"seed={seed}: give one that is not negative")
        stops = _texts("stop", given["stop"])
        seed = secrets.randbits(32) if seed is None else seed
        biases = given["logit_bias"] or {}
        if not isinstance(biases, Mapping) or not all(
            isinstance(token, int) and isinstance(value, int | float) for token, value in biases.items()
        ):
            raise ArgumentError(f"logit_bias={biases!r} does not say numbers of tokens: give such as {{13: -2.5}}")
        biased = tuple(biases.items())
        sampler = Sampler(seed=seed, biases=biased, logprobs=given["logprobs"], **settings_of(given))
        return cls(tokens, keep, sampler, seed, limit, stops)


def check(options: Mapping[str, Any]) -> None:
    """ArgumentError, ModelError for options that no answer could be made with."""
    _Request.of([], False, options)


class _Turn(User):
    """A request's turn at a conversation, which it may lose between two tokens. A `generate.Speaker`."""

    def __init__(self, session: Engine | Session | Part, keep: bool) -> None:
        super().__init__()
        self._session, self._keep = session, keep
        self.kept = 0
        self.logprobs: list[Logprobs] = []

    def warm(self) -> None:
        """See `generate.Speaker`."""
        self._session.warm()

    def generate(
        self, prompt: Sequence[int], sampler: Sampler, limit: int | None = None, stops: frozenset[int] = frozenset(),
        *, mask: Mask | None = None,
    ) -> Iterator[int]:  # fmt: skip
        """Tokens after a prompt, of which the conversation keeps what it has."""
        if self._keep:
            same = (one == other for one, other in zip(self._session.tokens, prompt[:-1], strict=False))
            self.kept = sum(takewhile(bool, same))
        self._session.reset(self.kept)
        for token in self._session.generate(prompt[self.kept :], sampler, limit, stops, mask=mask):
            self.logprobs = self._session.logprobs
            yield token
            if self.ended is not None:
                raise self.ended


class Stream(Closing):
    """An answer as it comes: iterate over it once for pieces of text. `reply` is what has come so far.

    A stream that is begun has the model to itself until it is read to its end, closed or dropped; requests of other
    threads wait for that, one of the same thread ends it.
    """

    def __init__(
        self, turns: Serial, session: Engine | Session | Part, tokenizer: Tokenizer, request: _Request
    ) -> None:
        self._closed = False
        self._turns, self._request, self._turn = turns, request, _Turn(session, request.keep)
        one = request
        self._answer = generate.Reply(self._turn, tokenizer, one.tokens, one.sampler, one.limit, one.stops, one.mask)
        self._pieces, self._text = iter(self._answer), ""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        """ClosedError where the model was closed, Cancelled where a request of this thread came between."""
        try:
            if not self._closed:
                with self._turns.work(self._turn):
                    piece = next(self._pieces, None)
                if piece is not None and not self._closed:
                    self._text += piece
                    return piece
        except BaseException:
            if not self._closed:
                self.close()
                raise
        self.close()
        raise StopIteration

    @property
    def reply(self) -> Reply:
        """The answer, as far as it has come."""
        ended, said = self._answer.ended, Said(self._text, "", ())
        if self._request.read is not None:
            reader = self._request.read()
            said = Said.of(reader.push(self._text) + ([] if ended == "open" else reader.finish()))
        return Reply(
            said.text, tuple(self._answer.tokens),
            None if ended == "open" else "stop" if ended == "stop" else "length",
            len(self._request.tokens), self._turn.kept, self._answer.tokens_per_second, self._request.seed,
            tuple(self._turn.logprobs), said.thinking, said.calls,
        )  # fmt: skip

    def events(self) -> Iterator[Event]:
        """What is yet to come, of a chat as `tools.Text`, `Thinking`, `Call` and `Arguments`, else as `Text`."""
        reader = self._request.read() if self._request.read is not None else None
        if reader is not None:
            yield from reader.push(self._text)
        for piece in self:
            yield from [Text(piece)] if reader is None else reader.push(piece)
        yield from [] if reader is None else reader.finish()

    def close(self) -> None:
        """Say no more; from any thread, without waiting for a token that is on its way."""
        self._closed = True
        self._turns.leave(self._turn, "this stream was closed")

    def __del__(self) -> None:
        if hasattr(self, "_answer"):
            self.close()


class AsyncStream:
    """A `Stream` for `async for`, read by a thread. It is closed when the task that waits for it is cancelled."""

    def __init__(self, begin: Callable[[], Stream]) -> None:
        self._begin, self._closed = begin, False
        self._stream: Stream | None = None
        self._come: asyncio.Queue[str | BaseException | None] = asyncio.Queue()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        """As `Stream.__next__`, and what may be wrong with the request."""
        if self._closed:
            raise StopAsyncIteration
        try:
            if self._stream is None:
                stream = await asyncio.to_thread(self._begin)
                if self._closed:  # by another task, meanwhile
                    stream.close()
                    raise StopAsyncIteration
                self._stream = stream
                reading = (self._stream, asyncio.get_running_loop(), self._come)
                threading.Thread(target=_read, args=reading, name="tegrad-stream").start()
            piece = await self._come.get()
            if isinstance(piece, BaseException):
                raise piece
        except BaseException:
            await self.aclose()
            raise
        if piece is None:
            self._closed = True
            raise StopAsyncIteration
        return piece

    @property
    def reply(self) -> Reply | None:
        """The answer, as far as it has come; None before its first piece was asked for."""
        return None if self._stream is None else self._stream.reply

    async def aclose(self) -> None:
        """Say no more."""
        self._closed = True
        if self._stream is not None:
            self._stream.close()

    def __del__(self) -> None:
        if (stream := getattr(self, "_stream", None)) is not None:
            stream.close()


def _read(stream: Stream, loop: asyncio.AbstractEventLoop, come: asyncio.Queue[str | BaseException | None]) -> None:
    """Hand a stream's pieces over to a loop, its end as None, or what ended it."""

    def put(item: str | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(come.put_nowait, item)
        except RuntimeError:  # the loop was closed: nobody listens
            stream.close()

    try:
        for piece in stream:
            put(piece)
        put(None)
    except BaseException as error:
        put(error)


class LLM(Closing):
    """A model on a GPU, or where there is none on an emulated Orin. Close it, or use it in a `with`.

    Any thread may ask; one request at a time is answered. Every error is a `tegrad.TegradError`.
    """

    def __init__(
        self, model: str | os.PathLike[str], context: int | None = None, *, cache: Cache = "f16",
        gpu: int | str | None = None, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        """`model` is a GGUF file, of one in parts any of them, or a pulled model's name. `context` are tokens of prompt
        and answer together: the model's own up to 4096 if left out, fewer where the GPU shares a memory that is short.
        `cache` is what keys and values are kept in; `gpu` is the GPU's number, or a device of tinygrad's such as
        "NV:1". `progress` is told bytes loaded, and of how many.

        GgufError, ModelNameError, UnsupportedModelError, ContextError, OutOfMemory, DeviceError, ArgumentError.
        """
        if cache not in get_args(Cache):
            raise ArgumentError(f"cache={cache!r}: choose among {', '.join(get_args(Cache))}")
        self._q8 = cache == "q8_0"
        self._gpu = gpu = f"NV:{gpu}" if isinstance(gpu, int) else gpu
        with Gguf.open(located(model) if isinstance(model, str) else Path(model)) as self._file:
            self._config = Config.read(self._file)
            self._config.check_tokens(self._file)
            self._config.positions(context)  # before a device is opened
            self._tokenizer = Tokenizer(self._file)
            choose_device(gpu, tell=_warn)
            # Only now: tinygrad reads what was chosen when it is imported.
            from tegrad.llm.device import open_device
            from tegrad.llm.footprint import positions

            self.context = positions(self._file, self._config, context, q8=self._q8)
            open_device(gpu)
            self._session, self.steps = speaker(
                self._file, self.context, gpu, q8=self._q8, progress=progress, tell=_warn
            )
        self._template: Template | None = None
        self._formats: dict[bool, Format] = {}
        self._making = threading.Lock()
        self._undo = ExitStack()
        if hasattr(self._session, "close"):
            self._undo.callback(self._session.close)
        self._turns = Serial(self._undo.close)

    def options(self, **given: Unpack[Options]) -> Options:
        """All options of a request that gives these: the others are what the model's file says, or the default."""
        return {**DEFAULTS, **cast("Options", own_options(self._file.metadata, given)), **given}

    def generate(self, prompt: str, **options: Unpack[Options]) -> Reply:
        """The text that follows a prompt. ContextError, ArgumentError, ModelError for settings without meaning."""
        return _whole(self.stream(prompt, **options))

    def chat(
        self, messages: Messages, *, tools: Tools | None = None, tool_choice: str = "auto", **options: Unpack[Options]
    ) -> Reply:
        """The answer to a conversation, put into the model's own template; `tools` as OpenAI describes functions.

        `tool_choice`: "auto" leaves calls to the model, "required" or a function's name makes it call. What the
        conversation has in common with the one before is not computed again. As `generate`, and UnsupportedModelError
        for a model without a template, TemplateRefusalError, GrammarError.
        """
        return _whole(self.stream(messages, tools=tools, tool_choice=tool_choice, **options))

    def stream(
        self, prompt: str | Messages, *, tools: Tools | None = None, tool_choice: str = "auto",
        **options: Unpack[Options],
    ) -> Stream:  # fmt: skip
        """`generate`'s or, of messages, `chat`'s answer in pieces, as they come. What is wrong is told at once."""
        request = self._asked(prompt, tools, tool_choice, options)
        return Stream(self._turns, self._session, self._tokenizer, request)

    def batch(self, prompts: Sequence[str | Messages], **options: Unpack[Options]) -> list[Reply]:
        """Answers to many prompts, in their order: as many as there is memory for are made together, up to 32.

        They take memory beside the model's own cache. Their `tokens_per_second` is None. As `generate` and `chat`, and
        OutOfMemory.
        """
        return self._together(prompts, options, User(), threading.Event())

    async def abatch(self, prompts: Sequence[str | Messages], **options: Unpack[Options]) -> list[Reply]:
        """`batch` for asyncio, in a thread; cancelling the task ends the answers."""
        user, over = User(), threading.Event()
        try:
            return await asyncio.to_thread(self._together, prompts, options, user, over)
        finally:
            over.set()
            self._turns.leave(user, "this batch was cancelled")

    def _together(
        self, prompts: Sequence[str | Messages], options: Mapping[str, Any], user: User, over: threading.Event
    ) -> list[Reply]:
        """`batch`; `over` is set, and the user's turn ended, where nobody wants it any more."""
        from tegrad.llm.engine import Engine
        from tegrad.llm.together import Part, together

        requests = [self._asked(prompt, None, "auto", options) for prompt in prompts]
        if not isinstance(self._session, Engine):
            return self._in_turn(requests, over)
        parts = [Part(one.tokens, one.sampler, one.seed, one.limit, one.mask) for one in requests]
        ends = sorted(self._tokenizer.stops)

        def check() -> None:
            if user.ended is not None:
                raise user.ended

        pairs = zip(parts, requests, strict=True)
        streams = [Stream(Serial(lambda: None), part, self._tokenizer, one) for part, one in pairs]
        try:
            with (
                self._turns.work(user),
                together(self._session.model, parts, self.context, q8=self._q8, ends=ends, check=check),
            ):
                unread = list(streams)
                while unread:
                    unread = [stream for stream in unread if next(stream, None) is not None]
        except UnsupportedModelError:  # steps run this model, a batch does not
            self._turns.leave(user, "it is done")
            return self._in_turn(requests, over)
        finally:
            for stream in streams:
                stream.close()
            self._turns.leave(user, "it is done")
        return [replace(stream.reply, tokens_per_second=None) for stream in streams]

    def _in_turn(self, requests: Iterable[_Request], over: threading.Event) -> list[Reply]:
        """One answer after the other, until it is over."""
        wanted = takewhile(lambda _: not over.is_set(), requests)
        return [_whole(Stream(self._turns, self._session, self._tokenizer, one)) for one in wanted]

    def _asked(
        self, prompt: str | Messages, tools: Tools | None, tool_choice: str, options: Mapping[str, Any]
    ) -> _Request:
        """A request; what is wrong with it is told."""
        self._turns.check()
        read: Callable[[], Reader] | None = None
        if isinstance(prompt, str):
            for name, given in (("tools", tools), ("thinking", options.get("thinking"))):
                if given is not None:
                    raise ArgumentError(f"{name}={given!r} is for a chat's template: give messages")
            tokens = self._tokenizer.encode(prompt)
            wanted = _constraint(options)
        else:
            free = tool_choice == "auto" and options.get("schema") is None and options.get("grammar") is None
            think = options.get("thinking") if free or options.get("thinking") else False
            text = self._rendered(prompt, tools, **({} if think is None else {"enable_thinking": think}))
            tokens = self._tokenizer.encode_chat(text)
            form = self._format(tools)
            thinking = form.thinks(text)
            read = partial(form.reader, tools, thinking=thinking)
            wanted = _constraint(
                options, form.grammar(tools or (), tool_choice, thinking=thinking), thinking, form
            )  # fmt: skip
        self._config.check_prompt(tokens)
        self._check_length(len(tokens))
        request = _Request.of(tokens, not isinstance(prompt, str), self.options(**options))
        mask = self._masks.mask(wanted) if wanted is not None else None
        return replace(request, read=read, mask=mask)

    def astream(
        self, prompt: str | Messages, *, tools: Tools | None = None, tool_choice: str = "auto",
        **options: Unpack[Options],
    ) -> AsyncStream:  # fmt: skip
        """`stream` for `async for`."""
        return AsyncStream(lambda: self.stream(prompt, tools=tools, tool_choice=tool_choice, **options))

    def count(self, prompt: str | Messages, *, tools: Tools | None = None) -> int:
        """How many tokens a text takes, or a conversation in the model's template. As `stream`, of any length."""
        self._turns.check()
        if isinstance(prompt, str):
            return len(self._tokenizer.encode(prompt))
        return len(self._tokenizer.encode_chat(self._rendered(prompt, tools)))

    def embed(self, texts: str | Sequence[str]) -> NDArray[np.float32]:
        """Vectors (n, dim) of n texts, each of length 1. UnsupportedModelError of a model that was not made for it."""
        self._turns.check()
        key = f"{self._config.arch.name}.pooling_type"
        if not self._file.metadata.get(key):
            raise UnsupportedModelError(
                f"{self._file.path} was not made for vectors of texts ({key} is missing): choose an embedding model, "
                "such as Qwen3-Embedding"
            )
        vectors, user = embeddings.Vectors.of(self._file, self._config), User()
        many = [embeddings.text_tokens(self._file, self._tokenizer, text) for text in _texts("texts", texts)]
        for tokens in many:
            self._check_length(len(tokens))
        made = np.empty((len(many), self._config.dim), np.float32)
        try:
            for at, tokens in enumerate(many):
                with self._turns.work(user):
                    made[at] = vectors.made(self._session, tokens)
        finally:
            self._turns.leave(user, "it is done")
        return made

    @property
    def lost(self) -> bool:
        """Whether a fault has made its device unusable: a new model opens that again."""
        from tegrad.llm.device import usable

        return not usable(self._gpu)

    def close(self) -> None:
        """Free everything, after the token that is on its way; streams end with ClosedError. Twice is harmless."""
        self._turns.close()

    def _format(self, tools: Tools | None) -> Format:
        """How calls are written; found once."""
        if (found := self._formats.get(bool(tools))) is None:
            source = source_of(self._file.metadata, tools=bool(tools))
            found = self._formats[bool(tools)] = Format.of(source, self._tokenizer)
        return found

    @cached_property
    def _masks(self) -> Masks:
        return Masks(self._tokenizer, self._config.vocab)

    def _rendered(self, messages: Messages, tools: Tools | None, **values: bool) -> str:
        listed = isinstance(messages, Sequence) and len(messages) > 0
        if not listed or not all(isinstance(one, Mapping) and "role" in one for one in messages):
            raise ArgumentError('messages are a list such as [{"role": "user", "content": "Hello"}]')
        with self._making:
            if self._template is None:
                self._template = Template.of(self._file)
                if self._template is not None:
                    self._undo.callback(self._template.close)
        if self._template is None:
            raise UnsupportedModelError(f"{self._file.path} has no chat template: use generate, or stream with a text")
        try:
            return render(self._template, self._format(tools).messages(messages, tools), tools, **values)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ArgumentError(
                f"messages or tools are not as OpenAI has them, or hold what JSON cannot say: {error}"
            ) from error

    def _check_length(self, tokens: int) -> None:
        if tokens > self.context:
            longest = self._config.longest
            more = f", or open the model with a longer context, up to {longest}" if longest > self.context else ""
            raise ContextError(f"{tokens} tokens exceed the context of {self.context}: shorten the text{more}")


def _constraint(
    options: Mapping[str, Any], calls: Grammar | None = None, thinking: bool = False, format_: Format | None = None
) -> Grammar | None:
    """What an answer has to keep to: a schema or a grammar, after its thought where one is open, or calls."""
    schema, grammar = options.get("schema"), options.get("grammar")
    if len([one for one in (schema, grammar, calls) if one is not None]) > 1:
        raise ArgumentError("an answer keeps to a schema, to a grammar, or calls a tool: ask for one of them")
    if schema is None and grammar is None:
        return calls
    if not isinstance(schema or {}, Mapping) or not isinstance(grammar or "", str):
        raise ArgumentError("schema is a JSON schema as a dict, grammar a text in llguidance's Lark dialect")
    try:
        wanted = Grammar("lark", grammar) if grammar is not None else Grammar("schema", json.dumps(schema))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the schema holds what JSON cannot say: {error}") from error
    return format_.after_thought(wanted) if format_ is not None and thinking else wanted


def _whole(stream: Stream) -> Reply:
    for _ in stream:
        pass
    return stream.reply


def _texts(name: str, given: object) -> list[str]:
    many = [given] if isinstance(given, str) else list(given) if isinstance(given, Iterable) else [None]
    if not all(isinstance(text, str) for text in many):
        raise ArgumentError(f"{name}={given!r} is neither a text nor a list of texts")
    return cast("list[str]", many)


def _warn(note: str) -> None:
    warnings.warn(note, stacklevel=2)
