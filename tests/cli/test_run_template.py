"""`tegrad run` with a hostile chat template: one sentence, or at once the end that Ctrl-C asks for."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "llm"))
from tiny_llama import TYPE, Shape, letters, write

from tegrad.cli.run import UsageError, _asked, _tokens
from tegrad.llm.gguf import Gguf

LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ENVIRONMENT = {**os.environ, "DEV": "PYTHON"}
"""What a template is asked before any device is needed."""


def model(path: Path, template: str) -> Path:
    shape = Shape(dim=32, ffn=32, heads=1, kv_heads=1, layers=1)
    return write(path, shape, TYPE.F32, vocabulary=replace(letters(300), template=template))


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOPS, "the model's chat template takes more than 3 seconds; use --raw"),
        ("{{ 'a' * 10**9 }}", "the model's chat template needs more than 512 MiB of memory; use --raw"),
        ("{% if false %}a{% endif %}", "the model's chat template writes nothing: use --raw"),
        ("{{ raise_exception('no\n\x1b[2J system role') }}", "the model's chat template refuses: no [2J system role; "),
    ],
)
def test_a_hostile_template_is_one_sentence(template: str, said: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tegrad", "run", str(model(tmp_path / "m.gguf", template)), "hi"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"tegrad: {said}")
    assert done.stderr.count("\n") == 1


def test_a_prompt_has_the_begin_token_that_the_template_leaves_out(tmp_path: Path) -> None:
    for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        with Gguf.open(model(tmp_path / "m.gguf", template)) as file:
            asked = _asked("hi", file, system=None, chat=True, insist=False, held=False)
            tokenizer, tokens = _tokens(file, *asked)
            assert tokens == [tokenizer.bos, *tokenizer.encode("hi", bos=False)]


def test_an_answer_that_is_held_to_a_schema_has_no_thought_before_it(tmp_path: Path) -> None:
    """A template that opens a thought would have the schema hold from inside it."""
    template = (
        "{% if enable_thinking is not defined or enable_thinking %}{{ raise_exception('a thought') }}{% endif %}hi"
    )
    path = model(tmp_path / "m.gguf", template)
    with Gguf.open(path) as file:
        told = {"system": None, "chat": True, "insist": True}
        assert _asked("hi", file, **told, held=True) == ("hi", False)
        with pytest.raises(UsageError, match="a thought"):
            _asked("hi", file, **told, held=False)


def rendering(pid: int) -> list[Path]:
    """The processes of chat templates that one has made, whatever thread did."""
    made = [
        Path("/proc") / child
        for task in Path(f"/proc/{pid}/task").glob("*/children")
        for child in task.read_text().split()
    ]
    return [path for path in made if b"sandbox" in (path / "cmdline").read_bytes()]


def test_ctrl_c_does_not_wait_for_a_template(tmp_path: Path) -> None:
    """SIGINT to the command alone, whose template runs in a thread's process."""
    command = [sys.executable, "-m", "tegrad", "run", str(model(tmp_path / "m.gguf", LOOPS)), "hi"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as asked:
        while not (made := rendering(asked.pid)):
            assert asked.poll() is None
            time.sleep(0.01)
        asked.send_signal(signal.SIGINT)
        assert asked.communicate() == ("", "")
    assert asked.returncode == 130
    assert not any(path.exists() for path in made)
