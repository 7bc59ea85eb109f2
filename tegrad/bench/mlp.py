"""A control network of 12-128-128-4 halves, a call at a time: recorded, through TinyJit, and in a CUDA graph.

A call is what a control loop does: store the observation, run, read the action. All three run the same kernels, and
their outputs are compared before anything is reported.

    python -m tegrad.bench.mlp                             every form of the dependency, TinyJit, and CUDA graphs
    python -m tegrad.bench.mlp --dependency chain --no-graph
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit

import tegrad.nv
from tegrad.bench.cudagraph import GraphKernel, Work, in_process, timed
from tegrad.bench.record import Record, RecordError, Side, make
from tegrad.bench.rows import MLP_WIDTHS
from tegrad.nv.cubin import read_ptx
from tegrad.nv.record import LONE, Recorded, record
from tegrad.nv.replay import DEPENDENCIES, Dependency

CALLS: Final = 4_000
ROUNDS: Final = 5
"""Times that ours and the graph make their calls in turn: what else the host does comes and goes in tenths of a second,
and decides a 99th percentile."""
JIT_CALLS: Final = 1_000
BATCH_CALLS: Final = 500
"""Calls whose 99th percentile is one sample of the figure for p99."""
WHAT: Final = "one call of a 12-128-128-4 network of halves: store the input, run, read the output"

Array = NDArray[np.float16]


def network(seed: int = 0) -> list[Array]:
    """Random weights of the layers."""
    rng = np.random.default_rng(seed)
    return [(rng.standard_normal((a, b)) / a**0.5).astype(np.float16) for a, b in pairwise(MLP_WIDTHS)]


def policy(weights: Sequence[Tensor]) -> Any:
    """The network as a function of a tensor (1, 12)."""

    def apply(x: Tensor) -> Tensor:
        for layer in weights[:-1]:
            x = (x @ layer).relu()
        return x @ weights[-1]

    return apply


def observations(count: int) -> list[Array]:
    """Inputs (1, 12)."""
    rng = np.random.default_rng(1)
    return list(rng.standard_normal((count, 1, MLP_WIDTHS[0])).astype(np.float16))


@contextmanager
def recorded_network(dependency: Dependency = LONE) -> Iterator[Recorded]:
    """The network, recorded on the NV device."""
    tegrad.nv.install()
    weights = [Tensor(layer, device="NV").realize() for layer in network()]
    with record(policy(weights), np.zeros((1, MLP_WIDTHS[0]), np.float16), dependency=dependency) as made:
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
    jit: Any = TinyJit(policy([Tensor(layer, device="NV").realize() for layer in network()]))
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
        contents[at] = array.tobytes().hex()  # their memory may be longer, and a graph copies what it is given
    return Work(kernels, contents, given, result, [x.tobytes().hex() for x in inputs])


def _content(buffer: Any) -> str:
    device = buffer.owner if buffer.owner is not None else Device["NV"]
    return bytes(device.download(buffer, buffer.size)).hex()


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
                others = [np.frombuffer(bytes.fromhex(one), np.float16).reshape(1, -1) for one in found["outputs"]]
                _agree(f"the CUDA graph ({name})", outputs, others)
                graphs.setdefault(name, []).extend(found["samples"])
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


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each way to run the network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dependency", nargs="+", default=list(DEPENDENCIES), choices=DEPENDENCIES)
    parser.add_argument("--no-graph", action="store_true", help="no CUDA graph")
    asked = parser.parse_args(arguments)
    inputs = observations(CALLS)

    def show(name: str, samples: Sequence[float]) -> None:
        p99 = float(np.quantile(samples, 0.99))
        print(f"{name:24} median {statistics.median(samples):8.2f} us, p99 {p99:8.2f} us", flush=True)

    for name in asked.dependency:
        with recorded_network(DEPENDENCIES[name]) as made:
            show(f"recorded, {name}", timed(caller(made), inputs)[0])
            work = as_work(made, inputs)
    show("TinyJit", timed(jitted(), inputs[:JIT_CALLS])[0])
    for name, found in ({} if asked.no_graph else in_process(work)).items():
        show(f"CUDA graph, {name}", found["samples"])


if __name__ == "__main__":
    main()
