"""What all tests share: every one of them is held against the kernel logs of the boards that it lets run."""

import gc
import os
import shutil
import signal
import sys
from collections.abc import Iterator

import balance
import klog_checker
import pytest
from balance import (  # noqa: F401 (pytest finds them here)
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
)
from klog_checker import no_error_in_a_boards_log  # noqa: F401

CHOSEN = os.environ.get("DEV")
"""The device that the suite was started for."""

os.environ.setdefault("PARALLEL", "0")
"""tinygrad compiles in its own process: a worker of it imports tinygrad again for every 16 kernels, and a third of a
kernel's time is that, with nothing that ran beside it where test processes share the cores."""

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # so with nohup
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_configure(config: pytest.Config) -> None:
    """What the two plugins begin a session with."""
    klog_checker.pytest_configure(config)
    balance.pytest_configure(config)


def pytest_collection_finish() -> None:
    """Thousands of tests are never garbage: each time that a test looks for some, they would take 0.4 s."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """tinygrad reads what this test sets, and not what it remembers of one before it.

    A test that needs clang is skipped where there is none; one that compares with another device than the CPU is not.
    """
    if (helpers := sys.modules.get("tinygrad.helpers")) is not None:
        helpers.getenv.cache_clear()
    marker = item.get_closest_marker("clang")
    if marker is None or shutil.which("clang") is not None:
        return
    if not marker.kwargs.get("as_reference") or item.config.getoption("reference", "CPU") == "CPU":
        pytest.skip("tinygrad's CPU device needs clang")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Iterator[None]:
    """No test inherits the device that tinygrad chose in one before it, nor do the processes that it starts.

    tinygrad chooses once for the whole process and puts its choice into the environment.
    """
    try:
        yield
    finally:
        if (tinygrad := sys.modules.get("tinygrad.device")) is not None:
            tinygrad.Device.__dict__.pop("_select_device", None)
        os.environ.pop("DEV", None)
        if CHOSEN is not None:
            os.environ["DEV"] = CHOSEN
