"""Two traces compared: which calls only one of them has, and which arguments of the others differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import SequenceMatcher
from itertools import zip_longest

from tegrad.diag.trace.phases import name_of
from tegrad.uapi.flags import field_text
from tegrad.uapi.ioctls import BY_NAME
from tegrad.uapi.trace import Call, fd_fields

UNSEEN = frozenset({"exists", "load32"})
"""Calls that only a Tracer records."""
SUBMISSION = "store32"
"""What strace does not see, nor the preload library on a device."""
SAME = {"doorbell_close": "munmap"}
"""Calls that have another name where the doorbell page is any memory."""
NUMBERED = re.compile(r"(^|[._])(handle(64)?|addr|address|at|va|gpu_va|arg|id|token)$|_(addr|va|id|token)$|^h[A-Z]")
"""Fields whose numbers are those of one run: addresses, handles, ids."""
PLACED = ("AS_", "NVGPU32_AS_")
"""Calls whose offsets are addresses, too."""
UNREAD = frozenset({"at", "block"})
"""What a call has in place of its fields where its block was not recorded."""

Key = tuple[str, str, str]


def diff(ours: Iterable[Call], theirs: Iterable[Call]) -> Iterator[str]:
    """Lines for a reader, none where the traces are alike: `-` only in the first, `+` only in the second, `!` in both.

    Processes are compared in the order of their first calls; fds by what they are; addresses, handles and ids not.
    """
    a, b = list(ours), list(theirs)
    both = all(any(call.name == SUBMISSION for call in calls) for calls in (a, b))
    left, right = (_by_process(calls, submissions=both) for calls in (a, b))
    for number, (mine, other) in enumerate(zip_longest(left, right, fillvalue=list[Call]())):
        lines = list(_differences(mine, other))
        if lines and max(len(left), len(right)) > 1:
            yield f"process {number + 1}: {mine[0].pid if mine else 'none'} and {other[0].pid if other else 'none'}"
        yield from lines


def _by_process(calls: Sequence[Call], *, submissions: bool) -> list[list[Call]]:
    found: dict[int, list[Call]] = {}
    for call in calls:
        if call.name not in UNSEEN and (submissions or call.name != SUBMISSION):
            found.setdefault(call.pid, []).append(call)
    return list(found.values())


def _differences(a: Sequence[Call], b: Sequence[Call]) -> Iterator[str]:
    left, right = [_key(call) for call in a], [_key(call) for call in b]
    for tag, first, last, start, end in _aligned(left, right):
        if tag == "equal":
            for i, j in zip(range(first, last), range(start, end), strict=True):
                yield from _fields(a[i], b[j], i + 1, j + 1)
            continue
        yield from (f"- {i + 1}: {_line(a[i])}" for i in range(first, last))
        yield from (f"+ {j + 1}: {_line(b[j])}" for j in range(start, end))


def _aligned(left: Sequence[Key], right: Sequence[Key]) -> Iterator[tuple[str, int, int, int, int]]:
    """difflib's steps from one to the other. What both begin with needs no search: that is long where types repeat."""
    alike = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    yield "equal", 0, alike, 0, alike
    for tag, *ends in SequenceMatcher(None, left[alike:], right[alike:], autojunk=False).get_opcodes():
        first, last, start, end = (alike + at for at in ends)
        yield tag, first, last, start, end


def _key(call: Call) -> Key:
    """What makes two calls the same: type, error, what the file is."""
    fd = call.made().get("result", -1) if call.name == "open" else call.taken().get("fd", -1)
    name = name_of(call)
    return SAME.get(name, name), call.error, call.fds.get(fd, "")


def _fields(a: Call, b: Call, i: int, j: int) -> Iterator[str]:
    """The arguments of two calls of a type that differ, in a line."""
    if UNREAD & (a.arguments.keys() | b.arguments.keys()) or a.name != b.name:
        return
    told = []
    for field in dict.fromkeys((*a.arguments, *b.arguments)):
        mine, other = _shown(a, field), _shown(b, field)
        if mine != other and not _numbered(a.name, field):
            told.append(f"{field}: {mine} | {other}")
    if told:
        yield f"! {i}, {j}: {a.name}: {', '.join(told)}"


def _shown(call: Call, field: str) -> str:
    """An argument for a reader, an fd as what it is; one that a trace leaves out is 0."""
    value = call.arguments.get(field, 0)
    if field in fd_fields(call.name) and isinstance(value, int):
        return call.fds.get(value, "an fd")
    return field_text(call.name, field, value)


def _numbered(name: str, field: str) -> bool:
    row = BY_NAME.get(name)
    if (row and field in row.pointers) or (NUMBERED.search(field) and field not in fd_fields(name)):
        return True
    return name.startswith(PLACED) and field.endswith("offset") and not field.startswith("buffer")


def _line(call: Call) -> str:
    return str(call).rsplit(" [", 1)[0]
