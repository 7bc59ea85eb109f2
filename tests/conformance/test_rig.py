"""The rig of a rule judges what it should, and gives back what it made, whatever happens."""

from __future__ import annotations

import errno
import json
import os
import time
from pathlib import Path

import pytest
from mutant_board import MutableBoard
from mutation import Edit

from tegrad.conformance import all_rules
from tegrad.conformance import run as run_module
from tegrad.conformance.engine import Gpu
from tegrad.conformance.process import Peer
from tegrad.conformance.report import document
from tegrad.conformance.rig import Rig, request
from tegrad.conformance.rule import Differs, NotApplicable, Rule, chosen, rule
from tegrad.conformance.run import judge, run
from tegrad.uapi.errors import DriverError


def made(check, *, hazardous: bool = False) -> Rule:
    return Rule("9.1/x", "9.1", "a rule of a test", check, hazardous)


def everything(rig: Rig) -> None:
    """One of each thing that a rule may make."""
    channel = rig.channel_ready()
    rig.map(channel.vm, rig.buffer(8192).fd)
    rig.mapped(rig.buffer())
    rig.doorbell()
    rig.edge(b"abc")
    rig.child(lambda own, peer: peer.value())


def fails(rig: Rig) -> None:
    everything(rig)
    raise RuntimeError("a bug in a rule")


def hangs(rig: Rig) -> None:
    everything(rig)
    while True:
        time.sleep(1)


def test_a_rule_that_asks_for_a_semaphore_where_none_can_be_is_in_error(board: MutableBoard) -> None:
    """The method leaves out the address's last two bits: another semaphore would be meant."""
    for offset, state in ((4, "holds"), (1, "error"), (2, "error")):

        def check(rig: Rig, offset: int = offset) -> None:
            gpu = Gpu(rig)
            gpu.queue(contexts=()).acquire(gpu.memory().va + offset, 0, 0).done()

        outcome = board.judge(made(check))
        assert outcome.state == state
        assert ("bits 31 to 2" in outcome.detail) == (state == "error")
        assert board.sound()


@pytest.mark.parametrize(("check", "state"), [(everything, "holds"), (fails, "error"), (hangs, "error")])
def test_everything_is_released(board: MutableBoard, check, state: str) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    board.judge(made(lambda rig: None))
    before = len(Path("/proc/self/maps").read_text().splitlines())
    outcome = judge(made(check), board.kernel, limit=1.5 if check is hangs else 20)
    assert outcome.state == state, outcome
    assert board.sound()
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= before + 2
    assert len(os.listdir("/proc/self/fd")) <= fds + 1  # the session of a first use


def test_a_rule_that_does_not_end_is_reported(board: MutableBoard) -> None:
    outcome = judge(made(lambda rig: time.sleep(60)), board.kernel, limit=0.05)
    assert (outcome.state, outcome.detail) == ("error", "did not end within 0.05 s")


def test_what_a_rule_finds_is_told_apart(board: MutableBoard) -> None:
    table = [
        (lambda rig: rig.refuses(errno.EINVAL, rig.nvmap, "NVMAP_CREATE", size=0), "holds"),
        (lambda rig: rig.refuses(errno.ENOMEM, rig.nvmap, "NVMAP_CREATE", size=0), "differs"),
        (lambda rig: rig.refuses(errno.EINVAL, rig.nvmap, "NVMAP_CREATE", size=1), "differs"),
        (lambda rig: rig.refuses((errno.ENOMEM, errno.EINVAL), rig.nvmap, "NVMAP_CREATE", size=0), "holds"),
        (lambda rig: rig.accepts(rig.nvmap, "NVMAP_CREATE", size=0), "differs"),
        (lambda rig: rig.call(rig.nvmap, "NVMAP_CREATE", size=0), "error"),
        (lambda rig: rig.call(rig.nvmap, "NVMAP_CREATE", sise=1), "error"),
        (lambda rig: rig.equal("x", 1, 2), "differs"),
        (lambda rig: rig.check(False, "x", 2), "differs"),
        (lambda rig: rig.need(False, "no such chip"), "not applicable"),
        (lambda rig: rig.raw_refuses(errno.ENOTTY, rig.nvmap, "nvmap", request("NVMAP_CREATE", size=9)), "holds"),
        (lambda rig: rig.raw_refuses(errno.EPERM, rig.nvmap, "nvmap", request("NVMAP_CREATE", size=9)), "differs"),
        (lambda rig: rig.refuses_mmap(errno.EPERM, rig.nvmap, 4096), "holds"),
    ]
    for check, state in table:
        assert judge(made(check), board.kernel).state == state


