"""One measurement on disk: every sample, what was run, on what, with which versions, and of which commit.

That is the commit whose sources were measured, where it is known: a checkout without changes of its own says so when it
measures, and of samples from elsewhere `History.holding` finds it by the hash of the sources. Where there is no
repository with its whole history, as in a wheel or a shallow clone, `History.known` is false, there is no commit, and
nothing here raises or is printed.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Final

import tegrad
from tegrad import machine as system
from tegrad.errors import TegradError
from tegrad.uapi.releases import l4t

PACKAGE = Path(tegrad.__file__).parent
PACKAGES = (
    *("tinygrad", "numpy", "llvmlite", "gguf", "tokenizers", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc"),
    *("starlette", "uvicorn", "llguidance", "schemathesis", "hypothesis"),
)

SOURCES: Final = (".py", ".cu", ".cuh")
"""Files of the package that decide what is measured."""
SMI = ("name", "driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem")
"""What nvidia-smi is asked."""
_ELSEWHERE: Final = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR"})


class RecordError(TegradError):
    """A samples file or figures.json that cannot be read or does not hold what it should."""


@dataclass(frozen=True)
class Side:
    """One contestant's samples: its name, the exact command or flags, and the value of each repetition."""

    name: str
    command: str
    samples: list[float]

    @property
    def median(self) -> float:
        """Median of the samples, in the record's unit."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest sample."""
        return min(self.samples), max(self.samples)


@dataclass(frozen=True)
class Record:
    """One measurement of one figure; `limit` is the physical limit in the same unit, derived in `limit_note`.

    `others` are peers besides the one that the figure is held against.
    """

    id: str
    what: str
    unit: str
    larger_is_better: bool
    ours: Side
    peer: Side | None = None
    limit: float | None = None
    limit_note: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    date: str = ""
    others: tuple[Side, ...] = ()
    commit: str = ""
    """The one whose sources were measured, where that is known."""

    def __post_init__(self) -> None:
        for side in (self.ours, self.peer, *self.others):
            if side is not None and not side.samples:
                raise RecordError(f"{self.id}: {side.name} has no samples; measure it again")

    def dump(self, path: Path) -> None:
        """Write the record as JSON, atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        temporary.replace(path)

    @staticmethod
    def load(path: Path) -> Record:
        """Read a record; RecordError names the file and the fault."""
        try:
            raw = json.loads(path.read_text())
            ours, peer, others = raw.pop("ours"), raw.pop("peer", None), raw.pop("others", ())
            return Record(
                **raw,
                ours=Side(**ours),
                peer=Side(**peer) if peer else None,
                others=tuple(Side(**other) for other in others),
            )
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise RecordError(f"{path} is not a samples file ({error}): measure it again") from error


def make(
    id: str,
    what: str,
    unit: str,
    ours: Side,
    *,
    larger_is_better: bool = True,
    peer: Side | None = None,
    limit: float | None = None,
    limit_note: str = "",
    gpu: str = "",
    others: Iterable[Side] = (),
) -> Record:
    """A record of samples taken just now on this machine; `gpu` names the device that did the work."""
    known = versions()
    return Record(
        id=id,
        what=what,
        unit=unit,
        larger_is_better=larger_is_better,
        ours=ours,
        peer=peer,
        limit=limit,
        limit_note=limit_note,
        machine=machine(gpu),
        versions=known,
        date=now(),
        others=tuple(others),
        commit=History(PACKAGE).head(known["tegrad_sources"]),
    )


def replace_rows(path: Path, what: str, key: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Put rows into a file's table, in place of those whose values of `key` are the same, in their order; returns all.

    RecordError for a file that is no such table.
    """
    try:
        kept = json.loads(path.read_text())["rows"] if path.exists() else []
        table = {tuple(row[name] for name in key): dict(row) for row in [*kept, *rows]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordError(f"{path} is no table of rows ({error}): delete it and measure again") from error
    ordered = [table[place] for place in sorted(table)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"what": what, "rows": ordered}, indent=1) + "\n")
    return ordered


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def machine(gpu: str = "") -> dict[str, Any]:
    """What the samples were taken on: processor, kernel, GPU and its revision, driver, power mode, clocks in MHz, SMs.

    SMs are those of the device that this process has open; what nobody tells is empty or left out.
    """
    cpu = re.search(r"^model name\s*:\s*(.+)$", system.text(Path("/proc/cpuinfo")), re.MULTILINE)
    told, release = _nvidia_smi(), l4t()
    device = sys.modules.get("tegrad.nv.device")
    return {
        "cpu": cpu.group(1) if cpu else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "arch": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "gpu": gpu or told.get("name", ""),
        "driver": told.get("driver_version", ""),
        "release": f"L4T r{release.version}" if release else "",
        "power_mode": str(system.power_mode() or ""),
        "clocks_mhz": _clocks(told),
        "revision": next(iter(system.revisions()), ""),
        **(device.opened_facts() if device else {}),
    }


