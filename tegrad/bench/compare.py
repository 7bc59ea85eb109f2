"""Two results of the same measurements: which changed by more than noise, `tegrad bench compare A.json B.json`.

What can be compared: rows of `tegrad bench model` or of llama-bench (JSON or JSON lines), a samples file, a folder of
samples files. Two sides of a row differ where their samples' ranks do (Mann and Whitney's test, exact, two-sided) and
their medians are apart by more than a hundredth; too few samples for that test have to be apart by a twentieth.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

from tegrad.bench.columns import LOAD, parsed, test_of
from tegrad.bench.record import Record, RecordError

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
    old, new = median(before.samples), median(after.samples)
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
