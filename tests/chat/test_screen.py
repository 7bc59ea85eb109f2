"""Markdown as it comes: blocks that are over stay, the last one is drawn anew, and a model moves no cursor."""

from __future__ import annotations

import io
import random

import pyte
import pytest
from rich.console import Console

from tegrad.chat import screen
from tegrad.chat.screen import Plain, Terminal, settled


def drawn(written: str, height: int = 24) -> list[str]:
    """What a terminal shows in the end."""
    shown = pyte.Screen(60, height)
    pyte.Stream(shown).feed(written.replace("\n", "\r\n"))
    return [line.rstrip() for line in shown.display]


def terminal(height: int = 24) -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(Console(file=out, force_terminal=True, width=60, height=height, highlight=False)), out


@pytest.mark.parametrize(
    ("text", "over"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", "one\n\n"),
        ("one\ntwo\n\nthree\n\nfo", "one\ntwo\n\n"),
        ("\n\none", ""),
        ("1. one\n\n   more of it", ""),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("````\n```\n\nx\n", ""),
        ("~~~\n```\n\nx\n~~~\n\ny", "~~~\n```\n\nx\n~~~\n\n"),
    ],
)
def test_blocks_are_over_where_the_next_one_begins(text: str, over: str) -> None:
    assert text[: settled(text)] == over


TEXT = """# A title

Some *words*, <b>tags</b> and `code`.

- one
- two

```python
def f():

    return 1
```

The end."""


def test_what_is_left_on_the_screen_does_not_depend_on_the_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "REDRAW_S", -1.0)
    found = set()
    for seed in range(4):
        made, out = terminal()
        choose, at = random.Random(seed), 0
        while at < len(TEXT):
            size = choose.randint(1, 9) if seed else len(TEXT)
            made.text(TEXT[at : at + size])
            at += size
        made.end()
        found.add("\n".join(drawn(out.getvalue())).rstrip())
    (shown,) = found
    for line in ("A title", "Some words, <b>tags</b> and code.", "• two", "return 1", "The end."):
        assert line in shown


def test_a_block_longer_than_the_screen_shows_its_end_and_is_whole_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "REDRAW_S", -1.0)
    made, out = terminal(height=8)
    for at in range(20):
        made.text(f"word{at}  \n")
    assert [line for line in drawn(out.getvalue(), 8) if line][-1] == "word19"
    assert "word12" not in drawn(out.getvalue(), 8)
    made.end()
    lines = [line for line in drawn(out.getvalue(), 40) if line]
    assert lines[-20:] == [f"word{at}" for at in range(20)]


def test_thoughts_are_shown_or_folded_into_a_line() -> None:
    for shown in (True, False):
        made, out = terminal()
        made.thoughts = shown
        made.thinking("\nIs it\nso?")
        made.text("\nYes.")
        made.end()
        lines = [line for line in drawn(out.getvalue()) if line]
        assert lines[-1] == "Yes."
        assert lines[:-1] == (["Is it", "so?"] if shown else ["thought for 0.0 s"])


def test_a_model_cannot_move_the_cursor() -> None:
    made, out = terminal()
    made.text("a\x1b[2J\x07b\x9b2Jc")
    made.note("of \x1b[2J")
    made.end()
    assert "\x1b[2J" not in out.getvalue()
    assert "a[2Jb2Jc" in out.getvalue()


def test_without_a_terminal_only_answers_are_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    made = Plain()
    made.note("a note")
    made.error("no such thing: look elsewhere")
    made.thinking("hm")
    made.text("a ")
    made.text("b")
    made.end()
    made.end()
    told = capsys.readouterr()
    assert (told.out, told.err) == ("a b\n", "a note\ntegrad: no such thing: look elsewhere\n")
