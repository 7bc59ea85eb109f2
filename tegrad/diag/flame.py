"""A picture of where something goes: a bar for the whole, below it bars for its parts, and for theirs (SVG)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from typing import Final, TypeAlias

WIDTH: Final = 960
BAR: Final = 26
EDGE: Final = 12
LETTER: Final = 6.7
"""Pixels of a letter, about."""
COLORS: Final = ("#4e79a7", "#f28e2b", "#59a14f", "#b6992d", "#e15759", "#499894", "#d37295", "#79706e")
"""Of the names of lowest bars, in the order in which they come."""
GRAY: Final = "#e4e4e4"
"""Of those above."""

Part: TypeAlias = tuple[tuple[str, ...], float]
"""Names from the outermost to the innermost, and how much it is."""


def flame(parts: Sequence[Part], title: str, unit: str) -> str:
    """An SVG of parts that stay in their order; those that follow each other with the same outer names share a bar."""
    whole = sum(size for _, size in parts) or 1.0
    depth = max((len(names) for names, _ in parts), default=0)
    names = list(dict.fromkeys(path[-1] for path, _ in parts))
    colors = {name: COLORS[at % len(COLORS)] for at, name in enumerate(names)}
    height = 2 * EDGE + BAR * (depth + 3)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{EDGE}" y="{EDGE + 14}" font-size="14">{escape(title)}</text>',
    ]
    for level in range(-1, depth):
        for name, begin, size, lowest in _bars(parts, level):
            color = colors[name] if lowest else ""
            lines.append(
                _bar(name, EDGE + BAR * (level + 2), begin / whole, size / whole, f"{size:,.1f} {unit}", color)
            )
    x = float(EDGE)
    for name, color in colors.items():
        y = height - EDGE
        lines.append(f'<rect x="{x:.1f}" y="{y - 10}" width="10" height="10" fill="{color}"/>')
        lines.append(f'<text x="{x + 14:.1f}" y="{y}">{escape(name)}</text>')
        x += 34 + LETTER * len(name)
    return "\n".join([*lines, "</svg>", ""])


def _bars(parts: Sequence[Part], level: int) -> Iterator[tuple[str, float, float, bool]]:
    """Bars of a level (-1: the whole): name, begin, size, and whether nothing lies below."""
    at = 0.0
    for path, group in groupby(parts, lambda part: part[0][: level + 1]):
        found = list(group)
        size = sum(each for _, each in found)
        if len(path) == level + 1:
            yield path[-1] if path else "all", at, size, found[0][0] == path
        at += size


def _bar(name: str, y: int, begin: float, share: float, told: str, color: str) -> str:
    """One bar, with as much of its text as it holds; all of it where a pointer rests on it."""
    x, width = EDGE + begin * (WIDTH - 2 * EDGE), share * (WIDTH - 2 * EDGE)
    whole = f"{name}: {told}, {share:.1%}"
    label = next((text for text in (whole, name) if len(text) * LETTER < width - 6), "")
    return (
        f'<g><title>{escape(whole)}</title><rect x="{x:.2f}" y="{y}" width="{max(width - 1, 0.3):.2f}" '
        f'height="{BAR - 2}" fill="{color or GRAY}"/><text x="{x + 4:.2f}" y="{y + 16}" '
        f'fill="{"white" if color else "black"}">{escape(label)}</text></g>'
    )
