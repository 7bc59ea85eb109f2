"""results/figures.json: its rows, their age, README's table of them, and what decoding and prompts are to reach.

A row for every figure is computed from its samples file and never typed; README's table is computed from the rows. A
row's age is counted from the commit that its record names, or else from the one that brought its samples.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from tegrad.bench.gpu import board
from tegrad.bench.record import History, Record, RecordError, Side, file_hash, make

SIGNIFICANT_DIGITS = 5


def row(record: Record, samples: str, digest: str) -> dict[str, Any]:
    """The figure row of a record: medians, ratio (larger is better for us) and share of the physical limit.

    `others` is there only where a record has further peers: their medians by name.
    """
    ours, peer = record.ours.median, record.peer.median if record.peer else None
    others = {other.name: _round(other.median) for other in record.others}
    return {
        "id": record.id,
        "what": record.what,
        "ours": _round(ours),
        "spread": [_round(value) for value in record.ours.spread],
        "unit": record.unit,
        "peer": _round(peer),
        "peer_name": record.peer.name if record.peer else None,
        "ratio": _round(better(ours, peer, record.larger_is_better)),
        **({"others": others} if others else {}),
        "limit_share": _round(better(ours, record.limit, record.larger_is_better)),
        "machine": record.machine.get("gpu") or record.machine.get("cpu"),
        "date": record.date,
        "commit": record.commit or None,
        "command": record.ours.command,
        "samples": samples,
        "sha256": digest,
    }


def better(ours: float, other: float | None, larger_is_better: bool) -> float | None:
    """Ours to the other's, oriented so that a larger number is the better one for us."""
    if not other or not ours:
        return None
    return ours / other if larger_is_better else other / ours


def _round(value: float | None) -> float | None:
    if value is None or value == int(value):  # a count stays what it is
        return value
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")


