"""What a request's JSON may hold: kinds of values, each of which reads one and describes itself to OpenAPI.

`Kind.read` gives the value as Python's own, or a Failure whose `param` is where it stands, such as "messages[0].role".
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NoReturn

from tegrad.serve.failures import SHOWN, Failure

LONGEST: Final = 1 << 20
"""Entries of a list that has no bound of its own."""


class Kind(ABC):
    """A kind of value."""

    types: ClassVar[tuple[type, ...]] = (object,)
    """Python's, of which a value has to be; a bool is no number."""
    __slots__ = ()

    def fits(self, value: Any) -> bool:
        """Whether it is of this type, right or wrong."""
        return isinstance(value, self.types) and not (isinstance(value, bool) and int in self.types)

    def read(self, value: Any, at: str = "") -> Any:
        """The value, checked; Failure."""
        return self.checked(value, at) if self.fits(value) else wrong(value, at, self)

    def checked(self, value: Any, at: str) -> Any:
        """A value that is of this type; Failure."""
        return value

    @abstractmethod
    def schema(self) -> dict[str, Any]:
        """As JSON Schema says it."""

    @abstractmethod
    def __str__(self) -> str:
        """What an error asks for."""


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """A text, one of `choices` if there are any, of at most `most` characters."""

    choices: tuple[str, ...] = ()
    most: int | None = None
    types = (str,)

    def checked(self, value: str, at: str) -> str:
        if self.choices and value not in self.choices:
            wrong(value, at, self)
        if self.most is not None and len(value) > self.most:
            raise Failure(f"{at} has {len(value)} characters: give at most {self.most}", param=at)
        return value

    def schema(self) -> dict[str, Any]:
        bounds = {"maxLength": self.most} if self.most is not None else {}
        return {"type": "string", **bounds, **({"enum": list(self.choices)} if self.choices else {})}

    def __str__(self) -> str:
        return " or ".join(json.dumps(choice) for choice in self.choices) or "a text"


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A number from `low` to `high`. One that is `near` is taken as the nearest of these, without its fraction."""

    low: float
    high: float
    whole: bool = False
    near: bool = False
    types = (int, float)

    def checked(self, value: float, at: str) -> float:
        if self.near:
            value = min(max(self.low, value), self.high)
        elif not self.low <= value <= self.high or (self.whole and value != int(value)):
            wrong(value, at, self)
        return int(value) if self.whole else float(value)

    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self.low, "maximum": self.high}
        return {
            "type": "integer" if self.whole and not self.near else "number",
            **{name: bound for name, bound in bounds.items() if math.isfinite(bound) and not self.near},
        }

    def __str__(self) -> str:
        return f"a {'whole ' if self.whole else ''}number from {self.low:.15g} to {self.high:.15g}"


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """true or false."""

    types = (bool,)

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def __str__(self) -> str:
        return "true or false"


@dataclass(frozen=True, slots=True)
class Listed(Kind):
    """A list of values of one kind."""

    item: Kind
    least: int = 0
    most: int = LONGEST
    types = (list,)

    def checked(self, value: list[Any], at: str) -> list[Any]:
        if len(value) < self.least:
            wrong(value, at, self)
        if len(value) > self.most:
            raise Failure(f"{at} is a list of {len(value)}: give at most {self.most}", param=at)
        return [self.item.read(entry, f"{at}[{index}]") for index, entry in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": self.item.schema(), "minItems": self.least, "maxItems": self.most}

    def __str__(self) -> str:
        return f"a list{f' of {self.least} or more' if self.least else ''}, each {self.item}"


@dataclass(frozen=True, slots=True)
class Either(Kind):
    """A value of one of several kinds, told apart by their types: the last that fits reads it."""

    kinds: tuple[Kind, ...]

    def fits(self, value: Any) -> bool:
        return any(kind.fits(value) for kind in self.kinds)

    def checked(self, value: Any, at: str) -> Any:
        *others, last = [kind for kind in self.kinds if kind.fits(value)]
        for kind in others:
            with suppress(Failure):
                return kind.read(value, at)
        return last.read(value, at)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [kind.schema() for kind in self.kinds]}

    def __str__(self) -> str:
        return ", or ".join(map(str, self.kinds))


@dataclass(frozen=True, slots=True)
class Anything(Kind):
    """Any JSON."""

    def schema(self) -> dict[str, Any]:
        return {}

    def __str__(self) -> str:
        return "anything"


@dataclass(frozen=True, slots=True)
class Absent(Kind):
    """What is not done: nothing but null, false and "" is taken. `why` says so, and what to do."""

    why: str

    def checked(self, value: Any, at: str) -> None:
        if value is not False and value != "":
            raise Failure(f"{at} is given: {self.why}", param=at)

    def schema(self) -> dict[str, Any]:
        return {"enum": [False, ""]}

    def __str__(self) -> str:
        return "nothing"


@dataclass(frozen=True, slots=True)
class Dictionary(Kind):
    """An object with any names, and values of one kind."""

    item: Kind = field(default_factory=Anything)
    most: int = LONGEST
    types = (dict,)

    def checked(self, value: dict[str, Any], at: str) -> dict[str, Any]:
        if len(value) > self.most:
            wrong(value, at, self)
        return {name: self.item.read(entry, f"{at}.{name[:SHOWN]}") for name, entry in value.items()}

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self.item.schema() or True, "maxProperties": self.most}

    def __str__(self) -> str:
        return "an object" + (f" with at most {self.most} entries" if self.most < LONGEST else "")


@dataclass(frozen=True, slots=True)
class Field:
    """A field of an object. null is as if it were left out."""

    kind: Kind
    default: Any = None
    required: bool = False
    about: str = ""
    own: bool = False
    """Left out it may be the model's own, for which it is read as None; the default is for a model that has none."""

    def schema(self) -> dict[str, Any]:
        """With null, which OpenAPI 3.1 writes as a type."""
        made = self.kind.schema()
        if not self.required:
            made = {"anyOf": [made, {"type": "null"}]} if made else made
        if self.default is not None and not isinstance(self.default, tuple):
            made["default"] = self.default
        return made | ({"description": self.about} if self.about else {})


