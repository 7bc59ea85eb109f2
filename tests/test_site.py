"""The documents as a site: built without a warning, every page within reach, every command line in them understood."""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from tegrad import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
ASSIGNED = re.compile(r"[A-Z_0-9]+=\S*")
ENDS = re.compile(r"\s{2,}|\s#|\s[|&;<>]\s?|\s\(")
"""Where a command line in a document ends: notes behind it, a pipe, another command."""


def commands() -> Iterator[tuple[str, str]]:
    """Every command line of ours in a page's blocks: where, and its words."""
    for page in PAGES:
        for kind, block in BLOCK.findall(page.read_text()):
            if kind not in ("", "console", "sh"):
                continue
            for line in re.sub(r"\\\n\s*", "", block).splitlines():
                words = line.strip().removeprefix("$ ")
                while found := ASSIGNED.match(words):
                    words = words[found.end() :].lstrip()
                if words.startswith("tegrad "):
                    yield page.name, ENDS.split(words)[0]


@functools.cache
def built(top: str) -> Any:
    """The program with one of its commands."""
    return typer.main.get_command(cli.build([top]))


FOUND = sorted(set(commands()))


def test_commands_are_found_in_the_pages() -> None:
    assert len(FOUND) > 80


@pytest.mark.parametrize(("page", "line"), FOUND, ids=lambda value: str(value).removeprefix("tegrad "))
def test_a_command_line_in_a_page_is_one_that_there_is(page: str, line: str) -> None:
    _, top, *words = shlex.split(line)
    if top.startswith("-"):
        return
    root = built(top)
    command, context = root.commands[top], typer.Context(root, info_name="tegrad")
    while words and words[0] in getattr(command, "commands", {}):
        context = typer.Context(command, context, words[0])
        command, words = command.commands[words[0]], words[1:]
    if not getattr(command, "commands", {}):
        try:
            command.parse_args(typer.Context(command, context, top), words)
        except typer.BadParameter as error:
            if not str(error).endswith("does not exist."):  # a file of the reader's
                raise


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Warnings are errors: a page that no list names, a link to a heading or a file that is not there."""
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    command = [*sphinx, str(ROOT / "docs"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {page.stem for page in PAGES if page.name not in ("README.md", "plan.md")}
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} >= pages
    assert "generate" in (tmp_path / "site" / "reference.html").read_text()
