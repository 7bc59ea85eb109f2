"""Another release of tinygrad beside us: every way in says which one to install."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tinygrad

SAID = "tinygrad 99.1 does not fit, tegrad needs 0.14.0: pip install tinygrad==0.14.0"
PROGRAM = "from tinygrad import Tensor; print((Tensor([1, 2]) + 1).tolist())"


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A folder in which tinygrad is the same, and says that it is another release."""
    (tmp_path / "tinygrad").symlink_to(Path(tinygrad.__file__).parent)
    (tmp_path / "tinygrad-99.1.dist-info").mkdir()
    (tmp_path / "tinygrad-99.1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: tinygrad\nVersion: 99.1\n"
    )
    return tmp_path


def python(beside: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name not in ("DEV", "TEGRAD_BOARD", "TEGRAD")}
    path = os.pathsep.join([str(beside), *map(os.path.abspath, sys.path)])
    return subprocess.run(
        [sys.executable, *arguments], env={**own, "PYTHONPATH": path, **variables}, cwd=beside, capture_output=True,
        text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("board", ["", "agx-orin-64gb"])
@pytest.mark.parametrize(
    "command",
    [
        "run hi", "eval --device NV --tokens 1", "bench dependencies", "bench loop", "bench decode decode-1b-q6k-d0",
        "bench quality tiny",
    ],
)  # fmt: skip
def test_a_command_that_needs_it(beside: Path, command: str, board: str) -> None:
    done = python(beside, "-m", "tegrad", *command.split(), TEGRAD_BOARD=board)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "emulated" not in line]
    if "bench" in command and not board:
        assert all(SAID in line or "none is found here" in line for line in lines), done.stderr
    else:
        assert lines == [f"tegrad: {SAID}"]


def test_a_model_on_another_device(beside: Path) -> None:
    done = python(beside, "-m", "tegrad", "run", "hi", DEV="CPU")
    assert (done.returncode, done.stderr) == (1, f"tegrad: {SAID}\n")


def test_the_doctor_and_the_self_test_say_so(beside: Path) -> None:
    assert "tinygrad 99.1" in (said := python(beside, "-m", "tegrad", "doctor").stdout)
    assert "pip install tinygrad==0.14.0" in said
    done = python(beside, "-m", "tegrad", "selftest", "--stage", "model", TEGRAD_BOARD="agx-orin-64gb")
    assert SAID in done.stdout


@pytest.mark.parametrize(
    "command", ["conformance --list", "selftest --list", "board chips", "eval --tokens 1 --documents 1"]
)
def test_a_command_that_does_not_need_it(beside: Path, command: str) -> None:
    done = python(beside, "-m", "tegrad", *command.split())
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "code",
    [
        f"import tegrad; {PROGRAM}",
        f"import tegrad.nv; tegrad.nv.install(); {PROGRAM}",
        "import tegrad; tegrad.record(lambda x: x)",
        "import tegrad.nv.device",
    ],
)
def test_a_program_on_a_board_ends_with_the_sentence(beside: Path, code: str) -> None:
    """Only we could open a Jetson's device: tinygrad's own errors about it would tell nothing."""
    done = python(beside, "-c", code, DEV="NV", TEGRAD_BOARD="agx-orin-64gb")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == f"tegrad.nv.InstallError: {SAID}"
    assert done.stderr.count(SAID) == 1


@pytest.mark.clang
def test_a_program_elsewhere_is_tinygrads(beside: Path) -> None:
    done = python(beside, "-c", f"import tegrad; import tinygrad.runtime.ops_nv; {PROGRAM}", DEV="CPU")
    assert (done.returncode, done.stdout) == (0, "[2, 3]\n")
    assert done.stderr.count(f"tegrad is not active: {SAID}") == 1
