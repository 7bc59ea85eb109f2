"""What a first boot found of this machine's L2, kept so that the memory policy may read it.

`tegrad selftest` writes a record, one for each chip, kernel release and version of tegrad; another kernel or another
tegrad knows nothing again. A record that was made on a board says nothing of a device, and decides for none.
"""

import json
import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import tegrad
from tegrad.uapi.releases import tegra

EMULATED: Final = "emulated"
"""The chip of a record that was made on a board."""


@dataclass(frozen=True, slots=True)
class MemoryRecord:
    """What was found. `right`: cached memory is right with what the client does; `faster`: None if not measured."""

    chip: str
    kernel: str
    tegrad: str
    board: bool
    right: bool
    faster: bool | None
    date: str
    why: str
    """The line of the page that says which policy follows."""

    @property
    def cached(self) -> bool:
        """Whether it lets L2 keep memory: only what was seen right and measured faster."""
        return self.right and self.faster is True


def folder() -> Path:
    """Where records are kept: `tegrad/memory` in the user's cache directory (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tegrad" / "memory"


def chip(board: bool) -> str:
    """What records call the chip of this machine (`tegra234` is Orin); "" where it is no Jetson."""
    return EMULATED if board else tegra()


def path(chip: str, kernel: str, version: str) -> Path:
    """The file of a record."""
    return folder() / f"{chip}_{kernel}_{version}.json"


def store(record: MemoryRecord) -> Path:
    """Keep a record in place of the last one of its key; OSError where it cannot be written."""
    target = path(record.chip, record.kernel, record.tegrad)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(record), indent=1) + "\n")
    temporary.replace(target)
    return target


def of_this_device() -> MemoryRecord | None:
    """The record of this very device, kernel and tegrad; None without one, and for one that a board made."""
    if not (here := tegra()):
        return None
    key = (here, platform.release(), tegrad.__version__)
    with suppress(OSError, ValueError, TypeError):  # one that cannot be read says nothing
        found = MemoryRecord(**json.loads(path(*key).read_text()))
        if (found.chip, found.kernel, found.tegrad) == key and found.board is False:
            return found
    return None
