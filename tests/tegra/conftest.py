"""One NV device for each file of the campaign, every test under the kernel-log checker, and nothing held at its end.

Markers: `klog_errors("regex")` allows error lines in a test that provokes them.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
from harness import (
    BOARD,
    DIFFERENCES,
    REFERENCE,
    Backend,
    backend,
    close_device,
    held,
    open_device,
    open_reference,
    real_gpu,
)

from tegrad.diag.klog import KernelLog, expect_clean
from tegrad.uapi.errors import DriverError

sys.path.insert(0, str(Path(__file__).parents[1] / "nv"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """What `pytest tests/tegra` also takes."""
    group = parser.getgroup("tests/tegra")
    group.addoption("--full", action="store_true", help="at the size that a GPU is to hold: minutes, gigabytes")
    group.addoption("--reference", default="CPU", help="tinygrad's device that NV is compared with, CPU unless given")
    group.addoption("--differences", type=Path, metavar="FILE", help="write what differs from the reference, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """The options, where they exist: they do if the command line names this folder."""
    REFERENCE[0] = config.getoption("reference", "CPU")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Write what differed, where, and of how many tests."""
    if (path := session.config.getoption("differences", None)) is None:
        return
    from tegrad.bench.record import machine, now, versions

    about = {"date": now(), "machine": machine(), "versions": versions(), "reference": REFERENCE[0]}
    counts = {"tests": session.testscollected, "failed": session.testsfailed}
    path.write_text(json.dumps({**about, **counts, "differences": DIFFERENCES}, indent=1) + "\n")


@pytest.fixture(scope="module")
def full(request: pytest.FixtureRequest) -> bool:
    """Whether tests are to run at the size that a GPU is to hold."""
    return bool(request.config.getoption("full", False))


@pytest.fixture(scope="module", autouse=True)
def machine() -> Iterator[None]:
    """NV as the default device for a file of tests; the process and the board hold the same before and after."""
    from tinygrad.helpers import Context

    import tegrad.nv

    tegrad.nv.install()
    close_device()
    with pytest.MonkeyPatch.context() as patch, Context(DEV="NV"), ExitStack() as end:
        if not real_gpu() and "TEGRAD_BOARD" not in os.environ:
            patch.setenv("TEGRAD_BOARD", BOARD)
        end.callback(close_device)
        open_device()  # what the first opening leaves for good (libraries, the board's connection) is not a leak
        close_device()
        open_reference()
        before = held()
        yield
        close_device()
        assert held() == before


@pytest.fixture
def device() -> Any:
    """The open NV device."""
    return open_device()


@pytest.fixture
def gpu() -> Backend:
    """What kind of backend the device is."""
    return backend()


@pytest.fixture(autouse=True)
def clean_log(request: pytest.FixtureRequest, machine: None) -> Iterator[None]:
    """Fail a test during which the drivers logged an error."""
    from tegrad.nv.kernel import pick_kernel

    marker = request.node.get_closest_marker("klog_errors")
    kernel = pick_kernel()
    try:
        KernelLog(kernel).new()
    except DriverError as closed:
        request.node.warn(pytest.PytestWarning(f"the kernel log is not checked: {closed}"))
        checker: Any = nullcontext()
    else:
        checker = expect_clean(kernel, allow=marker.args[0] if marker else None)
    with checker:
        yield
