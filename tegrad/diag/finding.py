"""What a check of the doctor's says about one thing."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: `missing` stops something from working, `warn` only limits it."""

    name: str
    state: Literal["ok", "warn", "missing"]
    detail: str
    remedy: str = ""
