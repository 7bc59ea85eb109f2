"""Mutants of the board's code, and whether the recorded answers alone notice them.

A mutant is one change to the syntax tree of one function: a comparison turned, a constant off by one, `and` for `or`,
a `not` dropped, plus for minus, a statement left out. `python -m tests.orin.nvgpu_oracle.mutants [KIND...]` tries all.
"""

from __future__ import annotations

import ast
import copy
import json
import random
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

from tests.conformance import mutation
from tests.orin.nvgpu_oracle.comparison import difference
from tests.orin.nvgpu_oracle.record import Case, Record

LIMIT_S = 2.0
"""What a case may take; a mutant that never ends is noticed."""

TURNED: Mapping[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
}
"""Operators, and what a mutant has in their place."""

_BUDDY, _SPACE = "tegrad.orin.buddy.BuddyAllocator.", "tegrad.orin.address_space."
_TSG, _CHANNEL, _MODES = "tegrad.orin.tsg.", "tegrad.orin.channel.", "tegrad.orin.preemption."
_TSG_CALLS, _CHANNEL_CALLS = "tegrad.orin.tsg_calls.", "tegrad.orin.channel_calls."

TARGETS: Mapping[str, tuple[str, ...]] = {
    "va": tuple(
        _BUDDY + name
        for name in ("__init__", "allocate", "allocate_fixed", "free", "_largest_order", "_put", "_take", "_split")
    )
    + tuple(_BUDDY + name for name in ("_coalesce", "_is_free", "_carve")),
    "range": ("tegrad.orin.as_file.alloc_as",),
    "area": (
        "tegrad.orin.as_calls.alloc_space",
        *(
            _SPACE + "AddressSpace." + name
            for name in ("reserve", "release", "area_at", "entry_at", "_is_sparse", "_replace_sparse")
        ),
    ),
    "map": tuple(
        _SPACE + "AddressSpace." + name
        for name in ("map", "map_fixed", "_known", "_before", "_overlaps", "unmap", "_add", "_remove")
    ),
    "pte": ("tegrad.orin.page_table.entry", "tegrad.orin.page_table.Entry.word", _SPACE + "Mapping.entry"),
    "group": tuple(_TSG + name for name in ("Tsg.bind", "Tsg.unbind"))
    + tuple(_TSG_CALLS + name for name in ("create_subcontext", "delete_subcontext", "unbind_channel")),
    "numbers": (
        *(_TSG + name for name in ("_free_number", "Tsg.hold", "Tsg.drop")),
        _TSG_CALLS + "TsgFile.release",
        _CHANNEL + "DriverChannel.release",
    ),
    "runlist": (
        "tegrad.orin.runlist.order",
        *(_TSG_CALLS + name for name in ("set_runlist_interleave", "set_timeslice", "get_timeslice")),
        _TSG + "Tsg.schedule",
    ),
    "setup": (_CHANNEL_CALLS + "_ring_checks", _CHANNEL_CALLS + "setup_bind"),
    "fault": (
        *(f"tegrad.orin.recovery.{name}" for name in ("pbdma_fault", "context_switch_timeout")),
        *(_CHANNEL_CALLS + name for name in ("force_reset", "set_timeout", "get_timedout")),
        _TSG + "Tsg.recover",
        _CHANNEL + "DriverChannel.fault",
        _CHANNEL + "Notifier.set",
    ),
    "number": ("tegrad.orin.syncpoint.Syncpoints.reached", "tegrad.orin.semaphore._circular", "tegrad.hw.gpfifo.token"),
    "class": tuple(f"tegrad.orin.engine_classes.{name}" for name in ("known", "draws", "computes")),
    "object": (
        _CHANNEL_CALLS + "alloc_obj_ctx",
        _CHANNEL_CALLS + "set_preemption_mode",
        *(_MODES + name for name in ("object_allowed", "_any", "_runs")),
        *(_MODES + "Modes." + name for name in ("begin", "change", "leave", "show", "_new", "_set", "_check_cilp")),
    ),
}
"""The functions that decide a kind's answers."""


