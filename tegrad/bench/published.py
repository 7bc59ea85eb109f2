"""Files of published models that figures are measured with: known by their SHA-256, fetched by tools/published.py."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = "TEGRAD_PUBLISHED"
"""The variable that names the folder that they lie in, for `tegrad bench take`."""


@dataclass(frozen=True, slots=True)
class Published:
    """The file of a published model."""

    file: str
    sha256: str
    what: str


PUBLISHED: Final[Mapping[str, Published]] = {
    "smollm2": Published(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        "SmolLM2 135M Instruct in Q4_1",
    ),
    "gemma3": Published(
        "gemma-3-270m-q4_k_m.gguf",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        "Gemma 3 270M in Q4_K_M",
    ),
}
"""The figure of each is ppl-NAME."""


def digest(path: Path) -> str:
    """A file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def name_of(path: Path) -> str | None:
    """The name in PUBLISHED of a file, whatever it is called."""
    found = digest(path)
    return next((name for name, known in PUBLISHED.items() if known.sha256 == found), None)
