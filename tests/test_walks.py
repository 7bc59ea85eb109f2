"""The walks in the documents run as they stand there, with the answers that stand there, each in a session of its own
or in that of the one before."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
PROGRAM = """
import doctest, re, sys
from pathlib import Path

seen, found = {}, 0
for path in sys.argv[1:]:
    text = "\\n".join(re.findall(r"^```pycon\\n(.*?)^```$", Path(path).read_text(), re.MULTILINE | re.DOTALL))
    test = doctest.DocTestParser().get_doctest(text, seen, Path(path).name, path, 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    runner.run(test, clear_globs=False)
    seen, found = test.globs, found + len(test.examples)
    if runner.summarize(verbose=False).failed:
        sys.exit(1)
print(found)
"""


@pytest.mark.board
@pytest.mark.parametrize(
    ("pages", "least"),
    [(("walk-1-discovery", "walk-2-memory", "walk-3-submission"), 70), (("walk-4-tinygrad",), 15)],
    ids=["by hand", "tinygrad"],
)
def test_a_walk_runs_as_it_is_written(pages: tuple[str, ...], least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    command = [sys.executable, "-c", PROGRAM, *(str(DOCS / f"{page}.md") for page in pages)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) >= least
