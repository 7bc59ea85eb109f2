"""Where answers go: a terminal, with Markdown as it comes, or any other stream, as plain text.

In a terminal the last block of an answer is drawn anew with each piece, as far as the screen has room for it. A block
that is over stays as it is.
"""

from __future__ import annotations

import re
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final, Protocol

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.text import Text

REDRAW_S: Final = 0.06
"""Seconds between two drawings of a block that is not over."""
FENCE: Final = re.compile("`{3,}|~{3,}")
CONTROLS: Final = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})
"""What a model may not do to a terminal."""


class Screen(Protocol):
    """What a session shows."""

    thoughts: bool
    """Whether what a model thinks before it answers is shown."""

    def note(self, text: str) -> None:
        """Something beside the answers."""

    def error(self, text: str) -> None:
        """What went wrong, and the next step."""

    def text(self, piece: str) -> None:
        """A piece of an answer."""

    def thinking(self, piece: str) -> None:
        """A piece of what the model thinks."""

    def end(self) -> None:
        """The answer is over."""


class Plain:
    """Answers on standard output, all else on standard error."""

    def __init__(self) -> None:
        self.thoughts = False
        self._begun = False

    def note(self, text: str) -> None:
        """See `Screen`."""
        print(text, file=sys.stderr)

    def error(self, text: str) -> None:
        """See `Screen`."""
        print(f"tegrad: {text}", file=sys.stderr)

    def text(self, piece: str) -> None:
        """See `Screen`."""
        sys.stdout.write(piece)
        sys.stdout.flush()
        self._begun = True

    def thinking(self, piece: str) -> None:
        """See `Screen`."""
        if self.thoughts:
            self.text(piece)

    def end(self) -> None:
        """See `Screen`."""
        if self._begun:
            self.text("\n")
        self._begun = False


class Terminal:
    """Markdown on a terminal; thoughts dim, or folded into a line."""

    def __init__(self, console: Console | None = None) -> None:
        self.thoughts = True
        self._console = console or Console(highlight=False)
        self._kind, self._rest, self._shown, self._begun = "", "", 0.0, 0.0
        self._live: Live | None = None

    def note(self, text: str) -> None:
        """See `Screen`."""
        self._console.print(Text(text.translate(CONTROLS), style="dim"))

    def error(self, text: str) -> None:
        """See `Screen`."""
        self._console.print(Text(text.translate(CONTROLS), style="red"))

    def text(self, piece: str) -> None:
        """See `Screen`."""
        self._add("text", piece)

    def thinking(self, piece: str) -> None:
        """See `Screen`."""
        self._add("thinking", piece)

    def end(self) -> None:
        """See `Screen`."""
        self._settle(len(self._rest))
        self._kind = ""

    def _add(self, kind: str, piece: str) -> None:
        if kind != self._kind:
            self.end()
            self._kind, self._begun = kind, time.monotonic()
            piece = piece.lstrip("\n")
        self._rest += piece.translate(CONTROLS)
        while self._kind == "text" and (over := settled(self._rest)):
            self._settle(over)
        if time.monotonic() - self._shown > REDRAW_S and self._rest.strip():
            if self._live is None:
                self._live = Live(console=self._console, transient=True, auto_refresh=False)
                self._live.start()
            self._live.update(_Tail(self._drawn(self._rest, over=False)), refresh=True)
            self._shown = time.monotonic()

    def _settle(self, size: int) -> None:
        """Leave so much of what came on the screen as it is."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        over, self._rest = self._rest[:size], self._rest[size:]
        if over.strip():
            self._console.print(self._drawn(over, over=True))
            self._console.print()

    def _drawn(self, text: str, *, over: bool) -> RenderableType:
        if self._kind == "text":
            return _Markdown(text)
        if self.thoughts:
            return Text(text.strip(), style="dim italic")
        seconds = time.monotonic() - self._begun
        return Text(f"thought for {seconds:.1f} s" if over else f"thinking, {seconds:.0f} s", style="dim italic")


class _Markdown(Markdown):
    """Markdown in which tags are text: rich shows nothing for them."""

    PARSER: Final = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])

    def __init__(self, text: str) -> None:
        super().__init__("")
        self.markup, self.parsed = text, self.PARSER.parse(text)


class _Tail:
    """The last lines of something, as many as a screen has."""

    def __init__(self, whole: RenderableType) -> None:
        self._whole = whole

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for line in console.render_lines(self._whole, options, pad=False)[1 - console.height :]:
            yield from line
            yield Segment.line()


def settled(text: str) -> int:
    """How many characters of Markdown are its first block, which nothing after it changes; 0 until another has begun.

    A block begins at a line that follows an empty one, is not indented and lies outside of fences.
    """
    at, fence, empty = 0, "", False
    for line in text.splitlines(keepends=True):
        bare = line.strip()
        if not fence and empty and bare and not line[0].isspace() and text[:at].strip():
            return at
        if not fence:
            fence = found[0] if (found := FENCE.match(bare)) else ""
        elif bare.startswith(fence) and not bare.strip(fence[0]):
            fence = ""
        empty = not bare and not fence
        at += len(line)
    return 0


@contextmanager
def no_echo() -> Iterator[None]:
    """What is typed meanwhile is not shown, which would move what is drawn; the next prompt reads it."""
    try:
        before = termios.tcgetattr(0)
    except (termios.error, OSError, ValueError):
        yield
        return
    quiet = termios.tcgetattr(0)
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSANOW, quiet)
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(0, termios.TCSANOW, before)
