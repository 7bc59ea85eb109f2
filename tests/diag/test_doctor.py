"""The doctor finds what is there, names what is missing, and decides what models run on."""

import importlib.metadata
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tegrad import installed
from tegrad.diag import doctor, drivers, smoke
from tegrad.nv import memory_record, toolchain
from tegrad.nv.memory_record import MemoryRecord
from tegrad.orin import board
from tegrad.orin.board import BoardError


def states(found: list[doctor.Finding]) -> dict[str, str]:
    return {f.name: f.state for f in found}


def test_every_missing_thing_comes_with_a_remedy() -> None:
    assert all(f.remedy for f in doctor.findings() if f.state == "missing")


def test_tinygrad_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.13.0")
    (finding,) = doctor._tinygrad(Path("/"))
    assert finding.state == "missing"
    assert "0.13.0" in finding.detail
    assert "tinygrad==0.14.0" in finding.remedy


def test_closed_device_node_names_the_group_to_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = tmp_path / "ctrl"
    node.touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = drivers.nodes("jetson", "Jetson", [node], "absent", "make it")
    assert finding.state == "warn"
    assert node.group() in finding.remedy


def test_an_llvmlite_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    package = tmp_path / "llvmlite" / "binding"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").write_text("raise OSError('no shared object file: libllvmlite.so')")
    code = "from tegrad.diag import doctor; print(*doctor._board(doctor.ROOT))"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "which cannot be loaded: no shared object file: libllvmlite.so" in done.stdout
    assert "pip install --force-reinstall" in done.stdout


def test_an_llvmlite_whose_llvm_makes_wrong_code_is_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.47.0")
    (finding,) = doctor._board(doctor.ROOT)
    assert finding.state == "warn"
    assert "needs llvmlite 0.48 or later" in finding.detail
    assert "0.47.0 is installed" in finding.detail
    with pytest.raises(BoardError, match=r"needs llvmlite 0\.48 or later, .*: pip install "):
        board._check_limits()
    for newer in ("0.48.0", "0.48.0rc1", "1.0", "unknown"):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, newer=newer: newer)
        assert installed.lacking_llvmlite() == ""


def test_the_packages_bound_of_llvmlite_is_the_boards() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    least = ".".join(map(str, installed.LLVMLITE))
    assert pyproject["project"]["optional-dependencies"]["board"] == [f"llvmlite>={least}"]


def test_half_a_driver_names_the_missing_node(tmp_path: Path) -> None:
    (tmp_path / "ctrl").touch()
    wanted = [tmp_path / "ctrl", tmp_path / "nvmap"]
    (finding,) = drivers.nodes("jetson", "Jetson", wanted, "absent", "make it")
    assert finding.state == "warn"
    assert str(tmp_path / "nvmap") in finding.detail
    assert finding.remedy == "make it"


@pytest.mark.parametrize(
    ("device", "label"), [("jetson", "Jetson"), ("nvidia", "NVIDIA GPU"), ("board", "emulated board"), ("none", "")]
)
def test_verdict_follows_the_devices(device: str, label: str) -> None:
    found = [doctor.Finding(name, "ok", "") for name in ("tinygrad", "compilers", device)]
    assert doctor.runnable(found) == label


def test_nothing_runs_without_compilers() -> None:
    found = [
        doctor.Finding("tinygrad", "ok", ""),
        doctor.Finding("compilers", "missing", ""),
        doctor.Finding("jetson", "ok", ""),
    ]
    assert doctor.runnable(found) == ""


def test_command_prints_findings_as_json() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tegrad", "doctor", "--json"], capture_output=True, text=True, check=False
    )
    answer = json.loads(done.stdout)
    assert {f["name"] for f in answer["findings"]} >= {"python", "tinygrad", "compilers", "jetson", "nvidia", "board"}
    assert done.returncode == (0 if answer["runs_on"] else 1)


def _jetson(root: Path) -> Path:
    (root / "proc/device-tree").mkdir(parents=True)
    (root / "proc/device-tree/compatible").write_bytes(b"nvidia,p3737-0000\0nvidia,tegra234\0")
    return root


def test_who_decides_a_jetsons_kind_of_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = MemoryRecord("tegra234", "6", "1", board=False, right=True, faster=True, date="today", why="it is faster")
    monkeypatch.delenv("TEGRAD_BOARD", raising=False)
    monkeypatch.delenv("TEGRAD_MEMORY", raising=False)
    monkeypatch.setattr(memory_record, "of_this_device", lambda: None)
    assert list(doctor._memory(tmp_path / "no Jetson")) == []
    (finding,) = doctor._memory(_jetson(tmp_path))
    assert "volatile memory, the default" in finding.detail
    monkeypatch.setattr(memory_record, "of_this_device", lambda: record)
    (finding,) = doctor._memory(tmp_path)
    assert "cached memory, by the first boot's record of today: it is faster" in finding.detail
    monkeypatch.setenv("TEGRAD_MEMORY", "volatile")
    (finding,) = doctor._memory(tmp_path)
    assert finding.detail == "volatile memory, as TEGRAD_MEMORY says"


def test_a_memory_policy_that_means_nothing_stops_jetsons_and_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_MEMORY", "fast")
    (finding,) = doctor._memory(Path("/"))
    assert (finding.state, finding.remedy) == ("missing", "unset TEGRAD_MEMORY")
    others = [doctor.Finding(name, "ok", "") for name in ("tinygrad", "compilers", "board")]
    assert doctor.runnable([*others, finding]) == ""


def test_an_nvrtc_without_its_builtins_is_told_and_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libnvrtc.so.12").symlink_to(toolchain.nvrtc().path)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    found = doctor.findings()
    assert found[-1].name == "kernel"
    assert found[-1].state == "missing"
    assert "failed to open libnvrtc-builtins" in found[-1].detail
    assert "Traceback" not in found[-1].detail
    assert doctor.runnable(found) == ""


def test_a_kernel_runs_where_the_doctor_says_so() -> None:
    found = doctor.findings()
    assert (found[-1].name, found[-1].state) == ("kernel", "ok")
    assert doctor.runnable(found)


def test_a_kernel_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smoke, "CODE", "import time; time.sleep(60)")
    monkeypatch.setattr(smoke, "LIMIT_S", 0.1)
    monkeypatch.setenv(smoke.PATIENCE, "500")
    assert "no end within 0.5 s" in smoke.run("Jetson", emulated=False).detail
