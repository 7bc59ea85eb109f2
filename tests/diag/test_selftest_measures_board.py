"""The stages of `tegrad selftest` that measure: streaming, packets between CTAs, preemption; and a board's faults."""

from __future__ import annotations

import errno
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from stage_runs import ROWS, Told, always, shared_board

import tegrad
from tegrad.bench.gpu import opened
from tegrad.diag.selftest import packets, preemption, runner, streaming
from tegrad.diag.selftest.child import perform
from tegrad.nv import memory_record, probes, turns
from tegrad.nv.compilers import cache_dir
from tegrad.nv.memory_record import MemoryRecord
from tegrad.nv.probes import CACHED, OWN, VOLATILE, Handover, Rates, WrongResult
from tegrad.nv.turns import Turns
from tegrad.orin.client import board_inject
from tegrad.orin.inject import Injection
from tegrad.ptx.jit import default_cache_dir

BOARD = "agx-orin-64gb:19GiB"
RECORD = MemoryRecord(
    memory_record.EMULATED, platform.release(), tegrad.__version__, board=True, right=True, faster=None, date="", why=""
)


@pytest.fixture(autouse=True)
def caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Records of this test's own, and everybody's compiled kernels."""
    (tmp_path / "tegrad").mkdir()
    for kept in (cache_dir(), default_cache_dir()):
        kept.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tegrad" / kept.name).symlink_to(kept)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("TEGRAD_MEMORY", raising=False)


@pytest.fixture
def on_a_board(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TEGRAD_BOARD", BOARD), ("DEV", "NV"), ("HCQDEV_WAIT_TIMEOUT_MS", "60000")):
        monkeypatch.setenv(name, value)


def run(name: str) -> Told:
    pieces: list[Mapping[str, Any]] = []
    perform(ROWS[name], pieces.append)
    return Told(pieces)


# ---- as commands, in processes of their own


@pytest.mark.board
def test_both_kinds_of_memory_are_measured_and_what_stops_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    path = memory_record.store(RECORD)
    with shared_board(f"selftest-measures-{os.getpid()}") as name:
        monkeypatch.setenv("TEGRAD_BOARD", name)
        found = runner.perform(ROWS["streaming"])
        assert (found.state, found.seen) == ("right", "")
        for kind in (VOLATILE, CACHED):
            assert min(found.facts[f"{kind}: GB/s"].values()) > 0
        assert "decides for no device" in "".join(found.lines)
        won = json.loads(path.read_text())["faster"]
        assert found.facts["recorded"] == {"faster": won}
        assert found.lines[-1] == streaming.FOLLOWS[True, won]
        found = runner.perform(ROWS["packets"])
        assert (found.state, found.seen) == ("right", "")
        for ctas in (2, 16):
            assert found.facts[f"volatile, {ctas} CTAs"]["sms"] == ctas
        record = json.loads(path.read_text())
        told = {
            f"{kind}_packets": "one launch suits" in line
            for kind, line in zip((VOLATILE, CACHED), found.lines, strict=False)
        }
        assert told == found.facts["recorded"]
        assert told == {key: record[key] for key in told}
        assert record["faster"] is won
        board_inject(name, [always("AS_MAP_BUFFER_EX", errno=errno.EIO)])
        outcomes = list(runner.run([ROWS[stage] for stage in ("streaming", "packets", "ioctls")], go_on=True))
        assert [(one.state, one.step) for one in outcomes[:2]] == [("failed", "open")] * 2
        assert all("AS_MAP_BUFFER_EX" in one.seen for one in outcomes)  # the later ones report too
        board_inject(name, [])


# ---- streaming


def rates(write: float = 1, read: float = 1, copy: float = 1, again: float = 1) -> Rates:
    return Rates(write, read, copy, again)


@pytest.mark.parametrize(
    ("cached", "won"),
    [
        (rates(), False),
        (rates(again=3), True),
        (rates(read=1.06), True),
        (rates(read=1.04), False),
        (rates(again=3, read=0.99), True),
        (rates(again=3, read=0.97), False),
        (rates(again=0.5), False),
    ],
)
def test_faster_is_a_gain_somewhere_and_a_loss_nowhere(cached: Rates, won: bool) -> None:
    assert streaming.faster(rates(), cached) is won


class Fake:
    """A device of two kinds of memory whose probes come to what a test says."""

    sm_count = 16

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...] = (VOLATILE, CACHED)) -> None:
        monkeypatch.setenv("TEGRAD_BOARD", BOARD)
        monkeypatch.setattr(probes, "device", lambda: self)
        monkeypatch.setattr(probes, "kinds", lambda device: {kind: kind for kind in kinds})


@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("won", [True, False])
def test_each_outcome_of_streaming_says_which_policy_follows(
    right: bool, won: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake(monkeypatch)
    monkeypatch.setattr(probes, "stream", lambda device, kind, *_: rates(again=2 if won and kind == CACHED else 1))
    path = memory_record.store(MemoryRecord(**{**json.loads(memory_record.store(RECORD).read_text()), "right": right}))
    told = run("streaming")
    record = MemoryRecord(**json.loads(path.read_text()))
    assert (record.right, record.faster) == (right, won)
    assert record.cached is (right and won)
    assert ("the policy is `cached`" in told.lines[-1]) is record.cached


def test_without_a_record_streaming_says_what_begins_one(monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch)
    monkeypatch.setattr(probes, "stream", lambda *_: rates())
    told = run("streaming")
    assert told.last == {"outcome": "right"}
    assert "--stage coherence" in told.lines[-1]
    assert memory_record.amend(True, faster=True) is None


@pytest.mark.parametrize("name", ["streaming", "packets"])
def test_a_gpu_with_memory_of_its_own_has_facts_and_no_record(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Fake(monkeypatch, (OWN,))
    monkeypatch.setattr(probes, "stream", lambda *_: rates())
    monkeypatch.setattr(probes, "exchange_us", lambda *_: 2.0)
    monkeypatch.setattr(probes, "handover", lambda *_: QUICK)
    path = memory_record.store(RECORD)
    before = path.read_text()
    assert run(name).last == {"outcome": "right"}
    assert path.read_text() == before


@pytest.mark.board
def test_what_is_read_otherwise_than_written_is_found(on_a_board: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "FILL", probes.FILL.replace("to[i] =", "if (i != 77) to[i] ="))
    with opened() as device, pytest.raises(WrongResult, match="1048576 bytes, read once"):
        probes.stream(device, probes.kinds(device)[VOLATILE], 1 << 20, 1)


# ---- packets

QUICK = Handover(16, 16, torn=0, late=0, lost=0, parts=0, us=1.5)
SLOW = Handover(16, 16, torn=0, late=0, lost=0, parts=0, us=2.5)
TORN = Handover(16, 16, torn=1, late=0, lost=0, parts=0, us=0.0)
PARTS = Handover(16, 16, torn=0, late=0, lost=0, parts=1, us=1.0)


@pytest.mark.parametrize(
    ("volatile", "cached"), [(QUICK, SLOW), (SLOW, QUICK), (TORN, QUICK), (QUICK, TORN), (PARTS, QUICK), (QUICK, PARTS)]
)
def test_each_outcome_of_packets_says_which_plan_follows(
    volatile: Handover, cached: Handover, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fake(monkeypatch)
    came = {VOLATILE: volatile, CACHED: cached}
    monkeypatch.setattr(probes, "exchange_us", lambda *_: 2.0)
    monkeypatch.setattr(probes, "handover", lambda device, kind, *_: came[kind])
    path = memory_record.store(RECORD)
    told = run("packets")
    record = MemoryRecord(**json.loads(path.read_text()))
    assert (record.volatile_packets, record.cached_packets) == (volatile is QUICK, cached is QUICK)
    for kind, line in zip(came, told.lines, strict=False):
        assert line.endswith("a step of one launch suits" if came[kind] is QUICK else "a step is many launches")
    wrong = [kind for kind, found in came.items() if found is TORN]
    assert told.outcome == ("failed" if wrong else "right")
    assert all(f"{kind} memory, 2 CTAs: 1 torn" in told.last["seen"] for kind in wrong)


BY_WORDS = """#define STORE(to, x, y, z, w) do { volatile unsigned *p = (volatile unsigned *)(to); \\
    p[3] = w; for (long long t = clock64(); clock64() - t < 50000;) {} p[0] = x; p[1] = y; p[2] = z; } while (0)"""


@pytest.mark.board
def test_packets_that_are_torn_late_or_lost_are_found(on_a_board: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "PACKET_TIMEOUT_NS", 50_000_000)
    with opened() as device:

        def found(store: str) -> Handover:
            monkeypatch.setattr(probes, "STORE", store)
            return probes.handover(device, probes.kinds(device)[VOLATILE], 2, 8)

        assert found(probes.STORE).right
        assert found(BY_WORDS).torn
        assert found("#define STORE(to, x, y, z, w)").lost
        assert found(BY_WORDS.replace("p[3] = w", "p[3] = w + 2")).late


# ---- preemption


def test_a_moment_that_is_slow_makes_no_long_kernel_short() -> None:
    took = iter([0.001] * 6 + [0.2])  # the last one waited for a CPU

    def run(rounds: int) -> float:
        return next(took, 0.0) or rounds / 1000

    assert turns.rounds_for(1.0, run) == 1000


@pytest.mark.board
@pytest.mark.klog_errors("(?i)ctxsw timeout|preempt timed out")
def test_others_get_their_turn_where_a_mode_preempts(on_a_board: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preemption, "TURN_S", 10.0)  # a busy machine may take a second over one itself
    told = run("preemption")
    assert told.last == {"outcome": "right"}
    assert told.facts["SET_PREEMPTION_MODE"] == {"CILP": "granted", "CTA": "granted", "no preemption": "not asked"}
    assert all(told.facts[mode]["its result holds"] for mode in preemption.MODES)
    assert told.facts["CILP"]["turns of others"] > told.facts["no preemption"]["turns of others"]


@pytest.mark.board
@pytest.mark.klog_errors("(?i)ctxsw timeout|preempt timed out")
def test_a_mode_that_is_refused_or_does_nothing_is_named(on_a_board: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tegrad.nv.kernel import pick_kernel

    monkeypatch.setattr(preemption, "TURN_S", 10.0)  # a busy machine may take a second over one itself
    kernel = pick_kernel()
    kernel.close(kernel.open("/dev/nvmap"))
    board_inject(BOARD, [always("CHANNEL_SET_PREEMPTION_MODE", errno=errno.EINVAL)])
    told = run("preemption")
    board_inject(BOARD, [])
    assert (told.outcome, told.steps[-1]) == ("failed", "SET_PREEMPTION_MODE")
    assert told.last["seen"] == "CHANNEL_SET_PREEMPTION_MODE: EINVAL"
    assert told.facts["no preemption"]["its result holds"]
    board_inject(BOARD, [Injection("CHANNEL_SET_PREEMPTION_MODE", errno=errno.EINVAL, nth=1)])
    told = run("preemption")
    board_inject(BOARD, [])
    assert told.outcome == "right"
    assert told.facts["SET_PREEMPTION_MODE"] == {"CILP": "EINVAL", "CTA": "granted", "no preemption": "not asked"}
    assert any("falls back to CTA" in line for line in told.lines)
    assert perform_later(ROWS["machine"]) == "right"
    monkeypatch.setattr(preemption, "MODES", {preemption.CILP: 0})
    told = run("preemption")
    assert (told.outcome, told.steps[-1]) == ("failed", "others' turns")
    assert "0 turns of others" in told.last["seen"]
    assert sum("tried again" in line for line in told.lines) == preemption.TRIES - 1


def perform_later(stage: Any) -> str:
    pieces: list[Mapping[str, Any]] = []
    perform(stage, pieces.append)
    return str(pieces[-1]["outcome"])


@pytest.mark.parametrize(
    ("mode", "error", "outcome"),
    [
        (preemption.UNSET, preemption.KILLED, "right"),
        (preemption.CTA, preemption.KILLED, "right"),
        (preemption.CTA, "error notifier 31", "failed"),
        (preemption.CILP, preemption.KILLED, "failed"),
        (preemption.CTA, "", "failed"),
    ],
)
def test_only_a_group_that_may_not_give_way_may_be_killed_for_that(
    mode: str, error: str, outcome: str, on_a_board: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = Turns([0.01], 1.0, right=True), Turns([0.01], 1.0, right=False, error=error)
    asked = preemption.MODES[mode]
    monkeypatch.setattr(preemption, "_beside", lambda kernel, flag, seconds: bad if flag == asked else good)
    monkeypatch.setattr(preemption, "pick_kernel", Nodes)
    told = run("preemption")
    assert told.outcome == outcome
    assert any((error or "wrong") in line for line in told.lines)


@pytest.mark.parametrize(
    ("error", "outcome"), [("", "right"), ("GPU fault: error 109; in kernel chain", "right"), ("error 31", "failed")]
)
def test_a_driver_that_sets_no_mode_may_end_a_long_kernel_beside_another_process(
    error: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen on an H200: after 4.5 s, and the other process waited as long."""
    monkeypatch.setattr(preemption, "beside", lambda seconds: Turns([4.47], 4.57, right=not error, error=error))
    monkeypatch.setattr(preemption, "pick_kernel", lambda: Nodes(there=False))
    told = run("preemption")
    assert told.outcome == outcome
    assert any("keep them short" in line for line in told.lines) is ("109" in error)


