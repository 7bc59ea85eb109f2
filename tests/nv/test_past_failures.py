"""docs/past-failures.md names tests that exist."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "past-failures.md"


def test_every_test_that_the_page_names_exists() -> None:
    named = re.findall(r"(nv/\w+\.py)::(\w+)", PAGE.read_text())
    assert len(named) > 30
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (TESTS / file).read_text()]
    assert missing == []
