"""What a request may be answered with instead of an answer; each API puts it into its own words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tegrad.errors import TegradError
from tegrad.llm.errors import ContextError, ModelError, NoRoom, OutOfMemory
from tegrad.llm.serial import ClosedError
from tegrad.llm.service import QueueFull
from tegrad.serve.model import UnknownModel

SHOWN: Final = 40
"""Characters of a wrong value that an error shows."""
NO_ROOM_S: Final = 1.0
"""Seconds after which a request that found no room, or a device that failed, is worth another try."""


class Failure(TegradError):
    """A request that is not answered: one line with the cause and the next step."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after = status, code, param, retry_after

    @property
    def headers(self) -> Mapping[str, str]:
        """Of the response, whole seconds."""
        return {} if self.retry_after is None else {"retry-after": str(max(1, round(self.retry_after)))}


def unread(at: str, what: str, model: str) -> Failure:
    """What a model cannot read stands in a message."""
    return Failure(f"{at} is {what[:SHOWN]!r}, and {model} reads text alone: leave it out", param=at)


_STATUS: Final[Mapping[type[Exception], tuple[int, str | None]]] = {
    UnknownModel: (404, "model_not_found"),
    ContextError: (400, "context_length_exceeded"),
    OutOfMemory: (503, "out_of_memory"),
    NoRoom: (429, "rate_limit_exceeded"),
    ClosedError: (503, "server_error"),
    ModelError: (400, None),
    TegradError: (503, "server_error"),
}
"""Status and code by what went wrong; the first that it is."""


def failure(error: Exception) -> Failure:
    """What an error is for the one who asked."""
    if isinstance(error, Failure):
        return error
    if isinstance(error, RecursionError):
        return Failure("the request is nested too deeply: make it flatter")
    for kind, (status, code) in _STATUS.items():
        if isinstance(error, kind):
            wait = NO_ROOM_S if status in (429, 503) else None
            retry_after = error.retry_after if isinstance(error, QueueFull) else wait
            return Failure(str(error), status, code=code, retry_after=retry_after)
    return Failure(f"the server failed ({type(error).__name__}): its log has more", 500, code="server_error")
