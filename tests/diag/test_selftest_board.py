"""The stages of `tegrad selftest` on a board: right without a fault, and under a fault each says what is wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from stage_runs import ROWS, Told, always, shared_board

from tegrad.conformance import all_rules
from tegrad.conformance.rig import Rig
from tegrad.diag.selftest import bringup, fences, report, runner
from tegrad.diag.selftest.child import perform
from tegrad.diag.selftest.coherence import details, verdict
from tegrad.diag.selftest.matrix import CLIENT, FLUSH_DIRTY, INVALIDATE, MEM_OPS, UNMAP, MatrixBench, Seen
from tegrad.diag.selftest.stage import Asked, Stage
from tegrad.diag.selftest.stages import STAGES
from tegrad.hw.classes import MemOp
from tegrad.nv import memory_record
from tegrad.orin.client import BoardKernel, board_inject
from tegrad.orin.inject import Injection

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, write

pytestmark = pytest.mark.board

SPEC = "agx-orin-64gb:17GiB"


@pytest.fixture(autouse=True)
def a_board(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", SPEC)
    monkeypatch.delenv("TEGRAD_MEMORY", raising=False)


@contextmanager
def armed(spec: str, *rules: Injection) -> Iterator[None]:
    from tegrad.nv.kernel import pick_kernel

    kernel = pick_kernel()
    kernel.close(kernel.open("/dev/nvmap"))  # starts the board
    board_inject(spec, rules)
    try:
        yield
    finally:
        board_inject(spec, [])


def run(name: str, *rules: Injection, amount: int | None = None, spec: str = SPEC) -> Told:
    """Run a stage in this process, under these faults."""
    pieces: list[Mapping[str, Any]] = []
    row = ROWS[name] if amount is None else replace(ROWS[name], board_amount=amount)
    with armed(spec, *rules):
        perform(row, pieces.append)
    return Told(pieces)


# ---- machine and ioctls


def test_the_machine_is_right_on_a_board() -> None:
    told = run("machine")
    assert told.last == {"outcome": "right"}
    assert told.facts["nodes"]["/dev/host1x-fence"] is True


def test_the_ioctls_are_right_and_give_everything_back() -> None:
    told = run("ioctls")
    assert told.last == {"outcome": "right"}
    assert told.facts["SMs"] == 16


@pytest.mark.parametrize(
    ("call", "step"),
    [
        ("GPU_GET_CHARACTERISTICS", "characteristics"),
        ("NVMAP_ALLOC", "a buffer of 4 KiB: alloc and mmap"),
        ("GPU_ALLOC_AS", "address space"),
        ("AS_MAP_BUFFER_EX", "map and unmap"),
        ("CHANNEL_SETUP_BIND", "TSG and channel, set up and not rung"),
        ("CHANNEL_ALLOC_OBJ_CTX", "engine objects"),
    ],
)
def test_an_ioctl_that_is_refused_is_named_with_its_step(call: str, step: str) -> None:
    told = run("ioctls", Injection(call, errno=errno.EIO, nth=1))
    assert (told.outcome, told.steps[-1]) == ("failed", step)
    assert f"{call}(" in told.last["seen"]
    assert "EIO" in told.last["seen"]


def test_fewer_sms_than_the_chip_has_are_a_fact_and_no_surprise() -> None:
    told = run("ioctls", Injection("GPU_NUM_VSMS", answer={"num_vsms": 3}, nth=1))
    assert (told.outcome, told.facts["SMs"]) == ("right", 3)  # a power mode may gate SMs


# ---- the command


def command(folder: Path, *arguments: str, board: str) -> tuple[int, dict[str, Any], str]:
    """Exit code, report and page of `tegrad selftest`."""
    out = folder / "report.json"
    line = [sys.executable, "-m", "tegrad", "selftest", "--json", "--out", str(out), *arguments]
    # A file, not a pipe: a board lingers after its last client.
    with (folder / "stdout").open("w") as stdout:
        environment = {**os.environ, "TEGRAD_BOARD": board, "XDG_CACHE_HOME": str(folder)}
        code = subprocess.run(line, stdout=stdout, env=environment, timeout=600, check=False).returncode
    report = json.loads(out.read_text())
    assert json.loads((folder / "stdout").read_text()) == report
    return code, report, (folder / "report.md").read_text()


def test_with_all_later_stages_still_report_and_the_report_says_why(tmp_path: Path) -> None:
    with shared_board(f"selftest-{os.getpid()}") as name:
        stages = ("--stage", "machine", "--stage", "ioctls")
        board_inject(name, [Injection("GPU_ALLOC_AS", errno=errno.EIO, nth=1)])
        code, report, page = command(tmp_path, "--all", *stages, board=name)
        board_inject(name, [])
    assert code == 1
    assert [row["state"] for row in report["stages"]] == ["right", "failed"]
    assert report["board"] == name
    failed = report["stages"][1]
    assert failed["step"] == "address space"
    assert failed["means"] in page
    assert failed["next"] in page


# ---- the coherence matrix

L2_BOARDS = {"through": "agx-orin-64gb:19GiB", "back": "agx-orin-64gb:18GiB"}
"""Boards by what their L2 does with stores."""


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where records go; nothing of the user's is touched."""
    monkeypatch.setattr(memory_record, "folder", lambda: tmp_path / "memory")
    return tmp_path / "memory"


