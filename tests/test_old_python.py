"""A Python that is too old is told so, with what to do, by make, by setup.py and by the import, before pip fails."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tegrad import _python

ROOT = Path(__file__).resolve().parents[1]
AS_3_10 = (
    "import platform, sys; sys.version_info = (3, 10, 12, 'final', 0); platform.python_version = lambda: '3.10.12'"
)
ADVICE = "tegrad needs Python 3.11 or newer"


def fake(folder: Path, name: str, *, old: bool) -> None:
    """A program that passes for this Python, or for 3.10: it runs `-c CODE` and files; `-m venv` only says so."""
    program = folder / name
    program.write_text(
        f"#!{sys.executable}\nimport os, runpy, sys\n{AS_3_10 if old else ''}\nsys.argv.pop(0)\n"
        f"sys.executable = {str(program)!r}\n"
        "if sys.argv[0] == '-c':\n    exec(sys.argv[1])\n"
        "elif sys.argv[0] == '-m':\n"
        "    print('made by', sys.executable, *sys.argv)\n"
        "    os.makedirs(sys.argv[-1] + '/bin')\n"
        "    [os.symlink('/bin/true', f'{sys.argv[-1]}/bin/{tool}') for tool in ('pip', 'tegrad')]\n"
        "else:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    program.chmod(0o755)


def make(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make run` where the fakes are the only Pythons."""
    (tmp_path / "tegrad").mkdir(exist_ok=True)
    for name in ("Makefile", "pyproject.toml", "tegrad/_python.py"):
        shutil.copy(ROOT / name, tmp_path / name)
    tools = tmp_path / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("sh", "touch"):
        if not (tools / tool).exists():
            (tools / tool).symlink_to(f"/bin/{tool}")
    environment = {"PATH": f"{tmp_path / 'bin'}:{tools}", "HOME": str(tmp_path)}
    command = [shutil.which("make") or "make", "run", *arguments]
    return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    if shutil.which("make") is None:
        pytest.skip("needs make")
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


def test_make_says_what_to_install_where_python3_is_too_old(tmp_path: Path, programs: Path) -> None:
    fake(programs, "python3", old=True)
    done = make(tmp_path)
    assert done.returncode != 0
    assert f"{ADVICE}, and {programs / 'python3'} is 3.10.12" in done.stderr
    assert "uv python install 3.12" in done.stderr
    assert "made by" not in done.stdout


@pytest.mark.parametrize("beside", ["bin/python3.13", "bin/python3.11", ".local/bin/python3.12"])
def test_make_finds_a_newer_python_beside_it(tmp_path: Path, programs: Path, beside: str) -> None:
    fake(programs, "python3", old=True)
    newer = tmp_path / beside
    newer.parent.mkdir(parents=True, exist_ok=True)
    fake(newer.parent, newer.name, old=False)
    done = make(tmp_path)
    assert done.returncode == 0, done.stderr
    assert f"made by {newer} -m venv" in done.stdout
    assert (tmp_path / ".venv/.run").exists()


def test_make_takes_python3_where_it_is_new_enough(tmp_path: Path, programs: Path) -> None:
    for name in ("python3", "python3.13"):
        fake(programs, name, old=False)
    assert f"made by {programs / 'python3'} -m venv" in make(tmp_path).stdout


def test_make_obeys_a_python_that_was_named(tmp_path: Path, programs: Path) -> None:
    fake(programs, "python3", old=False)
    fake(programs, "mine", old=True)
    done = make(tmp_path, f"PYTHON={programs / 'mine'}")
    assert f"{programs / 'mine'} is 3.10.12" in done.stderr


def test_an_environment_of_an_older_python_is_made_anew(tmp_path: Path, programs: Path) -> None:
    fake(programs, "python3", old=False)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    fake(tmp_path / ".venv" / "bin", "python", old=True)
    assert "-m venv --clear .venv" in make(tmp_path).stdout


@pytest.mark.parametrize("what", [f"import runpy; runpy.run_path({str(ROOT / 'setup.py')!r})", "import tegrad"])
def test_setup_and_import_say_it_in_one_sentence(what: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-S", "-c", f"{AS_3_10}; {what}"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/", check=False)
    assert done.returncode == 1
    assert f"{ADVICE}, and {sys.executable} is 3.10.12" in done.stderr
    assert "uv python install" in done.stderr


def test_this_python_has_nothing_to_complain_about() -> None:
    assert _python.complaint() == ""
    assert f'requires-python = ">={".".join(map(str, _python.OLDEST_PYTHON))}"' in (ROOT / "pyproject.toml").read_text()