@dataclass(frozen=True)
class Mutant:
    """One change: the function, the number of the node in its tree, and which change of that node."""

    target: str
    node: int
    change: str
    source: str
    """The line as it was, for people."""

    def __str__(self) -> str:
        return f"{self.target}: {self.change} in `{self.source}`"


def _nodes(definition: ast.FunctionDef) -> list[ast.AST]:
    """A function's nodes in a fixed order, without those of its signature, its docstrings and its annotations."""
    left_out = {
        id(inner)
        for node in ast.walk(definition)
        if isinstance(node, ast.AnnAssign)
        for inner in ast.walk(node.annotation)
    }
    return [node for statement in definition.body for node in ast.walk(statement) if id(node) not in left_out]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _changes(node: ast.AST) -> Iterator[str]:
    """The names of the changes that a node allows."""
    if isinstance(node, ast.Compare):
        yield from (f"turn {i}" for i, operator in enumerate(node.ops) if type(operator) in TURNED)
    elif isinstance(node, (ast.BoolOp, ast.BinOp)) and type(node.op) in TURNED:
        yield "turn"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "no not"
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        yield from ("one more", "one less")
    elif isinstance(node, ast.stmt) and not _is_text(node) and not isinstance(node, (ast.Pass, ast.Return)):
        yield "leave out"


def _changed(definition: ast.FunctionDef, number: int, change: str) -> ast.FunctionDef:
    """The function with one change made."""
    made = copy.deepcopy(definition)
    node = _nodes(made)[number]
    if change == "leave out":
        for parent in ast.walk(made):
            for name in ("body", "orelse"):
                statements = getattr(parent, name, None)
                if isinstance(statements, list) and node in statements:
                    statements[statements.index(node)] = ast.copy_location(ast.Pass(), node)
    elif isinstance(node, ast.Compare):
        at = int(change.split()[1])
        node.ops[at] = TURNED[type(node.ops[at])]()  # type: ignore[assignment]
    elif isinstance(node, (ast.BoolOp, ast.BinOp)):
        node.op = TURNED[type(node.op)]()  # type: ignore[assignment]
    elif isinstance(node, ast.UnaryOp):
        node.op, node.operand = ast.Not(), ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Constant):
        node.value += 1 if change == "one more" else -1
    return made


def _tree(target: str) -> ast.FunctionDef:
    _, found = mutation.resolve(target, load=True)
    return mutation._definition(mutation._source(mutation._function(found)))


def mutants(kind: str) -> list[Mutant]:
    """Every mutant of the functions of a kind, but for those that no answer can show."""
    made = []
    for target in TARGETS[kind]:
        for number, node in enumerate(_nodes(_tree(target))):
            for change in _changes(node):
                made.append(Mutant(target, number, change, ast.unparse(node).splitlines()[0]))
    return [mutant for mutant in made if not equivalent(mutant)]


def equivalent(mutant: Mutant) -> str:
    """Why no answer of the oracle's can show a mutant; "" where one should."""
    for target, text, change, reason in EQUIVALENT:
        if mutant.target.endswith(target) and re.search(text, mutant.source) and re.search(change, mutant.change):
            return reason
    return ""


