"""What strace prints, as system calls: `strace -f -y -v -e trace=openat,ioctl,mmap,munmap,close`, or others."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from typing import Any

from tegrad.diag.trace.raw import DMA_BUF_SYNC, Raw
from tegrad.uapi import kernel

LINE = re.compile(
    r"(?:\[pid +(?P<pid>\d+)(?:<[^>]*>)?\] |(?P<alone>\d+)(?:<[^>]*>)? +)?"
    r"(?:(?P<clock>\d+:\d\d:\d\d(?:\.\d+)?) | *(?P<epoch>\d+\.\d+) )?(?:\[[ \da-f]+\] )*(?P<rest>.*)"
)
"""Process (`-f`; without it there is none; `-Y` names it), time of day (`-t`, `-tt`), since 1970 (`-ttt`) or the last
call (`-r`), numbers (`-i`, `-n`), and the call."""
NOTE = re.compile(r"<(?:char|block) \d+:\d+>(?=>)| /\* .*? \*/")
"""What `-yy` adds to a file, and `-X verbose` to a number."""
CALL = re.compile(r"(\w+)\((.*)\) += (\?|-?\w+)(?:<[^>]*>)?(?: (E[A-Z0-9]+) \(.*?\))?(?: +<([\d.]+)>)?$")
"""Name, arguments, result, errno, seconds (`-T`)."""
RESULT = re.compile(r"= (\d+)<([^>]*)>")
UNFINISHED, RESUMED = " <unfinished ...>", re.compile(r"<\.\.\. \w+ resumed> *")
FD = re.compile(r"(\d+)<([^>]*)>")
"""An fd and its file (`-y`), in which strace writes <, > and quotes as escapes."""
IOC = re.compile(r"_IOC\(([\w|]+), (\w+), (\w+), (\w+)\)")
DIRECTIONS = {"_IOC_NONE": 0, "_IOC_WRITE": 1, "_IOC_READ": 2}
SPLIT = re.compile(r', (?=(?:[^"]*"[^"]*")*[^"]*$)(?![^(]*\))')
"""A comma between arguments: not in a string, nor between parentheses."""

NAMES = {
    "SNDRV_TIMER_IOCTL_TREAD_OLD": 0x40045402,
    "SNDCTL_TMR_STOP": 0x5403,
    "TCSETSW": 0x5403,
    "SNDCTL_TMR_CONTINUE": 0x5404,
    "TCSETSF": 0x5404,
    "TCGETA": 0x5405,
    "HDA_IOCTL_GET_WCAP": 0xC0084812,
    "DMA_BUF_IOCTL_SYNC": DMA_BUF_SYNC,
}
"""A dmabuf's ioctl, and other drivers' names that strace 6.1 gives to requests of ours."""


class Log:
    """A log, line by line: calls that another process interrupted are put together again."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[float, str]] = {}

    def raw(self, line: str) -> Raw | None:
        """The call that ends with this line; None for any other line."""
        found = LINE.match(NOTE.sub("", line.rstrip("\n")))
        assert found is not None
        pid = int(found["pid"] or found["alone"] or 0)
        start, rest = _time(found["clock"], found["epoch"]), found["rest"]
        if rest.endswith(UNFINISHED):
            self._begun[pid] = start, rest.removesuffix(UNFINISHED).rstrip()
            return None
        if resumed := RESUMED.match(rest):
            start, begun = self._begun.pop(pid, (start, ""))
            rest = rest[resumed.end() :]
            rest = f"{begun} {rest.lstrip(', ')}" if begun.endswith(",") else begun + rest
        made = CALL.match(rest)
        if made is None or made[1] not in CALLS:
            return None
        return _raw(pid, start, made, rest)


def _raw(pid: int, start: float, made: re.Match[str], rest: str) -> Raw | None:
    name, text, result, error, seconds = made.groups()
    paths = {int(fd): _file(path) for fd, path in FD.findall(text)}
    words = SPLIT.split(FD.sub(r"\1", text))
    if name in ("openat", "open") and (opened := RESULT.search(rest)):
        paths[int(opened[1])] = _file(opened[2])
    value = None if error or result == "?" else int(result, 0)
    raw = Raw(name, pid, pid, start, float(seconds or 0), {}, value, error or "", paths=paths)
    with suppress(ValueError, IndexError):
        return CALLS[name](raw, words)
    return None


def _open(raw: Raw, words: list[str]) -> Raw:
    path, flags, *_ = words[1:] if raw.name == "openat" else words
    raw.name, raw.arguments = "open", {"path": _string(path)[0].decode(errors="replace"), "flags": _flags(flags, os)}
    return raw


def _ioctl(raw: Raw, words: list[str]) -> Raw:
    raw.arguments, raw.request = {"fd": int(words[0])}, _request(words[1])
    if len(words) > 2 and words[2].startswith('"'):
        raw.before, whole = _string(words[2])
        raw.before = raw.before if whole else b""
    elif len(words) > 2:
        raw.value = _number(words[2])  # ValueError: what strace takes apart ({...}, [...]) is another driver's
    return raw


def _mmap(raw: Raw, words: list[str]) -> Raw:
    addr, size, prot, flags, fd, offset = words
    named = {"prot": _flags(prot, kernel), "flags": _flags(flags, kernel)}
    raw.arguments = {"fd": int(fd), "size": int(size), **named, "addr": _number(addr), "offset": int(offset, 0)}
    return raw


def _munmap(raw: Raw, words: list[str]) -> Raw:
    raw.arguments = {"addr": _number(words[0]), "size": int(words[1], 0)}
    return raw


def _close(raw: Raw, words: list[str]) -> Raw:
    raw.arguments = {"fd": int(words[0])}
    return raw


CALLS = {"openat": _open, "open": _open, "ioctl": _ioctl, "mmap": _mmap, "munmap": _munmap, "close": _close}


def _time(clock: str | None, epoch: str | None) -> float:
    if clock:
        hours, minutes, seconds = clock.split(":")
        return int(hours) * 3600 + int(minutes) * 60 + float(seconds)
    return float(epoch or 0)


def _number(word: str) -> int:
    """An address or a number."""
    return 0 if word == "NULL" else int(word, 0)


def _request(word: str) -> int:
    """A request number: as it is, by its parts, or by the name that strace has for it. ValueError for another name."""
    if parts := IOC.match(word):
        direction = sum(DIRECTIONS[name] if name in DIRECTIONS else int(name, 0) for name in parts[1].split("|"))
        letter, number, size = (int(part, 0) for part in parts.groups()[1:])
        return direction << 30 | size << 16 | letter << 8 | number
    if word.startswith("0x"):
        return int(word.split()[0], 0)
    return next((NAMES[name] for name in word.split(" or ") if name in NAMES), -1)


def _flags(word: str, module: Any) -> int:
    """Flags by name, as far as Python knows them."""
    value = 0
    for name in word.split("|"):
        value |= int(name, 0) if name[:1].isdigit() else getattr(module, name, 0)
    return value


def _file(path: str) -> str:
    return _string(f'"{path}"')[0].decode(errors="replace")


def _string(word: str) -> tuple[bytes, bool]:
    """The bytes between quotes, and whether they are all of them."""
    body, _, cut = word.removeprefix('"').rpartition('"')
    return body.encode("latin-1", "replace").decode("unicode_escape").encode("latin-1", "replace"), not cut
