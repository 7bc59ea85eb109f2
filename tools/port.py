"""What a port to another tinygrad needs: `python tools/port.py [VERSION]`, PyPI's newest if left out.

Lists the names of tinygrad's that tegrad imports, patches or derives from, and says of each whether that version lacks
it, or has other source for it than the version that tegrad is made for. Writes results/port-tinygrad-VERSION.json.
Needs pip and its index; nothing is installed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

PROJECT = Path(__file__).resolve().parents[1]
OURS = "0.14.0"
LOOK = """
import hashlib, importlib, inspect, json, sys
found = {}
for module, name in json.load(sys.stdin):
    key = f"{module}.{name}" if name else module
    try:
        thing = importlib.import_module(module)
        if name:
            if not hasattr(thing, name):
                thing = importlib.import_module(key)
            else:
                thing = getattr(thing, name)
    except Exception as error:
        found[key] = ["lacks", f"{type(error).__name__}: {error}"]
        continue
    try:
        found[key] = ["has", hashlib.sha256(inspect.getsource(thing).encode()).hexdigest()]
    except (TypeError, OSError):
        found[key] = ["has", type(thing).__name__]
print(json.dumps(found))
"""
"""Runs beside a tinygrad: of each name whether it is there, and the hash of its source, or its type."""


def names(source: str) -> Iterator[tuple[str, str]]:
    """What a file takes from tinygrad: modules, each with a name of its own that is used, or ""."""
    tree = ast.parse(source)
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tinygrad":
            for alias in node.names:
                yield str(node.module), alias.name
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == "tinygrad":
                    yield alias.name, ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            path = modules[node.value.id]
            if path.rpartition(".")[2].islower():  # a module's, as far as names tell
                yield path, node.attr


def used() -> list[tuple[str, str]]:
    """What the whole package takes from tinygrad."""
    files = sorted((PROJECT / "tegrad").rglob("*.py"))
    return sorted({pair for path in files for pair in names(path.read_text())})


def looked(wheel: Path, pairs: list[tuple[str, str]], folder: Path) -> dict[str, list[str]]:
    """What an unpacked wheel has of it."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    command = [sys.executable, "-S", "-c", LOOK]
    environment = {"PYTHONPATH": f"{folder}", "PATH": "/usr/bin:/bin", "HOME": str(folder), "DEV": "PYTHON"}
    done = subprocess.run(command, input=json.dumps(pairs), env=environment, capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout.splitlines()[-1])
    return found


def downloaded(version: str, folder: Path) -> Path:
    """The wheel of a version, or of the newest ("")."""
    wanted = f"tinygrad=={version}" if version else "tinygrad"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", str(folder)]
    subprocess.run([*command, wanted], check=True)
    return next(folder.glob("*.whl"))


def compared(ours: dict[str, list[str]], theirs: dict[str, list[str]]) -> dict[str, list[str]]:
    """The names by kind of difference: those that the other version lacks, and those whose source differs there."""
    there = [name for name, (state, _) in ours.items() if state == "has"]
    lacking = [name for name in there if theirs[name][0] == "lacks"]
    other = [name for name in there if name not in lacking and theirs[name] != ours[name]]
    return {"lacking": sorted(lacking), "otherwise": sorted(other)}


def main() -> None:
    """Look, compare and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", nargs="?", default="", help="PyPI's newest if left out")
    asked = parser.parse_args()
    pairs = used()
    with TemporaryDirectory() as folder:
        wheels = [
            downloaded(version, Path(folder) / f"wheel {version or 'newest'}") for version in (OURS, asked.version)
        ]
        ours, theirs = (looked(wheel, pairs, Path(folder) / f"side {side}") for side, wheel in enumerate(wheels))
        version = wheels[1].name.split("-")[1]
        digest = hashlib.sha256(wheels[1].read_bytes()).hexdigest()
    differences = compared(ours, theirs)
    made = {"version": version, "sha256": digest, "made for": OURS, "names": len(pairs), **differences}
    path = PROJECT / "results" / f"port-tinygrad-{version}.json"
    path.write_text(json.dumps(made, indent=1) + "\n")
    lacking, otherwise = (len(differences[kind]) for kind in ("lacking", "otherwise"))
    print(f"tinygrad {version}: of {len(pairs)} names {lacking} lacking, {otherwise} otherwise; {path}")


if __name__ == "__main__":
    main()
