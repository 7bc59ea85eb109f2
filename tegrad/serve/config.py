"""What a server is told: by the command's options, or by a TOML file with the same names."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
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
        for name, value in given.items():
            _check(name, value, OPTIONS)
        own = {}
        if not isinstance(tables, dict):
            raise ConfigError(f'{file}: models are told of in tables such as [model."name"]')
        for model, table in tables.items():
            if not isinstance(table, dict):
                raise ConfigError(f'{file}: what is told of a model is a table, [model."{model}"]')
            for name, value in table.items():
                _check(name, value, OF_MODEL, f'[model."{model}"] ')
            own[model] = _wanted({**given, **table})
        if (given.get("tls_cert") is None) != (given.get("tls_key") is None):
            raise ConfigError("TLS needs a certificate and its key: give --tls-cert and --tls-key")
        made: dict[str, Any] = {"wanted": _wanted(given), "own": own}
        if (replicas := given.get("replicas")) is not None:
            made["replicas"] = _bounds(str(replicas))
        elif "ray" in given:
            raise ConfigError("a Ray cluster is for replicas: give --replicas N as well")
        names = ("models", "host", "port", "cors", "grace", "log", "ray")
        made |= {name: given[name] for name in names if name in given}
        made |= {name: Path(given[name]).expanduser() for name in ("tls_cert", "tls_key") if name in given}
        if "memory" in given:
            made["memory"] = int(given["memory"] * (1 << 30))
        if "keep_alive" in given:
            made["keep_alive"] = given["keep_alive"] if given["keep_alive"] >= 0 else math.inf
        if "max_body" in given:
            made["most_body"] = int(given["max_body"] * (1 << 20))
        if "api_key_file" in given:
            made["keys"] = _keys(Path(given["api_key_file"]).expanduser())
        return cls(**made)

    @property
    def local(self) -> bool:
        """Whether only this machine reaches the server."""
        return self.host in LOOPBACK


_Rule: TypeAlias = tuple[type | tuple[type, ...], float, float]
"""A value's type, and for numbers the least and the largest."""
_ANY: Final = (-math.inf, math.inf)
OF_MODEL: Final[Mapping[str, _Rule]] = {
    "context": (int, 1, math.inf),
    "slots": (int, 1, 64),
    "queue": (int, 0, 1 << 20),
    "cache": (str, *_ANY),
    "same_answer": (bool, *_ANY),
    "deadline": ((int, float), 0, math.inf),
}
"""What may be told of one model."""
OPTIONS: Final[Mapping[str, _Rule]] = {
    **OF_MODEL,
    "models": (list, *_ANY),
    "host": (str, *_ANY),
    "port": (int, 0, 65535),
    "memory": ((int, float), 0, 1 << 20),
    "keep_alive": ((int, float), *_ANY),
    "api_key_file": (str, *_ANY),
    "cors": (list, *_ANY),
    "tls_cert": (str, *_ANY),
    "tls_key": (str, *_ANY),
    "max_body": ((int, float), 0, 1 << 20),
    "replicas": ((int, str), 1, 1 << 10),
    "ray": (str, *_ANY),
    "grace": ((int, float), 0, 1 << 20),
    "log": (str, *_ANY),
}
"""All options, by their names in the file. `memory` is in GiB, `max_body` in MiB."""
CHOICES: Final = {"cache": ("f16", "q8_0"), "log": ("text", "json", "off")}


def _read(file: Path) -> dict[str, Any]:
    try:
        return {name.replace("-", "_"): value for name, value in tomllib.loads(file.read_text("utf-8-sig")).items()}
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError(f"{file} is not TOML: {error}") from error


def _check(name: str, value: Any, rules: Mapping[str, _Rule], where: str = "") -> None:
    if name not in rules:
        raise ConfigError(f"there is no option {where}{name}: choose among {', '.join(rules)}")
    kind, least, largest = rules[name]
    fits = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
    if fits and isinstance(value, list):
        fits = all(isinstance(entry, str) for entry in value)
    if fits and isinstance(value, int | float):
        fits = least <= value <= largest
    if not fits or value not in CHOICES.get(name, (value,)):
        what = " or ".join(CHOICES[name]) if name in CHOICES else _said(kind, least, largest)
        raise ConfigError(f"{where}{name} = {value!r}: give {what}")


def _said(kind: type | tuple[type, ...], least: float, largest: float) -> str:
    names = {str: "a text", bool: "true or false", list: "a list of texts", int: "a whole number"}
    what = names.get(kind, "a number") if isinstance(kind, type) else "a number"
    bounds = f" from {least:g}" * (least > -math.inf) + f" to {largest:g}" * (largest < math.inf)
    return what + bounds


def _wanted(given: Mapping[str, Any]) -> Wanted:
    names = {"context": "context", "slots": "slots", "queue": "queue", "same_answer": "same", "deadline": "deadline"}
    return Wanted(
        q8=given.get("cache") == "q8_0", **{ours: given[name] for name, ours in names.items() if name in given}
    )


def _bounds(text: str) -> Bounds:
    """Of "2", or "2..4"."""
    least, dots, most = text.partition("..")
    try:
        made = Bounds(int(least), int(most if dots else least))
        if 1 <= made.least <= made.most:
            return made
    except ValueError:
        pass
    raise ConfigError(f"replicas = {text!r}: give how many, such as 2, or how many at least and at most, 2..4")


def _keys(file: Path) -> frozenset[str]:
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
