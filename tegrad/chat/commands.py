"""What begins with a slash: one row of a table each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from tegrad.chat.talk import SETTINGS, TalkError

if TYPE_CHECKING:
    from tegrad.chat.session import Session


class Command(NamedTuple):
    """What takes a session and the rest of the line, and a line of help."""

    argument: str
    line: str
    run: Callable[[Session, str], None]


def _help(session: Session, rest: str) -> None:
    width = max(len(f"{name} {each.argument}") for name, each in COMMANDS.items())
    for name, each in COMMANDS.items():
        session.screen.note(f"{f'{name} {each.argument}':{width}}  {each.line}")
    session.screen.note("Alt+Enter or a backslash before Enter begins a new line. Ctrl-C stops an answer.")


def _system(session: Session, rest: str) -> None:
    if rest:
        session.talk.system = "" if rest == "none" else rest
    session.screen.note(f"system prompt: {session.talk.system or 'none'}")


def _set(session: Session, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name == "thoughts" and value.strip() in ("shown", "folded"):
        session.screen.thoughts = value.strip() == "shown"
    elif name:
        if not value.strip():
            raise TalkError("a value is missing: /set temperature 0.7")
        session.talk.set(name, value.strip())
    options: Mapping[str, object] = session.talk.llm.options(**{"max_tokens": None, **session.talk.options})
    told = [f"{each} {_word(options[each])}" for each in SETTINGS]
    session.screen.note(", ".join([*told, f"thoughts {'shown' if session.screen.thoughts else 'folded'}"]))


def _word(value: object) -> str:
    return "none" if value is None else ("on" if value else "off") if isinstance(value, bool) else str(value)


def _reset(session: Session, rest: str) -> None:
    session.talk.reset()
    session.screen.note("everything that was said is forgotten; the system prompt and the settings stay")


def _save(session: Session, rest: str) -> None:
    session.talk.save(path := _file(rest, "/save"))
    session.screen.note(f"saved to {path}")


def _load(session: Session, rest: str) -> None:
    session.talk.load(path := _file(rest, "/load"))
    session.screen.note(f"loaded from {path}: {len(session.talk.messages) // 2} turns")


def _file(rest: str, command: str) -> Path:
    if not rest:
        raise TalkError(f"a file is missing: {command} talk.json")
    return Path(rest).expanduser()


def _model(session: Session, rest: str) -> None:
    if rest:
        session.talk.change(rest)
    session.screen.note(f"{session.talk.model}, context of {session.talk.llm.context} tokens")


def _regenerate(session: Session, rest: str) -> None:
    session.talk.again()
    session.answer()


def _tokens(session: Session, rest: str) -> None:
    talk = session.talk
    used = talk.llm.count(talk.told()) if talk.told() else 0
    told, turns = (len(talk.messages) - talk.first) // 2, len(talk.messages) // 2
    session.screen.note(f"{used} of {talk.llm.context} tokens; the model is told {told} of {turns} turns")


def _quit(session: Session, rest: str) -> None:
    raise EOFError


COMMANDS: Final[dict[str, Command]] = {
    "/help": Command("", "list the commands", _help),
    "/system": Command("[TEXT]", "show or change the system prompt; none removes it", _system),
    "/set": Command("[NAME VALUE]", "show or change a setting; thoughts are shown or folded", _set),
    "/regenerate": Command("", "answer the last question again", _regenerate),
    "/reset": Command("", "start over; system prompt and settings stay", _reset),
    "/save": Command("FILE", "save the conversation", _save),
    "/load": Command("FILE", "continue a saved conversation", _load),
    "/model": Command("[MODEL]", "show the model, or continue with another", _model),
    "/tokens": Command("", "show how much of the context is used", _tokens),
    "/quit": Command("", "end the program (so does Ctrl-D)", _quit),
}


def values(command: str) -> Iterable[str]:
    """What may follow a command, for completion."""
    if command == "/set":
        return [*(f"{name} " for name in SETTINGS), "thinking on", "thinking off", "thoughts shown", "thoughts folded"]
    if command == "/model":
        from tegrad.hub.cache import here

        return [each.model.name for each in here()]
    return ()


def run(session: Session, text: str) -> None:
    """Do what a line with a slash says. TalkError for a command that there is not; EOFError to end."""
    name, _, rest = text.partition(" ")
    known = [each for each in COMMANDS if each == name] or [each for each in COMMANDS if each.startswith(name)]
    if len(known) != 1:
        raise TalkError(f"there is no command {name}: /help lists them; a space before a slash makes it text")
    COMMANDS[known[0]].run(session, rest.strip())
