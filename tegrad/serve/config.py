"""What a server is told: by the command's options, or by a TOML file with the same names."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal, Self, TypeAlias

from tegrad.errors import TegradError
from tegrad.serve.plan import Wanted

LogKind: TypeAlias = Literal["text", "json", "off"]
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


class ConfigError(TegradError):
    """An option, or a value of the configuration's file, that means nothing."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Bounds:
    """How many replicas there have to be before a model is served, and may be."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Config:
    """A server's configuration. Times are in seconds."""

    models: Sequence[str] = ()
    """Files or names of pulled models; the first is loaded at once and is the default."""
    host: str = "127.0.0.1"
    port: int = 8080
    """0 is any that is free."""
    wanted: Wanted = field(default_factory=Wanted)
    own: Mapping[str, Wanted] = field(default_factory=dict)
    """For some models, by name, instead of `wanted`."""
    memory: int | None = None
    """Bytes that all models may take together."""
    keep_alive: float = math.inf
    keys: frozenset[str] = frozenset()
    """One of them has to be in a request, if there are any."""
    cors: Sequence[str] = ()
    """Origins whose pages may ask; "*" is all."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    most_body: int = 8 << 20
    """Bytes of a request."""
    replicas: Bounds | None = None
    """Of each model, one to a GPU."""
    ray: str | None = None
    """The address of the Ray cluster that they are in; None is one of this machine, which ends with the server."""
    grace: float = 30.0
    """That requests have to finish when the server is to end."""
    log: LogKind = "text"

    @classmethod
    def of(cls, options: Mapping[str, Any], file: Path | None = None) -> Self:
        """From options, of which those that are None were not given, and a file, which they have precedence over.

        ConfigError.
        """
        given = _read(file) if file is not None else {}
        tables = given.pop("model", {})
        given |= {name: value for name, value in options.items() if value is not None}
        _check(given, OPTIONS)
        own = {}
        if not isinstance(tables, dict):
            raise ConfigError(f'{file}: models are told of in tables such as [model."name"]')
        for model, table in tables.items():
            if not isinstance(table, dict):
                raise ConfigError(f'{file}: what is told of a model is a table, [model."{model}"]')
            _check(table, OF_MODEL, f'[model."{model}"] ')
            own[model] = Wanted(**_made({**given, **table}, OF_MODEL))
        if (given.get("tls_cert") is None) != (given.get("tls_key") is None):
            raise ConfigError("TLS needs a certificate and its key: give --tls-cert and --tls-key")
        if "ray" in given and "replicas" not in given:
            raise ConfigError("a Ray cluster is for replicas: give --replicas N as well")
        return cls(wanted=Wanted(**_made(given, OF_MODEL)), own=own, **_made(given, OF_SERVER))

    @property
    def local(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.host in LOOPBACK


@dataclass(frozen=True, slots=True)
class Option:
    """A row: an option's type, and its bounds or what may be chosen; and what becomes of its value."""

    kind: type | tuple[type, ...]
    least: float = -math.inf
    largest: float = math.inf
    choices: Sequence[str] = ()
    field: str = ""
    """Of `Wanted` or `Config`, if it has another name there."""
    made: Callable[[Any], Any] = lambda value: value

    def check(self, name: str, value: Any) -> None:
        """ConfigError for what it cannot be."""
        fits = isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool))
        if fits and isinstance(value, list):
            fits = all(isinstance(entry, str) for entry in value)
        if fits and isinstance(value, int | float):
            fits = self.least <= value <= self.largest
        if not fits or (self.choices and value not in self.choices):
            raise ConfigError(f"{name} = {value!r}: give {' or '.join(self.choices) or self._wanted}")

    @property
    def _wanted(self) -> str:
        names = {str: "a text", bool: "true or false", list: "a list of texts", int: "a whole number"}
        what = names.get(self.kind, "a number") if isinstance(self.kind, type) else "a number"
        bounds = f" from {self.least:g}" * (self.least > -math.inf) + f" to {self.largest:g}" * (
            self.largest < math.inf
        )
        return what + bounds


def _bounds(given: int | str) -> Bounds:
    """Of 2, "2", or "2..4"."""
    least, dots, most = str(given).partition("..")
    try:
        made = Bounds(int(least), int(most if dots else least))
        if 1 <= made.least <= made.most:
            return made
    except ValueError:
        pass
    raise ConfigError(f"replicas = {str(given)!r}: give how many, such as 2, or how many at least and at most, 2..4")


def _path(name: str) -> Path:
    return Path(name).expanduser()


def _keys(name: str) -> frozenset[str]:
    file = _path(name)
    try:
        lines = file.read_text("utf-8-sig").splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the keys in {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is no text in UTF-8: write a key in each line") from error
    keys = frozenset(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"{file} has no key: write one in each line")
    return keys


_NUMBER: Final = (int, float)
OF_MODEL: Final[Mapping[str, Option]] = {
    "context": Option(int, 1),
    "slots": Option(int, 1, 64),
    "queue": Option(int, 0, 1 << 20),
    "cache": Option(str, choices=("f16", "q8_0"), field="q8", made=lambda kind: kind == "q8_0"),
    "same_answer": Option(bool, field="same"),
    "deadline": Option(_NUMBER, 0),
}
"""What may be told of one model: a `Wanted`."""
OF_SERVER: Final[Mapping[str, Option]] = {
    "models": Option(list),
    "host": Option(str),
    "port": Option(int, 0, 65535),
    "memory": Option(_NUMBER, 0, 1 << 20, made=lambda gib: int(gib * (1 << 30))),
    "keep_alive": Option(_NUMBER, made=lambda seconds: seconds if seconds >= 0 else math.inf),
    "api_key_file": Option(str, field="keys", made=_keys),
    "cors": Option(list),
    "tls_cert": Option(str, made=_path),
    "tls_key": Option(str, made=_path),
    "max_body": Option(_NUMBER, 0, 1 << 20, field="most_body", made=lambda mib: int(mib * (1 << 20))),
    "replicas": Option((int, str), 1, 1 << 10, made=_bounds),
    "ray": Option(str),
    "grace": Option(_NUMBER, 0, 1 << 20),
    "log": Option(str, choices=("text", "json", "off")),
}
OPTIONS: Final[Mapping[str, Option]] = {**OF_MODEL, **OF_SERVER}
"""All options, by their names in the file. `memory` is in GiB, `max_body` in MiB."""


def _read(file: Path) -> dict[str, Any]:
    try:
        return {name.replace("-", "_"): value for name, value in tomllib.loads(file.read_text("utf-8-sig")).items()}
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"{file} is not TOML: {error}") from error


def _check(given: Mapping[str, Any], options: Mapping[str, Option], where: str = "") -> None:
    for name, value in given.items():
        if name not in options:
            raise ConfigError(f"there is no option {where}{name}: choose among {', '.join(options)}")
        options[name].check(f"{where}{name}", value)


def _made(given: Mapping[str, Any], options: Mapping[str, Option]) -> dict[str, Any]:
    return {row.field or name: row.made(given[name]) for name, row in options.items() if name in given}
