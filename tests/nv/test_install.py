"""Activation: from a wheel, from an editable install, by import, and not at all when it is not wanted."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import setuptools

import tegrad.nv

ROOT = Path(__file__).resolve().parents[2]
WHO = "import tinygrad.runtime.ops_nv as o; print(o.NVDevice.__module__, o.NVProgram.__module__)"
OURS = "tegrad.nv.device tegrad.nv.program"
UPSTREAM = "tinygrad.runtime.ops_nv tinygrad.runtime.ops_nv"

modern_setuptools = pytest.mark.skipif(
    int(setuptools.__version__.split(".")[0]) < 77, reason="building needs setuptools 77 or later (extra `dev`)"
)


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program away from the checkout, without this process's import path."""
    ours = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "TEGRAD", "TEGRAD_BOARD", "DEV")
    clean = {k: v for k, v in os.environ.items() if k not in ours}
    return subprocess.run(
        command, env=clean | environment, cwd="/", capture_output=True, text=True, timeout=600, check=False
    )


def output(command: list[str], **environment: str) -> str:
    done = run(command, **environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def build(kind: str, source: Path, wheels: Path) -> Path:
    """Build a wheel of `kind` from a copy of the sources; no network, no isolation."""
    code = f"import os, setuptools.build_meta as b; os.chdir({str(source)!r}); print(b.build_{kind}({str(wheels)!r}))"
    name = output([sys.executable, "-W", "ignore", "-c", code]).splitlines()[-1]
    return wheels / name


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a wheel is built from."""
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "tegrad.pth", "README.md", "LICENSE"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    (copy / "README.md").touch()
    shutil.copytree(ROOT / "tegrad", copy / "tegrad", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture(scope="module", params=["wheel", "editable"])
def python(request: Any, source: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of a fresh environment that has the package, and this one's dependencies on its path."""
    folder = tmp_path_factory.mktemp(request.param)
    venv.create(folder / "env", with_pip=False, symlinks=True)
    interpreter = str(folder / "env" / "bin" / "python")
    site = Path(output([interpreter, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]))
    (site / "zz_dependencies.pth").write_text(str(Path(importlib.metadata.distribution("tinygrad").locate_file(""))))
    wheel = build(request.param, source, folder)
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "-q", "--no-deps", "--no-index"]
    # Newer pips find the tegrad of this environment, which is on that one's path, good enough.
    output([*pip, "--force-reinstall", "--disable-pip-version-check", str(wheel)])
    assert (site / "tegrad.pth").read_text() == "import tegrad._activate\n"
    return interpreter


@modern_setuptools
def test_a_remedy_names_what_this_tegrad_was_installed_from(python: str, source: Path) -> None:
    told = output([python, "-c", "from tegrad.installed import pip_install; print(pip_install('board'))"])
    where = Path(output([python, "-c", "import tegrad; print(tegrad.__file__)"]))
    if where.is_relative_to(source):
        assert told == f"pip install -e '{source}[board]'"
    else:
        assert re.fullmatch(r"pip install '/.*/tegrad-[\d.]+-py3-none-any\.whl\[board\]'", told)


@modern_setuptools
def test_an_installed_package_activates_itself(python: str, source: Path) -> None:
    assert output([python, "-c", WHO]) == OURS
    where = Path(output([python, "-c", "import tegrad; print(tegrad.__file__)"]))
    assert (source in where.parents) == ("editable" in python)


@modern_setuptools
def test_tegrad_0_turns_it_off(python: str) -> None:
    assert output([python, "-c", WHO], TEGRAD="0") == UPSTREAM
    assert output([python, "-c", f"import tegrad.nv; tegrad.nv.install(); {WHO}"], TEGRAD="0") == OURS


@modern_setuptools
def test_starting_python_loads_next_to_nothing(python: str) -> None:
    code = (
        "import sys; print(sorted(m for m in sys.modules if m.partition('.')[0] in ('tegrad', 'tinygrad', 'typing')))"
    )
    assert output([python, "-c", code]) == "['tegrad', 'tegrad._activate', 'tegrad.errors']"


@modern_setuptools
def test_it_costs_less_than_a_millisecond(python: str) -> None:
    def cost_us() -> int:
        done = run([python, "-X", "importtime", "-c", "pass"])
        found = re.search(r"\|\s+(\d+) \|\s+tegrad\._activate$", done.stderr, re.MULTILINE)
        assert found, done.stderr
        return int(found[1])

    # Other load on the machine only adds: one run below the limit is proof.
    assert any(cost_us() < 1000 for _ in range(20))


