"""Thoughts and tool calls, read out of an answer as it comes: what is told is told once, however the text is cut."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

from tegrad.llm.errors import ModelError
from tegrad.llm.forms import Form

T = TypeVar("T")

MOST_PYTHON: Final = 1 << 16
"""Characters of calls written in Python."""
MOST_WALKED: Final = 4 * MOST_PYTHON
"""Those of an answer that turned out to be none, or which, looked at again and again."""
PARAMETER: Final = re.compile(r"""\s*([^\s=(),'"\[\]{}]+)\s*=(?!=)""")
"""A parameter's name, in a call as Python writes it."""
LINE_IN_STRING: Final = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""", re.DOTALL)
"""A string of Python's, which may have lines in it."""
MOST_WORD: Final = 256
IN_ARGUMENTS: Final = re.compile(
    r""""(?:[^"\\]|\\.)*"|(?P<front>[{,]\s*)(?P<key>[^\s{}\[\],:"][^{}\[\],:"]*?)\s*:|\b(?:None|True|False)\b""",
    re.DOTALL,
)
"""A string of JSON, a key with nothing around it, behind what it follows, or what Python writes so."""
CONSTANTS: Final = {"None": "null", "True": "true", "False": "false"}
_LINE: Final = ("\n",)
"""What stands between a name and arguments in forms that have no other mark there, nor an id."""
KEYS: Final = ("name", "arguments", "parameters", "type", "function", "id", "tool_name", "tool_call_id")
"""What the JSON of a call may begin with."""
FIRST_KEY: Final = re.compile(r'\{\s*"([^"]*)"\s*:')
HEAD: Final = re.compile(
    r'\{\s*(?:"tool_call_id"\s*:\s*"?[^"{},]*"?\s*,\s*)?'
    r'"(?:tool_)?name"\s*:\s*"((?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*\{',
    re.DOTALL,
)
"""A call up to its arguments, where these may be told as they come."""


@dataclass(frozen=True, slots=True)
class Text:
    """What the model says."""

    text: str


@dataclass(frozen=True, slots=True)
class Thinking:
    """What it thinks."""

    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call begins: of one of the tools, by its name; `index` counts the answer's calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """A part of a call's arguments, which are JSON when joined, unless the model made them wrong or was cut short."""

    index: int
    text: str


Event: TypeAlias = Text | Thinking | Call | Arguments


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that is all there."""

    name: str
    json: str
    """Its arguments, as the model wrote them."""

    @property
    def arguments(self) -> dict[str, Any]:
        """By the parameters' names. ModelError where the model wrote no JSON object, or was cut short."""
        try:
            value = json.loads(self.json, strict=False)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise ModelError(f"the arguments of the call to {self.name} are no JSON object: {self.json[:200]}")
        return value


@dataclass(frozen=True, slots=True)
class Said:
    """What events say together."""

    text: str
    thinking: str
    calls: tuple[ToolCall, ...]

    @classmethod
    def of(cls, events: Sequence[Event]) -> Said:
        """Of the events of an answer."""
        given = {event.index: "" for event in events if isinstance(event, Call)}
        for event in events:
            if isinstance(event, Arguments):
                given[event.index] += event.text
        return cls(
            "".join(event.text for event in events if isinstance(event, Text)),
            "".join(event.text for event in events if isinstance(event, Thinking)),
            tuple(ToolCall(event.name, given[event.index]) for event in events if isinstance(event, Call)),
        )


class _NoCall(Exception):
    """What looked like a call is none."""


_Steps: TypeAlias = Generator[None, None, T]
_Kind: TypeAlias = type[Text] | type[Thinking] | type[Arguments]


class Reader:
    """Reads one answer. However its text is cut, the events say the same when those of one kind in a row are joined.

    Text is told as soon as it can be no mark; what only looks like a call comes back as text, in full.
    """

    def __init__(
        self,
        form: Form,
        thought: tuple[str, str] | None,
        names: Mapping[str, Mapping[str, Any]],
        *,
        thinking: bool = False,
    ) -> None:
        """Of known functions by `names`, with their parameters' schemas; `thought` stands around thoughts, of which one
        is open if `thinking`."""
        self._form, self._thought, self._names = form, thought, names
        self._text = ""
        """What has come and is not told yet."""
        self._at = 0
        """How far that was looked at."""
        self._ended = False
        self._events: list[Event] = []
        self._calls = self._walked = 0
        self._lead = ""
        """Spaces that the answer begins with, told with its first word."""
        self._fresh, self._strip = True, False
        self._steps = self._answer(thinking=thinking)

    def push(self, text: str) -> list[Event]:
        """What this text completes."""
        self._text += text
        return self._advance()

    def finish(self) -> list[Event]:
        """What is left when no more text comes."""
        self._ended = True
        events = self._advance()
        if self._lead and not self._strip:
            events.append(Text(self._lead))
            self._lead = ""
        return events

    def _advance(self) -> list[Event]:
        next(self._steps, None)
        events, self._events = self._events, []
        return events

    # ---- steps: generators that yield where they need more text

    def _answer(self, *, thinking: bool) -> _Steps[None]:
        # A model may open the thought once more that its prompt has opened.
        if (self._thought and (yield from self._begins(self._thought[0]))) or thinking:
            yield from self._think()
            self._strip = True
        bare = self._form.bare
        if bare is not None and not (bare and (yield from self._begins(bare))) and self._names:
            yield from self._region("")
        marks: tuple[str, ...] = self._form.opens if self._names else ()
        mark: str | None = ""
        if self._names:
            letter = yield from self._spaces()
            if letter and letter in "{[":
                yield from self._region("")
            self._at = 0
        channel = self._form.channel if self._thought else ""
        silent = (channel, self._thought[1]) if self._thought and channel else ()
        while mark is not None:
            mark = yield from self._until((*marks, *silent), Text)
            if mark is not None and mark not in silent:
                yield from self._region(mark)
            elif mark is not None:
                self._cut(len(mark))
                if self._thought and mark == channel and (yield from self._begins(self._thought[0][len(channel) :])):
                    yield from self._think()

    def _think(self) -> _Steps[None]:
        """A thought that is open, up to its end."""
        assert self._thought is not None
        yield from self._spaces()
        self._cut(self._at)
        end = self._thought[1]
        calls = self._form.opens[:1] if self._form.ends_thought and self._names else ()
        if (yield from self._until((end, *calls), Thinking)) == end:
            self._cut(len(end))

    def _region(self, mark: str) -> _Steps[None]:
        """Calls behind a mark with which the text begins, or text that only looks so."""
        before = self._calls
        try:
            yield from self._skip(self._form.opens)
            yield from self._some()
            if self._calls == before:
                raise _NoCall
            yield from self._skip(self._form.closes)
            self._cut(self._at)
        except _NoCall:
            self._tell(len(mark) if self._calls == before else 0, Text)

    def _some(self) -> _Steps[None]:
        """Calls one after the other, in whichever way they are written."""
        before, listed = self._calls, False
        while True:
            letter = yield from self._spaces()
            if letter == "{":
                yield from self._object()
            elif letter == "[" and not listed:
                listed = True
                self._at += 1
            elif letter and letter in ",;]" and self._calls > before:
                self._at += 1
            elif self._calls > before:
                return
            elif self._form.python:
                yield from self._python(listed=listed)
                return
            elif self._form.between or self._form.quote:
                yield from self._named()
                return
            else:
                return

    def _object(self) -> _Steps[None]:
        """A JSON object with name and arguments; it is a call as soon as the latter begin."""
        shape, begin = _Json(), self._at
        while not shape.done:
            letter = yield from self._letter()
            if not letter or not shape.push(letter):
                raise _NoCall
            self._at += 1
            if (
                letter == ":"
                and shape.state == "value"
                and (key := FIRST_KEY.fullmatch(self._text, begin, self._at))
                and key[1] not in KEYS
            ):
                raise _NoCall
            if letter == "{" and shape.began == 2 and (head := HEAD.fullmatch(self._text, begin, self._at)):
                self._begin(_unquoted(head[1]), self._at - 1)
                yield from self._arguments()
                shape.pop()
                while not shape.done:  # an id, perhaps, and the end
                    letter = yield from self._letter()
                    if not letter or not shape.push(letter):
                        return
                    self._at += 1
                return
        name, arguments = _whole(self._text[begin : self._at])
        self._begin(name, self._at)
        self._events.append(Arguments(self._calls - 1, arguments))

    def _named(self) -> _Steps[None]:
        """A name, and arguments behind it."""
        name = yield from self._name()
        if name not in self._names:
            raise _NoCall
        end = self._at
        yield from self._skip(self._form.between)
        if self._form.between == _LINE:
            if (yield from self._spaces()) and "\n" not in self._text[end : self._at]:
                raise _NoCall
        else:
            yield from self._word()  # an id, perhaps
            yield from self._skip(self._form.between)
        letter = yield from self._spaces()
        if letter == "<" and self._form.parameter is not None:
            yield from self._parameters(name, *self._form.parameter)
            return
        if letter != "{":
            raise _NoCall
        self._begin(name, self._at)
        yield from self._quoted(self._form.quote) if self._form.quote else self._arguments()

    def _quoted(self, quote: str) -> _Steps[None]:
        """Arguments, with which the text begins, whose strings stand between marks, or are JSON's; told as JSON once
        all are there."""
        within, depth = False, 0
        while (letter := (yield from self._letter())) and (within or depth or not self._at):
            while not self._ended and _may_become(self._text[self._at : self._at + len(quote)], quote):
                yield
            if self._text.startswith(quote, self._at):
                within = not within
                self._at += len(quote)
                continue
            self._at += 1
            if letter == '"' and not within:
                yield from self._string()
            depth += 0 if within else (letter in "{[") - (letter in "]}")
        said = _unmarked(self._text[: self._at], quote)
        self._cut(self._at)
        self._events.append(Arguments(self._calls - 1, said))

    def _string(self) -> _Steps[None]:
        """Go behind the end of a string of JSON, which has begun."""
        while (letter := (yield from self._letter())) and letter != '"':
            self._at += 1 + (letter == "\\")
        self._at += 1

    def _parameters(self, name: str, front: str, between: str, behind: str) -> _Steps[None]:
        """Arguments one by one, up to a mark that closes; each is told as JSON once it is there."""
        marks = front, *self._form.closes
        while not self._ended and any(_may_become(self._text[self._at :], mark) for mark in marks):
            yield
        if not self._text.startswith(marks, self._at):
            raise _NoCall
        self._begin(name, self._at)
        told = "{"
        while (yield from self._begins(front)):
            key = yield from self._up_to(between.rstrip())
            lined = between.endswith("\n") and (yield from self._letter()) == "\n"
            value = None if key is None else (yield from self._up_to(behind if lined else behind.lstrip()))
            if key is None or value is None:
                return
            value = value.removeprefix("\n") if lined else value
            given = _as_json(value, self._names[name].get(key))
            self._events.append(Arguments(self._calls - 1, f"{told}{json.dumps(key, ensure_ascii=False)}: {given}"))
            told = ", "
        for end in self._form.closes:
            if (yield from self._begins(end)):
                self._events.append(Arguments(self._calls - 1, "}" if told == ", " else "{}"))
                return

    def _python(self, *, listed: bool) -> _Steps[None]:
        """Calls as Python writes them, up to the list's end, or else to a mark or the end."""
        begin = self._at
        name = yield from self._word()
        if name not in (*self._names, "print") or (yield from self._letter()) != "(":
            raise _NoCall
        if listed:
            yield from self._list()
        else:
            yield from self._lines(begin)
        for name, arguments in _Calls("[" * listed + self._text[begin : self._at], self._names).read():
            self._begin(name, self._at)
            self._events.append(Arguments(self._calls - 1, arguments))

    def _list(self) -> _Steps[None]:
        """Go behind the end of a list as Python writes it."""
        depth, quote, begin = 1, "", self._at
        while depth:
            letter = yield from self._letter()
            self._walked += 1
            if not letter or self._at - begin > MOST_PYTHON or self._walked > MOST_WALKED:
                raise _NoCall
            self._at += 1 + (letter == "\\")
            if quote:
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            else:
                depth += (letter in "[({") - (letter in "])}")

    def _lines(self, begin: int) -> _Steps[None]:
        """Go to a mark that closes, or the end."""
        seen = begin
        while True:
            found = [at for close in self._form.closes if (at := self._text.find(close, seen)) >= 0]
            if found or self._ended:
                break
            if len(self._text) - begin > MOST_PYTHON:
                raise _NoCall
            seen = max(begin, len(self._text) - max(map(len, self._form.closes), default=0))
            yield
        self._at = min(found, default=len(self._text))

    def _arguments(self) -> _Steps[None]:
        """Tell arguments, with which the text begins, as they come; wrong ones up to a mark or the end."""
        shape = _Json()
        while not shape.done:
            if self._at == len(self._text):
                self._tell(self._at, Arguments)
                if self._ended:
                    return
                yield
            elif shape.push(self._text[self._at]):
                self._at += 1
            else:
                yield from self._until(self._form.closes, Arguments)
                return
        self._tell(self._at, Arguments)

    # ---- what steps are made of

    def _letter(self) -> _Steps[str]:
        """The next letter, "" at the end."""
        while self._at >= len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def _spaces(self) -> _Steps[str]:
        """Go behind spaces; the letter that follows."""
        while (letter := (yield from self._letter())).isspace():
            self._at += 1
        return letter

    def _name(self) -> _Steps[str]:
        """Go behind a word that a known function's name begins with: no call as soon as it is none's."""
        begin = self._at
        while (letter := (yield from self._letter())) and (letter.isalnum() or letter in "_.-"):
            self._at += 1
            if not any(name.startswith(self._text[begin : self._at]) for name in self._names):
                raise _NoCall
        return self._text[begin : self._at]

    def _word(self) -> _Steps[str]:
        """Go behind a word of letters that names have."""
        begin = self._at
        while (letter := (yield from self._letter())) and (letter.isalnum() or letter in "_.-"):
            self._at += 1
            if self._at - begin > MOST_WORD:
                raise _NoCall
        return self._text[begin : self._at]

    def _skip(self, marks: Sequence[str]) -> _Steps[None]:
        """Go behind spaces and marks, each once at most, where a mark follows."""
        left = list(marks)
        while True:
            before = self._at
            yield from self._spaces()
            while not self._ended and any(_may_become(self._text[self._at :], mark) for mark in left):
                yield
            mark = max((mark for mark in left if self._text.startswith(mark, self._at)), key=len, default="")
            if not mark:
                self._at = before
                return
            left.remove(mark)
            self._at += len(mark)

    def _begins(self, mark: str) -> _Steps[bool]:
        """Whether a mark follows behind spaces; if so, go there."""
        yield from self._spaces()
        while not self._ended and _may_become(self._text[self._at :], mark):
            yield
        if found := self._text.startswith(mark, self._at):
            self._cut(self._at + len(mark))
        self._at = 0
        return found

    def _up_to(self, mark: str) -> _Steps[str | None]:
        """Go behind a mark; what stands in front of it, None if there is none up to the end."""
        seen = 0
        while (at := self._text.find(mark, seen)) < 0:
            if self._ended:
                self._cut(len(self._text))
                return None
            seen = max(0, len(self._text) - len(mark))
            yield
        found = self._text[:at]
        self._cut(at + len(mark))
        return found

    def _until(self, marks: Sequence[str], kind: _Kind) -> _Steps[str | None]:
        """Tell text up to the first mark, with which what remains begins; None if there is none up to the end."""
        while True:
            found = [(at, -len(mark), mark) for mark in marks if (at := self._text.find(mark)) >= 0]
            if found:
                at, _, mark = min(found)
                self._tell(at, kind)
                return mark
            if self._ended:
                self._tell(len(self._text), kind)
                return None
            held = max((size for mark in marks for size in range(1, len(mark)) if self._text.endswith(mark[:size])),
                       default=0)  # fmt: skip
            sure = len(self._text) - held
            if kind is Thinking:  # spaces at its end are not its own
                sure = len(self._text[:sure].rstrip())
            self._tell(sure, kind)
            yield

    def _begin(self, name: str, at: int) -> None:
        """A call's name is sure; its arguments begin at a place in the text."""
        if name not in self._names:
            raise _NoCall
        self._cut(at)
        self._events.append(Call(self._calls, name))
        self._calls += 1
        self._lead, self._fresh, self._strip = "", True, True

    def _tell(self, end: int, kind: _Kind) -> None:
        """Tell the text up to a place as something."""
        said = self._text[:end]
        self._cut(end)
        if kind is Arguments:
            self._events += [Arguments(self._calls - 1, said)] if said else []
        elif kind is Thinking:
            said = said.rstrip()
            self._events += [Thinking(said)] if said else []
        else:
            self._say(said)

    def _say(self, said: str) -> None:
        if self._fresh:
            said = said.lstrip() if self._strip else self._lead + said
            self._lead = said if not said.strip() else ""
            if self._lead or not said:
                return
            self._fresh = self._strip = False
        self._events += [Text(said)] if said else []

    def _cut(self, at: int) -> None:
        self._text, self._at = self._text[at:], 0


class _Json:
    """Follows one JSON object or list, letter by letter. Strings may have lines in them, as models write them."""

    _CLOSES: Final = {"{": "}", "[": "]"}
    _PLAIN: Final = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
    """Letters of numbers and of true, false and null."""

    def __init__(self) -> None:
        self._open: list[str] = []
        self.state = "value"
        """What is due: value, key, colon, after (a comma, or the end), or within: string, escape, plain."""
        self._first = self._key = False

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self.state == "after" and not self._open

    @property
    def began(self) -> int:
        """How deep the object or list lies that the last letter began, from 1; else 0."""
        return len(self._open) if self._first else 0

    def pop(self) -> None:
        """The object or list that was begun last was read by somebody else."""
        self._open.pop()
        self.state = "after"

    def push(self, letter: str) -> bool:
        """Whether it may go on with this letter."""
        state = self.state
        if state == "escape":
            self.state = "string"
        elif state == "string":
            ended = "colon" if self._key else "after"
            self.state = ended if letter == '"' else "escape" if letter == "\\" else state
        elif state == "plain" and letter in self._PLAIN:
            return True
        elif letter in " \t\r\n":
            self.state = "after" if state == "plain" else state
        else:
            return self._next("after" if state == "plain" else state, letter)
        return True

    def _next(self, state: str, letter: str) -> bool:
        """A letter between strings, numbers and spaces."""
        first, self._first = self._first, False
        closing = self._CLOSES[self._open[-1]] if self._open else ""
        if letter == closing and (state == "after" or first):
            self.pop()
        elif state == "after" and letter == "," and closing:
            self.state = "key" if closing == "}" else "value"
        elif state == "colon" and letter == ":":
            self.state = "value"
        elif letter == '"' and state in ("key", "value"):
            self._key, self.state = state == "key", "string"
        elif state == "value" and letter in self._CLOSES:
            self._open.append(letter)
            self._first, self.state = True, "key" if letter == "{" else "value"
        elif state == "value" and letter in self._PLAIN and closing:
            self.state = "plain"
        else:
            return False
        return True


def _unmarked(text: str, quote: str) -> str:
    """Arguments as JSON whose strings stood between marks, and whose keys alone; what is JSON already as it is."""
    parts = text.split(quote)
    for at, part in enumerate(parts):
        parts[at] = json.dumps(part, ensure_ascii=False) if at % 2 else IN_ARGUMENTS.sub(_as_in_json, part)
    return "".join(parts)


def _as_in_json(found: re.Match[str]) -> str:
    """A string of JSON, a key or a constant as JSON has it."""
    if (key := found["key"]) is not None:
        return f"{found['front']}{json.dumps(key, ensure_ascii=False)}:"
    return CONSTANTS.get(found[0], found[0])


def _may_become(text: str, mark: str) -> bool:
    """Whether a text is the beginning of a mark and not all of it."""
    return len(text) < len(mark) and mark.startswith(text)


def _unquoted(text: str) -> str:
    """The inside of a JSON string."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        raise _NoCall from None


def _whole(text: str) -> tuple[str, str]:
    """Name and arguments of a call that is all there, in whichever order; arguments may be JSON in a string."""
    try:
        value = json.loads(text, strict=False)
    except (ValueError, RecursionError):
        raise _NoCall from None
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name, arguments = value.get("name", value.get("tool_name")), value.get("arguments", value.get("parameters"))
    if isinstance(name, str) and isinstance(arguments, str):
        return name, arguments
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise _NoCall
    return name, json.dumps(arguments, ensure_ascii=False)


def _as_json(text: str, schema: object) -> str:
    """A parameter's text as JSON: of a string where its schema has one, else of the JSON or the Python that it is."""
    kinds = _types(schema, text)
    if text == "null" and "null" in kinds:
        return text
    if "string" not in kinds and len(text) <= MOST_PYTHON:
        for read in (json.loads, ast.literal_eval):
            with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
                return json.dumps(read(text), ensure_ascii=False, allow_nan=False)
    return json.dumps(text, ensure_ascii=False)


def _types(schema: object, text: str) -> set[str]:
    """The types that a schema allows by name, in a choice, or because a text is among its values."""
    if not isinstance(schema, Mapping):
        return set()
    named, values = schema.get("type"), schema.get("enum")
    found = {kind for kind in (named if isinstance(named, list) else [named]) if isinstance(kind, str)}
    if text == schema.get("const") or (isinstance(values, list) and text in values):
        found.add("string")
    choices = [schema.get("anyOf"), schema.get("oneOf")]
    return found.union(*(_types(one, text) for choice in choices if isinstance(choice, list) for one in choice))


class _Calls:
    """Calls of known functions as Python writes them, in a list, one a line, or printed; but names, of functions and of
    parameters, may have letters that Python's have not, and strings may have lines in them."""

    def __init__(self, source: str, names: Collection[str]) -> None:
        self._source, self._names, self._at = source, sorted(names, key=len, reverse=True), 0

    def read(self) -> list[tuple[str, str]]:
        """Names and arguments of all of them; no call where there is anything else."""
        found: list[tuple[str, str]] = []
        while self._spaces(";") < len(self._source):
            if not self._take("["):
                found.append(self._call())
                continue
            while not self._take("]"):
                found.append(self._call())
                if not self._take(",") and self._source[self._at : self._at + 1] != "]":
                    raise _NoCall
        return found

    def _call(self) -> tuple[str, str]:
        printed = "print" not in self._names and self._take("print") and self._take("(")
        self._spaces()
        name = next((one for one in self._names if self._source.startswith(one, self._at)), None)
        if name is None:
            raise _NoCall
        self._at += len(name)
        if not self._take("("):
            raise _NoCall
        given: dict[str, Any] = {}
        while not self._take(")"):
            found = PARAMETER.match(self._source, self._at)
            if found is None:
                raise _NoCall
            self._at = found.end()
            given[found[1]] = self._value()
            self._take(",")
        if printed and not self._take(")"):
            raise _NoCall
        return name, _paired(json.dumps(given, ensure_ascii=False))

    def _value(self) -> Any:
        """A value, up to the comma or the bracket behind it."""
        begin, depth, quote = self._at, 0, ""
        while self._at < len(self._source):
            letter = self._source[self._at]
            if quote:
                self._at += letter == "\\"
                quote = "" if letter == quote else quote
            elif letter in "'\"":
                quote = letter
            elif letter in "([{":
                depth += 1
            elif letter in ")]}" and depth:
                depth -= 1
            elif letter in ",)]}" and not depth:
                break
            self._at += 1
        text = LINE_IN_STRING.sub(lambda found: found[0].replace("\n", "\\n"), self._source[begin : self._at])
        try:
            return ast.literal_eval(_JsonNames().visit(ast.parse(text.strip(), mode="eval")))
        except (SyntaxError, TypeError, ValueError, RecursionError, MemoryError):
            raise _NoCall from None

    def _take(self, text: str) -> bool:
        """Go behind a text, if it follows spaces."""
        self._spaces()
        if not self._source.startswith(text, self._at):
            return False
        self._at += len(text)
        return True

    def _spaces(self, more: str = "") -> int:
        """Go behind spaces, and these letters; where that is."""
        while self._source[self._at : self._at + 1].isspace() or self._source[self._at : self._at + 1] in {*more}:
            self._at += 1
        return self._at


def _paired(text: str) -> str:
    """A text in which halves of a character that stand beside each other are that one, and others say so."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class _JsonNames(ast.NodeTransformer):
    """JSON's true, false and null in Python."""

    def visit_Name(self, node: ast.Name) -> ast.AST:  # the base class's name
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node
