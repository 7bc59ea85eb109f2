"""Files that a later run may find: whole and unchanged, or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from pathlib import Path
from typing import Final

DIGEST: Final = 32
"""Bytes of SHA-256 in front of what `keep` writes: a file that was cut short, zeroed or changed is none."""


def find(path: Path) -> bytes | None:
    """What `keep` wrote there; None where there is nothing, or something else."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[DIGEST:]
    return content if hashlib.sha256(content).digest() == data[:DIGEST] else None


def keep(path: Path, content: bytes, *, lasting: bool = False) -> bool:
    """Write a file for `find`; whether that worked, since a cache that cannot be written is no error.

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
