"""The doctor finds what is there, names what is missing, and decides what models run on."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tegrad.diag import doctor, drivers


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