_TOLD = "what the GPU process is told is no answer; tests/orin/driver looks at it"
_MEMORY = "references to host memory are no answer; tests/orin/driver counts them"
_STUCK = "work that hangs in the hardware, which the oracle has not"
_LINUX = "a check of os/linux, which the oracle has not"
_SHARED = "sharing a TSG is os/linux's matter"

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    ("", r"\.log\.|^log\.", "leave out", "log lines are no answer"),
    ("pbdma_fault", r"^for name in|^if event.intr_0:|^if acquire:", "leave out", "log lines are no answer"),
    ("DriverChannel.fault", r"^self.notifier is not None$", "turn", "what it returns is for the log"),
    ("context_switch_timeout", r"^if tsg is None:", "leave out", "a group that is gone by then"),
    ("set_timeslice", r"schedule\(\)", "leave out", _TOLD),
    ("", r"\.wake\(\)", "leave out", "nobody waits in a case"),
    ("", r"tell_gpu\('(?!tsg_schedule)", "leave out", _TOLD),
    ("", r"with suppress\(GpuError", "leave out", _TOLD),
    ("", r"^self._clear_ptes|^self._back|give_objects|classes.append", "leave out", _TOLD),
    ("AddressSpace._add", r"pte.read_only", "", _TOLD),
    ("", r"buffer\.drop\(\)|^for piece in area|userd|gpfifo_va|make_context", "", _MEMORY),
    ("DriverChannel.release", r"\bvm\b|syncpoint|set_notifier|driver.channels", "", _MEMORY),
    ("Tsg.drop", r"context", "", _MEMORY),
    ("setup_bind", r"dmabuf|allocated|length|^[08]$|usermode_mmio", "", _LINUX),
    ("AddressSpace.release", r"^mapping.area = None", "", _TOLD),
    ("AddressSpace._remove", r"mapping.area", "leave out", "a mapping that is gone is unmapped in vain"),
    ("Tsg.unbind", r"failed|FORCED_TRIES|TRY_SECONDS|^break|_tear_down|stop\(\)|syncpoint", "", _STUCK),
    ("TsgFile.release", r"instance", "", _SHARED),
    ("BuddyAllocator.__init__", r"end - start|^1$", "turn|one", "the largest order is a bound that no piece reaches"),
    ("allocate_fixed", r"^0$", "one more", "one byte is no multiple of a block, which is asked before"),
    ("_coalesce", r"^assert", "", "an assertion"),
    ("AddressSpace.reserve", r"MAX_SPARSE", "", "a limit of the board's own"),
    ("AddressSpace.reserve", r"^(if sparse|try|self.user.free|raise)", "", "a GPU process that fails"),
    ("AddressSpace.entry_at", r"^1$", "one more", "mappings begin at whole pages"),
    ("AddressSpace._is_sparse", r"first < end", "turn", "a map that begins where zeros end: nothing changes"),
    ("AddressSpace._replace_sparse", r"part\[0\] < part\[1\]", "turn", "an empty range"),
    ("AddressSpace.map", r"^0$", "", "an offset is no part of an emulated entry"),
    ("AddressSpace._remove", r"_by_buffer\[key\]$|_by_buffer\[key\]:$", "", "an empty table is as good as none"),
    ("create_subcontext", r"require\(address_space\)|^raise", "", _LINUX),
    ("create_subcontext", r"^1$", "one less", "veid 0 is tried at the end anyway"),
)
"""Function, pattern of the line, pattern of the change, reason."""


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """The board with a mutant in it."""
    _, found = mutation.resolve(mutant.target, load=True)
    function = mutation._function(found)
    undo = mutation._swap(function, _changed(_tree(mutant.target), mutant.node, mutant.change))
    try:
        yield
    finally:
        undo()


class _Overdue(Exception):
    """A case takes too long."""


def _overdue(number: int, frame: FrameType | None) -> None:
    raise _Overdue


def noticed(mutant: Mutant, cases: Iterable[Case]) -> bool:
    """Whether a case is answered otherwise, or not at all."""
    before = signal.signal(signal.SIGALRM, _overdue)
    try:
        with applied(mutant):
            for case in cases:
                signal.setitimer(signal.ITIMER_REAL, LIMIT_S, LIMIT_S)  # again: a callback of gc's drops what it raises
                try:
                    if difference(case):
                        return True
                except Exception:
                    return True
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def cases_for(kind: str, record: Record) -> list[Case]:
    """All recorded cases, a kind's own first."""
    others = (case for name, cases in record.kinds.items() if name != kind for case in cases)
    return [*record.kinds[kind], *others]


def drawn(kind: str, count: int = 5) -> list[Mutant]:
    """Some of a kind's mutants, always the same ones for the same code."""
    return random.Random(kind).sample(mutants(kind), count)


def main(kinds: list[str]) -> int:
    """Try every mutant; a line for each that survives, and the counts as JSON."""
    record, tried, alive = Record.load(), 0, 0
    for kind in kinds or TARGETS:
        for mutant in mutants(kind):
            tried += 1
            if not noticed(mutant, cases_for(kind, record)):
                alive += 1
                print(f"{kind}: {mutant}", file=sys.stderr)
    print(json.dumps({"tried": tried, "alive": alive}))
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