@dataclass(frozen=True, slots=True)
class Object(Kind):
    """An object with some fields; those that it has besides are ignored."""

    fields: Mapping[str, Field]
    types = (dict,)

    def checked(self, value: dict[str, Any], at: str) -> dict[str, Any]:
        made = {}
        for name, row in self.fields.items():
            given, where = value.get(name), f"{at}.{name}" if at else name
            if given is None and row.required:
                raise Failure(f"{where} is missing: give {row.kind}", param=where)
            left_out = None if row.own else row.default
            made[name] = left_out if given is None else row.kind.read(given, where)
        return made

    def schema(self) -> dict[str, Any]:
        required = [name for name, row in self.fields.items() if row.required]
        properties = {name: row.schema() for name, row in self.fields.items()}
        return {"type": "object", "properties": properties, **({"required": required} if required else {})}

    def __str__(self) -> str:
        return "an object"


@dataclass(frozen=True, slots=True)
class Tagged(Kind):
    """One of several objects, told apart by the text of one of their fields, `default` where that is missing.

    With `others`, one with another text there is taken, too, and nothing more of it read.
    """

    tag: str
    kinds: Mapping[str, Object]
    default: str | None = None
    others: bool = False
    types = (dict,)

    def checked(self, value: dict[str, Any], at: str) -> dict[str, Any]:
        given = value.get(self.tag)
        if self.others and isinstance(given, str) and given not in self.kinds:
            return {self.tag: given}
        name = Text(tuple(self.kinds)).read(self.default if given is None else given, f"{at}.{self.tag}")
        return {self.tag: name, **self.kinds[name].read(value, at)}

    def schema(self) -> dict[str, Any]:
        other = {"type": "object", "properties": {self.tag: {"type": "string", "not": {"enum": list(self.kinds)}}}}
        others = [other | {"required": [self.tag]}] if self.others else []
        return {"oneOf": [*(self._one(name, kind.schema()) for name, kind in self.kinds.items()), *others]}

    def __str__(self) -> str:
        return f"an object with {self.tag!r}"

    def _one(self, name: str, made: dict[str, Any]) -> dict[str, Any]:
        tag = {"enum": [name, None]} if name == self.default else {"type": "string", "const": name}
        made["properties"] = {self.tag: tag} | made["properties"]
        return made | {"required": [*([self.tag] if name != self.default else []), *made.get("required", ())]}


def wrong(value: Any, at: str, wanted: object) -> NoReturn:
    """Refuse a value."""
    shown = json.dumps(value)[: SHOWN + 1] if isinstance(value, str | int | float | None) else type(value).__name__
    kinds = {"dict": "an object", "list": f"a list of {len(value) if isinstance(value, Sequence) else 0}"}
    shown = kinds.get(shown, shown[:SHOWN] + "..." if len(shown) > SHOWN else shown)
    raise Failure(f"{at or 'the body'} is {shown}: give {wanted}", param=at or None)


def parsed(body: bytes) -> Any:
    """The JSON of a body, with halves of characters replaced, which no encoding holds; Failure."""
    try:
        value = json.loads(body, parse_constant=_refuse)
        if b"\\u" in body:
            text = json.dumps(value, ensure_ascii=False).encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            value = json.loads(text)
    except RecursionError:
        raise Failure("the body is nested too deeply: give a flatter one") from None
    except ValueError as error:
        raise Failure(f"the body is no JSON ({' '.join(str(error).split())[:100]}): give an object") from None
    return value


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def lookup(summary: str, description: str = "The answer") -> dict[str, Any]:
    """An OpenAPI operation that takes nothing."""
    return {"summary": summary, "responses": {"200": {"description": description}}}


def operation(summary: str, body: Object, stream: str = "text/event-stream") -> dict[str, Any]:
    """An OpenAPI operation that takes a body as JSON and answers with JSON, or with a stream where that asks for it."""
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if "stream" in body.fields:
        content[stream] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body.schema()}}},
        "responses": {"200": {"description": "The answer", "content": content}, **failing(400, 404, 413, 429, 503)},
    }


def failing(*statuses: int) -> dict[str, Any]:
    """OpenAPI's responses of an operation that fails."""
    return {
        str(status): {"description": _STATUSES[status], "content": {"application/json": {"schema": {"type": "object"}}}}
        for status in statuses
    }


_STATUSES: Final[Mapping[int, str]] = {
    400: "Something is wrong with the request",
    404: "There is no such model",
    413: "The body is too large",
    429: "Too many requests wait",
    503: "The server cannot answer now",
}
