"""The figures of a recorded network: what the CUDA graph is given, the order of its calls, and what is compared."""

import ctypes
import os
import pickle
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tegrad.bench import mlp
from tegrad.bench.record import RecordError


class FakeCuda:
    """libcuda by name: notes the calls, hands out addresses of its own, and copies nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._kept: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in ("cuMemHostAlloc", "cuMemAlloc_v2"):
                self._kept.append(ctypes.create_string_buffer(arguments[1].value))
                arguments[0]._obj.value = ctypes.addressof(self._kept[-1])
            return 0

        return call


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """tinygrad's NV device on a board; few calls."""
    from tegrad.nv import device

    monkeypatch.setenv("TEGRAD_BOARD", "agx-orin-64gb")
    monkeypatch.setenv("DEV", "NV")
    monkeypatch.setattr(mlp, "WARM_UP_CALLS", 1)
    monkeypatch.setattr(mlp, "CALLS", 4)
    monkeypatch.setattr(mlp, "ROUNDS", 2)
    monkeypatch.setattr(mlp, "JIT_CALLS", 4)
    monkeypatch.setattr(mlp, "BATCH_CALLS", 2)
    yield
    if (opened := device._opened.get("NV")) is not None:
        opened.close()


def answers(work: mlp.Work) -> dict[str, mlp.Timed]:
    """What a graph that computes the network answers, the copied form in less time."""
    layers = [layer.astype(np.float32) for layer in mlp.mlp_weights()]
    outputs = []
    for given in work.inputs:
        x = np.frombuffer(given, np.float16).astype(np.float32)
        for layer in layers[:-1]:
            x = np.maximum(x @ layer, 0)
        outputs.append((x @ layers[-1]).astype(np.float16).view(np.uint8))
    count = len(outputs)
    return {name: mlp.Timed([us] * count, list(outputs)) for name, us in (("mapped", 9.0), ("copied", 7.0))}


@pytest.mark.board
def test_a_recorded_network_and_the_better_graph_take_turns(board: None, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[mlp.Work] = []

    def in_process(work: mlp.Work) -> Any:
        given.append(work)
        return answers(work)

    monkeypatch.setattr(mlp, "in_process", in_process)
    record = mlp.against_graph("replay-mlp-us")
    assert (len(record.ours.samples), record.peer and record.peer.samples) == (8, [7.0] * 8)
    assert record.peer is not None
    assert "copied" in record.peer.command
    work, again = given
    assert again == work
    assert [kernel.name in kernel.ptx for kernel in work.kernels] == [True] * 3
    assert work.kernels[0].buffers[1] == work.input
    assert work.kernels[-1].buffers[0] == work.output
    assert pickle.loads(pickle.dumps(work)) == work  # as its process gets it
    assert len(mlp.slowest_against_graph("replay-mlp-p99-us").ours.samples) == 4
    wrong = answers(work)
    wrong["mapped"].outputs[2] = np.zeros(8, np.uint8)
    monkeypatch.setattr(mlp, "in_process", lambda work: wrong)
    with pytest.raises(RecordError, match=r"CUDA graph \(mapped\) computes"):
        mlp.against_graph("replay-mlp-us")


@pytest.mark.board
def test_a_recorded_network_is_compared_with_tinyjit(board: None) -> None:
    record = mlp.against_jit("replay-mlp-jit-us")
    assert record.peer is not None
    assert (len(record.ours.samples), len(record.peer.samples)) == (4, 4)


@pytest.mark.board
def test_every_way_to_run_the_network_is_a_line(board: None, capsys: pytest.CaptureFixture[str]) -> None:
    mlp.show(["chain", "idle"], graphs=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["recorded, chain", "recorded, idle", "TinyJit"]


def test_a_graph_is_given_the_arrays_and_not_the_pages_that_they_lie_in(monkeypatch: pytest.MonkeyPatch) -> None:
    def page(address: int) -> tuple[Any, Any]:
        memory = np.zeros(4096, np.uint8)
        near = memory.__array_interface__["data"][0]
        owner = SimpleNamespace(download=lambda buffer, size: bytearray(size))
        buffer = SimpleNamespace(va_addr=address, size=4096, view=1, owner=owner)
        buffer.cpu_view = lambda: SimpleNamespace(addr=near)
        return buffer, memory

    (given, one), (result, other) = page(0x1000), page(0x2000)
    program = SimpleNamespace(lib=b"", name="kernel")
    launch = SimpleNamespace(program=program, buffers=(result, given), grid=(1, 1, 1), block=(32, 1, 1))
    made: Any = SimpleNamespace(
        launches=[launch], inputs=[one[:24].view(np.float16)], outputs=[other[:8].view(np.int16)]
    )
    monkeypatch.setattr(mlp, "read_ptx", lambda lib: SimpleNamespace(ptx="// kernel"))
    work = mlp.as_work(made, [np.ones(12, np.float16)])
    assert [len(content) for content in work.buffers] == [8, 24]
    found = mlp.run(work, FakeCuda())
    assert [output.tobytes() for output in found["copied"].outputs] == [bytes(8)]


def test_a_graph_is_captured_once_and_launched_for_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "WARM_UP_CALLS", 1)
    kernel = mlp.GraphKernel("// ptx", "kernel", (1, 1, 1), (32, 1, 1), (0, 1))
    work = mlp.Work([kernel, kernel], [bytes(8), b"\1" * 8], 1, 0, [b"\2" * 8] * 3)
    fake = FakeCuda()
    found = mlp.run(work, fake)
    assert {name: len(form.samples) for name, form in found.items()} == {"mapped": 3, "copied": 3}
    launches = [name for name in fake.calls if name in ("cuLaunchKernel", "cuGraphLaunch", "cuStreamSynchronize")]
    one = ["cuLaunchKernel"] * 2 + ["cuGraphLaunch", "cuStreamSynchronize"] * 4
    assert launches == one * 2
    assert fake.calls.count("cuMemcpyHtoDAsync_v2") == fake.calls.count("cuMemcpyDtoHAsync_v2") == 1


def test_without_libcuda_the_peer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "LIBRARY", "libcuda-that-is-not.so.1")
    with pytest.raises(RecordError, match="a CUDA graph needs"):
        mlp.Cuda()


def test_what_fails_in_the_graphs_process_is_told_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "run", int)  # which takes no Work
    with pytest.raises(TypeError, match="not 'Work'"):
        mlp.in_process(mlp.Work([], [], 0, 0, []))
    monkeypatch.setattr(mlp, "run", os._exit)
    with pytest.raises(RecordError, match="the CUDA graph failed"):
        mlp.in_process(3)  # type: ignore[arg-type]


def test_a_graph_that_never_ends_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlp, "run", time.sleep)
    monkeypatch.setattr(mlp, "GRAPH_S", 1)
    with pytest.raises(RecordError, match="the CUDA graph failed"):
        mlp.in_process(120)  # type: ignore[arg-type]
