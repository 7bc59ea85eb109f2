"""The git repository around a folder: which commit its files are of, and how old a row of results/figures.json is.

A record names the commit whose sources were measured where one is known: a checkout without changes of its own says so
when it measures, and of samples from elsewhere `History.holding` finds it by the hash of the sources. Of other rows it
is the commit that brought their samples. Where there is no repository with its whole history, as in a wheel or a
shallow clone, `History.known` is false, there is no age, and nothing here raises or is printed.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, Final

SOURCES: Final = (".py", ".cu", ".cuh")
"""Files of the package that decide what is measured."""
_ELSEWHERE: Final = frozenset({"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR"})


def digest_of(sources: Iterable[tuple[PurePath, bytes]]) -> str:
    """First 16 hex digits of a SHA-256 over sources: names below the package, and contents."""
    digest = hashlib.sha256()
    for path, content in sorted(sources):
        digest.update(str(path).encode() + b"\0" + content)
    return digest.hexdigest()[:16]


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


# ---- what of the code that a row measures has changed since


_ASIDE: Final = tuple(
    f":(exclude)tegrad/llm/{name}.py"
    for name in (
        "dequant",
        "exact",
        "model",
        "interpreter",
        "quality",
        "quantize",
        "reference",
        "session",
        "weights",
    )
)
"""Tinygrad's way through a model, and what only tests and measurements use."""
_TEXT: Final = tuple(
    f":(exclude)tegrad/llm/{name}.py" for name in ("generate", "pieces", "sandbox", "template", "tokenizer")
)
_STEPS: Final = ("tegrad/llm", "tegrad/nv", "tegrad/hw", "tegrad/bench/models.py", *_ASIDE, *_TEXT)
_BOARD: Final = ("tegrad/orin", "tegrad/uapi", "tegrad/hw")

FAMILIES: Final[Mapping[tuple[str, ...], tuple[str, ...]]] = {
    ("decode-*", "prefill-*", "batch*", "grammar-decode-share", "host-us-per-token", "token-gap-us"): _STEPS,
    ("serve-fuzz-requests",): (
        *("tegrad/serve", "tegrad/llm", "tests/serve/request_fuzz.py"),
        *(":(exclude)tegrad/serve/page", ":(exclude)tegrad/llm/kernels"),
    ),
    ("serve-*",): (*_STEPS, "tegrad/serve"),
    ("first-run-tok-s", "load-to-first-token"): (
        *("tegrad/llm", "tegrad/nv", "tegrad/hw", "tegrad/uapi", "tegrad/cli/run.py", "tegrad/models"),
        *_ASIDE,
    ),
    ("ppl-*",): ("tegrad/llm", "tegrad/nv", "tegrad/hw", "tegrad/models", *_ASIDE),
    ("matvec-fix-*",): (
        *("tegrad/nv", "tegrad/hw", "tegrad/bench/graph.py", "tegrad/bench/models.py"),
        *(f"tegrad/llm/{name}.py" for name in ("arch", "dequant", "gguf", "model", "session", "weights")),
    ),
    ("*-nv-vs-cuda", "eager-launch-us"): ("tegrad/nv", "tegrad/hw", "tegrad/bench/rows.py"),
    ("replay-mlp-*",): ("tegrad/nv", "tegrad/hw", "tegrad/bench/mlp.py"),
    ("engine-*",): ("tegrad/ptx", "tegrad/bench/engine.py"),
    ("orin-agx-estimate-*",): (
        *(f"tegrad/bench/{name}.py" for name in ("kernels", "limits", "models", "plans")),
        *("tegrad/llm", "tegrad/hw/chips.py", *_ASIDE, *_TEXT),
    ),
    ("ptx-oracle-*",): ("tegrad/ptx", "tests/ptx/oracle"),
    ("ptx-forms-without-oracle",): ("tegrad/llm/kernels", "tests/ptx/oracle", "tests/data/ptx-forms.json"),
    ("nvgpu-oracle-*",): ("tegrad/orin", "tegrad/hw", "tests/orin/nvgpu_oracle", "tests/data/nvgpu-oracle.json.xz"),
    ("aarch64-tests-*",): ("tegrad", "tests", "tools/aarch64"),
    ("ci-minutes",): ("tegrad", "tests", "tools", "examples", "Makefile", "pyproject.toml"),
    ("random-mutants-killed",): ("tegrad", "tests", "tools/mutants"),
    ("conformance-*",): (*_BOARD, "tegrad/conformance", "tests/conformance"),
    ("board-fuzz-steps",): (*_BOARD, "tests/orin/fuzz"),
    ("board-l2-cost-percent",): (*_BOARD, "tegrad/nv", "tegrad/ptx"),
    ("upstream-test-ops-board-*",): (*_BOARD, "tegrad/nv", "tegrad/ptx"),
    ("gguf-mutants-first",): ("tegrad/llm", "tegrad/cli/run.py", "tests/llm/gguf_fuzz", ":(exclude)tegrad/llm/kernels"),
    ("gguf-mutants-families",): (
        *("tegrad/llm", "tegrad/serve", "tegrad/hub", "tegrad/cli/models.py", "tests/llm/gguf_fuzz"),
        *(":(exclude)tegrad/serve/page", ":(exclude)tegrad/llm/kernels"),
    ),
}
"""By ids (shell patterns): the paths whose code a figure measures, as git takes them. What measures is not among them,
but where it is itself the work."""


def paths(id: str) -> tuple[str, ...]:
    """What a figure measures, as git's pathspecs; LookupError for an id that no family has."""
    for patterns, found in FAMILIES.items():
        if any(fnmatch(id, pattern) for pattern in patterns):
            return found
    raise LookupError(f"{id} belongs to no family of tegrad/bench/history.py: say there which paths it measures")


@dataclass(frozen=True, slots=True)
class Age:
    """How old a row is: the commit that it is counted from, and the later ones that changed what it measures."""

    commit: str
    taken: bool
    """The commit holds the sources that were measured; else it brought the samples, which may be older."""
    commits: int

    @property
    def mark(self) -> str:
        """What to print beside the row; empty where nothing has changed."""
        if not self.commits:
            return ""
        least = "" if self.taken else "at least "
        return f"older than its code: {least}{self.commits} commit{'s' * (self.commits > 1)}"


def age(history: History, id: str, samples: Path, date: str, commit: str = "") -> Age | None:
    """How old a row is: `commit` and `date` as its record has them, `samples` its file. None where nobody can tell."""
    taken = history.has(commit)
    base = commit if taken else history.brought(samples, date)
    return Age(base, taken, history.changes(base, paths(id))) if base else None


def as_json(row: Mapping[str, Any], age: Age | None) -> dict[str, Any]:
    """A row for a program, with its age; nulls where nobody can tell."""
    if age is None:
        return {**row, "counted_from": None, "counted_from_taken": None, "older_by_commits": None}
    return {**row, "counted_from": age.commit, "counted_from_taken": age.taken, "older_by_commits": age.commits}
