"""llama-bench's columns: what one run of a model is called, its row, and rows as markdown, CSV, JSON or JSON lines.

A row has the fields of llama-bench's JSON (llama.cpp, tools/llama-bench), so that what reads those reads ours; `test`,
`n_seqs`, `machine`, `versions` and `command` are ours beside them.
"""

from __future__ import annotations

import csv
import io
import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tegrad.bench.record import RecordError
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