class Results:
    """The results folder: samples/ID.json per figure, and figures.json computed from them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.samples = root / "samples"
        self.table = root / "figures.json"

    @cached_property
    def history(self) -> History:
        """The repository that the folder lies in."""
        return History(self.root)

    def add(self, record: Record) -> None:
        """Keep a record (replacing the one of the same id) and recompute the table.

        Of samples that were taken where there is no repository, the commit is found by the hash of their sources.
        """
        digest = record.versions.get("tegrad_sources", "")
        if digest and not record.commit:
            record = replace(record, commit=self.history.holding(digest, record.date))
        record.dump(self.samples / f"{record.id}.json")
        self.recompute()

    def age(self, row: Mapping[str, Any]) -> Age | None:
        """How old a row is; None where nobody can tell."""
        return age(self.history, row["id"], self.root / row["samples"], row["date"], row["commit"] or "")

    def require(self) -> None:
        """RecordError unless the folder holds a table or samples: a wrong folder must not pass for a good one."""
        if not self.table.exists() and not self.samples.is_dir():
            raise RecordError(f"{self.root} holds no figures: run this in a checkout, or name its folder by --results")

    def records(self) -> Iterable[tuple[Path, Record]]:
        """Every samples file with its record, by id."""
        for path in sorted(self.samples.glob("*.json")):
            record = Record.load(path)
            if record.id != path.stem:
                raise RecordError(f"{path} holds the samples of {record.id}: rename it")
            yield path, record

    def compute(self) -> list[dict[str, Any]]:
        """The rows that the samples give now."""
        return [row(r, str(path.relative_to(self.root)), file_hash(path)) for path, r in self.records()]

    def recompute(self) -> list[dict[str, Any]]:
        """Write figures.json anew from the samples; returns its rows."""
        rows = self.compute()
        self.root.mkdir(parents=True, exist_ok=True)
        self.table.write_text(json.dumps(rows, indent=1) + "\n")
        return rows

    def stored(self) -> list[dict[str, Any]]:
        """The rows of figures.json as it is."""
        try:
            rows: list[dict[str, Any]] = json.loads(self.table.read_text()) if self.table.exists() else []
        except ValueError as error:
            raise RecordError(f"{self.table} is not JSON ({error}): run `tegrad bench figures`") from error
        return rows

    def stale(self) -> list[str]:
        """Ids whose stored row differs from what its samples give (edited, missing, or left over)."""
        now, then = ({r["id"]: r for r in rows} for rows in (self.compute(), self.stored()))
        return sorted(id for id in now.keys() | then.keys() if now.get(id) != then.get(id))


# ---- how old a row is: what of the code that it measures has changed since


_ASIDE: Final = tuple(
    f":(exclude)tegrad/llm/{name}.py"
    for name in ("dequant", "model", "quality", "quantize", "reference", "session", "weights")
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
        *(
            f"tegrad/llm/{name}.py"
            for name in ("arch", "config", "dequant", "families", "gguf", "model", "session", "weights")
        ),
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
    raise LookupError(f"{id} belongs to no family of tegrad/bench/figures.py: say there which paths it measures")


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


# ---- README's table


BEGIN: Final = "<!-- `tegrad bench figures` writes this table -->"
END: Final = "<!-- end of the table -->"
README_ROWS: Final[Sequence[tuple[str, tuple[str, ...]]]] = (
    ("one sequence, 128 tokens", ("decode-1b-q6k-d0",)),
    ("the same after 4,096 and 16,384 tokens", ("decode-1b-q6k-d4096", "decode-1b-q6k-d16384")),
    ("in Q4_K, Q8_0, F16", ("decode-1b-q4k-d0", "decode-1b-q8_0-d0", "decode-1b-f16-d0")),
    ("3B Q6_K, 8B Q4_K, 8B Q6_K", ("decode-3b-q6k", "decode-8b-q4k-d0", "decode-8b-q6k-d0")),
    ("1B in Q4_K_M, Q3_K_M, IQ4_XS", ("decode-1b-q4km", "decode-1b-q3km", "decode-1b-iq4xs")),
    ("Qwen3 0.6B Q8_0, 1.7B Q4_K", ("decode-qwen3-0.6b-q8_0", "decode-qwen3-1.7b-q4k")),
    ("Qwen2.5 0.5B, SmolLM3 3B, Llama 3.1 8B in Q4_K_M",
     ("decode-qwen2.5-0.5b-q4km", "decode-smollm3-3b-q4km", "decode-8b-q4km")),
    ("Gemma 3 1B, 4B, Phi-4-mini in Q4_K_M",
     ("decode-gemma3-1b-q4km", "decode-gemma3-4b-q4km", "decode-phi4-mini-q4km")),
    ("Qwen 3.5 0.8B, 4B in Q4_K_M", ("decode-qwen3.5-0.8b-q4km", "decode-qwen3.5-4b-q4km")),
    ("Gemma 4 E2B, E4B, 31B in Q4_K_M",
     ("decode-gemma4-e2b-q4km", "decode-gemma4-e4b-q4km", "decode-gemma4-31b-q4km")),
    ("LFM2 1.2B, 2.6B in Q4_K_M", ("decode-lfm2-1.2b-q4km", "decode-lfm2-2.6b-q4km")),
    ("Tiny Aya, Command R7B in Q4_K_M", ("decode-tiny-aya-q4km", "decode-command-r7b-q4km")),
    ("a prompt of 512 tokens", ("prefill-1b-q6k-512",)),
    ("of Gemma 3 4B, Phi-4-mini in Q4_K_M", ("prefill-gemma3-4b-q4km", "prefill-phi4-mini-q4km")),
    ("of 128 tokens, 1B Q6_K", ("prefill-1b-q6k-128",)),
    ("of 128, 8B and Gemma 3 4B in Q4_K_M", ("prefill-8b-q4km-128", "prefill-gemma3-4b-q4km-128")),
    ("of 16,384 tokens, 1B Q6_K", ("prefill-1b-q6k-16384",)),
    ("of 16,384, 8B and Gemma 3 4B in Q4_K_M", ("prefill-8b-q4km-16384", "prefill-gemma3-4b-q4km-16384")),
    ("8, 32 and 64 sequences together", ("batch8-1b-q6k", "batch32-1b-q6k", "batch64-1b-q6k")),
    ("32 clients of a server, 1B Q6_K, 8B Q4_K_M", ("serve-32-clients-tok-s", "serve-32-clients-8b-tok-s")),
    ("start of the program to its first token", ("load-to-first-token",)),
)  # fmt: skip
"""A line's name, and the figures whose values stand in it."""
COMMIT_DIGITS: Final = 7
"""Digits of a commit."""


