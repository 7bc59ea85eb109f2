"""The command's own behaviour: help without imports, unknown names, our errors as one sentence."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import tegrad
from tegrad import cli
from tegrad.errors import TegradError
from tegrad.llm import start

ROOT = Path(tegrad.__file__).parents[1]


def tegrad_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tegrad", *arguments], capture_output=True, text=True, check=False)


def test_version_is_the_package_version() -> None:
    assert tegrad_command("--version").stdout == f"tegrad {tegrad.__version__}\n"


def test_help_lists_every_command_with_its_line() -> None:
    text = tegrad_command("--help").stdout
    assert all(name in text and line.split()[0] in text for name, (_, line) in cli.COMMANDS.items())


def helped(command: Any, parent: Any = None, *, name: str = "tegrad") -> Iterator[tuple[str, Any, str]]:
    """A command and all that are below it: name, context and help, on a screen of 80 columns."""
    context = typer.Context(command, parent, name, terminal_width=80, max_content_width=80)
    yield context.command_path, context, command.get_help(context)
    for below, each in getattr(command, "commands", {}).items():
        yield from helped(each, context, name=below)


def cut_off(text: str) -> list[str]:
    """The commands of a list whose lines there was no room for."""
    return re.findall(r"^  (\w+)  .*\.\.\.$", text.partition("\nCommands:\n")[2], re.MULTILINE)


def test_help_fits_a_screen_and_shows_an_example() -> None:
    command = [sys.executable, "-m", "tegrad", "--help"]
    done = subprocess.run(command, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) <= 24
    assert 'tegrad run "In the beginning"' in done.stdout
    assert cut_off(done.stdout) == []


@pytest.mark.parametrize("top", cli.COMMANDS)
def test_each_commands_help_fits_a_screen_and_shows_an_example_that_is_understood(top: str) -> None:
    root: Any = typer.main.get_command(cli.build([top]))
    for path, context, text in helped(root.commands[top], typer.Context(root, info_name="tegrad"), name=top):
        assert len(text.splitlines()) <= (24 if path.count(" ") == 1 else 40), text
        assert cut_off(text) == []
        examples = re.findall(rf"^ +(?:[A-Z_]+=\S+ )?{path}(?: (.*))?$", text, re.MULTILINE)
        assert examples, text
        for example in examples:
            words = shlex.split(re.split("  |<|>", example)[0])
            if not getattr(context.command, "commands", {}):
                context.command.parse_args(typer.Context(context.command, context.parent, path), words)


SHELL = r"""
eval "$(tegrad --show-completion bash)"
for words in "tegrad run --sch" "tegrad chat --sy" "tegrad bench perp" "tegrad emb" "tegrad bench serve repl" \
        "tegrad serve --repl" "tegrad run --temp" "tegrad bench atten" "tegrad bench host --gp" "tegrad board sta"; do
    COMP_WORDS=($words); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); COMPREPLY=()
    _tegrad_completion tegrad
    echo "${COMPREPLY[@]}"
done
"""


def test_a_shell_completes_commands_and_their_options(tmp_path: Path) -> None:
    program = tmp_path / "tegrad"
    program.write_text(f"#!{sys.executable}\nfrom tegrad.__main__ import entry\nentry()\n")
    program.chmod(0o755)
    variables = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", SHELL], env=variables, capture_output=True, text=True, check=True)
    words = [
        "--schema",
        "--system",
        "perplexity",
        "embed",
        "replicas",
        "--replicas",
        "--temperature",
        "attention",
        "--gpu",
    ]
    assert done.stdout.split() == [*words, "start", "status"]


@pytest.mark.parametrize(
    ("command", "board", "said"),
    [
        ("run", "agx-orin-64gb", "this machine has 1 GPU, numbered from 0"),
        ("bench host", "agx-orin-64gb", "this machine has 1 GPU, numbered from 0"),
        ("bench serve load 1b-q6k", "", "this machine has 2 GPUs, numbered from 0"),
    ],
)
def test_a_number_that_no_gpu_here_has_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str, board: str, said: str
) -> None:
    for name, value in {"DEV": "", "TEGRAD_BOARD": board}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(start, "GPU_FILES", (os.devnull,))
    monkeypatch.setattr(start, "glob", lambda names: [names.replace("[0-9]*", number) for number in "01"])
    monkeypatch.setattr(sys, "argv", ["tegrad", *command.split(), "--gpu", "2"])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"Error: Invalid value for '--gpu': {said}"
    assert os.environ["DEV"] == ""


def test_every_bench_that_opens_a_gpu_takes_its_number() -> None:
    group: Any = typer.main.get_command(cli.build(["bench"]))
    bench = group.commands["bench"].commands
    plain = {
        name
        for name, each in {**bench, **bench["serve"].commands}.items()
        if "gpu" not in {p.name for p in each.params}
    }
    assert plain == {"figures", "add", "list", "ptx", "estimate", "replicas", "serve", "compare", "report"}


def test_unknown_command_is_a_usage_error() -> None:
    done = tegrad_command("frobnicate")
    assert done.returncode == 2
    assert "frobnicate" in done.stderr


def test_help_imports_neither_tinygrad_nor_numpy() -> None:
    code = "import sys, tegrad.cli\nsys.argv = ['tegrad', '--help']\ntry: tegrad.cli.main()\nexcept SystemExit: pass\n"
    done = subprocess.run(
        [sys.executable, "-c", code + "print('tinygrad' in sys.modules, 'numpy' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TegradError("no GPU was found; run `tegrad doctor`"), "no GPU was found; run `tegrad doctor`"),
        (MemoryError("no 4 MB left"), "out of memory: no 4 MB left: choose a smaller model or context"),
    ],
)
def test_errors_end_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, said: str
) -> None:
    def fail(argv: object) -> object:
        raise error

    monkeypatch.setattr(cli, "build", fail)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 1
    assert capsys.readouterr().err == f"tegrad: {said}\n"
