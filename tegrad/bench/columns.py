"""llama-bench's columns: a run of a model as a row, rows in every form that they are written in, and two sets compared.

A row has the fields of llama-bench's JSON (llama.cpp, tools/llama-bench), so that what reads those reads ours; `test`,
`n_seqs`, `machine`, `versions` and `command` are ours beside them.

`tegrad bench compare A.json B.json` says which measurements changed by more than noise. It reads rows of `tegrad bench
model` or of llama-bench (JSON or JSON lines), a samples file, or a folder of samples files. Two sides of a row differ
where their samples' ranks do (Mann and Whitney's test, exact, two-sided) and their medians are apart by more than a
hundredth; too few samples for that test have to be apart by a twentieth.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from tegrad.bench.record import Record, RecordError
from tegrad.llm.gguf import Gguf

FIELDS: Final = (
    *("build_commit", "build_number", "cpu_info", "gpu_info", "backends", "model_filename", "model_type"),
    *("model_size", "model_n_params", "type_k", "type_v", "n_gpu_layers", "flash_attn", "n_prompt", "n_gen", "n_depth"),
    *("test_time", "avg_ns", "stddev_ns", "avg_ts", "stddev_ts"),
)
"""Of llama-bench's fields those that mean something here, in its order; `samples_ns` and `samples_ts` follow."""
WIDTHS: Final = {"model": -30, "size": 10, "params": 10, "backend": -10, "test": 15, "t/s": 20}
"""The columns of a table and their widths; a negative one is aligned to the left."""
LOAD: Final = "load"
"""The test that loads a model; its column t/s holds seconds."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is timed: a prompt of so many tokens, or so many tokens decoded, after `depth` tokens, by so many sequences.

    With neither it is the loading of the model.
    """

    prompt: int = 0
    generated: int = 0
    depth: int = 0
    sequences: int = 1

    def __str__(self) -> str:
        """As llama-bench calls it: pp512, tg128 @ d4096; tg128 x 8 for eight sequences together."""
        if not self.tokens:
            return LOAD
        name = "+".join(f"{what}{count}" for what, count in (("pp", self.prompt), ("tg", self.generated)) if count)
        name += f" x {self.sequences}" if self.sequences > 1 else ""
        return name + (f" @ d{self.depth}" if self.depth else "")

    @property
    def tokens(self) -> int:
        """All that a repetition makes or takes."""
        return (self.prompt + self.generated) * self.sequences


@dataclass(frozen=True, slots=True)
class Subject:
    """A model as rows name it."""

    path: Path
    type: str
    bytes: int
    parameters: int
    layers: int

    @classmethod
    def of(cls, path: Path) -> Subject:
        """Read from a file's header; GgufError."""
        with Gguf.open(path) as file:
            said, tensors = file.metadata, file.tensors.values()
            family = str(said.get("general.architecture"))
            parameters = sum(info.rows * info.columns for info in tensors)
            bytes_of: dict[str, int] = {}
            for info in tensors:
                bytes_of[info.type.name] = bytes_of.get(info.type.name, 0) + info.nbytes
            size = str(said.get("general.size_label") or _short(parameters))
            name = f"{family} {size} {max(bytes_of, key=bytes_of.__getitem__, default='')}"
            layers = said.get(f"{family}.block_count")
            return cls(path, name, sum(bytes_of.values()), parameters, layers if isinstance(layers, int) else 0)


def row(subject: Subject, case: Case, seconds: Sequence[float], about: Mapping[str, Any]) -> dict[str, Any]:
    """A row of one test's repetitions; `about` has what all rows of a run share."""
    speeds = [case.tokens / one for one in seconds]
    return {
        **about,
        "model_filename": subject.path.name,
        "model_type": subject.type,
        "model_size": subject.bytes,
        "model_n_params": subject.parameters,
        "n_gpu_layers": subject.layers + 1,
        "flash_attn": 1,
        "n_prompt": case.prompt,
        "n_gen": case.generated,
        "n_depth": case.depth,
        "n_seqs": case.sequences,
        "test": str(case),
        "avg_ns": round(1e9 * statistics.mean(seconds)),
        "stddev_ns": round(1e9 * _deviation(seconds)),
        "avg_ts": statistics.mean(speeds),
        "stddev_ts": _deviation(speeds),
        "samples_ns": [round(1e9 * one) for one in seconds],
        "samples_ts": speeds,
    }


