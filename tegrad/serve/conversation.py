"""A request of any API made into a prompt's tokens, and its answers as they come: what the APIs have in common.

`chat_prompt` or `text_prompt` makes a prompt, `asked` submits it for as many answers as are wanted, and `merged` gives
their `Part`s: text, thoughts and calls of tools, as `llm.tools` reads them out of what the model says.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Literal, TypeAlias, cast
from weakref import WeakKeyDictionary

from tegrad.llm.batch import GREEDY
from tegrad.llm.embeddings import text_tokens
from tegrad.llm.errors import ContextError, UnsupportedModelError
from tegrad.llm.grammar import Grammar
from tegrad.llm.messages import render
from tegrad.llm.sampling import Logprobs, Settings
from tegrad.llm.service import Answer, Piece, Usage
from tegrad.llm.template import source_of
from tegrad.llm.tokenizer import Stream, Tokenizer
from tegrad.llm.tools import Arguments, Call, Event, Format, Reader, Text, Thinking
from tegrad.serve.failures import Failure
from tegrad.serve.model import Model

PACE_S: Final = 0.01
"""Tokens of a reply that come within so many seconds may be one part."""
LETTERS_OF_TOKEN: Final = 32
"""Letters of a text for each token of the context, of which texts have 4: a longer one does not fit, and to make tokens
of it only to find that out takes seconds and gigabytes."""
Ending: TypeAlias = Literal["stop", "length", "calls"]


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation to be continued."""

    messages: Sequence[Mapping[str, Any]]
    """As OpenAI has them, but that `content` is a text."""
    tools: Sequence[Mapping[str, Any]] = ()
    """Functions, as OpenAI describes them."""
    choice: str = "auto"
    """"auto", "none", "required", or the name of the function to be called."""
    parallel: bool = True
    """It may call several functions."""
    grammar: Grammar | None = None
    """What its text keeps to."""
    values: Mapping[str, Any] = field(default_factory=dict)
    """More for the template, such as `enable_thinking`."""
    begun: str = ""
    """What the answer begins with, which the model goes on from."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a prompt is answered."""

    settings: Settings = GREEDY
    max_tokens: int | None = None
    """None is as many as the context holds, and 0 asks no model."""
    stops: Sequence[str] = ()
    seed: int | None = None
    """Of the first answer, those after it have the next numbers; None takes one by chance."""
    count: int = 1
    """Answers to each prompt."""
    deadline: float | None = None
    """Seconds after which an answer ends, wherever it is."""


class Plain:
    """A `Reader` of what has no thoughts and no calls: all is text."""

    def push(self, text: str) -> Sequence[Event]:
        """The text itself."""
        return (Text(text),) if text else ()

    def finish(self) -> Sequence[Event]:
        """Nothing."""
        return ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is asked to continue, how its answers are read, and what they keep to."""

    tokens: Sequence[int]
    reader: Callable[[], Reader | Plain] = Plain
    grammar: Grammar | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Scored:
    """A token with its log-probability."""

    token: int
    logprobs: Logprobs


@dataclass(frozen=True, slots=True)
class Part:
    """What came of a reply at once; the last one has its `ending`."""

    events: Sequence[Event]
    scored: Sequence[Scored] = ()
    ending: Ending | None = None


@dataclass(slots=True)
class Called:
    """A call of a function that came."""

    name: str
    arguments: str = ""
    """JSON, unless the model said something else."""
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}")

    @property
    def object(self) -> dict[str, Any]:
        """The arguments as an object; one with their `text` where the model said something else."""
        try:
            value = json.loads(self.arguments or "{}", strict=False)
            json.dumps(value, allow_nan=False)  # no JSON has NaN, or 1e999
        except (ValueError, RecursionError):
            value = None
        return value if isinstance(value, dict) else {"text": self.arguments}


@dataclass(slots=True)
class Said:
    """The parts of a reply, put together."""

    text: str = ""
    thinking: str = ""
    calls: list[Called] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    ending: Ending | None = None

    def add(self, part: Part) -> None:
        """The next part."""
        for event in part.events:
            match event:
                case Text(text):
                    self.text += text
                case Thinking(text):
                    self.thinking += text
                case Call(_, name):
                    self.calls.append(Called(name))
                case Arguments(index, text):
                    self.calls[index].arguments += text
        self.scored += part.scored
        self.ending = part.ending


class Reply:
    """One answer, in parts. Iterate over it once; whoever leaves it before its end calls `cancel`."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer, prompt: Prompt) -> None:
        self._answer, self._reader, self._parallel = answer, prompt.reader(), prompt.parallel
        self._scores = _Scores(tokenizer)
        self._called = 0
        """Functions so far."""
        self._over = False
        """A second call came, of which one was allowed."""

    @property
    def usage(self) -> Usage:
        """Tokens, as far as they were read."""
        return self._answer.usage

    @property
    def first_token(self) -> float | None:
        """Seconds from the request to its first token."""
        return self._answer.first_token

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._answer.stop

    def cancel(self) -> None:
        """Say no more."""
        self._answer.cancel()

    async def parts(self) -> AsyncGenerator[Part, None]:
        """What comes, at most every `PACE_S`; Failure, or what else went wrong."""
        try:
            pieces = cast("AsyncGenerator[Piece, None]", aiter(self._answer))
            async with aclosing(pieces):
                async for piece in pieces:
                    begun = time.monotonic()
                    events, scored = self._events(self._reader.push(piece.text)), self._scores.push(piece)
                    if events or scored:
                        yield Part(events, scored)
                    if self._over:
                        break
                    await self._answer.pause(begun + PACE_S - time.monotonic())
            yield self._last()
        finally:
            self._answer.cancel()

    def _events(self, events: Sequence[Event]) -> Sequence[Event]:
        """Those up to a second call, where that is one too many."""
        for at, event in enumerate(events):
            self._called += isinstance(event, Call)
            if self._called > 1 and not self._parallel:
                self._over = True
                return events[:at]
        return events

    def _last(self) -> Part:
        reason = self._answer.finish_reason
        if not self._over:
            _check_end(self._answer, cut=bool(self.usage.completion))
        events = () if self._over else self._events(self._reader.finish())
        ended: Ending = "stop" if self._over or reason == "stop" else "length"
        return Part(events, ending="calls" if self._called and ended == "stop" else ended)


