"""Loads of memory that the L2 keeps, on processors that reorder loads: what a flag promises is read after the flag."""

from __future__ import annotations

import re

import llvmlite.binding as llvm
import pytest

from tegrad.ptx.check import AccessShape, Checker
from tegrad.ptx.helpers import writer
from tegrad.ptx.ir import Fn, Module
from tegrad.ptx.layout import Access


def _on_arm(module: Module) -> str:
    """The module's assembly for aarch64."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(opt=2)
    return str(target.emit_assembly(llvm.parse_assembly(module.text())))


def _checked(access: Access) -> str:
    module = Module()
    f = Fn(module, "checked", "i64", "ptr frame, i64 low, i64 last")
    frame, low, last = f.args
    check = Checker(f, frame, AccessShape("global", 64, 1, access))
    with f.if_(check.range(low, last)):
        f.ret(f.load("i64", f.op("ptr", 1, f"inttoptr {check.host(low)} to ptr")))
    f.ret(f.const("i64", 0))
    f.finish()
    return _on_arm(module)


def test_a_load_reads_what_a_page_keeps_after_the_pages_flag() -> None:
    flags_then_data = r"\bldrb\b.*\bdmb\s+ishld\b.*\bldr\s+x0"
    assert re.search(flags_then_data, _checked(Access.READ), re.DOTALL)
    assert "dmb" not in _checked(Access.WRITE)


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("tgx_l2_peek", r"\bdmb\s+ishld\b(?!.*\bldr)"),  # nothing is read between it and what the caller reads
        ("tgx_l2_count", r"^(?:(?!\bstrb\b).)*\bdmb\s+ish\b.*\bstrb\b"),  # no state is stored before it
    ],
    ids=["peek", "count"],
)
def test_a_sectors_state_is_stored_after_and_read_before_what_is_kept(name: str, order: str) -> None:
    module = Module()
    writer(name)(module)
    assert re.search(order, _on_arm(module), re.DOTALL)
