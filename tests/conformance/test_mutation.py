"""Mutants change running code and take it back; whatever names nothing or too much is refused."""

from __future__ import annotations

import os
import signal
import sys
from types import MappingProxyType, ModuleType

import mutant_board
import pytest
from mutant_board import MutableBoard
from mutation import Applied, Edit, Item, Start, Value, pack

from tegrad.conformance import all_rules
from tegrad.conformance.rig import Rig
from tegrad.orin.client import board_status
from tegrad.uapi.errors import DriverError

MODULE = '''
class Base:
    def name(self): return "base"

class Thing(Base):
    limit = 3
    def name(self): return super().name() + "!"
    @property
    def doubled(self): return self.limit * 2

def even(n):
    """Whether n is even."""
    return n % 2 == 0

TABLE = {"even": even}
'''


@pytest.fixture
def module(tmp_path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "mutable_thing.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mutable_thing", raising=False)
    package = ModuleType("mutable_package")
    made = __import__("mutable_thing")
    package.thing = made
    made.VIEW = MappingProxyType(made.TABLE)
    monkeypatch.setitem(sys.modules, "mutable_package", package)
    monkeypatch.setitem(sys.modules, "mutable_package.thing", made)
    return made


@pytest.mark.parametrize(
    ("mutant", "look", "before", "after"),
    [
        (Edit("mutable_package.thing.even", "== 0", "== 1"), lambda m: m.TABLE["even"](4), True, False),
        (Start("mutable_package.thing.even", "n += 1"), lambda m: m.TABLE["even"](4), True, False),
        (Edit("mutable_package.thing.Thing.name", '"!"', '"?"'), lambda m: m.Thing().name(), "base!", "base?"),
        (Edit("mutable_package.thing.Thing.doubled", "* 2", "* 5"), lambda m: m.Thing().doubled, 6, 15),
        (Item("mutable_package.thing.VIEW", '"even"', "bool"), lambda m: m.VIEW["even"](3), False, True),
        (Item("mutable_package.thing.TABLE", '"odd"', "bool"), lambda m: "odd" in m.TABLE, False, True),
        (Item("mutable_package.thing.TABLE", '"even"', ""), lambda m: "even" in m.TABLE, True, False),
        (Value("mutable_package.thing.Thing.limit", "7"), lambda m: m.Thing().limit, 3, 7),
    ],
    ids=["function", "start", "super", "property", "read-only table", "new entry", "no entry", "value"],
)
def test_a_mutant_is_applied_and_taken_back(module: ModuleType, mutant, look, before, after) -> None:
    applied = Applied()
    assert look(module) == before
    assert applied.change(pack(mutant)) == 1
    assert look(module) == after
    applied.change("[]")
    assert look(module) == before


def test_text_that_does_not_occur_once_is_refused(module: ModuleType) -> None:
    for text in ("== 7", "n"):
        with pytest.raises(ValueError, match="times in"):
            Applied().change(pack(Edit("mutable_package.thing.even", text, "1")))


def test_a_mutant_that_names_nothing_is_refused(board: MutableBoard) -> None:
    with pytest.raises(ValueError, match="nothing that the board has loaded"):
        board.mutate(Edit("tegrad.orin.not_there.alloc", "a", "b"))
    with pytest.raises(ValueError, match="occurs 0 times"):
        board.mutate(Edit("tegrad.orin.nvmap.alloc", "this is not in it", "b"))


def test_a_mutant_reaches_the_gpu_process(board: MutableBoard) -> None:
    board.mutate(Edit("tegrad.orin.gpu.Gpu.stats", "return", "return None and"))
    try:
        assert not board.sound()
    finally:
        board.mutate()
    assert board.sound()


def test_a_board_can_be_started_afresh(board: MutableBoard) -> None:
    handle = board.kernel.open("/dev/nvmap")
    assert not board.sound()
    board.restart()
    with Rig(board.kernel) as rig:
        rig.child(lambda own, peer: own.handle()).result()  # the first to use it is not the last
    assert board.sound()
    board.kernel.close(handle)
    board.kernel.close(board.kernel.open("/dev/nvmap"))


def test_a_mutant_that_ends_the_board_is_followed_by_a_new_one(board: MutableBoard) -> None:
    board.mutate(Start("tegrad.orin.nvmap.create_64", "os._exit(1)"))
    with pytest.raises(DriverError), Rig(board.kernel) as rig:
        rig.handle()
    board.mutate()
    with Rig(board.kernel) as rig:
        assert rig.handle()


def test_a_board_that_died_is_followed_by_a_new_one(board: MutableBoard) -> None:
    os.kill(board_status(board.name)["pids"]["driver"], signal.SIGKILL)
    rule = all_rules()[0]
    assert board.judge(rule).state == "error"
    assert not board.sound()
    board.ready()
    assert board.judge(rule).state == "holds"
    assert board.sound()


def test_a_board_that_does_not_answer_is_followed_by_a_new_one(
    board: MutableBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutant_board, "ANSWER_S", 0.2)
    pid = board_status(board.name)["pids"]["driver"]
    os.kill(pid, signal.SIGSTOP)
    assert not board.sound()
    board.restart()
    monkeypatch.undo()
    assert board.sound()
    assert board_status(board.name)["pids"]["driver"] != pid


def test_a_release_that_fails_is_logged_and_others_are_served(board: MutableBoard) -> None:
    board.mutate(Edit("tegrad.orin.nodes.SchedFile.release", "= False", "= False\n    raise RuntimeError('a bug')"))
    with Rig(board.kernel) as rig:
        rig.open("/dev/nvgpu/igpu0/sched")
    board.mutate()
    assert board.sound()
    assert any("a bug" in line for line in board.log())
