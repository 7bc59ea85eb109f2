"""The kernels' sources keep to the project's line length."""

from pathlib import Path

import tegrad.llm

KERNELS = Path(tegrad.llm.__file__).parent / "kernels"
LONGEST = 120


def test_no_line_is_longer_than_120() -> None:
    sources = [path for path in KERNELS.iterdir() if path.suffix in (".cu", ".cuh")]
    assert len(sources) > 20
    assert not [path.name for path in sources if max(map(len, path.read_text().split("\n"))) > LONGEST]