class Nodes:
    """A kernel that has every node, or none."""

    def __init__(self, there: bool = True) -> None:
        self.there = there

    def exists(self, path: str) -> bool:
        return self.there


def test_the_chain_is_what_its_steps_come_to_one_by_one() -> None:
    for thread in (0, 5, 1023):
        word = thread
        for _ in range(4 * turns.STEPS):
            word = (word * turns.MULTIPLIER + turns.INCREMENT) & turns.M32
        assert turns.chained(thread, 4) == word


@pytest.mark.board
def test_without_modes_two_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU whose driver is no Jetson's; the board stands for both processes' GPU."""
    with shared_board(f"selftest-turns-{os.getpid()}") as name:
        monkeypatch.setenv("TEGRAD_BOARD", name)
        code = (
            "import sys; from tegrad.diag.selftest import preemption; from tegrad.orin.client import BoardKernel;"
            "real = BoardKernel.exists;"
            "BoardKernel.exists = lambda kernel, path: 'ctrl' not in path and real(kernel, path);"
            "from tegrad.diag.selftest.child import main; main('preemption', sys.argv[-1])"
        )
        found = child_of(code, monkeypatch)
        assert (found.state, found.seen) == ("right", "")
        assert found.facts[preemption.OTHERS]["turns of others"] > 0


def child_of(code: str, monkeypatch: pytest.MonkeyPatch) -> runner.Outcome:
    """A stage's outcome where its process runs this code."""
    real = subprocess.Popen

    def popen(command: list[str], **more: Any) -> subprocess.Popen[bytes]:
        return real([command[0], "-c", code, *command[-2:]], **more)

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        return runner.perform(ROWS["preemption"])