@modern_setuptools
@pytest.mark.board
def test_the_device_computes_without_an_import_of_ours(python: str) -> None:
    code = "from tinygrad import Tensor; print((Tensor([1,2,3])+Tensor([4,5,6])).numpy())"
    assert output([python, "-c", code], DEV="NV", TEGRAD_BOARD="agx-orin-64gb") == "[5 7 9]"


@modern_setuptools
def test_removing_the_package_removes_the_hook(source: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=False, symlinks=True)
    interpreter = str(tmp_path / "env" / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "--disable-pip-version-check"]
    output([*pip, "install", "-q", "--no-deps", "--no-index", str(build("wheel", source, tmp_path))])
    output([*pip, "uninstall", "-q", "-y", "tegrad"])
    assert not list((tmp_path / "env").rglob("tegrad*"))


# ---- without an installation


def fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new interpreter with the checkout on its path."""
    return run([sys.executable, "-c", code], PYTHONPATH=str(ROOT), **environment)


@pytest.mark.parametrize("module", ["", ".nv.device", ".nv.program", ".nv.renderers"])
def test_whatever_is_imported_first_ends_installed(module: str) -> None:
    code = f"import tegrad{module}; {WHO}; import tegrad.nv.program as p; print(o.NVProgram is p.NVProgram)"
    assert fresh(code).stdout.split() == [*OURS.split(), "True"]


def test_importing_tinygrad_first_is_no_problem_either() -> None:
    assert fresh("import tinygrad.runtime.ops_nv; import tegrad; " + WHO).stdout.strip() == OURS


def test_the_compilers_need_no_tinygrad() -> None:
    code = (
        "import sys; sys.modules['tinygrad'] = None; from tegrad.nv import compilers; print(compilers.describe()[:5])"
    )
    assert fresh(code).stdout.strip() == "NVRTC"


def test_one_device_is_opened_however_it_was_activated() -> None:
    """Lazy activation happens inside tinygrad's lookup; what it opens there is what later lookups find."""
    code = """
import sys; sys.path.insert(0, {tests!r})
import tegrad
import tegrad.nv.kernel as k
from fake import FakeKernel
kernel = FakeKernel(); k.pick_kernel = lambda: kernel
from tinygrad import Device
print(Device["NV"] is Device["NV"])
"""
    done = fresh(code.format(tests=str(Path(__file__).parent)))
    assert done.stdout.strip() == "True", done.stderr


def test_another_tinygrad_is_left_alone_with_a_warning() -> None:
    code = "import tegrad.nv; tegrad.nv.tinygrad_version = lambda: '0.15.0'; " + WHO
    done = fresh(code)
    assert done.stdout.strip() == UPSTREAM
    assert "tegrad is not active: tinygrad 0.15.0 does not fit, tegrad needs 0.14.0" in done.stderr


def test_another_tinygrad_is_an_error_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tegrad.nv, "tinygrad_version", lambda: "0.13.0")
    with pytest.raises(tegrad.nv.InstallError, match=r"pip install tinygrad==0\.14\.0"):
        tegrad.nv.install()


def test_installing_again_changes_nothing() -> None:
    tegrad.nv.install()
    from tinygrad.runtime import ops_nv

    before = dict(vars(ops_nv))
    tegrad.nv.install()
    assert vars(ops_nv) == before


def test_a_device_that_is_open_already_is_an_error() -> None:
    code = """
import tinygrad.runtime.ops_nv
from tinygrad import Device
Device._opened_devices.add("NV")
import tegrad.nv
tegrad.nv.install()
"""
    assert "InstallError: tinygrad's NV device is already open" in fresh(code, TEGRAD="0").stderr


def test_a_release_is_found_by_its_folder_or_by_its_metadata(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert tegrad.nv.tinygrad_version() == tegrad.nv.TINYGRAD
    monkeypatch.setattr(tegrad.nv, "TINYGRAD", "0.99.0")
    assert tegrad.nv.tinygrad_version() == importlib.metadata.version("tinygrad")
    monkeypatch.setattr(importlib.metadata, "version", importlib.metadata.distribution("pytest").read_text)
    assert tegrad.nv.tinygrad_version() is None
