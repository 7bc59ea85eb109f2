"""The `tegrad` command: one module per subcommand, imported only when that command is named."""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import threading
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from tegrad import __version__
from tegrad.__main__ import ENDED_BY_CTRL_C
from tegrad.cli import surroundings
from tegrad.errors import TegradError

# name -> (module, one line for `tegrad --help`). The module holds `app` (a group) or a function of the module's name.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("tegrad.cli.run", "Generate text from a GGUF model (the shipped one by default)."),
    "chat": ("tegrad.cli.chat", "Talk with a GGUF model in the terminal."),
    "embed": ("tegrad.cli.embed", "Print a vector for each text, by a GGUF embedding model."),
    "eval": ("tegrad.cli.evaluate", "Print a model's bits per byte and its share of known words."),
    "serve": ("tegrad.cli.serve", "Serve models over HTTP: OpenAI's, Ollama's, Anthropic's APIs."),
    "pull": ("tegrad.cli.pull", "Fetch a model from the Hugging Face hub by its name."),
    "models": ("tegrad.cli.models", "List the models that are here, what fits, or remove one."),
    "doctor": ("tegrad.cli.doctor", "Say what was found, what is missing and what to do."),
    "klog": ("tegrad.cli.klog", "Explain what the GPU's drivers wrote to the kernel log."),
    "profile": ("tegrad.cli.profile", "Show where a token's time goes, or a program's."),
    "bench": ("tegrad.cli.bench", "Measure, record and recompute the figures in results/."),
    "conformance": ("tegrad.cli.conformance", "Check the drivers here against rules of nvgpu and nvmap."),
    "selftest": ("tegrad.cli.selftest", "Try this machine's GPU stage by stage, least risky first."),
    "trace": ("tegrad.cli.trace", "Show a command's driver calls; read and compare traces."),
    "board": ("tegrad.cli.board", "Start, stop and inspect emulated boards."),
}


def _version(value: bool) -> None:
    if value:
        typer.echo(f"tegrad {__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """\b
    GGUF models without CUDA on Jetson Orin and Hopper, and an emulated Orin.
    tegrad run "In the beginning"    (more: --version, --install-completion)
    """


def _words() -> list[str]:
    """The command line, or the one that a shell wants completed."""
    for name in ("_TYPER_COMPLETE_ARGS", "COMP_WORDS"):
        if "_TEGRAD_COMPLETE" in os.environ and name in os.environ:
            return os.environ[name].split()[1:]
    return sys.argv[1:]


def _named(argv: Sequence[str]) -> str | None:
    """The subcommand that argv names, if any."""
    word = next((word for word in argv if not word.startswith("-")), None)
    return word if word in COMMANDS else None


def build(argv: Sequence[str]) -> typer.Typer:
    """The typer app for one command line: the named command in full, the others as a line of help."""
    app = typer.Typer(
        no_args_is_help=True,
        rich_markup_mode=None,  # tables would not fit a screen
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    wanted = _named(argv)
    for name, (module, line) in COMMANDS.items():
        if name != wanted:
            app.command(name, help=line)(lambda: None)
            continue
        loaded = importlib.import_module(module)
        epilog = getattr(loaded, "EPILOG", None)
        if hasattr(loaded, "app"):
            app.add_typer(loaded.app, name=name, help=getattr(loaded, "HELP", line), epilog=epilog)
        else:
            app.command(name, epilog=epilog)(getattr(loaded, module.rsplit(".", 1)[1]))
    return app


def _reveal(command: Any) -> None:
    """Let a shell complete what a screen of help has no room for."""
    command.hidden = False
    for below in (*getattr(command, "params", ()), *getattr(command, "commands", {}).values()):
        _reveal(below)


def main() -> None:
    """Console entry point: errors become one sentence on stderr and their exit code; Ctrl-C is 130."""
    try:
        program = typer.main.get_command(build(_words()))
        for option in program.params:
            option.hidden = option.name in ("version", "install_completion", "show_completion")  # type: ignore[attr-defined]
        if "_TEGRAD_COMPLETE" in os.environ:
            _reveal(program)
        program()
    except KeyboardInterrupt:
        sys.exit(ENDED_BY_CTRL_C)
    except Exception as raised:
        error = surroundings.told(raised)
        said = surroundings.sentence(error)
        if said is None:
            raise
        typer.echo(f"tegrad: {said}", err=True)
        sys.exit(error.exit_code if isinstance(error, TegradError) else 1)


def entry() -> None:
    """The program: `main`, and the end of the process as soon as everything is closed and written.

    Python would take a twentieth of a second more to take itself apart.
    """
    surroundings.prepare()
    try:
        main()
        code: object = 0
    except SystemExit as end:
        code = end.code or 0
    if not isinstance(code, int):
        raise SystemExit(code)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
    except OSError as error:
        if code == 0 and not isinstance(error, BrokenPipeError):
            typer.echo(f"tegrad: {error}", err=True)
        code = code or 1
    os._exit(code)
