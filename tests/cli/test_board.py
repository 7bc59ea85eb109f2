"""`tegrad board`: one that is started by name, what is made to fail there, and what is refused."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tegrad.orin.client import BoardKernel
from tegrad.uapi import ioctls
from tegrad.uapi.errors import DriverError
from tegrad.uapi.structs import CreateHandle

NAME = f"test-inject-{os.getpid()}"


def board(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tegrad", "board", *words]
    return subprocess.run(
        command, env={**os.environ, "COLUMNS": "200"}, capture_output=True, text=True, check=False, timeout=60
    )


@pytest.fixture(scope="module")
def running() -> Iterator[None]:
    assert board("start", NAME).returncode == 0
    yield
    assert board("stop", NAME).stdout == f"{NAME}: stopped\n"


def outcomes(count: int) -> list[int]:
    """The errors, or 0, of so many new handles of nvmap."""
    kernel, found = BoardKernel(NAME), []
    fd = kernel.open("/dev/nvmap")
    try:
        for _ in range(count):
            try:
                kernel.ioctl(fd, ioctls.NVMAP_IOC_CREATE, CreateHandle(size=4096))
                found.append(0)
            except DriverError as error:
                found.append(error.errno or -1)
    finally:
        kernel.close(fd)
    return found


@pytest.mark.usefixtures("running")
def test_a_call_fails_as_it_was_told_to_and_no_longer() -> None:
    assert outcomes(2) == [0, 0]
    done = board("inject", NAME, "NVMAP_CREATE", "--errno", "enomem", "--nth", "2")
    assert (done.returncode, done.stdout) == (0, f"{NAME}: NVMAP_CREATE is struck at call 2\n")
    assert outcomes(3) == [0, errno.ENOMEM, 0]
    assert board("inject", NAME, "NVMAP_*", "--errno", "5", "--probability", "1", "--times", "0").returncode == 0
    assert outcomes(2) == [errno.EIO, errno.EIO]
    assert board("inject", NAME).stdout == f"{NAME}: nothing is injected any more\n"
    assert outcomes(1) == [0]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("NVMAP_CRATE", "--errno", "EIO"), "no ioctl is called NVMAP_CRATE; near: NVMAP_CREATE"),
        (("NVMAP_CREATE",), "say what is to happen: --errno, --stall or --answer"),
        (("NVMAP_CREATE", "--errno", "EVERY"), "there is no error 'EVERY'; such as ENOMEM"),
        (("GPU_NUM_VSMS", "--answer", "sms=8"), "GPU_NUM_VSMS has no field sms; it has"),
        (("GPU_NUM_VSMS", "--answer", "num_vsms"), "'num_vsms' is no FIELD=VALUE"),
        (("NVMAP_CREATE", "--errno", "EIO", "--nth", "1", "--probability", "0.5"), "exclude each other"),
    ],
)
def test_what_means_nothing_is_refused(words: tuple[str, ...], why: str) -> None:
    done = board("inject", "no-board", *words)
    assert done.returncode == 2
    assert why in re.sub(r"[\s│]+", " ", done.stderr)


def test_a_board_that_does_not_run_is_named() -> None:
    done = board("inject", "no-such-board", "NVMAP_CREATE", "--errno", "EIO")
    assert done.returncode != 0
    assert "no-such-board" in done.stderr
    assert "Traceback" not in done.stderr
