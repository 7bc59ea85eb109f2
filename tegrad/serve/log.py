"""A server's log on stderr: lines of text, or of JSON with the same fields."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Final

from tegrad.serve.config import LogKind

LOG: Final = logging.getLogger("tegrad.serve")
FIELDS: Final = ("request", "client", "method", "path", "status", "ms")
"""What a line about a request has beside its message."""


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        said = f"{clock} {level}{record.getMessage()}"
        return f"{said}\n{self.formatException(record.exc_info)}" if record.exc_info else said


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        row = {"time": round(record.created, 3), "level": record.levelname.lower(), "message": record.getMessage()}
        row |= {name: getattr(record, name) for name in FIELDS if hasattr(record, name)}
        if record.exc_info:
            row["traceback"] = self.formatException(record.exc_info)
        return json.dumps(row)


def set_up(kind: LogKind) -> None:
    """Have what the server, and uvicorn, log go to stderr. "off" leaves errors."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if kind == "json" else _Text())
    for name, level in (("tegrad.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.ERROR if kind == "off" else level)
