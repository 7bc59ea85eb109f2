"""`tegrad chat` in a real terminal, and in a pipe, with the shipped model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pexpect
import pyte
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, write

from tegrad.cli.chat import chat
from tegrad.cli.run import UsageError

pytestmark = pytest.mark.board
PATIENCE_S = 120
CTRL_C, CTRL_D, ALT_ENTER, UP = "\x03", "\x04", "\x1b\r", "\x1b[A"
FIGURES = r"\[\d+ tokens?(, [\d.]+ tok/s)?; \d+ of 512 tokens are left"


class Terminal:
    """A program in a terminal of 80 columns and 40 lines, and what that shows."""

    def __init__(self, folder: Path, *words: str) -> None:
        self._screen = pyte.Screen(80, 40)
        self._stream = pyte.ByteStream(self._screen)
        kept = {name: value for name, value in os.environ.items() if name not in ("DEV", "TEGRAD_BOARD")}
        variables = {"XDG_STATE_HOME": str(folder), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"}
        self.program = pexpect.spawn(
            sys.executable, ["-m", "tegrad", "chat", *words], env=kept | variables, dimensions=(40, 80), cwd=str(folder)
        )

    @property
    def lines(self) -> list[str]:
        """What is shown, without the empty lines."""
        return [line.rstrip() for line in self._screen.display if line.strip()]

    def until(self, shown: Callable[[list[str]], Any]) -> list[str]:
        """Wait until the lines are as they should be."""
        end = time.monotonic() + PATIENCE_S
        while not shown(self.lines):
            assert time.monotonic() < end, "\n".join(self.lines)
            try:
                self._stream.feed(self.program.read_nonblocking(1 << 16, 0.1))
            except pexpect.TIMEOUT:
                continue
            except pexpect.EOF:
                assert shown(self.lines), "\n".join(self.lines)
        return self.lines

    def ready(self) -> list[str]:
        """Wait for an empty prompt."""
        return self.until(lambda lines: lines and lines[-1] == ">")

    def say(self, text: str) -> list[str]:
        """Type the rest of a line, and wait until the program wants another one."""
        if text:
            self.program.send(text)
            self.until(lambda lines: lines[-1] != ">")
        self.program.send("\r")
        return self.ready()

    def ended(self) -> int:
        """Wait for the end; the exit code."""
        self.program.expect(pexpect.EOF, PATIENCE_S)
        self.program.close()
        return int(self.program.exitstatus)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Callable[..., Terminal]]:
    begun: list[Terminal] = []

    def begin(*words: str) -> Terminal:
        begun.append(Terminal(tmp_path, *words))
        begun[-1].ready()
        return begun[-1]

    yield begin
    for each in begun:
        each.program.close(force=True)


def test_a_conversation(terminal: Callable[..., Terminal], tmp_path: Path) -> None:
    """Several lines, the history, completion, a command, a file, and the end by Ctrl-D."""
    talk = terminal("-n", "16", "--seed", "1", "--system", "Be brief.")
    lines = talk.say("Who made\\\rthe heaven?")
    asked = lines.index("> Who made")
    assert lines[asked + 1] == "  the heaven?"
    assert asked + 2 < len(lines) - 2
    assert re.match(FIGURES, lines[-2])
    talk.program.send(f"And{ALT_ENTER}the earth?")
    talk.until(lambda lines: lines[-2:] == ["> And", "  the earth?"])
    talk.say("")
    talk.program.send(UP)
    talk.until(lambda lines: lines[-2:] == ["> And", "  the earth?"])
    talk.say("")
    talk.program.send("/sav\t")
    talk.until(lambda lines: lines[-1] == "> /save")
    assert talk.say("talk.json")[-2] == "saved to talk.json"
    kept = json.loads((tmp_path / "talk.json").read_text())
    said = [one["content"] for one in kept["messages"]]
    assert said[0::2] == ["Who made\nthe heaven?", "And\nthe earth?", "And\nthe earth?"]
    assert all(said)
    assert (kept["system"], kept["options"]["seed"]) == ("Be brief.", 1)
    talk.program.send(CTRL_D)
    assert talk.ended() == 0


def test_ctrl_c_ends_an_answer_and_twice_the_program(terminal: Callable[..., Terminal]) -> None:
    talk = terminal("--temperature", "0", "--presence-penalty", "-2")  # says the same over and over, to the end
    talk.program.send("Tell me all\r")
    talk.until(lambda lines: "> Tell me all" in lines[:-1])
    talk.program.send(CTRL_C)
    assert re.match(FIGURES + "; stopped", talk.ready()[-2])
    # What it was told depends on when it was stopped.
    for command in ("/reset", "/set max_tokens 4", "/set presence_penalty 0"):
        talk.say(command)
    assert re.match(FIGURES, talk.say("And?")[-2])
    talk.program.send(f"half a question{CTRL_C}")
    talk.until(lambda lines: lines[-2:] == ["Ctrl-C again ends, and so does Ctrl-D", ">"])
    talk.program.send(CTRL_C)
    assert talk.ended() == 0


def test_a_full_context_leaves_out_the_oldest_turns(terminal: Callable[..., Terminal]) -> None:
    talk = terminal("--context", "100", "-n", "16", "--temperature", "0")
    told = "\n".join(line for at in range(4) for line in talk.say(f"Who made the heaven and the earth {at}?"))
    assert "the context is full: the model is no longer told the " in told
    assert "exceed the context of 100: shorten the text" in "\n".join(talk.say("word " * 200)[-3:])
    talk.program.send("/quit\r")
    assert talk.ended() == 0


def piped(text: str, *words: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("DEV", "TEGRAD_BOARD")}
    command = [sys.executable, "-m", "tegrad", "chat", *words]
    return subprocess.run(
        command, input=text, env=kept, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def test_in_a_pipe_answers_alone_are_on_standard_output() -> None:
    done = piped("Who made the heaven?\nAnd \\\nthe earth?\n/tokens\n", "-n", "16", "--temperature", "0")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2)
    assert done.stderr.splitlines()[-1].endswith("the model is told 2 of 2 turns")
    assert "\x1b" not in done.stdout + done.stderr
    wrong = piped("/nothing\n")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert "tegrad: there is no command /nothing: /help lists them" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["/nowhere/model.gguf"], "cannot open the model"),
        (["nothing-of-that-name"], "no model of that name is here"),
        (["{plain}"], 'plain.gguf has no chat template: tegrad run {plain} "..." goes on with a text'),
        (["--top-p", "0"], "cannot sample"),
        (["--context", "100000"], "ask for less"),
    ],
)
def test_what_cannot_be_is_one_sentence(tmp_path: Path, words: list[str], said: str) -> None:
    plain = write(tmp_path / "plain.gguf", Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1), TYPE.Q8_0)
    done = piped("hi\n", *(word.format(plain=plain) for word in words))
    assert (done.returncode in (1, 2), done.stdout) == (True, "")
    assert said.format(plain=plain) in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_its_packages_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)
    with pytest.raises(UsageError, match=r"chat needs the package prompt_toolkit: pip install .*\[chat\]"):
        chat(cast("Any", None))
