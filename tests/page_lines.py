"""Blocks and command lines of ours in the documents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
BEFORE = re.compile(r"[A-Z_0-9]+=\S* +|[^#]*? \| (?=tegrad )")
"""What may stand before a command: variables, what is piped into it."""
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
                while found := BEFORE.match(words):
                    words = words[found.end() :]
                if words.startswith("tegrad "):
                    yield page.name, ENDS.split(words)[0]
