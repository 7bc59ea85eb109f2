"""The runner of upstream's tests, on a checkout of one small suite."""

import io
import json
import os
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import upstream

from tegrad.bench.measures import MEASURES
from tegrad.bench.record import RecordError
from tegrad.uapi.kernel import LinuxKernel

pytestmark = pytest.mark.long  # a tool of the checkout, run by hand

CONFTEST = """
import os, signal, threading, pytest
@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    timer = threading.Timer(float(os.environ["TEST_TIMEOUT"]), os.kill, args=(os.getpid(), signal.SIGABRT))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
"""

MIXED = """
import os, time, unittest, tinygrad
class TestMixed(unittest.TestCase):
    def test_from_the_wheel(self): assert hasattr(tinygrad, "Tensor") and tinygrad.__file__.startswith(os.getcwd())
    def test_device(self): assert os.environ["DEV"] == "NV:CUDA"
    def test_wrong(self): self.assertEqual(1, 2)
    @unittest.skip("not here")
    def test_skipped(self): pass
    @unittest.expectedFailure
    def test_known(self): assert False
    def test_dies(self): os._exit(9)
    def test_hangs(self): time.sleep(60)
    def test_leaves_the_device_dead(self):
        import sys, types
        dead = types.SimpleNamespace(error_state=RuntimeError("an MMU fault"))
        sys.modules["tegrad.nv.device"] = types.SimpleNamespace(_opened={"NV": dead})
    def test_zz_after(self): pass
"""


def packed(path: Path, body: str) -> Path:
    """An archive as `git archive` makes it: the files, and the commit in a comment."""
    files = {"conftest.py": CONFTEST, "test/test_tiny.py": body, "tinygrad/__init__.py": "raise ImportError('mine')"}
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT, pax_headers={"comment": "c0ffee"}) as tar:
        for name, text in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
    return path


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    source = packed(tmp_path_factory.mktemp("source") / "tests.tar", MIXED)
    return upstream.run(source, "CUDA", ("test_tiny",), jobs=1, test_limit=5)


def test_every_test_is_counted_once(mixed: Any) -> None:
    suite = mixed["suites"]["test_tiny"]
    assert suite["counts"] == {"unfinished": 0, "passed": 3, "xfailed": 1, "skipped": 1, "failed": 4}
    assert "stopped" not in suite
    assert mixed["commit"] == "c0ffee"
    assert mixed["renderer"] == "CUDA"


def test_the_peer_is_cuda_without_us(tmp_path: Path) -> None:
    body = """
import os, sys
def test_device(): assert os.environ["DEV"] == "CUDA:PTX"
def test_slow(): assert os.environ["RUN_SLOW"] == "1"
def test_nothing_of_ours_comes_with_tinygrad(): assert os.environ["TEGRAD"] == "0"
"""
    found = upstream.run(packed(tmp_path / "tests.tar", body), "PTX", ("test_tiny",), jobs=1, peer=True, slow=True)
    assert found["suites"]["test_tiny"]["counts"]["passed"] == 3
    assert found["device"] == upstream.PEER
    assert found["command"].endswith("tinygrad --peer --slow --renderer PTX")


def test_reasons_are_kept(mixed: Any) -> None:
    suite = mixed["suites"]["test_tiny"]
    assert suite["skipped"] == {"TestMixed::test_skipped": "not here"}
    assert "1 != 2" in suite["failed"]["TestMixed::test_wrong"]


def test_a_test_that_passes_and_leaves_the_device_dead_fails(mixed: Any) -> None:
    failed = mixed["suites"]["test_tiny"]["failed"]
    assert "left the device dead: an MMU fault" in failed["TestMixed::test_leaves_the_device_dead"]


def test_a_test_that_passes_and_makes_the_drivers_log_an_error_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["nvgpu: 17000000.gpu x:0 [ERR]  sked exception: esr 0x1", "nvgpu: 17000000.gpu y:0 [INFO]  fine"]

    class Logging(LinuxKernel):
        def open(self, path: str, flags: int = 0) -> int:
            fd = os.memfd_create("kmsg")
            os.write(fd, "".join(f"3,{n},0,-;{line}\n" for n, line in enumerate(lines)).encode())
            os.lseek(fd, 0, os.SEEK_SET)
            return fd

    opened = SimpleNamespace(error_state=None, iface=SimpleNamespace(kernel=Logging()))
    monkeypatch.setitem(sys.modules, "tegrad.nv.device", SimpleNamespace(_opened={"NV": opened}))
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    assert "sked exception" in upstream.aftermath()
    assert upstream.aftermath() == ""  # each line is one test's
    opened.error_state, opened.iface.kernel = "an MMU fault", Logging()
    assert "left the device dead" in upstream.aftermath()
    opened.error_state = None
    assert upstream.aftermath() == ""  # the lines about a fault are the faulting test's
    monkeypatch.delenv("TEGRAD_BOARD")
    lines.append(lines[0])
    assert upstream.aftermath() == ""  # on a real GPU it may be another program's


