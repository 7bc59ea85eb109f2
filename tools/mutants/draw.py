"""Draws the mutants before any is run: by a seed, a number of each part of the source. `python tools/mutants/draw.py`.

Writes mutants.json beside this file, for which run.py looks.
"""

from __future__ import annotations

import dataclasses
import json
import random
import subprocess
from pathlib import Path
from typing import Any

from operators import Change, changes

PROJECT = Path(__file__).resolve().parents[2]
DRAWN = Path(__file__).with_name("mutants.json")
SEED = 20261123
PARTS = {"kernels": 60, "nv": 40, "orin": 40, "uapi": 40, "llm": 40, "": 80}
"""How many of each part: CUDA C, four packages, and all of the source."""


def sources(part: str) -> list[Path]:
    """The files of a part, sorted."""
    package = PROJECT / "tegrad"
    if part == "kernels":
        return sorted(path for path in package.rglob("*") if path.suffix in (".cu", ".cuh"))
    found = (package / part).rglob("*.py") if part else package.rglob("*")
    return sorted(path for path in found if path.suffix in (".py", ".cu", ".cuh"))


def draw(seed: int = SEED) -> list[dict[str, Any]]:
    """The mutants, none twice."""
    generator = random.Random(seed)
    taken: set[tuple[str, Change]] = set()
    for part, count in PARTS.items():
        every = [(str(path.relative_to(PROJECT)), change) for path in sources(part) for change in changes(path)]
        left = [one for one in every if one not in taken]
        taken |= set(generator.sample(left, count))
    rows = [{"file": file, **dataclasses.asdict(change)} for file, change in sorted(taken, key=_order)]
    return [{"id": f"{number:03}", **row} for number, row in enumerate(rows)]


def _order(one: tuple[str, Change]) -> tuple[str, int, int, str]:
    return one[0], one[1].start, one[1].end, one[1].after


def main() -> None:
    """Draw and write."""
    commit = subprocess.run(
        ["git", "-C", str(PROJECT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    rows = draw()
    DRAWN.write_text(json.dumps({"seed": SEED, "commit": commit, "mutants": rows}, indent=1) + "\n")
    print(f"{len(rows)} mutants of {commit[:12]} in {DRAWN}")


if __name__ == "__main__":
    main()
