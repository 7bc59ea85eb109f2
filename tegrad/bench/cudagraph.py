"""The peer of a recorded function: the same kernels in a CUDA graph, through ctypes on libcuda.

It runs in a process of its own, so that libcuda never meets our submission path. Kernels are PTX, which the driver
compiles. Two graphs are tried: input and output in host memory that the kernels reach across the bus, and copy nodes
around the kernels.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from tegrad.bench.gpu import spawned
from tegrad.bench.record import RecordError

LIBRARY: Final = "libcuda.so.1"
CTX_SCHED_SPIN: Final = 1
"""CU_CTX_SCHED_SPIN: cuStreamSynchronize polls, which answers soonest."""
NON_BLOCKING, RELAXED, MAPPED = 1, 2, 2
"""CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_RELAXED, CU_MEMHOSTALLOC_DEVICEMAP."""
WARM_UP_CALLS: Final = 200


@dataclass(frozen=True)
class GraphKernel:
    """A launch: PTX text, name, sizes, and its arguments as indices of buffers."""

    ptx: str
    name: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    buffers: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    """Kernels in order, buffers by their content, which of them is written and read, and each call's input."""

    kernels: list[GraphKernel]
    buffers: list[bytes]
    input: int
    output: int
    inputs: list[bytes]


class Timed(NamedTuple):
    """Microseconds of each call, and what came out."""

    samples: list[float]
    outputs: list[Any]


class Cuda:
    """A context on the first GPU; its functions by name, checked. RecordError where there is no CUDA."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = library or ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise RecordError(f"a CUDA graph needs {LIBRARY}: {error}") from error
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), 0)
        self("cuDevicePrimaryCtxSetFlags_v2", device, CTX_SCHED_SPIN)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        self._modules: list[ctypes.c_void_p] = []

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function; RecordError for anything but success."""
        if status := getattr(self._library, name)(*arguments):
            raise RecordError(f"{name} answers {status}")

    def made(self, name: str, *arguments: Any) -> ctypes.c_void_p:
        """Call a function whose first argument is where it stores a handle; the handle."""
        handle = ctypes.c_void_p()
        self(name, ctypes.byref(handle), *arguments)
        return handle

    def function(self, kernel: GraphKernel) -> ctypes.c_void_p:
        """A kernel, compiled by the driver."""
        module = self.made("cuModuleLoadData", kernel.ptx.encode() + b"\0")
        self._modules.append(module)
        return self.made("cuModuleGetFunction", module, kernel.name.encode())

    def device_memory(self, content: bytes) -> ctypes.c_void_p:
        """Memory of the GPU with this content."""
        address = self.made("cuMemAlloc_v2", ctypes.c_size_t(len(content)))
        self("cuMemcpyHtoD_v2", address, content, ctypes.c_size_t(len(content)))
        return address

    def host_memory(self, content: bytes) -> tuple[np.ndarray[Any, Any], ctypes.c_void_p]:
        """Pinned memory of the host with this content, as an array and as the GPU's address."""
        address = self.made("cuMemHostAlloc", ctypes.c_size_t(len(content)), MAPPED)
        array = np.ctypeslib.as_array((ctypes.c_uint8 * len(content)).from_address(address.value or 0))
        array[:] = np.frombuffer(content, np.uint8)
        return array, self.made("cuMemHostGetDevicePointer_v2", address, 0)


class Graph:
    """The work as a graph: `call(input)` gives the output's bytes. With `mapped`, no copies."""

    def __init__(self, cuda: Cuda, work: Work, *, mapped: bool) -> None:
        contents = work.buffers
        self._in, near_in = cuda.host_memory(contents[work.input])
        self._out, near_out = cuda.host_memory(contents[work.output])
        addresses = [cuda.device_memory(content) for content in contents]
        if mapped:
            addresses[work.input], addresses[work.output] = near_in, near_out
        self._stream = cuda.made("cuStreamCreate", NON_BLOCKING)
        cuda("cuStreamBeginCapture_v2", self._stream, RELAXED)
        if not mapped:
            size = ctypes.c_size_t(len(contents[work.input]))
            cuda(
                "cuMemcpyHtoDAsync_v2", addresses[work.input], ctypes.c_void_p(self._in.ctypes.data), size, self._stream
            )
        for kernel in work.kernels:
            values = [addresses[index] for index in kernel.buffers]
            pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
            cuda("cuLaunchKernel", cuda.function(kernel), *kernel.grid, *kernel.block, 0, self._stream, pointers, None)
        if not mapped:
            size = ctypes.c_size_t(len(contents[work.output]))
            cuda(
                "cuMemcpyDtoHAsync_v2",
                ctypes.c_void_p(self._out.ctypes.data),
                addresses[work.output],
                size,
                self._stream,
            )
        graph = ctypes.c_void_p()
        cuda("cuStreamEndCapture", self._stream, ctypes.byref(graph))
        self._graph = cuda.made("cuGraphInstantiateWithFlags", graph, ctypes.c_ulonglong(0))
        library = cuda._library
        self._launch, self._wait = library.cuGraphLaunch, library.cuStreamSynchronize

    def call(self, given: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Run the graph for an input (bytes); the output, a copy."""
        self._in[:] = given
        if self._launch(self._graph, self._stream) or self._wait(self._stream):
            raise RecordError("the CUDA graph failed")
        return self._out.copy()


def timed(call: Callable[[Any], Any], inputs: Sequence[Any]) -> Timed:
    """Each call after a warm-up."""
    for at in range(WARM_UP_CALLS):
        call(inputs[at % len(inputs)])
    samples, outputs, clock = [], [], time.perf_counter_ns
    for given in inputs:
        begun = clock()
        output = call(given)
        samples.append((clock() - begun) / 1e3)
        outputs.append(output)
    return Timed(samples, outputs)


def run(work: Work, library: Any = None) -> dict[str, Timed]:
    """The graph in each form, by its name; outputs are bytes."""
    cuda = Cuda(library)
    inputs = [np.frombuffer(given, np.uint8) for given in work.inputs]
    return {
        name: timed(Graph(cuda, work, mapped=mapped).call, inputs)
        for name, mapped in (("mapped", True), ("copied", False))
    }


def in_process(work: Work) -> dict[str, Timed]:
    """`run`, in a process of its own. RecordError where it fails."""
    try:
        (found,) = spawned(run, [(work,)], 1)
    except BrokenProcessPool as error:
        raise RecordError("the CUDA graph failed: its process ended without a word") from error
    return found
