"""The documents' tables are complete: modules, kernels, families, formats and commands."""

import re
from pathlib import Path

import pytest

from tegrad.cli import COMMANDS
from tegrad.llm.families import ARCHES
from tegrad.llm.formats import FORMATS
from tegrad.serve.config import OPTIONS

ROOT = Path(__file__).resolve().parents[1]
ARCHITECTURE, LLM, KERNELS, SERVE = (
    (ROOT / f"docs/{page}.md").read_text() for page in ("architecture", "llm", "kernels", "serve")
)
BENCH = ARCHITECTURE.split("\n## bench/")[1]


def files(folder: str, *suffixes: str) -> list[str]:
    """Names of a package's sources, but what only begins with an underscore."""
    return sorted(
        path.name for path in (ROOT / "tegrad" / folder).iterdir() if path.suffix in suffixes and path.name[0] != "_"
    )


def quoted(page: str) -> set[str]:
    """Everything that a page has between backticks."""
    return set(re.findall(r"`([^`\n]+)`", page))


@pytest.mark.parametrize(("folder", "page"), [("llm", LLM), ("bench", BENCH), ("nv", ARCHITECTURE), ("serve", SERVE)])
def test_every_module_has_its_place_in_a_table(folder: str, page: str) -> None:
    told = quoted(page)
    modules = [name.removesuffix(".py") for name in files(folder, ".py")]
    assert len(modules) > 20
    assert [name for name in modules if name not in told and f"{folder}/{name}.py" not in told] == []


def test_every_kernel_and_header_is_explained() -> None:
    sources = files("llm/kernels", ".cu", ".cuh")
    assert len(sources) > 20
    assert [name for name in sources if name not in quoted(KERNELS)] == []


def test_every_family_is_among_those_that_are_read() -> None:
    table = LLM.split("## What is read")[1].split("\n## ")[0]
    assert [name for name in ARCHES if f"`{name}`" not in table] == []


def test_the_formats_that_are_read_are_those_that_there_are() -> None:
    (row,) = re.findall(r"^\| quantizations \| (.*), mixed as the file likes \|$", LLM, re.MULTILINE)
    assert sorted(row.split(", ")) == sorted(kind.name for kind in FORMATS)


def test_the_diagram_has_every_command() -> None:
    (line,) = re.findall(r"^ *cli/ +(.*)$", ARCHITECTURE, re.MULTILINE)
    assert sorted(line.split(" · ")) == sorted(COMMANDS)


def test_every_option_of_the_server_has_a_row() -> None:
    rows = re.findall(r"^\| (`.*?) \|", SERVE.split("## Options")[1].split("\n## ")[0], re.MULTILINE)
    told = {name.strip("-").replace("-", "_") for row in rows for name in quoted(row)}
    assert [name for name in OPTIONS if name not in told and name != "models"] == []


def test_every_test_that_the_page_for_upstream_names_is_there() -> None:
    page = (ROOT / "docs" / "upstream.md").read_text()
    named = re.findall(r"nv/(test_\w+\.py)(?:::(\w+))?", page)
    assert len(named) > 7
    for file, test in named:
        assert f"def {test}" in (ROOT / "tests" / "nv" / file).read_text(), (file, test)