def _deviation(samples: Sequence[float]) -> float:
    """The sample's standard deviation, as llama-bench has it; 0 of one."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


def _short(parameters: int) -> str:
    return f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"


def test_of(given: Mapping[str, Any]) -> str:
    """A row's test by name: what it says itself, or what llama-bench would print of its numbers."""
    if "test" in given:
        return str(given["test"])
    return str(Case(given["n_prompt"], given["n_gen"], given["n_depth"]))


def parsed(path: Path) -> Any:
    """What a file holds: one JSON text, or rows as JSON lines. RecordError."""
    try:
        text = path.read_text()
        whole = text.lstrip().startswith(("[", "{\n"))
        return json.loads(text) if whole else [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} cannot be read as JSON ({error})") from error


# ---- as text, a piece for each row as it comes; the first piece has what stands before, the last what stands after


def markdown(rows: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """A table like llama-bench's."""
    yield "| " + " | ".join(_cell(name, width) for name, width in WIDTHS.items()) + " |\n"
    yield "| " + " | ".join("-" * (abs(width) - 1) + "-:"[width > 0] for width in WIDTHS.values()) + " |\n"
    for one in rows:
        cells = {
            "model": str(one["model_type"]),
            "size": _binary(one["model_size"]),
            "params": f"{one['model_n_params'] / 1e9:.2f} B" if one["model_n_params"] >= 1e9 else
                      f"{one['model_n_params'] / 1e6:.2f} M",
            "backend": str(one["backends"]),
            "test": test_of(one),
            "t/s": _speed(one),
        }  # fmt: skip
        yield "| " + " | ".join(_cell(cells[name], width) for name, width in WIDTHS.items()) + " |\n"


def _speed(one: Mapping[str, Any]) -> str:
    if test_of(one) == LOAD:
        return f"{one['avg_ns'] / 1e9:.2f} s ± {one['stddev_ns'] / 1e9:.2f}"
    return f"{one['avg_ts']:.2f} ± {one['stddev_ts']:.2f}"


def _binary(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 1 << 30 else f"{size / 2**20:.2f} MiB"


def _cell(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


def comma_separated(rows: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """CSV with every field in quotes, as llama-bench writes it; ours are the last."""
    names = [*FIELDS, "n_seqs", "test"]
    yield _csv(names)
    for one in rows:
        yield _csv([one.get(name, "") for name in names[:-1]] + [test_of(one)])


def _csv(values: Sequence[object]) -> str:
    told = io.StringIO()
    csv.writer(told, quoting=csv.QUOTE_ALL, lineterminator="\n").writerow(values)
    return told.getvalue()


def json_list(rows: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """One JSON list."""
    begin = "[\n"
    for one in rows:
        yield begin + json.dumps(one)
        begin = ",\n"
    yield "\n]\n" if begin != "[\n" else "[]\n"


def json_lines(rows: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    """A JSON object a line."""
    return (json.dumps(one) + "\n" for one in rows)


FORMS: Final[Mapping[str, Callable[[Iterator[Mapping[str, Any]]], Iterator[str]]]] = {
    "md": markdown, "csv": comma_separated, "json": json_list, "jsonl": json_lines,
}  # fmt: skip
"""What `-o` chooses."""


# ---- what changed between two results


CHANCE: Final = 0.05
"""How likely samples of one speed may look so different."""
LEAST: Final = 0.01
"""A change of the medians below this is none, however sure it is."""
LEAST_UNSURE: Final = 0.05
"""The same where there are too few samples to tell noise from change."""
ENOUGH: Final = 4
"""Samples of each side from which on the test can tell: of three against three the least chance is a tenth."""
MOST: Final = 20
"""Samples of a side that the test looks at, evenly chosen: its work grows with the third power."""
Verdict = Literal["better", "worse", "same"]


@dataclass(frozen=True, slots=True)
class Measured:
    """One measurement's samples."""

    samples: tuple[float, ...]
    unit: str
    larger_is_better: bool = True


@dataclass(frozen=True, slots=True)
class Change:
    """One measurement on both sides; `ratio` says how many times better the second is."""

    name: str
    before: float
    after: float
    unit: str
    ratio: float
    chance: float | None
    """How likely such samples are without a change; None of too few."""
    verdict: Verdict


def read(path: Path) -> dict[str, Measured]:
    """The measurements in a file or folder, by name. RecordError where there are none."""
    found = dict(_of_folder(path) if path.is_dir() else _of_file(path))
    if not found:
        raise RecordError(f"{path} holds no measurements: give a samples file, or rows of `tegrad bench model -o json`")
    return found


def _of_folder(folder: Path) -> Iterator[tuple[str, Measured]]:
    for path in sorted(folder.glob("*.json")):
        yield from _of_file(path)


def _of_file(path: Path) -> Iterator[tuple[str, Measured]]:
    whole = parsed(path)
    if isinstance(whole, dict):
        record = Record.load(path)
        yield record.id, Measured(tuple(record.ours.samples), record.unit, record.larger_is_better)
        return
    names: set[str] = set()
    for row in whole:
        try:
            if (name := _named(row)) in names:
                raise RecordError(f"{path}: {name} is there twice: give a file with one run of each test")
            names.add(name)
            yield name, _of_row(row)
        except (KeyError, TypeError) as error:
            raise RecordError(
                f"{path}: a row lacks {error}: it is none of `tegrad bench model`, nor of llama-bench"
            ) from error


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['model_type']} {test_of(row)} ({row['backends']})"


def _of_row(row: Mapping[str, Any]) -> Measured:
    if test_of(row) == LOAD:
        return Measured(tuple(one / 1e9 for one in row["samples_ns"]), "s", larger_is_better=False)
    return Measured(tuple(map(float, row["samples_ts"])), "tok/s")


def compare(before: Mapping[str, Measured], after: Mapping[str, Measured]) -> list[Change]:
    """What both sides have, in the order of the first. RecordError where that is nothing, or units differ."""
    both = [name for name in before if name in after]
    if not both:
        raise RecordError(f"nothing is in both: {_some(before)} against {_some(after)}")
    if odd := [name for name in both if before[name].unit != after[name].unit]:
        raise RecordError(f"{odd[0]} is in {before[odd[0]].unit} and in {after[odd[0]].unit}")
    return [change(name, before[name], after[name]) for name in both]


def _some(names: Iterable[str]) -> str:
    first = sorted(names)[:3]
    return ", ".join(first)


def change(name: str, before: Measured, after: Measured) -> Change:
    """One measurement, judged."""
    old, new = statistics.median(before.samples), statistics.median(after.samples)
    ratio = new / old if before.larger_is_better else old / new
    sure = min(len(before.samples), len(after.samples)) >= ENOUGH
    chance = by_chance(_thinned(before.samples), _thinned(after.samples)) if sure else None
    verdict: Verdict = "same"
    if abs(ratio - 1) > (LEAST_UNSURE if chance is None else LEAST) and (chance is None or chance < CHANCE):
        verdict = "better" if ratio > 1 else "worse"
    return Change(name, old, new, before.unit, ratio, chance, verdict)


def _thinned(samples: Sequence[float]) -> Sequence[float]:
    return samples if len(samples) <= MOST else [samples[at * len(samples) // MOST] for at in range(MOST)]


def by_chance(one: Sequence[float], other: Sequence[float]) -> float:
    """How likely ranks at least as far apart are, if both are of one kind; exact, ties at their mean rank."""
    ranks = _doubled_ranks([*one, *other])
    count, expected = len(one), len(one) * (len(ranks) + 1)
    far = abs(sum(ranks[:count]) - expected)
    ways: list[dict[int, int]] = [{0: 1}, *({} for _ in range(count))]  # by how many are chosen: sum of ranks -> ways
    for rank in ranks:
        for chosen in range(count, 0, -1):
            for total, number in ways[chosen - 1].items():
                ways[chosen][total + rank] = ways[chosen].get(total + rank, 0) + number
    hits = sum(number for total, number in ways[count].items() if abs(total - expected) >= far)
    return hits / sum(ways[count].values())


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    """Twice each value's rank, so that the mean of equal ones is a whole number."""
    ordered = sorted(values)
    first = {value: at for at, value in reversed(list(enumerate(ordered, 1)))}
    last = {value: at for at, value in enumerate(ordered, 1)}
    return [first[value] + last[value] for value in values]


HEAD: Final = f"{'measurement':52} {'before':>11} {'after':>11} {'unit':8} {'ratio':>7} {'chance':>7}"


def text(row: Change) -> str:
    """A line below HEAD."""
    chance = "few" if row.chance is None else f"{row.chance:.3f}"
    mark = "" if row.verdict == "same" else row.verdict
    return (
        f"{row.name:52} {row.before:11.5g} {row.after:11.5g} {row.unit:8} {row.ratio:7.3f} {chance:>7} {mark}".rstrip()
    )
