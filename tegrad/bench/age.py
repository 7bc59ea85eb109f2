"""Which commit a row of results/figures.json was taken at, and what of the code that it measures has changed since.

A record names the commit whose sources were measured where one is known: a checkout without changes of its own says so
when it measures, and of samples from elsewhere `History.holding` finds it by the hash of the sources. Of other rows it
is the commit that brought their samples. Where there is no repository with its whole history, as in a wheel or a
shallow clone, there is no age, and nothing is printed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from tegrad.bench.history import History

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
    ("decode-*", "prefill-*", "batch*", "host-us-per-token", "token-gap-us"): _STEPS,
    ("first-run-tok-s", "load-to-first-token"): (
        *("tegrad/llm", "tegrad/nv", "tegrad/hw", "tegrad/uapi", "tegrad/cli/run.py", "tegrad/models"),
        *_ASIDE,
    ),
    ("matvec-fix-*",): (
        *("tegrad/nv", "tegrad/hw", "tegrad/bench/graph.py", "tegrad/bench/models.py"),
        *(f"tegrad/llm/{name}.py" for name in ("arch", "dequant", "gguf", "model", "session", "weights")),
    ),
    ("*-nv-vs-cuda", "eager-launch-us"): ("tegrad/nv", "tegrad/hw", "tegrad/bench/rows.py"),
    ("replay-mlp-*",): ("tegrad/nv", "tegrad/hw", "tegrad/bench/mlp.py"),
    ("engine-*",): ("tegrad/ptx", "tegrad/bench/engine.py", "tegrad/bench/sample.py"),
    ("orin-agx-estimate-*",): (
        *(f"tegrad/bench/{name}.py" for name in ("dry", "estimate", "kernels", "models", "plans", "sass")),
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
}
"""By ids (shell patterns): the paths whose code a figure measures, as git takes them. What measures is not among them,
but where it is itself the work."""


def paths(id: str) -> tuple[str, ...]:
    """What a figure measures, as git's pathspecs; LookupError for an id that no family has."""
    for patterns, found in FAMILIES.items():
        if any(fnmatch(id, pattern) for pattern in patterns):
            return found
    raise LookupError(f"{id} belongs to no family of tegrad/bench/age.py: say there which paths it measures")


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
