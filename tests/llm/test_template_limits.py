"""A chat template that takes what no template needs ends in one sentence, and its process is gone."""

import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tegrad.llm import template as module
from tegrad.llm.serial import ClosedError
from tegrad.llm.template import MOST_CHARACTERS, Template, TemplateRefusalError

HELLO = [{"role": "user", "content": "hi"}]
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def refused(source: str) -> str:
    with pytest.raises(TemplateRefusalError) as error:
        Template(source).render(HELLO)
    said = str(error.value)
    assert said.isprintable()
    assert len(said) < 400
    assert said.startswith("the model's chat template ")
    return said.removeprefix("the model's chat template ")


def computes(pid: int) -> None:
    """Wait until a process computes: one that waits for a request does not."""

    def ticks() -> int:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    begun, end = ticks(), time.monotonic() + 60
    while ticks() < begun + 3:
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a template may compute decides, whatever else runs here."""
    monkeypatch.setattr(module, "WALL_LIMIT_S", 120.0)


def test_one_that_others_keep_from_computing_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_LIMIT_S", 60.0)
    monkeypatch.setattr(module, "WALL_LIMIT_S", 0.3)
    assert refused(LOOPS) == "takes more than 3 seconds"


def test_what_it_computes_itself_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a good template takes longer by the clock than it computes."""
    monkeypatch.setattr(module, "CPU_LIMIT_S", 0.3)
    template = Template(LOOPS)
    with pytest.raises(TemplateRefusalError):
        template.render(HELLO)
    assert template._process.returncode == -signal.SIGPROF


@pytest.mark.parametrize(
    "source",
    [
        LOOPS,
        "{{ (9 + (messages | length)) ** (10 ** 8) }}",
        "{{ 10 ** (10 ** 8) }}",  # computed while the template is compiled
        "{{ lipsum(n=10**6) }}",
        "{{ [1] | slice(10**9) | list }}",
    ],
)
def test_one_that_takes_long_is_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_LIMIT_S", 0.3)
    assert refused(source) == "takes more than 3 seconds"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ 'a' * (messages | length) * 10 ** 10 }}",
        "{{ '%999999999999d' % 1 }}",
        "{{ '{:>99999999999}'.format('a') }}",
        "{{ 'a' | center(10 ** 9) }}",
        "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    ],
)
def test_one_that_needs_much_memory_is_refused_it(source: str) -> None:
    assert refused(source) == "needs more than 512 MiB of memory"


@pytest.mark.parametrize("source", ["{{ 'a' * 10 ** 7 }}", "{{ '%9999999d' % 1 }}", "{{ 'ab' | center(9999999) }}"])
def test_one_that_writes_much_is_refused(source: str) -> None:
    assert refused(source).startswith("writes more than 1,049,")


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "is nested too deeply"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "is nested too deeply"),
        ("{% if 1 %}" * 3000 + "{% endif %}" * 3000, "is nested too deeply"),
        ("{{ " + "1+" * 20000 + "1 }}", "is nested too deeply"),
        ("{% for a in [1] %}" * 60 + "{% endfor %}" * 60, "is not sound (too many statically nested blocks"),
        ("{% break %}", "is not sound ('break' outside loop"),
        ("{% if 1 %}{% continue %}{% endif %}", "is not sound ('continue' not properly in loop"),
        ("{% set \udcff = 1 %}", r"is not sound (unexpected char '\udcff'"),
        ("{% include '/etc/passwd' %}", "failed (no loader"),
        ("{{ raise_exception('a\n\x1b[31m' + 'b' * 10 ** 6) }}", "refuses: a [31mbbb"),
        ("{{ raise_exception(messages) }}", "refuses: [{'role': 'user'"),
        ("x" * (MOST_CHARACTERS + 1), "has 1,048,577 characters"),
    ],
)
def test_one_that_is_odd_is_refused_in_a_sentence(source: str, said: str) -> None:
    assert refused(source).startswith(said)


@pytest.mark.parametrize(("source", "text"), [("\udcff{{ 1 }}", "?1"), ("{{ '\\ud800' }}", "?"), ("\0", "\0")])
def test_what_is_no_character_leaves_a_text_that_can_be_encoded(source: str, text: str) -> None:
    assert Template(source).render(HELLO) == text


def test_a_long_prompt_is_not_what_a_template_adds() -> None:
    said = "é" * 2 * MOST_CHARACTERS
    assert Template("{{ messages[0].content }}").render([{"content": said}]) == said


def test_after_one_refusal_the_next_text_is_rendered() -> None:
    template = Template("{{ 'a' * messages[0].times }}")
    first = template._process
    with pytest.raises(TemplateRefusalError, match="memory"):
        template.render([{"times": 10**12}])
    assert template.render([{"times": 3}]) == "aaa"
    assert template._process is first


def test_a_process_that_was_ended_is_started_anew() -> None:
    template = Template("{{ messages | length }}")
    os.kill(template._process.pid, signal.SIGKILL)
    template._process.wait()
    assert template.render(HELLO) == "1"
    template.close()
    assert template.render(HELLO) == "1"


def test_one_that_is_closed_or_forgotten_leaves_no_process() -> None:
    one, other = Template("1"), Template("2")
    processes = one._process, other._process
    one.close()
    del other
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


def test_closing_ends_what_another_thread_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_LIMIT_S", 60.0)
    template, said = Template(LOOPS), []

    def render() -> None:
        with pytest.raises(ClosedError) as error:
            template.render(HELLO)
        said.append(str(error.value))

    thread = threading.Thread(target=render)
    thread.start()
    computes(template._process.pid)
    template.close()
    thread.join()
    assert said == ["the model was closed while its chat template was run: ask again"]


def test_ctrl_c_reaches_what_another_thread_renders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_LIMIT_S", 60.0)
    template = Template(LOOPS)
    with ThreadPoolExecutor(1) as pool:
        rendering = pool.submit(template.render, HELLO)
        computes(template._process.pid)
        module.interrupt()
        with pytest.raises(KeyboardInterrupt):
            rendering.result()


def test_ctrl_c_ends_a_rendering(tmp_path: Path) -> None:
    """SIGINT to this process alone, as by `kill -INT`; the process of the template goes with it."""
    code = (
        "from tegrad.llm import template as module\n"
        "module.CPU_LIMIT_S = module.WALL_LIMIT_S = 60.0\n"
        f"template = module.Template({LOOPS!r})\n"
        "print(template._process.pid, flush=True)\n"
        "template.render([])\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as asked:
        assert asked.stdout is not None
        pid = int(asked.stdout.readline())
        computes(pid)
        asked.send_signal(signal.SIGINT)
        _, errors = asked.communicate()
    assert "KeyboardInterrupt" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_rendering_whose_parent_was_killed_ends(number: signal.Signals) -> None:
    """What it may compute bounds it, though nobody is left to end it."""
    code = (
        "from tegrad.llm import template as module\n"
        "module.CPU_LIMIT_S = 0.5\n"
        f"template = module.Template({LOOPS!r})\n"
        "print(template._process.pid, flush=True)\n"
        "template.render([])\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as asked:
        assert asked.stdout is not None
        pid = int(asked.stdout.readline())
        with suppress(OSError):  # it was over before we looked
            computes(pid)
        asked.send_signal(number)
    stat, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 60
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":  # nobody may collect it here
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_without_a_process_to_be_had_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert refused("x") == "cannot be run (no process for it: No such file or directory)"
