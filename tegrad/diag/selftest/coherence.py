"""Stage 3: the coherence matrix, what each outcome of it says of the memory policy, and the record for that policy."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import tegrad
from tegrad.diag.selftest.child import NEEDS
from tegrad.diag.selftest.matrix import FLAGS, NONE, Seen, fact, look, look_again
from tegrad.diag.selftest.stage import Notes
from tegrad.nv import memory_record
from tegrad.nv.kernel import pick_kernel
from tegrad.nv.memory_record import MemoryRecord

PLAIN, CACHED, SNOOPING, SNOOPING_CACHED = FLAGS
Matrix = Mapping[int, Seen]


@dataclass(frozen=True, slots=True)
class Verdict:
    """An outcome of the matrix: whether it is this one, what it says, and whether cached memory is right."""

    holds: Callable[[Matrix], bool]
    line: str
    right: bool


VERDICTS: Sequence[Verdict] = (
    Verdict(
        lambda seen: not seen[PLAIN].coherent,
        "nothing helps: volatile memory (flags 0) is not coherent here, so tegrad cannot work on this machine yet",
        right=False,
    ),
    Verdict(
        lambda seen: bool(seen[CACHED].refused),
        "volatile memory works for all; cached mappings (0x4) do not work here, so the policy is `volatile`",
        right=False,
    ),
    Verdict(
        lambda seen: seen[CACHED].coherent,
        "volatile memory works for all; cached memory (0x4) is coherent by itself here: "
        "the policy stays `volatile` until `cached` is measured faster, and would then need no flush",
        right=True,
    ),
    Verdict(
        lambda seen: seen[CACHED].right,
        "volatile memory works for all; cached memory (0x4) is right where FLUSH_L2 comes before the CPU's access, as "
        "tegrad does it: the policy stays `volatile` until `cached` is measured faster",
        right=True,
    ),
    Verdict(
        lambda seen: True,
        "volatile memory works for all; cached memory (0x4) is wrong here even after FLUSH_L2, so the policy is "
        "`volatile` and TEGRAD_MEMORY=cached must not be used",
        right=False,
    ),
)
"""The first that holds is the outcome."""


def verdict(seen: Matrix) -> Verdict:
    """The outcome of a matrix."""
    return next(one for one in VERDICTS if one.holds(seen))


def coherence(notes: Notes) -> None:
    """Look at every kind of mapping, say what follows, and keep the record."""
    lacking = NEEDS["compilers"]()
    kernel = pick_kernel()
    seen: dict[int, Seen] = {}
    for flags in FLAGS:
        seen[flags] = look(notes, kernel, flags, kernels=not lacking)
        notes.fact(f"flags {flags:#x}", fact(seen[flags]))
        if flags == PLAIN:
            notes.fact("kernels", "tried" if "kernel" in seen[PLAIN].to_cpu else f"not tried {lacking}".strip())
        if flags == PLAIN and not seen[PLAIN].coherent:
            break  # the results of the others could not be trusted
    else:
        for flags, one in seen.items():
            look_again(notes, kernel, flags, one, kernels=not lacking)
            notes.fact(f"flags {flags:#x}", fact(one))
    found = verdict(seen)
    notes.line(found.line)
    for line in details(seen):
        notes.line(line)
    with notes.step("the record"):
        _keep(notes, found)
    wrong = seen[PLAIN].refused or "; ".join(wrongs(seen[PLAIN]))
    notes.expect(seen[PLAIN].coherent, "volatile memory (flags 0) that CPU and GPU see alike", wrong)


def details(seen: Matrix) -> Iterator[str]:
    """What else the matrix teaches, a sentence each."""
    for flags, one in seen.items():
        name = f"flags {flags:#x}"
        if one.refused:
            yield f"{name}: not to be had ({one.refused})"
            continue
        if one.coherent:
            yield f"{name}: coherent by itself"
            continue
        through, kept = "go through L2 to memory: the CPU sees them at once", "stay in L2: the CPU sees them"
        yield f"{name}: the GPU's stores {_seen(one.to_cpu, through, kept)}"
        anew, old = "sees the CPU's stores at once", "keeps what it has read: it sees the CPU's stores"
        yield f"{name}: the GPU {_seen(one.to_gpu, anew, old)}"
        if one.pushbuffers != [1, 2, 3]:
            ran = " ".join(map(str, one.pushbuffers))
            yield f"{name}: a pushbuffer rewritten at one address ran {ran}; it is read anew {_after([one.anew])}"
        if lost := [what for what, there in one.kept.items() if not there]:
            yield f"{name}: a line that left L2 later overwrote what the CPU had stored: {', '.join(lost)}"


def wrongs(one: Seen) -> Iterator[str]:
    """What is not right without a remedy."""
    for what, table in (
        ("the CPU does not see the GPU's stores by", one.to_cpu),
        ("the GPU loads old words by", one.to_gpu),
    ):
        if ways := [way for way, by in table.items() if by.get(NONE) is not True]:
            yield f"{what} {', '.join(ways)}"
    if one.pushbuffers != [1, 2, 3]:
        yield f"rewritten pushbuffers ran {one.pushbuffers}"
    if lost := [what for what, there in one.kept.items() if not there]:
        yield f"the CPU's stores were overwritten: {', '.join(lost)}"


def _seen(ways: Mapping[str, Mapping[str, bool | str]], at_once: str, else_: str) -> str:
    """What is told of stores, by way: that they are seen at once, or else after what."""
    late = [by for by in ways.values() if by.get(NONE) is not True]
    return f"{else_} {_after(late)}" if late else at_once


def _after(tables: Sequence[Mapping[str, bool | str]]) -> str:
    """After which remedies, of those that work in every one of these tables."""
    names = [name for name in tables[0] if all(table.get(name) is True for table in tables)]
    return f"after {' or '.join(names)}" if names else "after nothing that was tried"


def _keep(notes: Notes, found: Verdict) -> None:
    if not (chip := memory_record.chip(notes.board)):
        notes.line("no record is kept: this machine is no Jetson")
        return
    record = MemoryRecord(
        chip,
        platform.release(),
        tegrad.__version__,
        board=notes.board,
        right=found.right,
        faster=None,
        date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        why=found.line,
    )
    try:
        notes.fact("record", str(memory_record.store(record)))
    except OSError as error:
        notes.line(f"no record is kept: {error}")
    if notes.board:
        notes.line("the record is a board's, and decides for no device")
