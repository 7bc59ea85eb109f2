"""Where questions come from: a prompt with a history in a terminal, or the lines of standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from prompt_toolkit import PromptSession
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

PROMPT: Final = "> "
MOST_LINE: Final = 16 << 20
"""Characters of a question: more than any model's context."""


def history_file() -> Path:
    """Where questions are kept: $XDG_STATE_HOME, or ~/.local/state."""
    named = os.environ.get("XDG_STATE_HOME")
    return (Path(named) if named else Path.home() / ".local" / "state") / "tegrad" / "chat-history"


class Lines:
    """Questions from standard input, a line each; a backslash at the end of a line goes on with the next one."""

    interactive = False

    def read(self) -> str:
        """The next question. EOFError."""
        parts: list[str] = []
        if sys.stdin is None:
            raise EOFError
        while line := sys.stdin.readline(MOST_LINE):
            text = line.rstrip("\n")
            if not text.endswith("\\"):
                return "\n".join([*parts, text])
            parts.append(text[:-1])
        if not parts:
            raise EOFError
        return "\n".join(parts)


class Prompted:
    """Questions at a prompt of a terminal. Enter sends; Alt+Enter, or a backslash before Enter, begins a new line."""

    interactive = True

    def __init__(self, commands: Sequence[str], values: Callable[[str], Iterable[str]]) -> None:
        """`values` are what may follow a command; for one with a file, none are needed."""
        self._session: PromptSession[str] = PromptSession(
            PROMPT, multiline=True, prompt_continuation="  ", history=_history(), key_bindings=_keys(),
            completer=_Completer(commands, values), complete_while_typing=False,
        )  # fmt: skip

    def read(self) -> str:
        """The next question. KeyboardInterrupt for Ctrl-C, EOFError for Ctrl-D."""
        return self._session.prompt()


def _history() -> History:
    """Of a file for this user alone, or where there can be none of this session."""
    try:
        path = history_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600))
    except (OSError, RuntimeError):
        return InMemoryHistory()
    return FileHistory(str(path))


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


class _Completer(Completer):
    """Commands, and what follows them."""

    def __init__(self, commands: Sequence[str], values: Callable[[str], Iterable[str]]) -> None:
        self._commands, self._values, self._paths = commands, values, PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        """See prompt_toolkit."""
        text = document.text_before_cursor
        if not text.startswith("/"):
            return
        command, space, rest = text.partition(" ")
        if not space:
            yield from (Completion(f"{each} ", -len(text)) for each in self._commands if each.startswith(text))
        elif "\n" not in rest:
            yield from (Completion(each, -len(rest)) for each in self._values(command) if each.startswith(rest))
            if command in ("/save", "/load", "/model"):
                yield from self._paths.get_completions(Document(rest), complete_event)
