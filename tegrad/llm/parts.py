"""The files that a model lies in: one, or several that llama.cpp's gguf-split made of it, found beside each other.

Part 2 of 3 is NAME-00002-of-00003.gguf. Each part has a header of its own with the values `split.no` (from 0),
`split.count` and `split.tensors.count` (of all parts); all others are in the first part alone.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from tegrad.llm.closing import Closing
from tegrad.llm.errors import GgufError

READ_SIZE: Final = 64 << 20
"""Bytes of one read of tensor data: large enough for a disk's full speed, small enough for smooth progress."""
PART: Final = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")
"""How a part's name ends: its number from 1, and how many there are."""
NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


class File(Closing):
    """An open file of a model. Use as a context manager."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd
        self.size = os.fstat(fd).st_size
        """In bytes."""

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a file for reading; raises GgufError."""
        try:
            mode = os.stat(path).st_mode
            if not (stat.S_ISREG(mode) or stat.S_ISBLK(mode)):  # a pipe would be waited for
                what = "a directory" if stat.S_ISDIR(mode) else "a pipe or a device"
                raise GgufError(f"the model {path} is {what}: give the path of a GGUF file")
            return cls(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            raise GgufError(f"cannot open the model {path}: {error.strerror}; check the path") from error

    def close(self) -> None:
        """Close the file. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`, fewer at the end of the file."""
        return os.pread(self._fd, size, offset)

    def read_into(self, offset: int, target: memoryview, keep: bool) -> None:
        """Fill `target` from `offset`; several threads may. Unless told to `keep` it, the page cache drops it."""
        done = 0
        while done < len(target):
            count = os.preadv(self._fd, [target[done : done + READ_SIZE]], offset + done)
            if count == 0:
                raise GgufError(f"{self.path} became shorter while it was read: download the file again")
            done += count
        if not keep:
            os.posix_fadvise(self._fd, offset, len(target), os.POSIX_FADV_DONTNEED)

    def corrupt(self, what: str) -> GgufError:
        """The error for a file whose contents contradict themselves."""
        return GgufError(f"{self.path} is not a sound GGUF file: {what}; download or convert it again")


@dataclass(frozen=True, slots=True)
class Place:
    """Which of several parts a file is."""

    number: int
    """From 0."""
    count: int
    tensors: int
    """Of all parts together."""

    @classmethod
    def of(cls, file: File, metadata: Mapping[str, object]) -> Place | None:
        """Where a file says that it belongs, None where it is the whole model; raises GgufError."""
        if COUNT not in metadata:
            return None
        values = []
        for key in (NUMBER, COUNT, TENSORS):
            value = metadata.get(key)
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise file.corrupt(f"it is a part of a model, and {key} is no number from 0 on")
            values.append(value)
        number, count, tensors = values
        if number >= max(count, 1):
            raise file.corrupt(f"it is part {number + 1} of {count}")
        return cls(number, count, tensors) if count > 1 else None

    def name(self, stem: str, number: int) -> str:
        """The name of a part's file."""
        return f"{stem}-{number + 1:05}-of-{self.count:05}.gguf"

    def stem(self, file: File) -> str:
        """What the names of all parts begin with; raises GgufError where this one's does not tell."""
        if not file.path.name.endswith(end := self.name("", self.number)):
            raise GgufError(
                f"{file.path} is part {self.number + 1} of {self.count}, but its name does not end in {end}, from "
                "which the others are found: give the parts their names back"
            )
        return file.path.name.removesuffix(end)

    def beside(self, file: File, number: int) -> Path:
        """Another part's path; raises GgufError where it is not there."""
        path = file.path.with_name(self.name(self.stem(file), number))
        if not path.exists():
            raise GgufError(
                f"{file.path} is part {self.number + 1} of {self.count}, and {path.name} is not beside it: "
                "put all parts into one folder"
            )
        return path

    def check_fellow(self, file: File, metadata: Mapping[str, object], number: int) -> None:
        """GgufError for a file that is not the part that its name says, or one of another model."""
        found = Place.of(file, metadata)
        if found != Place(number, self.count, self.tensors):
            said = "a whole model" if found is None else f"part {found.number + 1} of {found.count}"
            if found is not None and (found.number, found.count) == (number, self.count):
                said += f" of a model of {found.tensors} tensors, not {self.tensors}"
            raise GgufError(
                f"{file.path} says of itself that it is {said}: it does not belong there, download all parts again"
            )
