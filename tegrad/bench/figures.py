"""results/figures.json: one row for every figure, computed from its samples file and never typed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tegrad.bench.age import Age, age
from tegrad.bench.history import History
from tegrad.bench.record import Record, RecordError, file_hash

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
                raise RecordError(f"{path} holds the samples of {record.id}; rename it")
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
            raise RecordError(f"{self.table} is not JSON ({error}); run `tegrad bench figures`") from error
        return rows

    def stale(self) -> list[str]:
        """Ids whose stored row differs from what its samples give (edited, missing, or left over)."""
        now, then = ({r["id"]: r for r in rows} for rows in (self.compute(), self.stored()))
        return sorted(id for id in now.keys() | then.keys() if now.get(id) != then.get(id))
