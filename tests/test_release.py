"""What is published installs and runs: both archives, from a clean copy of the tree, in clean environments.

tests/nv/test_install.py has what activation does once a wheel is installed.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import tegrad

ROOT = Path(__file__).resolve().parents[1]
VERSION = tegrad.__version__
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
EXTRAS = "board,chat,compilers,hub,serve"
KEPT = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "TEGRAD", "TEGRAD_BOARD", "DEV"}
"""Variables that a program of the installed package is not to have from these tests."""

needs_builders = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("build", "twine"))), reason="needs build and twine (extra `dev`)"
)


def output(*command: str | Path, cwd: str | Path = "/", timeout: float = 1800) -> str:
    """What a program prints, run away from the checkout; it has to end with 0."""
    clean = {name: value for name, value in os.environ.items() if name not in KEPT}
    done = subprocess.run(command, env=clean, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout.strip()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that belong to the project, and nothing that was ever built beside them."""
    copy = tmp_path_factory.mktemp("tree")
    listed = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    if shutil.which("git") is None or subprocess.run([*listed[:3], "rev-parse"], capture_output=True).returncode:
        pytest.skip("needs a checkout, and git")
    for name in output(*listed).strip("\0").split("\0"):
        if (ROOT / name).is_file():  # one that is gone is still listed
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="module")
def archives(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it alone."""
    folder = tmp_path_factory.mktemp("dist")
    output(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, tree)
    return folder / f"tegrad-{VERSION}.tar.gz", folder / f"tegrad-{VERSION}-py3-none-any.whl"


def installed(python: str, wheel: Path, folder: Path) -> Path:
    """The `bin` of a new environment of `python` with the wheel, and this environment's dependencies on its path."""
    output(python, "-m", "venv", "--without-pip", folder / "env")
    interpreter = folder / "env" / "bin" / "python"
    site = Path(output(interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    (site / "zz_dependencies.pth").write_text(str(importlib.metadata.distribution("tinygrad").locate_file("")))
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--no-deps", "--no-index"]
    output(*pip, "--force-reinstall", wheel)  # newer pips find the tegrad of this environment good enough
    return interpreter.parent


def interpreter_of(version: str) -> str:
    """A Python of that version on the PATH or among uv's and pyenv's; else the test is skipped."""
    home = Path.home()
    folders = (home / f".pyenv/versions/{version}.*/bin", home / f".local/share/uv/python/cpython-{version}.*/bin")
    kept = [path for folder in folders for path in sorted(home.glob(f"{folder.relative_to(home)}/python{version}"))]
    for python in (shutil.which(f"python{version}"), *map(str, kept)):
        asked = [python or "false", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        if subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() == version:
            return str(python)
    pytest.skip(f"needs Python {version}")


@needs_builders
def test_both_archives_have_the_whole_package_and_nothing_else(tree: Path, archives: tuple[Path, Path]) -> None:
    package = {str(path.relative_to(tree)) for path in (tree / "tegrad").rglob("*") if path.is_file()}
    assert {Path(name).suffix for name in package} >= {".cu", ".cuh", ".c", ".h", ".gguf", ".html", ".js", ".typed"}
    source, wheel = archives
    with zipfile.ZipFile(wheel) as opened:
        files = opened.namelist()
        about = f"tegrad-{VERSION}.dist-info/"
        assert {name for name in files if not name.startswith(about)} == package | {"tegrad.pth"}
        assert f"{about}licenses/LICENSE" in files
        assert opened.read(f"{about}entry_points.txt").decode().split() == [
            "[console_scripts]", "tegrad", "=", "tegrad.__main__:entry"
        ]  # fmt: skip
    with tarfile.open(source) as packed:
        told = {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}
    beside = {"pyproject.toml", "setup.py", "setup.cfg", "tegrad.pth", "MANIFEST.in", "PKG-INFO"}
    read = {"README.md", "CHANGELOG.md", "LICENSE"}
    assert {name for name in told if not name.startswith("tegrad.egg-info/")} == package | beside | read


@needs_builders
def test_an_index_would_take_both_archives(archives: tuple[Path, Path]) -> None:
    assert output(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *archives).count("PASSED") == 2


@needs_builders
@pytest.mark.board
def test_the_wheel_runs_in_a_clean_environment(archives: tuple[Path, Path], tmp_path: Path) -> None:
    bin_ = installed(sys.executable, archives[1], tmp_path)
    where, version = output(bin_ / "python", "-c", "import tegrad as t; print(t.__file__, t.__version__)").split()
    assert tmp_path in Path(where).parents
    assert version == VERSION
    assert output(bin_ / "tegrad", "--version") == f"tegrad {VERSION}"
    told = json.loads(output(bin_ / "tegrad", "doctor", "--json"))
    assert told["runs_on"]
    details = {finding["name"]: finding["detail"] for finding in told["findings"]}
    assert details["python"].endswith(f"tegrad {VERSION}")
    assert details["model"].startswith("shipped model small.gguf")


@needs_builders
@pytest.mark.parametrize("version", PYTHONS)
def test_the_command_starts_on_every_python(version: str, archives: tuple[Path, Path], tmp_path: Path) -> None:
    """With this environment's dependencies, of which those in machine code fit this Python only and are not reached."""
    bin_ = installed(interpreter_of(version), archives[1], tmp_path)
    code = "import sys, tegrad.uapi.structs as t; print(sys.version[:4], type(sys.meta_path[0]).__module__, t.__file__)"
    *told, where = output(bin_ / "python", "-W", "error", "-c", code).split()
    assert (told, tmp_path in Path(where).parents) == ([version, "tegrad._activate"], True)
    assert output(bin_ / "tegrad", "--version") == f"tegrad {VERSION}"
    output(bin_ / "python", "-W", "error", "-m", "compileall", "-q", "-f", Path(where).parents[1])


@needs_builders
@pytest.mark.long
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_and_its_extras_come_from_an_index(version: str, archives: tuple[Path, Path], tmp_path: Path) -> None:
    python = interpreter_of(version)
    env = tmp_path / "env"
    output(python, "-m", "venv", env)
    pip = [env / "bin" / "pip", "--disable-pip-version-check"]
    try:
        output(*pip, "download", "-q", "--no-deps", "-d", tmp_path, "typer")
    except AssertionError:
        pytest.skip("no package index is reached")
    output(*pip, "install", "-q", f"{archives[1]}[{EXTRAS}]")
    assert output(*pip, "check") == "No broken requirements found."
    told = json.loads(output(env / "bin" / "tegrad", "doctor", "--json"))
    assert told["runs_on"]
    text = output(env / "bin" / "tegrad", "run", "In the beginning", "--max-tokens", "8")
    assert text.strip()
    for command in ("serve", "chat", "pull", "models"):
        assert "Usage" in output(env / "bin" / "tegrad", command, "--help")


def test_the_newest_change_is_this_version() -> None:
    headings = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == VERSION
    assert headings == sorted(headings, key=lambda told: [*map(int, told.split("."))], reverse=True)
