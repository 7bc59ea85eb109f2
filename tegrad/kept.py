"""Files that a later run may find: whole and unchanged, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from tegrad.errors import SettingError

DIGEST_BYTES: Final = 32
"""Bytes of SHA-256 before what `keep` writes: a file that was cut short, zeroed or changed counts as none."""
MOST_FILE_BYTES: Final = 256 << 20
"""Bytes up to which a file is read: many times the largest kernel's."""


def cache_folder() -> Path:
    """The folder that a user's caches are in: $XDG_CACHE_HOME, or ~/.cache. SettingError where there is no home."""
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    try:
        return Path.home() / ".cache"
    except RuntimeError:
        raise SettingError("this user has no home folder to keep kernels in: set HOME, or XDG_CACHE_HOME") from None


def find(path: Path) -> bytes | None:
    """What `keep` wrote there; None where there is nothing, or something else."""
    if (data := read(path)) is None:
        return None
    content = data[DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == data[:DIGEST_BYTES] else None


def read(path: Path) -> bytes | None:
    """A file's bytes; None where there is none, and for what need not end: a pipe, a device, a huge file."""
    try:
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            return file.read() if stat.S_ISREG(status.st_mode) and status.st_size <= MOST_FILE_BYTES else None
    except OSError:
        return None


def _without_waiting(path: str, flags: int) -> int:
    """An opener that does not wait for a pipe's writer."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def keep(path: Path, content: bytes, *, lasting: bool = False) -> bool:
    """Write a file for `find`. Returns whether that worked, since a cache that cannot be written is no error.

    `lasting` waits until the disk has it, which takes milliseconds: for what takes much longer to make.
    """
    try:
        write_whole(path, hashlib.sha256(content).digest() + content, lasting=lasting)
    except OSError:
        return False
    return True


def write_whole(path: Path, content: bytes, *, lasting: bool = True) -> None:
    """Write a file, and its folder, that appears whole or not at all. OSError; then nothing of it is left."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, part = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as out:
            out.write(content)
            out.flush()
            if lasting:
                os.fsync(out.fileno())
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