def _check_end(answer: Answer, *, cut: bool) -> None:
    """What keeps an answer from being one; with `cut` it may end where its time does."""
    if answer.finish_reason == "error":
        raise answer.error or Failure("the model failed: see the server's log", 503)
    if answer.finish_reason == "cancelled":
        raise Failure("the server is closing: ask again later", 503, retry_after=1)
    if answer.finish_reason == "timeout" and not cut:
        raise Failure("no token came in the time that a request may take: ask again later", 503, retry_after=1)


class _Scores:
    """Log-probabilities, which come with their tokens, held back until their text is sure."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream = Stream(tokenizer)
        self._held: deque[tuple[int, Scored]] = deque()
        """With the character at which each begins."""
        self._made = self._sure = 0

    def push(self, piece: Piece) -> list[Scored]:
        """Those whose text came."""
        self._sure += len(piece.text)
        for token, logprobs in zip(piece.tokens, piece.logprobs, strict=False):
            self._held.append((self._made, Scored(token, logprobs)))
            self._made += len(self._stream.push(token))
        sure = []
        while self._held and self._held[0][0] < self._sure:
            sure.append(self._held.popleft()[1])
        return sure


def resumed(messages: Sequence[Mapping[str, Any]]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Messages, and what the answer begins with: the text of the last one, where that is the assistant's."""
    last = messages[-1]
    if last["role"] != "assistant" or last.get("tool_calls") or len(messages) == 1:
        return messages, ""
    return messages[:-1], last["content"]


async def text_prompt(model: Model, text: str, grammar: Grammar | None = None) -> Prompt:
    """A text to be continued. ContextError."""
    return Prompt(await asyncio.to_thread(_tokens, model, text), grammar=grammar)


async def vector_tokens(model: Model, texts: Sequence[str], *, cut: bool = False) -> list[list[int]]:
    """The tokens of texts whose vectors are wanted; with `cut`, a long one ends where the context does.

    ModelError, ContextError.
    """

    def one(text: str) -> list[int]:
        text = text[: LETTERS_OF_TOKEN * model.context] if cut else text
        _check_length(model, text)
        tokens = text_tokens(model.about, model.tokenizer, text)
        if not cut or len(tokens) <= model.context:
            return tokens
        end = tokens[-1:] if tokens[-1] == model.tokenizer.eos else []
        return tokens[: model.context - len(end)] + end

    return await asyncio.to_thread(lambda: [one(text) for text in texts])


def _tokens(model: Model, text: str, *, chat: bool = False) -> list[int]:
    _check_length(model, text)
    return model.tokenizer.encode_chat(text) if chat else model.tokenizer.encode(text)


def _check_length(model: Model, text: str) -> None:
    if len(text) > LETTERS_OF_TOKEN * model.context:
        raise ContextError(f"{len(text):,} letters do not fit a context of {model.context} tokens: shorten the text")