def readme_table(figures: Sequence[Mapping[str, Any]]) -> str:
    """The table, in Markdown. RecordError where a figure is missing."""
    rows = {row["id"]: row for row in figures}
    lines = ["| | tegrad | llama.cpp | | taken |", "|---|---|---|---|---|"]
    for name, ids in README_ROWS:
        if missing := [id for id in ids if id not in rows or rows[id]["peer"] is None]:
            raise RecordError(f"README's table needs the figures {', '.join(missing)}, which results/ lacks")
        found = [rows[id] for id in ids]
        ours, peer = (
            f"{', '.join(_number(row[side]) for row in found)} {found[0]['unit']}" for side in ("ours", "peer")
        )
        ratios, taken = ", ".join(map(_ratio, found)), ", ".join(dict.fromkeys(map(_taken, found)))
        lines.append(f"| {name} | {ours} | {peer} | {ratios} | {taken} |")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _ratio(row: Mapping[str, Any]) -> str:
    return f"{row['ratio']:.1f}x" if row["ratio"] >= 1.5 else f"{row['ratio']:.2f}x"


def _taken(row: Mapping[str, Any]) -> str:
    """The day, and the commit where it is known: what stays as it is, whatever is committed later."""
    at = f" at {row['commit'][:COMMIT_DIGITS]}" if row["commit"] else ""
    return f"{row['date'][:10]}{at}"


def with_table(text: str, figures: Sequence[Mapping[str, Any]]) -> str:
    """README's text with the table between its two marks. RecordError where they are not there."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise RecordError("README.md has no place for the table: two comments mark it (tegrad/bench/figures.py)")
    return f"{before}{BEGIN}\n\n{readme_table(figures)}\n\n{END}{after}"


def readme_beside(results: Path) -> Path:
    """README.md of the checkout whose results folder this is."""
    return results.absolute().parent / "README.md"


# ---- the figures of decoding and prompts


TOK_S: Final = "tok/s"
SAMPLE_TOKENS: Final = 128
"""Tokens that are decoded for one sample."""


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure is to reach: the easiest of so many times the peer, such a share of the limit, and a value.

    None takes no part.
    """

    times: float | None = None
    share: float | None = None
    value: float | None = None

    def level(self, peer: float | None = None, limit: float | None = None, *, larger: bool = True) -> float | None:
        """The goal as a number in the figure's unit; None where what it is measured by is missing."""
        scaled = ((self.times, peer), (self.share, limit))
        found = [base * factor if larger else base / factor for factor, base in scaled if factor and base]
        if len(found) < sum(factor is not None for factor, _ in scaled):
            return None
        found += [] if self.value is None else [self.value]
        if not found:
            return None
        return min(found) if larger else max(found)


@dataclass(frozen=True, slots=True)
class Target:
    """A figure: its id, the function of `tegrad.bench.decode` that takes it, its model, and what it is to reach.

    `amount` is the depth of a decode, the tokens of a prompt, the sequences of a batch, or the clients of a server.
    """

    id: str
    kind: str
    model: str
    goal: Goal
    amount: int = 0
    unit: str = TOK_S
    larger: bool = True

    @property
    def what(self) -> str:
        """The figure in words."""
        return _WORDS[self.kind].format(model=self.model, amount=self.amount, span=SAMPLE_TOKENS)

    def record(self, ours: Side, **how: Any) -> Record:
        """Samples taken just now; `how` is what `record.make` takes besides."""
        return make(self.id, self.what, self.unit, ours, larger_is_better=self.larger, gpu=board(), **how)


_WORDS: Final[Mapping[str, str]] = {
    "decode": "decode of {model}, {span} tokens greedily at depth {amount}",
    "prompt": "a prompt of {amount} tokens of {model}, to the last one's logits",
    "batch": "{amount} sequences of {model} decoding together, tokens of all",
    "grammar": "a sequence of {model} that keeps to a JSON schema, its tokens per second to those of one that does not",
    "first": "from the start of a process to its end after the first token of {model}, caches warm",
    "host": "CPU time of the process for a token of {model}, waits included, depth 0",
    "gap": "the GPU's time between the end of a step and the begin of the next, {model}, depth 0",
    "matvec": "decode of {model} by tinygrad's operations, with its matrix-vector products repaired",
    "serve-rate": "{model} through the server, clients: {amount}, tokens of all answers",
    "serve-first": "{model} through the server, clients: {amount}, median time to the first token",
    "serve-gap": "{model} through the server, clients: {amount}, 99th percentile of the time between a stream's events",
    "serve-overhead": "{model}, clients: {amount}, time through the server beyond that through its engine alone",
    "serve-scaling": "{model} through the server, clients: {amount}, tokens per second of two GPUs to those of one",
    "serve-same": "{model}, answers that are the same alone and under load, clients: {amount}; 0 where one differs",
}
SERVED: Final = tuple(kind for kind in _WORDS if kind.startswith("serve-"))
"""The kinds that `tegrad bench serve` takes."""

