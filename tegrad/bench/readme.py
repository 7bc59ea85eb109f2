"""README's table of figures, out of results/figures.json: never typed, and checked where the figures are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tegrad.bench.record import RecordError

BEGIN: Final = "<!-- `tegrad bench figures` writes this table -->"
END: Final = "<!-- end of the table -->"
ROWS: Final[Sequence[tuple[str, tuple[str, ...]]]] = (
    ("one sequence, 128 tokens", ("decode-1b-q6k-d0",)),
    ("the same after 4,096 and 16,384 tokens", ("decode-1b-q6k-d4096", "decode-1b-q6k-d16384")),
    ("in Q4_K, Q8_0, F16", ("decode-1b-q4k-d0", "decode-1b-q8_0-d0", "decode-1b-f16-d0")),
    ("3B Q6_K, 8B Q4_K, 8B Q6_K", ("decode-3b-q6k", "decode-8b-q4k-d0", "decode-8b-q6k-d0")),
    ("Qwen3 0.6B Q8_0, 1.7B Q4_K", ("decode-qwen3-0.6b-q8_0", "decode-qwen3-1.7b-q4k")),
    ("a prompt of 512 tokens", ("prefill-1b-q6k-512",)),
    ("8 and 32 sequences together", ("batch8-1b-q6k", "batch32-1b-q6k")),
    ("start of the program to its first token", ("load-to-first-token",)),
)
"""A line's name, and the figures whose values stand in it."""
COMMIT_DIGITS: Final = 7
"""Digits of a commit."""


def table(figures: Sequence[Mapping[str, Any]]) -> str:
    """The table, in Markdown. RecordError where a figure is missing."""
    rows = {row["id"]: row for row in figures}
    lines = ["| | tegrad | llama.cpp | | taken |", "|---|---|---|---|---|"]
    for name, ids in ROWS:
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
        raise RecordError("README.md has no place for the table: two comments mark it (tegrad/bench/readme.py)")
    return f"{before}{BEGIN}\n\n{table(figures)}\n\n{END}{after}"


def path_beside(results: Path) -> Path:
    """README.md of the checkout whose results folder this is."""
    return results.absolute().parent / "README.md"