def test_a_process_with_the_long_kernel_that_ends_early_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "device", lambda: None)
    monkeypatch.setattr(probes, "load", lambda *_: lambda *_, wait: 0.0)
    monkeypatch.setattr(probes, "buffer", lambda *_: nullcontext())
    monkeypatch.setattr(sys, "executable", "/bin/true")
    with pytest.raises(turns.Ended, match="ended early"):
        turns.beside(0.1)


LONG_KERNEL = """#!{python}
import json, os, time
print("ready", flush=True)
input()
print("running", flush=True)
while not os.path.exists("{end}"):
    time.sleep(0.001)
print(json.dumps(dict(seconds=2.5, right=True, error="")))
"""
"""Stands for the process with the long kernel, which ends when a file is there."""


def test_every_turn_of_the_others_is_timed_to_its_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waited: list[bool] = []
    clock = [0.0]

    def small(word: object, wait: bool = False) -> None:
        waited.append(wait)
        clock[0] += 7.0 if wait else 0.0
        if len(waited) == 6:
            (tmp_path / "end").touch()

    monkeypatch.setattr(probes, "device", lambda: None)
    monkeypatch.setattr(probes, "load", lambda *_: small)
    monkeypatch.setattr(probes, "buffer", lambda *_: nullcontext())
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])
    other = tmp_path / "other"
    other.write_text(LONG_KERNEL.format(python=sys.executable, end=tmp_path / "end"))
    other.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(other))
    found = turns.beside(0.001)
    assert (found.seconds, found.right, found.error) == (2.5, True, "")
    assert len(found.waits) >= 4
    assert set(found.waits) == {7.0}


def test_the_plans_have_as_many_hand_overs_as_launches() -> None:
    assert abs(packets.HANDOVERS - packets.LAUNCHES) <= 2


def test_the_table_of_stages_imports_no_tinygrad() -> None:
    """It may not be installed; and it reads the environment when it is imported, which stages set."""
    code = "import sys, tegrad.diag.selftest.stages; sys.exit('tinygrad' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