def matrix(told: Told, flags: int) -> Mapping[str, Any]:
    return told.facts[f"flags {flags:#x}"]


def helps(answers: Mapping[str, Any]) -> set[str]:
    return {name for name, seen in answers.items() if seen is True}


INVALIDATES = {"FLUSH_L2 (l2_flush, l2_invalidate)", CLIENT, UNMAP, INVALIDATE}
WRITES_BACK = {"FLUSH_L2 (l2_flush)", "FLUSH_L2 (l2_flush, l2_invalidate)", CLIENT, UNMAP, FLUSH_DIRTY}
TO_CPU, TO_GPU = "the CPU sees the GPU's stores", "the GPU sees the CPU's stores"


@pytest.mark.parametrize("mode", ["through", "back"])
def test_the_matrix_is_what_the_boards_l2_does(mode: str, records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_L2", mode)
    monkeypatch.setenv("TEGRAD_BOARD", L2_BOARDS[mode])
    told = run("coherence", spec=L2_BOARDS[mode])
    assert told.last == {"outcome": "right"}
    for flags in (0, 0x200):
        seen = matrix(told, flags)
        assert seen["pushbuffers"] == [1, 2, 3]
        assert f"flags {flags:#x}: coherent by itself" in told.lines
        assert {way: dict(by) for way, by in seen[TO_CPU].items()} == {
            way: {"no flush": True} for way in ("release", "copy engine", "kernel")
        }
    for flags in (0x4, 0x204):
        seen = matrix(told, flags)
        assert seen["pushbuffers"] == [1, 1, 1]
        assert {way: helps(by) for way, by in seen[TO_GPU].items()} == dict.fromkeys(seen[TO_GPU], INVALIDATES)
        assert helps(seen["a pushbuffer is read anew"]) == INVALIDATES
        sees = {"no flush"} if mode == "through" else WRITES_BACK
        assert {way: helps(by) for way, by in seen[TO_CPU].items()} == dict.fromkeys(seen[TO_CPU], sees)
        assert set(seen["the CPU's later stores stay"].values()) == {mode == "through"}
        says = "go through L2 to memory" if mode == "through" else "stay in L2: the CPU sees them after FLUSH_L2"
        assert any(line.startswith(f"flags {flags:#x}: the GPU's stores {says}") for line in told.lines)
    assert "right where FLUSH_L2 comes before" in told.lines[0]
    (record,) = [json.loads(path.read_text()) for path in records.iterdir()]
    assert (record["board"], record["right"], record["faster"]) == (True, True, None)
    assert "decides for no device" in told.lines[-1]


def test_where_flush_l2_is_refused_cached_memory_is_not_right(records: Path) -> None:
    told = run("coherence", always("GPU_FLUSH_L2", errno=errno.EPERM))
    assert told.last == {"outcome": "right"}  # volatile memory works
    assert "TEGRAD_MEMORY=cached must not be used" in told.lines[0]
    assert matrix(told, 4)[TO_GPU]["copy engine"][CLIENT] == "EPERM"
    assert helps(matrix(told, 4)[TO_GPU]["copy engine"]) == {UNMAP, INVALIDATE}
    (record,) = [json.loads(path.read_text()) for path in records.iterdir()]
    assert record["right"] is False


def test_mappings_that_cannot_be_had_fail_the_stage(records: Path) -> None:
    told = run("coherence", always("AS_MAP_BUFFER_EX", errno=errno.EIO))
    assert told.outcome == "failed"
    assert "EIO" in told.last["seen"]
    assert told.lines[0].startswith("nothing helps")


def test_a_driver_that_caches_volatile_memory_is_found(records: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = MatrixBench.__init__
    monkeypatch.setattr(
        MatrixBench, "__init__", lambda bench, rig, flags, kernels: real(bench, rig, flags | 4, kernels)
    )
    told = run("coherence")
    assert told.outcome == "failed"
    assert "the GPU loads old words by copy engine, kernel; rewritten pushbuffers ran [1, 1, 1]" in told.last["seen"]
    assert "flags 0x4" not in told.facts


def seen(to_cpu: set[str], to_gpu: set[str], *, pushed: bool, kept: bool = True) -> Seen:
    names = ("no flush", CLIENT)
    return Seen(
        {"release": {name: name in to_cpu for name in names}},
        {"copy engine": {name: name in to_gpu for name in names}},
        [1, 2, 3] if pushed else [1, 1, 1],
        {"no flush": pushed, CLIENT: pushed or CLIENT in to_gpu},
        {"the word": kept},
    )


FINE = seen({"no flush"}, {"no flush"}, pushed=True)


@pytest.mark.parametrize(
    ("plain", "cached", "line", "right"),
    [
        (seen(set(), {"no flush"}, pushed=True), FINE, "nothing helps", False),
        (Seen(refused="EINVAL"), FINE, "nothing helps", False),
        (FINE, Seen(refused="EINVAL"), "do not work here, so the policy is `volatile`", False),
        (FINE, FINE, "coherent by itself here", True),
        (FINE, seen({CLIENT}, {CLIENT}, pushed=False, kept=False), "right where FLUSH_L2 comes before", True),
        (FINE, seen({"no flush"}, {CLIENT}, pushed=False), "right where FLUSH_L2 comes before", True),
        (FINE, seen({"no flush"}, {"no flush"}, pushed=True, kept=False), "right where FLUSH_L2 comes before", True),
        (FINE, seen({"no flush"}, set(), pushed=False), "must not be used", False),
        (FINE, seen(set(), {CLIENT}, pushed=False), "must not be used", False),
    ],
)
def test_every_outcome_says_which_policy_follows(plain: Seen, cached: Seen, line: str, right: bool) -> None:
    found = verdict({0: plain, 4: cached})
    assert line in found.line
    assert found.right is right


@pytest.mark.parametrize(
    ("cached", "line"),
    [
        (seen({"no flush"}, {"no flush"}, pushed=False), "the GPU sees the CPU's stores at once"),
        (seen({"no flush"}, {CLIENT}, pushed=True), f"keeps what it has read: it sees the CPU's stores after {CLIENT}"),
        (seen({"no flush"}, set(), pushed=True), "it sees the CPU's stores after nothing that was tried"),
        (seen({"no flush"}, set(), pushed=False), "ran 1 1 1; it is read anew after nothing that was tried"),
        (seen(set(), {"no flush"}, pushed=True), "stay in L2: the CPU sees them after nothing that was tried"),
    ],
)
def test_a_store_seen_at_once_and_one_never_seen_are_told_apart(cached: Seen, line: str) -> None:
    assert any(told.endswith(line) for told in details({4: cached}))


# ---- first work, rules, fences


@pytest.mark.parametrize("spec", [SPEC, L2_BOARDS["back"]])
def test_the_engines_do_their_first_work_in_both_modes_of_the_l2(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if spec == L2_BOARDS["back"]:
        monkeypatch.setenv("TEGRAD_L2", "back")
    monkeypatch.setenv("TEGRAD_BOARD", spec)
    told = run("bringup", spec=spec)
    assert told.last == {"outcome": "right"}
    assert told.facts["GPU ns between two releases"] > 0


@pytest.mark.parametrize(("call", "step"), [("GPU_OPEN_TSG", "a channel"), ("CHANNEL_GET_TIMEDOUT", "health")])
def test_first_work_that_fails_names_its_step(call: str, step: str) -> None:
    told = run("bringup", Injection(call, errno=errno.EIO, nth=1))
    assert (told.outcome, told.steps[-1]) == ("failed", step)
    assert f"{call}(" in told.last["seen"]


def test_work_in_cached_memory_of_an_l2_that_keeps_stores_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver that takes no notice of the flags, on a board whose releases then stay in L2."""
    monkeypatch.setenv("TEGRAD_L2", "back")
    monkeypatch.setenv("TEGRAD_BOARD", L2_BOARDS["back"])
    monkeypatch.setattr(bringup, "TIMEOUT_S", 0.3)
    real = Rig.map
    monkeypatch.setattr(Rig, "map", lambda rig, vm, fd, *, flags=0, **more: real(rig, vm, fd, flags=flags | 4, **more))
    told = run("bringup", spec=L2_BOARDS["back"])
    assert (told.outcome, told.last["seen"]) == ("failed", "nothing happened")
    assert told.steps[-1] == "engine objects and windows, and a release after them"


def test_the_rules_hold_and_the_hazardous_ones_are_named() -> None:
    told = run("conformance")
    assert told.last == {"outcome": "right"}
    hazardous = [rule.id for rule in all_rules() if rule.hazardous]
    assert told.facts["hazardous, not run"] == hazardous
    assert f"{len(hazardous)} hazardous rules were not run" in told.lines[0]
    assert not set(hazardous) & set(told.steps)
    assert len({step.split("/")[0] for step in told.steps if step}) > 30  # sections


def test_a_rule_that_differs_is_named_and_the_others_are_judged() -> None:
    told = run("conformance", always("NVMAP_GET_FD", errno=errno.EIO))
    assert told.outcome == "failed"
    assert told.facts["counts"]["holds"] > 0
    first = told.facts["differences"][0]
    assert first["rule"] in told.last["seen"]
    assert any("NVMAP_GET_FD" in line for line in told.lines)


NEVER_MOVES = always("CHANNEL_GET_USER_SYNCPOINT", answer={"syncpoint_id": 900, "syncpoint_max": 0})


def test_a_syncpoint_is_incremented_and_waits_are_woken() -> None:
    told = run("fences", amount=3)
    assert told.last == {"outcome": "right"}
    assert told.facts["fence latency us, median"] > 0
    assert told.facts["CHANNEL_WAIT latency us"] > 0


@pytest.mark.parametrize(
    ("rule", "step", "seen"),
    [
        (NEVER_MOVES, "a fence after the GPU's increment", "nothing in 0.5 s"),
        (always("CHANNEL_GET_USER_SYNCPOINT", answer={"gpu_va": 0}), "the syncpoint", "0: waits will use CHANNEL_WAIT"),
        (always("HOST1X_CREATE_FENCE", errno=errno.EINVAL), "a fence before its increment", "EINVAL"),
        (always("CHANNEL_WAIT", errno=errno.ENOTTY), "CHANNEL_WAIT, which needs no host1x-fence", "ENOTTY"),
    ],
)
def test_an_interrupt_that_is_lost_is_found(
    rule: Injection, step: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fences, "TIMEOUT_S", 0.5)
    told = run("fences", rule, amount=1)
    assert (told.outcome, told.steps[-1]) == ("failed", step)
    assert seen in told.last["seen"]


def test_without_a_fence_node_the_other_wait_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BoardKernel.exists
    monkeypatch.setattr(BoardKernel, "exists", lambda kernel, path: "fence" not in path and real(kernel, path))
    told = run("fences")
    assert told.last == {"outcome": "right"}
    assert "no /dev/host1x-fence" in told.lines[0]
    assert "CHANNEL_WAIT latency us" in told.facts
    assert "no /dev/host1x-fence" in run("machine").lines[0]


@pytest.mark.parametrize("node", ["/dev/nvmap", "/dev/nvgpu/igpu0/ctrl"])
def test_a_missing_node_is_named(node: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, gone = BoardKernel.exists, {node, "/dev/nvhost-ctrl-gpu"}
    monkeypatch.setattr(BoardKernel, "exists", lambda kernel, path: path not in gone and real(kernel, path))
    told = run("machine")
    assert told.outcome == "failed"
    assert node.rsplit("/", 1)[1] in told.last["expected"]


def test_what_is_an_orins_alone_is_not_held_against_another_chip(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "gh100:17GiB")
    assert run("conformance", spec="gh100:17GiB").outcome == "not here"
    assert "no kernel was run" in run("bringup", spec="gh100:17GiB").lines[0]
    told = run("coherence", spec="gh100:17GiB")
    assert told.last == {"outcome": "right"}
    assert set(matrix(told, 4)[TO_CPU]) == {"release", "copy engine"}


# ---- the client, in processes of its own


def test_the_client_runs_and_what_stops_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_board(f"selftest-client-{os.getpid()}") as name:
        monkeypatch.setenv("TEGRAD_BOARD", name)
        found = runner.perform(ROWS["one-liner"])
        assert (found.state, found.facts["sum"]) == ("right", [5, 7, 9])
        found = runner.perform(ROWS["launches"])
        assert found.state == "right"
        assert found.facts["times each ring wrapped"]["gpfifo"] >= 1
        board_inject(name, [always("GPU_OPEN_TSG", errno=errno.ENOTTY)])
        found = runner.perform(ROWS["launches"])
        assert (found.state, found.step) == ("failed", "open")
        assert "L4T r35" in found.seen
        board_inject(name, [always("GPU_FLUSH_L2", errno=errno.EPERM)])
        found = runner.perform(ROWS["kernels"])
        assert (found.state, found.step) == ("failed", "atomics in cached memory")
        assert "GPU_FLUSH_L2(" in found.seen
        assert found.facts["bytes of shared memory of a block"] == 163 << 10
        board_inject(name, [always("CHANNEL_SETUP_BIND", errno=errno.EINVAL)])
        found = runner.perform(ROWS["model"])
        assert (found.state, found.step) == ("failed", "open")
        board_inject(name, [always("HOST1X_CREATE_FENCE", stall=30)])
        found = runner.perform(replace(ROWS["fences"], limit_s=2))
        assert (found.state, found.step) == ("hung", "a fence before its increment")
        board_inject(name, [])
        assert runner.perform(ROWS["kernels"]).state == "right"


@pytest.mark.long
def test_the_shipped_model_writes_the_references_tokens_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    found = runner.perform(ROWS["model"])
    assert (found.state, found.facts["the same tokens both ways"]) == ("right", True)


@pytest.mark.klog_errors("(?i)pbdma|error notifier set to 32")
def test_an_operation_that_kills_the_channel_is_tried_last_and_once(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEM_OPS, INVALIDATE, MemOp.MMU_TLB_INVALIDATE)  # a privileged one
    monkeypatch.setenv("TEGRAD_L2", "through")
    monkeypatch.setenv("TEGRAD_BOARD", L2_BOARDS["through"])
    told = run("coherence", spec=L2_BOARDS["through"])
    assert told.last == {"outcome": "right"}
    said = [by.get(INVALIDATE) for by in matrix(told, 4)[TO_GPU].values()]
    assert "the channel died" in said[0]
    assert said[1:] == [None]
    assert helps(matrix(told, 4)[TO_GPU]["copy engine"]) == INVALIDATES - {INVALIDATE}
    tried = [step for step in told.steps if step]
    first = next(i for i, step in enumerate(tried) if "MEM_OP" in step)
    assert all("MEM_OP" in step or "record" in step for step in tried[first:])


# ---- a fault for each stage


@dataclass(frozen=True)
class Fault:
    """What is wrong with a board: rules of injection, or a patch of this process, where the stage then runs.

    `step` and `seen` are what the stage says of it; `limit_s` ends a stage that hangs.
    """

    step: str
    seen: str
    rules: tuple[Injection, ...] = ()
    patch: Callable[[pytest.MonkeyPatch], None] | None = None
    limit_s: float = 0.0


def no_nvmap(patch: pytest.MonkeyPatch) -> None:
    """A node is missing."""
    real = BoardKernel.exists
    patch.setattr(BoardKernel, "exists", lambda kernel, path: path != "/dev/nvmap" and real(kernel, path))


def refused(call: str, code: int) -> tuple[Injection, ...]:
    return (always(call, errno=code),)


FAULTS: Mapping[str, Fault] = {
    "machine": Fault("nodes", "no such node", patch=no_nvmap),
    "ioctls": Fault("address space", "GPU_ALLOC_AS(", refused("GPU_ALLOC_AS", errno.EIO)),
    "coherence": Fault("", "AS_MAP_BUFFER_EX: EIO", refused("AS_MAP_BUFFER_EX", errno.EIO)),
    "bringup": Fault("health", "CHANNEL_GET_TIMEDOUT(", refused("CHANNEL_GET_TIMEDOUT", errno.EIO)),
    "conformance": Fault("", "that do not", refused("NVMAP_GET_FD", errno.EIO)),
    "fences": Fault(
        "a fence before its increment", "it was still at work", (always("HOST1X_CREATE_FENCE", stall=30),), limit_s=2
    ),
    "one-liner": Fault(
        "import, open, compile, run", "CHANNEL_ALLOC_OBJ_CTX(", refused("CHANNEL_ALLOC_OBJ_CTX", errno.EIO)
    ),
    "launches": Fault("open", "L4T r35", refused("GPU_OPEN_TSG", errno.ENOTTY)),
    "kernels": Fault("atomics in cached memory", "GPU_FLUSH_L2(", refused("GPU_FLUSH_L2", errno.EPERM)),
    "streaming": Fault("open", "AS_MAP_BUFFER_EX", refused("AS_MAP_BUFFER_EX", errno.EIO)),
    "packets": Fault("open", "AS_MAP_BUFFER_EX", refused("AS_MAP_BUFFER_EX", errno.EIO)),
    "preemption": Fault(
        "", "CHANNEL_SET_PREEMPTION_MODE", (always("CHANNEL_SET_PREEMPTION_MODE", errno=errno.EINVAL),)
    ),
    "model": Fault("open", "CHANNEL_SETUP_BIND(", refused("CHANNEL_SETUP_BIND", errno.EINVAL)),
    "beside": Fault(
        "a second process opens the GPU and does a round",
        "in the second process: ",
        (Injection("GPU_OPEN_TSG", errno=errno.EBUSY, nth=2),),
    ),
    "your-model": Fault("open", "AS_ALLOC_SPACE(", refused("AS_ALLOC_SPACE", errno.ENOMEM)),
}
"""For each stage one under which it fails; the tests above have more."""


def test_every_stage_has_a_fault_in_the_table() -> None:
    assert set(FAULTS) == {stage.name for stage in STAGES}


CHILD_WITH = """
import sys
from tegrad import models
models.SMALL = sys.argv[1]
from tegrad.diag.selftest.child import main
given, chosen, file = sys.argv[-3:]
main(chosen, file, given)
"""
"""The process of a stage, whose model is a smaller one than the shipped."""


@pytest.mark.klog_errors(".*")
def test_each_stage_fails_under_its_fault_and_with_all_the_later_ones_still_report(
    records: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, popen = runner.perform, subprocess.Popen
    tiny = str(write(tmp_path / "tiny.gguf", Shape(context=256), TYPE.Q6_K))

    def child(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, "-c", CHILD_WITH, tiny, *command[-3:]], **more)

    def perform_under_a_fault(stage: Stage, asked: Asked | None = None) -> runner.Outcome:
        fault = FAULTS[stage.name]
        board_inject(name, fault.rules)
        try:
            if stage.needs or fault.limit_s:
                return real(replace(stage, limit_s=fault.limit_s or stage.limit_s), asked)
            with monkeypatch.context() as patch:
                if fault.patch:
                    fault.patch(patch)
                told: list[str] = []
                perform(stage, lambda piece: told.append(json.dumps(piece)))
            return runner._outcome(stage, "\n".join(told), 0.0)
        finally:
            board_inject(name, [])

    stages = [stage for stage in STAGES if stage.name in FAULTS]
    with shared_board(f"selftest-faults-{os.getpid()}") as name, monkeypatch.context() as patch:
        patch.setenv("TEGRAD_BOARD", name)
        patch.setattr(runner, "perform", perform_under_a_fault)
        patch.setattr(subprocess, "Popen", child)
        found = list(runner.run(stages, go_on=True, asked=Asked(model=tiny)))
    assert [one.stage.name for one in found] == [stage.name for stage in stages]
    about = {"date": "", "versions": {"tegrad": "", "tegrad_sources": ""}, "machine": {"kernel": "", "python": ""}}
    page = report.page(found, about, name)
    for one in found:
        fault = FAULTS[one.stage.name]
        assert one.bad, one
        assert fault.step in one.step, one
        assert fault.seen in one.seen, one
        section = page.partition(f"## {one.stage.name}: ")[2].partition("\n## ")[0]
        assert fault.seen in section
        assert one.stage.means in section
        assert f"**next: {one.next_step or one.stage.next_step}**" in section
