"""A control network of 12-128-128-4 halves, a call at a time: recorded, through TinyJit, and in a CUDA graph.

A call is what a control loop does: store the observation, run, read the action. All three run the same kernels, and
their outputs are compared before anything is reported: `tegrad bench mlp`. The graph runs in a process of its own, so
that libcuda never meets our submission path.

`tegrad bench host` is what the CPU does for a call or a launch, without a GPU: microseconds until it comes back. The
device is made to look as if its GPU were always done at once: submissions go into the rings as ever and the doorbell
goes nowhere, so that nothing waits. That works on a board, whose emulated GPU would take the time, and tells nothing of
a GPU's share.
"""

from __future__ import annotations

import ctypes
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit
from tinygrad.device import TinyELF
from tinygrad.dtype import dtypes
from tinygrad.helpers import Target

import tegrad.nv
from tegrad.bench.gpu import spawned
from tegrad.bench.record import Record, RecordError, Side, make
from tegrad.bench.rows import MLP_WIDTHS, mlp, mlp_weights
from tegrad.nv import compilers
from tegrad.nv.cubin import read_ptx
from tegrad.nv.device import NVDevice
from tegrad.nv.record import LONE, Recorded, record
from tegrad.nv.replay import DEPENDENCIES, Dependency

CALLS: Final = 4_000
ROUNDS: Final = 5
"""Times that ours and the graph make their calls in turn: what else the host does comes and goes in tenths of a second,
and decides a 99th percentile."""
JIT_CALLS: Final = 1_000
WARM_UP_CALLS: Final = 200
GRAPH_S: Final = 300
"""Within which the graph's process has to be done: a GPU that hangs would keep it for ever."""
BATCH_CALLS: Final = 500
"""Calls whose 99th percentile is one sample of the figure for p99."""
WHAT: Final = "one call of a 12-128-128-4 network of halves: store the input, run, read the output"

Array = NDArray[np.float16]


class Timed(NamedTuple):
    """Microseconds of each call, and what came out."""

    samples: list[float]
    outputs: list[Any]


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


def observations(count: int) -> list[Array]:
    """Inputs (1, 12)."""
    rng = np.random.default_rng(1)
    return list(rng.standard_normal((count, 1, MLP_WIDTHS[0])).astype(np.float16))


@contextmanager
def recorded_network(dependency: Dependency = LONE) -> Iterator[Recorded]:
    """The network, recorded on the NV device."""
    tegrad.nv.install()
    weights = [Tensor(layer, device="NV").realize() for layer in mlp_weights()]
    with record(mlp(weights), np.zeros((1, MLP_WIDTHS[0]), np.float16), dependency=dependency) as made:
        yield made


def caller(made: Recorded) -> Callable[[Array], Array]:
    """One call of a recorded network, as a control loop that keeps the arrays makes it."""
    given, result = made.inputs[0], made.outputs[0]

    def call(x: Array) -> Array:
        given[:] = x
        made.run()
        return result.copy()

    return call


def jitted() -> Any:
    """One call through TinyJit, as a user of tinygrad writes it."""
    tegrad.nv.install()
    jit: Any = TinyJit(mlp([Tensor(layer, device="NV").realize() for layer in mlp_weights()]))
    return lambda x: jit(Tensor(x, device="NV").realize()).numpy()


def as_work(made: Recorded, inputs: Sequence[Array]) -> Work:
    """What a recorded function runs, for a CUDA graph: the kernels' PTX, and buffers with what is in them now."""
    addresses: dict[int, Any] = {}
    kernels = []
    for launch in made.launches:
        section = read_ptx(launch.program.lib)
        if section is None:
            raise RecordError(f"{launch.program.name} carries no PTX")
        for buffer in launch.buffers:
            addresses.setdefault(buffer.va_addr, buffer)
        places = tuple(list(addresses).index(buffer.va_addr) for buffer in launch.buffers)
        kernels.append(GraphKernel(section.ptx, launch.program.name, launch.grid, launch.block, places))
    contents = [_content(buffer) for buffer in addresses.values()]
    where = [buffer.cpu_view().addr if buffer.view is not None else None for buffer in addresses.values()]
    given, result = (where.index(array.__array_interface__["data"][0]) for array in (made.inputs[0], made.outputs[0]))
    for at, array in ((given, made.inputs[0]), (result, made.outputs[0])):
        contents[at] = array.tobytes()  # their memory may be longer, and a graph copies what it is given
    return Work(kernels, contents, given, result, [x.tobytes() for x in inputs])


