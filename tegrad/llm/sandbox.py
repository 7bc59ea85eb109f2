"""The process that runs a model's chat template: jinja2's immutable sandbox between two pipes, with bounds on its cost.

`template` starts it with `main` and knows its protocol; nothing of tegrad is imported here. Requests and answers are a
line of JSON each. The first has the bounds, {"seconds", "patience", "memory"}, and no answer. {"source"} compiles a
template, {"values", "limit"} renders it to so many characters; the answer is {"text"} or {"error", "said"}, of which
the first is a key of `template.REFUSALS`.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from typing import Any, Final

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

ERROR_CHARACTERS: Final = 300
"""How much of an error's text is passed on."""


class Refusal(Exception):
    """The template's own raise_exception."""


class TooLong(Exception):
    """It writes more than the limit."""


class _Generation(Extension):
    """`{% generation %}` marks what the model says, for training; it changes nothing in the text."""

    tags = {"generation"}  # noqa: RUF012, jinja2's own form

    def parse(self, parser: Parser) -> nodes.Node:
        """Its body, with names of its own."""
        scope = nodes.Scope(lineno=next(parser.stream).lineno)
        scope.body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return scope


def compiled(source: str) -> Any:
    """A template with what Hugging Face's transformers offer to one, which is what templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(source)


def rendered(template: Any, values: Mapping[str, Any], limit: int) -> str:
    """A template's text, of at most `limit` characters."""
    pieces, size = [], 0
    for piece in template.generate(values):
        size += len(piece)
        if size > limit:
            raise TooLong
        pieces.append(piece)
    return "".join(pieces)


class Runner:
    """A template, once it is compiled."""

    def __init__(self) -> None:
        self._template: Any = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, str]:
        """The answer to a request: a template can raise anything that its expressions can."""
        try:
            if "source" in request:
                self._template = compiled(request["source"])
                return {"text": ""}
            return {"text": rendered(self._template, request["values"], request["limit"])}
        except TooLong:
            return {"error": "long", "said": ""}
        except Refusal as refusal:
            return {"error": "refused", "said": _words(refusal)}
        except MemoryError:
            return {"error": "memory", "said": ""}
        except RecursionError:
            return {"error": "deep", "said": ""}
        except UnicodeError:
            return {"error": "bytes", "said": ""}
        except Exception as error:
            return {"error": "unsound" if "source" in request else "failed", "said": _words(error)}


def _words(error: Exception) -> str:
    """What an error says, in one short line."""
    try:
        words = str(error)[:ERROR_CHARACTERS] or type(error).__name__
    except Exception:
        words = type(error).__name__
    return " ".join("".join(letter if letter.isprintable() else " " for letter in words).split())


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as Hugging Face's filter: jinja2's own escapes it for HTML, and takes the indent first."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


def _refuse(message: object) -> None:
    raise Refusal(message)


def _bound(memory: int) -> None:
    """Undo what the parent does with signals, and bound this process's own memory."""
    numbers = (signal.SIGALRM, signal.SIGPROF, signal.SIGINT)
    for number in numbers:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = memory if hard == resource.RLIM_INFINITY else min(memory, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer requests until there are no more."""
    requests = sys.stdin.buffer
    bounds = json.loads(requests.readline())
    _bound(bounds["memory"])
    runner = Runner()
    for line in requests:
        # The kernel ends a process that computes for longer, or takes longer because others compute.
        signal.setitimer(signal.ITIMER_PROF, bounds["seconds"])
        signal.setitimer(signal.ITIMER_REAL, bounds["patience"])
        answer = runner.answer(json.loads(line))
        data = json.dumps(answer).encode() + b"\n"
        for timer in (signal.ITIMER_PROF, signal.ITIMER_REAL):
            signal.setitimer(timer, 0)
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
