"""Ways to show a trace: a line a call, JSON lines, a summary by phase, a sequence diagram for Mermaid."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from textwrap import wrap

from tegrad.diag.trace.phases import PHASES, STEADY, by_role, phases, purpose, refusal, submits
from tegrad.uapi.trace import Call
from tegrad.uapi.tracefile import to_json

Lines = Iterator[str]
WIDTH = 110

ALIKE = frozenset({"ctrl", "nvmap", "dmabuf", "fence", "host1x-fence"})
"""What a diagram does not tell apart by fd; nor the files of a desktop's driver, which has its objects by handle."""


def text(calls: Iterable[Call]) -> Lines:
    """A line a call, as they come: process and thread, seconds since the first call, and the call."""
    first = None
    for call in calls:
        first = call.start if first is None else first
        thread = "" if call.thread == call.pid else f"/{call.thread}"
        yield f"{call.pid}{thread} {call.start - first:.6f} {call}"


def json_lines(calls: Iterable[Call]) -> Lines:
    """A JSON object a line, as they come; `tegrad trace decode` and `tegrad trace diff` read them again."""
    return map(to_json, calls)


def summary(calls: Iterable[Call]) -> Lines:
    """How many calls of which type each phase has, and what memory each role has."""
    known = list(calls)
    found = phases(known)
    yield f"{'phase':14} {'calls':>7} {'failed':>7} {'seconds':>10}"
    for phase in PHASES:
        here = [call for one, call in found if one == phase]
        if not here:
            continue
        refused = sum(map(bool, map(refusal, here)))
        yield f"{phase:14} {len(here):7} {refused:7} {sum(call.seconds for call in here):10.6f}"
        counts = Counter(call.name for call in here).most_common()
        rows = wrap(", ".join(f"{name}~{count}" for name, count in counts), WIDTH, break_on_hyphens=False)
        yield from ("    " + row.replace("~", " ") for row in rows)
    yield f"{'all':14} {len(found):7} {sum(bool(refusal(call)) for _, call in found):7}"
    if any(phase == STEADY for phase, _ in found) and not any(map(submits, known)):
        yield "(no submission shows in this trace: the steady state begins after the last channel is set up)"
    yield from _memory(known)


def _memory(calls: Sequence[Call]) -> Lines:
    roles = by_role(calls)
    if roles:
        yield f"\n{'memory':20} {'buffers':>7} {'bytes':>14}  {'nvmap':30} GPU mappings"
    for role, buffers in sorted(roles.items()):
        nvmap, gpu = _counted(buffers.nvmap), _counted(buffers.gpu)
        yield f"{role:20} {buffers.count:7} {buffers.size:14,}  {nvmap:30} {gpu or 'none'}"


def _counted(flags: Counter[str]) -> str:
    return ", ".join(f"{name} x{count}" if count > 1 else name for name, count in flags.most_common())


def diagram(calls: Iterable[Call]) -> Lines:
    """A Mermaid sequence diagram: processes and what they call; a row of calls of one type is one arrow."""
    found = phases(calls)
    steps = [(phase, call, (call.pid, _other(call))) for phase, call in found]
    processes = dict.fromkeys(call.pid for _, call in found)
    others = dict.fromkeys(ends[1] for *_, ends in steps)
    yield "sequenceDiagram"
    yield from (f"    participant P{pid} as process {pid}" for pid in processes)
    yield from (f"    participant {_key(other)} as {other}" for other in others)
    last = None
    for (phase, ends, name, error), some in groupby(steps, lambda s: (s[0], s[2], s[1].name, refusal(s[1]))):
        row = [call for _, call, _ in some]
        if (phase, ends[0]) != last:
            yield f"    Note over P{ends[0]}: {phase}"
            last = phase, ends[0]
        shown = f"{name}({row[0].fields(row[0].arguments)})" if len(row) == 1 else f"{name} x{len(row)}"
        arrow, outcome = ("-x", error) if error else ("->>", row[0].outcome if len(row) == 1 else "ok")
        yield f"    P{ends[0]}{arrow}{_key(ends[1])}: {_clean(f'{shown} = {outcome}')}"


def _other(call: Call) -> str:
    """Whom a call goes to: the file, the doorbell page, memory."""
    if call.name in ("store32", "load32", "doorbell_close"):
        return "doorbell"
    fd = call.made().get("result") if call.name == "open" else call.taken().get("fd")
    if fd is not None:
        what = call.fds.get(fd, "fd")
        return what if what in ALIKE or what.startswith("nvidia") else f"{what} {fd}"
    return purpose(call) if call.name in ("munmap", "msync", "mmap") else "files"


def _key(other: str) -> str:
    return "".join(c if c.isalnum() else "_" for c in f"T_{other}")


def _clean(message: str) -> str:
    """Without what means something to Mermaid."""
    return message.replace(";", ",").replace("#", "no. ").replace("<", "[").replace(">", "]")


VIEWS: dict[str, Callable[[Iterable[Call]], Lines]] = {
    "text": text,
    "json": json_lines,
    "summary": summary,
    "diagram": diagram,
}