def test_a_test_that_dies_or_hangs_costs_itself_only(mixed: Any) -> None:
    failed = mixed["suites"]["test_tiny"]["failed"]
    assert "crashed" in failed["TestMixed::test_dies"]
    assert "crashed" in failed["TestMixed::test_hangs"]
    assert "TestMixed::test_zz_after" not in failed


def test_a_suite_that_is_killed_keeps_what_it_had(tmp_path: Path) -> None:
    body = """import os
def test_quick(): pass
def test_fatal():
    while "test_fatal" not in open(os.environ["TEGRAD_UPSTREAM_REPORTS"]).read(): pass
    os.killpg(0, 9)
"""
    source, out = packed(tmp_path / "tests.tar", body), tmp_path / "out.json"
    suite = upstream.run(source, "PTX", ("test_tiny",), jobs=1, out=out)["suites"]["test_tiny"]
    assert suite["counts"]["passed"] == 1
    assert list(suite["unfinished"]) == ["test_fatal"]
    assert "pytest ended with -9" in suite["stopped"]
    assert json.loads(out.read_text())["suites"]["test_tiny"] == suite


def test_a_suite_can_be_run_again_alone(tmp_path: Path) -> None:
    source, out = packed(tmp_path / "tests.tar", "def test_it(): pass\n"), tmp_path / "out.json"
    upstream.run(source, "PTX", ("test_tiny",), jobs=1, out=out)
    earlier = json.loads(out.read_text())
    earlier["suites"] = {"backend/test_ops": {"minutes": 1}, "test_tiny": {}}
    out.write_text(json.dumps(earlier))
    upstream.run(source, "PTX", ("test_tiny",), jobs=1, out=out)
    again = json.loads(out.read_text())["suites"]
    assert list(again) == ["test_tiny", "backend/test_ops"]
    assert again["backend/test_ops"] == {"minutes": 1}
    assert again["test_tiny"]["counts"]["passed"] == 1
    upstream.run(source, "CUDA", ("test_tiny",), jobs=1, out=out)
    assert list(json.loads(out.read_text())["suites"]) == ["test_tiny"]


def test_a_suite_that_outruns_its_limit_is_stopped(tmp_path: Path) -> None:
    source = packed(tmp_path / "tests.tar", "import time\ntime.sleep(600)\n")
    suite = upstream.run(source, "PTX", ("test_tiny",), jobs=1, suite_limit=0.5)["suites"]["test_tiny"]
    assert sum(suite["counts"].values()) == 0
    assert suite["stopped"].startswith("after")


def test_a_suite_that_cannot_be_imported_is_a_failure(tmp_path: Path) -> None:
    source = packed(tmp_path / "tests.tar", "import nothing_of_this_name\n")
    suite = upstream.run(source, "PTX", ("test_tiny",), jobs=1)["suites"]["test_tiny"]
    assert suite["counts"]["failed"] == 1
    assert "nothing_of_this_name" in str(suite["failed"])


def test_a_commit_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"git finds no c0ffee in"):
        upstream.archive(tmp_path, "c0ffee")


@pytest.mark.parametrize("dead", [True, False])
def test_a_test_that_leaves_the_device_dead_does_not_take_the_next_ones_along(
    monkeypatch: pytest.MonkeyPatch, dead: bool
) -> None:
    import tegrad.nv
    from tegrad.nv import device

    reopened: list[str] = []
    monkeypatch.setenv(upstream.REPORTS, "somewhere")
    monkeypatch.setattr(tegrad.nv, "reopen", lambda: reopened.append("NV"))
    monkeypatch.setitem(device._opened, "NV", SimpleNamespace(error_state=RuntimeError() if dead else None))
    upstream.pytest_runtest_logfinish("test_it")
    assert reopened == ["NV"] * dead


def test_a_worker_whose_device_cannot_be_reopened_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    import tegrad.nv
    from tegrad.nv import device

    ended: list[int] = []
    monkeypatch.setenv(upstream.REPORTS, "somewhere")
    monkeypatch.setattr(tegrad.nv, "reopen", lambda: 1 / 0)
    monkeypatch.setattr(upstream.os, "_exit", ended.append)
    monkeypatch.setitem(device._opened, "NV", SimpleNamespace(error_state=RuntimeError()))
    upstream.pytest_runtest_logfinish("test_it")
    assert ended == [1]


def test_figures_are_measured_where_the_tests_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    measure = MEASURES["upstream-test-ops-board-minutes"]
    monkeypatch.delenv(upstream.SOURCE, raising=False)
    assert not measure.ready
    with pytest.raises(RecordError, match="TEGRAD_UPSTREAM must name a checkout"):
        measure.take()
    monkeypatch.setenv(upstream.SOURCE, "/nowhere")
    assert measure.ready
