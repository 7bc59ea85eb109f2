"""What a GPU made of the forms, on disk: an xz file of one line of JSON and then all results, form after form.

The line tells machine and versions, and for each form its digest and the length of its results, or why there are none.
"""

import json
import lzma
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ptx.oracle.form import Form
from tests.ptx.oracle.kernels import digest

PATH = Path(__file__).parents[3] / "results" / "hardware" / "ptx-oracle-h200.xz"


@dataclass(frozen=True)
class Record:
    """`about` says where it was made; `results` are bytes by form; `refused` the reason by form."""

    about: dict[str, Any]
    digests: dict[str, str]
    results: dict[str, bytes]
    refused: dict[str, str]

    def dump(self, path: Path) -> None:
        rows, blob = [], []
        for name, mark in self.digests.items():
            data = self.results.get(name, b"")
            rows.append([name, mark, len(data), self.refused.get(name, "")])
            blob.append(data)
        head = json.dumps({**self.about, "forms": rows}).encode() + b"\n"
        path.write_bytes(lzma.compress(head + b"".join(blob), preset=9))

    @staticmethod
    def load(path: Path = PATH) -> "Record":
        head, _, blob = lzma.decompress(path.read_bytes()).partition(b"\n")
        about = json.loads(head)
        rows, at, results = about.pop("forms"), 0, {}
        for name, _, size, why in rows:
            if not why:
                results[name] = blob[at : at + size]
            at += size
        return Record(about, {r[0]: r[1] for r in rows}, results, {r[0]: r[3] for r in rows if r[3]})


def digests(forms: Iterable[Form]) -> dict[str, str]:
    """The digest of each form."""
    return {f.name: digest(f) for f in forms}
