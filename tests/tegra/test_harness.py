"""The harness itself: it sees a difference, counts what is open, and knows what it runs on."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Backend, close_device, compare_backends, driver_fds, driver_maps, timed
from kernels import program

from tegrad.diag.klog import KernelLogError, expect_clean
from tegrad.nv.kernel import pick_kernel

pytestmark = pytest.mark.board


@pytest.mark.clang
def test_comparing_backends_passes_what_agrees_and_fails_what_does_not() -> None:
    from tinygrad import Device

    values = np.arange(12, dtype=np.float32)
    assert compare_backends(lambda x: x + 1, values)[0].tolist() == (values + 1).tolist()
    with pytest.raises(AssertionError, match="NV against CPU"):
        compare_backends(lambda x: x + (1 if Device.DEFAULT.startswith("NV") else 2), values)


def test_another_reference_than_the_cpu_needs_no_clang(tmp_path: Path) -> None:
    """On a server without clang a comparison with CUDA was skipped whole."""
    edge = "tests/tegra/test_against.py::test_an_edge_is_as_on_another_device[one element]"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", edge]
    root, without = Path(__file__).parents[2], {**os.environ, "PATH": str(tmp_path)}
    for more, outcome in ((["--reference", "PYTHON"], "1 passed"), ([], "1 skipped")):
        done = subprocess.run([*command, *more], cwd=root, env=without, capture_output=True, text=True, check=False)
        assert outcome in done.stdout, done.stdout + done.stderr


def test_what_a_reference_opens_is_no_leak(tmp_path: Path) -> None:
    """CUDA's own files of the driver, opened by the first comparison, counted as left open by NV."""
    counting = """
def pytest_collection_finish(session):
    import harness
    from tinygrad import Device
    harness.driver_fds = lambda: len(Device._opened_devices & {"PYTHON"})
"""
    (tmp_path / "counting.py").write_text(counting)
    edge = "tests/tegra/test_against.py::test_an_edge_is_as_on_another_device[one element]"
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "-p", "counting", edge]
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    done = subprocess.run(
        [*command, "--reference", "PYTHON"],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def test_timing_gives_median_mean_and_the_99th_percentile(monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    clock = iter(t for n in range(100) for t in (0.0, float(n + 1)))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    timing = timed(lambda: None, repetitions=100)
    assert (timing.median, timing.mean, timing.p99) == (50.5, 50.5, 99.0)


def test_a_buffer_counts_as_a_mapping_and_a_driver_file_as_an_fd(device: Any, gpu: Backend) -> None:
    if not gpu.unified_memory:
        pytest.skip("buffers of a discrete GPU are not mapped in this process")
    device.allocator.free_cache()
    fds, maps = driver_fds(), driver_maps()
    kernel = pick_kernel()
    fd, buffer = kernel.open("/dev/nvmap"), device.iface.alloc(4096)
    assert (driver_fds(), driver_maps()) == (fds + 1, maps + 1)
    device.iface.free(buffer)
    device.allocator.free_cache()
    kernel.close(fd)
    assert (driver_fds(), driver_maps()) == (fds, maps)


def test_the_backend_is_what_was_asked_for(gpu: Backend) -> None:
    assert gpu.emulated == ("TEGRAD_BOARD" in os.environ)
    assert gpu.arch.startswith("sm_")


@pytest.mark.klog_errors("MMU FAULT|page fault|mmu fault|error notifier")
def test_a_fault_is_an_error_line_for_the_checker(device: Any, gpu: Backend) -> None:
    if not gpu.emulated:
        pytest.skip("faults of a real GPU cost its other users too")
    from tegrad.nv.faults import DeviceFault

    buffer = device.allocator.alloc(4096)

    @expect_clean(pick_kernel())
    def store_somewhere() -> None:
        program(device, "wild")(buffer, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(200,))
        with pytest.raises(DeviceFault):
            device.synchronize()

    with pytest.raises(KernelLogError, match="address that is not mapped"):
        store_somewhere()
    close_device()