_THREE, _TWO_AND_A_HALF, _PAST = Goal(times=3, share=0.65), Goal(times=2.5, share=0.65), Goal(times=1)

TARGETS: Final[Mapping[str, Target]] = {
    target.id: target
    for target in (
        Target("decode-1b-q6k-d0", "decode", "1b-q6k", Goal(value=2800)),
        Target("decode-1b-q6k-d4096", "decode", "1b-q6k", Goal(times=2.5), 4096),
        Target("decode-1b-q6k-d16384", "decode", "1b-q6k", Goal(times=2.5), 16384),
        Target("decode-1b-q4k-d0", "decode", "1b-q4k", _THREE),
        Target("decode-1b-q8_0-d0", "decode", "1b-q8_0", _THREE),
        Target("decode-1b-f16-d0", "decode", "1b-f16", _THREE),
        Target("decode-qwen3-0.6b-q8_0", "decode", "qwen3-0.6b-q8_0", _TWO_AND_A_HALF),
        Target("decode-qwen3-1.7b-q4k", "decode", "qwen3-1.7b-q4k", _TWO_AND_A_HALF),
        Target("decode-3b-q6k", "decode", "3b-q6k", _TWO_AND_A_HALF),
        Target("decode-8b-q4k-d0", "decode", "8b-q4k", _TWO_AND_A_HALF),
        Target("decode-8b-q6k-d0", "decode", "8b-q6k", _TWO_AND_A_HALF),
        Target("decode-1b-q4km", "decode", "1b-q4km", _TWO_AND_A_HALF),
        Target("decode-8b-q4km", "decode", "8b-q4km", _TWO_AND_A_HALF),
        Target("decode-qwen2.5-0.5b-q4km", "decode", "qwen2.5-0.5b-q4km", _TWO_AND_A_HALF),
        Target("decode-gemma3-1b-q4km", "decode", "gemma3-1b-q4km", _TWO_AND_A_HALF),
        Target("decode-gemma3-4b-q4km", "decode", "gemma3-4b-q4km", _TWO_AND_A_HALF),
        Target("decode-phi4-mini-q4km", "decode", "phi4-mini-q4km", _TWO_AND_A_HALF),
        Target("decode-smollm3-3b-q4km", "decode", "smollm3-3b-q4km", _TWO_AND_A_HALF),
        Target("decode-qwen3.5-0.8b-q4km", "decode", "qwen3.5-0.8b-q4km", _TWO_AND_A_HALF),
        Target("decode-qwen3.5-4b-q4km", "decode", "qwen3.5-4b-q4km", _TWO_AND_A_HALF),
        Target("decode-gemma4-e2b-q4km", "decode", "gemma4-e2b-q4km", _TWO_AND_A_HALF),
        Target("decode-gemma4-e4b-q4km", "decode", "gemma4-e4b-q4km", _TWO_AND_A_HALF),
        Target("decode-gemma4-31b-q4km", "decode", "gemma4-31b-q4km", _TWO_AND_A_HALF),
        Target("decode-lfm2-1.2b-q4km", "decode", "lfm2-1.2b-q4km", _TWO_AND_A_HALF),
        Target("decode-lfm2-2.6b-q4km", "decode", "lfm2-2.6b-q4km", _TWO_AND_A_HALF),
        Target("decode-tiny-aya-q4km", "decode", "tiny-aya-q4km", _TWO_AND_A_HALF),
        Target("decode-command-r7b-q4km", "decode", "command-r7b-q4km", _TWO_AND_A_HALF),
        Target("decode-1b-q4_1", "decode", "1b-q4_1", _TWO_AND_A_HALF),
        Target("decode-1b-q5_0", "decode", "1b-q5_0", _TWO_AND_A_HALF),
        Target("decode-1b-q3km", "decode", "1b-q3km", _TWO_AND_A_HALF),
        Target("decode-1b-iq4xs", "decode", "1b-iq4xs", _TWO_AND_A_HALF),
        Target("prefill-1b-q6k-512", "prompt", "1b-q6k", Goal(times=2), 512),
        Target("prefill-gemma3-4b-q4km", "prompt", "gemma3-4b-q4km", Goal(times=2), 512),
        Target("prefill-phi4-mini-q4km", "prompt", "phi4-mini-q4km", Goal(times=2), 512),
        Target("prefill-qwen3.5-4b-q4km", "prompt", "qwen3.5-4b-q4km", Goal(times=2), 512),
        Target("prefill-gemma4-e4b-q4km", "prompt", "gemma4-e4b-q4km", Goal(times=2), 512),
        Target("prefill-gemma4-31b-q4km", "prompt", "gemma4-31b-q4km", Goal(times=2), 512),
        Target("prefill-lfm2-1.2b-q4km", "prompt", "lfm2-1.2b-q4km", Goal(times=2), 512),
        Target("prefill-1b-q6k-128", "prompt", "1b-q6k", _PAST, 128),
        Target("prefill-8b-q4km-128", "prompt", "8b-q4km", _PAST, 128),
        Target("prefill-gemma3-4b-q4km-128", "prompt", "gemma3-4b-q4km", _PAST, 128),
        Target("prefill-1b-q6k-16384", "prompt", "1b-q6k", _PAST, 16384),
        Target("prefill-8b-q4km-16384", "prompt", "8b-q4km", _PAST, 16384),
        Target("prefill-gemma3-4b-q4km-16384", "prompt", "gemma3-4b-q4km", _PAST, 16384),
        Target("batch8-1b-q6k", "batch", "1b-q6k", Goal(times=1.5), 8),
        Target("batch32-1b-q6k", "batch", "1b-q6k", Goal(times=1.5), 32),
        Target("batch64-1b-q6k", "batch", "1b-q6k", Goal(times=1.5), 64),
        Target("batch32-8b-q4km", "batch", "8b-q4km", Goal(times=2.5), 32),
        Target("grammar-decode-share", "grammar", "1b-q6k", Goal(value=0.8), unit="of free"),
        Target("serve-32-clients-tok-s", "serve-rate", "1b-q6k", Goal(times=2.5), 32),
        Target("serve-32-clients-8b-tok-s", "serve-rate", "8b-q4km", Goal(times=0.8 * 2.5), 32),
        Target("serve-1-client-tok-s", "serve-rate", "1b-q6k", Goal(times=2.5), 1),
        Target("serve-ttft-p50-ms", "serve-first", "1b-q6k", _PAST, 32, "ms", larger=False),
        Target("serve-itl-p99-ms", "serve-gap", "1b-q6k", _PAST, 32, "ms", larger=False),
        Target("serve-overhead-percent", "serve-overhead", "8b-q4km", Goal(value=5), 32, "%", larger=False),
        Target("serve-same-answer", "serve-same", "1b-q6k", Goal(value=1000), 64, "requests"),
        Target("serve-2-gpus-scaling", "serve-scaling", "1b-q6k", Goal(value=1.9), 128, "of one"),
        Target("load-to-first-token", "first", "1b-q6k", _PAST, unit="s", larger=False),
        Target("host-us-per-token", "host", "1b-q6k", Goal(value=15), unit="us", larger=False),
        Target("token-gap-us", "gap", "1b-q6k", Goal(value=3), unit="us", larger=False),
        Target("matvec-fix-1b-q6k", "matvec", "1b-q6k", _PAST),
    )
}
"""In the order of their importance."""

