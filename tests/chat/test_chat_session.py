"""The loop of a chat: answers, commands and what goes wrong leave a conversation that goes on."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from talking import Model

from tegrad.chat import commands
from tegrad.chat.session import Session
from tegrad.chat.talk import Talk
from tegrad.llm.errors import ContextError


class Shown:
    """A screen that keeps what it is given."""

    def __init__(self) -> None:
        self.thoughts = True
        self.notes: list[str] = []
        self.errors: list[str] = []
        self.answers: list[str] = [""]

    def note(self, text: str) -> None:
        self.notes.append(text)

    def error(self, text: str) -> None:
        self.errors.append(text)

    def text(self, piece: str) -> None:
        self.answers[-1] += piece

    def thinking(self, piece: str) -> None:
        self.answers[-1] += f"({piece})"

    def end(self) -> None:
        if self.answers[-1]:
            self.answers.append("")


class Typed:
    """Questions, in turn."""

    def __init__(self, texts: Sequence[str | type[BaseException]], interactive: bool = True) -> None:
        self.interactive, self._texts = interactive, list(texts)

    def read(self) -> str:
        text = self._texts.pop(0) if self._texts else EOFError
        if isinstance(text, str):
            return text
        raise text


def held(model: Model, *texts: str | type[BaseException], interactive: bool = True) -> tuple[Session, Shown]:
    """A session that has ended."""
    shown = Shown()
    talk = Talk(lambda _: model, "a", "be brief", {"seed": 3})  # type: ignore[arg-type, return-value]
    session = Session(talk, shown, Typed(texts, interactive))
    session.run()
    return session, shown


def test_a_turn_is_a_question_an_answer_and_what_it_took() -> None:
    model = Model(100, [["It ", "is."], ["Yes."]])
    session, shown = held(model, "  Is it? ", "", "Is it\nso?")
    assert shown.answers == ["It is.", "Yes.", ""]
    assert [one["content"] for one in session.talk.messages] == ["Is it?", "It is.", "Is it\nso?", "Yes."]
    assert model.told[1] == [{"role": "system", "content": "be brief"}, *session.talk.messages[:3]]
    assert shown.notes == ["[2 tokens; 90 of 100 tokens are left]", "[1 token; 82 of 100 tokens are left]"]
    assert not session.failed
    assert model.closed


def test_thoughts_are_shown_and_forgotten() -> None:
    session, shown = held(Model(100, [["(Is it?)", "Yes."]]), "Is it?")
    assert shown.answers == ["(Is it?)Yes.", ""]
    assert session.talk.messages[-1] == {"role": "assistant", "content": "Yes."}


def test_an_error_takes_the_question_back_and_the_next_one_is_answered() -> None:
    session, shown = held(Model(100, [ContextError("too long: shorten it"), ["Yes."]]), "x " * 50, "Is it?")
    assert shown.errors == ["too long: shorten it"]
    assert [one["content"] for one in session.talk.messages] == ["Is it?", "Yes."]
    assert session.failed


def test_a_gpu_that_is_lost_is_opened_anew_and_the_conversation_goes_on() -> None:
    lost, fresh = Model(100, [["Yes."], ContextError("GPU fault")]), Model(100, [["So."]])
    opening, shown = iter((lost, fresh)), Shown()
    talk = Talk(lambda _: next(opening), "a")  # type: ignore[arg-type, return-value]
    lost.lost = True
    Session(talk, shown, Typed(["Is it?", "Now?", "And?"])).run()
    assert shown.errors == ["GPU fault"]
    assert [one["content"] for one in fresh.told[0]] == ["Is it?", "Yes.", "And?"]
    assert lost.closed


@pytest.mark.parametrize(("before", "kept"), [([], []), (["It is"], ["Is it?", "It is"])])
def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(before: list[str], kept: list[str]) -> None:
    def press() -> None:
        """Once an answer is on its way: a Ctrl-C that comes earlier is none for the session, but for all tests."""
        end = time.monotonic() + 30
        while session._came is None or (before and not shown.answers[0]):
            if time.monotonic() > end:
                return
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    shown = Shown()
    model = Model(100, [[*before, "..."], ["Yes."]])
    talk = Talk(lambda _: model, "a")  # type: ignore[arg-type, return-value]
    session = Session(talk, shown, Typed(["Is it?", "Now?"]))
    pressing = threading.Thread(target=press)
    pressing.start()
    session.run()
    pressing.join()
    assert [one["content"] for one in session.talk.messages] == [*kept, "Now?", "Yes."]
    assert "stopped" in shown.notes[0]


def test_ctrl_c_after_an_answers_last_word_loses_no_answer() -> None:
    """While what was said is drawn to its end."""

    class Pressed(Shown):
        def end(self) -> None:
            super().end()
            if self.answers == ["Yes.", ""] and (ends := self.notes.count("end") + 1) <= 2:
                self.notes.append("end")
                if ends == 2:
                    raise KeyboardInterrupt

    model, shown = Model(100, [["Yes."], ["So."]]), Pressed()
    talk = Talk(lambda _: model, "a")  # type: ignore[arg-type, return-value]
    Session(talk, shown, Typed(["Is it?", "Now?"])).run()
    assert [one["content"] for one in talk.messages] == ["Is it?", "Yes.", "Now?", "So."]


def test_ctrl_c_twice_at_the_prompt_ends_and_a_question_between_them_counts() -> None:
    session, shown = held(
        Model(100, [["Yes."]]), KeyboardInterrupt, "Is it?", KeyboardInterrupt, KeyboardInterrupt, "x"
    )
    assert len(session.talk.messages) == 2
    assert shown.notes.count("Ctrl-C again ends, and so does Ctrl-D") == 2


def test_without_a_terminal_ctrl_c_ends_everything_and_nothing_but_answers_is_told() -> None:
    with pytest.raises(KeyboardInterrupt):
        held(Model(), KeyboardInterrupt, interactive=False)
    _, shown = held(Model(100, [["Yes."]]), "Is it?", interactive=False)
    assert (shown.answers, shown.notes) == (["Yes.", ""], [])


def test_turns_that_the_context_has_no_room_for_are_told() -> None:
    model = Model(30, [["a b c d e"], ["f"], ["g"]])
    session, shown = held(model, "one two three", "four five six", "seven")
    assert "the context is full: the model is no longer told the oldest turn" in shown.notes
    assert [one["content"] for one in model.told[2]] == ["be brief", "four five six", "f", "seven"]
    assert len(session.talk.messages) == 6


def test_commands_do_what_their_lines_say(tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    session, shown = held(
        Model(100, [["Yes."], ["No."], ["So."]]),
        "/tokens", "Is it?", "/regenerate", "/system be kind", "/set temperature 0.5", "/set thinking off",
        "/set thoughts folded", f"/save {file}", "/reset", "/tok", f"/load {file}", "/model", "And?",
        "/quit", "not read",
    )  # fmt: skip
    assert shown.answers == ["Yes.", "No.", "So.", ""]
    assert shown.errors == []
    assert [one["content"] for one in session.talk.messages] == ["Is it?", "No.", "And?", "So."]
    assert (session.talk.system, session.talk.options["temperature"], shown.thoughts) == ("be kind", 0.5, False)
    told = "\n".join(shown.notes)
    lines = (
        "4 of 100 tokens; the model is told 0 of 0 turns", "system prompt: be kind",
        "temperature 0.5, thinking off, top_k 0", f"saved to {file}", "loaded from", "1 turns",
        "a, context of 100 tokens",
    )  # fmt: skip
    for line in lines:
        assert line in told


def test_what_no_command_does_is_said() -> None:
    wrong = ("/nothing", "/s", "/set temperature", "/set heat 3", "/save", "/load /none.json", "/regenerate")
    session, shown = held(Model(), *wrong)
    assert len(shown.errors) == len(wrong)
    assert shown.errors[0] == "there is no command /nothing: /help lists them; a space before a slash makes it text"
    assert session.failed


def test_help_has_a_line_for_each_command_and_fits_a_screen() -> None:
    _, shown = held(Model(), "/help")
    assert [line.split()[0] for line in shown.notes[:-1]] == list(commands.COMMANDS)
    assert max(map(len, shown.notes)) <= 80
    assert len(shown.notes) < 24
