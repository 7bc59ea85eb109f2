"""What all tests share: every one of them is held against the kernel logs of the boards that it lets run."""

import shutil
import signal

import pytest
from klog_checker import no_error_in_a_boards_log, pytest_configure  # noqa: F401 (pytest finds them here)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell's background job ignores Ctrl-C, and so would every process that the tests start and interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs clang where there is none."""
    if item.get_closest_marker("clang") and shutil.which("clang") is None:
        pytest.skip("tinygrad's CPU device needs clang")
