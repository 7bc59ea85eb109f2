"""The documents as a site: built without a warning, every page within reach, every command line in them understood."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from page_lines import BLOCK, PAGES, ROOT, commands

from tegrad import cli


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


PROGRAMS = {
    "api.md": "llm/test_api_page.py",
    "serve-anthropic.md": "serve/test_other_clients.py",
    "serve-ollama.md": "serve/test_other_clients.py",
    "serve-openai.md": "serve/test_openai_server.py",
}
"""Pages whose blocks of Python a test runs."""
PARTS = {
    "README.md": "names a model that is pulled; docs/api.md has the same, which runs",
    "board.md": "injects into a board that is there: tests/cli/test_board.py",
    "conformance.md": "a rule and a mutant as they stand in their modules",
    "record.md": "a loop without end",
    "testing.md": "a model of the reader's",
}
"""Pages whose blocks are compiled alone, their names of ours looked up, and why they do not run."""


def test_every_block_of_python_runs_somewhere_or_is_a_part() -> None:
    blocks = [(page.name, text) for page in PAGES for kind, text in BLOCK.findall(page.read_text()) if kind == "python"]
    assert {name for name, _ in blocks} == PROGRAMS.keys() | PARTS.keys()
    for page, file in PROGRAMS.items():
        source = (ROOT / "tests" / file).read_text()
        assert page.removesuffix(".md") in source
        assert "exec(" in source
    for page, text in blocks:
        tree = ast.parse(f"{{{text}}}" if text.startswith('"') else text)
        for node in ast.walk(tree):
            if page in PARTS and isinstance(node, ast.ImportFrom) and str(node.module).startswith("tegrad"):
                module = importlib.import_module(str(node.module))
                assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_links_to_other_hosts_are_whole() -> None:
    links = [(page.name, link) for page in PAGES for link in re.findall(r"\]\((\w+:[^)]*)\)", page.read_text())]
    assert [found for found in links if not re.fullmatch(r"https://[a-z0-9-]+(\.[a-z0-9-]+)+(/\S*)?", found[1])] == []


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Warnings are errors: a page that no list names, a link to a heading or a file that is not there."""
    sphinx = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(tmp_path / "trees")]
    command = [*sphinx, str(ROOT / "docs"), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {page.stem for page in PAGES if page.name not in ("README.md", "plan.md")}
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} >= pages
    assert "generate" in (tmp_path / "site" / "reference.html").read_text()