def _clocks(told: Mapping[str, str]) -> dict[str, float]:
    """Of a Jetson as Linux tells them, of another GPU as nvidia-smi does."""
    found = {name.removeprefix("clocks."): float(value) for name, value in told.items() if "clocks" in name}
    for clock in system.clocks():
        found |= {clock.name: clock.now / 1e6, f"max.{clock.name}": clock.most / 1e6}
    return found


def versions() -> dict[str, str]:
    """Versions of what took part, and a hash of our own sources, which need no repository to be known."""
    found = {"tegrad": tegrad.__version__, "tegrad_sources": source_digest()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def source_digest() -> str:
    """The hash of the package's sources."""
    files = (path for path in PACKAGE.rglob("*") if path.suffix in SOURCES)
    return digest_of((path.relative_to(PACKAGE), path.read_bytes()) for path in files)


def digest_of(sources: Iterable[tuple[PurePath, bytes]]) -> str:
    """First 16 hex digits of a SHA-256 over sources: names below the package, and contents."""
    digest = hashlib.sha256()
    for path, content in sorted(sources):
        digest.update(str(path).encode() + b"\0" + content)
    return digest.hexdigest()[:16]


def output(command: Sequence[str], shown: str, timeout: float | None = None, **how: Any) -> str:
    """What a process prints; RecordError with its last words where it fails, or where it takes too long.

    `shown` names it there; `how` is what `subprocess.run` takes besides.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout, **how)
    except subprocess.TimeoutExpired:
        raise RecordError(f"{shown} did not end within {timeout} s") from None
    if done.returncode:
        raise RecordError(f"{shown} ended with {done.returncode}: {done.stderr.strip()[-400:]}")
    return str(done.stdout)


def file_hash(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _nvidia_smi() -> dict[str, str]:
    """What nvidia-smi tells of the first GPU, without what it does not know; nothing where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    query = ["--query-gpu=" + ",".join(SMI), "--format=csv,noheader,nounits"]
    done = subprocess.run([tool, *query], capture_output=True, text=True, check=False)
    first = done.stdout.strip().splitlines()[0] if done.returncode == 0 and done.stdout.strip() else ""
    told = zip(SMI, map(str.strip, first.split(",")), strict=False)
    return {name: value for name, value in told if value and not value.startswith("[")}


# ---- the repository around a folder


def _environment() -> dict[str, str]:
    """Ours, without what names another repository: git sets it for hooks."""
    return {name: value for name, value in os.environ.items() if name not in _ELSEWHERE}


class History:
    """The repository that holds a folder, if any."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _git(self, *arguments: str, at: Path | None = None) -> bytes | None:
        """What git prints; None where it fails or is not there."""
        command = ["git", "-C", str(at or self._top), *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, check=False, stdin=subprocess.DEVNULL, env=_environment()
            )
        except OSError:
            return None
        return done.stdout if done.returncode == 0 else None

    def _text(self, *arguments: str) -> str:
        return (self._git(*arguments) or b"").decode().strip()

    @cached_property
    def _top(self) -> Path | None:
        folder = self._folder.absolute()  # which a first figure makes
        there = next(path for path in (folder, *folder.parents) if path.is_dir())
        said = self._git("rev-parse", "--show-toplevel", at=there)
        return Path(said.decode().strip()) if said else None

    @cached_property
    def known(self) -> bool:
        """Whether there is a repository with at least one commit and none cut off."""
        return self._top is not None and self._text("rev-parse", "--is-shallow-repository", "HEAD")[:5] == "false"

    def head(self, digest: str) -> str:
        """The newest commit, if its package has this `digest_of`; else empty."""
        if not self.known:
            return ""
        commit = self._text("rev-parse", "HEAD")
        with self._blobs() as blobs:
            return commit if self._digest(commit, blobs) == digest else ""

    def has(self, commit: str) -> bool:
        """Whether HEAD comes from a commit."""
        return bool(commit) and self.known and self._git("merge-base", "--is-ancestor", commit, "HEAD") is not None

    def brought(self, file: Path, text: str) -> str:
        """The newest commit that put a text into a file; empty where there is none."""
        return self._text("log", "-1", "--format=%H", f"-S{text}", "--", str(file.absolute())) if self.known else ""

    def changes(self, since: str, paths: Sequence[str]) -> int:
        """How many commits after `since` changed files of these pathspecs; 0 where they are again as they were."""
        if self._git("diff", "--quiet", since, "HEAD", "--", *paths) is not None:
            return 0
        return int(self._text("rev-list", "--count", f"{since}..HEAD", "--", *paths) or 0)

    # --- sources by their hash ---------------------------------------------------------------------------------------

    def holding(self, digest: str, date: str) -> str:
        """The newest commit up to a date (such as 2026-11-22T14:49:52Z) whose package has this `digest_of`.

        The oldest of later ones where none is before; empty where none has it. Reads every commit, for seconds.
        """
        limit = datetime.datetime.fromisoformat(date).timestamp()
        found = [(when, commit) for when, commit, own in self._digests if own == digest]
        before = [commit for when, commit in found if when <= limit]
        return before[0] if before else found[-1][1] if found else ""

    @cached_property
    def _digests(self) -> list[tuple[int, str, str]]:
        """Time, commit and hash of the package's sources of every commit, newest first."""
        if not self.known:
            return []
        log = [line.split() for line in self._text("log", "--format=%ct %H").splitlines()]
        with self._blobs() as blobs:
            return [(int(when), commit, self._digest(commit, blobs)) for when, commit in log]

    @contextmanager
    def _blobs(self) -> Iterator[_Blobs]:
        command = ["git", "-C", str(self._top), "cat-file", "--batch"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_environment()) as batch:
            yield _Blobs(batch)

    def _digest(self, commit: str, blobs: _Blobs) -> str:
        return digest_of(self._sources(commit, blobs))

    def _sources(self, commit: str, blobs: _Blobs) -> Iterator[tuple[PurePath, bytes]]:
        for line in self._text("ls-tree", "-r", commit, "tegrad/").splitlines():
            entry, _, name = line.partition("\t")
            path = PurePosixPath(name)
            if path.suffix in SOURCES:
                yield path.relative_to("tegrad"), blobs[entry.split()[2]]


class _Blobs:
    """Files of a repository by their hash, from `git cat-file --batch`; each is read once."""

    def __init__(self, batch: subprocess.Popen[bytes]) -> None:
        assert batch.stdin is not None
        assert batch.stdout is not None
        self._to, self._from = batch.stdin, batch.stdout
        self._known: dict[str, bytes] = {}

    def __getitem__(self, name: str) -> bytes:
        if name not in self._known:
            self._to.write(f"{name}\n".encode())
            self._to.flush()
            said = self._from.readline().split()  # NAME missing, where only a part was cloned
            self._known[name] = self._from.read(int(said[2]) + 1)[:-1] if len(said) == 3 else b""
        return self._known[name]
