"""tegrad.record: functions of tensors become recordings with arrays over their memory; what cannot is refused."""

import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from boards import open_device, use_board

import tegrad
from tegrad.nv.faults import DeviceClosed
from tegrad.nv.record import CannotRecord
from tegrad.nv.replay import RecordingClosed

pytestmark = pytest.mark.board


@pytest.fixture(params=[True, False], ids=["unified", "apart"])
def device(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A device on a board that races, as if its memory were the CPU's too or not."""
    with use_board("agx-orin-64gb:16GiB", race=20):
        opened = open_device()
        opened.iface.unified_memory = request.param
        yield opened


def tensor(*values: float) -> Any:
    from tinygrad import Tensor

    return Tensor(np.array(values, np.float32), device="NV").realize()


def test_a_network_computes_what_numpy_does_for_each_input(device: Any) -> None:
    from tinygrad import Tensor

    rng = np.random.default_rng(3)
    weights = [rng.integers(-3, 4, shape).astype(np.float16) / 4 for shape in ((12, 16), (16, 4))]
    first, second = (Tensor(weight, device="NV").realize() for weight in weights)
    with tegrad.record(lambda x: (x @ first).relu() @ second, np.zeros((1, 12), np.float16)) as recorded:
        assert len(recorded.kernels) == 2
        for _ in range(4):
            x = rng.integers(-3, 4, (1, 12)).astype(np.float16)
            recorded.inputs[0][:] = x
            recorded.run()
            expected = np.maximum(x.astype(np.float32) @ weights[0], 0) @ weights[1].astype(np.float32)
            np.testing.assert_allclose(recorded.outputs[0], expected, rtol=2e-3)


def test_several_inputs_and_outputs_keep_their_order_shapes_and_types(device: Any) -> None:
    def function(a: Any, b: Any) -> Any:
        return {"sum": a + b, "more": (a * 2, [b.cast("int32").reshape(3, 1)])}

    with tegrad.record(function, np.zeros(3, np.float32), tensor(1, 2, 3)) as recorded:
        assert [(x.shape, x.dtype) for x in recorded.inputs] == [((3,), np.float32)] * 2
        recorded.inputs[0][:] = (10, 20, 30)
        recorded.run()
        total, double, column = recorded.outputs
        assert (total.tolist(), double.tolist(), column.tolist()) == ([11, 22, 33], [20, 40, 60], [[1], [2], [3]])
        assert (column.dtype, column.shape) == (np.int32, (3, 1))


def test_what_a_function_assigns_goes_on_from_run_to_run(device: Any) -> None:
    state = tensor(0, 0)

    def step(x: Any) -> Any:
        return state.assign(state * 2 + x).realize()

    with tegrad.record(step, np.ones(2, np.float32)) as recorded:
        before = recorded.outputs[0].copy()
        for _ in range(3):
            recorded.run()
        np.testing.assert_array_equal(recorded.outputs[0], before * 8 + 7)


def test_what_a_function_assigns_to_an_input_changes_it(device: Any) -> None:
    with tegrad.record(lambda x: x.assign(x * 2 + 1).realize(), np.zeros(2, np.float32)) as recorded:
        recorded.inputs[0][:] = (1, 5)
        recorded.run()
        recorded.run()
        assert recorded.inputs[0].tolist() == recorded.outputs[0].tolist() == [7, 23]


def test_a_tinyjit_function_is_recorded_anew(device: Any) -> None:
    from tinygrad import TinyJit

    jit = TinyJit(lambda x: (x + 1).realize())
    for _ in range(3):
        jit(tensor(1, 2))
    with tegrad.record(jit, np.zeros(2, np.float32)) as recorded:
        recorded.inputs[0][:] = (5, 6)
        recorded.run()
        assert recorded.outputs[0].tolist() == [6, 7]


def test_arrays_are_the_memory_of_the_gpu(device: Any) -> None:
    with tegrad.record(lambda x: x + 1, np.zeros(4, np.float32)) as recorded:
        (launch,) = recorded._recording.launches
        addresses = {buffer.cpu_view().addr for buffer in launch.buffers}
        arrays = (*recorded.inputs, *recorded.outputs)
        assert {array.__array_interface__["data"][0] for array in arrays} == addresses


@pytest.fixture
def unified(board: str) -> Any:
    """A device on a board that races."""
    return open_device()


def test_what_cannot_be_replayed_is_refused_by_name(unified: Any) -> None:
    from tinygrad import Tensor, UOp

    zeros = np.zeros(4, np.float32)
    kept = Tensor([1.0, 2, 3, 4], device="PYTHON").realize()
    bound = UOp.variable("count", 1, 4).bind(2)
    matrix = Tensor(np.ones((2, 3), np.float32), device="NV").realize()
    cases: list[tuple[Any, Any, str]] = [
        (lambda x: x.to("PYTHON") + 1, zeros, "copies from NV to PYTHON"),
        (lambda x: kept.to("NV") + x, zeros, "copies from PYTHON to NV"),
        (lambda x: (x[:bound] + 1).sum(), zeros, "count"),
        (lambda x: (x + 1, matrix.transpose()), zeros, "output 1 is a view that is not contiguous"),
        (lambda x: x.cast("bfloat16"), zeros, "output 0 is dtypes.bfloat16"),
        (lambda x: 3, zeros, "captures nothing"),
        (lambda x: x, zeros, "captures nothing"),
        (lambda x: x + 1, [1, 2], "an example is a list"),
    ]
    for function, example, why in cases:
        with pytest.raises(CannotRecord, match=why):
            tegrad.record(function, example)


def test_a_recorded_function_leaves_nothing_behind(unified: Any) -> None:
    kept = tensor(1, 2, 3)

    def once() -> np.ndarray:
        with tegrad.record(lambda x: x * kept, np.ones(3, np.float32)) as recorded:
            recorded.run()
            return recorded.outputs[0]

    once()
    gc.collect()
    unified.allocator.free_cache()
    held = len(unified.iface.memory)
    for _ in range(3):
        array = once()
        assert array.tolist() == [1, 2, 3]
    del array
    gc.collect()
    unified.allocator.free_cache()
    assert len(unified.iface.memory) == held


def test_a_closed_recording_and_a_closed_device_say_so(unified: Any) -> None:
    recorded = tegrad.record(lambda x: x + 1, np.ones(3, np.float32))
    recorded.close()
    with pytest.raises(RecordingClosed):
        recorded.run()
    unified.close()
    for use in (recorded.run, lambda: recorded.inputs, lambda: recorded.outputs):
        with pytest.raises(DeviceClosed):
            use()
