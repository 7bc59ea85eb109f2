"""What a first boot found of this machine's L2, kept so that the memory policy and the choice of a plan may read it.

`tegrad selftest` writes a record, one for each chip, kernel release and version of tegrad; another kernel or another
tegrad knows nothing again. The coherence matrix begins it, later stages add to it. A record that was made on a
board says nothing of a device, and decides for none.
"""

import json
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import tegrad
from tegrad import kept
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
    volatile_packets: bool | None = None
    """Whether packets between CTAs are right in volatile memory, and quicker than launches; None if not measured."""
    cached_packets: bool | None = None
    """The same in cached memory."""

    @property
    def cached(self) -> bool:
        """Whether it lets L2 keep memory: only what was seen right and measured faster."""
        return self.right and self.faster is True

    def one_launch(self, cached: bool) -> bool:
        """Whether it lets a step be one launch, whose CTAs hand packets to each other in memory of this kind."""
        return (self.cached_packets if cached else self.volatile_packets) is True


def folder() -> Path:
    """Where records are kept: `tegrad/memory` in the user's cache directory (XDG_CACHE_HOME)."""
    return kept.cache_folder() / "tegrad" / "memory"


def chip(board: bool) -> str:
    """What records call the chip of this machine (`tegra234` is Orin); "" where it is no Jetson."""
    return EMULATED if board else tegra()


def path(chip: str, kernel: str, version: str) -> Path:
    """The file of a record."""
    return folder() / f"{chip}_{kernel}_{version}.json"


def store(record: MemoryRecord) -> Path:
    """Keep a record in place of the last one of its key; OSError where it cannot be written."""
    target = path(record.chip, record.kernel, record.tegrad)
    kept.write_whole(target, (json.dumps(asdict(record), indent=1) + "\n").encode())
    return target


def amend(board: bool, **found: bool) -> MemoryRecord | None:
    """Add to the record of this machine, kernel and tegrad what was found since; None where there is none of it yet.

    OSError where it cannot be written.
    """
    if (record := _read(chip(board))) is None:
        return None
    record = replace(record, **found)  # type: ignore[arg-type]
    store(record)
    return record


def of_this_device() -> MemoryRecord | None:
    """The record of this very device, kernel and tegrad; None without one, and for one that a board made."""
    found = _read(tegra())
    return None if found is None or found.board is not False else found


def _read(chip: str) -> MemoryRecord | None:
    """A chip's record with this kernel and this tegrad; one that cannot be read says nothing."""
    if not chip:
        return None
    key = (chip, platform.release(), tegrad.__version__)
    with suppress(OSError, ValueError, TypeError):
        found = MemoryRecord(**json.loads(kept.read(path(*key)) or b""))
        if (found.chip, found.kernel, found.tegrad) == key:
            return found
    return None
