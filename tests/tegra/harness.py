"""What the campaign's tests share: which GPU answers, comparing devices, timing, and counting what is open.

The tests run on the NV device there is: a Jetson or an H200 where one is found, a private emulated board otherwise.
"""

import gc
import os
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BOARD = "agx-orin-64gb:12GiB"
"""The board of the campaign; a size of its own keeps it apart from those of other tests."""


REFERENCE = ["CPU"]
"""The device that NV is compared with; `--reference` names another, such as CUDA."""
DIFFERENCES: list[dict[str, Any]] = []
"""Results that differ from the reference's, by the test and the largest difference: `--differences` writes them."""


def real_gpu() -> bool:
    """Whether this machine has a GPU that the NV device can drive, and no board was asked for."""
    nodes = ("/dev/nvgpu/igpu0/ctrl", "/dev/nvhost-ctrl-gpu", "/dev/nvidiactl")
    return "TEGRAD_BOARD" not in os.environ and any(os.path.exists(node) for node in nodes)


@dataclass(frozen=True)
class Backend:
    """What runs the tests: its kind, and the properties that some tests depend on."""

    kind: str
    """"board", "jetson" or "nvidia"."""
    arch: str
    unified_memory: bool

    @property
    def emulated(self) -> bool:
        return self.kind == "board"


def backend() -> Backend:
    """The backend of the open NV device."""
    device = open_device()
    unified = bool(getattr(device.iface, "unified_memory", False))
    kind = "jetson" if unified else "nvidia"
    return Backend(kind if real_gpu() else "board", device.arch, unified)


def open_device() -> Any:
    """tinygrad's NV device, opened if it is not."""
    from tinygrad import Device

    return Device["NV"]


def close_device() -> None:
    """Close the NV device with everything that tests may still refer to."""
    from tegrad.nv import device

    gc.collect()
    if (opened := device._opened.get("NV")) is not None:
        opened.close()
    gc.collect()


def compare_backends(
    function: Callable[..., Any],
    *arrays: np.ndarray,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> list[np.ndarray]:
    """Run a function of tensors on NV and on REFERENCE, assert that all results agree; NV's results.

    `function` gets a tensor per array, and returns a tensor or several. Both runs start from tinygrad's seed 0. What
    differs at all is kept in DIFFERENCES.
    """
    ours, theirs = (_run(function, arrays, device) for device in ("NV", REFERENCE[0]))
    assert len(ours) == len(theirs)
    for number, (got, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert got.dtype == expected.dtype
        _note(number, got, expected)
        np.testing.assert_allclose(got, expected, rtol, atol, err_msg=f"result {number}, NV against {REFERENCE[0]}")
    return ours


def _note(number: int, got: np.ndarray, expected: np.ndarray) -> None:
    if got.shape != expected.shape or np.array_equal(got, expected, equal_nan=got.dtype.kind == "f"):
        return
    with np.errstate(all="ignore"):
        apart = np.abs(got.astype(np.float64) - expected.astype(np.float64))
    test = os.environ.get("PYTEST_CURRENT_TEST", "").removesuffix(" (call)")
    counts = {"values": int((apart > 0).sum()), "of": got.size}
    DIFFERENCES.append({"test": test, "result": number, "most": float(np.nanmax(apart)), **counts})


def _run(function: Callable[..., Any], arrays: Sequence[np.ndarray], device: str) -> list[np.ndarray]:
    from tinygrad import Tensor
    from tinygrad.helpers import Context

    with Context(DEV=device):
        Tensor.manual_seed(0)
        results = function(*(Tensor(array, device=device) for array in arrays))
        tensors = results if isinstance(results, (tuple, list)) else (results,)
        Tensor.realize(*tensors)  # together: one by one each would compute anew what they have in common
        return [tensor.numpy() for tensor in tensors]


@dataclass(frozen=True)
class Timing:
    """Seconds per call: median, mean, and the 99th percentile (by nearest rank)."""

    median: float
    mean: float
    p99: float


def timed(function: Callable[[], object], repetitions: int = 10, warm_up: int = 1) -> Timing:
    """Call a function again and again. For reports: no test may depend on what comes out."""
    for _ in range(warm_up):
        function()
    samples = []
    for _ in range(repetitions):
        start = time.perf_counter()
        function()
        samples.append(time.perf_counter() - start)
    samples.sort()
    rank = max(0, -(-99 * len(samples) // 100) - 1)
    return Timing(statistics.median(samples), statistics.fmean(samples), samples[rank])


def count_fds() -> int:
    """Open file descriptors of this process."""
    return len(os.listdir("/proc/self/fd")) - 1  # the listing has one of its own


def count_maps(shared: bool = True) -> int:
    """Memory mappings of this process; by default only shared ones, which is what buffers have."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split()[1].endswith("s") for line in lines) if shared else len(lines)


def words(buffer: Any, count: int = 1) -> list[int]:
    """The first integers of a buffer, when everything before is done. The CPU need not see the memory."""
    data = bytearray(4 * count)
    buffer.owner.allocator._copyout(memoryview(data), buffer)
    return np.frombuffer(data, np.int32).tolist()


def fill(buffer: Any, data: bytes | bytearray) -> None:
    """Copy bytes to the start of a buffer."""
    buffer.owner.allocator._copyin(buffer, memoryview(data))


def peak_memory() -> int:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


DRIVER = ("socket:", "anon_inode:", "/dev/nv", "/dmabuf", "/memfd", "/dev/host1x")
"""How the files of the drivers begin, real or emulated; tinygrad's cache and compile workers have others."""


def driver_fds() -> int:
    """File descriptors that the drivers gave out."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the listing's own
            found += os.readlink(f"/proc/self/fd/{fd}").startswith(DRIVER)
    return found


def driver_maps() -> int:
    """Mappings of the drivers' memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.split(maxsplit=5)[-1].startswith(DRIVER) for line in lines)


def open_reference() -> None:
    """Compute once on REFERENCE: what it opens on the driver, as CUDA does, stays open and is no leak of ours.

    RuntimeError if it cannot compute here.
    """
    if REFERENCE[0] == "CPU":  # needs clang to compute, and opens nothing
        return
    from tinygrad import Tensor

    try:
        (Tensor([1.0], device=REFERENCE[0]) + 1).numpy()
    except Exception as error:
        raise RuntimeError(
            f"--reference {REFERENCE[0]} does not compute on this machine ({error}): "
            "CUDA needs a real GPU and libcuda.so. "
            "Without the option NV is compared with tinygrad's CPU device, which needs clang"
        ) from error


def held() -> dict[str, int]:
    """What this process and, where it is emulated, the board hold for it right now."""
    counts = {"fds": driver_fds(), "maps": driver_maps()}
    if not real_gpu():
        from tegrad.orin.client import board_status

        status = board_status(os.environ.get("TEGRAD_BOARD", BOARD))
        counts |= {f"board {name}": value for name, value in status["counts"].items()}
    return counts
