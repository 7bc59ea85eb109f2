"""Where the time of `tegrad run` goes, from the start of the process to its end: `tools/start_stages.py run ...`.

Prints milliseconds since the process began, and the process's CPU since the line before, at each stage, on stderr.
`--tree FOLDER`, before `run`, takes another checkout's package: two commits are compared in turns, on one machine.
"""

from __future__ import annotations

import functools
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn, cast

STAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "tegrad.cli.run": ("run",),
    "tegrad.llm.device": ("open_device",),
    "tegrad.llm.gguf": ("Gguf.open",),
    "tegrad.llm.tokenizer": ("Tokenizer.__init__", "Tokenizer.encode"),
    "tegrad.llm.packed": ("PackedModel._allocate", "PackedLoader.run"),
    "tegrad.llm.programs": ("load_kernel",),
    "tegrad.llm.persistent": ("PersistentPlan._make", "prove"),
    "tegrad.llm.loop": ("Loop.__init__",),
    "tegrad.llm.engine": ("Engine.generate",),
    "tegrad.nv.device": ("NVDevice.__init__", "NVDevice.finalize"),
    "tegrad.nv.hopper": ("_close_client",),
}
"""Functions whose begin and end are marked, by module; what a commit does not have is left out."""

MARKS: Final[list[tuple[str, float, float]]] = []
BEGUN: Final = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19]) / os.sysconf("SC_CLK_TCK")
"""When the process began (proc(5), starttime), in seconds since the machine's start."""


def mark(name: str) -> None:
    """Note the time and the process's CPU time."""
    MARKS.append((name, time.clock_gettime(time.CLOCK_BOOTTIME) - BEGUN, time.process_time()))


def marked(owner: Any, name: str) -> None:
    """Mark a function's begin and end."""
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    def run(*given: Any, **named: Any) -> Any:
        mark(f"> {name}")
        try:
            return function(*given, **named)
        finally:
            mark(f"< {name}")

    setattr(owner, name, run)


class Finder:
    """Marks the functions of a module once it is imported."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        """The module's own spec, whose functions are marked."""
        if name not in STAGES or (spec := importlib.machinery.PathFinder.find_spec(name, path)) is None:
            return None
        loader: Any = spec.loader
        load = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            for dotted in STAGES[name]:
                *owners, attribute = dotted.split(".")
                owner: Any = functools.reduce(
                    lambda found, part: getattr(found, part, None), owners, cast("Any", module)
                )
                if hasattr(owner, attribute):
                    marked(owner, attribute)

        loader.exec_module = exec_module
        return spec


def told() -> str:
    """A line a mark."""
    lines, before, spent = [], 0.0, 0.0
    for name, at, cpu in MARKS:
        lines.append(f"{1e3 * at:7.0f} ms (+{1e3 * (at - before):5.0f}, CPU +{1e3 * (cpu - spent):5.0f}) {name}")
        before, spent = at, cpu
    return "\n".join(lines) + "\n"


def main() -> None:
    """The program with its arguments."""
    if sys.argv[1:2] == ["--tree"]:
        sys.path.insert(0, sys.argv.pop(2))
        del sys.argv[1]
    else:
        sys.path.insert(0, str(Path(__file__).parents[1]))
    leave = os._exit

    def left(status: int) -> NoReturn:
        mark("_exit")
        sys.stderr.write(told())
        sys.stderr.flush()
        leave(status)

    os._exit = left
    mark("python")
    sys.meta_path.insert(0, Finder())
    from tegrad.cli import entry

    mark("tegrad.cli")
    entry()


if __name__ == "__main__":
    main()