_OF_ANY: Final[Mapping[str, tuple[str, int]]] = {"decode": ("decode", 0), "prefill": ("prompt", 512)}
"""Kind and amount of what is measured of any model, by the beginning of its id."""


def target(id: str) -> Target:
    """A figure's target, or what is measured of any model of `bench.models`: decode-SHAPE-FORMAT, prefill-SHAPE-FORMAT.

    KeyError for neither.
    """
    if id in TARGETS:
        return TARGETS[id]
    kind, amount = _OF_ANY[(parts := id.partition("-"))[0]]
    return Target(id, kind, parts[2], Goal(), amount)


def published(figures: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The models whose speed rows of results/figures.json tell, in the order of TARGETS.

    LookupError for a decode's row that TARGETS does not know: nobody could say of which model it is.
    """
    ids = {row["id"] for row in figures}
    if unknown := sorted(id for id in ids - TARGETS.keys() if id.startswith("decode-")):
        raise LookupError(f"of which model is {', '.join(unknown)}? tegrad/bench/figures.py does not know")
    return tuple(dict.fromkeys(target.model for id, target in TARGETS.items() if id in ids))


SIDE_BY_SIDE: Final = tuple(id for id, target in TARGETS.items() if target.kind in ("decode", "prompt", "batch"))
"""What `tegrad bench decode` takes unless told otherwise."""