def _content(buffer: Any) -> bytes:
    device = buffer.owner if buffer.owner is not None else Device["NV"]
    return bytes(device.download(buffer, buffer.size))


def _agree(what: str, ours: Sequence[Array], theirs: Sequence[Array]) -> None:
    """RecordError unless two networks computed the same, up to how halves are rounded."""
    for one, other in zip(ours, theirs, strict=True):
        if not np.allclose(one.astype(np.float32), other.astype(np.float32), rtol=1e-2, atol=1e-2):
            raise RecordError(f"{what} computes {other}, the recording {one}")


def against_graph(figure: str) -> Record:
    """Microseconds of a recorded call, beside the better of the CUDA graphs."""
    return _beside_graph(figure, WHAT, list)


def slowest_against_graph(figure: str) -> Record:
    """The 99th percentiles of batches of calls, beside those of the better of the CUDA graphs."""
    return _beside_graph(figure, f"{WHAT}; 99th percentile of {BATCH_CALLS} calls", _p99)


def _beside_graph(figure: str, what: str, summary: Callable[[Sequence[float]], list[float]]) -> Record:
    inputs = observations(CALLS)
    samples: list[float] = []
    graphs: dict[str, list[float]] = {}
    with recorded_network() as made:
        work = as_work(made, inputs)
        for _ in range(ROUNDS):
            taken, outputs = timed(caller(made), inputs)
            samples += taken
            for name, found in in_process(work).items():
                others = [one.view(np.float16).reshape(1, -1) for one in found.outputs]
                _agree(f"the CUDA graph ({name})", outputs, others)
                graphs.setdefault(name, []).extend(found.samples)
    name = min(graphs, key=lambda name: statistics.median(graphs[name]))
    return make(
        figure,
        what,
        "us",
        Side("tegrad.record", f"tegrad bench take {figure}", summary(samples)),
        larger_is_better=False,
        peer=Side("CUDA graph", f"cuGraphLaunch; buffers {name}", summary(graphs[name])),
    )


def against_jit(figure: str) -> Record:
    """Microseconds of a recorded call, beside TinyJit's."""
    inputs = observations(JIT_CALLS)
    theirs, expected = timed(jitted(), inputs)
    with recorded_network() as made:
        samples, outputs = timed(caller(made), inputs)
    _agree("TinyJit", outputs, expected)
    return make(
        figure,
        WHAT,
        "us",
        Side("tegrad.record", f"tegrad bench take {figure}", samples),
        larger_is_better=False,
        peer=Side("TinyJit", "jit(Tensor(x)).numpy()", theirs),
    )


def _p99(samples: Sequence[float]) -> list[float]:
    return [float(np.quantile(samples[at : at + BATCH_CALLS], 0.99)) for at in range(0, len(samples), BATCH_CALLS)]


def show(dependencies: Sequence[str], graphs: bool) -> None:
    """Print a line for each way to run the network, with the CUDA graphs or without."""
    inputs = observations(CALLS)

    def line(name: str, samples: Sequence[float]) -> None:
        p99 = float(np.quantile(samples, 0.99))
        print(f"{name:24} median {statistics.median(samples):8.2f} us, p99 {p99:8.2f} us", flush=True)

    for name in dependencies:
        with recorded_network(DEPENDENCIES[name]) as made:
            line(f"recorded, {name}", timed(caller(made), inputs)[0])
            work = as_work(made, inputs)
    line("TinyJit", timed(jitted(), inputs[:JIT_CALLS])[0])
    for name, found in (in_process(work) if graphs else {}).items():
        line(f"CUDA graph, {name}", found.samples)


# ---- the peer: the same kernels in a CUDA graph, through ctypes on libcuda
#
# Kernels are PTX, which the driver compiles. Two graphs are tried: input and output in host memory that the kernels
# reach across the bus, and copy nodes around the kernels.


LIBRARY: Final = "libcuda.so.1"
CTX_SCHED_SPIN: Final = 1
"""CU_CTX_SCHED_SPIN: cuStreamSynchronize polls, which answers soonest."""
NON_BLOCKING, RELAXED, MAPPED = 1, 2, 2
"""CU_STREAM_NON_BLOCKING, CU_STREAM_CAPTURE_MODE_RELAXED, CU_MEMHOSTALLOC_DEVICEMAP."""


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


