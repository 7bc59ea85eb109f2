"""The recorded cases: what nvgpu's own code was asked, what it answered, and where that comes from."""

from __future__ import annotations

import json
import lzma
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ADDRESS = (1 << 56) - (1 << 8)
"""Bits of a page table entry that hold the page's physical address (hw_gmmu_ga10b.h)."""

PATH = Path(__file__).parents[2] / "data" / "nvgpu-oracle.json.xz"


@dataclass(frozen=True)
class Case:
    """Steps, and the answer to each."""

    steps: tuple[str, ...]
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Record:
    """All cases by kind; `source` names repository, branch, commit, build profile, command and seed."""

    source: Mapping[str, str | int]
    kinds: Mapping[str, tuple[Case, ...]]

    @classmethod
    def load(cls, path: Path = PATH) -> Record:
        """Read what tools/nvgpu_oracle/record.py wrote."""
        raw = json.loads(lzma.decompress(path.read_bytes()))
        kinds = {
            kind: tuple(Case(tuple(steps), tuple(answers)) for steps, answers in cases)
            for kind, cases in raw["kinds"].items()
        }
        return cls(raw["source"], kinds)
