"""A pytest plugin: several processes (`pytest -n 2 --dist loadfile --no-loadscope-reorder`) end at about the same time.

Files that take longest are handed out first, by the seconds that tests/seconds.json has for them; a file that is not
there comes last. `--record-seconds` writes that table anew, `--fast` leaves out the files that take long by it. In one
process nothing changes. The summary has the busy time of each process.
"""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

TABLE = Path(__file__).with_name("seconds.json")
SHORT_S = 2.0
"""Files of tests below it are not in the table: they fill the gaps at the end."""
FAST_S = 5.0
"""What a file may take at most to be a part of `--fast`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--record-seconds` and `--fast`."""
    text = f"write how long each file of tests takes to {TABLE.name}, by which several processes share them"
    parser.addoption("--record-seconds", action="store_true", help=text)
    text = f"leave out files of tests that take more than {FAST_S:g} s, by {TABLE.name}"
    parser.addoption("--fast", action="store_true", help=text)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast`, files that take long."""
    if not config.getoption("fast") or not collection_path.is_relative_to(config.rootpath):
        return None
    name = collection_path.relative_to(config.rootpath).as_posix()
    return True if json.loads(TABLE.read_text()).get(name, 0) > FAST_S else None


def file_of(node: str) -> str:
    """The file of a test, as the table has it."""
    return node.partition("::")[0]


def longest_first(nodes: list[str], seconds: dict[str, float]) -> list[int]:
    """The order in which tests are handed out: by their files' seconds, else as they came."""
    return sorted(range(len(nodes)), key=lambda at: -seconds.get(file_of(nodes[at]), 0))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a worker, files in the order of the table."""
    if hasattr(config, "workerinput"):
        seconds = json.loads(TABLE.read_text())
        items[:] = [items[at] for at in longest_first([item.nodeid for item in items], seconds)]


class Clock:
    """Seconds by process and by file, as the tests are reported."""

    def __init__(self) -> None:
        self.workers: Counter[str] = Counter()
        self.files: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count one phase of a test."""
        if worker := getattr(report, "node", None):
            self.workers[worker.gateway.id] += report.duration
        self.files[file_of(report.nodeid)] += report.duration

    def pytest_terminal_summary(self, terminalreporter: Any, config: pytest.Config) -> None:
        """Say how busy each process was, and write the table if asked to."""
        if self.workers:
            busy = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in sorted(self.workers.items()))
            terminalreporter.write_line(f"busy: {busy}")
        if config.getoption("record_seconds"):
            long = {name: round(seconds, 1) for name, seconds in self.files.most_common() if seconds >= SHORT_S}
            TABLE.write_text(json.dumps(long, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    """Count in the process that reports."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Clock())
