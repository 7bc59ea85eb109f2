"""Open questions of how a GPU is driven: what is asked, and that what the GPU computed is checked."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

import pytest
import typer

from tegrad import cli
from tegrad.bench import tuning


def run(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tegrad", "bench", "tuning", *words]
    return subprocess.run(command, env=environment or None, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.board
def test_every_question_that_a_board_can_answer_comes_out_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    code = (
        "import sys; sys.argv = ['tegrad', 'bench', 'tuning', '--json']\n"
        "from tegrad.bench import tuning; from tegrad.cli import main\n"
        "tuning.SUBMISSIONS, tuning.SIZE = 256, 1 << 20\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = json.loads(done.stdout)
    assert {row["question"] for row in rows} == {name for name, one in tuning.QUESTIONS.items() if one.ask}
    assert all(row["right"] and row["value"] > 0 for row in rows)
    assert [row["setting"] for row in rows if row["question"] == "gpfifo"] == [
        "1024 entries", "2048 entries", "4096 entries", "8192 entries",
    ]  # fmt: skip


def test_a_run_that_is_lost_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    code = (
        "import sys; sys.argv = ['tegrad', 'bench', 'tuning', 'doorbell']\n"
        "from tegrad.bench import tuning; from tegrad.cli import main\n"
        "tuning.AT_ONCE, tuning.SUBMISSIONS = (1,), 256; tuning.STEP = tuning.STEP.replace('+= add', '= add')\n"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert (done.returncode, done.stdout.split()[-1]) == (1, "WRONG")


def test_every_question_is_answered_here_or_by_a_command_that_there_is() -> None:
    listed = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(tuning.QUESTIONS)
    for one in tuning.QUESTIONS.values():
        assert bool(one.ask) != bool(one.command)
        words = [word for word in shlex.split(one.command) if "=" not in word][1:]
        root: Any = typer.main.get_command(cli.build(words[:1])) if words else None
        assert not words or words[0] in root.commands


def test_an_unknown_question_is_refused() -> None:
    done = run("weather", "--list")
    assert done.returncode == 2
    assert "no question weather" in done.stderr