def test_a_rule_talks_with_its_second_process(board: MutableBoard) -> None:
    def other(own: Rig, peer: Peer) -> object:
        handle, (fd,) = peer.receive()
        own.keep(fd)
        own.refuses(errno.EINVAL, own.nvmap, "NVMAP_ALLOC", handle=handle, numa_nid=-1)
        return own.call(own.nvmap, "NVMAP_FROM_FD", fd=fd).handle

    with Rig(board.kernel) as rig:
        buffer = rig.buffer()
        child = rig.child(other)
        child.peer.send(buffer.handle, buffer.fd)
        assert child.result() > buffer.handle
    assert board.sound()


@pytest.mark.parametrize("kind", [Differs, NotApplicable, RuntimeError])
def test_what_the_second_process_raises_arrives(board: MutableBoard, kind: type[Exception]) -> None:
    def other(own: Rig, peer: Peer) -> object:
        raise kind(*("a", "b")[: 2 if kind is Differs else 1])

    with Rig(board.kernel) as rig, pytest.raises(kind, match="a"):
        rig.child(other).result()


def test_hazardous_rules_run_only_when_asked_for(board: MutableBoard) -> None:
    one = made(lambda rig: None, hazardous=True)
    assert [outcome.state for outcome in run([one], board.kernel)] == ["skipped"]
    assert [outcome.state for outcome in run([one], board.kernel, hazardous=True)] == ["holds"]


def test_a_kernel_log_is_read_from_a_mark(board: MutableBoard) -> None:
    with Rig(board.kernel) as rig:
        mark = rig.log_mark()
        assert rig.log_since(mark) == []
        rig.buffer(flags=1)
        assert "must have a tag" in rig.log_since(mark)[-1]


def test_a_log_that_may_not_be_read_makes_a_rule_not_applicable(board: MutableBoard, monkeypatch) -> None:
    def refuse(path: str, flags: int = 0) -> int:
        raise DriverError("open", errno.EPERM, {"path": path})

    monkeypatch.setattr(board.kernel, "open", refuse)
    outcome = judge(made(lambda rig: rig.check(rig.log_mark() >= 0, "", "")), board.kernel)
    assert (outcome.state, outcome.detail) == ("not applicable", "the kernel log cannot be read (EPERM)")


def test_ids_are_unique_and_sections_are_chosen() -> None:
    all_rules()
    with pytest.raises(ValueError, match="already"):
        rule("2.3", "the same again", name="align-not-power-of-two")(lambda rig: None)
    rules = [Rule(f"{s}/x", s, "", lambda rig: None) for s in ("2.1", "2.10", "20.1", "3.1")]
    assert [one.section for one in chosen(rules, ["2"])] == ["2.1", "2.10"]
    assert [one.section for one in chosen(rules, ["2.1"], ["3.1/x"])] == ["2.1", "3.1"]
    assert chosen(rules) == rules


def test_the_report_says_what_differs_and_on_what(board: MutableBoard) -> None:
    rules = [made(lambda rig: rig.equal("x", 1, 200)), made(lambda rig: None)]
    found = json.loads(json.dumps(document(board.kernel, list(run(rules, board.kernel)), "a command")))
    assert found["counts"] == {"differs": 1, "holds": 1}
    assert found["machine"]["gpu"]["gpc_mask"] == 3
    assert (found["rules"][0]["expected"], found["rules"][0]["seen"]) == ("x 1", "200 (0xc8)")
    assert run_module.LIMIT_S > 1


def test_a_rule_that_makes_the_gpu_fail_must_be_marked(board: MutableBoard) -> None:
    for hazardous, state in ((False, "error"), (True, "holds")):
        assert judge(made(lambda rig: rig.hazard(), hazardous=hazardous), board.kernel).state == state
    assert all(one.hazardous for one in all_rules() if one.section.startswith("7."))


def test_a_driver_that_forgets_an_fd_does_not_cost_standard_input(board: MutableBoard) -> None:
    os.fstat(0)
    board.mutate(Edit("tegrad.orin.nvmap.get_fd", 'call.install("fd",', "print("))
    outcome = board.judge(made(lambda rig: rig.get_fd(rig.handle())))
    board.mutate()
    assert outcome.state == "holds"
    os.fstat(0)