def run(work: Work, library: Any = None) -> dict[str, Timed]:
    """The graph in each form, by its name; outputs are bytes."""
    cuda = Cuda(library)
    inputs = [np.frombuffer(given, np.uint8) for given in work.inputs]
    return {
        name: timed(Graph(cuda, work, mapped=mapped).call, inputs)
        for name, mapped in (("mapped", True), ("copied", False))
    }


def _bounded(run: Callable[[Work], dict[str, Timed]], work: Work, seconds: int) -> dict[str, Timed]:
    """What `run` returns, in a process that ends after so long."""
    signal.alarm(seconds)
    return run(work)


def in_process(work: Work) -> dict[str, Timed]:
    """`run`, in a process of its own. RecordError where it fails, or takes longer than GRAPH_S."""
    try:
        (found,) = spawned(_bounded, [(run, work, GRAPH_S)], 1)
    except BrokenProcessPool as error:
        raise RecordError("the CUDA graph failed: its process ended without a word") from error
    return found


# ---- what the host does


HOST_BATCHES: Final = 40
HOST_CALLS: Final = 200
"""Calls in a batch."""
DONE_VALUE: Final = 1 << 60
HOST_SOURCE: Final = 'extern "C" __global__ void add(int *state, int value) { state[threadIdx.x] += value; }'


class _Nowhere:
    """A doorbell page that nobody listens to."""

    def __setitem__(self, index: int, value: int) -> None:
        pass


@contextmanager
def done_at_once(device: NVDevice) -> Iterator[None]:
    """Whatever is submitted in here counts as done, and is never run. After it the device works on as before."""
    device.synchronize()
    before = [(fifo, fifo._doorbell, fifo.put_value) for fifo in device._fifos]
    for fifo, _, _ in before:
        fifo._doorbell, fifo.progress[0] = _Nowhere(), DONE_VALUE
    device.timeline_signal.value = DONE_VALUE
    try:
        yield
    finally:
        device.timeline_signal.value = device.timeline_value - 1
        for fifo, doorbell, put in before:  # where the GPU goes on
            fifo._doorbell, fifo.put_value, fifo._free_from = doorbell, put, put
            fifo._in_flight.clear()
            fifo.progress[0] = fifo.submissions


def calls() -> dict[str, Callable[[], object]]:
    """What is measured, by name, each called a few times already."""
    device = Device["NV"]
    x = Tensor(np.ones(12, np.float32), device="NV").realize()
    one: Any = TinyJit(lambda a: (a + 1).realize())
    weights = [Tensor(layer, device="NV").realize() for layer in mlp_weights()]
    net: Any = TinyJit(mlp(weights))
    turn = [Tensor(np.zeros((1, MLP_WIDTHS[0]), np.float16), device="NV").realize() for _ in range(3)]
    signature = (("state", 0, dtypes.int32, ()), ("value", 1, dtypes.int32, ()))
    image = compilers.compile_cuda(HOST_SOURCE, device.arch)
    add = device.runtime(TinyELF(image, "add", Target("NV", arch=device.arch), signature))
    state = device.allocator.alloc(4096)

    def next_input() -> Any:
        turn.append(turn.pop(0))
        return turn[0]

    found: dict[str, Callable[[], object]] = {
        "TinyJit, one kernel": lambda: one(x),
        "TinyJit, 12-128-128-4": lambda: net(turn[0]),
        "TinyJit, 12-128-128-4, inputs in turn": lambda: net(next_input()),
        "program": lambda: add(state, global_size=(1, 1, 1), local_size=(1, 1, 1), vals=(1,)),
        "synchronize": device.synchronize,
    }
    for call in found.values():
        for _ in range(4):
            call()
    return found


def batch_times(call: Callable[[], object], batches: int = HOST_BATCHES, count: int = HOST_CALLS) -> list[float]:
    """Microseconds of a call, the mean of each batch."""
    found = []
    for _ in range(batches):
        begun = time.perf_counter()
        for _ in range(count):
            call()
        found.append((time.perf_counter() - begun) / count * 1e6)
    return found


def show_host(batches: int) -> None:
    """Print a line for each: the best and the median batch."""
    tegrad.nv.install()
    measured = calls()
    with done_at_once(Device["NV"]):
        for name, call in measured.items():
            samples = batch_times(call, batches)
            print(f"{name:40} best {min(samples):7.2f} us, median {statistics.median(samples):7.2f} us", flush=True)
