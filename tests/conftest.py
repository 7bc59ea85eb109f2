"""Every test that leaves a board running is held against that board's kernel log.

The tests of the drivers themselves provoke errors all the time and look at the log by themselves; those of the campaign
have the checker of tegrad.diag.klog around them. `klog_errors("regex")` marks a test that provokes error lines.
"""

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tegrad.diag.klog import Severity, classify
from tegrad.uapi.kmsg import LogRecord

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

OTHERS = {"orin", "conformance", "tegra"}


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs clang where there is none."""
    if item.get_closest_marker("clang") and shutil.which("clang") is None:
        pytest.skip("tinygrad's CPU device needs clang")


def lines(since: dict[tuple[str, int], int]) -> Iterator[LogRecord]:
    """New records of the boards that this process is connected to; moves `since` on. Starts no board."""
    connection = sys.modules.get("tegrad.orin.connection")
    if connection is None:
        return
    from tegrad.orin.wire import Message, Op, from_file

    for spec, board in list(connection._connections.items()):
        if (sock := board._sock) is None:
            continue
        with suppress(OSError):  # a board that is gone
            key = spec, board.pid
            answer = connection.call(sock.fileno(), Message(Op.LOG, value=since.get(key, 0)))
            for sequence, us, level, text in json.loads(from_file(answer.fds[0])):
                since[key] = sequence + 1
                yield LogRecord(sequence, us, level, text)


@pytest.fixture(autouse=True)
def no_error_in_a_boards_log(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test during which a board of this process logged an error of its drivers."""
    if OTHERS & set(Path(request.node.path).parts):
        yield
        return
    since: dict[tuple[str, int], int] = {}
    for _ in lines(since):
        pass
    yield
    marker = request.node.get_closest_marker("klog_errors")
    allowed = re.compile(marker.args[0]) if marker else None
    found = [line for record in lines(since) if (line := classify(record)) and line.severity is Severity.ERROR]
    bad = [str(line) for line in found if not (allowed and allowed.search(line.record.text))]
    assert not bad, "error lines in the board's kernel log:\n" + "\n".join(bad)
