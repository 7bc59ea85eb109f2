"""A pytest plugin: a test during which a board logs an error of its drivers fails.

Every board that the test process, its children and theirs start keeps its kernel log in a folder of this session
(TEGRAD_BOARD_LOG), and each test is held against what the logs have grown by. `klog_errors("regex")` marks a test that
provokes error lines, in whatever process.
"""

import fcntl
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tegrad.diag.klog import LogLine, Severity, classify
from tegrad.uapi.kmsg import parse

FOLDER = "TEGRAD_BOARD_LOG"
END_S = 20.0
"""How long a board may take to end after the process that started it."""


class BoardLogs:
    """The kernel logs in a folder, as they grow."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._waited_for: set[Path] = set()
        self.allowed: re.Pattern[str] | None = None
        """The error lines that the test of now, or of just now, provokes."""

    def unexpected(self) -> list[LogLine]:
        """Error lines since the last call that are not allowed, of all boards."""
        found = [line for path in sorted(self._folder.iterdir()) for line in self._new(path)]
        bad = [line for line in found if line.severity is Severity.ERROR]
        return [line for line in bad if not (self.allowed and self.allowed.search(line.record.text))]

    def _new(self, path: Path) -> Iterator[LogLine]:
        self._wait(path)
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        for text in whole.decode(errors="replace").splitlines():
            if (record := parse(text)) and (line := classify(record)):
                yield line

    def _wait(self, path: Path) -> None:
        """Wait, once, until a private board whose starter is gone has written its last line."""
        starter = int(path.name.split("-")[0])
        if path in self._waited_for or starter == os.getpid() or _runs(starter):
            return
        self._waited_for.add(path)
        until = time.monotonic() + END_S
        with path.open() as file:
            while time.monotonic() < until:
                with suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(0.01)


def _runs(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def settle() -> None:
    """Wait until the boards of this process have seen all that it closed. Starts no board."""
    if connection := sys.modules.get("tegrad.orin.connection"):
        for board in list(connection._connections.values()):
            board.sync()


_logs = pytest.StashKey[BoardLogs]()


def pytest_configure(config: pytest.Config) -> None:
    """Let every board keep its log in a folder of this session's."""
    # A worker's folder lies in that of the process that handed it its tests, which removes what a crash left behind.
    above = os.environ.get(FOLDER) if hasattr(config, "workerinput") else None
    folder = Path(tempfile.mkdtemp(prefix="tegrad-board-logs-", dir=above))
    config.stash[_logs] = BoardLogs(folder)
    before = os.environ.get(FOLDER)
    os.environ[FOLDER] = str(folder)

    def end() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.environ.pop(FOLDER, None)
        if before is not None:
            os.environ[FOLDER] = before

    config.add_cleanup(end)


@pytest.fixture(autouse=True)
def no_error_in_a_boards_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test during which a board logged an error of its drivers that the test does not announce."""
    logs = request.config.stash[_logs]
    between = _unexpected(logs)  # judged by what the test before was allowed
    marker = request.node.get_closest_marker("klog_errors")
    logs.allowed = re.compile(marker.args[0]) if marker else None
    assert not between, "error lines in a board's kernel log before this test:\n" + "\n".join(map(str, between))
    yield
    bad = _unexpected(logs)
    assert not bad, "error lines in a board's kernel log:\n" + "\n".join(map(str, bad))


def _unexpected(logs: BoardLogs) -> list[LogLine]:
    settle()
    return logs.unexpected()