async def prompt_scores(
    model: Model, prompts: Sequence[Prompt], count: int, deadline: float | None
) -> list[list[Logprobs]]:
    """Log-probabilities of the tokens of prompts but their first ones, with the `count` likeliest of each.

    They are those of an answer to the first token that can be nothing but the rest, and take as long as that. What
    `Model.submit` raises, Failure.
    """
    tasks = [asyncio.ensure_future(_prompt_scores(model, one.tokens, count, deadline)) for one in prompts]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _prompt_scores(
    model: Model, tokens: Sequence[int], count: int, deadline: float | None
) -> list[Logprobs]:  # fmt: skip
    if len(tokens) > model.context:
        raise ContextError(f"a prompt of {len(tokens)} tokens does not fit a context of {model.context}")
    made: list[Logprobs] = []
    while rest := tokens[1 + len(made) :]:  # a token that ends texts ends an answer, after which another one goes on
        grammar = Grammar("tokens", " ".join(map(str, rest)))
        begun = tokens[: 1 + len(made)]
        answer = model.submit(begun, len(rest), Settings(logprobs=count), grammar=grammar, deadline=deadline)
        async for piece in answer:
            made += piece.logprobs
        _check_end(answer, cut=False)
    return made


async def chat_prompt(model: Model, chat: Chat) -> Prompt:
    """A conversation to be answered, in the model's own template. ContextError.

    Where it has to keep to something, it thinks in front of that only if the prompt says so. UnsupportedModelError for
    a model without a template, TemplateRefusalError, GrammarError.
    """
    return await asyncio.to_thread(_chat_prompt, model, chat)


def _chat_prompt(model: Model, chat: Chat) -> Prompt:
    template = model.template
    if template is None:
        raise UnsupportedModelError(f"{model.about.name} has no chat template: ask for the completion of a text")
    tools = () if chat.choice == "none" else chat.tools
    form = _format(model, tools=bool(tools))
    held = chat.grammar or chat.begun or (tools and chat.choice != "auto")
    values = {"enable_thinking": False, **chat.values} if held else chat.values
    text = render(template, form.messages(chat.messages, tools), tools, **values)
    thinking = form.thinks(text)
    if chat.begun:
        text += f"\n{form.thought[1]}\n\n{chat.begun}" if thinking and form.thought else chat.begun
        thinking = False
    tokens = _tokens(model, text, chat=True)
    if tools:
        grammar = form.grammar(tools, chat.choice, chat.parallel, thinking=thinking, answer=chat.grammar)
    else:
        grammar = form.after_thought(chat.grammar) if chat.grammar and thinking else chat.grammar
    return Prompt(tokens, lambda: form.reader(tools, thinking=thinking), grammar, chat.parallel)


@contextmanager
def asked(model: Model, prompts: Sequence[Prompt], wanted: Wanted) -> Iterator[list[Reply]]:
    """Replies to prompts, those to the first one first. None is made once the block is left, for whatever reason.

    What `Model.submit` raises.
    """
    seed = secrets.randbits(62) if wanted.seed is None else wanted.seed
    replies: list[Reply] = []
    try:
        for prompt in prompts:
            for at in range(wanted.count):
                answer = (
                    _nothing(model, prompt)
                    if wanted.max_tokens == 0
                    else model.submit(
                        prompt.tokens,
                        wanted.max_tokens,
                        wanted.settings,
                        stops=wanted.stops,
                        seed=seed + at,
                        grammar=prompt.grammar,
                        deadline=wanted.deadline,
                    )
                )
                replies.append(Reply(answer, model.tokenizer, prompt))
        yield replies
    finally:
        for reply in replies:
            reply.cancel()


def _nothing(model: Model, prompt: Prompt) -> Answer:
    """An answer of no tokens, for which no model is asked."""
    made = Answer(model.tokenizer, len(prompt.tokens), ())
    made.leave = bool
    made.end("length")
    return made


async def merged(replies: Sequence[Reply]) -> AsyncGenerator[tuple[int, Part], None]:
    """The parts of all replies as they come, each with its reply's number. Iterate within `aclosing`."""
    if len(replies) == 1:
        async with aclosing(replies[0].parts()) as parts:
            async for part in parts:
                yield 0, part
        return
    came: asyncio.Queue[tuple[int, Part | Exception]] = asyncio.Queue(1)
    tasks = [asyncio.create_task(_read(at, reply, came)) for at, reply in enumerate(replies)]
    left = len(tasks)
    try:
        while left:
            at, item = await came.get()
            if isinstance(item, Exception):
                raise item
            left -= item.ending is not None
            yield at, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def whole(replies: Sequence[Reply]) -> list[Said]:
    """All replies, once they have ended."""
    said = [Said() for _ in replies]
    async with aclosing(merged(replies)) as parts:
        async for at, part in parts:
            said[at].add(part)
    return said


async def _read(at: int, reply: Reply, came: asyncio.Queue[tuple[int, Part | Exception]]) -> None:
    try:
        async with aclosing(reply.parts()) as parts:
            async for part in parts:
                await came.put((at, part))
    except Exception as error:
        await came.put((at, error))


_formats: Final = WeakKeyDictionary[Tokenizer, dict[bool, Format]]()


def _format(model: Model, *, tools: bool) -> Format:
    """How the model calls functions, by its template; found once."""
    known = _formats.setdefault(model.tokenizer, {})
    if (found := known.get(tools)) is None:
        found = known[tools] = Format.of(source_of(model.about.metadata, tools=tools), model.tokenizer)
    return found
