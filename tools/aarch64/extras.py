"""Whether every extra installs on aarch64 from wheels alone: `python tools/aarch64/extras.py`, with a package index.

pip resolves what pyproject.toml asks for, all extras together (so each of them, too), for each Python and a glibc as
old as Debian 11's or Ubuntu 20.04's. results/aarch64-extras.json is what it found. The markers of further dependencies
are those of the Python that runs this; those of pyproject.toml are aarch64's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tegrad.bench import record  # noqa: E402

RESULT: Final = ROOT / "results" / "aarch64-extras.json"
PYTHONS: Final = ("3.11", "3.12", "3.13", "3.14")
GLIBCS: Final = (17, 24, 26, 27, 28, 31)
"""2.x, up to Ubuntu 20.04's and Debian 11's; JetPack 6 has 2.35."""


def wanted(python: str) -> tuple[list[str], list[str]]:
    """The extras' names, and what they and the package ask for on aarch64."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    here = {"platform_machine": "aarch64", "sys_platform": "linux", "python_version": python}
    found = dict.fromkeys([*project["dependencies"], *(one for many in extras.values() for one in many)])
    needed = [need for need in map(Requirement, found) if need.marker is None or need.marker.evaluate(here)]
    return sorted(extras), [f"{need.name}{need.specifier}" for need in needed]


def resolved(python: str) -> dict[str, Any]:
    """The wheels that pip chooses, or what it says."""
    extras, needed = wanted(python)
    platforms = ["manylinux2014_aarch64", *(f"manylinux_2_{glibc}_aarch64" for glibc in GLIBCS)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed",
                   "--only-binary=:all:", "--implementation", "cp", "--python-version", python, "--target", folder,
                   "--report", str(report), *(f"--platform={each}" for each in platforms), *needed]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        said = json.loads(report.read_text())["install"] if done.returncode == 0 else []
    wheels = sorted(each["download_info"]["url"].rpartition("/")[2] for each in said)
    return {"extras": extras, "wheels": wheels, "refused": done.stderr.strip()[-2000:] if done.returncode else None}


def main() -> int:
    """Write the record."""
    pythons = {python: resolved(python) for python in PYTHONS}
    made = {"command": "python tools/aarch64/extras.py", "date": record.now(), "pythons": pythons}
    RESULT.write_text(json.dumps(made, indent=1) + "\n")
    for python, found in pythons.items():
        print(python, found["refused"] or f"{len(found['wheels'])} wheels for {', '.join(found['extras'])}", sep=": ")
    return int(any(found["refused"] for found in pythons.values()))


if __name__ == "__main__":
    sys.exit(main())
